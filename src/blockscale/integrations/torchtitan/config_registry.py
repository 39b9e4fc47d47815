"""Ready-made torchtitan runs, with bf16 for each model: `--module blockscale.integrations.torchtitan --config NAME`.

A name is a model and a recipe, such as `llama3_debug_fp8_blockwise`:

    llama3_debug    torchtitan's debug Llama
    deepseek_v3_debug   its debug model with experts
    llama3_8b       Llama 3 8B as torchtitan trains it

Everything but the layers is the same: data, optimizer, schedule, and activation checkpointing. Every field can be
changed on the command line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# torchtitan offers every function without an underscore here as a run, so imports have one
from torchtitan.config.override import derive as _derive
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel as _deepseek_v3_debug
from torchtitan.models.llama3.config_registry import llama3_8b as _llama3_8b
from torchtitan.models.llama3.config_registry import llama3_debugmodel as _llama3_debug
from torchtitan.trainer import Trainer

from ...autograd.recipe import RECIPES, Recipe
from ...autograd.recipe import get_recipe as _get_recipe
from .checkpointing import BlockScaledAC
from .convert import BlockScaledConverter
from .metrics import BlockScaledMetrics

# model -> plain run, model registry and flavor
MODELS: dict[str, tuple[Callable[[], Trainer.Config], Callable[..., Any], str]] = {
    "llama3_debug": (_llama3_debug, llama3.model_registry, "debugmodel"),
    "deepseek_v3_debug": (_deepseek_v3_debug, deepseek_v3.model_registry, "debugmodel"),
    "llama3_8b": (_llama3_8b, llama3.model_registry, "8B"),
}


def _make(model: str, recipe: str | Recipe) -> Trainer.Config:
    """A run of a model with a recipe; `bf16` changes no layer."""
    plain, registry, flavor = MODELS[model]
    config = plain()
    if config.activation_checkpoint is not None:
        config.activation_checkpoint = _derive(config.activation_checkpoint, BlockScaledAC.Config)
    if _get_recipe(recipe).is_quantized:
        config.model_spec = registry(flavor, converters=[BlockScaledConverter.Config(recipe=recipe)])
        config.metrics = _derive(config.metrics, BlockScaledMetrics.Config)
    return config


CONFIGS: dict[str, Callable[[], Trainer.Config]] = {
    f"{model}_{recipe}": functools.partial(_make, model, recipe) for model in MODELS for recipe in RECIPES
}
# torchtitan looks up a function of this module by name
globals().update(CONFIGS)
