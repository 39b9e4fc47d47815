"""Checks of a config before anything is built; errors give the value, the rule and the fix.

Imports no torch, so that the command line reports errors before the seconds that this import takes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .. import env
from ..errors import OptionError, check_name, message, option
from ..models.config import ModelConfig
from ..names import FORMAT_NAMES, check_recipe
from .config import OptimizerConfig, RecipeConfig, RunConfig
from .corpus import check_source, expanded

if TYPE_CHECKING:
    import torch


# largest count in a config; torch's generators take seeds of 64 bits, signed or not
MOST = 2**31 - 1
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1
# largest number of paired seeds in a comparison
MOST_SEEDS = 1000
_POSITIVE = ("steps", "batch", "accumulate", "loss_chunks", "log_every")
_MAY_BE_ZERO = ("eval_every", "eval_batches", "save_every", "profile", "numerics_every")


def _refuse(what: str, rule: str, fix: str) -> NoReturn:
    raise OptionError(message(what, rule=rule, fix=fix))


def check(config: RunConfig) -> None:
    """Raise if a config cannot be trained, with the value, the rule and the fix."""
    _check_model(config.model)
    _check_optimizer(config.optimizer)
    for name in _POSITIVE:
        if getattr(config, name) < 1:
            _refuse(option(name, getattr(config, name)), "it is 1 or more", f"pass {option(name, 1)} or more")
    for name in _MAY_BE_ZERO:
        if getattr(config, name) < 0:
            what = option(name, getattr(config, name))
            _refuse(what, "it is a count, and 0 means never", f"pass {option(name, 0)} or more")
    for name in (*_POSITIVE, *_MAY_BE_ZERO):
        if getattr(config, name) > MOST:
            _refuse(option(name, getattr(config, name)), "it is below 2**31", f"pass {option(name, MOST)} or less")
    check_seeds(config.seed)
    if config.keep < 1:
        _refuse(option("keep", config.keep), "the last checkpoint is always kept", f"pass {option('keep', 1)} or more")
    check_recipe_config(config)
    check_source(config.data.source)
    if config.data.sequence < 2:
        what, fix = option("data.sequence", config.data.sequence), f"pass {option('data.sequence', 2)} or more"
        _refuse(what, "a piece predicts at least one symbol", fix)
    if not 0 < config.data.held_out < 1:
        _refuse(
            option("data.held_out", config.data.held_out),
            "it is the share of the files for validation, between 0 and 1",
            f"pass {option('data.held_out', 0.1)}",
        )
    if config.folder is None:
        for name in ("resume", "save_every", "profile", "numerics_every", "tensorboard"):
            if getattr(config, name):
                _refuse(
                    f"{option(name, getattr(config, name))} without a folder",
                    "checkpoints, traces and metrics are kept in the folder of a run",
                    f"pass {option('folder', f'out/{config.name}')}",
                )
    for written in (config.folder, config.export, config.data.cache or env.cache_folder("corpora")):
        if written is not None:
            check_apart(config, written)
    if config.deterministic and config.attention == "cudnn":
        _refuse(
            f"deterministic with {option('attention', 'cudnn')}",
            "torch classifies cuDNN's attention as nondeterministic",
            f"pass {option('attention', 'auto')}, or flash",
        )
    if config.export is not None and (config.model.experts is not None or config.model.latent is not None):
        _refuse(
            f"{option('export', config.export)} of a model with experts or latent attention",
            "dense models with grouped queries have names that every Llama loader knows",
            "leave it out; checkpoints hold every weight by its own name",
        )


def check_seeds(first: int, count: int = 1) -> None:
    """Raise if seeds first, first + 1, ... are outside a generator's range, or if there are more than MOST_SEEDS."""
    if not 1 <= count <= MOST_SEEDS:
        rule = f"a comparison has 1 to {MOST_SEEDS} seeds"
        _refuse(option("seeds", count), rule, f"pass {option('seeds', 1 if count < 1 else MOST_SEEDS)}")
    if not LEAST_SEED <= first <= MOST_SEED - count + 1:
        what = option("seed", first) + (f" with {option('seeds', count)}" if count > 1 else "")
        _refuse(what, "seeds are integers from -2**63 to 2**64 - 1", f"pass {option('seed', 0)}")


def check_recipe_config(config: RunConfig) -> None:
    """Raise if the recipe is unknown or does not fit the run."""
    recipe, start = config.recipe, config.start
    check_recipe(recipe.name)
    _check_ends(recipe)
    if recipe.weights is not None:
        check_name(recipe.weights, FORMAT_NAMES, "format")
    if not 0 <= recipe.since < config.steps:
        _refuse(
            f"{option('recipe.since', recipe.since)} of {config.steps} steps",
            "low precision begins before the last step",
            f"pass {option('recipe.since', 0)} to {config.steps - 1}, or leave it out",
        )
    if recipe.since and start is not None:
        _refuse(
            f"{option('recipe.since', recipe.since)} of a run that starts from {start}",
            "a run that starts from a checkpoint applies its recipe at once",
            f"leave {option('recipe.since')} out, or start from a checkpoint of that step",
        )


def _check_ends(recipe: RecipeConfig) -> None:
    first, last = recipe.keep_first, recipe.keep_last
    if first is not None and first < 0:
        what, fix = option("recipe.keep_first", first), f"pass {option('recipe.keep_first', 0)} or more"
        _refuse(what, "it is a number of blocks", fix)
    if last is not None and not (0 <= last <= 1 if isinstance(last, float) else last >= 0):
        rule = "it is a number of blocks (an int) or a share of them (a float from 0 to 1)"
        fix = f"pass {option('recipe.keep_last', 0)} or more, or {option('recipe.keep_last', 0.1)}"
        _refuse(option("recipe.keep_last", last), rule, fix)


