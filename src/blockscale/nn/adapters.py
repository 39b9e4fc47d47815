"""Experts of Transformers with a recipe: a table of their parameter layouts, and the class of a converted module.

Written against Transformers 4.57 (gpt-oss) and 5.0, where experts are modules with the 3-D parameters `gate_up_proj`
and `down_proj`, called with tokens, the experts of each token and their gate weights. Transformers is not imported: a
module is recognised by its parameters, its signature and its activation on a few numbers. Modules that compute
something else are not converted, and the report says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..autograd.grouped import grouped_linear, grouped_swiglu_mlp
from ..autograd.mlp import swiglu
from ..autograd.operands import Pair
from ..autograd.routing import combine
from ..errors import refuse
from ..formats.stochastic import Stochastic
from ..grouped import Routing, sort_by_expert
from .recipe_module import SeveralWeights

WEIGHTS = ("gate_up_proj", "down_proj")
CallOperands = tuple[Tensor, Tensor | None, Stochastic | None, Pair | None]
# argument names of tokens, their experts and the gate weights
SIGNATURES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)


@dataclass(frozen=True)
class Style:
    """Parameter layout of experts.  transposed: parameters are [E, in, out].  bias: each parameter has a bias, named
    with `_bias`.  activate: activation between the two products, of [M, 2H] and the module.  flags: expected attributes
    of the module."""

    name: str
    transposed: bool
    bias: bool
    activate: Callable[[Tensor, nn.Module], Tensor]
    flags: dict[str, bool]


def _plain(gate_up: Tensor, module: nn.Module) -> Tensor:
    return swiglu(gate_up)


class ClampedSwiGLU(NamedTuple):
    """gpt-oss's activation: (up + 1) * gate * sigmoid(alpha * gate) of gates up to a limit and ups within it."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """[..., I] of gates and ups [..., I]."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def clamped_swiglu(gate_up: Tensor, module: nn.Module) -> Tensor:
    """gpt-oss: gates and ups alternate."""
    activation = ClampedSwiGLU(float(module.alpha), float(module.limit))  # pyright: ignore[reportArgumentType]
    return activation(gate_up[..., 0::2], gate_up[..., 1::2])


STYLES = (
    Style("gate_up [E, 2H, K]", False, False, _plain, {"is_transposed": False, "is_concatenated": True}),
    Style("gate_up [E, K, 2H], alternating", True, True, clamped_swiglu, {"is_transposed": True}),
)


def has_experts(module: nn.Module) -> bool:
    """Whether a module has the 3-D parameters of Transformers' experts."""
    held = _own(module)
    return all(name in held and held[name].dim() == 3 for name in WEIGHTS)


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def expert_sizes(module: nn.Module) -> list[tuple[str, int, int, int]]:
    """Name, number of experts, inputs and outputs of each parameter; unknown layouts count as [E, out, in]."""
    style = module.style if isinstance(module, AdaptedExperts) else style_of(module)
    turned = isinstance(style, Style) and style.transposed
    found: list[tuple[str, int, int, int]] = []
    for name in WEIGHTS:
        experts, rows, columns = module.get_parameter(name).shape
        found.append((name, experts, rows, columns) if turned else (name, experts, columns, rows))
    return found


def style_of(module: nn.Module) -> Style | str:
    """The style of a module's experts, or the reason why it has none of the known ones."""
    gate_up, down = (tuple(module.get_parameter(name).shape) for name in WEIGHTS)
    fits = {
        False: gate_up == (down[0], 2 * down[2], down[1]),
        True: gate_up == (down[0], down[2], 2 * down[1]),
    }
    style = next((each for each in STYLES if fits[each.transposed]), None)
    if style is None:
        return f"experts of shapes {gate_up} and {down}, which make no MLP with gates"
    for flag, value in style.flags.items():
        if getattr(module, flag, value) != value:
            return f"experts with {flag}={getattr(module, flag)}, in none of the known arrangements"
    biases = [f"{name}_bias" in _own(module) for name in WEIGHTS]
    if biases != [style.bias, style.bias]:
        has = "with" if any(biases) else "without"
        return f"experts kept as {style.name} {has} biases, which none of the known ones are"
    names = tuple(inspect.signature(type(module).forward).parameters)[1:4]
    if names not in SIGNATURES:
        return f"experts called with ({', '.join(names)}), not with tokens, their experts and weights"
    return _other_activation(module, style) or style


