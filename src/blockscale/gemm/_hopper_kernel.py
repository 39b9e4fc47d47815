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
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _tile_at(tile, tiles_m, tiles_n, BAND: gl.constexpr):
    """Tiles follow each other down a band of BAND rows of tiles, then right: what runs at one time shares operands."""
    band = tile // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * tiles_n)
    return band * BAND + inside % height, inside // height


@gluon.jit
def _pinned(x):
    """x, in a way that the compiler cannot look through. It would move the sums of the first part below the next
    product, and the partial results of two parts do not fit in the registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _producer(operands, rings, bars, sizes, TILE: gl.constexpr, VECTOR: gl.constexpr):
    a_desc, b_desc, sa_desc, sb_desc = operands
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, _ = bars
    _, _, K, _, _, tiles_m, tiles_n = sizes
    parts: gl.constexpr = TILE.groups * TILE.waves
    part_bytes: gl.constexpr = a_desc.block_type.nbytes + sa_desc.block_type.nbytes
    sb_bytes: gl.constexpr = sb_desc.block_type.nbytes if VECTOR else 0
    stage, phase = 0, 1  # the ring starts empty
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = _tile_at(tile, tiles_m, tiles_n, TILE.band)
        row, column = pm * (parts * 64), pn * TILE.bn
        for k in range(gl.cdiv(K, 128)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, parts * part_bytes + b_desc.block_type.nbytes + sb_bytes)
            tma_load(b_desc, [column, k * 128], bar, b_ring.index(stage))
            for part in gl.static_range(parts):
                tma_load(a_desc, [row + part * 64, k * 128], bar, a_ring.index(stage * parts + part))
                tma_load(sa_desc, [k, row + part * 64], bar, sa_ring.index(stage * parts + part))
            if VECTOR:
                tma_load(sb_desc, [k, column], bar, sb_ring.index(stage))
            stage += 1
            if stage == TILE.stages:
                stage = 0
                phase ^= 1


@gluon.jit
def _finished(acc, c_ptr, bias_ptr, row, column, M, N, c_stride, BIAS: gl.constexpr, ADD: gl.constexpr):
    """Bias, or what the buffer holds already, added in fp32."""
    n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    if BIAS:
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if ADD:
        m = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        at = c_ptr + m.to(gl.int64)[:, None] * c_stride + n[None, :]
        acc = acc + gl.load(at, mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
    return acc


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, sb_ptr, bias_ptr = output
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, turn = bars
    M, N, K, sb_stride, c_stride, tiles_m, tiles_n = sizes
    BN: gl.constexpr = TILE.bn
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_column: gl.constexpr = gl.SliceLayout(0, mma)
    waves: gl.constexpr = TILE.waves
    parts: gl.constexpr = TILE.groups * waves
    buffers: gl.constexpr = c_tile.shape[0] // TILE.groups
    blocks = gl.cdiv(K, 128)
    stage, phase = 0, 0
    mine = 1 if GROUP == 0 else 0  # the first group has the first turn
    # Never true, which the compiler cannot know: a product that starts from the last partial result without adding it
    # keeps one range of registers for all of them. A fresh zero tensor would be a second one.
    never = K < 0
    zero = gl.zeros((64, BN), gl.float32, mma)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = _tile_at(tile, tiles_m, tiles_n, TILE.band)
        partial = zero
        first = gl.zeros((64, BN), gl.float32, mma)
        second = first
        if not VECTOR:  # one block ahead, so that no product waits for it
            sb_at = sb_ptr + (pn * BN // 128) * sb_stride
            sb_next = gl.load(sb_at)
        for k in range(blocks):
            if not VECTOR:
                sb = sb_next
                sb_next = gl.load(sb_at + gl.minimum(k + 1, blocks - 1))
            mbarrier.wait(full.index(stage), phase)
            b = b_ring.index(stage).permute((1, 0))
            for wave in gl.static_range(waves):
                part = stage * parts + GROUP * waves + wave
                if TILE.turns:
                    mbarrier.wait(turn.index(GROUP), mine)
                    mine ^= 1
                partial = warpgroup_mma(a_ring.index(part), b, partial, use_acc=never, is_async=True)
                if TILE.turns:
                    mbarrier.arrive(turn.index((GROUP + 1) % TILE.groups), count=1)
                if VECTOR:  # after the wait: before it they would not fit in the registers
                    partial = warpgroup_mma_wait(0, deps=(partial,))
                    rows = sa_ring.index(part).reshape((64,)).load(by_row)
                    scale = rows[:, None] * sb_ring.index(stage).reshape((BN,)).load(by_column)[None, :]
                else:
                    scale = (sa_ring.index(part).reshape((64,)).load(by_row) * sb)[:, None]
                    partial = warpgroup_mma_wait(0, deps=(partial,))
                if wave == waves - 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                if wave == 0:
                    first = _pinned(first + partial * scale)
                else:
                    second = _pinned(second + partial * scale)
            stage += 1
            if stage == TILE.stages:
                stage = 0
                phase ^= 1
        for wave in gl.static_range(waves):
            row = (pm * parts + GROUP * waves + wave) * 64
            if wave == 0:
                acc = first
            else:
                acc = second
            acc = _finished(acc, c_ptr, bias_ptr, row, pn * BN, M, N, c_stride, BIAS, ADD)
            tma_store_wait(buffers - 1)  # an earlier store has read the buffer that is filled now
            buffer = c_tile.index(GROUP * buffers + wave % buffers)
            buffer.store(acc.to(c_desc.dtype))
            fence_async_shared()
            tma_store(c_desc, [row, pn * BN], buffer)
    tma_store_wait(0)


@gluon.jit
def scaled_mm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, c_desc, c_ptr, sb_ptr, bias_ptr, M, N, K, sb_stride, c_stride,
    TILE: gl.constexpr, VECTOR: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """TILE: a `heuristics.Tile`.  VECTOR: b has scales 1x128, not 128x128.  ADD: to what c holds."""
    groups: gl.constexpr = TILE.groups
    stages: gl.constexpr = TILE.stages
    parts: gl.constexpr = groups * TILE.waves
    # outputs of 16 bits fit beside the ring; of 32 bits, one part of each group does
    buffers: gl.constexpr = TILE.waves if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [TILE.stages * parts, 64, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [TILE.stages, TILE.bn, 128], b_desc.layout)
    sa_ring = gl.allocate_shared_memory(gl.float32, [TILE.stages * parts, 1, 64], sa_desc.layout)
    sb_ring = gl.allocate_shared_memory(gl.float32, [TILE.stages if VECTOR else 1, 1, TILE.bn], sb_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, [groups * buffers, 64, TILE.bn], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [TILE.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILE.stages, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [groups, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=groups)
    for i in gl.static_range(groups):
        mbarrier.init(turn.index(i), count=1)
    operands = (a_desc, b_desc, sa_desc, sb_desc)
    output = (c_desc, c_ptr, sb_ptr, bias_ptr)
    rings = (a_ring, b_ring, sa_ring, sb_ring)
    bars = (full, empty, turn)
    sizes = (M, N, K, sb_stride, c_stride, gl.cdiv(M, parts * 64), gl.cdiv(N, TILE.bn))
    if groups == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, sizes, 0, TILE, VECTOR, BIAS, ADD)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR)),
        ], [1], [40])  # fmt: skip
    elif groups == 2:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, sizes, 0, TILE, VECTOR, BIAS, ADD)),
            (_consumer, (output, rings, c_tile, bars, sizes, 1, TILE, VECTOR, BIAS, ADD)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, sizes, 0, TILE, VECTOR, BIAS, ADD)),
            (_consumer, (output, rings, c_tile, bars, sizes, 1, TILE, VECTOR, BIAS, ADD)),
            (_consumer, (output, rings, c_tile, bars, sizes, 2, TILE, VECTOR, BIAS, ADD)),
            (_producer, (operands, rings, bars, sizes, TILE, VECTOR)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 32])  # fmt: skip
