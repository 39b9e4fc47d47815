"""Epilogue of an fp32 product in one pass over memory: tensor scales, bias, then the rounding or `out +=`.

The fused version of `ops.finish`, for GEMMs of cuBLAS, where every pass costs as much as a cast.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ._tiles import store_tile

ROWS, COLUMNS, WARPS = 4, 1024, 8


@triton.jit
def _finish_kernel(
    product_ptr, ga_ptr, gb_ptr, bias_ptr, out_ptr, M, N, c_m, c_n,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, INTERPRETED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    product = tl.load(product_ptr + m.to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0.0)
    store_tile(product, out_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, M, N, c_m, c_n, SCALED, BIAS, ACCUMULATE, INTERPRETED)


INTERPRETED = not isinstance(_finish_kernel, triton.runtime.JITFunction)


def finish_at_once(
    product: Tensor,
    out: Tensor,
    bias: Tensor | None,
    *,
    accumulate: bool,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the product to `out`, or add it.  product: fp32 [M, N], contiguous.  scales: tensor scales, or None."""
    if out.numel() == 0:
        return
    rows, columns = out.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    constants = (scales is not None, bias is not None, accumulate, INTERPRETED, ROWS, COLUMNS)
    launch(
        _finish_kernel, grid, (product, *(scales or (None, None)), None if bias is None else bias.contiguous(), out),
        (rows, columns, *out.stride(), *constants), num_warps=WARPS,
        enable_fp_fusion=False,  # scales, bias and `out +=` round separately
    )  # fmt: skip
