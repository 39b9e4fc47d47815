"""Stored rows as tables. The same rows give the same bytes: no clock, no machine, no order of arrival.

A page holds a table between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; `update` rewrites what stands in between.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import report_bars, report_gemm, report_layers, report_moe, report_speed, report_training
from .shapes import MAIN, MODELS, text
from .store import Row, read
from .tables import EMPTY, label, number, peer, provenance, spread, table
from .trainings import Training

RESULTS = Path("benchmarks/results")
PICTURE = Path("docs/images/casts.svg")
TRAINING_PICTURE = Path("docs") / report_training.PICTURE
PAGES = (Path("README.md"), Path("docs/benchmarks.md"))
SUITES = ("casts", "gemm", "linear", "mlp", "moe", "dispatch")
PEERS = ("eager", "compile", "torchao", "unfused")
GROUPS = (
    "one operand", "both operands", "expert weights", "FP4, amax given", "NVFP4, own amax", "dequantize", "fused",
    *report_gemm.GROUPS, *report_layers.GROUPS, *report_moe.GROUPS,
)  # fmt: skip


def load(folder: Path) -> list[Row]:
    """All stored rows of the suites, file by file, in the order of the tables."""
    files = [path for suite in SUITES for path in sorted(folder.glob(f"{suite}-*.jsonl"))]
    return [row for path in files for row in in_order(read(path))]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By group, of products by kind, of layers by recipe and model, of experts by name, then by shape: rows of one
    suite may have been measured in several runs."""

    def place(row: Row) -> tuple[int, str, list[int]]:
        group = GROUPS.index(row.group) if row.group in GROUPS else len(GROUPS)
        kind = label(row) if row.suite == "gemm" else ""
        if row.suite in report_layers.SUITES:
            model = next((index for index, name in enumerate(MODELS) if name in row.case), len(MODELS))
            kind = f"{row.format} {model}"
        if row.suite == report_moe.SUITE:
            kind = report_moe.place(row)
        return group, kind, row.shape

    return sorted(rows, key=place)


# casts and host time


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
    parts = [*picture, provenance(mine), *_slow_copies(mine)]
    for group in dict.fromkeys(row.group for row in mine):
        members = [row for row in mine if row.group == group]
        peers = _shown_peers(members)
        parts.append(f"**{group}**\n\n" + table(_head(peers), [_cast_cells(row, peers) for row in members]))
    return "\n\n".join(parts)


def summary_table(rows: Sequence[Row]) -> str:
    """The main shape alone, and of expert weights the largest; plain torch is left to the long table."""
    mine = main_rows(rows)
    if not mine:
        return EMPTY
    peers = [name for name in _shown_peers(mine) if name != "eager"]
    lines = table(_head(peers), [_cast_cells(row, peers) for row in mine])
    parts = [f"![Casts beside a copy]({PICTURE.as_posix()})", provenance(mine), *_slow_copies(mine), lines]
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
            number(row.us),
            spread(row),
            *(number(row.peers.get(name, {}).get("us")) for name in floors),
        ]

    lines = table(["call", "µs", "spread", *(f"{name}, µs" for name in floors)], [cells(row) for row in mine])
    return provenance(mine) + "\n\n" + lines


SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "casts": casts_table,
    "casts-summary": summary_table,
    "gemm": report_gemm.long_table,
    "gemm-summary": report_gemm.summary_table,
    "gemm-bars": report_bars.bars_table,
    "layers": report_layers.long_table,
    "layers-summary": report_layers.summary_table,
    "layers-goals": report_layers.goals_table,
    "moe": report_moe.long_table,
    "moe-linear": report_moe.linear_table,
    "moe-goals": report_moe.goals_table,
    "dispatch": dispatch_table,
}

TRAINING_SECTIONS: dict[str, Callable[[Sequence[Training]], str]] = {
    "training": report_training.long_table,
    "training-goals": report_training.goals_table,
    "speed": report_speed.long_table,
    "speed-goals": report_speed.goals_table,
}


# pages


def render(page: str, rows: Sequence[Row], trainings: Sequence[Training] = ()) -> str:
    """The page with every marked section rewritten."""
    bodies = {name: section(rows) for name, section in SECTIONS.items()}
    bodies |= {name: section(trainings) for name, section in TRAINING_SECTIONS.items()}
    for name, body in bodies.items():
        pattern = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
        page = pattern.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", page)
    return page


def update(root: Path, rows: Sequence[Row], trainings: Sequence[Training] = ()) -> list[Path]:
    """Rewrite the pages of a checkout; those that changed."""
    changed: list[Path] = []
    for name in PAGES:
        path = root / name
        if path.exists() and (new := render(path.read_text(), rows, trainings)) != path.read_text():
            path.write_text(new)
            changed.append(name)
    return changed
