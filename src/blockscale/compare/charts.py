"""Charts of a comparison as inline SVG: curves over steps, intervals, stacked bars. Colours are CSS variables of the
page, so that one drawing serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 40
# lower end of a logarithmic axis, in percent, at least
LEAST = 1e-3


@dataclass(frozen=True)
class Line:
    """One curve.  place: index of its colour, --c0 to --c7.  faint: drawn thin, for further seeds of one colour."""

    name: str
    points: Sequence[tuple[float, float]]
    place: int
    faint: bool = False
    dashed: bool = False


def lines(curves: Sequence[Line], y_name: str, *, unit: str = "", band: float | None = None, late: float = 0.0) -> str:
    """Curves over steps.  band: half width of a strip around zero, such as noise.  late: share of the steps at the
    beginning that does not scale the y axis; points outside the axis are clipped there."""
    curves = [each for each in curves if each.points]
    finite = [(x, y) for each in curves for x, y in each.points if math.isfinite(y)]
    if not finite:
        return "<p class='note'>nothing to draw</p>"
    low_x, high_x = min(x for x, _ in finite), max(x for x, _ in finite)
    late_values = [y for x, y in finite if x >= low_x + late * (high_x - low_x)]
    edges = late_values + ([band, -band] if band is not None and math.isfinite(band) else [])
    ticks = nice(min(edges), max(edges))
    low_y, high_y = min(ticks[0], *edges), max(ticks[-1], *edges)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1)
        up = (y - low_y) / ((high_y - low_y) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    # all plots of a page have one size and share this clip path
    box = f"x='{LEFT}' y='{TOP}' width='{WIDTH - LEFT - RIGHT}' height='{HEIGHT - TOP - BOTTOM}'"
    parts = [f"<clipPath id='plot'><rect {box}/></clipPath>"]
    if band is not None and math.isfinite(band):
        top, floor = at(low_x, band)[1], at(low_x, -band)[1]
        parts.append(
            f"<rect class='band' x='{LEFT}' y='{top:.1f}' width='{WIDTH - LEFT - RIGHT}' "
            f"height='{max(1.0, floor - top):.1f}'><title>noise of the null run</title></rect>"
        )
    for tick in ticks:
        y = at(low_x, tick)[1]
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{tick:g}{unit}</text>")
    for tick in nice(low_x, high_x):
        if low_x <= tick <= high_x and tick == int(tick):
            x = at(tick, low_y)[0]
            parts.append(f"<text x='{x:.1f}' y='{HEIGHT - BOTTOM + 18}' text-anchor='middle'>{tick:g}</text>")
    parts.append(f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 6}' text-anchor='middle'>step</text>")
    for each in curves:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in each.points if math.isfinite(p[1])))
        kind = "curve" + (" faint" if each.faint else "") + (" dashed" if each.dashed else "")
        style = f"stroke:var(--c{each.place % 8})"
        parts.append(
            f"<polyline class='{kind}' style='{style}' clip-path='url(#plot)' points='{path}'>"
            f"<title>{escape(each.name)}</title></polyline>"
        )
        if len(each.points) <= 12 and not each.faint:
            dots = (at(*p) for p in each.points if math.isfinite(p[1]))
            parts += [
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' style='fill:var(--c{each.place % 8})'/>"
                for x, y in dots
                if TOP <= y <= HEIGHT - BOTTOM
            ]
    body = "".join(parts)
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(y_name)}'>{body}</svg>" + legend(
        [(each.name, each.place) for each in curves if not each.faint]
    )


@dataclass(frozen=True)
class Interval:
    """One value with its confidence interval.  error: half width.  place: index of its colour.  mark: the budget."""

    name: str
    value: float
    error: float
    place: int
    mark: float | None = None


def interval_chart(rows: Sequence[Interval], unit: str = " %") -> str:
    """Absolute values on one logarithmic axis, each a dot with its interval and mark; signs are in the titles."""
    height, left, foot = 30, 140, 24
    sizes = [size for row in rows for size in (abs(row.value), abs(row.value) + row.error, row.mark or 0.0) if size > 0]
    if not sizes:
        return "<p class='note'>nothing to draw</p>"
    low, high = (math.floor(math.log10(max(min(sizes), LEAST))), math.ceil(math.log10(max(sizes))))
    high, bottom = max(high, low + 1), height * len(rows) + 4

    def at(size: float) -> float:
        across = (math.log10(max(size, 10.0**low)) - low) / (high - low)
        return left + across * (WIDTH - left - 2 * RIGHT)

    parts: list[str] = []
    for power in range(low, high + 1):
        x = at(10.0**power)
        parts.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='2' y2='{bottom}'/>")
        parts.append(f"<text x='{x:.1f}' y='{bottom + 17}' text-anchor='middle'>{10.0**power:g}{unit}</text>")
    for place, row in enumerate(rows):
        y, colour = place * height + 17, f"var(--c{row.place % 8})"
        ends = sorted((abs(row.value - row.error), abs(row.value + row.error)))
        first = 0.0 if abs(row.value) <= row.error else ends[0]
        title = f"<title>{escape(row.name)}: {row.value:+.3g} ± {row.error:.2g}{unit}</title>"
        parts.append(f"<text x='{left - 10}' y='{y + 4}' text-anchor='end'>{escape(row.name)}</text>")
        span = f"x1='{at(first):.1f}' x2='{at(ends[1]):.1f}' y1='{y}' y2='{y}'"
        parts.append(f"<line class='reach' style='stroke:{colour}' {span}>{title}</line>")
        parts.append(f"<circle cx='{at(abs(row.value)):.1f}' cy='{y}' r='5' style='fill:{colour}'>{title}</circle>")
        if row.mark is not None:
            x = at(row.mark)
            title = f"<title>{escape(row.name)}: budget {row.mark:g}{unit}</title>"
            parts.append(f"<line class='mark' x1='{x:.1f}' x2='{x:.1f}' y1='{y - 10}' y2='{y + 10}'>{title}</line>")
    size = f"viewBox='0 0 {WIDTH} {bottom + foot}' style='max-width:760px'"
    return f"<svg {size} role='img' aria-label='sizes of gaps'>{''.join(parts)}</svg>"


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Names beside their colours."""
    keys = (f"<span><i style='background:var(--c{at % 8})'></i>{escape(name)}</span>" for name, at in names)
    return f"<div class='legend'>{''.join(keys)}</div>"


