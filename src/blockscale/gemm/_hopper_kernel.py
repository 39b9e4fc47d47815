"""The FP8 product of Hopper: 1x128 @ 128x128 and 1x128 @ 1x128, fp32 sums promoted after every 128 of K.

    c[M, N] = sum over blocks k of (a[M, k] @ b[N, k].mT) * sa[k, M] * sb[k, N or N/128]

One program per multiprocessor walks over tiles. A producer warp fills a ring of K-blocks by TMA; each consumer
warpgroup owns one or two parts of 64 rows. The tensor cores sum a block of 128 with few bits, so what they return is
scaled and added to fp32 registers block by block: that is the format's arithmetic, and the reason for the speed limit
(docs/design/gemm.md). What lies outside the operands is loaded as zero and not stored, so no size needs padding.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ._gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._hopper_schedule import count_items, item_at, pieces_of, slot_of, tile_at

COUNTERS: gl.constexpr = gl.constexpr(1024)  # parts of shared tiles: four for each of fewer than two rounds of tiles


@gluon.jit
def _items(tiles, rounds, blocks, SHARED: gl.constexpr):
    """How many tiles, or pieces of tiles, this program works on."""
    if SHARED:
        return count_items(gl.program_id(0), gl.num_programs(0), tiles, rounds, blocks)
    else:
        return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _item(item, tiles, rounds, blocks, SHARED: gl.constexpr):
    """A tile, and its blocks of K from, to."""
    if SHARED:
        return item_at(item, gl.program_id(0), gl.num_programs(0), tiles, rounds, blocks)
    else:
        return gl.program_id(0) + item * gl.num_programs(0), 0, blocks


@gluon.jit
def _pinned(x):
    """x, in a way that the compiler cannot look through. It would move the sums of the first part below the next
    product, and the partial results of two parts do not fit in the registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _producer(operands, rings, bars, sizes, TILE: gl.constexpr, VECTOR: gl.constexpr, SHARED: gl.constexpr):
    a_desc, b_desc, sa_desc, sb_desc = operands
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, _ = bars
    _, _, K, _, tiles_m, tiles_n, rounds = sizes
    parts: gl.constexpr = TILE.groups * TILE.waves
    part_bytes: gl.constexpr = a_desc.block_type.nbytes + sa_desc.block_type.nbytes
    sb_bytes: gl.constexpr = sb_desc.block_type.nbytes if VECTOR else 0
    blocks = gl.cdiv(K, 128)
    stage, phase = 0, 1  # the ring starts empty
    for item in range(_items(tiles_m * tiles_n, rounds, blocks, SHARED)):
        tile, start, stop = _item(item, tiles_m * tiles_n, rounds, blocks, SHARED)
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.band)
        row, column = pm * (parts * 64), pn * TILE.bn
        for k in range(start, stop):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, parts * part_bytes + b_desc.block_type.nbytes + sb_bytes)
            tma_load(b_desc, [column, k * 128], bar, b_ring.index(stage))
            for part in gl.static_range(parts):
                a_to, sa_to = a_ring.index(stage * parts + part), sa_ring.index(stage * parts + part)
                if TILE.rows < 64:  # the rest of the part is never stored, so it need not be loaded
                    a_to, sa_to = a_to.slice(0, TILE.rows), sa_to.slice(0, TILE.rows, 1)
                tma_load(a_desc, [row + part * 64, k * 128], bar, a_to)
                tma_load(sa_desc, [k, row + part * 64], bar, sa_to)
            if VECTOR:
                tma_load(sb_desc, [k, column], bar, sb_ring.index(stage))
            stage += 1
            if stage == TILE.stages:
                stage = 0
                phase ^= 1


