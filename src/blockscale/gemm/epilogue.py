"""Epilogue of an fp32 product, for backends without a fused one."""

from __future__ import annotations

from torch import Tensor

from ..formats.tensor import BlockScaled


def apply_tensor_scales(product: Tensor, a: BlockScaled, b: BlockScaled) -> Tensor:
    """Multiply by NVFP4's tensor scales, one after the other: the product of the two underflows for small operands."""
    for operand in (a, b):
        if operand.global_scale is not None:
            product = product * operand.global_scale
    return product


def finish(product: Tensor, out: Tensor, bias: Tensor | None, *, accumulate: bool) -> None:
    """Write product + bias to `out` with one rounding, or `out += product` in fp32, rounded once if `out` is bf16."""
    if bias is not None:
        product = product + bias.float()
    if accumulate:
        out.add_(product)  # torch promotes both to fp32
    else:
        out.copy_(product)
