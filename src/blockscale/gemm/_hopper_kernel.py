"""The FP8 product of Hopper: 1x128 @ 128x128 and 1x128 @ 1x128, fp32 sums promoted after every 128 of K.

    c[M, N] = sum over blocks k of (a[M, k] @ b[N, k].mT) * sa[k, M] * sb[k, N or N/128]

One program per multiprocessor walks over tiles. A producer warp fills a ring of K-blocks by TMA; each consumer
warpgroup owns one or two parts of 64 rows. The tensor cores sum a block of 128 with few bits, so what they return is
scaled and added to fp32 registers block by block: that is the format's arithmetic, and the reason for the speed limit
(docs/design/gemm.md). What lies outside the operands is loaded as zero and not stored, so no size needs padding.

A program may be a cluster of two multiprocessors: then a part has 128 rows, 64 on each, and b is fetched once for both.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ._gluon import fence_async_shared, gl, gluon, mbarrier, tma_load, tma_store_wait, warpgroup_mma, warpgroup_mma_wait
from ._hopper_common import (
    allocate_barriers,
    allocate_blocks,
    count_work,
    fetch_tile,
    gathered,
    load_rows,
    next_stage,
    opt_barrier,
    release_stage,
    ring_blocks,
    skip_blocks,
    store_tile,
    work_at,
)
from ._hopper_schedule import tile_at


@gluon.jit
def _producer(operands, rings, bars, sizes, TILE: gl.constexpr, VECTOR: gl.constexpr, SHARED: gl.constexpr):
    a_desc, b_desc, sa_desc, sb_desc = operands
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, _ = bars
    _, _, K, _, tiles_m, tiles_n, rounds = sizes
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64 * TILE.cluster
    LOADS: gl.constexpr = TILE.a_loads
    sb_bytes: gl.constexpr = sb_desc.block_type.nbytes if VECTOR else 0
    a_bytes: gl.constexpr = LOADS * a_desc.block_type.nbytes // TILE.cluster + sa_desc.block_type.nbytes
    block_bytes: gl.constexpr = a_bytes + b_desc.block_type.nbytes + sb_bytes
    blocks = gl.cdiv(K, 128)
    stage, phase = 0, 1  # the ring starts empty
    for item in range(count_work(tiles_m * tiles_n, rounds, blocks, SHARED)):
        tile, start, stop = work_at(item, tiles_m * tiles_n, rounds, blocks, SHARED)
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.group_m)
        for number in range(ring_blocks(start, stop, TILE)):
            k = start + number
            if TILE.k_unroll > 1:
                k = k if k < stop else blocks  # outside of the operands: zeros
            for who in gl.static_range(len(empty)):
                mbarrier.wait(empty[who].index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, block_bytes)
            if TILE.cluster == 1:
                tma_load(b_desc, [pn * TILE.bn, k * 128], bar, b_ring.index(stage))
            else:
                tma_load(b_desc, [pn * TILE.bn, k * 128], bar, b_ring.index(stage), multicast=True)
            load_rows(a_desc, a_ring, bar, pm * BM, k * 128, stage, TILE)
            tma_load(sa_desc, [k, pm * BM], bar, sa_ring.index(stage))
            if VECTOR:
                tma_load(sb_desc, [k, pn * TILE.bn], bar, sb_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _multiply(rings, partial, stage, part, false_at_runtime, TILE: gl.constexpr):
    """Have 64 rows of a block of K multiplied, into the registers of an earlier partial result.

    false_at_runtime: false, which the compiler cannot know. A product that starts from an earlier result without adding
    it keeps one range of registers for all of them; a fresh zero tensor would be a second one.
    """
    a_ring, b_ring, _, _ = rings
    PARTS: gl.constexpr = TILE.warpgroups * TILE.m_subtiles // TILE.a_loads  # of one load
    a = a_ring.index(stage * TILE.a_loads + part // PARTS)
    if PARTS > 1:
        a = a.slice(part % PARTS * 64, 64)
    return warpgroup_mma(a, b_ring.index(stage).permute((1, 0)), partial, use_acc=false_at_runtime, is_async=True)


@gluon.jit
def _row_scales(rings, stage, part, layout: gl.constexpr, TILE: gl.constexpr):
    """Of a part's rows of a."""
    _, _, sa_ring, _ = rings
    ROWS: gl.constexpr = 64 * TILE.cluster
    return sa_ring.index(stage).reshape((sa_ring.shape[2],)).slice(part * ROWS, ROWS).load(gl.SliceLayout(1, layout))


@gluon.jit
def _scale(rows, sb, rings, stage, layout: gl.constexpr, TILE: gl.constexpr, VECTOR: gl.constexpr):
    """Of a partial result."""
    if VECTOR:
        _, _, _, sb_ring = rings
        BN: gl.constexpr = TILE.bn
        return rows[:, None] * sb_ring.index(stage).reshape((BN,)).load(gl.SliceLayout(0, layout))[None, :]
    else:
        return (rows * sb)[:, None]


