"""`GroupedLinear` and `GroupedExperts`: the layers of a mixture of experts, trained by a recipe.

All experts of a layer are one parameter [E, N, K]. Rows come sorted by expert with the group ends, which stay on the
device, or as tokens with a `Routing`. An expert may have any number of rows, zero included. `GroupedExperts` is to
`GroupedLinear` what `SwiGLU` is to `Linear`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from ..autograd.grouped import check_combined, grouped_linear, grouped_swiglu_mlp
from ..autograd.mlp import swiglu
from ..autograd.recipe import Recipe, get_recipe
from ..autograd.routing import combine
from ..formats.checks import check_flag, check_int, check_place, check_sizes, check_text
from ..formats.stochastic import rng_state
from ..grouped import Routing, as_routing
from .mlp import are_plain
from .recipe_module import DEFAULT_SEED, RecipeModule


class GroupedLinear(RecipeModule):
    """Rows of expert e: x @ weight[e].mT + bias[e]; weight [E, N, K], bias [E, N].

    Experts are initialised as torch's linear layers. recipe, name, rng: as for `Linear`.

    >>> layer = GroupedLinear(4, 128, 256, bias=False, recipe="mxfp8")
    >>> layer(torch.randn(5, 128), torch.tensor([2, 2, 5, 5], dtype=torch.int32)).shape
    torch.Size([5, 256])
    >>> layer
    GroupedLinear(experts=4, in_features=128, out_features=256, bias=False, recipe=mxfp8)
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "fp8_blockwise",
        name: str = "",
        rng: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_int(experts, "experts", "experts is their number", least=1)
        check_sizes(in_features=in_features, out_features=out_features)
        check_flag(bias, "bias")
        check_place(device, dtype)
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        bias_EN = Parameter(torch.empty(experts, out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", bias_EN)
        self.reset_parameters()
        self.apply_recipe(recipe, name=name, rng=rng)

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch's linear layer does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, routing: Tensor | Routing) -> Tensor:
        """Tokens [T, in_features] and their routing, or sorted rows [M, in_features] and expert ends -> [M, out]."""
        (weight, bias), (rounding, operands) = self.own_parameters(), self.call_state()
        return grouped_linear(
            input, weight, routing, bias, self.recipe_now, rounding=rounding, weight_operands=operands
        )

    def own_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as a call multiplies them: those of this rank's experts, where ranks have their own."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, recipe={self.recipe.name}"


class GroupedExperts(torch.nn.Module):
    """Experts that are each down(silu(gate(x)) * up(x)), with the sublayers `gate_up` [E, 2 * hidden, dim] and `down`
    [E, dim, hidden].

    Sizes are passed by name: three ints in another order would make a layer of another size.
    `experts.gate_up.weight.chunk(2, dim=1)` are views of the gates and the ups. recipe, rng: as for `Linear`.  name:
    of the module in its model; ".gate_up" and ".down" are appended to name the streams of stochastic rounding.

    >>> experts = GroupedExperts(experts=4, dim=128, hidden=256, recipe="mxfp8")
    >>> experts(torch.randn(5, 128), torch.tensor([2, 2, 5, 5], dtype=torch.int32)).shape
    torch.Size([5, 128])
    >>> sorted(experts.state_dict())
    ['down.weight', 'gate_up.weight']
    """

    gate_up: GroupedLinear
    down: GroupedLinear

    def __init__(
        self,
        *,
        experts: int,
        dim: int,
        hidden: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: str | Recipe = "fp8_blockwise",
        name: str = "",
        rng: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, hidden=hidden)
        check_place(device, dtype)
        check_text(name, "name", "layers.0.mlp.experts")
        if rng is None and get_recipe(recipe).stochastic:
            rng = rng_state(DEFAULT_SEED, device=device or torch.get_default_device())
        for part, inputs, outputs in (("gate_up", dim, 2 * hidden), ("down", hidden, dim)):
            full = f"{name}.{part}" if name else ""
            layer = GroupedLinear(experts, inputs, outputs, bias, device, dtype, recipe=recipe, name=full, rng=rng)
            self.add_module(part, layer)

    def forward(self, x: Tensor, routing: Tensor | Routing, gate_weights: Tensor | None = None) -> Tensor:
        """Tokens [T, dim] and their routing, or sorted rows [M, dim] and expert ends -> rows [M, dim] by expert.
        With the gate weights [T, k] of a routing -> tokens [T, dim], each the weighted sum of its rows."""
        first, second = self.gate_up, self.down
        if not are_plain(first, second, GroupedLinear):
            routed = as_routing(routing)
            check_combined(gate_weights, routed)
            rows = second(swiglu(first(x, routed)), routed.offs)
            return rows if gate_weights is None else combine(rows, routed, gate_weights)
        (weight, bias), (other_weight, other_bias) = first.own_parameters(), second.own_parameters()
        (rounding, operands), (other_rounding, other_operands) = first.call_state(), second.call_state()
        return grouped_swiglu_mlp(
            x,
            weight,
            other_weight,
            routing,
            bias,
            other_bias,
            first.recipe_now,
            roundings=(rounding, other_rounding),
            weight_operands=(operands, other_operands),
            gate_weights=gate_weights,
        )

    @property
    def is_fused(self) -> bool:
        """Whether a forward made now bypasses the sublayers; see `SwiGLU.is_fused`."""
        return are_plain(self.gate_up, self.down, GroupedLinear)