def check_apart(config: RunConfig, folder: Path) -> None:
    """Raise if a run would write into the folder of text that it reads."""
    source = expanded(config.data.source)
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        places = ", ".join(option(name) for name in ("folder", "export", "data.cache"))
        _refuse(
            f"a run that writes to {folder} on the text of {source}",
            "its output would become training text of the next run, which could not resume",
            f"name a folder outside of the text ({places})",
        )


def _check_optimizer(config: OptimizerConfig) -> None:
    def written(name: str) -> str:
        return option(f"optimizer.{name}", getattr(config, name))

    for name in ("warmup", "decay", "floor"):
        if not 0 <= getattr(config, name) <= 1:
            _refuse(written(name), "it is a share from 0 to 1", f"pass {option(f'optimizer.{name}', 0.1)}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            _refuse(written(name), "it is a share from 0 to below 1", f"pass {option(f'optimizer.{name}', 0.95)}")
    for name in ("rate", "eps", "weight_decay", "clip"):
        if not 0 <= getattr(config, name) < float("inf"):
            _refuse(written(name), "it is finite and not negative", f"pass {option(f'optimizer.{name}', 0)} or more")
    if not config.eps:
        rule = "Adam divides by it where a gradient has always been zero"
        _refuse(written("eps"), rule, f"pass {option('optimizer.eps', 1e-8)}")
    if config.schedule == "wsd" and config.warmup + config.decay > 1:
        _refuse(
            f"{written('warmup')} and {written('decay')}",
            "both are shares of the same steps, and wsd has all of its phases",
            "pass shares that add up to 1 at most",
        )


def _check_model(config: ModelConfig) -> None:
    def written(name: str) -> str:
        return option(f"model.{name}", getattr(config, name))

    for name in ("dim", "layers", "heads", "kv_heads", "hidden", "vocabulary"):
        if getattr(config, name) < 1:
            _refuse(written(name), "sizes of a model are positive", f"pass {option(f'model.{name}', 1)} or more")
    if config.head_dim < 0:
        rule, fix = "it is a size, and 0 is dim / heads", f"pass {option('model.head_dim', 0)} or more"
        _refuse(written("head_dim"), rule, fix)
    if not (0 < config.rope_theta < math.inf and 0 <= config.norm_eps < math.inf):
        _refuse(
            f"{written('rope_theta')}, {written('norm_eps')}",
            "positions rotate by powers of a positive number, and a norm divides by a root",
            f"pass {option('model.rope_theta', 10000)} and {option('model.norm_eps', 1e-5)}",
        )
    if config.latent is None:
        if config.heads % config.kv_heads:
            _refuse(
                f"{written('heads')} with {written('kv_heads')}",
                "each head of keys and values serves as many heads of queries",
                f"pass {option('model.kv_heads', math.gcd(config.heads, config.kv_heads))}, which divides the heads",
            )
        if not config.head_dim and config.dim % config.heads:
            fix = f"pass {option('model.head_dim', max(2, config.dim // config.heads // 2 * 2))} too"
            _refuse(f"{written('dim')} with {written('heads')}", "heads share the width evenly", fix)
        rotated = config.head_width
    else:
        rotated = config.latent.rope_dim
        for name, least in (("kv_rank", 1), ("nope_dim", 1), ("value_dim", 1), ("rope_dim", 1), ("q_rank", 0)):
            value = getattr(config.latent, name)
            if value < least:
                rule = "sizes are positive" if least else "0 means that queries have none"
                _refuse(option(f"model.latent.{name}", value), rule, f"pass {least} or more")
    if rotated % 2:
        _refuse(f"heads with {rotated} rotated features", "positions rotate pairs of features", "pass an even number")
    _check_experts(config)


def _check_experts(config: ModelConfig) -> None:
    experts = config.experts
    if experts is None:
        return

    def written(name: str) -> str:
        return option(f"model.experts.{name}", getattr(experts, name))

    if not 1 <= experts.top_k <= experts.count:
        _refuse(
            f"{written('top_k')} of {experts.count} experts",
            "a token goes to at least one expert, and to each no more than once",
            f"pass {option('model.experts.top_k', 1)} to {experts.count}",
        )
    for name, least in (("hidden", 1), ("shared", 0), ("dense_layers", 0)):
        if getattr(experts, name) < least:
            rule = "experts have hidden units" if least else "it is a count"
            _refuse(written(name), rule, f"pass {option(f'model.experts.{name}', least)} or more")
    if not (math.isfinite(experts.scale) and 0 <= experts.balance_rate < math.inf):
        _refuse(
            f"{written('scale')}, {written('balance_rate')}",
            "both are finite, and biases move towards balance",
            f"pass {option('model.experts.scale', 1)} and {option('model.experts.balance_rate', 0.001)}",
        )


def check_fits(config: RunConfig, symbols: int, device: torch.device) -> None:
    """Raise if the config does not fit the text's vocabulary or the device."""
    if symbols > config.model.vocabulary:
        _refuse(
            f"{option('model.vocabulary', config.model.vocabulary)} for {symbols} symbols",
            "the vocabulary covers every symbol of the text",
            f"pass {option('model.vocabulary', -(-symbols // 128) * 128)}",
        )
    if config.attention in ("cudnn", "efficient") and device.type != "cuda":
        what, fix = f"{option('attention', config.attention)} on {device}", f"pass {option('attention', 'auto')}"
        _refuse(what, "this attention backend needs a GPU", fix)
    if config.cuda_graph and device.type != "cuda":
        fix = f"leave {option('cuda_graph')} out"
        _refuse(f"{option('cuda_graph')} on {device}", "a CUDA graph is captured on a GPU", fix)
