"""The m-grouped MXFP8 product of Hopper: the dense MXFP8 kernel's inner loop, walking over tiles of groups.

    c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT      a with scales 1x32, b with scales 128x128, g = expert

Tiles, descriptors and stores are those of `_hopper_kernel`, but tiles start at a group's first row, wherever that is:
scales are bytes that threads load, as words of four along K, so no copy engine asks for multiples of 16 bytes.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ..gemm._gluon import gl, gluon, mbarrier, tma_store_wait
from ..gemm._hopper_common import allocate_barriers, allocate_blocks, next_stage, skip_blocks
from ..gemm._hopper_mx_kernel import SCALERS, accumulate_k_steps, ring_blocks_mx, scale_blocks
from ._hopper_tiles import count_tiles, fetch_codes, place_of, store_rows


@gluon.jit
def _producer(operands, rings, bars, work, TILE: gl.constexpr):
    """Codes; those of K outside of the operands are zeros."""
    a_ring, b_ring, _ = rings
    full, empty, _ = bars
    _, _, _, N, _ = work
    stage, phase = 0, 1  # the ring starts empty
    for item in range(count_tiles(work, TILE, False)):
        group, row, _, end, column, _, blocks, _ = place_of(item, work, TILE, False)
        short = end - row <= 64 if TILE.warpgroups > 1 else False
        for k in range(ring_blocks_mx(blocks, TILE)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            fetch_codes(operands, (a_ring, b_ring), bar, row, group * N + column, k, stage, short, 0, TILE)
            stage, phase = next_stage(stage, phase, TILE.stages)


@gluon.jit
def _scaler(scales, rings, bars, work, TILE: gl.constexpr):
    """Factors; for what a tile has of the next group's rows none are loaded."""
    sa_ptr, sb_ptr, sb_stride, sb_group = scales
    _, _, _, _, K = work
    words = gl.cdiv(K, 128)
    stage, phase = 0, 1
    for item in range(count_tiles(work, TILE, False)):
        group, row, _, end, column, _, blocks, _ = place_of(item, work, TILE, False)
        a_at = sa_ptr + row.to(gl.int64) * words
        b_at = sb_ptr + group * sb_group + column // 128 * sb_stride
        count = ring_blocks_mx(blocks, TILE)
        stage, phase = scale_blocks(a_at, b_at, end - row, words, count, rings, bars, stage, phase, TILE)


@gluon.jit
def _consumer(
    output, rings, c_tile, bars, work,
    GROUP: gl.constexpr, TILE: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    c_desc, c_ptr, c_stride, bias_ptr = output
    full, empty, c_full = bars
    _, groups, _, N, K = work
    stage, phase, c_phase = 0, 0, 0
    for item in range(count_tiles(work, TILE, False)):
        group, _, top, end, column, _, blocks, begin = place_of(item, work, TILE, False)
        top += GROUP * 64
        count = ring_blocks_mx(blocks, TILE)
        idle = top >= end
        if ADD:
            idle = idle | (blocks == 0)  # there is nothing to add
        if idle:
            stage, phase = skip_blocks(full, (empty,), stage, phase, count, TILE.stages)
        else:
            of_group = (c_desc, c_ptr, bias_ptr + group * N if BIAS else bias_ptr)
            sums, stage, phase = accumulate_k_steps(
                of_group, rings, c_tile, bars, K, count, top, column, stage, phase, GROUP, TILE, ADD
            )  # fmt: skip
            if ADD:
                mbarrier.wait(c_full.index(GROUP), c_phase)
                c_phase ^= 1
            else:
                tma_store_wait(0)  # the store before has read the buffer
            biased = N if group < groups else 0  # rows of no group have no bias, and their sums are empty
            place = (c_ptr, c_stride, N, begin, end)
            store_rows(sums, of_group, place, c_tile.index(GROUP), top, column, biased, BIAS, ADD)
    tma_store_wait(0)


# Numbers that follow the tokens or the layer; N and the stride of c stay special, see `_hopper_kernel`.
_ANY_NUMBER = ["groups", "M", "K", "sb_stride", "sb_group"]


@gluon.jit(do_not_specialize=_ANY_NUMBER)
def grouped_mm_mx_kernel(
    a_desc, part_desc, b_desc, c_desc, list_ptr, c_ptr, sa_ptr, sb_ptr, bias_ptr,
    groups, M, N, K, sb_stride, sb_group, c_stride,
    TILE: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """part_desc: a again, by 64 rows.  sa_ptr: int32 [M, K / 128], four scale bytes each.  sb_ptr: bytes
    [groups, N / 128, K / 128].  TILE: of `heuristics_mx`.  ADD: to what c holds."""
    stages: gl.constexpr = TILE.stages
    consumers: gl.constexpr = TILE.warpgroups
    BM: gl.constexpr = consumers * 64
    gl.static_assert(TILE.m_subtiles == 1 and TILE.a_loads == 1, "a group has 64 rows, and all are fetched at once")
    gl.static_assert(TILE.k_unroll % 4 == 0, "runs are of whole blocks")
    gl.static_assert(128 % TILE.bn == 0, "a tile lies in one block of 128 rows of b")
    a_ring = allocate_blocks(a_desc, stages, BM)
    b_ring = allocate_blocks(b_desc, stages, TILE.bn)
    sa_ring = gl.allocate_shared_memory(gl.float32, [stages, 4 * BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    c_tile = allocate_blocks(c_desc, consumers, 64)
    full = allocate_barriers(stages, 1)
    empty = allocate_barriers(stages, 1)
    c_full = allocate_barriers(consumers, 1)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=2)  # the producer with its bytes, and the scalers
        mbarrier.init(empty.index(i), count=consumers)
    for i in gl.static_range(consumers):
        mbarrier.init(c_full.index(i), count=1)
    REST: gl.constexpr = (512 - consumers * TILE.registers) // 16 * 8  # registers of the other warps, which are 5 of 8
    operands = (a_desc, part_desc, b_desc)
    scales = (sa_ptr, sb_ptr, sb_stride, sb_group)
    output = (c_desc, c_ptr, c_stride, bias_ptr)
    rings = (a_ring, b_ring, sa_ring)
    bars = (full, empty, c_full)
    work = (list_ptr, groups, M, N, K)
    if consumers == 1:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, work, 0, TILE, BIAS, ADD)),
            (_producer, (operands, rings, bars, work, TILE)),
            (_scaler, (scales, rings, bars, work, TILE)),
        ], [1, SCALERS], [40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (output, rings, c_tile, bars, work, 0, TILE, BIAS, ADD)),
            (_consumer, (output, rings, c_tile, bars, work, 1, TILE, BIAS, ADD)),
            (_producer, (operands, rings, bars, work, TILE)),
            (_scaler, (scales, rings, bars, work, TILE)),
        ], [4, 1, SCALERS], [TILE.registers, REST, REST])  # fmt: skip
