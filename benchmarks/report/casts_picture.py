"""Picture of the casts: TB/s of Blockscale and its peers, with lines at the bandwidth of a copy and at 90 % of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.bench.shapes import text
from blockscale.bench.store import Row

from .canvas import figure
from .casts import fastest_copy, main_rows
from .tables import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# share of the bandwidth of a copy that leaves little to gain
BAR = 0.9
_MARKS = {
    "torchao": ("s", "#d95f02"),
    "compile": ("D", "#5e4fa2"),
    "unfused": ("v", "#b2182b"),
    "eager": ("X", "0.45"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """One bar per row of the summary, one marker per peer. The same rows give the same file."""
    shown = [row for row in main_rows(rows) if row.gb_s is not None]
    with figure(path, (9, 1.5 + 0.26 * len(shown))) as (drawn, (axes,)):
        _bars(axes, shown)
        for name in _MARKS:
            _marks(axes, shown, name)
        _lines(axes, shown)
        drawn.legend(loc="outside lower center", ncols=7, frameon=False)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    ours = [(row.gb_s or 0.0) / 1e3 for row in rows]
    axes.barh(range(len(rows)), ours, height=0.7, color="#8fd0b5", label="Blockscale")
    for place, value in enumerate(ours):  # right of the axes, clear of lines and markers
        axes.text(1.0, place, f"{value:.2f}", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{label(row)}  {text(tuple(row.shape))}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.03 * max([fastest_copy(rows) / 1e3, *ours], default=1.0))


def _marks(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Markers of one peer, whose bandwidth is ours over the ratio of the times."""
    x: list[float] = []
    y: list[int] = []
    for place, row in enumerate(rows):
        if row.gb_s and "ratio" in row.peers.get(name, {}):
            x.append(row.gb_s / 1e3 / row.peers[name]["ratio"])
            y.append(place)
    if x:
        marker, colour = _MARKS[name]
        axes.scatter(x, y, marker=marker, color=colour, s=34, linewidths=0.6, edgecolors="white", zorder=3, label=name)


def _lines(axes: Axes, rows: Sequence[Row]) -> None:
    copy = fastest_copy(rows) / 1e3
    axes.axvline(
        BAR * copy, color="0.15", linewidth=1, linestyle="--", zorder=0, label=f"{100 * BAR:.0f} % of that copy"
    )
    axes.axvline(copy, color="0.65", linewidth=1, zorder=0, label="bf16 copy in the same run")
    axes.set_xlabel("TB/s: least bytes that the cast must move, over its time")
    where = rows[0].where if rows else {}
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "triton", "torchao") if where.get(name))
    axes.set_title(f"Casts on {where.get('gpu', 'no device')}  ({versions})", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