@gluon.jit
def _gathered(acc, place, part, sizes, TILE: gl.constexpr):
    """A piece of a shared tile: leave it in the workspace, and whoever is last adds all pieces, in their order.

    Returns the sum, and whether this program was the last.
    """
    workspace, tile = place
    _, _, K, _, tiles_m, tiles_n, rounds = sizes
    parts: gl.constexpr = TILE.groups * TILE.waves
    program, programs, tiles, blocks = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, gl.cdiv(K, 128)
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    # counters lie in front of the pieces
    counter = workspace.to(gl.pointer_type(gl.int32)) + (tile - rounds * programs) * parts + part
    inside = workspace + COUNTERS + part * (64 * TILE.bn) + m[:, None] * TILE.bn + n[None, :]
    begin, end = pieces_of(tile, programs, tiles, rounds, blocks)
    mine = slot_of(program, tile, programs, tiles, rounds, blocks)
    gl.store(inside + mine.to(gl.int64) * (parts * 64 * TILE.bn), acc)
    thread_barrier()  # all threads have stored before one tells
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == end - begin - 1
    if last:
        gl.store(counter, 0)  # for the next launch
        acc = gl.zeros_like(acc)
        for other in range(begin, end):
            slot = slot_of(other, tile, programs, tiles, rounds, blocks)
            # past the first-level cache, which does not see what other multiprocessors write
            acc = acc + gl.load(inside + slot.to(gl.int64) * (parts * 64 * TILE.bn), cache_modifier=".cg")
    return acc, last


@gluon.jit
def _store(acc, output, buffer, row, column, N, BIAS: gl.constexpr, ADD: gl.constexpr):
    """Bias, or what the buffer was filled with, added in fp32; then to memory."""
    c_desc, _, bias_ptr = output
    if BIAS:
        n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if ADD:
        acc = acc + buffer.load(acc.type.layout)
    buffer.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row, column], buffer)


