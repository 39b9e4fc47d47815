"""Tile coordinates and epilogue shared by the grouped GEMMs in plain Triton.

    m-grouped  c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT
    k-grouped  c[g, M, N] = a[M, tokens of g] @ b[N, tokens of g].mT    tokens padded to 128

A program reads its tile from the lists of `_schedule.py`. The grid has the maximum size of the list; programs past the
end of the list return at once.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..formats.layout import ceil_div
from ..formats.tensor import BlockScaled
from ..gemm._tiles import Tile, store_tile, tile_at
from ..registry import Request
from ._schedule import MAX_GROUPS, ROW_ALIGN, group_spans, row_tiles
from .ops import Inputs


@triton.jit
def count_tiles(list_ptr, groups, M, N, K_GROUPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Number of tiles of all groups."""
    tiles_m = groups * tl.cdiv(M, BM) if K_GROUPED else tl.load(list_ptr)
    return tiles_m * tl.cdiv(N, BN)


@triton.jit
def tile_coords(
    tile, list_ptr, groups, M, N, K, K_GROUPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """Coordinates of a tile: (group, row, column, k_start, k_stop, begin, end).

    The K range is empty for rows of no group and for groups without tokens. Rows [begin, end) belong to the group."""
    tiles_n = tl.cdiv(N, BN)
    if K_GROUPED:
        tiles_m = tl.cdiv(M, BM)
        entry = list_ptr + tile // (tiles_m * tiles_n) * 4
        pm, pn = tile_at(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        # counted in K-blocks, which cannot overflow for any offsets
        k_start, blocks = tl.minimum(tl.load(entry + 1), K // 128), tl.load(entry + 2)
        k_stop = tl.minimum(k_start + blocks, K // 128)
        return tl.load(entry), pm * BM, pn * BN, k_start * 128, k_stop * 128, 0, M
    else:
        pm, pn = tile_at(tile, tl.load(list_ptr), tiles_n, GROUP_M)
        entry = list_ptr + (1 + pm) * 4
        group = tl.load(entry + 2)
        k_stop = tl.where(group < groups, K, 0)
        return group, tl.load(entry), pn * BN, 0, k_stop, tl.load(entry + 3), tl.load(entry + 1)


@triton.jit
def store_group(
    acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, group, m, n, begin, end, N, c_g, c_m, c_n, ga_g, gb_g, is_summed,
    K_GROUPED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store rows [begin, end) of a tile, with the tensor scales and the bias of its group.

    is_summed: False if the K range was empty; then zeros are stored, or nothing with ACCUMULATE."""
    m = tl.where(m < begin, end, m)  # rows of an earlier group are masked out; that group's own tile stores them
    if K_GROUPED:
        c_ptr += group.to(tl.int64) * c_g
    if is_summed:
        if SCALED:
            ga_ptr += group * ga_g
            gb_ptr += group * gb_g
        if BIAS:
            bias_ptr += group.to(tl.int64) * N
        store_tile(acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, end, N, c_m, c_n, SCALED, BIAS, ACCUMULATE, INTERPRETED)
    elif not ACCUMULATE:
        store_tile(acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, end, N, c_m, c_n, False, False, False, INTERPRETED)


def tile_list(inputs: Inputs, tile: Tile, align: int = ROW_ALIGN) -> tuple[Tensor, int]:
    """List that `tile_coords` reads, and the number of programs to launch. align: row alignment of m-grouped tiles."""
    a, b, offs, starts, _ = inputs
    columns = ceil_div(b.rows, tile.bn)
    if len(b.shape) == 2:
        return group_spans(offs), offs.shape[0] * ceil_div(a.rows, tile.bm) * columns
    tiles = row_tiles(offs, a.rows, tile.bm, align, starts)
    return tiles, (tiles.shape[0] - 1) * columns


def group_strides(a: BlockScaled, b: BlockScaled, out: Tensor) -> tuple[int, ...]:
    """Strides that `store_group` takes: (group, row, column) of the output, then group of both tensor scales."""
    scales = (0 if q.global_scale is None or not q.global_scale.dim() else q.global_scale.stride(0) for q in (a, b))
    return (out.stride(0) if out.dim() == 3 else 0, *out.stride()[-2:], *scales)


def reject(request: Request) -> str | None:
    """Reason why no grouped GEMM in plain Triton takes the request, or None."""
    groups = request.shape[3]
    if 0 in request.shape:
        return "takes no empty operands"
    return f"takes at most {MAX_GROUPS} groups, these are {groups}" if groups > MAX_GROUPS else None