def bars(rows: Sequence[tuple[str, dict[str, float]]], kinds: Sequence[str]) -> str:
    """One stacked bar of shares for each name."""
    height, left, width = 30, 130, 760
    parts: list[str] = []
    for place, (name, shares) in enumerate(rows):
        y, x = place * height + 4, float(left)
        parts.append(f"<text x='{left - 10}' y='{y + 15}' text-anchor='end'>{escape(name)}</text>")
        for at, kind in enumerate(kinds):
            share = shares.get(kind, 0.0)
            size = share * (width - left - 4)
            title = f"<title>{escape(name)}: {kind} {share:.1%}</title>"
            parts.append(
                f"<rect x='{x:.1f}' y='{y}' width='{size:.1f}' height='22' style='fill:var(--k{at})'>{title}</rect>"
            )
            if share >= 0.07:
                parts.append(
                    f"<text class='inside' x='{x + size / 2:.1f}' y='{y + 15}' text-anchor='middle'>{share:.0%}</text>"
                )
            x += size
    keys = "".join(f"<span><i style='background:var(--k{at})'></i>{kind}</span>" for at, kind in enumerate(kinds))
    size = f"viewBox='0 0 {width} {height * len(rows) + 6}' style='max-width:{width}px'"
    svg = f"<svg {size} role='img' aria-label='shares of time'>{''.join(parts)}</svg>"
    return f"{svg}<div class='legend'>{keys}</div>"


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range.

    >>> nice(0.0, 103.0)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]
    """
    span = (high - low) or abs(high) or 1.0
    rough = span / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * each for each in (1, 2, 5, 10) if unit * each >= rough * 0.8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(each * step, 12) for each in range(first, last + 1)]
