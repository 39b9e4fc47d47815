"""Shared by the plain Triton GEMMs: tile shape, rasterisation, epilogue.

A kernel accumulates a tile [BM, BN] in fp32 and passes it to `store_tile`, which applies the epilogue of `ops.finish`
to one tile, in the same order.
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
    """bm rows by bn columns, bk of K per iteration; group_m: rasterisation."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group_m: int = 8


@triton.jit
def tile_at(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile. Rasterisation: down GROUP_M rows of tiles, then right, for reuse in L2."""
    group = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + inside % height, inside // height


@triton.jit
def store_tile(
    acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, M, N, c_m, c_n,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Epilogue: tensor scales, bias, `out +=`, then the only rounding.  INTERPRETED: run by the interpreter, whose bf16
    conversion does not round."""
    if SCALED:  # one after the other: the product of the two underflows for small operands
        acc = acc * tl.load(ga_ptr) * tl.load(gb_ptr)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = c_ptr + m.to(tl.int64)[:, None] * c_m + n.to(tl.int64)[None, :] * c_n
    ok = (m < M)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if INTERPRETED and c_ptr.dtype.element_ty == tl.bfloat16:
        acc = round_to_bf16(acc)
    tl.store(at, acc.to(c_ptr.dtype.element_ty), mask=ok)
