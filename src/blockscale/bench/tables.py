"""Markdown tables of stored rows: cells, headings of peers, and the line that names machine, versions and commit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .product_peers import ROW
from .shapes import text
from .store import Row

EMPTY = "No results are stored yet."


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are right-aligned."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def number(value: float | None, digits: int = 1) -> str:
    """The value with thousands separators, or a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def mean(ratios: Sequence[float]) -> float:
    """Geometric mean.

    >>> mean([0.5, 2.0])
    1.0
    """
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def peer(row: Row, name: str) -> str:
    """Time of the peer over ours, with a star if its result differs from ours."""
    cell = row.peers.get(name, {})
    if "ratio" not in cell:
        return "-"
    return f"{cell['ratio']:.2f}x" + ("*" if "differs" in cell.get("note", "") else "")


def heading(name: str) -> str:
    """Column heading of a peer. Rows store another backend of the registry as `row NAME`.

    >>> heading("row torch"), heading("bf16")
    ('torch backend', 'bf16')
    """
    return f"{name.removeprefix(ROW)} backend" if name.startswith(ROW) else name


def spread(row: Row) -> str:
    """Distance of the quartiles in percent of the median."""
    if row.us is None or row.spread_us is None:
        return "-"
    return f"{100 * (row.spread_us[1] - row.spread_us[0]) / row.us:.1f} %"


def label(row: Row) -> str:
    """Name of the case without its shape, which has its own column."""
    return row.case.removesuffix(" " + text(tuple(row.shape)))


class HasWhere(Protocol):
    """A stored result with machine, versions and commit in `where`."""

    @property
    def where(self) -> dict[str, Any]: ...


def machine(row: HasWhere) -> str:
    """GPU and versions of torch, triton and torchao."""
    at = row.where
    packages = ", ".join(f"{name} {at[name]}" for name in ("torch", "triton", "torchao") if at.get(name))
    return f"{at.get('gpu')}; {packages}"


def provenance(rows: Sequence[HasWhere]) -> str:
    """Machine, versions, commit and date of the rows; one line per distinct combination."""
    lines: dict[str, None] = {}
    for row in rows:
        at = row.where
        commit = f"commit {at['commit']}" if at.get("commit") else "no commit recorded"
        changed = ", with local changes" if at.get("dirty") else ""
        lines[f"{machine(row)}; {commit}{changed}; {str(at.get('utc'))[:10]}."] = None
    return "\n".join(lines)