@gluon.jit
def _block_scale(sb_at, k, VECTOR: gl.constexpr):
    """Of a 128x128 block of b. Loaded before its product and used after it: a value that is carried from one block to
    the next would be waited for at the end of each."""
    if VECTOR:
        return 0.0
    else:
        return gl.load(sb_at + k)


@gluon.jit
def sums_of_parts(
    output, rings, bars, sizes, pn, start, stop, stage, phase,
    GROUP: gl.constexpr, TILE: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """The sums of a group's parts over blocks of K, and where the ring stands then.

    Loads of scales may still be under way when a block of the ring is given back, and no barrier of threads waits for
    them: the copy engine was seen to overwrite what had not been read. Hence a fence behind the last of them; scales
    of rows are loaded before the product, so that it hides in the product's time.
    """
    c_desc, sb_ptr, _ = output
    full, empty, _ = bars
    _, _, K, sb_stride, _, _, _ = sizes
    BN: gl.constexpr = TILE.bn
    RUN: gl.constexpr = TILE.k_unroll
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32], cga_layout=c_desc.layout.cga_layout
    )
    part: gl.constexpr = GROUP * TILE.m_subtiles
    false_at_runtime = K < 0
    sb_at = sb_ptr + (pn * BN // 128) * sb_stride
    first = gl.zeros((64 * TILE.cluster, BN), gl.float32, mma)
    even = gl.zeros((64 * TILE.cluster, BN), gl.float32, mma)
    second = first
    odd = even
    if TILE.m_subtiles == 2:
        for k in range(start, stop):
            sb = _block_scale(sb_at, k, VECTOR)
            mbarrier.wait(full.index(stage), phase)
            rows = _row_scales(rings, stage, part, mma, TILE)
            even = _multiply(rings, even, stage, part, false_at_runtime, TILE)
            even = warpgroup_mma_wait(0, deps=(even,))
            first = opt_barrier(first + even * _scale(rows, sb, rings, stage, mma, TILE, VECTOR))
            rows = _row_scales(rings, stage, part + 1, mma, TILE)
            even = _multiply(rings, even, stage, part + 1, false_at_runtime, TILE)
            if not VECTOR:
                fence_async_shared()
            even = warpgroup_mma_wait(0, deps=(even,))
            scale = _scale(rows, sb, rings, stage, mma, TILE, VECTOR)
            if VECTOR:
                fence_async_shared()
            release_stage(empty, stage)
            second = opt_barrier(second + even * scale)
            stage, phase = next_stage(stage, phase, TILE.stages)
    else:
        # In a run of blocks one is multiplied while the one before is added. None is under way from one run to the
        # next: the assembler does not follow it around the loop, and would wait for every product.
        for k in range(start, stop, RUN):
            sb = _block_scale(sb_at, k, VECTOR)
            mbarrier.wait(full.index(stage), phase)
            rows = _row_scales(rings, stage, part, mma, TILE)
            even = _multiply(rings, even, stage, part, false_at_runtime, TILE)
            for i in gl.static_range(RUN):
                here, rows_here, sb_here = stage, rows, sb
                stage, phase = next_stage(stage, phase, TILE.stages)
                if i + 1 < RUN:
                    sb = _block_scale(sb_at, gl.minimum(k + i + 1, stop - 1), VECTOR)
                    mbarrier.wait(full.index(stage), phase)
                    rows = _row_scales(rings, stage, part, mma, TILE)
                    if i % 2 == 0:
                        odd = _multiply(rings, odd, stage, part, false_at_runtime, TILE)
                    else:
                        even = _multiply(rings, even, stage, part, false_at_runtime, TILE)
                if not VECTOR:
                    fence_async_shared()
                if i % 2 == 0:
                    even = warpgroup_mma_wait(1 if i + 1 < RUN else 0, deps=(even,))
                else:
                    odd = warpgroup_mma_wait(1 if i + 1 < RUN else 0, deps=(odd,))
                scale = _scale(rows_here, sb_here, rings, here, mma, TILE, VECTOR)
                if VECTOR:
                    fence_async_shared()
                release_stage(empty, here)
                if i % 2 == 0:
                    first = opt_barrier(first + even * scale)
                else:
                    first = opt_barrier(first + odd * scale)
    return first, second, stage, phase


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, counters, pieces, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    full, empty, c_full = bars
    M, N, K, _, tiles_m, tiles_n, rounds = sizes
    waves: gl.constexpr = TILE.m_subtiles
    ROWS: gl.constexpr = 64 * TILE.cluster
    buffers: gl.constexpr = c_tile.shape[0] // TILE.warpgroups
    blocks = gl.cdiv(K, 128)
    stage, phase, c_phase = 0, 0, 0
    for item in range(count_work(tiles_m * tiles_n, rounds, blocks, SHARED)):
        tile, start, stop = work_at(item, tiles_m * tiles_n, rounds, blocks, SHARED)
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.group_m)
        top, column = (pm * TILE.warpgroups + GROUP) * waves * ROWS, pn * TILE.bn
        if top >= M:
            stage, phase = skip_blocks(full, empty, stage, phase, ring_blocks(start, stop, TILE), TILE.stages)
        else:
            if ADD:
                fetch_tile(output, c_tile.index(GROUP), c_full.index(GROUP), top, column)
            first, second, stage, phase = sums_of_parts(
                output, rings, bars, sizes, pn, start, stop, stage, phase, GROUP, TILE, VECTOR
            )
            for wave in gl.static_range(waves):
                acc = first if wave == 0 else second
                buffer = c_tile.index(GROUP * buffers + wave % buffers)
                if ADD:
                    mbarrier.wait(c_full.index(GROUP), c_phase)
                    c_phase ^= 1
                else:
                    tma_store_wait(buffers - 1)  # an earlier store has read the buffer that is filled now
                if SHARED:
                    ready = stop - start == blocks
                    if not ready:
                        acc, ready = gathered(acc, (counters, pieces, tile), GROUP * waves + wave, sizes, TILE)
                    if ready:
                        store_tile(acc, output, buffer, top + wave * ROWS, column, N, BIAS, ADD)
                else:
                    store_tile(acc, output, buffer, top + wave * ROWS, column, N, BIAS, ADD)
    tma_store_wait(0)


