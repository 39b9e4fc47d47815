"""What happens to a finished fp32 product, in one pass over memory: tensor scales, bias, then a rounding or a sum.

The twin of `epilogue.finish` for products of the vendor's library on a GPU, where every pass costs like a cast.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..casts._device import round_to_bf16

ROWS, COLUMNS, WARPS = 4, 1024, 8


@triton.jit
def _finish_kernel(
    product_ptr, first_ptr, second_ptr, bias_ptr, out_ptr, M, N, m_stride, n_stride,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ROUND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """ROUND: by integers, for the interpreter, whose bf16 does not round."""
    m = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    n = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    inside = (m < M) & (n < N)
    value = tl.load(product_ptr + m * N + n, mask=inside, other=0.0)
    if SCALED:  # one after the other: their product alone underflows for small operands
        value = value * tl.load(first_ptr) * tl.load(second_ptr)
    if BIAS:
        value += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    at = out_ptr + m * m_stride + n * n_stride
    if ADD:
        value += tl.load(at, mask=inside, other=0.0)
    if ROUND:
        value = round_to_bf16(value)
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)


INTERPRETED = not isinstance(_finish_kernel, triton.runtime.JITFunction)


def finish_at_once(
    product: Tensor,
    out: Tensor,
    bias: Tensor | None,
    *,
    accumulate: bool,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """product: fp32 [M, N], contiguous.  scales: of both tensors, or None."""
    if out.numel() == 0:
        return
    rows, columns = out.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _finish_kernel[grid](
        product, *(scales or (None, None)), None if bias is None else bias.contiguous(), out,
        rows, columns, *out.stride(), scales is not None, bias is not None, accumulate,
        INTERPRETED and out.dtype == torch.bfloat16,
        ROWS, COLUMNS, num_warps=WARPS,
        enable_fp_fusion=False,  # scales, bias and buffer are a rounding each
    )  # fmt: skip
