"""`BlockScaledLinear`: torchtitan's linear layer with its products in the formats of a recipe.

Parameters, initialisation and sharding are the parent's; checkpoints do not change. Under tensor parallelism weights
and activations are DTensors, and every rank casts and multiplies its own shards (`autograd/dtensor.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchtitan.models.common.linear import Linear

from ... import nn
from ...autograd.activation import Activation
from ...autograd.recipe import Recipe
from .recipe_module import TitanRecipeModule


class BlockScaledLinear(TitanRecipeModule, nn.Linear, Linear):
    """y = x @ weight.mT + bias, trained by a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """recipe: a name or a `Recipe`.  name: of the layer in its model, for stochastic rounding."""

        recipe: str | Recipe = "fp8_blockwise"
        name: str = ""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.init_recipe(config.recipe, config.name)

    def forward(self, input: Tensor | Activation) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return nn.Linear.forward(self, input)
