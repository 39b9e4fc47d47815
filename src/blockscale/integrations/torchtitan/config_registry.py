"""Ready-made torchtitan runs, with bf16 for each model: `--module blockscale.integrations.torchtitan --config NAME`.

A name is a model and a recipe, such as `llama3_debug_fp8_blockwise`:

    llama3_debug    torchtitan's debug Llama
    deepseek_v3_debug   its debug model with experts
    llama3_8b, deepseek_v3_16b   Llama 3 8B and DeepSeek-V3 16B as torchtitan trains them

A name that ends in `_low` has low precision on the wire too: weights are gathered and rows of experts dispatched as
codes, where the recipe allows it. Everything but the layers is the same: data, optimizer, schedule, and activation
checkpointing. Every field can be changed on the command line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

# torchtitan offers every function without an underscore here as a run, so imports have one
import torch as _torch
from torchtitan.config.override import derive as _derive
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b as _deepseek_v3_16b
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel as _deepseek_v3_debug
from torchtitan.models.llama3.config_registry import llama3_8b as _llama3_8b
from torchtitan.models.llama3.config_registry import llama3_debugmodel as _llama3_debug
from torchtitan.trainer import Trainer

from ...autograd.recipe import RECIPES, Recipe
from ...autograd.recipe import get_recipe as _get_recipe
from ...distributed.expert_plan import reason_against_low as _reason_against_low
from ...distributed.weight_gather import plan_of as _plan_of
from .checkpointing import BlockScaledAC
from .convert import BlockScaledConverter
from .metrics import BlockScaledMetrics

# model -> plain run, model registry and flavor
MODELS: dict[str, tuple[Callable[[], Trainer.Config], Callable[..., Any], str]] = {
    "llama3_debug": (_llama3_debug, llama3.model_registry, "debugmodel"),
    "deepseek_v3_debug": (_deepseek_v3_debug, deepseek_v3.model_registry, "debugmodel"),
    "llama3_8b": (_llama3_8b, llama3.model_registry, "8B"),
    "deepseek_v3_16b": (_deepseek_v3_16b, deepseek_v3.model_registry, "16B"),
}


def _wires(model: str, recipe: Recipe) -> dict[str, Any]:
    """Options of the converter for low precision on the wire, as far as a model and its recipe have it."""
    if not recipe.is_quantized:
        return {}
    found = {} if isinstance(_plan_of(recipe, _torch.empty(128, 128, device="meta")), str) else {"gather": "low"}
    has_experts = MODELS[model][1] is deepseek_v3.model_registry
    return found | ({"dispatch": "low"} if has_experts and _reason_against_low(recipe) is None else {})


def _make(model: str, recipe: str | Recipe, *, low: bool = False) -> Trainer.Config:
    """A run of a model with a recipe; `bf16` changes no layer.  low: low precision on the wire too."""
    plain, registry, flavor = MODELS[model]
    config, chosen = plain(), _get_recipe(recipe)
    if config.activation_checkpoint is not None:
        config.activation_checkpoint = _derive(config.activation_checkpoint, BlockScaledAC.Config)
    if chosen.is_quantized:
        wires = _wires(model, chosen) if low else {}
        config.model_spec = registry(flavor, converters=[BlockScaledConverter.Config(recipe=recipe, **wires)])
        config.metrics = _derive(config.metrics, BlockScaledMetrics.Config)
    return config


CONFIGS: dict[str, Callable[[], Trainer.Config]] = {
    f"{model}_{recipe}{'_low' if low else ''}": functools.partial(_make, model, recipe, low=low)
    for model, recipe, low in itertools.product(MODELS, RECIPES, (False, True))
    if not low or _wires(model, _get_recipe(recipe))
}
# torchtitan looks up a function of this module by name
globals().update(CONFIGS)
