"""Records of steps, evaluations and speed, the result of a run, and the hooks that receive them.

The live view, metrics and diagnostics are all `Hooks`; the loop depends on none of them. All numbers are plain Python,
read back from the device only when the loop logs.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .config import RunConfig

if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.  step: counted from 1.  loss: nats per symbol of its batch, before the update.  norm: of the
    gradient, before clipping.  rate: learning rate."""

    step: int
    loss: float
    norm: float
    rate: float


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on held-out text.  step: number of completed steps.  loss: nats per symbol."""

    step: int
    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Speed:
    """Speed of the steps since the last report, without evaluations and checkpoints.  mfu: model FLOPs/s over the bf16
    rate of the device's specification; None if unknown."""

    step: int
    tokens_per_second: float
    step_seconds: float
    mfu: float | None = None


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    history: every step.  evaluations: the last one is the result.  tokens_per_second: median of the reports after the
    first, which includes compilation.  peak_memory: bytes on the GPU; None on a CPU.  data_hash: of text and tokenizer.
    flop_share: share of the linear FLOPs in low precision.  stopped: "done", or "interrupted" by Ctrl-C.
    """

    config: RunConfig
    history: tuple[StepRecord, ...]
    evaluations: tuple[Evaluation, ...]
    speeds: tuple[Speed, ...]
    peak_memory: int | None
    data_hash: str
    parameters: int
    flops_per_token: float
    flop_share: float
    stopped: Literal["done", "interrupted"]
    checkpoint: Path | None = None
    conversion: str = field(default="", repr=False)

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self.history[-1].step if self.history else 0

    @property
    def loss(self) -> float:
        """Held-out loss of the last evaluation; NaN if there is none."""
        return self.evaluations[-1].loss if self.evaluations else math.nan

    @property
    def tokens_per_second(self) -> float:
        settled = self.speeds[1:] or self.speeds
        return statistics.median(each.tokens_per_second for each in settled) if settled else 0.0


class Hooks:
    """Callbacks of a run; override those you need. `run` is the live run: model, optimizer, step."""

    def on_start(self, run: Run) -> None:
        """Called when model, data and optimizer exist and a checkpoint, if any, is loaded."""

    def before_step(self, run: Run) -> None:
        """Called before step `run.step`, counted from 0."""

    def after_backward(self, run: Run) -> None:
        """Called with gradients before clipping. Reading one here synchronizes with the device."""

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Called with the steps since the last report."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Called after an evaluation on held-out text."""

    def on_save(self, run: Run, path: Path) -> None:
        """Called when a checkpoint is complete."""

    def on_end(self, run: Run, result: TrainResult) -> None:
        """Called at the end of the run; not after an error, see `close`."""

    def close(self) -> None:
        """Called last, also after an error."""


class StopAfter(Hooks):
    """Ends a run after a step as Ctrl-C does: with a checkpoint if the run has a folder."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, run: Run) -> None:
        """Request the stop in the last step."""
        if run.step == self.step - 1:
            run.wants_stop = True
