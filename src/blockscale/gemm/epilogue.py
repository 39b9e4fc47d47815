"""What happens to a finished fp32 product, for backends that have no epilogue of their own."""

from __future__ import annotations

from torch import Tensor

from ..formats.tensor import BlockScaled


def apply_tensor_scales(product: Tensor, a: BlockScaled, b: BlockScaled) -> Tensor:
    """NVFP4's tensor scales, one after the other: their product alone underflows for small operands."""
    for operand in (a, b):
        if operand.global_scale is not None:
            product = product * operand.global_scale
    return product


def finish(product: Tensor, out: Tensor, bias: Tensor | None, *, accumulate: bool) -> None:
    """Bias in fp32, then one rounding to the output; or a sum with it in fp32, rounded once if it is bf16."""
    if bias is not None:
        product = product + bias.float()
    if accumulate:
        out.add_(product)  # torch widens both to the product's fp32
    else:
        out.copy_(product)
