"""FP8 blockwise GEMM for Hopper with few rows of a (M <= 32), operands swapped: weights are the MMA's M, tokens its N.

    out[m, n] = sum over blocks k of (w[n, k] @ x[m, k].mT) * sw[n or n/128, k] * sx[k, m]

With few tokens a GEMM is a read of the weights. Here every byte that TMA loads is used, accumulators take 8 or 16
registers per thread, and the small output is stored from registers, transposed. The rest is as in `_hopper_kernel`: a
producer warp fills the pipeline stages, and three consumer warpgroups multiply 64 rows of weights each.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._hopper_common import (
    allocate_barriers,
    allocate_blocks,
    load_rows,
    next_stage,
    opt_barrier,
    ring_blocks,
    skip_blocks,
)


@gluon.jit
def _producer(operands, rings, bars, sizes, TILE: gl.constexpr, W_1X128: gl.constexpr):
    w_desc, x_desc, sw_desc, sx_desc = operands
    w_ring, x_ring, sw_ring, sx_ring = rings
    full, empty = bars
    _, _, K, _, tiles = sizes
    BM: gl.constexpr = TILE.warpgroups * 64
    LOADS: gl.constexpr = TILE.a_loads
    sw_bytes: gl.constexpr = sw_desc.block_type.nbytes if W_1X128 else 0
    x_bytes: gl.constexpr = x_desc.block_type.nbytes + sx_desc.block_type.nbytes
    block_bytes: gl.constexpr = LOADS * w_desc.block_type.nbytes + x_bytes + sw_bytes
    blocks = gl.cdiv(K, 128)
    stage, phase = 0, 1  # all stages start empty
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for k in range(ring_blocks(0, blocks, TILE)):  # past the end TMA loads zeros
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, block_bytes)
            load_rows(w_desc, w_ring, bar, tile * BM, k * 128, stage, TILE)
            tma_load(x_desc, [0, k * 128], bar, x_ring.index(stage))
            tma_load(sx_desc, [k, 0], bar, sx_ring.index(stage))
            if W_1X128:
                tma_load(sw_desc, [k, tile * BM], bar, sw_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _multiply(rings, partial, stage, false_at_runtime, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """Issue the MMA of 64 rows of weights, into the registers of an earlier partial result (`_hopper_kernel`)."""
    w_ring, x_ring, _, _ = rings
    SUBTILES_PER_LOAD: gl.constexpr = TILE.warpgroups // TILE.a_loads
    w = w_ring.index(stage * TILE.a_loads + CONSUMER // SUBTILES_PER_LOAD)
    if SUBTILES_PER_LOAD > 1:
        w = w.slice(CONSUMER % SUBTILES_PER_LOAD * 64, 64)
    return warpgroup_mma(w, x_ring.index(stage).permute((1, 0)), partial, use_acc=false_at_runtime, is_async=True)


@gluon.jit
def _scale(
    rings, sw_at, k, stage, layout: gl.constexpr,
    BN: gl.constexpr, CONSUMER: gl.constexpr, W_1X128: gl.constexpr,
):  # fmt: skip
    """Factors of a partial result: [64, BN], or [1, BN] if one weight scale covers all 64 rows."""
    _, _, sw_ring, sx_ring = rings
    TOKENS: gl.constexpr = sx_ring.shape[2]
    SPAN: gl.constexpr = sw_ring.shape[2]
    tokens = sx_ring.index(stage).reshape((TOKENS,)).slice(0, BN).load(gl.SliceLayout(0, layout))
    if W_1X128:
        rows = sw_ring.index(stage).reshape((SPAN,)).slice(CONSUMER * 64, 64).load(gl.SliceLayout(1, layout))
        return rows[:, None] * tokens[None, :]
    else:
        return (tokens * gl.load(sw_at + k))[None, :]


@gluon.jit
def _accumulate(
    sw_ptr, rings, bars, sizes, row, stage, phase,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, W_1X128: gl.constexpr,
):  # fmt: skip
    """Accumulator [64, BN] of 64 rows of weights and all tokens, then the stage and phase that follow. Scales are
    loaded before the wait for their MMA, and a fence completes these loads before the stage is released."""
    full, empty = bars
    _, _, K, sw_stride, _ = sizes
    BN: gl.constexpr = TILE.bn
    K_UNROLL: gl.constexpr = TILE.k_unroll
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    blocks = gl.cdiv(K, 128)
    false_at_runtime = K < 0
    sw_at = sw_ptr + row // 128 * sw_stride
    acc = gl.zeros((64, BN), gl.float32, mma)
    even = gl.zeros((64, BN), gl.float32, mma)
    odd = even
    for k in range(0, blocks, K_UNROLL):
        mbarrier.wait(full.index(stage), phase)
        even = _multiply(rings, even, stage, false_at_runtime, CONSUMER, TILE)
        for i in gl.static_range(K_UNROLL):
            here = stage
            stage, phase = next_stage(stage, phase, TILE.stages)
            if i + 1 < K_UNROLL:
                mbarrier.wait(full.index(stage), phase)
                if i % 2 == 0:
                    odd = _multiply(rings, odd, stage, false_at_runtime, CONSUMER, TILE)
                else:
                    even = _multiply(rings, even, stage, false_at_runtime, CONSUMER, TILE)
            scale = _scale(rings, sw_at, gl.minimum(k + i, blocks - 1), here, mma, BN, CONSUMER, W_1X128)
            fence_async_shared()
            if i % 2 == 0:
                even = warpgroup_mma_wait(1 if i + 1 < K_UNROLL else 0, deps=(even,))
                mbarrier.arrive(empty.index(here), count=1)
                acc = opt_barrier(acc + even * scale)
            else:
                odd = warpgroup_mma_wait(1 if i + 1 < K_UNROLL else 0, deps=(odd,))
                mbarrier.arrive(empty.index(here), count=1)
                acc = opt_barrier(acc + odd * scale)
    return acc, stage, phase


@gluon.jit
def _store(acc, output, row, M, N, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr):
    """Epilogue: bias or `out +=` in fp32, one rounding, store from registers, transposed."""
    out_ptr, bias_ptr, m_stride, n_stride = output
    n = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    m = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    at = out_ptr + m.to(gl.int64)[None, :] * m_stride + n.to(gl.int64)[:, None] * n_stride
    inside = (n < N)[:, None] & (m < M)[None, :]
    if BIAS:
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if ACCUMULATE:
        acc = acc + gl.load(at, mask=inside, other=0.0).to(gl.float32)
    gl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _consumer(
    output, sw_ptr, rings, bars, sizes,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, W_1X128: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    full, empty = bars
    M, N, K, _, tiles = sizes
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = (tile * TILE.warpgroups + CONSUMER) * 64
        if row >= N:
            count = ring_blocks(0, gl.cdiv(K, 128), TILE)
            stage, phase = skip_blocks(full, empty, stage, phase, count, TILE.stages)
        else:
            acc, stage, phase = _accumulate(sw_ptr, rings, bars, sizes, row, stage, phase, CONSUMER, TILE, W_1X128)
            _store(acc, output, row, M, N, BIAS, ACCUMULATE)


# As in `_hopper_kernel`: one compiled kernel for all sizes. Strides stay specialized, for the stride of 1.
@gluon.jit(do_not_specialize=["M", "K", "sw_stride"])
def few_rows_kernel(
    w_desc, x_desc, sw_desc, sx_desc, out_ptr, sw_ptr, bias_ptr, M, N, K, sw_stride, m_stride, n_stride,
    TILE: gl.constexpr, W_1X128: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """TILE: `heuristics.few_rows_tile`, weights by tokens.  W_1X128: weights have scales 1x128, not 128x128.
    ACCUMULATE: out += product."""
    stages: gl.constexpr = TILE.stages
    BM: gl.constexpr = TILE.warpgroups * 64
    gl.static_assert(TILE.warpgroups == 3)
    w_ring = allocate_blocks(w_desc, stages * TILE.a_loads, BM // TILE.a_loads)
    x_ring = allocate_blocks(x_desc, stages, TILE.bn)
    sw_ring = allocate_blocks(sw_desc, stages if W_1X128 else 1, 1)
    sx_ring = allocate_blocks(sx_desc, stages, 1)
    full = allocate_barriers(stages)
    empty = allocate_barriers(stages)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=TILE.warpgroups)
    operands = (w_desc, x_desc, sw_desc, sx_desc)
    output = (out_ptr, bias_ptr, m_stride, n_stride)
    rings = (w_ring, x_ring, sw_ring, sx_ring)
    bars = (full, empty)
    sizes = (M, N, K, sw_stride, gl.cdiv(N, BM))
    gl.warp_specialize([
        (_consumer, (output, sw_ptr, rings, bars, sizes, 0, TILE, W_1X128, BIAS, ACCUMULATE)),
        (_consumer, (output, sw_ptr, rings, bars, sizes, 1, TILE, W_1X128, BIAS, ACCUMULATE)),
        (_consumer, (output, sw_ptr, rings, bars, sizes, 2, TILE, W_1X128, BIAS, ACCUMULATE)),
        (_producer, (operands, rings, bars, sizes, TILE, W_1X128)),
    ], [4, 4, 1], [TILE.registers, TILE.registers, 32])  # fmt: skip
