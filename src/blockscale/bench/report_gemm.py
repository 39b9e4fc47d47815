"""Stored rows of products as tables: speed beside accuracy, and whether the registry chose well."""

from __future__ import annotations

from collections.abc import Sequence

from .product_peers import FAST, ROW
from .products import BF16_DB
from .shapes import text
from .store import REGRESSION, Row
from .tables import EMPTY, label, number, peer, provenance, spread, table

GROUPS = ("large", "few rows", "models", "MX and NVFP4", "MXFP8 natively")
# those of the summary; the others are many, and bounded by bytes
MAIN_GROUPS = ("large", "MX and NVFP4")


def beside(row: Row, name: str) -> str:
    """How many times longer a peer takes, and how accurate it is where that is worse than a rounding to bf16."""
    accuracy = row.peers.get(name, {}).get("sqnr_db")
    worse = accuracy is not None and not accuracy >= BF16_DB
    return peer(row, name) + (f", {accuracy:.0f} dB" if worse else "")


def best_other(row: Row) -> tuple[str, float] | None:
    """The fastest other backend of our table that is right, and how many times longer it takes."""
    able = {
        name.removeprefix(ROW): float(cell["ratio"])
        for name, cell in row.peers.items()
        if name.startswith(ROW) and "ratio" in cell and "differs" not in cell.get("note", "")
    }
    return min(able.items(), key=lambda item: item[1]) if able else None


def misplaced(row: Row) -> str:
    """The backend that should have been selected: faster than ours by more than a difference that counts, or none.

    On a CPU nothing is selected for its speed.
    """
    other = best_other(row)
    return other[0] if other is not None and other[1] < 1 - REGRESSION and row.method != "cpu" else ""


def shown_peers(rows: Sequence[Row]) -> list[str]:
    """Peers that ran somewhere, in the order of the rows."""
    return list(dict.fromkeys(name for row in rows for name, cell in row.peers.items() if "us" in cell))


def long_table(rows: Sequence[Row]) -> str:
    """Every row of the suite, a table per group."""
    mine = [row for row in rows if row.suite == "gemm"]
    if not mine:
        return EMPTY
    parts = [provenance(mine), *_choices(mine)]
    for group in dict.fromkeys(row.group for row in mine):
        parts.append(f"**{group}**\n\n" + products_table([row for row in mine if row.group == group]))
    return "\n\n".join(parts)


def products_table(rows: Sequence[Row]) -> str:
    """Products with all that is known of them."""
    peers = shown_peers(rows)
    head = [
        "product", "M x N x K", "µs", "spread", "TFLOP/s", "GB/s", "% of bound", "dB", "MHz", "W", "by",
        "bf16, TFLOP/s", *peers,
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
    """A remark on the registry's choices, where there was one to make."""
    chosen = [row for row in rows if best_other(row) is not None]
    if not chosen:
        return []
    wrong = [f"{row.case} ({misplaced(row)})" for row in chosen if misplaced(row)]
    limit = f"{100 * REGRESSION:.0f} %"
    if not wrong:
        return [f"In none of {len(chosen)} rows is another backend of the table faster by more than {limit}."]
    return [
        f"Another backend is faster by more than {limit} in {len(wrong)} of {len(chosen)} rows: {', '.join(wrong)}."
    ]


def summary_table(rows: Sequence[Row]) -> str:
    """What each kernel reaches of the fastest FP8 product here: one scale per row, fast accumulation, same run. Sums
    into fp32 buffers are left to the long table."""
    mine = [row for row in rows if row.suite == "gemm" and row.group in MAIN_GROUPS and row.dtype == "bfloat16"]
    if not mine:
        return EMPTY
    head = ["kernel", "wrapper", "measured TFLOP/s", "ceiling", "share", "best other row"]
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
