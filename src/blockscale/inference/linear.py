"""`QuantizedLinear`: a linear layer that multiplies by stored codes and scales. It does not train."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from ..autograd.linear import output_dtype
from ..autograd.linear_plan import product
from ..autograd.operands import matrix
from ..formats.cast_spec import CastSpec
from ..formats.checks import check_flag, check_place, check_sizes
from ..formats.tensor import BlockScaled
from ..gemm import scaled_mm
from .frozen_layer import FrozenLayer, quantize_weight, shaped, zero_operand


class QuantizedLinear(FrozenLayer):
    """x [..., in_features] @ weight [out_features, in_features].mT + bias, with the weight as codes and scales.

    weights: format of the weight.  activations: format that every call casts x to, whatever its number of rows; None:
    x is not rounded (weight-only).  The constructor makes a weight of zeros, to load a `state_dict` into; see also
    `from_linear`, `from_operand`.

    >>> layer = QuantizedLinear.from_linear(nn.Linear(128, 256), "fp8_128x128", "fp8_1x128")
    >>> layer(torch.randn(2, 3, 128)).shape
    torch.Size([2, 3, 256])
    >>> {name: str(part.dtype)[6:] for name, part in layer.state_dict().items()}
    {'weight': 'float8_e4m3fn', 'weight_scale': 'float32', 'bias': 'float32'}
    """

    AXES = "[N, K]"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str | CastSpec,
        activations: str | CastSpec | None = None,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        check_flag(bias, "bias")
        check_place(device, dtype)
        empty = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.set_weight(zero_operand(weights, (out_features, in_features), device), empty, activations)

    @classmethod
    def from_linear(cls, linear: nn.Linear, weights: str | CastSpec, activations: str | CastSpec | None = None) -> Self:
        """The layer with the weight of a linear layer, rounded to a format, and the same bias."""
        return cls.from_operand(quantize_weight(linear.weight, weights), linear.bias, activations)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in autocast's dtype if autocast is on, else the input's."""
        self.check_input(input)
        x = matrix(input)
        return shaped(self.multiply(x if self.activations is None else self.cast(x), output_dtype(input)), input)

    def cast(self, x: Tensor) -> BlockScaled:
        """The operand of an input [M, in_features], in the format of activations."""
        found, _ = self.casts.input(x, save=False)
        assert found is not None
        return found

    def multiply(self, x: Tensor | BlockScaled, dtype: torch.dtype) -> Tensor:
        """y [M, out_features] of an input [M, in_features] that was cast, or that is not rounded."""
        if isinstance(x, BlockScaled):
            return product(x, self.operand, dtype, bias=self.bias)
        return scaled_mm(x, self.operand, dtype, bias=self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {super().extra_repr()}"
