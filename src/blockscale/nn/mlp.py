"""`SwiGLU`: the MLP of today's transformers, down(silu(gate(x)) * up(x)), trained by a recipe.

Gate and up are one `Linear` [2H, K], gates first: one product, one cast of the input. Both sublayers are ordinary
layers: conversion, shared weight casts, naming and checkpoints work on them as on any other. The forward bypasses them
and calls `swiglu_mlp`, which fuses the activation with its casts. If a sublayer has hooks, another recipe or another
class, the three parts run one after the other.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from ..autograd.activation import Activation
from ..autograd.dtensor import check_not_packed
from ..autograd.mlp import swiglu, swiglu_mlp
from ..autograd.recipe import Recipe, get_recipe
from ..errors import ShapeError, refuse
from ..formats.checks import check_place, check_sizes, check_text, in_words
from ..formats.stochastic import rng_state
from .linear import Linear
from .recipe_module import DEFAULT_SEED, RecipeModule


class SwiGLU(torch.nn.Module):
    """down(silu(gate(x)) * up(x)) with the sublayers `gate_up` [2 * hidden, dim] and `down` [dim, hidden].

    recipe, rng: as for `Linear`.  name: of the module in its model, such as "layers.0.mlp"; the streams of
    stochastic rounding are then "layers.0.mlp.gate_up" and "layers.0.mlp.down".

    >>> mlp = SwiGLU(128, 256, recipe="mxfp8")
    >>> mlp(torch.randn(2, 3, 128)).shape
    torch.Size([2, 3, 128])
    >>> mlp
    SwiGLU(
      (gate_up): Linear(in_features=128, out_features=512, bias=False, recipe=mxfp8)
      (down): Linear(in_features=256, out_features=128, bias=False, recipe=mxfp8)
    )
    """

    gate_up: Linear
    down: Linear

    def __init__(
        self,
        dim: int,
        hidden: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "fp8_blockwise",
        name: str = "",
        rng: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, hidden=hidden)
        check_place(device, dtype)
        check_text(name, "name", "layers.0.mlp")
        if rng is None and get_recipe(recipe).stochastic:
            rng = rng_state(DEFAULT_SEED, device=device or torch.get_default_device())
        for part, inputs, outputs in (("gate_up", dim, 2 * hidden), ("down", hidden, dim)):
            full = f"{name}.{part}" if name else ""
            layer = Linear(inputs, outputs, bias, device, dtype, recipe=recipe, name=full, rng=rng)
            layer.is_packed = part == "gate_up"
            self.add_module(part, layer)

    @classmethod
    def from_linears(
        cls,
        gate: torch.nn.Linear,
        up: torch.nn.Linear,
        down: torch.nn.Linear,
        recipe: str | Recipe = "fp8_blockwise",
        *,
        name: str = "",
        rng: Tensor | None = None,
    ) -> SwiGLU:
        """The module with the parameters of three separate projections.

        gate and up are copied into one new parameter, so construct the optimizer after it; down's parameters are the
        same objects. `mlp.gate_up.weight.chunk(2)` are views of the two, for checkpoints of the other model.

        >>> gate, up, down = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)
        >>> mlp = SwiGLU.from_linears(gate, up, down, "mxfp8")
        >>> mlp.gate_up.weight.shape, mlp.down.weight is down.weight
        (torch.Size([192, 64]), True)
        """
        check_projections(gate, up, down)
        hidden, dim = gate.weight.shape
        if rng is None and get_recipe(recipe).stochastic:
            rng = rng_state(DEFAULT_SEED, device=gate.weight.device)
        # on the meta device: these weights are replaced at once
        mlp = cls(dim, hidden, _has_bias(gate), "meta", recipe=recipe, name=name, rng=rng)
        for part in ("weight", "bias"):
            first, second = getattr(gate, part), getattr(up, part)
            if first is not None:
                both = torch.cat((first.detach(), second.detach()))
                setattr(mlp.gate_up, part, Parameter(both, first.requires_grad or second.requires_grad))
            setattr(mlp.down, part, getattr(down, part))
        mlp.train(gate.training)
        return mlp

    def forward(self, x: Tensor | Activation) -> Tensor:
        """[..., dim] -> [..., dim]."""
        first, second = self.gate_up, self.down
        if not are_plain(first, second, Linear):
            check_not_packed("gate_up.weight", getattr(first, "weight", None))
            return second(swiglu(first(x)))
        (rounding, operands), (other_rounding, other_operands) = first.call_state(), second.call_state()
        return swiglu_mlp(
            x,
            first.weight,
            second.weight,
            first.bias,
            second.bias,
            first.recipe_now,
            roundings=(rounding, other_rounding),
            weight_operands=(operands, other_operands),
        )

    @property
    def is_fused(self) -> bool:
        """Whether a forward made now bypasses the sublayers: no hooks, one recipe, our own classes.

        >>> mlp = SwiGLU(64, 64)
        >>> handle = mlp.down.register_forward_hook(print)
        >>> mlp.is_fused
        False
        """
        return are_plain(self.gate_up, self.down, Linear)


def are_plain(first: RecipeModule, second: RecipeModule, kind: type[torch.nn.Module]) -> bool:
    """Whether two layers have one recipe, and calling them runs only the forward of that class."""
    return is_plain(first, kind) and is_plain(second, kind) and first.recipe_now == second.recipe_now


def is_plain(layer: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether calling the layer runs only the forward of that class: no hooks, no replaced forward."""
    if type(layer).forward is not kind.forward or "forward" in layer.__dict__:
        return False
    has_forward_hooks = layer._forward_hooks or layer._forward_pre_hooks
    return not (has_forward_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _has_bias(layer: torch.nn.Linear) -> bool:
    return getattr(layer, "bias", None) is not None


def check_projections(gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> None:
    """Raise unless three layers make one SwiGLU."""
    for name, layer in (("gate", gate), ("up", up), ("down", down)):
        if not isinstance(layer, torch.nn.Linear):  # pyright: ignore[reportUnnecessaryIsInstance]
            rule, fix = "gate, up and down are torch.nn.Linear layers", "pass the projections of one MLP, in this order"
            refuse(f"{name} is {in_words(layer)}", rule, fix)
    hidden, dim = gate.weight.shape
    if up.weight.shape != (hidden, dim) or down.weight.shape != (dim, hidden):
        shapes = [tuple(layer.weight.shape) for layer in (gate, up, down)]
        refuse(
            f"gate, up and down have weights {shapes}",
            rule="they are [H, K], [H, K] and [K, H]",
            fix="pass the projections of one MLP, in this order",
            error=ShapeError,
        )
    for what, found in (
        ("a bias", {_has_bias(layer) for layer in (gate, up, down)}),
        ("a dtype", {layer.weight.dtype for layer in (gate, up)}),
        ("a device", {layer.weight.device for layer in (gate, up)}),
    ):
        if len(found) > 1:
            refuse(
                f"projections differ in {what}: {', '.join(sorted(map(str, found)))}",
                "gate and up become one parameter, and all three have a bias or none has",
                "make them alike first, or keep them apart and convert each",
            )
