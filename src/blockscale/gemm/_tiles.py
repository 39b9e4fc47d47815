"""What the products in plain Triton share: the shape of a tile, the order of tiles, and what becomes of a finished one.

A kernel sums a tile [BM, BN] in fp32 and hands it to `store_tile`, which does what `epilogue.py` does for whole
products, in the same order.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..casts._device import round_to_bf16


class Tile(NamedTuple):
    """bm rows by bn columns, bk of K at a time; group_m: rows of tiles that are walked down before going right."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group_m: int = 8


@triton.jit
def tile_at(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The row and the column of a tile: down a group_m of rows, then right, so that neighbours share operands in L2."""
    group_m = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group_m * GROUP_M, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    return group_m * GROUP_M + inside % height, inside // height


@triton.jit
def store_tile(
    acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, M, N, c_m, c_n,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Tensor scales, bias, what is added to, then the only rounding. INTERPRETED: by the interpreter, whose bf16 does
    not round."""
    if SCALED:  # one after the other: their product alone underflows for small operands
        acc = acc * tl.load(ga_ptr) * tl.load(gb_ptr)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = c_ptr + m.to(tl.int64)[:, None] * c_m + n.to(tl.int64)[None, :] * c_n
    ok = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        acc += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if INTERPRETED and c_ptr.dtype.element_ty == tl.bfloat16:
        acc = round_to_bf16(acc)
    tl.store(at, acc.to(c_ptr.dtype.element_ty), mask=ok)