# Numbers that follow the tokens (M, rounds of tiles, K of a weight's gradient) or the layer. The compiler would make a
# kernel for each of their kinds: 1, multiples of 16, others. N is the layer's, mostly a multiple of 16, and loads of a
# bias are wider for it.
_ANY_NUMBER = ["M", "K", "sb_stride", "rounds"]


@gluon.jit(do_not_specialize=_ANY_NUMBER)
def scaled_mm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, c_desc, sb_ptr, bias_ptr, counters, pieces, M, N, K, sb_stride, rounds,
    TILE: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """TILE: a `heuristics.Tile`.  VECTOR: b has scales 1x128, not 128x128.  ADD: to what c holds.  SHARED: tiles past
    `rounds` of them for each program are shared between programs (`_hopper_schedule`)."""
    groups: gl.constexpr = TILE.warpgroups
    stages: gl.constexpr = TILE.stages
    ROWS: gl.constexpr = 64 * TILE.cluster
    BM: gl.constexpr = groups * TILE.m_subtiles * ROWS
    gl.static_assert(TILE.m_subtiles == 1 or not ADD, "one buffer for each group, which holds one part of c")
    gl.static_assert(TILE.cluster == 1 or TILE.a_loads == BM // ROWS, "a part is loaded by itself, half on each")
    gl.static_assert(TILE.cluster == 1 or not SHARED, "one multiprocessor takes a tile's number, not two")
    # outputs of 16 bits fit beside the ring; of 32 bits, one part of each group does
    buffers: gl.constexpr = TILE.m_subtiles if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = allocate_blocks(a_desc, stages * TILE.a_loads, BM // TILE.a_loads)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    sa_ring = allocate_blocks(sa_desc, stages, 1)
    sb_ring = allocate_blocks(sb_desc, stages if VECTOR else 1, 1)
    c_tile = allocate_blocks(c_desc, groups * buffers, ROWS)
    full = allocate_barriers(stages, TILE.cluster)
    empty = (allocate_barriers(stages, TILE.cluster),)
    if TILE.cluster == 2:
        # The first multiprocessor fills b's block on both, so the consumers of both arrive there (the compiler doubles
        # the count), and it alone waits.
        at_first = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout([[0]]))
        empty = (at_first, empty[0])
    c_full = allocate_barriers(groups, TILE.cluster)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        for who in gl.static_range(len(empty)):
            mbarrier.init(empty[who].index(i), count=groups)
    for i in gl.static_range(groups):
        mbarrier.init(c_full.index(i), count=1)
    operands = (a_desc, b_desc, sa_desc, sb_desc)
    output = (c_desc, sb_ptr, bias_ptr)
    rings = (a_ring, b_ring, sa_ring, sb_ring)
    bars = (full, empty, c_full)
    sizes = (M, N, K, sb_stride, gl.cdiv(M, BM), gl.cdiv(N, TILE.bn), rounds)
    if groups == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, counters, pieces, sizes, 0, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR, SHARED)),
        ], [1], [40])  # fmt: skip
    elif groups == 2:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, counters, pieces, sizes, 0, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_consumer, (output, rings, c_tile, bars, counters, pieces, sizes, 1, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR, SHARED)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, counters, pieces, sizes, 0, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_consumer, (output, rings, c_tile, bars, counters, pieces, sizes, 1, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_consumer, (output, rings, c_tile, bars, counters, pieces, sizes, 2, TILE, VECTOR, BIAS, ADD, SHARED)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR, SHARED)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 32])  # fmt: skip
