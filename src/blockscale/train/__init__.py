"""A small trainer: the transformers of `blockscale.models`, trained by a recipe.

    config.py      configuration of a run; checks.py  presets.py    named configurations
    corpus.py      text files and their split         data.py       token files on disk, batches
    schedule.py    learning rate, AdamW, clipping     micro.py      forward and backward, compiled or captured
    run.py         one step, evaluation, resuming     loop.py       `train`: logging, evaluation, checkpoint intervals
    records.py     results, hooks                     breakdown.py  profiled shares of a step, traces for Perfetto
    checkpoint.py  atomic checkpoints
    faults.py      NaN, out of memory, file errors    metrics.py    JSON lines, TensorBoard
    numerics.py    quantization noise per layer       files.py      folder locks, synced writes
    view.py        the terminal

Names are resolved on first use: the command line reads presets to print its help, and importing torch takes seconds.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ..models.config import ExpertsConfig, LatentConfig, ModelConfig
from .config import DataConfig, OptimizerConfig, RecipeConfig, RunConfig
from .presets import PRESETS, get_preset, with_layers

if TYPE_CHECKING:
    from .loop import train as train
    from .records import Evaluation as Evaluation
    from .records import Hooks as Hooks
    from .records import Speed as Speed
    from .records import StepRecord as StepRecord
    from .records import TrainResult as TrainResult
    from .run import Run as Run

_RECORDS = ("Evaluation", "Hooks", "Speed", "StepRecord", "TrainResult")
_LAZY = {"Run": "run", "train": "loop"} | dict.fromkeys(_RECORDS, "records")

__all__ = [
    "DataConfig", "ExpertsConfig", "LatentConfig", "ModelConfig", "OptimizerConfig", "RecipeConfig", "RunConfig",
    "PRESETS", "get_preset", "replace", "with_layers",
    "Evaluation", "Hooks", "Run", "Speed", "StepRecord", "TrainResult", "train",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _LAZY:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value  # replaces a submodule of the same name
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
