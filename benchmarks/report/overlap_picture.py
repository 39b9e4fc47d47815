"""Picture of all experts of a model on eight H200, with overlap off and on: GEMM, rows placed, exposed communication.

Bars are hatched where a figure is modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.bench.shapes import OVERLAP_MODELS, OVERLAP_TOKENS
from blockscale.bench.store import Row

from .canvas import figure
from .overlap import MACHINES, PAYLOADS
from .overlap_models import MEASURED, MODELLED, TP, Forward, forward

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "images/overlap.svg"
HATCH = "////"
PARTS = {"GEMM": "#2f81f7", "rows placed and combined": "#8fbcf9", "exposed communication": "#d9772b"}


def description(rows: Sequence[Row]) -> str:
    """Figures of the picture in words. The SVG stores them, so a stale file is found without drawing it."""
    bars: list[str] = []
    for model in OVERLAP_MODELS:
        for payload, name in PAYLOADS.items():
            found = forward(rows, model, MEASURED, payload)
            off, on = (f"{1e3 * sum(each):.1f}" for each in _stacks(found))
            bars.append(f"{model} {name}: {off} ms off, {on} ms on, {found.mark}")
    return "; ".join(bars)


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel for each model, two bars for each payload. The same rows give the same file."""
    from matplotlib.patches import Patch

    found = {model: [forward(rows, model, MEASURED, payload) for payload in PAYLOADS] for model in OVERLAP_MODELS}
    every = [each for theirs in found.values() for each in theirs]
    with figure(path, (9, 3.6), (1, len(found)), words=description(rows)) as (drawn, panels):
        for axes, (model, theirs) in zip(panels, found.items(), strict=True):
            _bars(axes, theirs)
            axes.set_title(f"{model}, {OVERLAP_MODELS[model].layers} layers", fontsize=9)
        panels[0].set_ylabel("ms, forward of all experts")
        known = (
            "a model" if all(each.mark == MODELLED for each in every) else "GEMM of one rank measured, link modelled"
        )
        drawn.suptitle(
            f"Overlap off and on, {MACHINES[MEASURED]}, TP {TP}, {OVERLAP_TOKENS:,} tokens: {known}", fontsize=10
        )
        placed = any(each.times.placed for each in every)
        handles = [Patch(color=colour, label=part) for part, colour in PARTS.items() if placed or "rows" not in part]
        handles.append(Patch(facecolor="white", edgecolor="0.3", hatch=HATCH, label="modelled"))
        drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _stacks(found: Forward) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Seconds of the parts, with overlap off and on. What is exposed is the rest of the total."""
    product, placed, off, on = found.times
    return (product, placed, off - product - placed), (product, placed, on - product - placed)


def _bars(axes: Axes, found: Sequence[Forward]) -> None:
    """Bars of a model, their totals, and the gain above the second one of each payload."""
    names: list[str] = []
    for name, each in zip(PAYLOADS.values(), found, strict=True):
        off, on = (sum(stack) for stack in _stacks(each))
        for word, stack in zip(("off", "on"), _stacks(each), strict=True):
            place, below = len(names) + 0.5 * (len(names) // 2), 0.0
            for (part, colour), seconds in zip(PARTS.items(), stack, strict=True):
                if not seconds:
                    continue
                modelled = each.mark == MODELLED or "communication" in part
                look: dict[str, Any] = {"hatch": HATCH, "edgecolor": "white", "linewidth": 0} if modelled else {}
                axes.bar(place, 1e3 * seconds, bottom=1e3 * below, width=0.8, color=colour, **look)
                below += seconds
            gain = f"\n{off / on:.2f}x" if word == "on" else ""
            axes.annotate(
                f"{1e3 * below:.1f}{gain}", (place, 1e3 * below), xytext=(0, 3), textcoords="offset points", ha="center"
            )
            names.append(f"{name}\n{word}")
    axes.set_xticks([at + 0.5 * (at // 2) for at in range(len(names))], names)
    axes.set_ylim(0, 1.2e3 * max(sum(stack) for each in found for stack in _stacks(each)))
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
