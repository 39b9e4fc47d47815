"""Run records: the file of each run of a comparison, its writer and its reader.

Tables, pages and rows are made from these files alone. A finished run is read and not trained again; an interrupted run
resumes from its last checkpoint, or starts again.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..autograd import refresh_weights_
from ..bench.store import where
from ..errors import BlockscaleError, CheckpointError, NonFiniteError, refuse
from ..hardware import describe
from ..train.breakdown import breakdown
from ..train.config import RunConfig, fingerprint, to_dict
from ..train.files import folder_lock
from ..train.loop import train
from ..train.metrics import JsonLines
from ..train.numerics import sample_run
from ..train.records import Hooks, TrainResult
from ..train.run import Run

RUNS, METRICS = "runs", "metrics.jsonl"
# measurements after a run: quantization noise of every layer, and shares of a step's time
MEASUREMENTS = ("layers", "shares")


@dataclass
class Stored:
    """Record of one run, read from its file.

    about: the line "run".  end: the last line, empty if the run is not done.  where: machine, versions, commit and
    command.  shares, longest, kernel_ms: `Breakdown` of one step.  layers: quantization noise.  failed: error that
    ended the run.  seconds: of a step, by the step that reported them.  arm: the run's arm in its comparison.
    """

    about: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: dict[int, float] = field(default_factory=dict[int, float])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    end: dict[str, Any] = field(default_factory=dict[str, Any])
    where: dict[str, Any] = field(default_factory=dict[str, Any])
    shares: dict[str, float] = field(default_factory=dict[str, float])
    layers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failed: str = ""
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    arm: dict[str, Any] = field(default_factory=dict[str, Any])
    longest: dict[str, float] = field(default_factory=dict[str, float])
    kernel_ms: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether the run finished or failed; False if its record is incomplete."""
        return bool(self.failed) or (self.end.get("stopped") == "done" and "flop_share" in self.about)

    @property
    def loss(self) -> float:
        """Final loss on held-out text; infinite if the run failed, NaN if there was no evaluation."""
        found = self.end.get("loss")
        return float("inf") if self.failed else float("nan") if found is None else float(found)


def run_or_read(
    label: str,
    config: RunConfig,
    out: Path,
    hooks: Sequence[Hooks] = (),
    *,
    arm: dict[str, Any] | None = None,
    measurements: Sequence[str] = MEASUREMENTS,
    commit: str | None = None,
    results: tuple[type[Exception], ...] = (NonFiniteError,),
) -> Stored:
    """One run, read from its file or trained now. With `save_every` an interrupted run resumes from its checkpoint.

    label: first part of its folder's name.  arm: facts for its record.  measurements: taken at its end.  commit:
    recorded if the source is no git checkout.  results: errors that count as the result of a run.
    """
    config = replace(config, folder=None, resume=False)
    folder = folder_of(label, config, out)
    found = read(folder / METRICS)
    if found.is_done:
        return found
    if config.save_every:
        config = replace(config, folder=folder, resume=True)
    with folder_lock(folder):
        log = RunLog(folder, arm or {}, measurements, commit)
        try:
            if train(config, hooks=[log, *hooks]).stopped == "interrupted" or log.was_stopped:
                raise KeyboardInterrupt
        except results as error:
            if not isinstance(error, BlockscaleError):
                traceback.print_exc()
            RunLog(folder, arm or {}).fail(str(error) or type(error).__name__, config)
    found = read(folder / METRICS)
    if not found.is_done:
        what = f"{folder / METRICS} has no record of the run that has just ended"
        rule = "a comparison is made from the records of its runs"
        fix = "check whether other processes write there; delete the folder to train the run again"
        refuse(what, rule, fix, error=CheckpointError)
    return found


def folder_of(label: str, config: RunConfig, out: Path) -> Path:
    """Folder of a run, named by a hash of its config. A `start` inside `out` is hashed as a relative path, so that the
    folder of the comparison may move."""
    start = None if config.start is None else config.start.resolve()
    if start is not None and start.is_relative_to(out.resolve()):
        start = start.relative_to(out.resolve())
    config = replace(config, folder=None, resume=False, start=start)
    return out / RUNS / f"{label}-seed{config.seed}-{fingerprint(config)}"


class RunLog(JsonLines):
    """Writer of a run record: metrics, machine, versions, shares of time, quantization noise."""

    def __init__(
        self, folder: Path, arm: dict[str, Any], measurements: Sequence[str] = (), commit: str | None = None
    ) -> None:
        super().__init__(folder)
        self.arm, self.measurements, self.commit = arm, measurements, commit
        self.was_stopped = False  # Ctrl-C in the last step or later: this run is done, the comparison stops

    def on_start(self, run: Run) -> None:
        """Write the run, its arm, machine and versions."""
        super().on_start(run)
        self._write("arm", **self.arm)
        self._write("where", **(describe(run.device) | asdict(where(run.device, __version__, self.commit))))

    def on_end(self, run: Run, result: TrainResult) -> None:
        """Write the measurements on the trained model; that of shares makes an extra step and discards its weights."""
        for name in self.measurements if result.stopped == "done" else ():
            try:
                self._measure(name, run)
            except (BlockscaleError, RuntimeError) as error:  # the run itself is done and stays valid
                self._write("unseen", what=name, why=str(error) or type(error).__name__)
        super().on_end(run, result)
        self.was_stopped = run.wants_stop

    def _measure(self, name: str, run: Run) -> None:
        if name == "layers":
            refresh_weights_(run.model)
            self._write(name, layers=[asdict(each) for each in sample_run(run).read().layers])
        elif run.device.type == "cuda":  # on a CPU they would show the cost of exact emulation
            found = breakdown(run.advance)
            self._write(name, **found.shares)
            self._write("kernels", longest=found.longest, ms=found.kernel_ms)

    def fail(self, why: str, config: RunConfig) -> None:
        """Write a failed run, a result that is not repeated, with config and arm: `on_start` may have failed."""
        self._write("failed", why=why, config=to_dict(config), arm=self.arm)
        self.close()


def read(path: Path) -> Stored:
    """Record of a run from its file; empty if there is none. Damaged lines are skipped."""
    found = Stored()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            row = json.loads(line)
            _take(found, row.pop("kind"), row)
    return found


def _take(found: Stored, kind: str, row: dict[str, Any]) -> None:
    if kind == "run":  # started again or resumed: later steps are repeated
        found.about, found.end, found.failed = row, {}, ""
        for kept in (found.losses, found.evaluations, found.seconds):
            for step in [step for step in kept if step > row["step"]]:
                del kept[step]
    elif kind == "step":
        found.losses[row["step"]] = row["loss"]
        if "step_seconds" in row:
            found.seconds[row["step"]] = row["step_seconds"]
    elif kind == "evaluation":
        found.evaluations[row["step"]] = float("nan") if row["loss"] is None else row["loss"]
    elif kind == "kernels":
        found.longest, found.kernel_ms = row["longest"], row.get("ms")
    elif kind == "layers":
        found.layers = row["layers"]
    elif kind == "failed":
        found.failed, found.arm = row["why"], row["arm"]
        found.about.setdefault("config", row["config"])
    elif kind in ("arm", "where", "shares", "end"):
        setattr(found, kind, row)
