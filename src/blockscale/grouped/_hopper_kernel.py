"""The grouped FP8 products of Hopper: the dense kernel's inner loop, walking over tiles of groups.

    m-grouped  c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT      b with scales 128x128, g = expert
    k-grouped  c[g, M, N] = a[M, tokens of g] @ b[N, tokens of g].mT  both with scales 1x128, tokens padded to 128

An operand has one descriptor for all groups: a group only shifts coordinates. What lies behind a group's last row is
the next group's; it is loaded, multiplied and dropped, and so are up to three rows before its first: tiles start at
multiples of four rows, because scales are fetched from multiples of 16 bytes on. A part of 64 rows that lies inside its
group is stored by the copy engine, one that crosses an end from registers, row by row, and one that lies behind it is
not multiplied at all.
Which tiles there are is read from a list on the device (`_schedule.py`), so nothing here depends on sizes of groups.
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
from ._hopper_tiles import count_tiles, fetch_codes, place_of, store_rows


@gluon.jit
def _producer(operands, rings, bars, work, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    a_desc, part_desc, b_desc, sa_desc, sb_desc = operands
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, _ = bars
    _, _, _, N, K = work
    sb_bytes: gl.constexpr = sb_desc.block_type.nbytes if K_GROUPED else 0
    scale_bytes: gl.constexpr = sa_desc.block_type.nbytes + sb_bytes
    stage, phase = 0, 1  # the ring starts empty
    for item in range(count_tiles(work, TILE, K_GROUPED)):
        group, row, top, end, column, start, stop, _begin = place_of(item, work, TILE, K_GROUPED)
        b_row = column if K_GROUPED else group * N + column
        short = end - top <= 64 if a_ring.shape[1] * TILE.a_loads > 64 else False
        for number in range(ring_blocks(start, stop, TILE)):
            k = start + number
            if TILE.k_unroll > 1:
                k = k if k < stop else gl.cdiv(K, 128)  # outside of the operands: zeros, not the next group's
            mbarrier.wait(empty[0].index(stage), phase)
            bar = full.index(stage)
            fetch_codes(
                (a_desc, part_desc, b_desc), (a_ring, b_ring), bar, row, b_row, k, stage, short, scale_bytes, TILE
            )
            tma_load(sa_desc, [k, row], bar, sa_ring.index(stage))
            if K_GROUPED:
                tma_load(sb_desc, [k, column], bar, sb_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, work,
    GROUP: gl.constexpr, TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, c_stride, sb_ptr, sb_stride, sb_group, bias_ptr = output
    full, empty, c_full = bars
    _, groups, M, N, K = work
    waves: gl.constexpr = TILE.m_subtiles
    buffers: gl.constexpr = c_tile.shape[0] // TILE.warpgroups
    sizes = (M, N, K, sb_stride, 0, 0, 0)  # as the dense kernel has them
    stage, phase, c_phase = 0, 0, 0
    for item in range(count_tiles(work, TILE, K_GROUPED)):
        group, _row_of_a, top, end, column, start, stop, begin = place_of(item, work, TILE, K_GROUPED)
        top += GROUP * waves * 64
        idle = top >= end
        if ADD:
            idle = idle | (start >= stop)  # there is nothing to add
        if idle:
            stage, phase = skip_blocks(full, empty, stage, phase, ring_blocks(start, stop, TILE), TILE.stages)
        else:
            biased = N if group < groups else 0  # rows of no group have no bias, and their sums are empty
            of_group = (c_desc, sb_ptr + group * sb_group, bias_ptr + group * N if BIAS else bias_ptr)
            if ADD:
                load_out_tile(of_group, c_tile.index(GROUP), c_full.index(GROUP), top, column)
            first, second, stage, phase = accumulate_m_subtiles(
                of_group, rings, bars, sizes, column // TILE.bn, start, stop, stage, phase,
                GROUP, TILE, K_GROUPED,
            )  # fmt: skip
            for wave in gl.static_range(waves):
                acc = first if wave == 0 else second
                row = top + wave * 64
                if ADD:
                    mbarrier.wait(c_full.index(GROUP), c_phase)
                    c_phase ^= 1
                elif wave % buffers == 0:
                    tma_store_wait(0)  # whatever was stored from the buffers has left them
                if row < end:
                    buffer = c_tile.index(GROUP * buffers + wave % buffers)
                    place = (c_ptr, c_stride, N, begin, end)
                    store_rows(acc, of_group, place, buffer, row, column, biased, BIAS, ADD)
    tma_store_wait(0)


# Numbers that follow the tokens or the layer; see the dense kernel. N and the stride of c stay special: stores from
# registers and loads of a bias are wider for multiples of 16.
_ANY_NUMBER = ["groups", "M", "K", "sb_stride", "sb_group"]


@gluon.jit(do_not_specialize=_ANY_NUMBER)
def grouped_mm_kernel(
    a_desc, part_desc, b_desc, sa_desc, sb_desc, c_desc, list_ptr, c_ptr, sb_ptr, bias_ptr,
    groups, M, N, K, sb_stride, sb_group, c_stride,
    TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """TILE: a `gemm.heuristics.Tile`.  M, N, K: of a k-grouped product its rows and columns, and all padded tokens.
    part_desc: a again, by 64 rows.  sb_stride, sb_group: from one row of b's scales to the next, and to the next
    group's.  ADD: to what c holds."""
    stages: gl.constexpr = TILE.stages
    consumers: gl.constexpr = TILE.warpgroups
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64
    gl.static_assert(TILE.cluster == 1, "a program is one multiprocessor")
    gl.static_assert(TILE.m_subtiles == 1 or not ADD, "one buffer for each group, which holds one part of c")
    # outputs of 16 bits fit beside the ring; of 32 bits, one part of each group does
    buffers: gl.constexpr = TILE.m_subtiles if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = allocate_blocks(a_desc, stages * TILE.a_loads, BM // TILE.a_loads)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    sa_ring = allocate_blocks(sa_desc, stages, 1)
    sb_ring = allocate_blocks(sb_desc, stages if K_GROUPED else 1, 1)
    c_tile = allocate_blocks(c_desc, consumers * buffers, 64)
    full = allocate_barriers(stages, 1)
    empty = (allocate_barriers(stages, 1),)
    c_full = allocate_barriers(consumers, 1)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty[0].index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    operands = (a_desc, part_desc, b_desc, sa_desc, sb_desc)
    output = (c_desc, c_ptr, c_stride, sb_ptr, sb_stride, sb_group, bias_ptr)
    rings = (a_ring, b_ring, sa_ring, sb_ring)
    bars = (full, empty, c_full)
    work = (list_ptr, groups, M, N, K)
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, work, 0, TILE, K_GROUPED, BIAS, ADD)),
            (_producer, (operands, rings, bars, work, TILE, K_GROUPED)),
        ], [1], [40])  # fmt: skip
    elif consumers == 2:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, work, 0, TILE, K_GROUPED, BIAS, ADD)),
            (_consumer, (output, rings, c_tile, bars, work, 1, TILE, K_GROUPED, BIAS, ADD)),
            (_producer, (operands, rings, bars, work, TILE, K_GROUPED)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, work, 0, TILE, K_GROUPED, BIAS, ADD)),
            (_consumer, (output, rings, c_tile, bars, work, 1, TILE, K_GROUPED, BIAS, ADD)),
            (_consumer, (output, rings, c_tile, bars, work, 2, TILE, K_GROUPED, BIAS, ADD)),
            (_producer, (operands, rings, bars, work, TILE, K_GROUPED)),
        ], [4, 4, 1], [TILE.registers, TILE.registers, 32])  # fmt: skip
