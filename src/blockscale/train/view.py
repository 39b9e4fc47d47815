"""Display of a run as a hook: a status line in a terminal, plain lines elsewhere; `Lines` for worker processes."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from .records import Evaluation, Hooks, Speed, StepRecord, TrainResult
from .run import Run

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.status import Status


class View(Hooks):
    """Shows a run on a rich console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status: Status | None = None
        self.began = 0.0
        self.first = 0

    def on_start(self, run: Run) -> None:
        """Print model, recipe, device, text and conversion."""
        config = run.config
        self.began, self.first = time.perf_counter(), run.step
        text = f"{config.name}: {run.parameters / 1e6:,.1f}M parameters, {config.recipe.name}, {run.device}"
        text += f", {config.steps} steps of {config.tokens_per_step:,} tokens, text {run.symbols.hash}"
        self.console.print(text, highlight=False)
        converted = len(run.report.converted)
        share = f"{converted} layers with {run.flop_share:.1%} of the linear FLOPs in low precision"
        self.console.print(share if converted and run.recipe.is_quantized else "all layers in bf16", highlight=False)
        if run.sharding is not None:
            self.console.print(str(run.sharding), highlight=False)
        if run.step:
            self.console.print(f"resuming from step {run.step}", highlight=False)
        if run.changed:
            self.console.print(f"changed options: {', '.join(run.changed)}", highlight=False)
        if self.console.is_terminal:
            self.status = self.console.status("first step ...")
            self.status.start()

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Show the newest step."""
        line = self._line(run, records[-1], speed)
        if self.status is not None:
            self.status.update(line)
        else:
            self.console.print(line, highlight=False)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Print the loss on held-out text."""
        text = f"step {evaluation.step:>6}  validation loss {evaluation.loss:.4f}"
        self.console.print(f"{text}  ({evaluation.bits_per_byte:.3f} bits per byte)", highlight=False)

    def on_save(self, run: Run, path: Path) -> None:
        """Print the path of the checkpoint."""
        self.console.print(f"step {run.step:>6}  saved {path}", highlight=False)

    def on_end(self, run: Run, result: TrainResult) -> None:
        """Print the result."""
        self.close()
        text = [f"validation loss {result.loss:.4f}"] if result.evaluations else []
        text.append(f"{result.tokens_per_second:,.0f} tokens/s")
        if result.peak_memory is not None:
            text.append(f"{result.peak_memory / 2**30:.1f} GiB peak memory")
        self.console.print(f"{result.stopped} at step {result.steps}: {', '.join(text)}", highlight=False)
        if run.device.type == "cpu":
            self.console.print("speed on a CPU says nothing about a GPU: low precision is emulated exactly here")
        if result.checkpoint is not None:
            self.console.print(f"checkpoint {result.checkpoint}", highlight=False)

    def close(self) -> None:
        """Stop the status line."""
        if self.status is not None:
            self.status.stop()
            self.status = None

    def _line(self, run: Run, record: StepRecord, speed: Speed) -> str:
        seconds = (time.perf_counter() - self.began) / max(1, run.step - self.first) * (run.config.steps - run.step)
        figures = [
            f"step {record.step:>6}  loss {record.loss:.4f}  norm {record.norm:.2f}  rate {record.rate:.2e}",
            f"tokens/s {speed.tokens_per_second:,.0f}",
        ]
        if speed.mfu is not None:
            figures.append(f"MFU {speed.mfu:.1%}")
        return "  ".join([*figures, f"left {timedelta(seconds=round(seconds))}"])


class Lines(Hooks):
    """Progress as plain lines, for output without a terminal: one with each evaluation, or with every fifth step of a
    run without evaluations; tokens/s on a GPU only."""

    def __init__(self, name: str) -> None:
        self.name, self.speed = name, 0.0

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Print the time of a step, if nothing is evaluated."""
        self.speed = speed.tokens_per_second
        if not run.config.eval_batches and (run.step == 1 or run.step % 5 == 0):
            self._say(run, f"{1e3 * speed.step_seconds:,.0f} ms a step")

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Print the loss on held-out text."""
        self._say(run, f"loss {evaluation.loss:.4f}")

    def _say(self, run: Run, what: str) -> None:
        speed = f", {self.speed:,.0f} tokens/s" if run.device.type == "cuda" else ""
        sys.stdout.write(f"{self.name}: step {run.step} of {run.config.steps}, {what}{speed}\n")
        sys.stdout.flush()
