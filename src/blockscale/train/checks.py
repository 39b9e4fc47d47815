"""What cannot be trained is refused before anything is built, with the value, the rule and the fix."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NoReturn

import torch

from .. import env
from ..errors import OptionError, message
from .config import ModelConfig, OptimizerConfig, RunConfig
from .corpus import expanded


def _refuse(what: str, rule: str, fix: str) -> NoReturn:
    raise OptionError(message(what, rule=rule, fix=fix))


def check(config: RunConfig) -> None:
    """Raise for what cannot be trained, with the value, the rule and the fix."""
    _check_model(config.model)
    _check_optimizer(config.optimizer)
    for name, least in (("steps", 1), ("batch", 1), ("accumulate", 1), ("loss_chunks", 1), ("log_every", 1)):
        if getattr(config, name) < least:
            _refuse(f"{name}={getattr(config, name)}", f"it is {least} or more", f"pass {name}={least} or more")
    for name in ("eval_every", "eval_batches", "save_every", "profile", "numerics_every"):
        if getattr(config, name) < 0:
            _refuse(f"{name}={getattr(config, name)}", "it is a count, and 0 means never", f"pass {name}=0 or more")
    if config.keep < 1:
        _refuse(f"keep={config.keep}", "the last checkpoint always stays", "pass keep=1 or more")
    if not 0 <= config.recipe.since < config.steps:
        _refuse(
            f"since={config.recipe.since} of {config.steps} steps",
            "low precision begins before the last step",
            f"pass recipe.since={max(0, config.steps - 1)} or less, or leave it out",
        )
    if config.recipe.since and config.start is not None:
        _refuse(
            f"since={config.recipe.since} of a run that begins with {config.start}",
            "what goes on from a checkpoint follows its recipe at once",
            "leave since out, or begin with a checkpoint of that step",
        )
    if config.data.sequence < 2:
        _refuse(f"sequence={config.data.sequence}", "a piece predicts at least one symbol", "pass sequence=2 or more")
    if not 0 < config.data.held_out < 1:
        _refuse(
            f"held_out={config.data.held_out}",
            "a share of the files between 0 and 1 is validated on",
            "pass held_out=0.1",
        )
    if config.folder is None:
        for name in ("resume", "save_every", "profile", "numerics_every", "tensorboard"):
            if getattr(config, name):
                _refuse(
                    f"{name}={getattr(config, name)} without a folder",
                    "checkpoints, traces and metrics are kept in the folder of a run",
                    f"pass folder=out/{config.name}",
                )
    for written in (config.folder, config.export, config.data.cache or env.cache_folder("corpora")):
        if written is not None:
            check_apart(config, written)
    if config.deterministic and config.attention == "cudnn":
        _refuse(
            "deterministic with attention=cudnn",
            "torch holds cuDNN's attention for not deterministic",
            "pass attention=auto, or flash",
        )
    if config.export is not None and (config.model.experts is not None or config.model.latent is not None):
        _refuse(
            f"export={config.export} of a model with experts or latent attention",
            "dense models with grouped queries have names that every Llama loader knows",
            "leave it out; checkpoints hold every weight by its own name",
        )


def check_apart(config: RunConfig, folder: Path) -> None:
    """Raise where a run would write into the text that it reads."""
    source = expanded(config.data.source)
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        _refuse(
            f"a run that writes to {folder} on the text of {source}",
            "what it writes would be text for the next one, which could not go on with it",
            "name a folder outside of the text (folder, export, data.cache)",
        )


def _check_optimizer(config: OptimizerConfig) -> None:
    for name in ("warmup", "decay", "floor"):
        if not 0 <= getattr(config, name) <= 1:
            _refuse(f"{name}={getattr(config, name)}", "it is a share from 0 to 1", f"pass {name}=0.1")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            _refuse(f"{name}={getattr(config, name)}", "it is a share from 0 to below 1", f"pass {name}=0.95")
    for name in ("rate", "eps", "weight_decay", "clip"):
        if not 0 <= getattr(config, name) < float("inf"):
            _refuse(f"{name}={getattr(config, name)}", "it is finite and not negative", "pass 0 or more")
    if not config.eps:
        _refuse("eps=0.0", "Adam divides by it where a gradient has always been zero", "pass eps=1e-8")
    if config.schedule == "wsd" and config.warmup + config.decay > 1:
        _refuse(
            f"warmup={config.warmup} and decay={config.decay}",
            "both are shares of the same steps, and wsd has all of its phases",
            "pass shares that add up to 1 at most",
        )


def _check_model(config: ModelConfig) -> None:
    for name in ("dim", "layers", "heads", "kv_heads", "hidden", "vocabulary"):
        if getattr(config, name) < 1:
            _refuse(f"{name}={getattr(config, name)}", "sizes of a model are positive", f"pass {name}=1 or more")
    if config.head_dim < 0:
        _refuse(f"head_dim={config.head_dim}", "it is a size, and 0 is dim / heads", "pass head_dim=0 or more")
    if not (0 < config.rope_theta < math.inf and 0 <= config.norm_eps < math.inf):
        _refuse(
            f"rope_theta={config.rope_theta}, norm_eps={config.norm_eps}",
            "positions rotate by powers of a positive number, and a norm divides by a root",
            "pass rope_theta=10000 and norm_eps=1e-5",
        )
    if config.latent is None:
        if config.heads % config.kv_heads:
            _refuse(
                f"heads={config.heads} with kv_heads={config.kv_heads}",
                "each head of keys and values serves as many heads of queries",
                "pass a kv_heads that divides heads",
            )
        if not config.head_dim and config.dim % config.heads:
            _refuse(f"dim={config.dim} with heads={config.heads}", "heads share dim evenly", "pass head_dim too")
        rotated = config.head_width
    else:
        rotated = config.latent.rope_dim
        for name in ("kv_rank", "nope_dim", "value_dim", "rope_dim"):
            if getattr(config.latent, name) < 1:
                _refuse(f"latent.{name}={getattr(config.latent, name)}", "sizes are positive", "pass 1 or more")
        if config.latent.q_rank < 0:
            _refuse(f"latent.q_rank={config.latent.q_rank}", "0 means that queries have none", "pass 0 or more")
    if rotated % 2:
        _refuse(f"heads with {rotated} rotated features", "positions rotate pairs of features", "pass an even number")
    experts = config.experts
    if experts is None:
        return
    if not 1 <= experts.top_k <= experts.count:
        _refuse(
            f"top_k={experts.top_k} of {experts.count} experts",
            "a token goes to at least one expert, and to each no more than once",
            "pass experts.top_k between the two",
        )
    if experts.hidden < 1 or experts.shared < 0 or experts.dense_layers < 0:
        _refuse(
            f"experts.hidden={experts.hidden}, shared={experts.shared}, dense_layers={experts.dense_layers}",
            "experts have hidden units, and the others are counts",
            "pass hidden=1 or more, and the others 0 or more",
        )
    if not (math.isfinite(experts.scale) and 0 <= experts.balance_rate < math.inf):
        _refuse(
            f"experts.scale={experts.scale}, balance_rate={experts.balance_rate}",
            "both are finite, and biases move towards balance",
            "pass scale=1 and balance_rate=0.001",
        )


def check_fits(config: RunConfig, symbols: int, device: torch.device) -> None:
    """Raise for what the text or the device cannot serve."""
    if symbols > config.model.vocabulary:
        _refuse(
            f"model.vocabulary={config.model.vocabulary} for {symbols} symbols",
            "the model knows every symbol of its text",
            f"pass model.vocabulary={-(-symbols // 128) * 128}",
        )
    if config.attention in ("cudnn", "efficient") and device.type != "cuda":
        _refuse(f"attention={config.attention} on {device}", "that is an attention of GPUs", "pass attention=auto")
    if config.cuda_graph and device.type != "cuda":
        _refuse(f"cuda_graph on {device}", "a CUDA graph is captured on a GPU", "leave cuda_graph out")
