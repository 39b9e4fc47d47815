"""Grouped products of bf16 operands on Hopper, for formats that it has no units for: what `gemm/upcast.py` decoded.

    m-grouped  c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT
    k-grouped  c[g, M, N] = a[M, tokens of g] @ b[N, tokens of g].mT

Tiles, their list and the way to memory are those of the FP8 kernel (`_hopper_kernel.py`). A block of the ring is 64 of
K, as many bytes as there 128 are, and sums stay in the accumulators of the tensor cores: one block is multiplied while
the one before is given back. NVFP4's tensor scales are applied to the fp32 sums, one after the other.
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
from ._hopper_tiles import count_tiles, place_of, store_rows

_HALVES: gl.constexpr = gl.constexpr(2)  # blocks of the ring in one of K, which are 128


@gluon.jit
def _producer(operands, rings, bars, work, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    a_desc, part_desc, b_desc = operands
    a_ring, b_ring = rings
    full, empty, _ = bars
    _, _, _, N, _ = work
    b_bytes: gl.constexpr = b_desc.block_type.nbytes
    stage, phase = 0, 1  # the ring starts empty
    for item in range(count_tiles(work, TILE, K_GROUPED)):
        group, row, top, end, column, start, stop, _begin = place_of(item, work, TILE, K_GROUPED)
        b_row = column if K_GROUPED else group * N + column
        short = end - top <= 64 if a_ring.shape[1] > 64 else False
        for k in range(start * _HALVES, stop * _HALVES):
            mbarrier.wait(empty[0].index(stage), phase)
            bar = full.index(stage)
            if short:
                mbarrier.expect(bar, part_desc.block_type.nbytes + b_bytes)
                tma_load(part_desc, [row, k * 64], bar, a_ring.index(stage).slice(0, 64))
            else:
                mbarrier.expect(bar, a_desc.block_type.nbytes + b_bytes)
                tma_load(a_desc, [row, k * 64], bar, a_ring.index(stage))
            tma_load(b_desc, [b_row, k * 64], bar, b_ring.index(stage))
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """The block of the ring before. A variable that keeps it would not be kept: one that a loop sets to what another
    was when it began is taken for one that does not change."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _sums(rings, bars, blocks, stage, phase, layout: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Of a group's parts over so many blocks of the ring, and where the ring stands then."""
    a_ring, b_ring = rings
    full, empty, _ = bars
    waves: gl.constexpr = TILE.m_subtiles
    part: gl.constexpr = GROUP * waves
    BN: gl.constexpr = TILE.bn
    first = gl.zeros((64, BN), gl.float32, layout)
    second = first
    for number in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        a, b = a_ring.index(stage), b_ring.index(stage).permute((1, 0))
        first = warpgroup_mma(a.slice(part * 64, 64), b, first, is_async=True)
        if waves == 2:
            second = warpgroup_mma(a.slice(part * 64 + 64, 64), b, second, is_async=True)
            first, second = warpgroup_mma_wait(2, deps=(first, second))
        else:
            first = warpgroup_mma_wait(1, deps=(first,))
        mbarrier.arrive(empty[0].index(_before(stage, TILE.stages)), count=1, pred=number > 0)
        stage, phase = next_stage(stage, phase, TILE.stages)
    if waves == 2:
        first, second = warpgroup_mma_wait(0, deps=(first, second))
    else:
        first = warpgroup_mma_wait(0, deps=(first,))
    mbarrier.arrive(empty[0].index(_before(stage, TILE.stages)), count=1, pred=blocks > 0)
    return first, second, stage, phase


@gluon.jit
def _factor(at, group, groups, step):
    """A tensor scale: one for all, or one for each group; of rows of no group, whose sums are empty, none."""
    return gl.load(at + gl.minimum(group, groups - 1) * step)


