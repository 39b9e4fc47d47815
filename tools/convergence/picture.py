"""Picture of the runs: loss over steps, gap to bf16 with standard error and bound, and gap of the faults."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .arms import ARMS, BASELINE, FAULTS, HONEST, NULL
from .report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "bf16": "black",
    "null": "0.6",
    "mxfp8": "#1b9e77",
    "fp8_blockwise": "#3182bd",
    "nvfp4_backward": "#9e9ac8",
    "nvfp4": "#5e4fa2",
    "mxfp4": "#d95f02",
    "wrong_axis": "#b2182b",
    "truncation": "#d95f02",
    "floor": "#1b9e77",
    "ties_away": "#3182bd",
    "word_zero": "#5e4fa2",
    "word_stuck": "#9e9ac8",
}


def draw(report: Report, path: Path) -> None:
    """Draw three panels; the same rows give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "blockscale", "font.size": 9}):
        figure, (loss, gap, faults) = pyplot.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
        _losses(loss, report)
        _gaps(gap, report, [name for name in HONEST if name != BASELINE])
        _bounds(gap, report)
        gap.set_title("gap to bf16 of the same seed, mean ± standard error; dashed: bounds", fontsize=9)
        _gaps(faults, report, FAULTS)
        for axes in (gap, faults):
            _stretch(axes)
        faults.set_title("the same with faults: what the loss finds by itself", fontsize=9)
        for axes in (loss, gap, faults):
            axes.set_xlabel("step")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _steps(report: Report) -> list[int]:
    return [step for step, _ in next(iter(report.runs[BASELINE].values()))["curve"]]


def _losses(axes: Axes, report: Report) -> None:
    for name in HONEST:
        runs = report.runs[name].values()
        if runs and name != NULL:
            mean = [sum(run["curve"][point][1] for run in runs) / len(runs) for point in range(len(_steps(report)))]
            axes.plot(_steps(report), mean, color=_COLOURS[name], label=name, linewidth=1.2)
    axes.set_title("validation loss, nats per byte, mean over seeds", fontsize=9)


def _gaps(axes: Axes, report: Report, names: Iterable[str]) -> None:
    """Plot gaps in percent, with a band of one standard error."""
    axes.axhline(0, color="black", linewidth=0.8)
    steps = _steps(report)
    for name in names:
        means = [mean for point in range(len(steps)) if (mean := report.gap(name, point)) is not None]
        if means:
            middle = [100 * mean.value for mean in means]
            axes.plot(steps, middle, color=_COLOURS[name], label=name, linewidth=1.4, marker=".", markersize=4)
            low, high = ([100 * (mean.value + sign * mean.error) for mean in means] for sign in (-1, 1))
            axes.fill_between(steps, low, high, color=_COLOURS[name], alpha=0.15, linewidth=0)
    axes.set_ylabel("%")


def _stretch(axes: Axes) -> None:
    """Set a symlog axis, linear near zero: bounds and diverging runs would flatten all others."""
    axes.set_yscale("symlog", linthresh=0.1)
    low, high = axes.get_ylim()
    marks = [-1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30, 100]
    shown = [mark for mark in marks if low <= mark <= high]
    axes.set_yticks(shown, [f"{mark:g}" for mark in shown])
    axes.minorticks_off()


def _bounds(axes: Axes, report: Report) -> None:
    """Plot the largest gap that passes as a dashed line at the right edge."""
    last = _steps(report)[-1]
    for name in ("mxfp8", "fp8_blockwise", "nvfp4", "mxfp4"):
        bound = ARMS[name].bound
        if bound is not None:
            axes.plot([0.9 * last, 1.04 * last], [100 * bound] * 2, color=_COLOURS[name], linestyle="--", linewidth=1)
