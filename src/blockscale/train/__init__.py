"""A small trainer: Llama's dense models and DeepSeek-V3's with experts, trained by a recipe.

    config.py      what a run is, as data; checks.py  presets.py    runs by name
    model.py       blocks and the transformer         attention.py  grouped queries, latent attention
    corpus.py      text from files                    data.py       symbols on disk, batches
    schedule.py    rates, AdamW, clipping             micro.py      forward and backward, compiled or captured
    run.py         one step, evaluation, resuming     loop.py       `train`: when what happens
    records.py     results, hooks                     breakdown.py  where a step's time goes, traces for Perfetto
    checkpoint.py  all or nothing, on disk            recompute.py  what the backward computes again
    faults.py      NaN, memory                        metrics.py    JSON lines, TensorBoard
    numerics.py    samples of every layer's noise
    view.py        the terminal                       hugging_face.py  safetensors for any Llama loader
    compare.py     recipes in pairs, with a null      statistics.py gaps, intervals, verdicts
    stored.py      runs as their files tell them      side_by_side.py  runs in processes of their own
    report.py      table and page; charts.py          throughput.py what a recipe wins in speed and memory
    answer.py      what a comparison says in words    control.py    an arm with a fault that must be found
    publish.py     folders of runs as few lines       branch.py     runs that part late

Names are resolved on first use: the command line reads presets to print its help, and importing torch takes seconds.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from .config import (
    DataConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
)
from .presets import PRESETS, get_preset, with_layers

if TYPE_CHECKING:
    from .hugging_face import export as export
    from .loop import train as train
    from .model import Transformer as Transformer
    from .records import Evaluation as Evaluation
    from .records import Hooks as Hooks
    from .records import Speed as Speed
    from .records import StepRecord as StepRecord
    from .records import TrainResult as TrainResult
    from .run import Run as Run

_LATE = {
    "Evaluation": "records",
    "Hooks": "records",
    "Run": "run",
    "Speed": "records",
    "StepRecord": "records",
    "TrainResult": "records",
    "Transformer": "model",
    "export": "hugging_face",
    "train": "loop",
}

__all__ = [
    "PRESETS",
    "DataConfig",
    "Evaluation",
    "ExpertsConfig",
    "Hooks",
    "LatentConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RecipeConfig",
    "Run",
    "RunConfig",
    "Speed",
    "StepRecord",
    "TrainResult",
    "Transformer",
    "export",
    "get_preset",
    "replace",
    "train",
    "with_layers",
]


def __getattr__(name: str) -> object:
    if name in _LATE:
        value = getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
        globals()[name] = value  # also where a submodule has the same name
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
