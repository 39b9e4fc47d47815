"""What Hopper's products are meant to reach, and what the stored rows say: one line for each goal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .report_gemm import best_other
from .store import REGRESSION, Row
from .tables import EMPTY, table

# weights of at least so many bytes are read from memory, not from the second-level cache; and rows that hide nothing
_LARGE_WEIGHT, _FEW = 64e6, 16


@dataclass(frozen=True)
class Bar:
    """A goal: the rows that it is about, the figure of each, how they are told, and whether they are enough.

    only: what `blockscale bench gemm` runs for it.
    """

    what: str
    goal: str
    only: str
    about: Callable[[Row], bool]
    figure: Callable[[Row], float | None]
    met: Callable[[Sequence[float]], bool]
    unit: str = "x"


def bars_table(rows: Sequence[Row]) -> str:
    """Every goal whose rows are stored."""
    timed = [row for row in rows if row.suite == "gemm" and row.us is not None]
    lines = [line for bar in BARS if (line := _line(bar, timed)) is not None]
    return table(["goal", "figures", "met", "by"], lines) if lines else EMPTY


def _line(bar: Bar, rows: Iterable[Row]) -> list[str] | None:
    mine = [row for row in rows if bar.about(row)]
    found = [figure for row in mine if (figure := bar.figure(row)) is not None]
    if not found:
        return None
    commits = ", ".join(dict.fromkeys(str(row.where.get("commit")) for row in mine))
    many = f"{min(found):.2f} to {max(found):.2f}{bar.unit}, mean {mean(found):.3f}{bar.unit}"
    if bar.unit == " %":
        many = f"{min(found):.0f} to {max(found):.0f}{bar.unit}"
    by = f"`--only {bar.only!r}`, {commits}" if bar.only else commits
    return [f"{bar.what}: {bar.goal}", many, "yes" if bar.met(found) else "no", by]


def mean(ratios: Sequence[float]) -> float:
    """Geometric.

    >>> mean([0.5, 2.0])
    1.0
    """
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _large(label: str, *, added: bool = False) -> Callable[[Row], bool]:
    start = f"{label} {'fp32 += ' if added else ''}"
    return lambda row: row.group == "large" and row.case.startswith(start) and ("+=" in row.case) == added


def _beside(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.peers.get(name, {}).get("ratio")


def _decoding(row: Row) -> bool:
    m, n, k = row.shape
    return row.group == "few rows" and m <= _FEW and n * k >= _LARGE_WEIGHT


def _other(row: Row) -> float | None:
    other = best_other(row)
    return None if other is None else other[1]


def _never_slower(ratios: Sequence[float]) -> bool:
    return min(ratios) >= 1 - REGRESSION


VENDOR = "row torch"
BARS = (
    *(
        Bar(
            f"{label}, time of `F.scaled_mm` over ours", "none below 1, mean 1.05", "large", _large(label),
            _beside(VENDOR), lambda ratios: min(ratios) >= 1 and mean(ratios) >= 1.05,
        )
        for label in ("1x128 @ 128x128", "1x128 @ 1x128")
    ),
    *(
        Bar(
            f"{label}, added into fp32, rate over that to bf16", "none below 0.92", "large", _large(label, added=True),
            _beside("to bf16"), lambda ratios: min(ratios) >= 0.92,
        )
        for label in ("1x128 @ 128x128", "1x128 @ 1x128")
    ),
    Bar(
        "1 to 128 rows, time of `F.scaled_mm` over ours", "none below 1", "few rows",
        lambda row: row.group == "few rows", _beside(VENDOR), lambda ratios: min(ratios) >= 1,
    ),
    Bar(
        "1 to 16 rows, weights of 64 MB and more, share of the bytes' time", "80 %", "few rows", _decoding,
        lambda row: row.percent_of_bound, lambda shares: min(shares) >= 80, " %",
    ),
    Bar(
        "MXFP8, MXFP4, NVFP4 by exact upcast, rate over bf16's", "none below 0.80", "MX",
        lambda row: row.group == "MX and NVFP4" and row.backend == "torch", _beside("bf16"),
        lambda ratios: min(ratios) >= 0.80,
    ),
    Bar(
        "MXFP8 by FP8 units, weights of 128x128 blocks, rate over bf16's", "mean 1.05", "natively",
        lambda row: row.group == "MXFP8 natively", _beside("bf16"), lambda ratios: mean(ratios) >= 1.05,
    ),
    Bar(
        "all rows, time of the best other kernel of the table over ours", "none below 0.97", "",
        lambda row: True, _other, _never_slower,
    ),
)  # fmt: skip
