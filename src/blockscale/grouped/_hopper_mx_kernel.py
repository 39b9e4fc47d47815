"""m-grouped MXFP8 GEMM for Hopper: the mainloop of the dense MXFP8 kernel over the tile list of the groups.

    c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT      a with scales 1x32, b with scales 128x128, g = expert

Tiles, descriptors and stores are those of `_hopper_kernel`, but a tile may start at any row: threads load the scale
bytes, as words of four along K, so the 16-byte alignment of TMA does not apply.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ..gemm._gluon import gl, gluon, mbarrier, tma_store_wait
from ..gemm._hopper_common import allocate_barriers, allocate_blocks, next_stage, skip_blocks
from ..gemm._hopper_mx_kernel import SCALERS, accumulate_k_steps, ring_blocks_mx, scale_blocks
from ._hopper_tiles import count_tiles, load_codes, store_rows, tile_coords


@gluon.jit
def _producer(operands, rings, bars, problem, TILE: gl.constexpr):
    """TMA loads of the codes; zeros beyond K."""
    a_ring, b_ring, _ = rings
    full, empty, _ = bars
    _, _, _, N, _ = problem
    stage, phase = 0, 1  # all stages start empty
    for item in range(count_tiles(problem, TILE, False)):
        group, a_row, _, end, column, _, blocks, _ = tile_coords(item, problem, TILE, False)
        one_subtile = end - a_row <= 64 if TILE.warpgroups > 1 else False
        for k in range(ring_blocks_mx(blocks, TILE)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            load_codes(operands, (a_ring, b_ring), bar, a_row, group * N + column, k, stage, one_subtile, 0, TILE)
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _scaler(scales, rings, bars, problem, TILE: gl.constexpr):
    """Row factors (scale of a times scale of b) in fp32; rows of the next group get scale byte 0 and are not stored."""
    sa_ptr, sb_ptr, sb_stride, sb_group = scales
    _, _, _, _, K = problem
    words = gl.cdiv(K, 128)
    stage, phase = 0, 1
    for item in range(count_tiles(problem, TILE, False)):
        group, a_row, _, end, column, _, blocks, _ = tile_coords(item, problem, TILE, False)
        a_ptr = sa_ptr + a_row.to(gl.int64) * words
        b_ptr = sb_ptr + group * sb_group + column // 128 * sb_stride
        k_blocks = ring_blocks_mx(blocks, TILE)
        stage, phase = scale_blocks(a_ptr, b_ptr, end - a_row, words, k_blocks, rings, bars, stage, phase, TILE)


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, problem,
    WARPGROUP: gl.constexpr, TILE: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, c_stride, bias_ptr = output
    full, empty, c_full = bars
    _, groups, _, N, K = problem
    stage, phase, c_phase = 0, 0, 0
    for item in range(count_tiles(problem, TILE, False)):
        group, _, c_row, end, column, _, blocks, begin = tile_coords(item, problem, TILE, False)
        c_row += WARPGROUP * 64
        k_blocks = ring_blocks_mx(blocks, TILE)
        idle = c_row >= end
        if ACCUMULATE:
            idle = idle | (blocks == 0)  # an empty K range adds nothing
        if idle:
            stage, phase = skip_blocks(full, empty, stage, phase, k_blocks, TILE.stages)
        else:
            group_output = (c_desc, c_ptr, bias_ptr + group * N if BIAS else bias_ptr)
            sums, stage, phase = accumulate_k_steps(
                group_output, rings, c_tile, bars, K, k_blocks, c_row, column, stage, phase, WARPGROUP, TILE, ACCUMULATE
            )  # fmt: skip
            if ACCUMULATE:
                mbarrier.wait(c_full.index(WARPGROUP), c_phase)
                c_phase ^= 1
            else:
                tma_store_wait(0)  # the previous store has read the buffer
            bias_columns = N if group < groups else 0  # rows of no group have no bias; their sums are 0
            destination = (c_ptr, c_stride, N, begin, end)
            store_rows(
                sums, group_output, destination, c_tile.index(WARPGROUP), c_row, column, bias_columns, BIAS, ACCUMULATE
            )
    tma_store_wait(0)


# Integers that vary with the tokens or the layer; N and the stride of c stay specialized, see `_hopper_kernel`.
_NOT_SPECIALIZED = ["groups", "M", "K", "sb_stride", "sb_group"]


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def grouped_mm_mx_kernel(
    a_desc, a_subtile_desc, b_desc, c_desc, list_ptr, c_ptr, sa_ptr, sb_ptr, bias_ptr,
    groups, M, N, K, sb_stride, sb_group, c_stride,
    TILE: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """a_subtile_desc: descriptor of a with boxes of 64 rows.  sa_ptr: int32 [M, K / 128], four scale bytes each.
    sb_ptr: uint8 [groups, N / 128, K / 128].  TILE: one of `heuristics.MX`.  ACCUMULATE: c += the product."""
    stages: gl.constexpr = TILE.stages
    consumers: gl.constexpr = TILE.warpgroups
    BM: gl.constexpr = consumers * 64
    gl.static_assert(TILE.m_subtiles == 1 and TILE.a_loads == 1, "one m_subtile per warpgroup, one TMA load of a")
    gl.static_assert(TILE.k_unroll % 4 == 0, "k_unroll covers whole K-blocks of 4 steps")
    gl.static_assert(128 % TILE.bn == 0, "a tile lies in one block of 128 rows of b")
    a_ring = allocate_blocks(a_desc, stages, BM)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    sa_ring = gl.allocate_shared_memory(gl.float32, [stages, 4 * BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    c_tile = allocate_blocks(c_desc, consumers, 64)
    full = allocate_barriers(stages)
    empty = allocate_barriers(stages)
    c_full = allocate_barriers(consumers)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=2)  # the producer (TMA bytes) and the scaler warps
        mbarrier.init(empty.index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    REST: gl.constexpr = (512 - consumers * TILE.registers) // 16 * 8  # of the other 5 warps, allocated as 8
    operands = (a_desc, a_subtile_desc, b_desc)
    scales = (sa_ptr, sb_ptr, sb_stride, sb_group)
    output = (c_desc, c_ptr, c_stride, bias_ptr)
    rings = (a_ring, b_ring, sa_ring)
    bars = (full, empty, c_full)
    problem = (list_ptr, groups, M, N, K)
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, problem, 0, TILE, BIAS, ACCUMULATE)),
            (_producer, (operands, rings, bars, problem, TILE)),
            (_scaler, (scales, rings, bars, problem, TILE)),
        ], [1, SCALERS], [40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, problem, 0, TILE, BIAS, ACCUMULATE)),
            (_consumer, (output, rings, c_tile, bars, problem, 1, TILE, BIAS, ACCUMULATE)),
            (_producer, (operands, rings, bars, problem, TILE)),
            (_scaler, (scales, rings, bars, problem, TILE)),
        ], [4, 1, SCALERS], [TILE.registers, REST, REST])  # fmt: skip
