"""Checks of a config before anything is built; errors give the value, the rule and the fix.

Imports no torch, so that the command line reports errors before the seconds that this import takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import env
from ..errors import check_name, option, refuse
from ..names import FORMAT_NAMES, check_recipe
from .config import RunConfig
from .corpus import check_source, expanded

if TYPE_CHECKING:
    import torch

# largest count in a config; torch's generators take seeds of 64 bits, signed or not
MOST = 2**31 - 1
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1
# largest number of paired seeds in a comparison
MOST_SEEDS = 1000
_NEED_A_FOLDER = ("resume", "save_every", "profile", "numerics_every", "tensorboard")
_SINGLE_RUN = ("folder", "export", "tensorboard", "numerics_every", "profile", "resume")

_NOT_OVER_RANKS = {
    "cuda_graph": "FSDP2 frees and gathers weights, whose addresses a captured graph would keep",
    "numerics_every": "samples read whole weights and gradients, and ranks have shards",
}


def _from(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    """Whether a value is finite, `least` or more, and `most` or less."""
    return lambda value: least <= value <= most and value < math.inf


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low < value < high


# group of fields, their names, whether a value is right, the rule, a right value (an int: the least one)
_VALUES: tuple[tuple[str, str, Callable[[Any], bool], str, float], ...] = (
    ("model", "dim layers heads kv_heads hidden vocabulary", _from(1), "sizes of a model are positive", 1),
    ("model", "head_dim", _from(0), "it is a size, and 0 is dim / heads", 0),
    ("model", "rope_theta", _between(0, math.inf), "positions rotate by powers of a positive number", 1e4),
    ("model", "norm_eps", _from(0), "a norm divides by a root", 1e-5),
    ("model.latent", "kv_rank nope_dim value_dim rope_dim", _from(1), "sizes are positive", 1),
    ("model.latent", "q_rank", _from(0), "0 means that queries have none", 0),
    ("model.experts", "hidden", _from(1), "experts have hidden units", 1),
    ("model.experts", "shared dense_layers", _from(0), "it is a count", 0),
    ("model.experts", "scale", math.isfinite, "it is finite", 1.0),
    ("model.experts", "balance_rate", _from(0), "it is finite, and biases move towards balance", 0.001),
    ("optimizer", "warmup decay floor", _from(0, 1), "it is a share from 0 to 1", 0.1),
    ("optimizer", "beta1 beta2", lambda value: 0 <= value < 1, "it is a share from 0 to below 1", 0.95),
    ("optimizer", "rate weight_decay clip", _from(0), "it is finite and not negative", 0),
    ("optimizer", "eps", _between(0, math.inf), "Adam divides by it where a gradient has always been zero", 1e-8),
    ("recipe", "keep_first", lambda value: value is None or value >= 0, "it is a number of blocks", 0),
    ("recipe", "keep_last", lambda value: value is None or (value >= 0 and (isinstance(value, int) or value <= 1)),
     "it is a number of blocks (an int) or a share of them (a float from 0 to 1)", 0.1),
    ("", "steps batch accumulate loss_chunks log_every", _from(1, MOST), "it is a count from 1 to 2**31 - 1", 1),
    ("", "eval_every eval_batches save_every profile numerics_every", _from(0, MOST),
     "it is a count below 2**31, and 0 means never", 0),
    ("", "keep", _from(1), "the last checkpoint is always kept", 1),
    ("ranks", "experts", _from(1), "it is a number of ranks", 1),
    ("ranks", "timeout", _between(0, 1e6), "it is a time in seconds", 600.0),
    ("data", "sequence", _from(2), "a piece predicts at least one symbol", 2),
    ("data", "held_out", _between(0, 1), "it is the share of the files for validation, between 0 and 1", 0.1),
)  # fmt: skip


def refuse_if(is_broken: object, what: str, rule: str, fix: str) -> None:
    """Raise if a rule is broken, with the value, the rule and the fix."""
    if is_broken:
        refuse(what, rule, fix)


def check(config: RunConfig) -> None:
    """Raise if a config cannot be trained, with the value, the rule and the fix."""
    _check_values(config)
    _check_model(config)
    check_seeds(config.seed)
    check_recipe(config.recipe.name)
    if config.recipe.weights is not None:
        check_name(config.recipe.weights, FORMAT_NAMES, "format")
    check_source(config.data.source)
    _check_run(config)
    check_ranks(config, int(env.of_others("WORLD_SIZE") or 1))
    for written in (config.folder, config.export, config.data.cache or env.cache_folder("corpora")):
        if written is not None:
            check_apart(config, written)


def _check_values(config: RunConfig) -> None:
    """Rules on single values; those of missing latent attention or experts are skipped."""
    for group, names, is_right, rule, right in _VALUES:
        owner: Any = functools.reduce(getattr, group.split("."), config) if group else config
        for name in names.split() if owner is not None else ():
            path, value = f"{group}.{name}".removeprefix("."), getattr(owner, name)
            fix = f"pass {option(path, right)}" + " or more" * isinstance(right, int)
            refuse_if(not is_right(value), option(path, value), rule, fix)


def _check_model(config: RunConfig) -> None:
    """Rules on sizes that have to fit each other."""
    model, experts, latent = config.model, config.model.experts, config.model.latent

    def written(name: str) -> str:
        return option(f"model.{name}", getattr(model, name))

    if latent is None:
        what, divisor = f"{written('heads')} with {written('kv_heads')}", math.gcd(model.heads, model.kv_heads)
        fix = f"pass {option('model.kv_heads', divisor)}, which divides the heads"
        rule = "each head of keys and values serves as many heads of queries"
        refuse_if(model.heads % model.kv_heads, what, rule, fix)
        what, width = f"{written('dim')} with {written('heads')}", max(2, model.dim // model.heads // 2 * 2)
        is_uneven = not model.head_dim and bool(model.dim % model.heads)
        refuse_if(is_uneven, what, "heads share the width evenly", f"pass {option('model.head_dim', width)} too")
    rotated = model.head_width if latent is None else latent.rope_dim
    what, rule = f"heads with {rotated} rotated features", "positions rotate pairs of features"
    refuse_if(rotated % 2, what, rule, "pass an even number")
    if experts is not None:
        what = f"{option('model.experts.top_k', experts.top_k)} of {experts.count} experts"
        rule = "a token goes to at least one expert, and to each no more than once"
        fix = f"pass {option('model.experts.top_k', 1)} to {experts.count}"
        refuse_if(not 1 <= experts.top_k <= experts.count, what, rule, fix)
    what = f"{option('export', config.export)} of a model with experts or latent attention"
    rule = "dense models with grouped queries have names that every Llama loader knows"
    fix = "leave it out; checkpoints hold every weight by its own name"
    refuse_if(config.export is not None and (experts is not None or latent is not None), what, rule, fix)


def _check_run(config: RunConfig) -> None:
    """Rules on recipe, optimizer and options of the loop that depend on each other."""
    recipe, optimizer, start = config.recipe, config.optimizer, config.start
    since = option("recipe.since", recipe.since)
    fix = f"pass {option('recipe.since', 0)} to {config.steps - 1}, or leave it out"
    is_late = not 0 <= recipe.since < config.steps
    refuse_if(is_late, f"{since} of {config.steps} steps", "low precision begins before the last step", fix)
    rule = "a run that starts from a checkpoint applies its recipe at once"
    fix = f"leave {option('recipe.since')} out, or start from a checkpoint of that step"
    refuse_if(recipe.since and start is not None, f"{since} of a run that starts from {start}", rule, fix)
    what = " and ".join(option(f"optimizer.{name}", getattr(optimizer, name)) for name in ("warmup", "decay"))
    rule = "both are shares of the same steps, and wsd has all of its phases"
    is_over = optimizer.schedule == "wsd" and optimizer.warmup + optimizer.decay > 1
    refuse_if(is_over, what, rule, "pass shares that add up to 1 at most")
    rule = "checkpoints, traces and metrics are kept in the folder of a run"
    for name in _NEED_A_FOLDER if config.folder is None else ():
        value = getattr(config, name)
        fix = f"pass {option('folder', f'out/{config.name}')}"
        refuse_if(value, f"{option(name, value)} without a folder", rule, fix)
    backend, fix = option("attention", config.attention), f"pass {option('attention', 'auto')}, or flash"
    rule = "torch classifies cuDNN's attention as nondeterministic"
    refuse_if(config.deterministic and config.attention == "cudnn", f"deterministic with {backend}", rule, fix)


def check_ranks(config: RunConfig, size: int) -> None:
    """Raise if a run cannot be divided among so many ranks."""
    experts, model, ranks = config.ranks.experts, config.model.experts, option("ranks.experts", config.ranks.experts)
    rule = "experts are divided among ranks that torchrun started"
    refuse_if(experts > 1 and size == 1, f"{ranks} in one process", rule, "start it with torchrun, or leave it out")
    if size == 1:
        return
    what, rule = f"{option('batch', config.batch)} on {size} ranks", "ranks share the sequences of a microbatch evenly"
    refuse_if(config.batch % size, what, rule, f"pass {option('batch', -(-config.batch // size) * size)}")
    what, rule = f"{ranks} of a model without experts", "experts are divided"
    refuse_if(experts > 1 and model is None, what, rule, f"leave {option('ranks.experts')} out")
    groups = size // experts
    rule = "the ranks that divide experts divide all ranks, and the others divide the rows of each expert evenly"
    uneven = size % experts or (model is not None and (config.model.dim % groups or model.hidden % groups))
    refuse_if(experts > 1 and uneven, f"{ranks} on {size} ranks", rule, f"pass {option('ranks.experts', size)}")
    for name, rule in _NOT_OVER_RANKS.items():
        what = f"{option(name, getattr(config, name))} on {size} ranks"
        refuse_if(getattr(config, name), what, rule, f"leave {option(name)} out, or run it in one process")


def check_seeds(first: int, count: int = 1) -> None:
    """Raise if seeds first, first + 1, ... are outside a generator's range, or if there are more than MOST_SEEDS."""
    fix = f"pass {option('seeds', 1 if count < 1 else MOST_SEEDS)}"
    is_many = not 1 <= count <= MOST_SEEDS
    refuse_if(is_many, option("seeds", count), f"a comparison has 1 to {MOST_SEEDS} seeds", fix)
    what = option("seed", first) + (f" with {option('seeds', count)}" if count > 1 else "")
    is_far = not LEAST_SEED <= first <= MOST_SEED - count + 1
    refuse_if(is_far, what, "seeds are integers from -2**63 to 2**64 - 1", f"pass {option('seed', 0)}")


