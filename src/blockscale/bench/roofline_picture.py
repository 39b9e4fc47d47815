"""Two pictures of the roofline: speedup over tokens for each layer, and the steps of one layer under the roofs.

Lines are what the model allows, marks what was measured. The same figures give the same file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..autograd.recipe import Recipe
from ..roofline import BF16, Ceilings, LinearCost, Step, Use, linear_cost, predicted_speedup
from .linears import BASELINE, Layer, Measured
from .rooflines import Roofs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# of people who do not see all colours alike; bf16 is grey
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_GREY = "0.35"
_TOKENS = [2 ** (power / 4) for power in range(4 * 4, 16 * 4 + 1)]
_PANELS_ACROSS = 3
_MARKS = {"cast": "s", "decode": "v", "fprop": "o", "dgrad": "^", "wgrad": "D"}


def draw_speedups(
    layers: Sequence[Layer],
    recipes: Sequence[Recipe],
    roofs: Roofs,
    use: Use,
    path: Path,
    seen: Iterable[Measured] = (),
) -> None:
    """A panel for each layer: solid the main roof, dotted the nominal one, marks the measured speedup."""
    measured = _speedups(seen, use)
    across = min(_PANELS_ACROSS, len(layers))
    down = math.ceil(len(layers) / across)
    with _figure(path, (3.3 * across + 0.6, 2.5 * down + 1.1), (down, across)) as (figure, panels):
        for place, axes in enumerate(panels):
            if place >= len(layers):
                axes.set_visible(False)
                continue
            for recipe, colour in zip(recipes, COLOURS, strict=False):
                _lines(axes, layers[place], recipe, roofs, use, colour, label=place == 0)
                marks = [
                    (m, s) for (layer, name, m), s in measured.items() if (layer, name) == (layers[place], recipe.name)
                ]
                if marks:
                    axes.plot(
                        *zip(*marks, strict=True), "o", color=colour, markersize=6, markeredgecolor="white", zorder=4
                    )
            _dress(axes, f"{layers[place][0]} → {layers[place][1]}", first=place % across == 0)
            if place + across >= len(layers):
                axes.set_xlabel("tokens")
            axes.tick_params(labelbottom=place + across >= len(layers))
        _legend(figure, roofs, marks=bool(measured))
        what = "forward and backward" if use.training else "forward"
        figure.suptitle(f"What low precision can win over bf16: {what}, {roofs.main.name}", x=0.01, ha="left")


def _speedups(seen: Iterable[Measured], use: Use) -> dict[tuple[Layer, str, int], float]:
    rows = [row for row in seen if row.fits(None, use)]
    baseline = {(row.layer, row.tokens): row.us for row in rows if row.recipe == BASELINE}
    return {
        (row.layer, row.recipe, row.tokens): baseline[row.layer, row.tokens] / row.us
        for row in rows
        if (row.layer, row.tokens) in baseline and row.recipe != BASELINE
    }


def _lines(axes: Axes, layer: Layer, recipe: Recipe, roofs: Roofs, use: Use, colour: str, *, label: bool) -> None:
    tokens, formats = [round(count) for count in _TOKENS], recipe.formats()

    def curve(roof: Ceilings) -> list[float]:
        return [predicted_speedup(count, *layer, formats, roof, use) for count in tokens]

    axes.plot(tokens, curve(roofs.main), color=colour, linewidth=1.8, label=recipe.name if label else None)
    if roofs.nominal is not None:
        axes.plot(tokens, curve(roofs.nominal), color=colour, linewidth=1.0, linestyle=":")


def _dress(axes: Axes, title: str, *, first: bool) -> None:
    axes.axhline(1.0, color=_GREY, linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    ticks = [16, 128, 1024, 8192, 65536]
    axes.set_xticks(ticks, ["16", "128", "1k", "8k", "64k"])
    axes.minorticks_off()
    axes.set_xlim(_TOKENS[0], _TOKENS[-1])
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if first:
        axes.set_ylabel("speedup over bf16")


def _legend(figure: Figure, roofs: Roofs, *, marks: bool) -> None:
    from matplotlib.lines import Line2D

    handles = list(figure.axes[0].get_legend_handles_labels()[0])
    handles.append(Line2D([], [], color=_GREY, linewidth=1.8, label=f"{roofs.main.kind} roof"))
    if roofs.nominal is not None:
        handles.append(Line2D([], [], color=_GREY, linewidth=1.0, linestyle=":", label="nominal roof"))
    if marks:
        handles.append(Line2D([], [], color=_GREY, marker="o", linestyle="", label="measured"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)


# ---- the classic roofline --------------------------------------------------------------------------------------------


def draw_steps(layer: Layer, tokens: int, recipes: Sequence[Recipe], ceilings: Ceilings, use: Use, path: Path) -> None:
    """FLOP/s over FLOPs per byte: the roofs of memory and of each kind of unit, and where a layer's products are.

    Casts multiply nothing and have no place here; the legend says how much of the time they take.
    """
    costs = [(BASELINE, _GREY, linear_cost(tokens, *layer, BF16, ceilings, use))]
    for recipe, colour in zip(recipes, COLOURS, strict=False):
        costs.append((recipe.name, colour, linear_cost(tokens, *layer, recipe.formats(), ceilings, use)))
    with _figure(path, (7.6, 4.8), (1, 1)) as (figure, (axes,)):
        products = [step for _, _, cost in costs for step in cost.steps if step.flops]
        _roofs(axes, ceilings, products)
        for name, colour, cost in costs:
            _points(axes, name, colour, cost)
        axes.set_xlabel("FLOPs per byte that must move")
        axes.set_ylabel("TFLOP/s")
        axes.spines[["top", "right"]].set_visible(False)
        title = f"{layer[0]} → {layer[1]}, {tokens:,} tokens, under the {ceilings.kind} roof of {ceilings.name}"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(loc="lower right", frameon=False, fontsize=8, title="recipe, least time", alignment="left")


def _roofs(axes: Axes, ceilings: Ceilings, products: Sequence[Step]) -> None:
    fastest = max(ceilings.rate(units) for units in ceilings.units)
    knee = fastest / ceilings.bandwidth
    low = min(knee / 8, 0.6 * min(step.intensity for step in products))
    high = max(knee * 8, 1.8 * max(step.intensity for step in products))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot([low, knee], [low * ceilings.bandwidth / 1e12, fastest / 1e12], color="0.2", linewidth=1.4)
    middle = math.sqrt(low * knee)
    text = f"memory, {ceilings.bandwidth / 1e12:.3g} TB/s"
    axes.annotate(
        text, (middle, middle * ceilings.bandwidth / 1e12), xytext=(-6, 6), textcoords="offset points",
        ha="right", fontsize=8, color="0.2",
    )  # fmt: skip
    for units in ceilings.units:
        rate = ceilings.rate(units)
        axes.plot([rate / ceilings.bandwidth, high], [rate / 1e12] * 2, color="0.2", linewidth=1.4)
        axes.annotate(
            f"{units} units, {rate / 1e12:,.0f} TFLOP/s", (high, rate / 1e12), xytext=(0, 4),
            textcoords="offset points", ha="right", fontsize=8, color="0.2",
        )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(0.7 * low * ceilings.bandwidth / 1e12, 2 * fastest / 1e12)


def _points(axes: Axes, name: str, colour: str, cost: LinearCost) -> None:
    casting = sum(step.seconds for step in cost.steps if not step.flops) / cost.seconds
    label = f"{name}, {cost.seconds * 1e6:,.0f} µs" + (f", {casting:.0%} casting" if casting else "")
    for step in cost.steps:
        if not step.flops:
            continue
        height = step.flops / step.seconds / 1e12
        axes.plot(
            step.intensity, height, _MARKS[step.name], color=colour, markersize=7, markeredgecolor="white", zorder=3,
            label=label,
        )  # fmt: skip
        label = None
        axes.annotate(
            step.name, (step.intensity, height), xytext=(0, -12), textcoords="offset points", ha="center", fontsize=7,
            color=colour,
        )  # fmt: skip


@contextmanager
def _figure(path: Path, size: tuple[float, float], grid: tuple[int, int]) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its panels, row by row; it is written when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "blockscale", "font.size": 9}):
        figure, panels = pyplot.subplots(*grid, figsize=size, layout="constrained", sharey=True, squeeze=False)
        yield figure, list(panels.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
