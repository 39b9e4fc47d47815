"""`BlockScaledLinear`: torchtitan's linear layer with its products in the formats of a recipe.

Parameters, initialisation and sharding are the parent's; checkpoints do not change. Under tensor parallelism weights
and activations are DTensors: every rank casts and multiplies its own pieces, so that nothing is gathered that
torchtitan would not gather, and results are placed as torch's own product places them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.models.common.linear import Linear

from ... import nn
from ...autograd.activation import Activation
from ...autograd.linear import linear
from ...autograd.recipe import Recipe
from ...errors import LayoutError, message
from .follower import TitanFollower


class BlockScaledLinear(TitanFollower, nn.Linear, Linear):
    """y = x @ weight.mT + bias, trained by a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """recipe: a name or a `Recipe`.  name: where the layer is in its model, which recipes that draw need."""

        recipe: str | Recipe = "fp8_blockwise"
        name: str = ""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.begin(config.recipe, config.name)

    def forward(self, input: Tensor | Activation) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if isinstance(self.weight, DTensor):
            return self._forward_of_pieces(input, self.weight)
        return super().forward(input)

    def _forward_of_pieces(self, x: Any, weight: DTensor) -> Tensor:
        mesh, last = weight.device_mesh, x.dim() - 1
        if not isinstance(x, DTensor) or x.device_mesh != mesh:
            raise LayoutError(
                message(
                    f"{self.name or 'a layer'}: the weight is a DTensor, the input is a {type(x).__name__}",
                    rule="both are DTensors of one mesh, or none is",
                    fix="let torchtitan's sharding config place the input",
                )
            )
        ways = [_way(*each, last) for each in zip(x.placements, weight.placements, strict=True)]
        rounding, _ = self.given()
        y = linear(
            x.to_local(grad_placements=[way.dx for way in ways]),
            weight.to_local(grad_placements=[way.dw for way in ways]),
            recipe=self.recipe_now,
            rounding=rounding,
        )
        whole = DTensor.from_local(y, mesh, [way.y for way in ways], run_check=False)
        return whole if self.bias is None else whole + self.bias  # pyright: ignore[reportUnnecessaryComparison]


class _Way(NamedTuple):
    """Where the result of a product is, and the gradients of what goes into it."""

    y: Placement
    dx: Placement
    dw: Placement


def _way(x: Placement, weight: Placement, last: int) -> _Way:
    """How ranks share y = x @ weight.mT along one dimension of their mesh.  last: the axis of x that is contracted."""
    if weight.is_replicate() and x.is_replicate():
        return _Way(Replicate(), Replicate(), Replicate())
    if weight.is_replicate() and isinstance(x, Shard) and x.dim != last:
        return _Way(x, x, Partial())
    if weight.is_shard(0) and x.is_replicate():
        return _Way(Shard(last), Partial(), weight)
    if weight.is_shard(1) and x.is_shard(last):
        return _Way(Partial(), x, weight)
    raise LayoutError(
        message(
            f"an input placed {x} for a weight placed {weight}",
            rule="tokens are cut with a whole weight, a weight's rows with a whole input, or both along input features",
            fix="give the layer torchtitan's colwise or rowwise sharding config",
        )
    )
