"""Stored rows of casts and of host time as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from blockscale.bench.shapes import MAIN, text
from blockscale.bench.store import Row, number, peer

from . import goals
from .goals import Goal, Verdict, at_least
from .tables import EMPTY, by_group, label, provenance, spread, table

PICTURE = "images/casts.svg"
GROUPS = (
    "one operand", "both operands", "expert weights", "FP4, amax given", "NVFP4, own amax", "dequantize",
    "transpose of codes", "fused",
)  # fmt: skip
PEERS = ("eager", "compile", "torchao", "unfused")


def _cast_cells(row: Row, peers: Sequence[str]) -> list[str]:
    if row.us is None:
        return [label(row), text(tuple(row.shape)), f"WRONG: {row.fault}", *["-"] * (4 + len(peers))]
    bandwidths = number(row.gb_s, 0), number(row.copy_gb_s, 0)
    figures = [number(row.us), spread(row), *bandwidths, number(row.percent_of_copy, 0)]
    return [label(row), text(tuple(row.shape)), *figures, *(peer(row, name) for name in peers)]


def _head(peers: Sequence[str]) -> list[str]:
    return ["cast", "shape", "µs", "spread", "GB/s", "copy, GB/s", "% of copy", *peers]


def _shown_peers(rows: Sequence[Row]) -> list[str]:
    return [name for name in PEERS if any(name in row.peers for row in rows)]


def fastest_copy(rows: Sequence[Row]) -> float:
    """Bandwidth of the fastest copy over all shapes, GB/s; 0 if no row has one."""
    return max((row.copy_gb_s or 0.0 for row in rows), default=0.0)


def _slow_copies(rows: Sequence[Row]) -> list[str]:
    """A remark for tables with shapes where `copy_` itself is slow; copies of codes are slow because they are short."""
    rows = [row for row in rows if row.group != "transpose of codes"]
    best = fastest_copy(rows)
    slow = [row for row in rows if row.copy_gb_s is not None and row.copy_gb_s < 0.8 * best]
    if not slow:
        return []
    smallest = min(2 * math.prod(row.shape) for row in slow) / 1e6
    return [
        f"`copy_` itself reaches {fastest_copy(slow):,.0f} GB/s on tensors of {smallest:,.0f} MB and more, against "
        f"{best:,.0f} GB/s on smaller ones; there, read the column GB/s instead of the percentage."
    ]


def casts_table(rows: Sequence[Row]) -> str:
    """All rows of the suite, one table per group."""
    mine = [row for row in rows if row.suite == "casts"]
    if not mine:
        return EMPTY

    def make(members: Sequence[Row]) -> str:
        peers = _shown_peers(members)
        return table(_head(peers), [_cast_cells(row, peers) for row in members])

    return "\n\n".join([provenance(mine), *_slow_copies(mine), *by_group(mine, lambda row: row.group, make)])


def summary_table(rows: Sequence[Row]) -> str:
    """Rows of the main shape and of the largest expert weights; the eager peer is in the long table only."""
    mine = main_rows(rows)
    if not mine:
        return EMPTY
    peers = [name for name in _shown_peers(mine) if name != "eager"]
    lines = table(_head(peers), [_cast_cells(row, peers) for row in mine])
    parts = [f"![Bandwidth of casts beside a copy](../docs/{PICTURE})", provenance(mine), *_slow_copies(mine), lines]
    return "\n\n".join(parts)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of the summary and of the picture: the main shape, and the largest shape of each fused or expert cast."""
    mine = [row for row in rows if row.suite == "casts"]
    main = [row for row in mine if row.group in ("expert weights", "fused") or row.shape == list(MAIN)]
    largest: dict[tuple[str, str], Row] = {}
    for row in main:
        key = (row.group, label(row))
        if key not in largest or row.shape > largest[key].shape:
            largest[key] = row
    return list(largest.values())


# ---- goals -----------------------------------------------------------------------------------------------------------


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts of all goals with stored rows."""
    return goals.verdicts(GOALS, [row for row in rows if row.suite == "casts" and row.us is not None])


GOALS: tuple[Goal[Row], ...] = (
    Goal(
        "transpose of codes, bandwidth of a copy", "none below 80 %", "blockscale bench casts --only transpose",
        lambda row: row.group == "transpose of codes", lambda row: row.percent_of_copy, at_least(80), unit=" %",
    ),
)  # fmt: skip


def dispatch_table(rows: Sequence[Row]) -> str:
    """Host time per call, beside the cheapest calls that do anything: a copy, and an empty kernel."""
    mine = [row for row in rows if row.suite == "dispatch"]
    if not mine:
        return EMPTY
    floors = list(dict.fromkeys(name for row in mine for name in row.peers))

    def cells(row: Row) -> list[str]:
        return [
            row.case,
            number(row.us),
            spread(row),
            *(number(row.peers.get(name, {}).get("us")) for name in floors),
        ]

    lines = table(["call", "µs", "spread", *(f"{name}, µs" for name in floors)], [cells(row) for row in mine])
    return provenance(mine) + "\n\n" + lines
