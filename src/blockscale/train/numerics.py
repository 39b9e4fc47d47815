"""Quantization noise during training: a hook that samples every n-th step into `numerics.jsonl` in the run's folder.

A sample is an extra forward and backward of a few sequences, see `diagnostics/layers.py`. The steps themselves,
compiled or captured, do not change and give the same bits. Samples are read back when the loop logs.
"""

from __future__ import annotations

import math
from pathlib import Path

from ..diagnostics.call_capture import ROWS
from ..diagnostics.layers import Sample, sample
from ..diagnostics.store import NAME, model_line, sample_line
from ..nn import set_step_
from .metrics import LineLog
from .records import Speed, StepRecord, TrainResult
from .run import Run


def sample_run(run: Run) -> Sample:
    """Sample of the next step's first microbatch, with as many sequences as give ROWS tokens."""
    set_step_(run.model, run.step)
    pieces = run.pieces(run.step, 0)[: max(1, ROWS // run.config.data.sequence)]
    tokens = pieces.shape[0] * (pieces.shape[1] - 1)
    return sample(run.model, lambda: run.model.loss(pieces), tokens=tokens)


class NumericsLog(LineLog):
    """Appends samples to numerics.jsonl.  every: steps between samples; the first is taken before the first step."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder / NAME)
        self.every = every
        self.unread: list[tuple[int, Sample]] = []

    def on_start(self, run: Run) -> None:
        """Write the list of layers."""
        self.write(model_line(run.report))

    def before_step(self, run: Run) -> None:
        """Take a sample if one is due."""
        if run.step % self.every == 0:
            self.unread.append((run.step, sample_run(run)))

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Write the samples since the last report, up to a step that is not finite."""
        broken = math.inf if run.broke_at is None else run.broke_at.step - 1
        for step, found in self.unread:
            if step < broken:
                self.write(sample_line(step, found.read()))
        self.unread.clear()

    def on_end(self, run: Run, result: TrainResult) -> None:
        """Write a last sample of the trained model."""
        self.write(sample_line(run.step, sample_run(run).read()))
