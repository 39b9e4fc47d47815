"""Metrics on disk: JSON lines always, TensorBoard's files if wanted. Both are hooks; the loop knows neither.

`metrics.jsonl` has one line for the run, each logged step, evaluation and checkpoint, told apart by "kind". A run that
resumes appends, and says so by another line for the run; a step that stands there twice counts as it stands last.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..errors import OptionError, message
from .config import to_dict
from .records import Evaluation, Hooks, Speed, StepRecord, TrainResult
from .run import Run

# read back at a time, from the end of a file
_PIECE = 1 << 16


def appended(path: Path) -> TextIO:
    """A file of lines to go on with. What a killed process left of a last line goes: the next would be glued to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
        _mend(file)
    except OSError as error:
        raise OptionError(
            message(
                f"{path}: {error.strerror}",
                rule="a run tells what it does in its folder",
                fix="name a folder that can be written to",
            )
        ) from None
    return io.TextIOWrapper(file)


def _mend(file: BinaryIO) -> None:
    """Cut a file off after its last whole line."""
    end = size = file.seek(0, io.SEEK_END)
    while end:
        start = max(0, end - _PIECE)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        end = start if place < 0 else start + place + 1
        if place >= 0:
            break
    if end < size:
        file.truncate(end)


class JsonLines(Hooks):
    """Appends to folder/metrics.jsonl, a line at a time, so that a run that is killed has told what it did."""

    def __init__(self, folder: Path) -> None:
        self.file = appended(folder / "metrics.jsonl")

    def _write(self, kind: str, **fields: Any) -> None:
        """A loss that was not taken is null: NaN is no JSON."""
        finite = {
            key: None if isinstance(each, float) and not math.isfinite(each) else each for key, each in fields.items()
        }
        self.file.write(json.dumps({"kind": kind, **finite}) + "\n")
        self.file.flush()

    def on_start(self, run: Run) -> None:
        """The config, the text and the model."""
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
        """Every step since the last report, the speed with the last."""
        for record in records:
            extra = asdict(speed) if record is records[-1] else {}
            self._write("step", **(extra | asdict(record)))

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """One line."""
        self._write("evaluation", **asdict(evaluation))

    def on_save(self, run: Run, path: Path) -> None:
        """One line."""
        self._write("checkpoint", step=run.step, path=path.name)

    def on_end(self, run: Run, result: TrainResult) -> None:
        """How it ended."""
        keys = ("stopped", "steps", "loss", "tokens_per_second", "peak_memory", "data_hash")
        self._write("end", **{key: getattr(result, key) for key in keys})

    def close(self) -> None:
        """The file is complete."""
        self.file.close()


class TensorBoard(Hooks):
    """Curves in folder/tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise OptionError(
                message(
                    "tensorboard=True without TensorBoard",
                    rule="its files are written by the package tensorboard",
                    fix="pip install tensorboard, or read metrics.jsonl",
                )
            ) from None
        self.writer: Any = None
        self._made, self._folder = SummaryWriter, str(folder / "tensorboard")

    def on_start(self, run: Run) -> None:
        """What was written after the checkpoint that a run goes on from is hidden: those steps come again."""
        self.writer = self._made(self._folder, purge_step=run.step + 1)

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Loss, norm and rate of each step, and the speed."""
        for record in records:
            for name in ("loss", "norm", "rate"):
                self.writer.add_scalar(f"train/{name}", getattr(record, name), record.step)
        for name in ("tokens_per_second", "mfu", "casts"):
            value = getattr(speed, name)
            if value is not None:
                self.writer.add_scalar(f"speed/{name}", value, speed.step)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Loss on held-out text."""
        self.writer.add_scalar("validation/loss", evaluation.loss, evaluation.step)

    def close(self) -> None:
        """Whatever waits is written."""
        if self.writer is not None:
            self.writer.close()
