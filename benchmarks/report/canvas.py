"""A figure of panels that becomes a file. The same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def figure(
    path: Path,
    size: tuple[float, float],
    grid: tuple[int, int] = (1, 1),
    *,
    words: str = "",
    settings: dict[Any, Any] | None = None,
    transparent: bool = False,
    **options: Any,
) -> Generator[tuple[Figure, list[Axes]]]:
    """A figure and its panels in row order; written when the block ends.  size: inches.  words: stored in the SVG.
    options: of `pyplot.subplots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {"svg.hashsalt": "blockscale", "font.size": 9, **(settings or {})}
    with matplotlib.rc_context(style):
        drawn, panels = pyplot.subplots(*grid, figsize=size, layout="constrained", squeeze=False, **options)
        yield drawn, list(panels.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} | ({"Description": words} if words else {})
        drawn.savefig(path, dpi=120, metadata=metadata if path.suffix == ".svg" else None, transparent=transparent)
        pyplot.close(drawn)
