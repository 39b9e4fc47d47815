"""`QuantizedGroupedLinear` and `QuantizedExperts`: the layers of a mixture of experts with frozen weights.

Rows come sorted by expert with the group ends, or as tokens with a `Routing`, as in `nn.GroupedExperts`. There is no
host sync, and an expert may have any number of rows.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from ..autograd.grouped import check_combined
from ..autograd.linear import output_dtype
from ..autograd.linear_plan import product
from ..autograd.mlp import swiglu
from ..autograd.operands import Casts
from ..autograd.routing import combine
from ..casts.checks import check_offs
from ..errors import ShapeError, refuse
from ..formats.cast_spec import CastSpec
from ..formats.checks import check_flag, check_int, check_place, check_sizes
from ..formats.storage import operand_of
from ..formats.tensor import BlockScaled, as_bytes
from ..grouped import Routing, as_routing, scaled_grouped_mm
from ..nn import GroupedExperts, GroupedLinear
from ..nn.adapters import ClampedSwiGLU
from ..nn.mlp import is_plain
from .frozen_layer import FrozenLayer, quantize_weight, zero_operand


class QuantizedGroupedLinear(FrozenLayer):
    """Rows of expert e: x @ weight[e].mT + bias[e]; weight [E, N, K] as codes and scales, bias [E, N].

    weights, activations: as for `QuantizedLinear`; NVFP4 has a tensor scale for each expert.
    """

    AXES = "[E, N, K]"

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str | CastSpec,
        activations: str | CastSpec | None = None,
    ) -> None:
        check_int(experts, "experts", "experts is their number", least=1)
        check_sizes(in_features=in_features, out_features=out_features)
        check_flag(bias, "bias")
        check_place(device, dtype)
        empty = torch.zeros(experts, out_features, device=device, dtype=dtype) if bias else None
        self.set_weight(zero_operand(weights, (experts, out_features, in_features), device), empty, activations)

    @classmethod
    def from_grouped_linear(
        cls, layer: GroupedLinear, weights: str | CastSpec, activations: str | CastSpec | None = None
    ) -> Self:
        """The layer with the weights of `nn.GroupedLinear`, rounded to a format, and the same bias."""
        return cls.from_operand(quantize_weight(layer.weight, weights), layer.bias, activations)

    @property
    def experts(self) -> int:
        return self.weight_shape[0]

    def forward(self, input: Tensor, routing: Tensor | Routing) -> Tensor:
        """Tokens [T, in_features] and their routing, or sorted rows [M, in_features] and expert ends -> [M, out]."""
        routed = as_routing(routing)
        self.check_rows(input, routed)
        dtype = output_dtype(input)
        if self.activations is None:
            rows = routed.permuted(input)
            return scaled_grouped_mm(rows, self.operand, routed.offs, dtype, bias=self.bias)
        x, _ = self.routed_casts(routed).input(input, save=False)
        assert x is not None
        return self.multiply(x, routed, dtype)

    def routed_casts(self, routing: Routing) -> Casts:
        """The casts of a call with a routing."""
        return self.casts.routed(routing)

    def multiply(self, x: BlockScaled, routing: Routing, dtype: torch.dtype) -> Tensor:
        """Rows [M, out_features] of sorted rows [M, in_features] that were cast."""
        return product(x, self.operand, dtype, routing, bias=self.bias)

    def check_rows(self, x: Tensor, routing: Routing) -> None:
        """Raise unless the layer takes these rows in these groups."""
        self.check_input(x)
        if x.dim() != 2:
            refuse(f"x {tuple(x.shape)}", "rows of experts are a matrix", "flatten its leading axes", error=ShapeError)
        check_offs(routing.offs, x.device, 2, required=True)
        if routing.offs.shape[0] != self.experts:
            what, rule = f"{routing.offs.shape[0]} group ends for {self.experts} experts", "one group for each expert"
            refuse(what, rule, "repeat the previous end for an expert without rows", error=ShapeError)
        if routing.rows is not None and routing.rows.shape[0] != x.shape[0]:
            what = f"x {tuple(x.shape)} for a routing of {routing.rows.shape[0]} tokens"
            rule = "a routing takes tokens, not rows that were permuted"
            refuse(what, rule, "pass the tokens [T, K], or routing.offs with permuted rows", error=ShapeError)

    def extra_repr(self) -> str:
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {super().extra_repr()}"


class QuantizedExperts(nn.Module):
    """Experts that are each down(activation(gate, up)) with the frozen layers `gate_up` [E, 2I, H], gates first, and
    `down` [E, H, I].

    clamp: None for silu(gate) * up; `ClampedSwiGLU(alpha, limit)` for gpt-oss's (up + 1) * gate * sigmoid(alpha * gate)
    of clamped gates and ups.  If `down` casts its input, silu(gate) * up is cast as in training and never written.

    >>> from ..grouped import sort_by_expert
    >>> experts = QuantizedExperts.from_experts(GroupedExperts(experts=4, dim=64, hidden=32), "mxfp4", "mxfp8_e4m3")
    >>> routing = sort_by_expert(torch.tensor([[2, 0], [2, 1], [0, 2]]), 4)
    >>> experts(torch.randn(3, 64), routing, torch.full((3, 2), 0.5)).shape
    torch.Size([3, 64])
    """

    def __init__(
        self, gate_up: QuantizedGroupedLinear, down: QuantizedGroupedLinear, clamp: ClampedSwiGLU | None = None
    ) -> None:
        super().__init__()
        if gate_up.weight_shape != (down.experts, 2 * down.in_features, gate_up.in_features):
            what = f"gate_up {gate_up.weight_shape} and down {down.weight_shape}"
            rule = "they are [E, 2I, H] and [E, H, I]: a gate and an up for each input of the second layer"
            refuse(what, rule, "pass the layers of the same experts", error=ShapeError)
        self.gate_up, self.down, self.clamp = gate_up, down, clamp

    @classmethod
    def from_experts(
        cls, experts: GroupedExperts, weights: str | CastSpec, activations: str | CastSpec | None = None
    ) -> Self:
        """The module with the weights of `nn.GroupedExperts`, rounded to a format."""
        gate_up, down = (
            QuantizedGroupedLinear.from_grouped_linear(layer, weights, activations)
            for layer in (experts.gate_up, experts.down)
        )
        return cls(gate_up, down)

    @classmethod
    def from_operands(
        cls,
        gate_up: BlockScaled,
        down: BlockScaled,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activations: str | CastSpec | None = None,
        *,
        clamp: ClampedSwiGLU | None = None,
        interleaved: bool = False,
    ) -> Self:
        """The module with weights that are quantized already.

        interleaved: rows of gate and up come in turn, as gpt-oss stores them, and are moved: all gates, then all ups.
        """
        if interleaved:
            gate_up = gates_first(gate_up)
            if gate_up_bias is not None:
                gate_up_bias = torch.cat((gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]), dim=1)
        return cls(
            QuantizedGroupedLinear.from_operand(gate_up, gate_up_bias, activations),
            QuantizedGroupedLinear.from_operand(down, down_bias, activations),
            clamp,
        )

    def forward(self, x: Tensor, routing: Tensor | Routing, gate_weights: Tensor | None = None) -> Tensor:
        """Tokens [T, H] and their routing, or sorted rows [M, H] and expert ends -> rows [M, H] by expert. With the
        gate weights [T, k] of a routing -> tokens [T, H], each the weighted sum of its rows."""
        routed, down = as_routing(routing), self.down
        check_combined(gate_weights, routed)
        gate_up = self.gate_up(x, routed)
        if self.clamp is not None:
            rows = down(self.clamp(*gate_up.chunk(2, dim=-1)), routed.offs)
        elif down.activations is None or not is_plain(down, QuantizedGroupedLinear):
            rows = down(swiglu(gate_up), routed.offs)
        else:
            hidden = down.routed_casts(routed).swiglu(gate_up, "fprop_x")
            rows = down.multiply(hidden, routed, gate_up.dtype)
        return rows if gate_weights is None else combine(rows, routed, gate_weights)

    def extra_repr(self) -> str:
        return "" if self.clamp is None else f"clamp={self.clamp}"


def gates_first(weight: BlockScaled) -> BlockScaled:
    """A weight [E, 2I, H] whose rows of gate and up come in turn, with all gates first; blocks of one row only."""
    if weight.spec.block[0] != 1 or weight.axis != -1:
        rule = "rows of gate and up are moved apart, and a block of several rows holds both"
        refuse(f"gate and up in turn in {weight}", rule, "pass gates first, or a format with blocks of one row")
    codes, scale = as_bytes(weight.data), as_bytes(weight.plain_scale())
    codes, scale = (torch.cat((part[:, 0::2], part[:, 1::2]), dim=1) for part in (codes, scale))
    return operand_of(weight.spec, codes, scale, weight.global_scale, weight.shape, weight.scale_layout)
