"""Stored rows of mixtures of experts as tables: grouped GEMMs, the grouped linear of torchao's benchmark, experts, and
the goals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockscale.bench.gemms import FAST
from blockscale.bench.grouped import BALANCED
from blockscale.bench.layers import BF16
from blockscale.bench.store import Row, number

from . import goals
from .gemm import products_table
from .goals import Goal, Verdict, at_least, at_most
from .layers import layers_table, speedup, summed_speedup, times
from .tables import EMPTY, by_group, provenance, table

SUITE = "moe"
PRODUCTS, LINEAR, EXPERTS, MIXTURE = GROUPS = ("grouped products", "one grouped linear", "experts", "mixture")
FP8 = "fp8_blockwise"


def place(row: Row) -> str:
    """Sort key of a row within its group: its name, with numbers by size.

    >>> from blockscale.bench.store import Row, number
    >>> rows = [Row("moe", "", f"E={n}", "", "", [], "", "", "", 0) for n in (16, 4)]
    >>> [row.case for row in sorted(rows, key=place)]
    ['E=4', 'E=16']
    """
    return re.sub(r"\d+", lambda found: found[0].zfill(9), row.case)


def long_table(rows: Sequence[Row]) -> str:
    """All rows of the suite, one table per group, and per recipe of layers."""
    mine = [row for row in rows if row.suite == SUITE]
    if not mine:
        return EMPTY
    products, layers = ([row for row in mine if (row.group == PRODUCTS) == first] for first in (True, False))
    tables = by_group(products, lambda row: row.group, products_table)
    tables += by_group(layers, lambda row: f"{row.group}, {row.format}", layers_table)
    return "\n\n".join([provenance(mine), *tables])


# ---- one grouped linear ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """Case of a grouped linear.  use: "" for forward and backward, "8 microbatches" or "forward"."""

    recipe: str
    use: str
    experts: int


def linear_of(row: Row) -> Linear | None:
    """The grouped linear of a row; None for rows of other groups."""
    found = re.fullmatch(r"\S+ (?:(.+) )?M=\d+ E=(\d+) \d+->\d+", row.case)
    if row.suite != SUITE or row.group != LINEAR or found is None:
        return None
    return Linear(row.format, found[1] or "", int(found[2]))


def linear_table(rows: Sequence[Row]) -> str:
    """Forward and backward, and forward alone, beside bf16: one line per recipe and number of experts."""
    mine = {linear: row for row in rows if (linear := linear_of(row)) is not None}
    if not mine:
        return EMPTY
    keys = dict.fromkeys((linear.recipe, linear.experts) for linear in mine)
    lines: list[list[str]] = []
    for recipe, experts in sorted(keys, key=lambda key: ([*dict.fromkeys(r for r, _ in keys)].index(key[0]), key[1])):
        trained, shared, forward = (mine.get(Linear(recipe, use, experts)) for use in ("", "8 microbatches", "forward"))
        lines.append([recipe, str(experts), *_cells(trained), *_cells(forward), _cells(shared)[-1]])
    head = [
        "recipe", "E", "bf16_e2e_us", "scaled_e2e_us", "speedup", "bf16_fwd_us", "scaled_fwd_us", "speedup",
        "e2e, one cast for 8",
    ]  # fmt: skip
    return provenance(list(mine.values())) + "\n\n" + table(head, lines)


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["-", "-", "-"]
    if row.us is None:
        return ["-", f"WRONG: {row.fault}", "-"]
    return [number(row.peers.get(BF16, {}).get("us"), 0), number(row.us, 0), times(speedup(row))]


# ---- goals -----------------------------------------------------------------------------------------------------------


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts of all goals with stored rows."""
    return goals.verdicts(GOALS, [row for row in rows if row.suite == SUITE and row.us is not None])


def goals_table(rows: Sequence[Row]) -> str:
    """Verdicts as a table."""
    return goals.goals_table(verdicts(rows))


def _product(start: str, *shapes: list[int]) -> Callable[[Row], bool]:
    """Selects grouped GEMMs whose name starts with `start`.  shapes: only these (M, N, K), if given."""
    return lambda row: (
        row.group == PRODUCTS and row.case.startswith(f"{start} ") and (not shapes or row.shape in shapes)
    )


def _either(*tests: Callable[[Row], bool]) -> Callable[[Row], bool]:
    return lambda row: any(test(row) for test in tests)


def _linear(recipes: tuple[str, ...], use: str, experts: int | None = None) -> Callable[[Row], bool]:
    """Selects rows of the grouped linear.  experts: only this number of experts, if given."""

    def test(row: Row) -> bool:
        found = linear_of(row)
        return found is not None and found.recipe in recipes and found.use == use and experts in (None, found.experts)

    return test


