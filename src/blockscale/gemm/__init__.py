"""Dense GEMM of block-scaled operands: `scaled_mm(a, b)` is a [M, K] @ b [N, K].mT.

Every legal pair of formats works on every device, as does every format beside a plain left operand (weight-only). The
registry selects the kernel (`explain` shows which).
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..formats.tensor import BlockScaled
from . import _reference as _reference  # registers its kernels
from . import _torch as _torch
from .ops import (
    ACCUMULATOR_DTYPES,
    check_accumulator,
    check_bias,
    check_contraction,
    check_dense,
    check_operands,
    check_output,
    multiply,
)
from .weight_only import check_no_accumulator, check_weight_only, weight_only_mm

with contextlib.suppress(ImportError):  # CPU builds of torch have no triton
    from . import _blackwell as _blackwell
    from . import _hopper as _hopper
    from . import _hopper_mx as _hopper_mx
    from . import _hopper_rows as _hopper_rows
    from . import _triton as _triton

__all__ = ["ACCUMULATOR_DTYPES", "exact_mm", "scaled_mm"]


def scaled_mm(
    a: Tensor | BlockScaled,
    b: BlockScaled,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
) -> Tensor:
    """a [M, K] @ b [N, K].mT, products exact, sums and scales in fp32, one rounding to `out_dtype` at the end.

    a: BlockScaled, or a plain bf16, fp16 or fp32 tensor, which is not rounded (weight-only).
    bias: [N], added in fp32 before the rounding.  accumulate: an fp32 or bf16 [M, N] buffer that the product is added
    into, in fp32 and with one rounding to the buffer's dtype, and that is returned; out_dtype is then not used.

    >>> import blockscale as bs
    >>> x = bs.quantize(torch.ones(2, 128), "fp8_1x128")
    >>> w = bs.quantize(torch.ones(3, 128), "fp8_128x128")
    >>> scaled_mm(x, w)
    tensor([[128., 128., 128.],
            [128., 128., 128.]], dtype=torch.bfloat16)
    >>> scaled_mm(torch.ones(1, 128), w, torch.float32)
    tensor([[128., 128., 128.]])
    """
    if isinstance(a, Tensor):
        check_weight_only(a, b, rank=2)
        check_no_accumulator(accumulate)
        check_output(out_dtype)
        check_bias(bias, (b.rows,), a.device)
        return weight_only_mm(a, b, bias, out_dtype)
    check_dense(a, b)
    if accumulate is not None:
        check_accumulator(accumulate, bias, (a.rows, b.rows), a.device)
    else:
        check_output(out_dtype)
        check_bias(bias, (b.rows,), a.device)
    return multiply(a, b, out_dtype, bias, accumulate)


def exact_mm(a: Tensor | BlockScaled, b: BlockScaled) -> Tensor:
    """The same GEMM in fp64 from exactly decoded operands, for tests and self-checks.

    >>> import blockscale as bs
    >>> q = bs.quantize(torch.eye(32), "mxfp4")
    >>> bool((exact_mm(q, q) == torch.eye(32)).all())
    True
    """
    if isinstance(a, Tensor):
        check_weight_only(a, b, rank=2)
    else:
        check_operands(a, b, ranks=(2, 2))
        check_contraction(a, b)
    return _reference.exact_product(a, b)