def _other_activation(module: nn.Module, style: Style) -> str | None:
    """Why a module's activation is not the style's, by a probe on [-20, 20]; None if it is."""
    gate, up = torch.meshgrid(torch.linspace(-20, 20, 33), torch.linspace(-20, 20, 33), indexing="ij")
    parts = (gate.flatten(), up.flatten())
    probe = torch.stack(parts, dim=-1).flatten()[None] if style.transposed else torch.cat(parts)[None]
    apply, act = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    try:
        if apply is not None:
            theirs = apply(probe)
        elif style.transposed:
            if type(module).__name__ != "GptOssExperts":
                return "experts with an activation that cannot be called by itself"
            theirs = style.activate(probe, module)
        else:
            theirs = act(parts[0]) * parts[1]  # pyright: ignore[reportOptionalCall]
        ours = style.activate(probe, module)
    except Exception as error:
        return f"experts whose activation could not be tried: {type(error).__name__}"
    if theirs.shape[-1] != ours.shape[-1] or not torch.allclose(theirs.reshape(ours.shape), ours, atol=1e-5, rtol=1e-5):
        return f"experts whose activation is not that of {style.name}"
    return None


class AdaptedExperts(SeveralWeights):
    """A module of Transformers' experts with a recipe; parameters and `state_dict` are unchanged.

    Tokens are sorted by expert, and the cast gathers them as it reads. There is no host sync.
    """

    WEIGHTS: ClassVar[tuple[str, ...]] = WEIGHTS
    RECIPE_ATTRIBUTES: ClassVar[tuple[str, ...]] = (*SeveralWeights.RECIPE_ATTRIBUTES, "style")
    style: Style

    @classmethod
    def convert(cls, module: nn.Module) -> Self:
        """Change the class of a module with a known style, in place. Call `apply_recipe` on it next."""
        style = style_of(module)
        if isinstance(style, str):
            rule = "only experts of a known arrangement can be converted"
            refuse(style, rule, "leave the module as it is")
        converted = super().convert(module)
        converted.style = style
        return converted

    @property
    def stores_transposed(self) -> bool:
        return self.style.transposed

    def own_parameter(self, name: str) -> Tensor:
        """A parameter as a call multiplies it: of this rank's experts, where ranks have their own."""
        return self.get_parameter(name)

    @property
    def is_swiglu(self) -> bool:
        """Whether both products and the activation between them are one function."""
        return self.style.activate is _plain

    def call_states(self) -> tuple[CallOperands, CallOperands]:
        """Weight [E, N, K], bias, stochastic rounding and shared casts of both parameters, for a call made now."""
        first, second = map(self._call_state, WEIGHTS)
        return first, second

    def _call_state(self, name: str) -> CallOperands:
        parameter, recipe = self.own_parameter(name), self.recipe_now
        shared = self.shared_cast(name)
        weight = parameter.mT if self.style.transposed else parameter
        bias = self.own_parameter(f"{name}_bias") if self.style.bias else None
        return weight, bias, self.rounding(name), None if shared is None else shared.operands(parameter, recipe)

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        """Tokens [..., K], the experts of each token [T, k] and their gate weights, [T, k] or of all experts [T, E]."""
        experts, gate_weights = _experts_and_weights(args, named)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts = experts.reshape(tokens.shape[0], -1)
        gate_weights = gate_weights.reshape(tokens.shape[0], -1)
        if gate_weights.shape != experts.shape:
            gate_weights = gate_weights.gather(1, experts)
        routing = sort_by_expert(experts, self.get_parameter(WEIGHTS[0]).shape[0])
        return self.run(tokens, routing, gate_weights).view(hidden_states.shape)

    def run(self, tokens: Tensor, routing: Routing, gate_weights: Tensor | None) -> Tensor:
        """Tokens [T, K] and their routing -> rows [T * k, K] by expert; with gate weights [T, k] -> tokens [T, K]."""
        (gate_up, bias, rounding, pair), (down, other_bias, other_rounding, other) = self.call_states()
        recipe = self.recipe_now
        if self.is_swiglu:
            return grouped_swiglu_mlp(
                tokens,
                gate_up,
                down,
                routing,
                bias,
                other_bias,
                recipe,
                roundings=(rounding, other_rounding),
                weight_operands=(pair, other),
                gate_weights=gate_weights,
            )
        hidden = grouped_linear(tokens, gate_up, routing, bias, recipe, rounding=rounding, weight_operands=pair)
        hidden = self.style.activate(hidden, self)
        rows = grouped_linear(
            hidden, down, routing.offs, other_bias, recipe, rounding=other_rounding, weight_operands=other
        )
        return rows if gate_weights is None else combine(rows, routing, gate_weights)

    def extra_repr(self) -> str:
        return f"{self.plain_class.__name__}, recipe={self.recipe.name}"


def _experts_and_weights(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Experts and gate weights: the second and third argument, by position or name."""
    found = list(args)
    for names in SIGNATURES:
        found += [named[name] for name in names[1:] if name in named]
    if len(found) != 2 or not all(isinstance(each, Tensor) for each in found):
        refuse(
            f"experts called with {len(args)} more arguments and {sorted(named)}",
            "after the tokens come the experts of each token and their gate weights",
            "call them as the converted model's own block does",
        )
    return found[0], found[1]