@gluon.jit
def _skip(full, empty, stage, phase, count, STAGES: gl.constexpr):
    """A group whose rows all lie below the operand gives its blocks back."""
    for _ in range(count):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def _sums(
    output, rings, c_tile, bars, sizes, pm, pn, start, stop, stage, phase,
    GROUP: gl.constexpr, TILE: gl.constexpr, VECTOR: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The sums of a group's parts over blocks of K, and where the ring stands then."""
    c_desc, sb_ptr, _ = output
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, c_full = bars
    _, _, K, sb_stride, _, _, _ = sizes
    BN: gl.constexpr = TILE.bn
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_column: gl.constexpr = gl.SliceLayout(0, mma)
    waves: gl.constexpr = TILE.waves
    parts: gl.constexpr = TILE.groups * waves
    # Never true, which the compiler cannot know: a product that starts from the last partial result without adding it
    # keeps one range of registers for all of them. A fresh zero tensor would be a second one.
    never = K < 0
    partial = gl.zeros((64, BN), gl.float32, mma)
    first = gl.zeros((64, BN), gl.float32, mma)
    second = first
    if not VECTOR:  # one block ahead, so that no product waits for it
        sb_at = sb_ptr + (pn * BN // 128) * sb_stride
        sb_next = gl.load(sb_at + start)
    for k in range(start, stop):
        if not VECTOR:
            sb = sb_next
            sb_next = gl.load(sb_at + gl.minimum(k + 1, stop - 1))
        mbarrier.wait(full.index(stage), phase)
        b = b_ring.index(stage).permute((1, 0))
        for wave in gl.static_range(waves):
            part = stage * parts + GROUP * waves + wave
            partial = warpgroup_mma(a_ring.index(part), b, partial, use_acc=never, is_async=True)
            if VECTOR:  # after the wait: before it they would not fit in the registers
                partial = warpgroup_mma_wait(0, deps=(partial,))
                rows = sa_ring.index(part).reshape((64,)).load(by_row)
                scale = rows[:, None] * sb_ring.index(stage).reshape((BN,)).load(by_column)[None, :]
            else:
                scale = (sa_ring.index(part).reshape((64,)).load(by_row) * sb)[:, None]
                partial = warpgroup_mma_wait(0, deps=(partial,))
            if wave == waves - 1:
                # Loads of scales may still be under way, and no barrier of threads waits for them: without this
                # fence the copy engine was seen to overwrite what had not been read.
                fence_async_shared()
                mbarrier.arrive(empty.index(stage), count=1)
            if wave == 0:
                first = _pinned(first + partial * scale)
            else:
                second = _pinned(second + partial * scale)
        if ADD and k == gl.minimum(start + 2, stop - 1):  # by then the last store has left the buffer
            tma_store_wait(0)
            thread_barrier()
            mbarrier.expect(c_full.index(GROUP), c_desc.block_type.nbytes)
            tma_load(c_desc, [(pm * parts + GROUP) * 64, pn * BN], c_full.index(GROUP), c_tile.index(GROUP))
        stage += 1
        if stage == TILE.stages:
            stage = 0
            phase ^= 1
    return first, second, stage, phase


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, workspace, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    full, empty, c_full = bars
    M, N, K, _, tiles_m, tiles_n, rounds = sizes
    waves: gl.constexpr = TILE.waves
    parts: gl.constexpr = TILE.groups * waves
    buffers: gl.constexpr = c_tile.shape[0] // TILE.groups
    blocks = gl.cdiv(K, 128)
    stage, phase, c_phase = 0, 0, 0
    for item in range(_items(tiles_m * tiles_n, rounds, blocks, SHARED)):
        tile, start, stop = _item(item, tiles_m * tiles_n, rounds, blocks, SHARED)
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.band)
        if (pm * parts + GROUP * waves) * 64 >= M:
            stage, phase = _skip(full, empty, stage, phase, stop - start, TILE.stages)
        else:
            first, second, stage, phase = _sums(
                output, rings, c_tile, bars, sizes, pm, pn, start, stop, stage, phase, GROUP, TILE, VECTOR, ADD
            )
            for wave in gl.static_range(waves):
                part = GROUP * waves + wave
                acc = first if wave == 0 else second
                buffer = c_tile.index(GROUP * buffers + wave % buffers)
                row, column = (pm * parts + part) * 64, pn * TILE.bn
                if ADD:
                    mbarrier.wait(c_full.index(GROUP), c_phase)
                    c_phase ^= 1
                else:
                    tma_store_wait(buffers - 1)  # an earlier store has read the buffer that is filled now
                if SHARED:
                    ready = stop - start == blocks
                    if not ready:
                        acc, ready = _gathered(acc, (workspace, tile), part, sizes, TILE)
                    if ready:
                        _store(acc, output, buffer, row, column, N, BIAS, ADD)
                else:
                    _store(acc, output, buffer, row, column, N, BIAS, ADD)
    tma_store_wait(0)


@gluon.jit
def scaled_mm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, c_desc, sb_ptr, bias_ptr, workspace, M, N, K, sb_stride, rounds,
    TILE: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """TILE: a `heuristics.Tile`.  VECTOR: b has scales 1x128, not 128x128.  ADD: to what c holds.  SHARED: tiles past
    `rounds` of them for each program are shared between programs (`_hopper_schedule`)."""
    groups: gl.constexpr = TILE.groups
    stages: gl.constexpr = TILE.stages
    parts: gl.constexpr = groups * TILE.waves
    gl.static_assert(TILE.waves == 1 or not ADD, "one buffer for each group, which holds one part of c")
    # outputs of 16 bits fit beside the ring; of 32 bits, one part of each group does
    buffers: gl.constexpr = TILE.waves if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [TILE.stages * parts, 64, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [TILE.stages, TILE.bn, 128], b_desc.layout)
    sa_ring = gl.allocate_shared_memory(gl.float32, [TILE.stages * parts, 1, 64], sa_desc.layout)
    sb_ring = gl.allocate_shared_memory(gl.float32, [TILE.stages if VECTOR else 1, 1, TILE.bn], sb_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, [groups * buffers, 64, TILE.bn], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [TILE.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILE.stages, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [groups, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=groups)
    for i in gl.static_range(groups):
        mbarrier.init(c_full.index(i), count=1)
    operands = (a_desc, b_desc, sa_desc, sb_desc)
    output = (c_desc, sb_ptr, bias_ptr)
    rings = (a_ring, b_ring, sa_ring, sb_ring)
    bars = (full, empty, c_full)
    sizes = (M, N, K, sb_stride, gl.cdiv(M, parts * 64), gl.cdiv(N, TILE.bn), rounds)
    if groups == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, workspace, sizes, 0, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR, SHARED)),
        ], [1], [40])  # fmt: skip
    elif groups == 2:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, workspace, sizes, 0, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_consumer, (output, rings, c_tile, bars, workspace, sizes, 1, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR, SHARED)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, workspace, sizes, 0, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_consumer, (output, rings, c_tile, bars, workspace, sizes, 1, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_consumer, (output, rings, c_tile, bars, workspace, sizes, 2, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR, SHARED)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 32])  # fmt: skip