@gluon.jit
def _consumer(
    output, factors, rings, c_tile, bars, work,
    GROUP: gl.constexpr, TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, c_stride, bias_ptr = output
    ga_ptr, gb_ptr, ga_step, gb_step = factors
    full, empty, c_full = bars
    _, groups, _, N, _ = work
    waves: gl.constexpr = TILE.m_subtiles
    buffers: gl.constexpr = c_tile.shape[0] // TILE.warpgroups
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE.bn, 16], cga_layout=c_desc.layout.cga_layout
    )
    stage, phase, c_phase = 0, 0, 0
    for item in range(count_tiles(work, TILE, K_GROUPED)):
        group, _row_of_a, top, end, column, start, stop, begin = place_of(item, work, TILE, K_GROUPED)
        top += GROUP * waves * 64
        blocks = (stop - start) * _HALVES
        idle = top >= end
        if ADD:
            idle = idle | (start >= stop)  # there is nothing to add
        if idle:
            stage, phase = skip_blocks(full, empty, stage, phase, blocks, TILE.stages)
        else:
            biased = N if group < groups else 0  # rows of no group have no bias, and their sums are empty
            of_group = (c_desc, c_ptr, bias_ptr + group * N if BIAS else bias_ptr)
            if ADD:
                load_out_tile(of_group, c_tile.index(GROUP), c_full.index(GROUP), top, column)
            first, second, stage, phase = _sums(rings, bars, blocks, stage, phase, mma, GROUP, TILE)
            for wave in gl.static_range(waves):
                acc = first if wave == 0 else second
                if SCALED:
                    acc = acc * _factor(ga_ptr, group, groups, ga_step)
                    # a product of its own, rounded, before anything is added: not one fused with the addition
                    acc = opt_barrier(acc * _factor(gb_ptr, group, groups, gb_step))
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


# Numbers that follow the tokens or the layer; N and the stride of c stay special, see `_hopper_kernel`.
_ANY_NUMBER = ["groups", "M", "K", "ga_step", "gb_step"]


@gluon.jit(do_not_specialize=_ANY_NUMBER)
def grouped_mm_upcast_kernel(
    a_desc, part_desc, b_desc, c_desc, list_ptr, c_ptr, ga_ptr, gb_ptr, bias_ptr,
    groups, M, N, K, ga_step, gb_step, c_stride,
    TILE: gl.constexpr, K_GROUPED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Arguments as of the FP8 kernel.  ga_ptr, gb_ptr: tensor scales in fp32, if SCALED; the steps are from one group's
    to the next, 0 for one that all have."""
    stages: gl.constexpr = TILE.stages
    consumers: gl.constexpr = TILE.warpgroups
    BM: gl.constexpr = consumers * TILE.m_subtiles * 64
    gl.static_assert(TILE.cluster == 1, "a program is one multiprocessor")
    gl.static_assert(TILE.a_loads == 1, "all rows of a are fetched at once")
    gl.static_assert(TILE.m_subtiles == 1 or not ADD, "one buffer for each group, which holds one part of c")
    # outputs of 16 bits fit beside the ring; of 32 bits, one part of each group does
    buffers: gl.constexpr = TILE.m_subtiles if c_desc.dtype.primitive_bitwidth == 16 else 1
    a_ring = allocate_blocks(a_desc, stages, BM)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    c_tile = allocate_blocks(c_desc, consumers * buffers, 64)
    full = allocate_barriers(stages, 1)
    empty = (allocate_barriers(stages, 1),)
    c_full = allocate_barriers(consumers, 1)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty[0].index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    operands = (a_desc, part_desc, b_desc)
    output = (c_desc, c_ptr, c_stride, bias_ptr)
    factors = (ga_ptr, gb_ptr, ga_step, gb_step)
    rings = (a_ring, b_ring)
    bars = (full, empty, c_full)
    work = (list_ptr, groups, M, N, K)
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, factors, rings, c_tile, bars, work, 0, TILE, K_GROUPED, BIAS, ADD, SCALED)),
            (_producer, (operands, rings, bars, work, TILE, K_GROUPED)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, factors, rings, c_tile, bars, work, 0, TILE, K_GROUPED, BIAS, ADD, SCALED)),
            (_consumer, (output, factors, rings, c_tile, bars, work, 1, TILE, K_GROUPED, BIAS, ADD, SCALED)),
            (_producer, (operands, rings, bars, work, TILE, K_GROUPED)),
        ], [4, 1], [TILE.registers, 40])  # fmt: skip
