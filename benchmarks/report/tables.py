"""Markdown tables of stored rows: cells, headings of peers, and the line that names machine, versions and commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from blockscale.bench.shapes import text
from blockscale.bench.store import ROW, Row

EMPTY = "No results are stored yet."


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are right-aligned."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def mean(ratios: Sequence[float]) -> float:
    """Geometric mean.

    >>> mean([0.5, 2.0])
    1.0
    """
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


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


def by_group(rows: Sequence[Row], title: Callable[[Row], str], make: Callable[[list[Row]], str]) -> list[str]:
    """A table under each title, in the order of the rows."""
    titles = dict.fromkeys(map(title, rows))
    return [f"**{each}**\n\n" + make([row for row in rows if title(row) == each]) for each in titles]


class HasWhere(Protocol):
    """A stored result with machine, versions and commit in `where`."""

    @property
    def where(self) -> dict[str, Any]: ...


def machine(row: HasWhere) -> str:
    """GPU and versions of torch, triton and torchao."""
    at = row.where
    packages = ", ".join(f"{name} {at[name]}" for name in ("torch", "triton", "torchao") if at.get(name))
    return f"{at.get('gpu')}; {packages}"


def commit(row: HasWhere) -> str:
    """Commit of a run."""
    return f"{row.where.get('commit') or 'none recorded'}{', with local changes' if row.where.get('dirty') else ''}"


def provenance(rows: Sequence[HasWhere]) -> str:
    """Machine, versions, commit and date of the rows; one line per distinct combination."""
    lines: dict[str, None] = {}
    for row in rows:
        at = row.where
        commit = f"commit {at['commit']}" if at.get("commit") else "no commit recorded"
        changed = ", with local changes" if at.get("dirty") else ""
        lines[f"{machine(row)}; {commit}{changed}; {str(at.get('utc'))[:10]}."] = None
    return "\n".join(lines)