def _rate(row: Row) -> float | None:
    return row.tflop_s


def _slowdown(row: Row) -> float | None:
    """Time beyond that of equal groups, in percent."""
    ratio = row.peers.get(BALANCED, {}).get("ratio")
    return 100 * (1 / ratio - 1) if ratio else None


def _wide(experts: int) -> Callable[[Row], bool]:
    """Selects fprop and dgrad of 5120 -> 8192 features with 16640 rows."""
    return _either(
        _product(f"equal groups fprop E={experts}", [16640, 8192, 5120]),
        _product(f"equal groups dgrad E={experts}", [16640, 5120, 8192]),
    )


_EQUAL, _TRAINED = "blockscale bench moe --only 'equal groups'", "blockscale bench moe --only 'fp8_blockwise M=16640'"
_SHARED, _TFLOP_S = "blockscale bench moe --only 'fp8_blockwise 8 microbatches'", " TFLOP/s"
GOALS: tuple[Goal[Row], ...] = (
    *(
        Goal(
            f"fprop and dgrad, 16640x8192x5120, {experts} equal groups", f"{least}{_TFLOP_S}", _EQUAL, _wide(experts),
            _rate, at_least(least), _TFLOP_S,
        )
        for experts, least in ((1, 1080), (4, 1080), (16, 1050), (64, 900))
    ),
    Goal(
        "the same, time of rowwise `scaled_grouped_mm` over ours", "1x", _EQUAL,
        _either(*(_wide(experts) for experts in (1, 4, 16, 64))), lambda row: speedup(row, FAST), at_least(1),
    ),
    *(
        Goal(
            f"fprop, 32768x{n}x{k}, 8 equal groups", f"{least}{_TFLOP_S}", _EQUAL,
            _product("equal groups fprop E=8", [32768, n, k]), _rate, at_least(least), _TFLOP_S,
        )
        for n, k, least in ((4096, 7168, 1080), (7168, 2048, 1000))
    ),
    *(
        Goal(
            f"wgrad{output}, 32768 rows in 8 equal groups, 2048x7168, 4096x7168 and 7168x2048", f"850{_TFLOP_S}",
            _EQUAL, _product(f"equal groups wgrad{name} E=8"), _rate, at_least(850), _TFLOP_S,
        )
        for name, output in (("", " to bf16"), (" fp32", " to fp32"), (" fp32 +=", " accumulated into fp32"))
    ),
    *(
        Goal(
            f"one grouped linear, {experts} experts, forward and backward, weights cast every step, over bf16",
            f"{least:.2f}x", _TRAINED, _linear((FP8,), "", experts), speedup, at_least(least),
        )
        for experts, least in ((1, 1.42), (4, 1.42), (16, 1.30), (64, 1.18))
    ),
    Goal(
        "the same, weights cast once for 8 microbatches, any number of experts", "1.42x", _SHARED,
        _linear((FP8,), "8 microbatches"), speedup, at_least(1.42),
    ),
    Goal(
        "the same, wgrads accumulated into an fp32 `main_grad` by the GEMMs, over bf16 with `.grad`", "1.42x", _SHARED,
        _linear((FP8,), "8 microbatches"), summed_speedup, at_least(1.42),
    ),
    Goal(
        "forward alone, weights cast before, any number of experts, over bf16", "1x",
        "blockscale bench moe --only 'fp8_blockwise forward'", _linear((FP8,), "forward"), speedup, at_least(1),
    ),
    Goal(
        "NVFP4 and MXFP8 by exact upcast, forward and backward, over bf16", "0.75x",
        "blockscale bench moe --only 'one grouped linear'",
        _linear(("nvfp4", "mxfp8"), ""), speedup, at_least(0.75),
    ),
    Goal(
        "MXFP8 with weights in 128x128 blocks, weights cast once for 8 microbatches, over bf16", "1x",
        "blockscale bench moe --only 'mxfp8_128x128 8 microbatches'",
        _linear(("mxfp8_128x128",), "8 microbatches"), speedup,
        at_least(1),
    ),
    Goal(
        "256 experts, top-8, group sizes by Zipf's law with exponent 1.2, time beyond equal groups", "at most 15 %",
        "blockscale bench moe --only 'E=256 zipf'",
        lambda row: row.group == PRODUCTS and " E=256 zipf " in row.case, _slowdown,
        at_most(15), " %",
    ),
    Goal(
        "host syncs in forward and backward of a mixture with its router", "0", "blockscale bench moe --only mixture",
        lambda row: row.group == MIXTURE and row.format == FP8, lambda row: row.details.get("host_syncs"),
        lambda figure: figure == 0, "",
    ),
)  # fmt: skip
