"""Grouped bf16 GEMM for Hopper, for operands that `exact_bf16` decoded from formats without tensor-core support.

    m-grouped  c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT
    k-grouped  c[g, M, N] = a[M, tokens of g] @ b[N, tokens of g].mT

Tiles, tile list and stores are those of the FP8 kernel (`_hopper_kernel.py`). A stage holds 64 of K, as many bytes as
128 of K in FP8. Sums stay in the wgmma accumulators: a stage is released while the next one is multiplied. The tensor
scales of NVFP4 multiply the fp32 sums, one after the other.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ..gemm._gluon import gl, gluon, mbarrier, tma_load, tma_store_wait, warpgroup_mma, warpgroup_mma_wait
from ..gemm._hopper_common import (
    allocate_barriers,
    allocate_blocks,
    load_out_tile,
    next_stage,
    opt_barrier,
    skip_blocks,
)
from ._hopper_tiles import count_tiles, store_rows, tile_coords

_STAGES_PER_BLOCK: gl.constexpr = gl.constexpr(2)  # a stage holds 64 of K, a K-block is 128


@gluon.jit
def _producer(operands, rings, bars, problem, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    a_desc, a_subtile_desc, b_desc = operands
    a_ring, b_ring = rings
    full, empty, _ = bars
    _, _, _, N, _ = problem
    b_bytes: gl.constexpr = b_desc.block_type.nbytes
    stage, phase = 0, 1  # all stages start empty
    for item in range(count_tiles(problem, TILE, K_GROUPED)):
        group, a_row, c_row, end, column, k_start, k_stop, _begin = tile_coords(item, problem, TILE, K_GROUPED)
        b_row = column if K_GROUPED else group * N + column
        one_subtile = end - c_row <= 64 if a_ring.shape[1] > 64 else False
        for k in range(k_start * _STAGES_PER_BLOCK, k_stop * _STAGES_PER_BLOCK):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            if one_subtile:
                mbarrier.expect(bar, a_subtile_desc.block_type.nbytes + b_bytes)
                tma_load(a_subtile_desc, [a_row, k * 64], bar, a_ring.index(stage).slice(0, 64))
            else:
                mbarrier.expect(bar, a_desc.block_type.nbytes + b_bytes)
                tma_load(a_desc, [a_row, k * 64], bar, a_ring.index(stage))
            tma_load(b_desc, [b_row, k * 64], bar, b_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _previous_stage(stage, STAGES: gl.constexpr):
    """Index of the previous stage. Computed, not carried through the loop: the compiler takes a loop variable that is
    set to the previous value of another one for loop-invariant."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _mainloop(rings, bars, blocks, stage, phase, layout: gl.constexpr, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """fp32 sums of a warpgroup's one or two m_subtiles over `blocks` stages, and the pipeline state after them."""
    a_ring, b_ring = rings
    full, empty, _ = bars
    m_subtiles: gl.constexpr = TILE.m_subtiles
    first_subtile: gl.constexpr = WARPGROUP * m_subtiles
    BN: gl.constexpr = TILE.bn
    first = gl.zeros((64, BN), gl.float32, layout)
    second = first
    for i in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        a, b = a_ring.index(stage), b_ring.index(stage).permute((1, 0))
        first = warpgroup_mma(a.slice(first_subtile * 64, 64), b, first, is_async=True)
        if m_subtiles == 2:
            second = warpgroup_mma(a.slice(first_subtile * 64 + 64, 64), b, second, is_async=True)
            first, second = warpgroup_mma_wait(2, deps=(first, second))
        else:
            first = warpgroup_mma_wait(1, deps=(first,))
        mbarrier.arrive(empty.index(_previous_stage(stage, TILE.stages)), count=1, pred=i > 0)
        stage, phase = next_stage(stage, phase, TILE.stages)
    if m_subtiles == 2:
        first, second = warpgroup_mma_wait(0, deps=(first, second))
    else:
        first = warpgroup_mma_wait(0, deps=(first,))
    mbarrier.arrive(empty.index(_previous_stage(stage, TILE.stages)), count=1, pred=blocks > 0)
    return first, second, stage, phase


@gluon.jit
def _tensor_scale(ptr, group, groups, stride):
    """Tensor scale of a group; stride 0 if all groups share one. Rows of no group read the last: their sums are 0."""
    return gl.load(ptr + gl.minimum(group, groups - 1) * stride)


