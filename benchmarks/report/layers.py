"""Stored rows of layers as tables: time, speedup over bf16, share of the roofline's speedup, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockscale.bench.layers import BF16, MAIN_GRAD, PER_STEP, TORCHAO, TORCHAO_COMPILED
from blockscale.bench.store import Row, number, shown_peers

from . import goals
from .goals import Goal, Verdict, at_least, at_most
from .tables import EMPTY, by_group, heading, provenance, table

SUITES = ("linear", "mlp")
GROUPS = ("layers", "8 microbatches", "SwiGLU MLP", "SwiGLU MLP, 8 microbatches", "host time")
HOST = "nn.Linear"


def speedup(row: Row, over: str = BF16) -> float | None:
    """Time of the peer over ours."""
    return row.peers.get(over, {}).get("ratio")


def summed_speedup(row: Row) -> float | None:
    """Time of bf16 over ours with wgrads accumulated into an fp32 `main_grad` by the GEMMs."""
    plain, mine = (row.peers.get(name, {}).get("us") for name in (BF16, MAIN_GRAD))
    return plain / mine if plain and mine else None


def roof_speedup(row: Row, prefix: str = "") -> float | None:
    """Speedup over bf16 at the roofline.  prefix: "" for measured ceilings, "nominal_" for the specification."""
    least = row.details.get("nominal_bound_us") if prefix else row.bound_us
    plain = row.details.get(f"{prefix}bf16_bound_us")
    return None if not least or not plain else plain / least


def share(row: Row, prefix: str = "") -> float | None:
    """Measured speedup in percent of the roofline's."""
    found, roof = speedup(row), roof_speedup(row, prefix)
    return None if found is None or roof is None else 100 * found / roof


def saved(row: Row, way: str) -> float | None:
    """Bytes saved for backward over those of bf16."""
    mine, plain = (row.details.get(f"kept_bytes {name}") for name in (way, BF16))
    return None if mine is None or not plain else mine / plain


# ---- tables ----------------------------------------------------------------------------------------------------------


def layer(row: Row) -> str:
    """Model and features: the end of the name of the case."""
    return row.case.partition(f"M={row.shape[0]} ")[2]


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.suite in SUITES and row.group != GROUPS[-1]]


def times(value: float | None) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _milliseconds(us: float | None) -> str:
    return number(None if us is None else us / 1e3, 3)


def _main_cells(row: Row) -> list[str]:
    plain = row.peers.get(BF16, {}).get("us")
    return [
        _milliseconds(plain),
        _milliseconds(row.us),
        times(speedup(row)),
        times(roof_speedup(row)),
        _percent(share(row)),
        times(_torchao_speedup(row)),
    ]


def _torchao_speedup(row: Row) -> float | None:
    """Speedup of torchao over bf16, the better of eager and compiled."""
    plain = row.peers.get(BF16, {}).get("us")
    times = [row.peers.get(name, {}).get("us") for name in (TORCHAO, TORCHAO_COMPILED)]
    found = [time for time in times if time]
    return plain / min(found) if plain and found else None


_HEAD = ["bf16, ms", "Blockscale, ms", "speedup", "roofline", "share of roofline", "torchao"]


def summary_table(rows: Sequence[Row]) -> str:
    """Rows of FP8 blockwise with 4096 tokens."""
    mine = [row for row in _timed(rows) if row.format == "fp8_blockwise" and row.shape[0] == 4096]
    if not mine:
        return EMPTY
    lines = [[_titled(row), str(row.shape[0]), *_cells(row, _main_cells)] for row in mine]
    return provenance(mine) + "\n\n" + table(["layer", "M", *_HEAD], lines)


def _titled(row: Row) -> str:
    return layer(row) + ("" if row.group == GROUPS[0] else f", {row.group}")


def _cells(row: Row, cells: Callable[[Row], list[str]]) -> list[str]:
    """Figures, or the fault of a wrong result."""
    return cells(row) if row.us is not None else [f"WRONG: {row.fault}", *["-"] * (len(_HEAD) - 1)]


def long_table(rows: Sequence[Row]) -> str:
    """All rows of both suites, one table per group and recipe."""
    mine = _timed(rows)
    hosts = [row for row in rows if row.suite in SUITES and row.group == GROUPS[-1]]
    if not mine and not hosts:
        return EMPTY
    parts = [provenance([*mine, *hosts])]
    parts += by_group(mine, lambda row: f"{row.group}, {row.format}", layers_table)
    if hosts:
        lines = [[row.format, number(row.us), number(row.peers.get(HOST, {}).get("us")), _host(row)] for row in hosts]
        head = ["recipe", "µs", f"{HOST}, µs", "ratio"]
        parts.append("**host time of forward and backward**\n\n" + table(head, lines))
    return "\n\n".join(parts)


