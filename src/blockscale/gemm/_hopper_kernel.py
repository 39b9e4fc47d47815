"""FP8 blockwise GEMM for Hopper: 1x128 @ 128x128 and 1x128 @ 1x128, promoted to fp32 after every 128 of K.

    c[M, N] = sum over blocks k of (a[M, k] @ b[N, k].mT) * sa[k, M] * sb[k, N or N/128]

Persistent: one CTA per SM walks over output tiles. A producer warp fills the pipeline stages, one K-block each, by TMA.
Each consumer warpgroup owns one or two m_subtiles of 64 rows. The tensor cores sum a block of 128 with few bits, so
their result is scaled and added to an fp32 accumulator block by block. That is the format's arithmetic, and it sets the
speed limit (docs/design/gemm.md). TMA loads zeros outside the operands and stores nothing there: no size needs padding.
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
    load_out_tile,
    load_rows,
    next_stage,
    opt_barrier,
    publish_or_reduce_partial,
    release_stage,
    ring_blocks,
    skip_blocks,
    store_tile,
    work_at,
)
from ._hopper_schedule import tile_at


@gluon.jit
def _producer(operands, rings, bars, sizes, TILE: gl.constexpr, B_1X128: gl.constexpr, STREAM_K: gl.constexpr):
    a_desc, b_desc, sa_desc, sb_desc = operands
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, _ = bars
    _, _, K, _, tiles_m, tiles_n, waves = sizes
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64
    LOADS: gl.constexpr = TILE.a_loads
    sb_bytes: gl.constexpr = sb_desc.block_type.nbytes if B_1X128 else 0
    a_bytes: gl.constexpr = LOADS * a_desc.block_type.nbytes + sa_desc.block_type.nbytes
    block_bytes: gl.constexpr = a_bytes + b_desc.block_type.nbytes + sb_bytes
    blocks = gl.cdiv(K, 128)
    stage, phase = 0, 1  # all stages start empty
    for unit in range(count_work(tiles_m * tiles_n, waves, blocks, STREAM_K)):
        tile, start, stop = work_at(unit, tiles_m * tiles_n, waves, blocks, STREAM_K)
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.group_m)
        for issued in range(ring_blocks(start, stop, TILE)):
            k = start + issued
            if TILE.k_unroll > 1:
                k = k if k < stop else blocks  # past the operands: TMA loads zeros
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, block_bytes)
            tma_load(b_desc, [pn * TILE.bn, k * 128], bar, b_ring.index(stage))
            load_rows(a_desc, a_ring, bar, pm * BM, k * 128, stage, TILE)
            tma_load(sa_desc, [k, pm * BM], bar, sa_ring.index(stage))
            if B_1X128:
                tma_load(sb_desc, [k, pn * TILE.bn], bar, sb_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _multiply(rings, partial, stage, m_subtile, false_at_runtime, TILE: gl.constexpr):
    """Issue the MMA of one m_subtile and K-block, into the registers of an earlier partial result.

    false_at_runtime: use_acc as a value that the compiler cannot fold. An MMA that overwrites an earlier result keeps
    one range of registers for all of them; a fresh zero tensor would take a second range.
    """
    a_ring, b_ring, _, _ = rings
    SUBTILES_PER_LOAD: gl.constexpr = TILE.warpgroups * TILE.m_subtiles // TILE.a_loads
    a = a_ring.index(stage * TILE.a_loads + m_subtile // SUBTILES_PER_LOAD)
    if SUBTILES_PER_LOAD > 1:
        a = a.slice(m_subtile % SUBTILES_PER_LOAD * 64, 64)
    return warpgroup_mma(a, b_ring.index(stage).permute((1, 0)), partial, use_acc=false_at_runtime, is_async=True)


@gluon.jit
def _row_scales(rings, stage, m_subtile, layout: gl.constexpr, TILE: gl.constexpr):
    """Scales of a for one m_subtile, fp32 [64]."""
    _, _, sa_ring, _ = rings
    scales = sa_ring.index(stage).reshape((sa_ring.shape[2],)).slice(m_subtile * 64, 64)
    return scales.load(gl.SliceLayout(1, layout))


@gluon.jit
def _scale(rows, sb, rings, stage, layout: gl.constexpr, TILE: gl.constexpr, B_1X128: gl.constexpr):
    """Factors of a partial result: [rows, BN], or [rows, 1] if b has one scale per 128x128."""
    if B_1X128:
        _, _, _, sb_ring = rings
        BN: gl.constexpr = TILE.bn
        return rows[:, None] * sb_ring.index(stage).reshape((BN,)).load(gl.SliceLayout(0, layout))[None, :]
    else:
        return (rows * sb)[:, None]


@gluon.jit
def _block_scale(sb_at, k, B_1X128: gl.constexpr):
    """Scale of a 128x128 block of b. Loaded before its MMA and used after it: the wait for a value carried to the next
    iteration would stand at the end of each iteration."""
    if B_1X128:
        return 0.0
    else:
        return gl.load(sb_at + k)


@gluon.jit
def accumulate_m_subtiles(
    output, rings, bars, sizes, pn, start, stop, stage, phase,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, B_1X128: gl.constexpr,
):  # fmt: skip
    """Accumulators of a consumer's m_subtiles over K-blocks [start, stop), then the stage and phase that follow.

    Shared-memory loads of scales may still be in flight when a stage is released, and no thread barrier waits for them:
    TMA was seen to overwrite scales that had not been read. Hence a proxy fence after the last of these loads. Row
    scales are loaded before the MMA, which hides the fence.
    """
    _, sb_ptr, _ = output
    full, empty, _ = bars
    _, _, K, sb_stride, _, _, _ = sizes
    BN: gl.constexpr = TILE.bn
    K_UNROLL: gl.constexpr = TILE.k_unroll
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    m_subtile: gl.constexpr = CONSUMER * TILE.m_subtiles
    false_at_runtime = K < 0
    sb_at = sb_ptr + (pn * BN // 128) * sb_stride
    first = gl.zeros((64, BN), gl.float32, mma)
    even = gl.zeros((64, BN), gl.float32, mma)
    second = first
    odd = even
    if TILE.m_subtiles == 2:
        for k in range(start, stop):
            sb = _block_scale(sb_at, k, B_1X128)
            mbarrier.wait(full.index(stage), phase)
            rows = _row_scales(rings, stage, m_subtile, mma, TILE)
            even = _multiply(rings, even, stage, m_subtile, false_at_runtime, TILE)
            even = warpgroup_mma_wait(0, deps=(even,))
            first = opt_barrier(first + even * _scale(rows, sb, rings, stage, mma, TILE, B_1X128))
            rows = _row_scales(rings, stage, m_subtile + 1, mma, TILE)
            even = _multiply(rings, even, stage, m_subtile + 1, false_at_runtime, TILE)
            if not B_1X128:
                fence_async_shared()
            even = warpgroup_mma_wait(0, deps=(even,))
            scale = _scale(rows, sb, rings, stage, mma, TILE, B_1X128)
            if B_1X128:
                fence_async_shared()
            release_stage(empty, stage)
            second = opt_barrier(second + even * scale)
            stage, phase = next_stage(stage, phase, TILE.stages)
    else:
        # Within k_unroll blocks one MMA runs while the result of the one before is accumulated. None is in flight from
        # one iteration to the next: ptxas does not track it around the loop, and would wait for every MMA instruction.
        for k in range(start, stop, K_UNROLL):
            sb = _block_scale(sb_at, k, B_1X128)
            mbarrier.wait(full.index(stage), phase)
            rows = _row_scales(rings, stage, m_subtile, mma, TILE)
            even = _multiply(rings, even, stage, m_subtile, false_at_runtime, TILE)
            for i in gl.static_range(K_UNROLL):
                here, rows_here, sb_here = stage, rows, sb
                stage, phase = next_stage(stage, phase, TILE.stages)
                if i + 1 < K_UNROLL:
                    sb = _block_scale(sb_at, gl.minimum(k + i + 1, stop - 1), B_1X128)
                    mbarrier.wait(full.index(stage), phase)
                    rows = _row_scales(rings, stage, m_subtile, mma, TILE)
                    if i % 2 == 0:
                        odd = _multiply(rings, odd, stage, m_subtile, false_at_runtime, TILE)
                    else:
                        even = _multiply(rings, even, stage, m_subtile, false_at_runtime, TILE)
                if not B_1X128:
                    fence_async_shared()
                if i % 2 == 0:
                    even = warpgroup_mma_wait(1 if i + 1 < K_UNROLL else 0, deps=(even,))
                else:
                    odd = warpgroup_mma_wait(1 if i + 1 < K_UNROLL else 0, deps=(odd,))
                scale = _scale(rows_here, sb_here, rings, here, mma, TILE, B_1X128)
                if B_1X128:
                    fence_async_shared()
                release_stage(empty, here)
                if i % 2 == 0:
                    first = opt_barrier(first + even * scale)
                else:
                    first = opt_barrier(first + odd * scale)
    return first, second, stage, phase


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, counters, partials, sizes,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, B_1X128: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    STREAM_K: gl.constexpr,
):  # fmt: skip
    full, empty, c_full = bars
    M, N, K, _, tiles_m, tiles_n, waves = sizes
    m_subtiles: gl.constexpr = TILE.m_subtiles
    buffers: gl.constexpr = c_tile.shape[0] // TILE.warpgroups
    blocks = gl.cdiv(K, 128)
    stage, phase, c_phase = 0, 0, 0
    for unit in range(count_work(tiles_m * tiles_n, waves, blocks, STREAM_K)):
        tile, start, stop = work_at(unit, tiles_m * tiles_n, waves, blocks, STREAM_K)
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.group_m)
        top, column = (pm * TILE.warpgroups + CONSUMER) * m_subtiles * 64, pn * TILE.bn
        if top >= M:
            stage, phase = skip_blocks(full, empty, stage, phase, ring_blocks(start, stop, TILE), TILE.stages)
        else:
            if ACCUMULATE:
                load_out_tile(output, c_tile.index(CONSUMER), c_full.index(CONSUMER), top, column)
            first, second, stage, phase = accumulate_m_subtiles(
                output, rings, bars, sizes, pn, start, stop, stage, phase, CONSUMER, TILE, B_1X128
            )
            for i in gl.static_range(m_subtiles):
                acc = first if i == 0 else second
                buffer = c_tile.index(CONSUMER * buffers + i % buffers)
                if ACCUMULATE:
                    mbarrier.wait(c_full.index(CONSUMER), c_phase)
                    c_phase ^= 1
                else:
                    tma_store_wait(buffers - 1)  # the earlier store from this buffer has read it
                if STREAM_K:
                    owns = stop - start == blocks
                    if not owns:
                        acc, owns = publish_or_reduce_partial(
                            acc, (counters, partials, tile), CONSUMER * m_subtiles + i, sizes, TILE
                        )
                    if owns:
                        store_tile(acc, output, buffer, top + i * 64, column, N, BIAS, ACCUMULATE)
                else:
                    store_tile(acc, output, buffer, top + i * 64, column, N, BIAS, ACCUMULATE)
    tma_store_wait(0)


# Integers that change with the number of tokens (M, waves, K of wgrad) or with the layer. Triton would compile a kernel
# for each class: 1, multiples of 16, others. N stays specialized: it is the layer's, mostly a multiple of 16, and bias
# loads are wider for it.
_UNSPECIALIZED = ["M", "K", "sb_stride", "waves"]


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def scaled_mm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, c_desc, sb_ptr, bias_ptr, counters, partials, M, N, K, sb_stride, waves,
    TILE: gl.constexpr, B_1X128: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr, STREAM_K: gl.constexpr,
):  # fmt: skip
    """TILE: a `heuristics.Tile`.  B_1X128: b has scales 1x128, not 128x128.  ACCUMULATE: c += product.  STREAM_K: tiles
    after `waves` whole ones per CTA are split along K between CTAs (`_hopper_schedule`)."""
    consumers: gl.constexpr = TILE.warpgroups
    stages: gl.constexpr = TILE.stages
    BM: gl.constexpr = consumers * TILE.m_subtiles * 64
    gl.static_assert(TILE.m_subtiles == 1 or not ACCUMULATE, "`out +=` has one buffer per consumer, of one m_subtile")
    # 16-bit output tiles fit beside the stages; of 32-bit ones, one m_subtile per consumer does
    buffers: gl.constexpr = TILE.m_subtiles if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = allocate_blocks(a_desc, stages * TILE.a_loads, BM // TILE.a_loads)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    sa_ring = allocate_blocks(sa_desc, stages, 1)
    sb_ring = allocate_blocks(sb_desc, stages if B_1X128 else 1, 1)
    c_tile = allocate_blocks(c_desc, consumers * buffers, 64)
    full = allocate_barriers(stages)
    empty = allocate_barriers(stages)
    c_full = allocate_barriers(consumers)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    operands = (a_desc, b_desc, sa_desc, sb_desc)
    output = (c_desc, sb_ptr, bias_ptr)
    rings = (a_ring, b_ring, sa_ring, sb_ring)
    bars = (full, empty, c_full)
    sizes = (M, N, K, sb_stride, gl.cdiv(M, BM), gl.cdiv(N, TILE.bn), waves)
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, counters, partials, sizes,
                         0, TILE, B_1X128, BIAS, ACCUMULATE, STREAM_K)),
            (_producer, (operands, rings, bars, sizes, TILE, B_1X128, STREAM_K)),
        ], [1], [40])  # fmt: skip
    elif consumers == 2:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, counters, partials, sizes,
                         0, TILE, B_1X128, BIAS, ACCUMULATE, STREAM_K)),
            (_consumer, (output, rings, c_tile, bars, counters, partials, sizes,
                         1, TILE, B_1X128, BIAS, ACCUMULATE, STREAM_K)),
            (_producer, (operands, rings, bars, sizes, TILE, B_1X128, STREAM_K)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, counters, partials, sizes,
                         0, TILE, B_1X128, BIAS, ACCUMULATE, STREAM_K)),
            (_consumer, (output, rings, c_tile, bars, counters, partials, sizes,
                         1, TILE, B_1X128, BIAS, ACCUMULATE, STREAM_K)),
            (_consumer, (output, rings, c_tile, bars, counters, partials, sizes,
                         2, TILE, B_1X128, BIAS, ACCUMULATE, STREAM_K)),
            (_producer, (operands, rings, bars, sizes, TILE, B_1X128, STREAM_K)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 32])  # fmt: skip