@gluon.jit
def _consumer(
    output, scales, rings, c_tile, bars, problem,
    WARPGROUP: gl.constexpr, TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, c_stride, bias_ptr = output
    ga_ptr, gb_ptr, ga_stride, gb_stride = scales
    full, empty, c_full = bars
    _, groups, _, N, _ = problem
    m_subtiles: gl.constexpr = TILE.m_subtiles
    buffers: gl.constexpr = c_tile.shape[0] // TILE.warpgroups
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE.bn, 16], cga_layout=c_desc.layout.cga_layout
    )
    stage, phase, c_phase = 0, 0, 0
    for item in range(count_tiles(problem, TILE, K_GROUPED)):
        group, _a_row, c_row, end, column, k_start, k_stop, begin = tile_coords(item, problem, TILE, K_GROUPED)
        c_row += WARPGROUP * m_subtiles * 64
        blocks = (k_stop - k_start) * _STAGES_PER_BLOCK
        idle = c_row >= end
        if ACCUMULATE:
            idle = idle | (k_start >= k_stop)  # an empty K range adds nothing
        if idle:
            stage, phase = skip_blocks(full, empty, stage, phase, blocks, TILE.stages)
        else:
            bias_columns = N if group < groups else 0  # rows of no group have no bias; their sums are 0
            group_output = (c_desc, c_ptr, bias_ptr + group * N if BIAS else bias_ptr)
            if ACCUMULATE:
                load_out_tile(group_output, c_tile.index(WARPGROUP), c_full.index(WARPGROUP), c_row, column)
            first, second, stage, phase = _mainloop(rings, bars, blocks, stage, phase, mma, WARPGROUP, TILE)
            for subtile in gl.static_range(m_subtiles):
                acc = first if subtile == 0 else second
                if SCALED:
                    acc = acc * _tensor_scale(ga_ptr, group, groups, ga_stride)
                    # rounded before bias or accumulator are added: keeps the compiler from fusing into an FMA
                    acc = opt_barrier(acc * _tensor_scale(gb_ptr, group, groups, gb_stride))
                row = c_row + subtile * 64
                if ACCUMULATE:
                    mbarrier.wait(c_full.index(WARPGROUP), c_phase)
                    c_phase ^= 1
                elif subtile % buffers == 0:
                    tma_store_wait(0)  # earlier stores have read the buffers
                if row < end:
                    buffer = c_tile.index(WARPGROUP * buffers + subtile % buffers)
                    destination = (c_ptr, c_stride, N, begin, end)
                    store_rows(acc, group_output, destination, buffer, row, column, bias_columns, BIAS, ACCUMULATE)
    tma_store_wait(0)


# Integers that vary with the tokens or the layer; N and the stride of c stay specialized, see `_hopper_kernel`.
_NOT_SPECIALIZED = ["groups", "M", "K", "ga_stride", "gb_stride"]


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def grouped_mm_upcast_kernel(
    a_desc, a_subtile_desc, b_desc, c_desc, list_ptr, c_ptr, ga_ptr, gb_ptr, bias_ptr,
    groups, M, N, K, ga_stride, gb_stride, c_stride,
    TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Arguments as in the FP8 kernel.  ga_ptr, gb_ptr: fp32 tensor scales, if SCALED.  ga_stride, gb_stride: their
    group strides, 0 if all groups share one."""
    stages: gl.constexpr = TILE.stages
    consumers: gl.constexpr = TILE.warpgroups
    BM: gl.constexpr = consumers * TILE.m_subtiles * 64
    gl.static_assert(TILE.a_loads == 1, "one TMA load of a per stage")
    gl.static_assert(TILE.m_subtiles == 1 or not ACCUMULATE, "each warpgroup has one buffer, of one m_subtile of c")
    # shared memory holds all m_subtiles of a 16-bit output beside the stages, but only one per warpgroup of fp32
    buffers: gl.constexpr = TILE.m_subtiles if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = allocate_blocks(a_desc, stages, BM)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    c_tile = allocate_blocks(c_desc, consumers * buffers, 64)
    full = allocate_barriers(stages)
    empty = allocate_barriers(stages)
    c_full = allocate_barriers(consumers)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    operands = (a_desc, a_subtile_desc, b_desc)
    output = (c_desc, c_ptr, c_stride, bias_ptr)
    scales = (ga_ptr, gb_ptr, ga_stride, gb_stride)
    rings = (a_ring, b_ring)
    bars = (full, empty, c_full)
    problem = (list_ptr, groups, M, N, K)
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, scales, rings, c_tile, bars, problem, 0, TILE, K_GROUPED, BIAS, ACCUMULATE, SCALED)),
            (_producer, (operands, rings, bars, problem, TILE, K_GROUPED)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, scales, rings, c_tile, bars, problem, 0, TILE, K_GROUPED, BIAS, ACCUMULATE, SCALED)),
            (_consumer, (output, scales, rings, c_tile, bars, problem, 1, TILE, K_GROUPED, BIAS, ACCUMULATE, SCALED)),
            (_producer, (operands, rings, bars, problem, TILE, K_GROUPED)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
