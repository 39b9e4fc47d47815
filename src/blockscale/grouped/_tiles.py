"""What the grouped products in plain Triton share: where a program's tile lies, and which of it is stored.

    m-grouped  c[rows of g, N] = a[rows of g, K] @ b[g, N, K].mT
    k-grouped  c[g, M, N] = a[M, tokens of g] @ b[N, tokens of g].mT    tokens padded to 128

A program reads its place from the lists of `_schedule.py`. A grid is as large as the list can become, and programs
behind its end have nothing to do.
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
from ._schedule import MOST_GROUPS, STEP, group_spans, row_tiles


@triton.jit
def count_tiles(list_ptr, groups, M, N, K_GROUPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """How many tiles all groups have."""
    down = groups * tl.cdiv(M, BM) if K_GROUPED else tl.load(list_ptr)
    return down * tl.cdiv(N, BN)


@triton.jit
def place_of(
    tile, list_ptr, groups, M, N, K, K_GROUPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """Where a tile lies: its group; its first row; its column; its K from, to: nothing for rows of no group and for
    groups without tokens; and the rows from, to that are its group's."""
    tiles_n = tl.cdiv(N, BN)
    if K_GROUPED:
        tiles_m = tl.cdiv(M, BM)
        entry = list_ptr + tile // (tiles_m * tiles_n) * 4
        pm, pn = tile_at(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        # in blocks, whose numbers do not overflow whatever the ends of groups are
        first, blocks = tl.minimum(tl.load(entry + 1), K // 128), tl.load(entry + 2)
        stop = tl.minimum(first + blocks, K // 128)
        return tl.load(entry), pm * BM, pn * BN, first * 128, stop * 128, 0, M
    else:
        pm, pn = tile_at(tile, tl.load(list_ptr), tiles_n, GROUP_M)
        entry = list_ptr + (1 + pm) * 4
        group = tl.load(entry + 2)
        stop = tl.where(group < groups, K, 0)
        return group, tl.load(entry), pn * BN, 0, stop, tl.load(entry + 3), tl.load(entry + 1)


@triton.jit
def store_group(
    acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, group, m, n, begin, end, N, c_g, c_m, c_n, ga_g, gb_g, is_summed,
    K_GROUPED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile's rows from `begin` to `end`, with what is its group's: its matrix of the result, tensor scales and bias.
    is_summed: whether anything was; what was not is zero, and adds nothing."""
    m = tl.where(m < begin, end, m)  # those before are the group's before, and stored by nobody here
    if K_GROUPED:
        c_ptr += group.to(tl.int64) * c_g
    if is_summed:
        if SCALED:
            ga_ptr += group * ga_g
            gb_ptr += group * gb_g
        if BIAS:
            bias_ptr += group.to(tl.int64) * N
        store_tile(acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, end, N, c_m, c_n, SCALED, BIAS, ADD, INTERPRETED)
    elif not ADD:
        store_tile(acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, end, N, c_m, c_n, False, False, False, INTERPRETED)


def listed(
    a: BlockScaled, b: BlockScaled, offs: Tensor, tile: Tile, step: int = STEP, starts: Tensor | None = None
) -> tuple[Tensor, int]:
    """The list that `place_of` reads, and how many programs it takes. step: tiles of rows start at its multiples."""
    columns = ceil_div(b.rows, tile.bn)
    if len(b.shape) == 2:
        return group_spans(offs), offs.shape[0] * ceil_div(a.rows, tile.bm) * columns
    tiles = row_tiles(offs, a.rows, tile.bm, step, starts)
    return tiles, (tiles.shape[0] - 1) * columns


def group_steps(a: BlockScaled, b: BlockScaled, out: Tensor) -> tuple[int, ...]:
    """From one group to the next, as `store_group` takes them: of the result, and of both tensor scales."""
    scales = (0 if q.global_scale is None or not q.global_scale.dim() else q.global_scale.stride(0) for q in (a, b))
    return (out.stride(0) if out.dim() == 3 else 0, *out.stride()[-2:], *scales)


def reject(request: Request) -> str | None:
    """What none of them takes."""
    groups = request.shape[3]
    if 0 in request.shape:
        return "takes no empty operands"
    return f"takes at most {MOST_GROUPS} groups, these are {groups}" if groups > MOST_GROUPS else None
