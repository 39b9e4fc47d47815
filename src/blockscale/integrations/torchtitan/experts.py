"""`BlockScaledExperts`: torchtitan's experts with their products in the formats of a recipe.

Gates and ups are one product: their input is cast once, and silu(gate) * up is cast as it is computed. For that both
weights are concatenated in every forward, a copy that costs about as much as their cast. Groups have any size, zero
included: the dispatcher need not pad.

Experts with another activation (gpt-oss) keep their forward; their products have the formats of the recipe.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchtitan.models.common.moe import GroupedExperts

from ...autograd.dtensor import DTensor, check_shards, local, shard_shape
from ...autograd.grouped import grouped_linear, grouped_swiglu_mlp
from ...autograd.recipe import Recipe
from ...formats.spec import get_format
from ...nn.recipe_module import SeveralWeights
from .recipe_module import TitanRecipeModule


class RecipeExperts(TitanRecipeModule):
    """Base class of experts with a recipe."""

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Raise unless shards hold whole blocks; torchtitan shards experts or features over ranks."""
        check_shards(where, tuple(parameter.shape), shard_shape(parameter), recipe)


class BlockScaledExperts(RecipeExperts, SeveralWeights, GroupedExperts):
    """Experts that are each w2(silu(w1(x)) * w3(x)), trained by a recipe."""

    WEIGHTS: ClassVar[tuple[str, ...]] = ("w1_EFD", "w2_EDF", "w3_EFD")

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """recipe, name: as for `BlockScaledLinear`."""

        recipe: str | Recipe = "fp8_blockwise"
        name: str = ""

    def __init__(self, config: Config) -> None:
        GroupedExperts.__init__(self, config)
        self.init_recipe(config.recipe, config.name)

    def reason_against_codes(self, parameter: str) -> str | None:
        """As for other layers, and for gates and ups, which are concatenated: a block must not hold both."""
        kind, rows = self.recipe.formats()["fprop_w"], local(self.get_parameter(parameter)).shape[-2]
        if kind is not None and parameter != "w2_EDF":
            spec = get_format(kind)
            if rows % spec.block[0]:
                return f"gates and ups are one operand, and {rows} rows of gates split a block of {spec.block[0]}"
            if spec.family == "nvfp4":
                return "gates and ups are one operand, whose tensor scales are those of both"
        return super().reason_against_codes(parameter)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Rows [R, D] sorted by expert, and the number of rows of each expert [E] -> rows [R, D]."""
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        return grouped_swiglu_mlp(
            x_RD.bfloat16(),
            *self.weights(),
            offs,
            recipe=self.recipe_now,
            roundings=(self.rounding("gate_up"), self.rounding("down")),
        ).type_as(x_RD)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Gates and ups [E, 2F, D] and downs [E, D, F] of this rank's experts, in a call."""
        gate, up, down = (local(each) for each in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        return torch.cat((gate, up), dim=1), down


@functools.cache
def experts_class(plain: type[Any]) -> type[Any]:
    """Subclass of a plain class of experts with a recipe. It overrides `_grouped_mm`, through which torchtitan calls
    every product."""
    if plain is GroupedExperts:
        return BlockScaledExperts

    class Experts(RecipeExperts, plain):
        @dataclass(kw_only=True, slots=True)
        class Config(plain.Config):
            recipe: str | Recipe = "fp8_blockwise"
            name: str = ""

        def __init__(self, config: Any) -> None:
            super().__init__(config)  # pyright: ignore[reportCallIssue]
            self.init_recipe(config.recipe, config.name)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            rounding = self.rounding("x".join(map(str, B_t.shape[1:])))
            return grouped_linear(A, B_t.mT, offs, recipe=self.recipe_now, rounding=rounding)

    Experts.__name__ = Experts.__qualname__ = f"BlockScaled{plain.__name__}"
    return Experts
