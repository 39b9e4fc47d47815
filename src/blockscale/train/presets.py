"""Named run configs: each is a function that returns a config, with the dimensions of real models from 125M on.

`dataclasses.replace` changes fields; the command line does so for every field. `with_layers` shortens a model for one
GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..errors import check_name
from ..models.config import ExpertsConfig, LatentConfig, ModelConfig
from .config import DataConfig, OptimizerConfig, RecipeConfig, RunConfig


def tiny() -> RunConfig:
    """A dense model of bytes: seconds on a CPU."""
    return RunConfig()


def tiny_moe() -> RunConfig:
    """Experts, a shared one, a balanced router and latent attention: seconds on a CPU."""
    model = ModelConfig(
        layers=3,
        latent=LatentConfig(kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
        experts=ExpertsConfig(count=8, top_k=2, hidden=64, shared=64),
    )
    return RunConfig("tiny_moe", model)


def dense_125m() -> RunConfig:
    """Convergence run, dense: 32k tokens a step. With a vocabulary of bytes nearly all FLOPs are in the blocks."""
    return _convergence("125m", ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, hidden=3456), rate=1e-3)


def moe_500m() -> RunConfig:
    """Convergence run with experts: 110M of 500M parameters are active for a token."""
    experts = ExpertsConfig(count=32, top_k=4, hidden=512, shared=512)
    model = ModelConfig(dim=768, layers=13, heads=12, kv_heads=12, hidden=2304, experts=experts)
    return _convergence("moe-500m", model, rate=6e-4)


def _convergence(name: str, model: ModelConfig, rate: float) -> RunConfig:
    """A run that is long enough to compare losses."""
    return RunConfig(
        name,
        model,
        DataConfig("python", sequence=1024),
        OptimizerConfig(rate=rate, warmup=0.1),
        steps=3000,
        batch=32,
        compile="blocks",
        eval_every=250,
        eval_batches=16,
    )


def llama3_8b() -> RunConfig:
    """Llama 3 8B (arXiv:2407.21783). bf16 parameters, so that weights, gradients and Adam's moments fit one GPU."""
    model = ModelConfig(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=128256, rope_theta=500000.0)
    return _full_size("llama3-8b", model, sequence=8192, batch=1)


def dsv3_16b() -> RunConfig:
    """DeepSeek-V3's block at the 16B size: dimensions of DeepSeek-V2-Lite (arXiv:2405.04434), V3's balanced router."""
    model = ModelConfig(
        dim=2048,
        layers=27,
        heads=16,
        kv_heads=16,
        hidden=10944,
        vocabulary=102400,
        norm_eps=1e-6,
        latent=LatentConfig(),
        experts=ExpertsConfig(),
    )
    return _full_size("dsv3-16b", model, sequence=4096, batch=4)


def _full_size(name: str, model: ModelConfig, sequence: int, batch: int) -> RunConfig:
    """A run of a model that fills a GPU."""
    return RunConfig(
        name,
        model,
        DataConfig("python", sequence=sequence),
        OptimizerConfig(rate=3e-4, warmup=0.05),
        RecipeConfig(weight_cast="forward"),
        steps=1000,
        batch=batch,
        parameters="bfloat16",
        compile="blocks",
        recompute="selective",
        loss_chunks=8,
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "tiny": tiny,
    "tiny_moe": tiny_moe,
    "125m": dense_125m,
    "moe-500m": moe_500m,
    "llama3-8b": llama3_8b,
    "dsv3-16b": dsv3_16b,
}


def get_preset(name: str) -> RunConfig:
    """Config of a preset.

    >>> get_preset("llama3-8b").model.layers
    32
    """
    check_name(name, PRESETS, "preset")
    return PRESETS[name]()


def with_layers(config: RunConfig, layers: int) -> RunConfig:
    """The same run with another number of layers.

    >>> with_layers(get_preset("llama3-8b"), 16).model.layers
    16
    """
    return dataclasses.replace(config, model=dataclasses.replace(config.model, layers=layers))
