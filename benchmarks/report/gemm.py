"""Stored rows of GEMMs as tables: speed beside accuracy, the choices of the registry, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockscale.bench.gemms import FAST
from blockscale.bench.shapes import text
from blockscale.bench.store import TIE, Row, beside, best_other, misplaced, number, shown_peers

from . import goals
from .goals import Goal, Verdict, at_least
from .tables import EMPTY, by_group, heading, label, provenance, spread, table

GROUPS = ("large", "few rows", "models", "MX and NVFP4", "MXFP8 natively")
# groups of the summary; the others are many, and bound by memory
MAIN_GROUPS = ("large", "MX and NVFP4")


def long_table(rows: Sequence[Row]) -> str:
    """All rows of the suite, one table per group."""
    mine = [row for row in rows if row.suite == "gemm"]
    if not mine:
        return EMPTY
    tables = by_group(mine, lambda row: row.group, products_table)
    return "\n\n".join([provenance(mine), *_choices(mine), *tables])


def products_table(rows: Sequence[Row]) -> str:
    """GEMMs with every stored figure."""
    peers = shown_peers(rows)
    head = [
        "GEMM", "M x N x K", "µs", "spread", "TFLOP/s", "GB/s", "% of bound", "dB", "MHz", "W", "backend",
        "bf16, TFLOP/s", *map(heading, peers),
    ]  # fmt: skip
    return table(head, [_cells(row, peers) for row in rows])


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    name = [label(row), text(tuple(row.shape))]
    if row.us is None:
        return [*name, f"WRONG: {row.fault}", *["-"] * 7, row.backend, "-", *["-"] * len(peers)]
    figures = [number(row.us), spread(row), number(row.tflop_s, 0), number(row.gb_s, 0)]
    figures += [number(row.percent_of_bound, 0), number(row.sqnr_db, 1)]
    figures += [number(row.sm_clock_mhz, 0), number(row.power_w, 0), row.backend]
    figures.append(number(row.peers.get("bf16", {}).get("tflop_s"), 0))
    return [*name, *figures, *(beside(row, peer) for peer in peers)]


def _choices(rows: Sequence[Row]) -> list[str]:
    """A remark on the choices of the registry; none if no row has a second backend."""
    chosen = [row for row in rows if best_other(row) is not None]
    if not chosen:
        return []
    wrong = [f"{row.case} ({misplaced(row)})" for row in chosen if misplaced(row)]
    limit = f"{100 * TIE:.0f} %"
    if not wrong:
        return [f"In none of {len(chosen)} rows is another backend of the registry faster by more than {limit}."]
    return [
        f"Another backend is faster by more than {limit} in {len(wrong)} of {len(chosen)} rows: {', '.join(wrong)}."
    ]


def summary_table(rows: Sequence[Row]) -> str:
    """TFLOP/s of each kernel beside the fastest FP8 GEMM of the same run: rowwise scales, fast accumulation. GEMMs that
    accumulate into fp32 are in the long table only."""
    mine = [row for row in rows if row.suite == "gemm" and row.group in MAIN_GROUPS and row.dtype == "bfloat16"]
    if not mine:
        return EMPTY
    head = ["GEMM", "call, backend", "measured TFLOP/s", "ceiling", "share", "best other backend"]
    return provenance(mine) + "\n\n" + table(head, [_summary_cells(row) for row in mine])


def _summary_cells(row: Row) -> list[str]:
    name = [f"{label(row)}, {text(tuple(row.shape))}", f"`scaled_mm(a, b)`, {row.backend}"]
    if row.us is None:
        return [*name, f"WRONG: {row.fault}", "-", "-", "-"]
    ceiling = row.peers.get(FAST, {}).get("tflop_s")
    share = "-" if not ceiling or row.tflop_s is None else f"{100 * row.tflop_s / ceiling:.0f} %"
    other = best_other(row)
    return [
        *name,
        number(row.tflop_s, 0),
        number(ceiling, 0),
        share,
        "-" if other is None else f"{other[0]} {other[1]:.2f}x",
    ]


# ---- goals -----------------------------------------------------------------------------------------------------------

# weights of at least this many bytes come from memory, not from L2; at most this many rows are bound by these bytes
_LARGE_WEIGHT, _FEW = 64e6, 16
CUBLAS = "row torch"


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts of all goals with stored rows."""
    return goals.verdicts(GOALS, [row for row in rows if row.suite == "gemm" and row.us is not None])


def goals_table(rows: Sequence[Row]) -> str:
    """Verdicts as a table."""
    return goals.goals_table(verdicts(rows))


def large(layout: str, *, accumulate: bool = False) -> Callable[[Row], bool]:
    """Selects large GEMMs with these scale layouts, which write bf16 or accumulate into fp32."""
    start = f"{layout} {'fp32 += ' if accumulate else ''}"
    return lambda row: row.group == "large" and row.case.startswith(start) and ("+=" in row.case) == accumulate


def _beside(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.peers.get(name, {}).get("ratio")


def _decoding(row: Row) -> bool:
    m, n, k = row.shape
    return row.group == "few rows" and m <= _FEW and n * k >= _LARGE_WEIGHT


def _other(row: Row) -> float | None:
    other = best_other(row)
    return None if other is None else other[1]


LAYOUTS = ("1x128 @ 128x128", "1x128 @ 1x128")
GOALS: tuple[Goal[Row], ...] = (
    *(
        Goal(
            f"{layout}, time of cuBLAS (`F.scaled_mm`) over ours", "none below 1, mean 1.05",
            "blockscale bench gemm --only large",
            large(layout), _beside(CUBLAS), at_least(1), least_mean=1.05,
        )
        for layout in LAYOUTS
    ),
    *(
        Goal(
            f"{layout}, accumulated into fp32, rate over that of the bf16 output", "none below 0.92",
            "blockscale bench gemm --only large", large(layout, accumulate=True), _beside("to bf16"), at_least(0.92),
        )
        for layout in LAYOUTS
    ),
    Goal(
        "1 to 128 rows, time of cuBLAS (`F.scaled_mm`) over ours", "none below 1",
        "blockscale bench gemm --only 'few rows'",
        lambda row: row.group == "few rows", _beside(CUBLAS), at_least(1),
    ),
    Goal(
        "1 to 16 rows, weights of 64 MB and more, share of the memory bandwidth", "80 %",
        "blockscale bench gemm --only 'few rows'",
        _decoding, lambda row: row.percent_of_bound, at_least(80), " %",
    ),
    Goal(
        "MXFP8, MXFP4, NVFP4 by exact upcast, rate over bf16", "none below 0.80", "blockscale bench gemm --only MX",
        lambda row: row.group == "MX and NVFP4" and row.backend == "torch", _beside("bf16"), at_least(0.80),
    ),
    Goal(
        "MXFP8 in FP8 tensor cores, weights in 128x128 blocks, rate over bf16", "mean 1.05",
        "blockscale bench gemm --only natively",
        lambda row: row.group == "MXFP8 natively", _beside("bf16"), least_mean=1.05,
    ),
    Goal(
        "all rows, time of the best other backend over the selected one", "none below 0.97", "blockscale bench gemm",
        lambda row: True, _other, at_least(1 - TIE),
    ),
)  # fmt: skip
