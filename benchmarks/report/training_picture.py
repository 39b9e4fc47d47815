"""Picture of training runs: loss by recipe, and gap to bf16 with the noise of the null run, for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.bench.trainings import BASELINE, Convergence

from .canvas import figure
from .training import NULL, apart, pictured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    BASELINE: "black",
    NULL: "0.55",
    "fp8_blockwise": "#3182bd",
    "mxfp8": "#1b9e77",
    "nvfp4": "#5e4fa2",
    "mxfp4": "#d95f02",
}


def draw(rows: Sequence[Convergence], path: Path) -> None:
    """Two panels for each of the longest comparisons. The same rows give the same file."""
    groups = pictured(rows)
    with figure(path, (10, 3.4 * len(groups)), (len(groups), 2)) as (drawn, panels):
        for loss, gap, group in zip(panels[::2], panels[1::2], groups, strict=True):
            _losses(loss, group)
            _gaps(gap, group)
            for axes in (loss, gap):
                axes.set_xlabel("step")
                axes.spines[["top", "right"]].set_visible(False)
        handles, names = panels[1].get_legend_handles_labels()
        first_handles, first_names = panels[0].get_legend_handles_labels()
        shown = dict(zip([*first_names, *names], [*first_handles, *handles], strict=True))
        drawn.legend([*shown.values()], [*shown], loc="outside lower center", ncols=7, frameon=False)


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#b2182b")


def _losses(axes: Axes, group: Sequence[Convergence]) -> None:
    """Training loss of the first seed. The null run is left out: it lies on bf16."""
    from matplotlib.ticker import LogLocator

    for row in group:
        if row.arm != NULL and row.curves and row.curves[0]:
            steps, losses = zip(*row.curves[0], strict=True)
            axes.plot(steps, losses, color=_colour(row.arm), label=row.arm, linewidth=1.1)
    first = group[0]
    axes.set_title(f"{first.model}: training loss, nats per symbol, seed {first.seeds[0]}", loc="left", fontsize=9)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 4, 6, 8)))  # a loss moves within one power of ten
    axes.yaxis.set_minor_formatter("{x:g}")


def _gaps(axes: Axes, group: Sequence[Convergence]) -> None:
    """Gap in percent of the loss of bf16 on held-out text, mean of the seeds; the band is the noise of the null run.

    The axis fits the last two thirds: early gaps only say that one run is some steps ahead of another. A band far wider
    than the gaps fills the panel.
    """
    noise = next((row.noise for row in group if row.arm == NULL), None)
    if noise is not None:
        axes.axhspan(-100 * noise, 100 * noise, color="0.88", linewidth=0, label="noise of the null run")
    axes.axhline(0, color="black", linewidth=0.8)
    for row in group:
        if row.arm != BASELINE and row.along:
            steps, gaps = zip(*row.along, strict=True)
            dashed = "--" if row.arm == NULL else "-"
            axes.plot(
                steps, [100 * each for each in gaps], dashed, color=_colour(row.arm), label=row.arm, linewidth=1.3
            )
    late = max((abs(gap) for row in group for step, gap in row.along if 3 * step >= row.steps), default=0.0)
    wide = max(late, noise or 0.0)
    if reach := 130 * (min(wide, 2 * late) or wide):
        axes.set_ylim(-reach, reach)
    many = len(group[0].seeds)
    title = f"gap to bf16, %, on held-out text ({apart(group[0])}{many} seed{'s' * (many > 1)})"
    axes.set_title(title, loc="left", fontsize=9)
