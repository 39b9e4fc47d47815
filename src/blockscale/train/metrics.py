"""Metrics on disk as hooks: JSON lines and, if wanted, TensorBoard's files.

`metrics.jsonl` has one line for the run, each logged step, evaluation and checkpoint; "kind" tells which. A resumed run
appends another line for the run. If a step occurs twice, the last line counts.
"""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..diagnostics.store import json_line
from ..errors import OptionError, message
from .config import to_dict
from .records import Evaluation, Hooks, Speed, StepRecord, TrainResult
from .run import Run


class LineLog(Hooks):
    """Appends lines to a file and flushes each, so that a killed run loses none. A partial last line, left by a killed
    process, is removed first."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        except OSError as error:
            rule, fix = "a run writes metrics to its folder", "name a folder that can be written to"
            raise OptionError(message(f"{path}: {error.strerror}", rule=rule, fix=fix)) from None
        self.file = io.TextIOWrapper(file)

    def write(self, line: str) -> None:
        """Append one line."""
        self.file.write(line + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class JsonLines(LineLog):
    """Appends to folder/metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "metrics.jsonl")

    def _write(self, kind: str, **fields: Any) -> None:
        self.write(json_line(kind, **fields))

    def on_start(self, run: Run) -> None:
        """Write the config, the hash of the text and the size of the model."""
        self._write(
            "run",
            step=run.step,
            config=to_dict(run.config),
            data_hash=run.symbols.hash,
            parameters=run.parameters,
            converted=sum(each.parameters for each in run.report.converted),
            flop_share=run.flop_share,
            flops_per_token=run.flops_per_token,
        )

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Write every step since the last report; the last one has the speed."""
        for record in records:
            extra = asdict(speed) if record is records[-1] else {}
            self._write("step", **(extra | asdict(record)))

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Write one line."""
        self._write("evaluation", **asdict(evaluation))

    def on_save(self, run: Run, path: Path) -> None:
        """Write one line."""
        self._write("checkpoint", step=run.step, path=path.name)

    def on_end(self, run: Run, result: TrainResult) -> None:
        """Write the result."""
        keys = ("stopped", "steps", "loss", "tokens_per_second", "peak_memory", "data_hash")
        self._write("end", **{key: getattr(result, key) for key in keys})


class TensorBoard(Hooks):
    """TensorBoard's files in folder/tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            rule = "its files are written by the package tensorboard"
            fix = "pip install tensorboard, or read metrics.jsonl"
            raise OptionError(message("tensorboard=True without TensorBoard", rule=rule, fix=fix)) from None
        self.writer: Any = None
        self._made, self._folder = SummaryWriter, str(folder / "tensorboard")

    def on_start(self, run: Run) -> None:
        """Open the writer; earlier events of steps that a resumed run repeats are purged."""
        self.writer = self._made(self._folder, purge_step=run.step + 1)

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Write loss, gradient norm and learning rate of each step, and the speed."""
        for record in records:
            for name in ("loss", "norm", "rate"):
                self.writer.add_scalar(f"train/{name}", getattr(record, name), record.step)
        for name in ("tokens_per_second", "mfu"):
            value = getattr(speed, name)
            if value is not None:
                self.writer.add_scalar(f"speed/{name}", value, speed.step)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Write the loss on held-out text."""
        self.writer.add_scalar("validation/loss", evaluation.loss, evaluation.step)

    def close(self) -> None:
        """Flush and close the writer."""
        if self.writer is not None:
            self.writer.close()
