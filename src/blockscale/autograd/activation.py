"""`activation`: an input that several layers share (q, k and v; gate and up), cast once for all of them.

Gradients of the layers add up in high precision at the source, as they do for a plain tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..casts import check_source
from ..errors import OptionError, ShapeError, message
from ..formats.checks import check_tensor
from .operands import Casts, Pair, matrix
from .recipe import Recipe, get_recipe


@dataclass(frozen=True, eq=False)
class Activation:
    """A tensor and its operands. source: where gradients go.  row, col: what fprop and wgrad take, None in high
    precision."""

    source: Tensor
    casts: tuple[Recipe, Pair]

    @property
    def shape(self) -> torch.Size:
        return self.source.shape

    def operands(self, recipe: Recipe) -> Pair:
        """What a layer takes, whose recipe must cast inputs alike."""
        made, pair = self.casts
        roles = ("fprop_x", "wgrad_x")
        if made is not recipe and any(made.operand(role) != recipe.operand(role) for role in roles):
            raise OptionError(
                message(
                    f"an activation cast by {made.name!r} for a layer with {recipe.name!r}",
                    rule="layers that share a cast have the same formats for their input",
                    fix=f"make it with activation(x, {recipe.name!r}), or pass the tensor itself",
                )
            )
        return pair


def activation(x: Tensor, recipe: str | Recipe = "fp8_blockwise") -> Activation:
    """Cast an input [..., K] once for all layers that take it.

    >>> x = torch.randn(4, 64, requires_grad=True)
    >>> shared = activation(x, "mxfp8")
    >>> weights = [torch.randn(32, 64, requires_grad=True) for _ in range(3)]
    >>> from blockscale.autograd import linear
    >>> sum(linear(shared, weight, recipe="mxfp8") for weight in weights).sum().backward()
    >>> x.grad.shape
    torch.Size([4, 64])
    """
    chosen = get_recipe(recipe)
    check_tensor(x, "x", "layers")
    if not x.dim():
        rule, fix = "an input is [..., K]", "pass a tensor with features along its last axis"
        raise ShapeError(message(f"x has shape {tuple(x.shape)}", rule=rule, fix=fix))
    x_MK = x if x.dim() != 1 else x[None]
    if chosen.is_low:
        check_source(x_MK, "x")
    return Activation(x, (chosen, Casts(chosen).input(matrix(x_MK), waits=torch.is_grad_enabled())))
