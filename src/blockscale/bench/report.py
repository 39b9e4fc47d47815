"""Stored rows as tables. The same rows give the same bytes: no clock, no machine, no order of arrival.

A page holds a table between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; `update` rewrites what stands in between.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .shapes import MAIN, text
from .store import Row, read

RESULTS = Path("benchmarks/results")
PICTURE = Path("docs/images/casts.svg")
PAGES = (Path("README.md"), Path("docs/benchmarks.md"))
PEERS = ("eager", "compile", "torchao", "unfused")
EMPTY = "No results are stored yet."
GROUPS = (
    "one operand", "both operands", "expert weights", "FP4, amax given", "NVFP4, own amax", "dequantize", "fused"
)  # fmt: skip


def load(folder: Path) -> list[Row]:
    """All stored rows of the suites, file by file, in the order of the tables."""
    files = [path for suite in ("casts", "dispatch") for path in sorted(folder.glob(f"{suite}-*.jsonl"))]
    return [row for path in files for row in in_order(read(path))]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By group, then by shape: rows of one suite may have been measured in several runs."""
    return sorted(rows, key=lambda row: (GROUPS.index(row.group) if row.group in GROUPS else len(GROUPS), row.shape))


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


def label(row: Row) -> str:
    """The case without its shape, which has a column of its own."""
    return row.case.removesuffix(" " + text(tuple(row.shape)))


def _cast_cells(row: Row, peers: Sequence[str]) -> list[str]:
    if row.us is None:
        return [label(row), text(tuple(row.shape)), f"WRONG: {row.wrong_bytes} bytes", *["-"] * (4 + len(peers))]
    bandwidths = _number(row.gb_s, 0), _number(row.copy_gb_s, 0)
    figures = [_number(row.us), _spread(row), *bandwidths, _number(row.percent_of_copy, 0)]
    return [label(row), text(tuple(row.shape)), *figures, *(_peer(row, name) for name in peers)]


def _head(peers: Sequence[str]) -> list[str]:
    return ["cast", "shape", "µs", "spread", "GB/s", "copy, GB/s", "% of copy", *peers]


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


def fastest_copy(rows: Sequence[Row]) -> float:
    """GB/s of the best copy of any shape; 0 without one."""
    return max((row.copy_gb_s or 0.0 for row in rows), default=0.0)


def _slow_copies(rows: Sequence[Row]) -> list[str]:
    """A remark for tables where the yardstick itself is slow."""
    best = fastest_copy(rows)
    slow = [row for row in rows if row.copy_gb_s is not None and row.copy_gb_s < 0.8 * best]
    if not slow:
        return []
    smallest = min(2 * math.prod(row.shape) for row in slow) / 1e6
    return [
        f"`copy_` itself reaches {fastest_copy(slow):,.0f} GB/s on tensors of {smallest:,.0f} MB and more, against "
        f"{best:,.0f} GB/s on smaller ones; there the column of GB/s says more than the percentage."
    ]


def casts_table(rows: Sequence[Row]) -> str:
    """Every row of the suite, a table per group."""
    mine = [row for row in rows if row.suite == "casts"]
    if not mine:
        return EMPTY
    picture = ["![Casts beside a copy](images/casts.svg)"] if main_rows(mine) else []  # it shows the main shape alone
    parts = [*picture, _provenance(mine), *_slow_copies(mine)]
    for group in dict.fromkeys(row.group for row in mine):
        members = [row for row in mine if row.group == group]
        peers = _shown_peers(members)
        parts.append(f"**{group}**\n\n" + _table(_head(peers), [_cast_cells(row, peers) for row in members]))
    return "\n\n".join(parts)


def summary_table(rows: Sequence[Row]) -> str:
    """The main shape alone, and of expert weights the largest; plain torch is left to the long table."""
    mine = main_rows(rows)
    if not mine:
        return EMPTY
    peers = [name for name in _shown_peers(mine) if name != "eager"]
    table = _table(_head(peers), [_cast_cells(row, peers) for row in mine])
    parts = [f"![Casts beside a copy]({PICTURE.as_posix()})", _provenance(mine), *_slow_copies(mine), table]
    return "\n\n".join(parts)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the summary and of the picture."""
    mine = [row for row in rows if row.suite == "casts"]
    main = [row for row in mine if row.group in ("expert weights", "fused") or row.shape == list(MAIN)]
    largest: dict[tuple[str, str], Row] = {}
    for row in main:
        key = (row.group, label(row))
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
