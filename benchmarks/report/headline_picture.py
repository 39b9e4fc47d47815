"""Pictures of the front page: speed beside bf16, cuBLAS and torchao on one H200, and loss beside bf16.

The background is transparent, and text is grey: legible on white and on black.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.bench.layers import BF16
from blockscale.bench.store import Row
from blockscale.bench.trainings import BASELINE, Convergence, Training

from .canvas import figure
from .headline import CUBLAS_FP8, OURS, TORCHAO_FP8, Panel, loss_comparison, panels
from .speed import RECIPE
from .training import NULL, gap_of, percent

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE, LOSS_PICTURE = "images/headline.svg", "images/headline-loss.svg"
TEXT = "#757d86"
_TEXTS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: dict[str, Any] = {"settings": {"font.size": 10, **dict.fromkeys(_TEXTS, TEXT)}, "transparent": True}
COLOURS = {BF16: "#a5acb3", CUBLAS_FP8: "#6a9a1f", TORCHAO_FP8: "#d9772b", OURS: "#2f81f7"}


def description(shown: Sequence[Panel]) -> str:
    """Figures of the picture of speed in words. The SVG stores them, so a stale file is found without drawing it."""
    bars = (
        f"{panel.title} ({panel.note}): "
        + ", ".join(f"{name} {value:,.0f}" for name, value in panel.bars.items())
        + f" {panel.unit}"
        for panel in shown
    )
    return "; ".join(bars)


def loss_description(group: Sequence[Convergence]) -> str:
    """Figures of the picture of loss in words."""
    first = group[0]
    gaps = ", ".join(f"{row.arm} {gap_of(row)}" for row in group if row.arm != BASELINE)
    return f"{first.model}, {first.steps} steps, seeds {first.seeds}: {gaps}; noise {percent(first.noise)}"


def draw(rows: Sequence[Row], trainings: Sequence[Training], path: Path) -> None:
    """One panel of bars per benchmark. The same rows give the same file."""
    from matplotlib.patches import Patch

    shown = panels(rows, trainings)
    widths = [len(panel.bars) + 0.6 for panel in shown]
    with figure(path, (10, 3.1), (1, len(widths)), words=description(shown), width_ratios=widths, **_STYLE) as (
        drawn,
        grid,
    ):
        for axes, panel in zip(grid, shown, strict=True):
            _bars(axes, panel)
        used = [name for name in COLOURS if any(name in panel.bars for panel in shown)]
        patches = [Patch(color=COLOURS[name], label=name) for name in used]
        _legend(drawn, patches)


def draw_loss(trainings: Sequence[Training], path: Path) -> None:
    """Training loss, and the gap to bf16 on held-out text with the noise of the null run as a band."""
    group = loss_comparison(trainings)
    with figure(path, (10, 2.7), (1, 2), words=loss_description(group), **_STYLE) as (drawn, (left, right)):
        _losses(left, group)
        _gaps(right, group)
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.margins(x=0.01)
            axes.spines[["top", "right"]].set_visible(False)
        handles = {name: handle for axes in (left, right) for handle, name in zip(*_labels(axes), strict=True)}
        _legend(drawn, list(handles.values()))


def _labels(axes: Axes) -> tuple[list[Artist], list[str]]:
    return axes.get_legend_handles_labels()


def _legend(drawn: Figure, handles: Sequence[Artist]) -> None:
    drawn.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handlelength=1.2,
        handleheight=1.0,
    )  # fmt: skip


def _bars(axes: Axes, panel: Panel) -> None:
    """Bars with their figures above, and the speedup over bf16 inside ours."""
    names = list(panel.bars)
    axes.bar(names, [panel.bars[name] for name in names], width=0.82, color=[COLOURS[name] for name in names])
    for place, name in enumerate(names):
        value = panel.bars[name]
        weight = "bold" if name == OURS else "normal"
        axes.annotate(
            f"{value:,.0f}", (place, value), xytext=(0, 3), textcoords="offset points", ha="center", weight=weight
        )
    gain = panel.bars[OURS] / panel.bars[BF16]
    axes.annotate(
        f"{gain:.2f}x\nbf16", (names.index(OURS), panel.bars[OURS]), xytext=(0, -6), textcoords="offset points",
        ha="center", va="top", color="white", fontsize=9, weight="bold",
    )  # fmt: skip
    axes.set_title(f"{panel.title}, {panel.unit}", fontsize=11, weight="bold", color=TEXT, pad=22)
    axes.text(0.5, 1.035, panel.note, transform=axes.transAxes, ha="center", fontsize=8.5)
    axes.set_ylim(0, 1.1 * max(panel.bars.values()))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(TEXT)


def _losses(axes: Axes, group: Sequence[Convergence]) -> None:
    """Training loss of the first seed, without the null run. Later lines are thinner, so earlier ones stay visible."""
    shown = [row for row in group if row.arm != NULL and row.curves and row.curves[0]]
    for place, row in enumerate(shown):
        steps, losses = zip(*row.curves[0], strict=True)
        axes.plot(steps, losses, color=_colour(row.arm), label=row.arm, linewidth=max(1.0, 4.5 - 1.7 * place))
    axes.set_title(f"{group[0].model}: training loss", fontsize=10, loc="left")
    axes.set_ylim(top=1.05 * max((y for row in shown for x, y in row.curves[0] if 20 * x >= row.steps), default=1.0))


def _gaps(axes: Axes, group: Sequence[Convergence]) -> None:
    """Mean gap over the seeds in percent, from a tenth of the run on."""
    noise = 100 * (group[0].noise or 0.0)
    axes.axhspan(-noise, noise, color=TEXT, alpha=0.22, linewidth=0, label="noise of the null run")
    axes.axhline(0, color=TEXT, linewidth=0.8)
    for row in group:
        points = [(step, 100 * gap) for step, gap in row.along if 10 * step >= row.steps]
        if row.arm not in (BASELINE, NULL) and points:
            axes.plot(*zip(*points, strict=True), color=_colour(row.arm), label=row.arm, linewidth=1.6)
    axes.set_title(f"gap to bf16 on held-out text, %, mean of {len(group[0].seeds)} seeds", fontsize=10, loc="left")


def _colour(arm: str) -> str:
    return {BASELINE: COLOURS[BF16], RECIPE: COLOURS[OURS]}.get(arm, "#2da44e")