def layers_table(rows: Sequence[Row]) -> str:
    """Layers with every stored figure."""
    peers = [name for name in shown_peers(rows) if name != BF16]
    head = ["layer", "M", *_HEAD, "of nominal", "TFLOP/s", "dB y, dX, dW", "saved for backward", *map(heading, peers)]
    lines = [[layer(row), str(row.shape[0]), *_cells(row, _main_cells), *_rest(row, peers)] for row in rows]
    return table(head, lines)


def _rest(row: Row, peers: Sequence[str]) -> list[str]:
    db = ", ".join(number(row.details.get(f"{name}_db")) for name in ("y", "dx", "dw"))
    memory = f"{times(saved(row, 'blockscale'))}, {times(saved(row, PER_STEP))} per step"
    if saved(row, PER_STEP) is None:
        memory = times(saved(row, "blockscale"))
    beside = [times(row.peers.get(name, {}).get("ratio")) for name in peers]
    return [_percent(share(row, "nominal_")), number(row.tflop_s, 0), db, memory, *beside]


def _host(row: Row) -> str:
    ratio = speedup(row, HOST)
    return times(1 / ratio if ratio else None)


# ---- goals -----------------------------------------------------------------------------------------------------------


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts of all goals with stored rows."""
    return goals.verdicts(GOALS, [row for row in rows if row.suite in SUITES and row.us is not None])


def goals_table(rows: Sequence[Row]) -> str:
    """Verdicts as a table."""
    return goals.goals_table(verdicts(rows))


_DEEPSEEK = "DeepSeek-V3 671B"
_WIDE = ("7168->18432", "18432->7168", "2048->10944", "10944->2048")


def _ffn(group: str, model: str = _DEEPSEEK) -> Callable[[Row], bool]:
    """Selects FP8 rows with 4096 tokens of the feed-forward layers of models whose name starts with `model`."""
    return lambda row: (
        (row.suite, row.group, row.format, row.shape[0]) == ("linear", group, "fp8_blockwise", 4096)
        and layer(row).startswith(model)
        and row.case.endswith(_WIDE)
    )


def _large_mlp(row: Row) -> bool:
    mine = (row.group, row.format) == ("SwiGLU MLP", "fp8_blockwise")
    return row.suite == "mlp" and mine and row.shape == [4096, 7168, 18432]


_ONE = "blockscale bench linear --only 'fp8_blockwise M=4096 DeepSeek'"
_EIGHT = "blockscale bench linear --only 'fp8_blockwise 8 microbatches'"
_MLP = "blockscale bench mlp --only 'fp8_blockwise MLP M=4096 DeepSeek-V3'"
GOALS: tuple[Goal[Row], ...] = (
    Goal(
        "DeepSeek-V3's feed-forward layers, 4096 tokens, eager, over bf16", "1.45x", _ONE, _ffn("layers"), speedup,
        at_least(1.45),
    ),
    Goal(
        "the same with 8 microbatches per step", "1.5x", _EIGHT, _ffn("8 microbatches"), speedup,
        at_least(1.5),
    ),
    Goal(
        "the same, wgrads accumulated into an fp32 `main_grad` by the GEMMs, over bf16 with `.grad`", "1.5x", _EIGHT,
        _ffn("8 microbatches"), summed_speedup, at_least(1.5),
    ),
    Goal(
        "share of the roofline's speedup, feed-forward layers of DeepSeek-V3 671B and 16B, 4096 tokens", "80 %",
        _ONE, _ffn("layers", "DeepSeek"), share, at_least(80), " %",
    ),
    Goal(
        "SwiGLU MLP 7168x18432, 4096 tokens, over bf16 eager", "1.45x", _MLP, _large_mlp, speedup,
        at_least(1.45),
    ),
    Goal(
        "the same, over torchao compiled", "above 1x", _MLP, _large_mlp,
        lambda row: speedup(row, TORCHAO_COMPILED), lambda figure: figure > 1,
    ),
    Goal(
        "bytes saved for backward, weight cast once a step, over bf16", "at most 0.54x", _ONE, _ffn("layers"),
        lambda row: saved(row, PER_STEP), at_most(0.54),
    ),
    Goal(
        "host time of forward and backward, over `nn.Linear`", "at most 3x",
        "blockscale bench linear --only 'host time'",
        lambda row: row.suite == "linear" and row.group == "host time" and row.format == "fp8_blockwise",
        lambda row: 1 / ratio if (ratio := speedup(row, HOST)) else None, at_most(3),
    ),
)  # fmt: skip
