"""Runs that branch from one bf16 checkpoint: bf16 up to some step, then each recipe from there.

Two runs of the same precision diverge in their first few hundred steps, and part of the difference stays: a quarter of
a percent between two bf16 runs (docs/design/training.md). Runs with a shared start differ only by the later steps, so
one seed resolves differences that would otherwise take many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..train import checkpoint
from ..train.config import RunConfig, fingerprint
from ..train.loop import train
from ..train.records import Hooks
from ..train.run import Run
from .side_by_side import Lines

FOLDER, BASELINE = "trunks", "bf16"


class StopAfter(Hooks):
    """Ends a run after a step as Ctrl-C does: with a checkpoint if the run has a folder."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, run: Run) -> None:
        if run.step == self.step - 1:
            run.wants_stop = True


def _bf16(config: RunConfig) -> RunConfig:
    return replace(config, recipe=replace(config.recipe, name=BASELINE), folder=None, resume=False)


def trunk_of(config: RunConfig, step: int, out: Path) -> Path:
    """Path of the checkpoint that `trunk` writes."""
    folder = out / FOLDER / f"step{step}-seed{config.seed}-{fingerprint(_bf16(config))}"
    return folder / checkpoint.name_of(step)


def trunk(config: RunConfig, step: int, out: Path, hooks: Sequence[Hooks] | None = None) -> Path:
    """bf16 checkpoint of a step that the runs of every recipe start from; trained if it does not exist.

    config: the whole run, whose learning-rate schedule applies.  out: folder of the comparison.  hooks: None in a
    worker process without a terminal, which prints plain lines.
    """
    made, config = trunk_of(config, step, out), _bf16(config)
    if not made.exists():
        watching = [Lines(f"{BASELINE} up to step {step}, seed {config.seed}")] if hooks is None else hooks
        train(replace(config, folder=made.parent, resume=True), hooks=[StopAfter(step), *watching])
        if not made.exists():
            raise KeyboardInterrupt
    return made
