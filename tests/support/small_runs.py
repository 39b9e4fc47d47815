"""Runs that take a second on a CPU, for the tests of the trainer: 16 symbols by 2 sequences, one or two blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from blockscale.train import (
    DataConfig,
    ExpertsConfig,
    Hooks,
    LatentConfig,
    ModelConfig,
    RecipeConfig,
    Run,
    RunConfig,
    train,
)

DENSE = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, hidden=48)
SPARSE = ModelConfig(
    dim=32,
    layers=2,
    heads=2,
    hidden=48,
    latent=LatentConfig(kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16),
    experts=ExpertsConfig(count=4, top_k=2, hidden=16, shared=16),
)


def small(recipe: str = "fp8_blockwise", weight_cast: Any = "step", **changes: Any) -> RunConfig:
    """A run on the CPU; all blocks follow the recipe."""
    run = RunConfig(
        "small",
        DENSE,
        DataConfig(sequence=16),
        recipe=RecipeConfig(recipe, weight_cast, keep_first=0, keep_last=0),
        steps=4,
        batch=2,
        device="cpu",
        log_every=1,
        eval_every=0,
        eval_batches=1,
    )
    return replace(run, **changes)


class Keep(Hooks):
    """The run, for its weights."""

    def on_start(self, run: Run) -> None:
        self.run = run


def trained(name: str, folder: Path, **changes: Any) -> Run:
    """A run of two steps by a recipe, with a checkpoint in its folder."""
    keep = Keep()
    train(replace(small(name, steps=2, folder=folder), **changes), hooks=[keep])
    return keep.run
