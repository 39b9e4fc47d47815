"""Stored rows as tables and a picture. The same rows give the same bytes: no clock, no machine, no order of arrival.

A page holds a table between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; `update` rewrites what stands in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .shapes import MAIN, text
from .store import Row, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path("benchmarks/results")
IMAGES = Path("docs/images")
PAGES = (Path("README.md"), Path("docs/benchmarks.md"))
PEERS = ("eager", "compile", "torchao", "unfused")
EMPTY = "No results are stored yet."
# a cast that moves its bytes nine tenths as fast as a copy leaves little to win
BAR = 90.0


def load(folder: Path) -> list[Row]:
    """All stored rows of the suites, file by file."""
    files = [path for suite in ("casts", "dispatch") for path in sorted(folder.glob(f"{suite}-*.jsonl"))]
    return [row for path in files for row in read(path)]


# tables


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _peer(row: Row, name: str) -> str:
    """How many times longer the peer takes; starred when it computes something else."""
    cell = row.peers.get(name, {})
    if "ratio" not in cell:
        return "-"
    return f"{cell['ratio']:.2f}x" + ("*" if "differs" in cell.get("note", "") else "")


def _spread(row: Row) -> str:
    """Quartiles around the median, in percent of it."""
    if row.us is None or row.spread_us is None:
        return "-"
    return f"{100 * (row.spread_us[1] - row.spread_us[0]) / row.us:.1f} %"


def _label(row: Row) -> str:
    """The case without its shape, which has a column of its own."""
    return row.case.removesuffix(" " + text(tuple(row.shape)))


def _cast_cells(row: Row, peers: Sequence[str]) -> list[str]:
    if row.us is None:
        return [_label(row), text(tuple(row.shape)), f"WRONG: {row.wrong_bytes} bytes", *["-"] * (3 + len(peers))]
    figures = [_number(row.us), _spread(row), _number(row.gb_s, 0), _number(row.percent_of_copy, 0)]
    return [_label(row), text(tuple(row.shape)), *figures, *(_peer(row, name) for name in peers)]


def _head(peers: Sequence[str]) -> list[str]:
    return ["cast", "shape", "µs", "spread", "GB/s", "% of copy", *peers]


def _shown_peers(rows: Sequence[Row]) -> list[str]:
    return [name for name in PEERS if any(name in row.peers for row in rows)]


def _provenance(rows: Sequence[Row]) -> str:
    """Where the figures come from; a line per GPU and commit."""
    lines: dict[str, None] = {}
    for row in rows:
        at = row.where
        packages = ", ".join(f"{name} {at[name]}" for name in ("torch", "triton", "torchao") if at.get(name))
        commit = f"commit {at['commit']}" if at.get("commit") else "no commit recorded"
        changed = ", with local changes" if at.get("dirty") else ""
        lines[f"{at.get('gpu')}; {packages}; {commit}{changed}; {str(at.get('utc'))[:10]}."] = None
    return "\n".join(lines)


def casts_table(rows: Sequence[Row]) -> str:
    """Every row of the suite, a table per group."""
    mine = [row for row in rows if row.suite == "casts"]
    if not mine:
        return EMPTY
    parts = [_provenance(mine)]
    for group in dict.fromkeys(row.group for row in mine):
        members = [row for row in mine if row.group == group]
        peers = _shown_peers(members)
        parts.append(f"**{group}**\n\n" + _table(_head(peers), [_cast_cells(row, peers) for row in members]))
    return "\n\n".join(parts)


def summary_table(rows: Sequence[Row]) -> str:
    """The main shape alone, and of expert weights the largest."""
    mine = main_rows(rows)
    if not mine:
        return EMPTY
    peers = _shown_peers(mine)
    return _provenance(mine) + "\n\n" + _table(_head(peers), [_cast_cells(row, peers) for row in mine])


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the summary and of the picture."""
    mine = [row for row in rows if row.suite == "casts"]
    main = [row for row in mine if row.group in ("expert weights", "fused") or row.shape == list(MAIN)]
    largest: dict[tuple[str, str], Row] = {}
    for row in main:
        key = (row.group, _label(row))
        if key not in largest or row.shape > largest[key].shape:
            largest[key] = row
    return list(largest.values())


def dispatch_table(rows: Sequence[Row]) -> str:
    """Host time per call, and the least that one can do next to it."""
    mine = [row for row in rows if row.suite == "dispatch"]
    if not mine:
        return EMPTY
    floors = list(dict.fromkeys(name for row in mine for name in row.peers))

    def cells(row: Row) -> list[str]:
        return [
            row.case,
            _number(row.us),
            _spread(row),
            *(_number(row.peers.get(name, {}).get("us")) for name in floors),
        ]

    table = _table(["call", "µs", "spread", *(f"{name}, µs" for name in floors)], [cells(row) for row in mine])
    return _provenance(mine) + "\n\n" + table


SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "casts": casts_table,
    "casts-summary": summary_table,
    "dispatch": dispatch_table,
}


# pages


def render(page: str, rows: Sequence[Row]) -> str:
    """The page with every marked section rewritten."""
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
        body = section(rows)
        page = pattern.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", page)
    return page


def update(root: Path, rows: Sequence[Row]) -> list[Path]:
    """Rewrite the pages of a checkout; those that changed."""
    changed: list[Path] = []
    for name in PAGES:
        path = root / name
        if path.exists() and (new := render(path.read_text(), rows)) != path.read_text():
            path.write_text(new)
            changed.append(name)
    return changed


# picture


def draw(rows: Sequence[Row], path: Path) -> None:
    """Percent of the copy's bandwidth for each cast of the main shape, ours and theirs; a line at the bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in main_rows(rows) if row.percent_of_copy is not None]
    matplotlib.rcParams["svg.hashsalt"] = "blockscale"
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.27 * len(shown)), layout="constrained")
    _draw_rows(axes, shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


_MARKS = {"torchao": ("s", "#d95f02"), "compile": ("^", "#7570b3"), "eager": ("x", "0.55"), "unfused": ("v", "#666666")}


def _draw_rows(axes: Axes, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    ours = [row.percent_of_copy or 0.0 for row in rows]
    axes.barh(places, ours, height=0.62, color="#1b9e77", label="blockscale")
    for name, (marker, colour) in _MARKS.items():
        points = [
            (row.percent_of_copy / row.peers[name]["ratio"], place)
            for place, row in enumerate(rows)
            if row.percent_of_copy and "ratio" in row.peers.get(name, {})
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, marker=marker, color=colour, s=30, zorder=3, label=name)
    axes.axvline(BAR, color="0.2", linewidth=1, linestyle="--", label=f"bar: {BAR:.0f} %")
    axes.axvline(100, color="0.6", linewidth=1)
    axes.set_yticks(places, [f"{_label(row)}  {text(tuple(row.shape))}" for row in rows], fontsize=8)
    axes.set_xlim(0, max([105.0, *(value * 1.03 for value in ours)]))
    axes.set_xlabel("percent of the bandwidth of a bf16 copy in the same run (fewest bytes that must move / time)")
    axes.set_title(f"Casts on {rows[0].where.get('gpu') if rows else 'nothing'}", loc="left")
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(0, -0.02 - 2.2 / (len(rows) + 4)), fontsize=8)
