"""`activation`: an input that several layers share (q, k and v; gate and up), cast once for all of them.

Gradients of the layers add up at the source in its own dtype, as for a plain tensor. Layers refuse an input that was
changed in place after its cast, or given other data; compiled code does not check.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..casts.checks import check_source
from ..errors import ShapeError, StaleActivationError, refuse
from ..formats.checks import check_tensor
from .dtensor import DTensor, check_tensor_scales
from .operands import Casts, Pair, matrix
from .recipe import Recipe, get_recipe
from .stamps import Stamp, stamp_of, storage_of
from .transforms import check_transforms


@dataclass(frozen=True, eq=False)
class Activation:
    """A tensor and its operands.

    source: the tensor that receives gradients.  casts: the recipe, and the operands of fprop and wgrad, each None if
    unquantized. The pair is None for a source made in inference mode, which has no version counter: every layer casts
    it.  version: stamp of the source at the cast, None in compiled code.  storage: memory of the source at that time.
    """

    source: Tensor
    casts: tuple[Recipe, Pair | None]
    version: Stamp | None = None
    storage: torch.UntypedStorage | None = None

    @property
    def shape(self) -> torch.Size:
        return self.source.shape

    def operands(self, recipe: Recipe) -> Pair | None:
        """Operands for a layer, whose recipe must cast inputs alike; None if the layer has to cast the source."""
        cast_by, pair = self.casts
        roles = ("fprop_x", "wgrad_x")
        if cast_by is not recipe and any(cast_by.operand(role) != recipe.operand(role) for role in roles):
            refuse(
                f"an activation cast by {cast_by.name!r} for a layer with {recipe.name!r}",
                rule="layers that share a cast have the same formats for their input",
                fix=f"make it with activation(x, {recipe.name!r}), or pass the tensor itself",
            )
        if self.version is not None and not torch.compiler.is_compiling() and stamp_of(self.source) != self.version:
            refuse(
                f"an activation {tuple(self.shape)} whose input has changed since it was cast",
                rule="an input keeps its values until all layers that share its cast have run",
                fix="call activation(x) after the change, or change a copy of x",
                error=StaleActivationError,
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
    if chosen.is_quantized:
        check_transforms(x)
    if not x.dim():
        rule, fix = "an input is [..., K]", "pass a tensor with features along its last axis"
        refuse(f"x has shape {tuple(x.shape)}", rule, fix, error=ShapeError)
    x_MK = x if x.dim() != 1 else x[None]
    if chosen.is_quantized:
        check_source(x_MK, "x")
    if isinstance(x_MK, DTensor):  # layers on DTensors multiply local shards
        if not all(placement.is_replicate() for placement in x_MK.placements):
            check_tensor_scales(f"an activation placed {x_MK.placements}", chosen)
        x_MK = x_MK.to_local()
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and x.is_inference():
        return Activation(x, (chosen, None))
    casts = chosen, Casts(chosen).input(matrix(x_MK), save=torch.is_grad_enabled())
    return Activation(x, casts) if is_compiling else Activation(x, casts, stamp_of(x), storage_of(x))
