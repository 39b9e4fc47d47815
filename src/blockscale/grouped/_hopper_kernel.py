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
    copy_out,
    fetch_tile,
    finished,
    load_rows,
    next_stage,
    ring_blocks,
    skip_blocks,
)
from ..gemm._hopper_kernel import sums_of_parts
from ..gemm._hopper_schedule import count_turns, tile_at, turn_at


@gluon.jit
def _count(work, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    """How many tiles this program takes."""
    list_ptr, groups, M, N, _ = work
    BM: gl.constexpr = TILE.groups * TILE.waves * 64
    down = groups * gl.cdiv(M, BM) if K_GROUPED else gl.load(list_ptr)
    return count_turns(gl.program_id(0), gl.num_programs(0), down * gl.cdiv(N, TILE.bn))


@gluon.jit
def _place(item, work, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    """Where a program's next tile lies: its group; its first row of a; its first row and its group's end in c; its
    column; its blocks of K from, to: none for rows of no group, and for groups without tokens; and the first row of c
    that is its group's."""
    list_ptr, groups, M, N, K = work
    BM: gl.constexpr = TILE.groups * TILE.waves * 64
    blocks, tiles_n = gl.cdiv(K, 128), gl.cdiv(N, TILE.bn)
    tile = turn_at(item, gl.program_id(0), gl.num_programs(0))
    if K_GROUPED:
        tiles_m = gl.cdiv(M, BM)
        entry = list_ptr + tile // (tiles_m * tiles_n) * 4
        pm, pn = tile_at(tile % (tiles_m * tiles_n), tiles_m, tiles_n, TILE.band)
        group, start, count = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        top = group * M + pm * BM
        return group, pm * BM, top, group * M + M, pn * TILE.bn, start, gl.minimum(start + count, blocks), top
    else:
        pm, pn = tile_at(tile, gl.load(list_ptr), tiles_n, TILE.band)
        entry = list_ptr + (1 + pm) * 4
        row, end, group, begin = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        return group, row, row, end, pn * TILE.bn, 0, blocks if group < groups else 0, begin


@gluon.jit
def _producer(operands, rings, bars, work, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    a_desc, part_desc, b_desc, sa_desc, sb_desc = operands
    a_ring, b_ring, sa_ring, sb_ring = rings
    full, empty, _ = bars
    _, _, _, N, K = work
    LOADS: gl.constexpr = TILE.loads
    sb_bytes: gl.constexpr = sb_desc.block_type.nbytes if K_GROUPED else 0
    rest_bytes: gl.constexpr = b_desc.block_type.nbytes + sa_desc.block_type.nbytes + sb_bytes
    stage, phase = 0, 1  # the ring starts empty
    for item in range(_count(work, TILE, K_GROUPED)):
        group, row, top, end, column, start, stop, _begin = _place(item, work, TILE, K_GROUPED)
        b_row = column if K_GROUPED else group * N + column
        # of one part, the others' rows are not fetched
        short = end - top <= 64 if a_ring.shape[1] * LOADS > 64 else False
        for number in range(ring_blocks(start, stop, TILE)):
            k = start + number
            if TILE.run > 1:
                k = k if k < stop else gl.cdiv(K, 128)  # outside of the operands: zeros, not the next group's
            mbarrier.wait(empty[0].index(stage), phase)
            bar = full.index(stage)
            if short:
                mbarrier.expect(bar, part_desc.block_type.nbytes + rest_bytes)
                tma_load(part_desc, [row, k * 128], bar, a_ring.index(stage * LOADS).slice(0, 64))
            else:
                mbarrier.expect(bar, LOADS * a_desc.block_type.nbytes + rest_bytes)
                load_rows(a_desc, a_ring, bar, row, k * 128, stage, TILE)
            tma_load(b_desc, [b_row, k * 128], bar, b_ring.index(stage))
            tma_load(sa_desc, [k, row], bar, sa_ring.index(stage))
            if K_GROUPED:
                tma_load(sb_desc, [k, column], bar, sb_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _store(acc, output, c_place, buffer, row, column, biased, BIAS: gl.constexpr, ADD: gl.constexpr):
    """64 rows, of which those of the group are written.  biased: columns that have a bias."""
    c_desc, _, _ = output
    c_ptr, c_stride, N, begin, end = c_place
    acc = finished(acc, output, buffer, column, biased, BIAS, ADD)
    if (begin <= row) & (row + 64 <= end):
        copy_out(acc, c_desc, buffer, row, column)
    else:
        m = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        at = c_ptr + m.to(gl.int64)[:, None] * c_stride + n[None, :]
        gl.store(at, acc.to(c_ptr.dtype.element_ty), mask=((m >= begin) & (m < end))[:, None] & (n < N)[None, :])


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, work,
    GROUP: gl.constexpr, TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, c_stride, sb_ptr, sb_stride, sb_group, bias_ptr = output
    full, empty, c_full = bars
    _, groups, M, N, K = work
    waves: gl.constexpr = TILE.waves
    buffers: gl.constexpr = c_tile.shape[0] // TILE.groups
    sizes = (M, N, K, sb_stride, 0, 0, 0)  # as the dense kernel has them
    stage, phase, c_phase = 0, 0, 0
    for item in range(_count(work, TILE, K_GROUPED)):
        group, _row_of_a, top, end, column, start, stop, begin = _place(item, work, TILE, K_GROUPED)
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
                fetch_tile(of_group, c_tile.index(GROUP), c_full.index(GROUP), top, column)
            first, second, stage, phase = sums_of_parts(
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
                    _store(acc, of_group, place, buffer, row, column, biased, BIAS, ADD)
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
    consumers: gl.constexpr = TILE.groups
    BM: gl.constexpr = TILE.groups * TILE.waves * 64
    gl.static_assert(TILE.cluster == 1, "a program is one multiprocessor")
    gl.static_assert(TILE.waves == 1 or not ADD, "one buffer for each group, which holds one part of c")
    # outputs of 16 bits fit beside the ring; of 32 bits, one part of each group does
    buffers: gl.constexpr = TILE.waves if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = allocate_blocks(a_desc, stages * TILE.loads, BM // TILE.loads)
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
