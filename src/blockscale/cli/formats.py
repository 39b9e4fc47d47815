"""`blockscale formats`: tables and a picture of the ten formats and their value grids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table


def run(plot: Path | None = None) -> int:
    """Show the ten formats: element grid, block, scale, rules and storage.

    Args:
        plot: Also draw the value grids to this file (.png, .svg or .pdf).
    """
    from .arguments import check_picture, plain_console

    check_picture(plot, "--plot")
    console = plain_console()
    console.print(_formats_table())
    console.print(_options_table())
    console.print(_grid_table())
    if plot is not None:
        draw(plot)
        console.print(f"wrote {plot}")
    return 0


def _formats_table() -> Table:
    from ..formats import FORMATS

    table = _table("formats (bits per value, with scales)", ("format", "element", "block", "scale", "bits"))
    for spec in FORMATS.values():
        scale = {"mx": "E8M0", "nvfp4": "E4M3 and fp32", "fp8": "fp32"}[spec.family]
        block = f"{spec.block[0]}x{spec.block[1]}"
        table.add_row(spec.name, spec.element.name.upper(), block, scale, f"{spec.bits_per_value:.4g}")
    return table


def _options_table() -> Table:
    from ..formats import FORMATS

    table = _table("their scales (defaults first)", ("format", "scale rules", "scale layouts"))
    for spec in FORMATS.values():
        rules = [spec.default_rule(), *(rule for rule in spec.rules if rule != spec.default_rule())]
        table.add_row(spec.name, " ".join(rules), " ".join(spec.layouts))
    return table


def _grid_table() -> Table:
    from ..formats import ELEMENTS, grid

    headings = ("elem", "bits", "largest", "normal from", "smallest", "values", "grid (non-negative)")
    table = _table("elements", headings)
    for element in ELEMENTS.values():
        values = [f"{value:.3g}" if value < 1 else f"{value:g}" for value in grid(element)]
        shown = values if len(values) <= 8 else [*values[:2], "...", *values[-2:]]
        limits = (f"{element.max_normal:g}", f"2^{element.emin}", f"2^{element.emin - element.mbits}")
        table.add_row(element.name.upper(), str(element.bits), *limits, str(len(values)), " ".join(shown))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    """Table that fits a terminal of 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def draw(path: Path) -> None:
    """Draw the value grids of the five elements, each scaled to a largest value of 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ..formats import ELEMENTS, grid

    figure, (linear, logarithmic) = pyplot.subplots(1, 2, figsize=(11, 3.2), sharey=True, layout="constrained")
    for row, element in enumerate(ELEMENTS.values()):
        values = [value / element.max_normal for value in grid(element)]
        _ticks(linear, row, values)
        _ticks(logarithmic, row, [value for value in values if value > 0])
    linear.set_yticks(range(len(ELEMENTS)), [f"{e.name.upper()}  ({e.bits} bits)" for e in ELEMENTS.values()])
    linear.set_xlabel("value / largest value")
    logarithmic.set_xlabel("value / largest value, octaves")
    logarithmic.set_xscale("log", base=2)
    for axes in (linear, logarithmic):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
    linear.invert_yaxis()  # shared axes were flipped twice
    figure.suptitle("What a block can express before it is scaled")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _ticks(axes: Axes, row: int, values: list[float]) -> None:
    axes.vlines(values, row - 0.32, row + 0.32, color="#1f77b4", linewidth=0.9)
