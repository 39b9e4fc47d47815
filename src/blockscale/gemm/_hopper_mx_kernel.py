"""MXFP8 GEMM for Hopper, weights in 128x128 blocks: one E8M0 scale per 1x32 of a and per 128x128 of b, promoted to fp32
after every 32 of K.

    c[M, N] = sum over steps k of (a[M, k] @ b[N, k].mT) * sa[M, k] * sb[N / 128, k / 4]

A K-step of 32 is one MMA instruction and one block of a's format. Its result is scaled and accumulated in fp32, which
keeps the FMA units as busy as the tensor cores. So consumers have no time to decode scales: four scaler warps beside
the producer read the scale bytes and write fp32 factors into the pipeline stage.
The rest is as in `_hopper_kernel`; docs/design/mxfp8-hopper.md says why, and why b has no scale for each row.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ._gluon import gl, gluon, mbarrier, tma_load, tma_store_wait, warpgroup_mma, warpgroup_mma_wait
from ._hopper_common import (
    allocate_barriers,
    allocate_blocks,
    load_out_tile,
    load_rows,
    next_stage,
    opt_barrier,
    skip_blocks,
    store_tile,
)
from ._hopper_schedule import tile_at

SCALERS: gl.constexpr = gl.constexpr(4)  # warps: one per scheduler; with two warps, two schedulers were late
# layout of factors [rows, 4] in the scaler warps: a thread has all four of a row
_QUADS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [SCALERS.value, 1], [1, 0]))
# layout of factors [64, 4] in a consumer warpgroup: a thread has those of the two rows that it accumulates
_ROW_PAIRS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)


@gluon.jit
def factor_bits(byte):
    """The fp32 pattern of a scale byte: 2^(byte - 127), a subnormal for 0, NaN for 255. Plain arithmetic, for tests."""
    return (byte << 23) + (((byte + 1) & 254) == 0) * 0x400000


@gluon.jit
def byte_of(word, number):
    """Byte `number` of the four in an int32."""
    return (word >> (8 * number)) & 255


@gluon.jit
def _factors(bytes):
    return factor_bits(bytes).to(gl.float32, bitcast=True)


@gluon.jit
def ring_blocks_mx(blocks, TILE: gl.constexpr):
    """Number of stages filled for a tile: its K-blocks, rounded up to whole iterations of k_unroll steps of 32."""
    blocks_per_iteration: gl.constexpr = TILE.k_unroll // 4
    return gl.cdiv(blocks, blocks_per_iteration) * blocks_per_iteration


@gluon.jit
def _producer(operands, rings, bars, sizes, TILE: gl.constexpr):
    """Producer warp: TMA loads of codes, zeros outside the operands."""
    a_desc, b_desc = operands
    a_ring, b_ring, _ = rings
    full, empty, _ = bars
    _, _, K, tiles_m, tiles_n = sizes
    BM: gl.constexpr = TILE.warpgroups * 64
    block_bytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    stage, phase = 0, 1  # all stages start empty
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.group_m)
        for k in range(ring_blocks_mx(gl.cdiv(K, 128), TILE)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, block_bytes)
            tma_load(b_desc, [pn * TILE.bn, k * 128], bar, b_ring.index(stage))
            load_rows(a_desc, a_ring, bar, pm * BM, k * 128, stage, TILE)
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def scale_blocks(a_at, b_at, rows, blocks, count, rings, bars, stage, phase, TILE: gl.constexpr):
    """Write the factors of each row and K-step: the scale of a times that of b, which covers all columns of a tile.
    Returns the stage and phase that follow.

    a_at: first scale word of the tile.  b_at: its first scale byte of b.  rows: rows of a from there on.  blocks:
    K-blocks, which are words in a row.  count: stages to fill.  Threads store and load the factors, so the stages'
    mbarriers order them without a proxy fence.
    """
    _, _, sa_ring = rings
    full, empty, _ = bars
    BM: gl.constexpr = TILE.warpgroups * 64
    m = gl.arange(0, BM, gl.SliceLayout(1, _QUADS))
    steps = gl.arange(0, 4, gl.SliceLayout(0, _QUADS))[None, :]
    for k in range(count):
        # in flight while all stages are full; outside the operands codes and scale bytes are zero
        words = gl.load(a_at + m * blocks + k, mask=(m < rows) & (k < blocks), other=0)
        b_scale = gl.load(b_at + k, mask=k < blocks, other=0).to(gl.int32)
        mbarrier.wait(empty.index(stage), phase)
        factors = _factors(byte_of(words[:, None], steps)) * _factors(b_scale)
        sa_ring.index(stage).reshape((BM, 4)).store(factors)
        mbarrier.arrive(full.index(stage), count=1)
        stage, phase = next_stage(stage, phase, TILE.stages)
    return stage, phase


@gluon.jit
def _scaler(scales, rings, bars, sizes, TILE: gl.constexpr):
    """Scaler warps: factors for every tile of this CTA."""
    sa_ptr, sb_ptr, sb_stride = scales
    M, _, K, tiles_m, tiles_n = sizes
    blocks = gl.cdiv(K, 128)
    count = ring_blocks_mx(blocks, TILE)
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.group_m)
        top = pm * TILE.warpgroups * 64
        a_at, b_at = sa_ptr + top.to(gl.int64) * blocks, sb_ptr + (pn * TILE.bn // 128) * sb_stride
        stage, phase = scale_blocks(a_at, b_at, M - top, blocks, count, rings, bars, stage, phase, TILE)


@gluon.jit
def _multiply(rings, partial, stage, consumer, false_at_runtime, STEP: gl.constexpr, TILE: gl.constexpr):
    """Issue the MMA of 64 rows and one K-step, into the registers of an earlier partial result (`_hopper_kernel`)."""
    a_ring, b_ring, _ = rings
    a = a_ring.index(stage)
    if TILE.warpgroups > 1:
        a = a.slice(consumer * 64, 64)
    b = b_ring.index(stage).slice(STEP * 32, 32, 1).permute((1, 0))
    return warpgroup_mma(a.slice(STEP * 32, 32, 1), b, partial, use_acc=false_at_runtime, is_async=True)


@gluon.jit
def _row_factors(rings, stage, consumer, layout: gl.constexpr):
    """Factors of 64 rows for the four K-steps of a block, four tensors [64]."""
    _, _, sa_ring = rings
    quads = sa_ring.index(stage).reshape((sa_ring.shape[1] // 4, 4)).slice(consumer * 64, 64, 0).load(_ROW_PAIRS)
    even, odd = gl.split(quads.reshape((64, 2, 2)))
    f0, f2 = gl.split(even)
    f1, f3 = gl.split(odd)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    return (
        gl.convert_layout(f0, rows, assert_trivial=True),
        gl.convert_layout(f1, rows, assert_trivial=True),
        gl.convert_layout(f2, rows, assert_trivial=True),
        gl.convert_layout(f3, rows, assert_trivial=True),
    )


@gluon.jit
def accumulate_k_steps(
    output, rings, c_tile, bars, K, count, top, column, stage, phase,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Accumulator [64, BN] of a consumer over `count` stages, then the stage and phase that follow."""
    full, empty, c_full = bars
    BN: gl.constexpr = TILE.bn
    K_UNROLL: gl.constexpr = TILE.k_unroll
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    iterations = count // (K_UNROLL // 4)
    load_at = gl.minimum(2, iterations) - 1
    false_at_runtime = K < 0
    acc = gl.zeros((64, BN), gl.float32, mma)
    even = gl.zeros((64, BN), gl.float32, mma)
    odd = even
    for iteration in range(iterations):
        if ACCUMULATE and iteration == load_at:  # not earlier: by now the previous TMA store has read the buffer
            load_out_tile(output, c_tile.index(CONSUMER), c_full.index(CONSUMER), top, column)
        # One step's MMA runs while the result of the step before is accumulated. None is in flight from one iteration
        # to the next: ptxas does not track it around the loop, and would wait for every MMA.
        mbarrier.wait(full.index(stage), phase)
        rows = _row_factors(rings, stage, CONSUMER, mma)
        even = _multiply(rings, even, stage, CONSUMER, false_at_runtime, 0, TILE)
        for i in gl.static_range(K_UNROLL):
            here, rows_here = stage, rows
            if i % 4 == 3:
                stage, phase = next_stage(stage, phase, TILE.stages)
            if i + 1 < K_UNROLL:
                if i % 4 == 3:
                    mbarrier.wait(full.index(stage), phase)
                    rows = _row_factors(rings, stage, CONSUMER, mma)
                if i % 2 == 0:
                    odd = _multiply(rings, odd, stage, CONSUMER, false_at_runtime, (i + 1) % 4, TILE)
                else:
                    even = _multiply(rings, even, stage, CONSUMER, false_at_runtime, (i + 1) % 4, TILE)
            if i % 2 == 0:
                even = warpgroup_mma_wait(1 if i + 1 < K_UNROLL else 0, deps=(even,))
                partial = even
            else:
                odd = warpgroup_mma_wait(1 if i + 1 < K_UNROLL else 0, deps=(odd,))
                partial = odd
            if i % 4 == 3:
                mbarrier.arrive(empty.index(here), count=1)
            acc = opt_barrier(acc + partial * rows_here[i % 4][:, None])
    return acc, stage, phase


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, sizes,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    full, empty, c_full = bars
    M, N, K, tiles_m, tiles_n = sizes
    stage, phase, c_phase = 0, 0, 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pm, pn = tile_at(tile, tiles_m, tiles_n, TILE.group_m)
        top, column = (pm * TILE.warpgroups + CONSUMER) * 64, pn * TILE.bn
        count = ring_blocks_mx(gl.cdiv(K, 128), TILE)
        if top >= M:
            stage, phase = skip_blocks(full, empty, stage, phase, count, TILE.stages)
        else:
            acc, stage, phase = accumulate_k_steps(
                output, rings, c_tile, bars, K, count, top, column, stage, phase, CONSUMER, TILE, ACCUMULATE
            )  # fmt: skip
            if ACCUMULATE:
                mbarrier.wait(c_full.index(CONSUMER), c_phase)
                c_phase ^= 1
            else:
                tma_store_wait(0)  # the previous store has read the buffer
            store_tile(acc, output, c_tile.index(CONSUMER), top, column, N, BIAS, ACCUMULATE)
    tma_store_wait(0)


