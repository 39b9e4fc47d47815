"""What a run tells: a record of every step, of every evaluation and of its speed, the result, and who is told.

`Hooks` is how everything that watches a run is attached (the live view, metrics, diagnostics): the loop knows none of
them. All numbers are plain Python, read back from the device only when the loop logs.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .config import RunConfig, to_dict

if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.  step: counted from 1, as many as are done.  loss: nats per symbol of its batch, before the
    step.  norm: of the gradient, before it was clipped."""

    step: int
    loss: float
    norm: float
    rate: float


@dataclass(frozen=True)
class Evaluation:
    """Held-out text after so many steps.  loss: nats per symbol."""

    step: int
    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Speed:
    """Steps since the last report, evaluations and checkpoints not counted.  mfu: model FLOPs over the bf16 rate of the
    device's specification, None where there is none.  casts: share of the device's time in our casts, None until it
    was measured."""

    step: int
    tokens_per_second: float
    step_seconds: float
    mfu: float | None = None
    casts: float | None = None


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended.

    history: every step.  evaluations: the last one is the result.  tokens_per_second: the median of reports after the
    first, which holds compilation.  peak_memory: bytes on the GPU, None on a CPU.  data_hash: of the text and the
    tokenizer.  flop_share: of the linear FLOPs that are in low precision.  stopped: "done", or "interrupted" by Ctrl-C.
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
        """How many are done."""
        return self.history[-1].step if self.history else 0

    @property
    def loss(self) -> float:
        """Of the last evaluation."""
        return self.evaluations[-1].loss if self.evaluations else math.nan

    @property
    def tokens_per_second(self) -> float:
        settled = self.speeds[1:] or self.speeds
        return statistics.median(each.tokens_per_second for each in settled) if settled else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        plain = asdict(self) | {"config": to_dict(self.config), "checkpoint": str(self.checkpoint or "")}
        return plain | {"loss": self.loss, "tokens_per_second": self.tokens_per_second, "steps": self.steps}


class Hooks:
    """Told of what happens; every method may be left as it is. `run` is the live run: model, optimizer, step."""

    def on_start(self, run: Run) -> None:
        """Model, data and optimizer are there, and a checkpoint is loaded if there was one."""

    def before_step(self, run: Run) -> None:
        """Step `run.step`, counted from 0, comes next."""

    def after_backward(self, run: Run) -> None:
        """Gradients are there, not clipped yet. Reading one here makes the host wait."""

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Steps since the last report."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Held-out text was evaluated."""

    def on_save(self, run: Run, path: Path) -> None:
        """A checkpoint is complete."""

    def on_end(self, run: Run, result: TrainResult) -> None:
        """The last thing that is called; not after an error, see `close`."""

    def close(self) -> None:
        """However the run ended."""
