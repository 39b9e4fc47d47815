"""Runs that part late: bf16 up to some step, and from its checkpoint on by each recipe.

Two runs of the same precision part in their first few hundred steps, and some of that distance stays to the end, by
luck: a quarter of a percent between two runs of bf16 (docs/design/training.md). Runs with a beginning in common differ
by what comes after it alone, and tell recipes apart that seeds would take days to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import checkpoint
from .config import RunConfig, fingerprint
from .loop import train
from .records import Hooks
from .run import Run
from .side_by_side import Lines

FOLDER, BASELINE = "trunks", "bf16"


class StopAfter(Hooks):
    """Ends a run after a step, as Ctrl-C during it does: with a checkpoint where it has a folder."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, run: Run) -> None:
        if run.step == self.step - 1:
            run.wants_stop = True


def _bf16(config: RunConfig) -> RunConfig:
    return replace(config, recipe=replace(config.recipe, name=BASELINE), folder=None, resume=False)


def trunk_of(config: RunConfig, step: int, out: Path) -> Path:
    """Where the checkpoint of `trunk` is, or will be."""
    folder = out / FOLDER / f"step{step}-seed{config.seed}-{fingerprint(_bf16(config))}"
    return folder / checkpoint.name_of(step)


def trunk(config: RunConfig, step: int, out: Path, hooks: Sequence[Hooks] | None = None) -> Path:
    """The checkpoint of a step that runs by every recipe begin with, made where it is not there yet.

    config: of the whole run, whose schedule it follows.  out: the folder of the comparison.  hooks: None in a process
    without a terminal, where it tells lines instead.
    """
    made, config = trunk_of(config, step, out), _bf16(config)
    if not made.exists():
        watching = [Lines(f"{BASELINE} up to step {step}, seed {config.seed}")] if hooks is None else hooks
        train(replace(config, folder=made.parent, resume=True), hooks=[StopAfter(step), *watching])
        if not made.exists():
            raise KeyboardInterrupt
    return made
