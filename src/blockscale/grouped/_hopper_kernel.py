"""Grouped FP8 GEMM for Hopper: the mainloop of the dense kernel over the tile list of the groups.

    m-grouped  c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT      b with scales 128x128, g = expert
    k-grouped  c[g, M, N] = a[M, tokens of g] @ b[N, tokens of g].mT  both with scales 1x128, tokens padded to 128

An operand has one TMA descriptor for all groups; a group only shifts the coordinates. A tile may hold rows of the next
group after its last row, and up to three rows of the previous group before its first: tiles start at multiples of four
rows, because TMA loads the row scales from multiples of 16 bytes. Those rows are loaded, multiplied and dropped. An
m_subtile (64 rows) inside its group is stored by TMA; one that crosses a group boundary is stored from registers with a
mask; a warpgroup whose rows all lie past the end of the group multiplies nothing.
The tile list is read from device memory (`_schedule.py`), so nothing here depends on the group sizes.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ..gemm._gluon import gl, gluon, mbarrier, tma_load, tma_store_wait
from ..gemm._hopper_common import (
    allocate_barriers,
    allocate_blocks,
    load_out_tile,
    next_stage,
    ring_blocks,
    skip_blocks,
)
from ..gemm._hopper_kernel import accumulate_m_subtiles
from ._hopper_tiles import count_tiles, load_codes, store_rows, tile_coords


@gluon.jit
def _producer(operands, rings, bars, problem, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    a_desc, a_subtile_desc, b_desc, sa_desc, sb_desc = operands
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, _ = bars
    _, _, _, N, K = problem
    sb_bytes: gl.constexpr = sb_desc.block_type.nbytes if K_GROUPED else 0
    scale_bytes: gl.constexpr = sa_desc.block_type.nbytes + sb_bytes
    stage, phase = 0, 1  # all stages start empty
    for item in range(count_tiles(problem, TILE, K_GROUPED)):
        group, a_row, c_row, end, column, k_start, k_stop, _begin = tile_coords(item, problem, TILE, K_GROUPED)
        b_row = column if K_GROUPED else group * N + column
        one_subtile = end - c_row <= 64 if a_ring.shape[1] * TILE.a_loads > 64 else False
        for i in range(ring_blocks(k_start, k_stop, TILE)):
            k = k_start + i
            if TILE.k_unroll > 1:
                k = k if k < k_stop else gl.cdiv(K, 128)  # out of bounds: TMA loads zeros, not the next group
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            load_codes(
                (a_desc, a_subtile_desc, b_desc),
                (a_ring, b_ring),
                bar,
                a_row,
                b_row,
                k,
                stage,
                one_subtile,
                scale_bytes,
                TILE,
            )
            tma_load(sa_desc, [k, a_row], bar, sa_ring.index(stage))
            if K_GROUPED:
                tma_load(sb_desc, [k, column], bar, sb_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, problem,
    WARPGROUP: gl.constexpr, TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, c_stride, sb_ptr, sb_stride, sb_group, bias_ptr = output
    full, empty, c_full = bars
    _, groups, M, N, K = problem
    m_subtiles: gl.constexpr = TILE.m_subtiles
    buffers: gl.constexpr = c_tile.shape[0] // TILE.warpgroups
    sizes = (M, N, K, sb_stride, 0, 0, 0)  # layout of the dense kernel's tuple
    stage, phase, c_phase = 0, 0, 0
    for item in range(count_tiles(problem, TILE, K_GROUPED)):
        group, _a_row, c_row, end, column, k_start, k_stop, begin = tile_coords(item, problem, TILE, K_GROUPED)
        c_row += WARPGROUP * m_subtiles * 64
        idle = c_row >= end
        if ACCUMULATE:
            idle = idle | (k_start >= k_stop)  # an empty K range adds nothing
        if idle:
            stage, phase = skip_blocks(full, empty, stage, phase, ring_blocks(k_start, k_stop, TILE), TILE.stages)
        else:
            bias_columns = N if group < groups else 0  # rows of no group have no bias; their sums are 0
            group_output = (c_desc, sb_ptr + group * sb_group, bias_ptr + group * N if BIAS else bias_ptr)
            if ACCUMULATE:
                load_out_tile(group_output, c_tile.index(WARPGROUP), c_full.index(WARPGROUP), c_row, column)
            first, second, stage, phase = accumulate_m_subtiles(
                group_output, rings, bars, sizes, column // TILE.bn, k_start, k_stop, stage, phase,
                WARPGROUP, TILE, K_GROUPED,
            )  # fmt: skip
            for subtile in gl.static_range(m_subtiles):
                acc = first if subtile == 0 else second
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


# Integers that vary with the tokens or the layer; see the dense kernel. N and the stride of c stay specialized: stores
# from registers and loads of a bias are vectorized for multiples of 16.
_NOT_SPECIALIZED = ["groups", "M", "K", "sb_stride", "sb_group"]


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def grouped_mm_kernel(
    a_desc, a_subtile_desc, b_desc, sa_desc, sb_desc, c_desc, list_ptr, c_ptr, sb_ptr, bias_ptr,
    groups, M, N, K, sb_stride, sb_group, c_stride,
    TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Persistent, warp-specialized kernel: one producer warp, TILE.warpgroups consumer warpgroups.

    TILE: a `gemm.heuristics.Tile`.  M, N, K: for k-grouped, the rows and columns of one output and all padded tokens.
    a_subtile_desc: descriptor of a with boxes of 64 rows.  sb_stride, sb_group: row stride and group stride of the
    scales of b.  ACCUMULATE: c += the product."""
    stages: gl.constexpr = TILE.stages
    consumers: gl.constexpr = TILE.warpgroups
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64
    gl.static_assert(TILE.m_subtiles == 1 or not ACCUMULATE, "each warpgroup has one buffer, of one m_subtile of c")
    # shared memory holds all m_subtiles of a 16-bit output beside the stages, but only one per warpgroup of fp32
    buffers: gl.constexpr = TILE.m_subtiles if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = allocate_blocks(a_desc, stages * TILE.a_loads, BM // TILE.a_loads)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    sa_ring = allocate_blocks(sa_desc, stages, 1)
    sb_ring = allocate_blocks(sb_desc, stages if K_GROUPED else 1, 1)
    c_tile = allocate_blocks(c_desc, consumers * buffers, 64)
    full = allocate_barriers(stages)
    empty = allocate_barriers(stages)
    c_full = allocate_barriers(consumers)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    operands = (a_desc, a_subtile_desc, b_desc, sa_desc, sb_desc)
    output = (c_desc, c_ptr, c_stride, sb_ptr, sb_stride, sb_group, bias_ptr)
    rings = (a_ring, b_ring, sa_ring, sb_ring)
    bars = (full, empty, c_full)
    problem = (list_ptr, groups, M, N, K)
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, problem, 0, TILE, K_GROUPED, BIAS, ACCUMULATE)),
            (_producer, (operands, rings, bars, problem, TILE, K_GROUPED)),
        ], [1], [40])  # fmt: skip
    elif consumers == 2:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, problem, 0, TILE, K_GROUPED, BIAS, ACCUMULATE)),
            (_consumer, (output, rings, c_tile, bars, problem, 1, TILE, K_GROUPED, BIAS, ACCUMULATE)),
            (_producer, (operands, rings, bars, problem, TILE, K_GROUPED)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, problem, 0, TILE, K_GROUPED, BIAS, ACCUMULATE)),
            (_consumer, (output, rings, c_tile, bars, problem, 1, TILE, K_GROUPED, BIAS, ACCUMULATE)),
            (_consumer, (output, rings, c_tile, bars, problem, 2, TILE, K_GROUPED, BIAS, ACCUMULATE)),
            (_producer, (operands, rings, bars, problem, TILE, K_GROUPED)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 32])  # fmt: skip
