"""Pieces of the tables that pages show: cells, marks for peers, and the line that says where figures come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .shapes import text
from .store import Row

EMPTY = "No results are stored yet."


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in markdown; all columns but the first are right-aligned."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def peer(row: Row, name: str) -> str:
    """How many times longer the peer takes; starred when it computes something else."""
    cell = row.peers.get(name, {})
    if "ratio" not in cell:
        return "-"
    return f"{cell['ratio']:.2f}x" + ("*" if "differs" in cell.get("note", "") else "")


def spread(row: Row) -> str:
    """Quartiles around the median, in percent of it."""
    if row.us is None or row.spread_us is None:
        return "-"
    return f"{100 * (row.spread_us[1] - row.spread_us[0]) / row.us:.1f} %"


def label(row: Row) -> str:
    """The case without its shape, which has a column of its own."""
    return row.case.removesuffix(" " + text(tuple(row.shape)))


class HasWhere(Protocol):
    """Anything that says where it was measured."""

    @property
    def where(self) -> dict[str, Any]: ...


def provenance(rows: Sequence[HasWhere]) -> str:
    """Where the figures come from; a line per GPU and commit."""
    lines: dict[str, None] = {}
    for row in rows:
        at = row.where
        packages = ", ".join(f"{name} {at[name]}" for name in ("torch", "triton", "torchao") if at.get(name))
        commit = f"commit {at['commit']}" if at.get("commit") else "no commit recorded"
        changed = ", with local changes" if at.get("dirty") else ""
        lines[f"{at.get('gpu')}; {packages}; {commit}{changed}; {str(at.get('utc'))[:10]}."] = None
    return "\n".join(lines)