# sizes that change with tokens or layer compile no further kernels, see `_hopper_kernel`
@gluon.jit(do_not_specialize=["M", "K", "sb_stride"])
def scaled_mm_mx_kernel(
    a_desc, b_desc, c_desc, sa_ptr, sb_ptr, bias_ptr, M, N, K, sb_stride,
    TILE: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """sa_ptr: int32 [M, K / 128], four scale bytes each.  sb_ptr: bytes [N / 128, K / 128].  TILE: of `heuristics_mx`.
    ACCUMULATE: c += product."""
    consumers: gl.constexpr = TILE.warpgroups
    stages: gl.constexpr = TILE.stages
    BM: gl.constexpr = consumers * 64
    gl.static_assert(TILE.m_subtiles == 1 and TILE.a_loads == 1, "64 rows per consumer, one TMA load for all")
    gl.static_assert(TILE.k_unroll % 4 == 0, "k_unroll covers whole K-blocks")
    gl.static_assert(128 % TILE.bn == 0, "a tile lies in one block of 128 rows of b")
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_ring = allocate_blocks(a_desc, stages, BM)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    sa_ring = gl.allocate_shared_memory(gl.float32, [stages, 4 * BM], flat)
    c_tile = allocate_blocks(c_desc, consumers, 64)
    full = allocate_barriers(stages)
    empty = allocate_barriers(stages)
    c_full = allocate_barriers(consumers)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=2)  # the producer, with its bytes, and the scalers
        mbarrier.init(empty.index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    REST: gl.constexpr = (512 - consumers * TILE.registers) // 16 * 8  # registers of the other 5 warps, allocated as 8
    operands = (a_desc, b_desc)
    scales = (sa_ptr, sb_ptr, sb_stride)
    output = (c_desc, sb_ptr, bias_ptr)
    rings = (a_ring, b_ring, sa_ring)
    bars = (full, empty, c_full)
    sizes = (M, N, K, gl.cdiv(M, BM), gl.cdiv(N, TILE.bn))
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, sizes, 0, TILE, BIAS, ACCUMULATE)),
            (_producer, (operands, rings, bars, sizes, TILE)),
            (_scaler, (scales, rings, bars, sizes, TILE)),
        ], [1, SCALERS], [40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, sizes, 0, TILE, BIAS, ACCUMULATE)),
            (_consumer, (output, rings, c_tile, bars, sizes, 1, TILE, BIAS, ACCUMULATE)),
            (_producer, (operands, rings, bars, sizes, TILE)),
            (_scaler, (scales, rings, bars, sizes, TILE)),
        ], [4, 1, SCALERS], [TILE.registers, REST, REST])  # fmt: skip
