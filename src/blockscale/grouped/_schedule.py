"""Tile lists of grouped GEMMs, built on the device from `offs` (inclusive end offsets of the groups).

The host never reads the group sizes. List sizes follow from static sizes alone, so a captured CUDA graph serves any
group sizes. Invalid offsets are clamped (ends that descend or exceed the rows, starts before the end of an earlier
group): every tile lies inside the rows, and no two tiles share a row of a group.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, int32

from ..casts._source import power_of_two
from ..formats.layout import GROUP_ALIGN, ceil_div
from ..launch import launch
from ..library import empty

MAX_GROUPS = 1024
_PROGRAMS, _CHUNK = 32, 16
ROW_ALIGN = 4  # rows: TMA loads fp32 row scales from addresses that are multiples of 16 bytes


def row_tiles(offs: Tensor, rows: int, bm: int, align: int = ROW_ALIGN, starts: Tensor | None = None) -> Tensor:
    """Tile list of an m-grouped GEMM, int32 [max_row_tiles, 4]: (count, 0, 0, 0), then `count` entries
    (first row of the tile, end row, group, first row that belongs to the group).

    Tiles have `bm` rows (the last tile of a group may have fewer) and start at multiples of `align`: the first tile of
    a group may begin with rows of earlier groups. Groups are in order; empty groups have no tiles. After them come
    tiles with group = G for the rows of no group. Entries after the last tile are not written.
    starts: first row of each group, if groups are not contiguous; then rows of no group have no tiles.
    """
    offs, starts = offs.contiguous(), None if starts is None else starts.contiguous()
    tiles = empty((max_row_tiles(offs.shape[0], rows, bm, align), 4), int32, offs.device)
    _launch(_row_tiles_kernel, _PROGRAMS, (offs, starts, tiles), (rows,), (bm, align))
    return tiles


def max_row_tiles(groups: int, rows: int, bm: int, align: int = ROW_ALIGN) -> int:
    """Upper bound on the entries of a tile list, its head included.

    >>> max_row_tiles(8, 32768, 128)
    267
    """
    return ceil_div(rows + (align - 1) * (groups + 1), bm) + groups + 2


def group_spans(offs: Tensor) -> Tensor:
    """K ranges of a k-grouped GEMM, int32 [G, 4]: (group, first K-block, K-blocks, 0), the longest group first.

    A K-block is 128 padded tokens.
    """
    offs = offs.contiguous()
    spans = empty((offs.shape[0], 4), int32, offs.device)
    if offs.shape[0]:
        _launch(_group_spans_kernel, ceil_div(offs.shape[0], _CHUNK), (offs, spans), (), (GROUP_ALIGN, _CHUNK))
    return spans


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _spans(offs_ptr, starts_ptr, g, groups, limit):
    """First and end row of groups g (0 to a power of two), clamped to [0, limit] and to the ends of earlier groups.

    Groups past the last are empty.  starts_ptr: None if each group starts at the end of the previous one."""
    previous_end = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= groups), other=0)
    first = tl.associative_scan(tl.minimum(tl.maximum(previous_end, 0), limit), 0, _maximum)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + g, mask=g < groups, other=0)
        first = tl.maximum(first, tl.minimum(start, limit))
    end = tl.load(offs_ptr + g, mask=g < groups, other=0)
    return first, tl.maximum(tl.minimum(end, limit), first)


@triton.jit
def _store_entry(ptr, a, b, c, d, mask):
    tl.store(ptr, a, mask=mask)
    tl.store(ptr + 1, b, mask=mask)
    tl.store(ptr + 2, c, mask=mask)
    tl.store(ptr + 3, d, mask=mask)


@triton.jit(do_not_specialize=["groups", "rows"])
def _row_tiles_kernel(
    offs_ptr, starts_ptr, tiles_ptr, groups, rows, BM: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Program p writes tiles p, p + num_programs, ... of every group.  GROUPS: power of two >= groups."""
    g = tl.arange(0, GROUPS)
    first, end = _spans(offs_ptr, starts_ptr, g, groups, rows)
    counts = _count_tiles(first, end, BM, ALIGN)
    first_entry = tl.cumsum(counts, 0) - counts + 1
    for i in range(tl.program_id(0), tl.max(counts, 0), tl.num_programs(0)):
        row = first // ALIGN * ALIGN + i * BM
        entry = tiles_ptr + (first_entry + i) * 4
        _store_entry(entry, row, tl.minimum(row + BM, end), g, tl.maximum(row, first), i < counts)
    total = tl.sum(counts, 0)
    if starts_ptr is None:
        last = tl.max(end, 0)
        rest = _count_tiles(last, rows, BM, ALIGN)
        for i in range(tl.program_id(0), rest, tl.num_programs(0)):
            row = last // ALIGN * ALIGN + i * BM
            entry = tiles_ptr + (1 + total + i) * 4
            _store_entry(entry, row, tl.minimum(row + BM, rows), groups, tl.maximum(row, last), True)
        total += rest
    if tl.program_id(0) == 0:
        _store_entry(tiles_ptr, total, 0, 0, 0, True)


@triton.jit
def _count_tiles(first, end, BM: tl.constexpr, ALIGN: tl.constexpr):
    """Number of tiles covering rows [first, end); 0 if empty."""
    return tl.where(end > first, (end - first // ALIGN * ALIGN + BM - 1) // BM, 0)


@triton.jit(do_not_specialize=["groups"])
def _group_spans_kernel(
    offs_ptr, spans_ptr, groups, ALIGN: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Each program ranks CHUNK groups by size, ties by group index, and stores their entries at the ranks."""
    g = tl.arange(0, GROUPS)
    first, end = _spans(offs_ptr, None, g, groups, 0x7FFFFF00)
    blocks = (end - first + ALIGN - 1) // ALIGN
    start = tl.cumsum(blocks, 0) - blocks
    own = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    one_hot = (own[:, None] == g[None, :]).to(tl.int32)
    size = tl.sum(one_hot * blocks[None, :], 1)
    before = (blocks[None, :] > size[:, None]) | ((blocks[None, :] == size[:, None]) & (g[None, :] < own[:, None]))
    rank = tl.sum((before & (g < groups)[None, :]).to(tl.int32), 1)
    _store_entry(spans_ptr + rank * 4, own, tl.sum(one_hot * start[None, :], 1), size, own * 0, own < groups)


def _launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
) -> None:
    """tensors: `offs` first."""
    offs = tensors[0]
    assert offs is not None
    groups = offs.shape[0]
    rest = (groups, *numbers, *constants, power_of_two(max(groups, 1)))
    launch(kernel, (programs,), tensors, rest, num_warps=4)
