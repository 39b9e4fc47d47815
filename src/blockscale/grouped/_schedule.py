"""Lists of tiles, made on the device from the ends of groups: what a kernel walks over and the host never knows.

Sizes of lists follow from static sizes alone, so a captured graph serves any groups. Ends that descend or lie past the
rows, and starts before the end of a group in front, are clamped: whatever they are, a tile lies inside the rows, and
no two share one.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, int32

from ..casts._launch_cache import CachedLaunch, launch_cached
from ..casts._source import power_of_two
from ..formats.layout import GROUP_ALIGN, ceil_div
from ..library import empty

MOST_GROUPS = 1024
_PROGRAMS, _CHUNK = 32, 16
STEP = 4  # rows: the copy engine fetches scales of rows from multiples of 16 bytes on, and nowhere else


def row_tiles(offs: Tensor, rows: int, height: int, step: int = STEP, starts: Tensor | None = None) -> Tensor:
    """int32 [tiles_bound, 4]: (count, 0, 0, 0), then `count` tiles (first row, end row, group, first row of the group
    in it).

    Tiles have `height` rows, a group's last one what is left, and start at multiples of `step`: a group's first one may
    begin with rows of groups before, which are not its own. Groups are in order, and those without rows have no tiles.
    Behind them come tiles of group G: rows of no group. What follows the last tile is not written.
    starts: of the groups, which then need not follow each other; rows of no group have no tiles.
    """
    offs, starts = offs.contiguous(), None if starts is None else starts.contiguous()
    tiles = empty((tiles_bound(offs.shape[0], rows, height, step), 4), int32, offs.device)
    _start(_row_tiles_kernel, _PROGRAMS, (offs, starts, tiles), (rows,), (height, step))
    return tiles


def tiles_bound(groups: int, rows: int, height: int, step: int = STEP) -> int:
    """How long a list can be, its head included.

    >>> tiles_bound(8, 32768, 128)
    267
    """
    return ceil_div(rows + (step - 1) * (groups + 1), height) + groups + 2


def group_spans(offs: Tensor) -> Tensor:
    """int32 [G, 4]: (group, its first block of 128 padded tokens, blocks, 0), the longest group first."""
    offs = offs.contiguous()
    spans = empty((offs.shape[0], 4), int32, offs.device)
    if offs.shape[0]:
        _start(_group_spans_kernel, ceil_div(offs.shape[0], _CHUNK), (offs, spans), (), (GROUP_ALIGN, _CHUNK))
    return spans


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _spans(offs_ptr, starts_ptr, g, groups, most):
    """First and end row of groups g, 0 .. a power of two: none before the end of another in front, at most `most`; past
    the last, empty.  starts_ptr: None where each starts at the end in front."""
    before = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= groups), other=0)
    first = tl.associative_scan(tl.minimum(tl.maximum(before, 0), most), 0, _larger)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + g, mask=g < groups, other=0)
        first = tl.maximum(first, tl.minimum(start, most))
    end = tl.load(offs_ptr + g, mask=g < groups, other=0)
    return first, tl.maximum(tl.minimum(end, most), first)


@triton.jit
def _store_four(at, a, b, c, d, mask):
    tl.store(at, a, mask=mask)
    tl.store(at + 1, b, mask=mask)
    tl.store(at + 2, c, mask=mask)
    tl.store(at + 3, d, mask=mask)


@triton.jit(do_not_specialize=["groups", "rows"])
def _row_tiles_kernel(
    offs_ptr, starts_ptr, tiles_ptr, groups, rows, HEIGHT: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Each program writes one in `num_programs` of every group's tiles."""
    g = tl.arange(0, GROUPS)
    first, end = _spans(offs_ptr, starts_ptr, g, groups, rows)
    counts = _count_tiles(first, end, HEIGHT, STEP)
    place = tl.cumsum(counts, 0) - counts + 1
    for number in range(tl.program_id(0), tl.max(counts, 0), tl.num_programs(0)):
        row = first // STEP * STEP + number * HEIGHT
        at = tiles_ptr + (place + number) * 4
        _store_four(at, row, tl.minimum(row + HEIGHT, end), g, tl.maximum(row, first), number < counts)
    total = tl.sum(counts, 0)
    if starts_ptr is None:
        last = tl.max(end, 0)
        rest = _count_tiles(last, rows, HEIGHT, STEP)
        for number in range(tl.program_id(0), rest, tl.num_programs(0)):
            row = last // STEP * STEP + number * HEIGHT
            at = tiles_ptr + (1 + total + number) * 4
            _store_four(at, row, tl.minimum(row + HEIGHT, rows), groups, tl.maximum(row, last), True)
        total += rest
    if tl.program_id(0) == 0:
        _store_four(tiles_ptr, total, 0, 0, 0, True)


@triton.jit
def _count_tiles(first, end, HEIGHT: tl.constexpr, STEP: tl.constexpr):
    """Of the rows from, to: none where there are none."""
    return tl.where(end > first, (end - first // STEP * STEP + HEIGHT - 1) // HEIGHT, 0)


@triton.jit(do_not_specialize=["groups"])
def _group_spans_kernel(
    offs_ptr, spans_ptr, groups, ALIGN: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Each program finds the ranks of CHUNK groups among all."""
    g = tl.arange(0, GROUPS)
    first, end = _spans(offs_ptr, None, g, groups, 0x7FFFFF00)
    blocks = (end - first + ALIGN - 1) // ALIGN
    start = tl.cumsum(blocks, 0) - blocks
    mine = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    here = (mine[:, None] == g[None, :]).to(tl.int32)
    size = tl.sum(here * blocks[None, :], 1)
    longer = (blocks[None, :] > size[:, None]) | ((blocks[None, :] == size[:, None]) & (g[None, :] < mine[:, None]))
    rank = tl.sum((longer & (g < groups)[None, :]).to(tl.int32), 1)
    _store_four(spans_ptr + rank * 4, mine, tl.sum(here * start[None, :], 1), size, mine * 0, mine < groups)


_KNOWN: dict[tuple[object, ...], CachedLaunch] = {}


def _start(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
) -> None:
    """tensors: the ends first."""
    offs = tensors[0]
    assert offs is not None
    groups = offs.shape[0]
    rest = (groups, *numbers, *constants, power_of_two(max(groups, 1)))
    launch_cached(_KNOWN, kernel, (programs, 1, 1), tensors, rest, last=False, num_warps=4)
