"""A run as its file tells it: what is kept of each run of a comparison, who writes it, and how it is read.

Everything that is shown of runs later (tables, pages, published results) is made from these files alone. A run that is
finished is read and not run again; one that was cut off goes on from its last checkpoint, or begins anew.
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
from ..errors import BlockscaleError, CheckpointError, NonFiniteError, message
from ..hardware import describe
from .breakdown import breakdown
from .config import RunConfig, fingerprint, to_dict
from .files import owned
from .loop import train
from .metrics import JsonLines
from .numerics import sample_run
from .records import Hooks, TrainResult
from .run import Run

RUNS, METRICS = "runs", "metrics.jsonl"
# what may be measured when a run is over: every layer's numerics, and where a step's time goes
LOOKS = ("layers", "shares")


@dataclass
class Stored:
    """One run, as its file tells it.

    about: of the line "run".  end: of the last line, empty where the run is not done.  where: machine, versions, commit
    and command.  shares, longest, kernel_ms: of a `Breakdown` of one step.  layers: numerics.  failed: why it ended
    early.  seconds: of a step, by the step that told them.  arm: what the run is in its comparison.
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
        """Also one whose record has lost what it was is not."""
        return bool(self.failed) or (self.end.get("stopped") == "done" and "flop_share" in self.about)

    @property
    def loss(self) -> float:
        """Of held-out text at the end; infinite where the run broke down, nan where it was not taken."""
        found = self.end.get("loss")
        return float("inf") if self.failed else float("nan") if found is None else float(found)


def run_or_read(
    label: str,
    config: RunConfig,
    out: Path,
    hooks: Sequence[Hooks] = (),
    *,
    arm: dict[str, Any] | None = None,
    looks: Sequence[str] = LOOKS,
    commit: str | None = None,
    results: tuple[type[Exception], ...] = (NonFiniteError,),
) -> Stored:
    """One run, from its file or now. With `save_every` a run that was cut off goes on from its last checkpoint.

    label: the first part of its folder's name.  arm: what its file says of it besides.  looks: what is measured at its
    end.  commit: to record where the source is no git checkout.  results: errors that are results of a run.
    """
    config = replace(config, folder=None, resume=False)
    folder = folder_of(label, config, out)
    found = read(folder / METRICS)
    if found.is_done:
        return found
    if config.save_every:
        config = replace(config, folder=folder, resume=True)
    with owned(folder):
        log = RunLog(folder, arm, looks=looks, commit=commit)
        try:
            if train(config, hooks=[log, *hooks]).stopped == "interrupted" or log.was_stopped:
                raise KeyboardInterrupt
        except results as error:
            if not isinstance(error, BlockscaleError):
                traceback.print_exc()
            RunLog(folder, arm).fail(str(error) or type(error).__name__, config)
    found = read(folder / METRICS)
    if not found.is_done:
        raise CheckpointError(
            message(
                f"{folder / METRICS} does not tell of the run that has just ended",
                rule="a comparison is made of what its runs wrote",
                fix="see whether others write there; delete the folder, and the run is made again",
            )
        )
    return found


def folder_of(label: str, config: RunConfig, out: Path) -> Path:
    """Where a run of a comparison is kept: by its config. A checkpoint within the folder of the comparison is named
    from there, so that all of it may move."""
    start = None if config.start is None else config.start.resolve()
    if start is not None and start.is_relative_to(out.resolve()):
        start = start.relative_to(out.resolve())
    config = replace(config, folder=None, resume=False, start=start)
    return out / RUNS / f"{label}-seed{config.seed}-{fingerprint(config)}"


class RunLog(JsonLines):
    """The metrics of a run, and what a comparison shows besides: machine, versions, shares of time, numerics."""

    def __init__(
        self,
        folder: Path,
        arm: dict[str, Any] | None = None,
        *,
        looks: Sequence[str] = LOOKS,
        commit: str | None = None,
    ) -> None:
        super().__init__(folder)
        self.arm, self.looks, self.commit = arm or {}, looks, commit
        self.was_stopped = False  # by Ctrl-C in the last step or after it: the run is done, what follows it is not

    def on_start(self, run: Run) -> None:
        """What it is, and where it runs."""
        super().on_start(run)
        self._write("arm", **self.arm)
        self._write("where", **(describe(run.device) | asdict(where(run.device, __version__, self.commit))))

    def on_end(self, run: Run, result: TrainResult) -> None:
        """What is measured on the trained model; one step more than the run had, which nobody keeps."""
        for look in (self._layers, self._shares) if result.stopped == "done" else ():
            try:
                look(run)
            except (BlockscaleError, RuntimeError) as error:  # the run itself is done, and counts
                self._write("unseen", what=look.__name__.strip("_"), why=str(error) or type(error).__name__)
        super().on_end(run, result)
        self.was_stopped = run.wants_stop

    def _layers(self, run: Run) -> None:
        if "layers" in self.looks:
            refresh_weights_(run.model)
            self._write("layers", layers=[asdict(each) for each in sample_run(run).read().layers])

    def _shares(self, run: Run) -> None:
        if "shares" in self.looks:
            found = breakdown(run.advance)
            self._write("shares", **found.shares)
            self._write("kernels", longest=found.longest, ms=found.kernel_ms)

    def fail(self, why: str, config: RunConfig) -> None:
        """A run that broke down is a result, and is not run again. It may not have come as far as to say what it is."""
        self._write("failed", why=why, config=to_dict(config), arm=self.arm)
        self.close()


def read(path: Path) -> Stored:
    """A run from its file; empty where there is none. Lines that are none, cut off or damaged, do not count."""
    found = Stored()
    if not path.exists():
        return found
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            row = json.loads(line)
            _take(found, row.pop("kind"), row)
    return found


def _take(found: Stored, kind: str, row: dict[str, Any]) -> None:
    match kind:
        case "run":  # again, or going on: what came after that step is run anew
            found.about, found.end, found.failed = row, {}, ""
            for kept in (found.losses, found.evaluations, found.seconds):
                for step in [step for step in kept if step > row["step"]]:
                    del kept[step]
        case "arm":
            found.arm = row
        case "step":
            found.losses[row["step"]] = row["loss"]
            if "step_seconds" in row:
                found.seconds[row["step"]] = row["step_seconds"]
        case "evaluation":
            found.evaluations[row["step"]] = float("nan") if row["loss"] is None else row["loss"]
        case "where":
            found.where = row
        case "shares":
            found.shares = row
        case "kernels":
            found.longest, found.kernel_ms = row["longest"], row.get("ms")
        case "layers":
            found.layers = row["layers"]
        case "failed":
            found.failed, found.arm = row["why"], row["arm"]
            found.about.setdefault("config", row["config"])
        case "end":
            found.end = row
        case _:
            pass
