"""Two pictures of the roofline: speedup over tokens for each layer, and the steps of one layer under the ceilings.

Lines are predictions of the roofline model, markers are measurements. The same figures give the same file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.autograd.recipe import Recipe
from blockscale.bench.rooflines import BASELINE, Layer, Roofs, Times
from blockscale.bench.store import read
from blockscale.roofline import BF16, Ceilings, LinearCost, Step, Use, linear_cost, predicted_speedup

from .canvas import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# a palette for colour-blind readers; bf16 is grey
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
# later lines are thinner, so that lines below stay visible
WIDTHS = (3.0, 2.2, 1.4, 0.9, 0.7, 0.5)
_GREY = "0.35"
_TOKENS = [round(2 ** (power / 4)) for power in range(4 * 4, 16 * 4 + 1)]
_PANELS_ACROSS = 3
PICTURE, STEPS_PICTURE = "images/roofline.svg", "images/roofline-steps.svg"
_MARKS = {"fprop": ">", "dgrad": "<", "wgrad": "^"}


def stored_times(path: Path) -> Times:
    """Times of ours and of bf16 in a file of `bench linear`: forward and backward, one microbatch, the weight cast in
    every forward. Rows of whole steps and of host time are skipped."""
    found: Times = {}
    for row in read(path):
        plain_us = row.peers.get(BASELINE, {}).get("us")
        if (row.suite, row.group) == ("linear", "layers") and row.us is not None and plain_us is not None:
            tokens, n, k = row.shape
            found[(k, n), tokens, row.format], found[(k, n), tokens, BASELINE] = row.us, plain_us
    return found


def draw_speedups(
    layers: Sequence[Layer],
    recipes: Sequence[Recipe],
    roofs: Roofs,
    use: Use,
    path: Path,
    times: Times,
) -> None:
    """One panel per layer: main ceilings solid, nominal ceilings dotted, measured speedups as markers."""
    measured = {
        (layer, name, tokens): times[layer, tokens, BASELINE] / us
        for (layer, tokens, name), us in times.items()
        if name != BASELINE and (layer, tokens, BASELINE) in times
    }
    across = min(_PANELS_ACROSS, len(layers))
    down = math.ceil(len(layers) / across)
    with figure(path, (3.3 * across + 0.6, 2.5 * down + 1.1), (down, across), sharey=True) as (drawn, panels):
        for place, axes in enumerate(panels):
            if place >= len(layers):
                axes.set_visible(False)
                continue
            for recipe, colour, width in zip(recipes, COLOURS, WIDTHS, strict=False):
                _lines(axes, layers[place], recipe, roofs, use, (colour, width), label=place == 0)
                at = [count for layer, name, count in measured if (layer, name) == (layers[place], recipe.name)]
                there = [measured[layers[place], recipe.name, count] for count in at]
                axes.plot(at, there, "o", color=colour, markersize=6, markeredgecolor="white", zorder=4)
            _dress(axes, f"{layers[place][0]} → {layers[place][1]}", first=place % across == 0)
            if place + across >= len(layers):
                axes.set_xlabel("tokens")
            axes.tick_params(labelbottom=place + across >= len(layers))
        panels[0].set_ylim(bottom=0)  # shared by all panels, so set after all lines
        _legend(drawn, roofs, marks=bool(measured))
        what = "forward and backward" if use.training else "forward"
        drawn.suptitle(f"What low precision can win over bf16: {what}, {roofs.main.name}", x=0.01, ha="left")


def _lines(
    axes: Axes, layer: Layer, recipe: Recipe, roofs: Roofs, use: Use, pen: tuple[str, float], *, label: bool
) -> None:
    formats = recipe.formats()

    def curve(roof: Ceilings) -> list[float]:
        return [predicted_speedup(count, *layer, formats, roof, use) for count in _TOKENS]

    colour, width = pen
    axes.plot(_TOKENS, curve(roofs.main), color=colour, linewidth=width, label=recipe.name if label else None)
    if roofs.nominal is not None:
        axes.plot(_TOKENS, curve(roofs.nominal), color=colour, linewidth=1.0, linestyle=":")


def _dress(axes: Axes, title: str, *, first: bool) -> None:
    axes.axhline(1.0, color=_GREY, linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    ticks = [16, 128, 1024, 8192, 65536]
    axes.set_xticks(ticks, ["16", "128", "1k", "8k", "64k"])
    axes.minorticks_off()
    axes.set_xlim(_TOKENS[0], _TOKENS[-1])
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if first:
        axes.set_ylabel("speedup over bf16")


def _legend(drawn: Figure, roofs: Roofs, *, marks: bool) -> None:
    from matplotlib.lines import Line2D

    handles = list(drawn.axes[0].get_legend_handles_labels()[0])
    handles.append(Line2D([], [], color=_GREY, linewidth=1.8, label=f"{roofs.main.kind} roof"))
    if roofs.nominal is not None:
        handles.append(Line2D([], [], color=_GREY, linewidth=1.0, linestyle=":", label="nominal roof"))
    if marks:
        handles.append(Line2D([], [], color=_GREY, marker="o", linestyle="", label="measured"))
    drawn.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)


# ---- the classic roofline --------------------------------------------------------------------------------------------


def draw_steps(layer: Layer, tokens: int, recipes: Sequence[Recipe], ceilings: Ceilings, use: Use, path: Path) -> None:
    """FLOP/s over arithmetic intensity: ceilings of memory and of each tensor core type, and one layer below them.

    A line is the whole layer with its casts, from few tokens to many, with a dot at `tokens`. Small markers are its
    GEMMs alone: the distance to the dot is the cost of casts.
    """
    every = [(BASELINE, _GREY, 4.0, BF16)]
    for recipe, colour, width in zip(recipes, COLOURS, WIDTHS, strict=False):
        every.append((recipe.name, colour, width, recipe.formats()))
    with figure(path, (7.6, 4.8)) as (_, (axes,)):
        _roofs(axes, ceilings, linear_cost(_TOKENS[-1], *layer, every[-1][-1], ceilings, use))
        for name, colour, width, formats in every:
            costs = [linear_cost(count, *layer, formats, ceilings, use) for count in _TOKENS]
            axes.plot(*zip(*map(_place, costs), strict=True), color=colour, linewidth=width, zorder=2)
            _points(axes, name, colour, 5 + 2 * width, linear_cost(tokens, *layer, formats, ceilings, use))
        axes.set_xlabel("FLOPs per byte that must move")
        axes.set_ylabel("TFLOP/s")
        axes.spines[["top", "right"]].set_visible(False)
        title = f"{layer[0]} → {layer[1]} under the {ceilings.kind} roof of {ceilings.name}, dots at {tokens:,} tokens"
        axes.set_title(title, loc="left", fontsize=10)
        for name in [step.name for step in linear_cost(tokens, *layer, BF16, ceilings, use).steps if step.flops]:
            axes.plot([], [], _MARKS[name], color="0.6", markersize=5, markeredgewidth=0, label=f"{name} alone")
        axes.legend(loc="lower right", frameon=False, fontsize=8)


def _place(work: LinearCost | Step) -> tuple[float, float]:
    """(FLOPs per byte, TFLOP/s) of a layer or step."""
    return work.flops / work.bytes, work.flops / work.seconds / 1e12


def _roofs(axes: Axes, ceilings: Ceilings, longest: LinearCost) -> None:
    fastest = max(ceilings.rate(units) for units in ceilings.units)
    knee = fastest / ceilings.bandwidth
    low, high = 8.0, 4 * max(knee, longest.flops / longest.bytes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot([low, knee], [low * ceilings.bandwidth / 1e12, fastest / 1e12], color="0.2", linewidth=1.0, zorder=1)
    middle = math.sqrt(low * knee)
    note: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": "0.2"}
    text = f"memory, {ceilings.bandwidth / 1e12:.3g} TB/s"
    axes.annotate(text, (middle, middle * ceilings.bandwidth / 1e12), xytext=(-8, 4), **note)
    for units in ceilings.units:
        rate = ceilings.rate(units)
        axes.plot([rate / ceilings.bandwidth, high], [rate / 1e12] * 2, color="0.2", linewidth=1.0, zorder=1)
        text = f"{units} units, {rate / 1e12:,.0f} TFLOP/s"
        axes.annotate(text, (high, rate / 1e12), xytext=(0, 6), **note)
    axes.set_xlim(low, high)
    axes.set_ylim(low * ceilings.bandwidth / 1e12 / 4, 2 * fastest / 1e12)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _points(axes: Axes, name: str, colour: str, size: float, cost: LinearCost) -> None:
    casting = sum(step.seconds for step in cost.steps if not step.flops) / cost.seconds
    label = f"{name}: {cost.seconds * 1e6:,.0f} µs" + (f", {casting:.0%} of it casts" if casting else "")
    for step in cost.steps:
        if step.flops:
            axes.plot(*_place(step), _MARKS[step.name], color=colour, markersize=5, markeredgewidth=0, zorder=3)
    axes.plot(*_place(cost), "o", color=colour, markersize=size, markeredgecolor="white", zorder=4, label=label)
