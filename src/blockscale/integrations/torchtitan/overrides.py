"""Overrides: recipes for a torchtitan run that is changed by its command line alone.

    --override.imports 'blockscale.integrations.torchtitan.overrides.linear={"recipe": "mxfp8"}'

An override sees a layer's config and not its name. Features that need names (end blocks kept with 4-bit formats,
streams of stochastic rounding) need the converter.
"""

# torchtitan's decorator returns the same function, without a type annotation
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any

from torchtitan.config.override import override
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

from ...autograd.recipe import Recipe
from ...errors import refuse
from ...nn.policy import has_four_bits
from .convert import converted_config
from .recipe_module import training_recipe

# routers are left out by name (moe.router.gate); lm_head is outside of layers
LINEAR_FQNS = ["*layers.*.attention.*", "*layers.*.feed_forward.*", "*layers.*.moe.shared_experts.*"]
EXPERT_FQNS = ["*layers.*"]


@override(target=Linear.Config, fqns=LINEAR_FQNS, description="linear layers with a recipe")
def linear(config: Linear.Config, recipe: str = "fp8_blockwise", weight_cast: str | None = None) -> Any:
    """The linear layers of blocks: attention, dense MLPs and shared experts."""
    return _converted(config, recipe, weight_cast)


@override(target=GroupedExperts.Config, fqns=EXPERT_FQNS, description="experts with a recipe")
def experts(config: GroupedExperts.Config, recipe: str = "fp8_blockwise", weight_cast: str | None = None) -> Any:
    """The routed experts of blocks."""
    return _converted(config, recipe, weight_cast)


def _converted(config: Any, recipe: str | Recipe, weight_cast: str | None) -> Any:
    chosen = training_recipe(recipe, weight_cast)
    if chosen.stochastic or has_four_bits(chosen):
        refuse(
            f"recipe {chosen.name!r} as an override",
            "4-bit formats keep the first and last blocks, and stochastic rounding needs a layer's name; an "
            "override has neither",
            "use BlockScaledConverter, or a config of blockscale.integrations.torchtitan",
        )
    converted = converted_config(config, chosen)
    if isinstance(converted, str):
        logger.info(f"kept in high precision: {converted}")
        return config
    return converted