def check_apart(config: RunConfig, folder: Path) -> None:
    """Raise if a run would write into the folder of text that it reads."""
    source = expanded(config.data.source)
    places = ", ".join(option(name) for name in ("folder", "export", "data.cache"))
    refuse_if(
        source.is_dir() and folder.resolve().is_relative_to(source.resolve()),
        f"a run that writes to {folder} on the text of {source}",
        "its output would become training text of the next run, which could not resume",
        f"name a folder outside of the text ({places})",
    )


def check_comparison(config: RunConfig, seeds: Sequence[int], branch_at: int, out: Path) -> None:
    """Raise if runs of several recipes and seeds cannot share a config."""
    check_apart(config, out)
    at, since, start = option("branch_at", branch_at), config.recipe.since, config.start
    for name in _SINGLE_RUN:
        value = getattr(config, name)
        rule = "each run of a comparison has a folder of its own below out, with its metrics alone"
        refuse_if(value, f"compare with {option(name, value)}", rule, f"leave {option(name)} out, or pass it to train")
    what, fix = option("eval_batches", config.eval_batches), f"pass {option('eval_batches', 1)} or more"
    refuse_if(not config.eval_batches, what, "losses on held-out text are compared", fix)
    fix = f"pass {option('seeds', 1)} or more"
    refuse_if(not seeds, option("seeds", 0), "a comparison has at least one seed", fix)
    rule, fix = "runs share at least one step, and differ before the last", f"pass 1 to {config.steps - 1}, or 0"
    refuse_if(branch_at and not 0 < branch_at < config.steps, f"{at} of {config.steps} steps", rule, fix)
    rule = "recipes begin where runs branch, or at a step of runs that differ from step 0"
    refuse_if(since and branch_at, f"{at} and {option('recipe.since', since)}", rule, "leave one of them out")
    what, rule = f"{at} and {option('start', start)}", "runs start from one checkpoint"
    refuse_if(start is not None and branch_at, what, rule, "leave one of them out")
    what, fix = f"{option('start', start)} for {len(seeds)} seeds", f"pass {option('branch_at')}, one for each seed"
    refuse_if(start is not None and len(seeds) > 1, what, "a checkpoint belongs to one seed", fix)


def check_fits(config: RunConfig, symbols: int, device: torch.device) -> None:
    """Raise if the config does not fit the text's vocabulary or the device."""
    size, is_cpu = config.model.vocabulary, device.type != "cuda"
    what, fix = f"{option('model.vocabulary', size)} for {symbols} symbols", -(-symbols // 128) * 128
    rule = "the vocabulary covers every symbol of the text"
    refuse_if(symbols > size, what, rule, f"pass {option('model.vocabulary', fix)}")
    what, fix = f"{option('attention', config.attention)} on {device}", f"pass {option('attention', 'auto')}"
    needs_gpu = config.attention in ("cudnn", "efficient")
    refuse_if(is_cpu and needs_gpu, what, "this attention backend needs a GPU", fix)
    graph = option("cuda_graph")
    rule = "a CUDA graph is captured on a GPU"
    refuse_if(is_cpu and config.cuda_graph, f"{graph} on {device}", rule, f"leave {graph} out")
