"""Stored throughput of training steps as tables: recipes beside bf16, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .goals import NO, NOT_MEASURED, YES, Verdict, judge
from .report_training import BASELINE, NOT_YET, commit, gib, on_machine
from .tables import provenance, table
from .trainings import Throughput, Training, throughputs

HEAD = (
    "recipe", "compile", "weights cast", "ms per step", "spread", "tokens/s", "speedup", "peak memory", "over bf16",
    "GPU busy", "products", "casts", "attention", "other",
)  # fmt: skip
RECIPE = "fp8_blockwise"


def baseline(row: Throughput, rows: Sequence[Throughput]) -> Throughput | None:
    """bf16 in the same setting; None if it did not run."""
    alike = (other for other in rows if other.recipe == BASELINE and other.setting == row.setting)
    return next((other for other in alike if not other.failed), None)


def speedup(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Tokens per second over those of bf16."""
    base = baseline(row, rows)
    if base is None or not base.tokens_per_second or not row.tokens_per_second:
        return None
    return row.tokens_per_second / base.tokens_per_second


def memory_ratio(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Peak memory over that of bf16."""
    base = baseline(row, rows)
    return None if base is None or not base.peak_memory or not row.peak_memory else row.peak_memory / base.peak_memory


def bytes_more(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Peak memory beyond that of bf16, in bytes per converted parameter."""
    base = baseline(row, rows)
    if base is None or base.peak_memory is None or row.peak_memory is None or not row.converted:
        return None
    return (row.peak_memory - base.peak_memory) / row.converted


def casts_share(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Casts, in percent of the kernel time of a step."""
    return None if "casts" not in row.shares else 100 * row.shares["casts"]


@dataclass(frozen=True)
class SpeedGoal:
    """Target of a compiled step of a model in FP8.  figure: value of a row, given all rows."""

    what: str
    model: str
    weight_cast: str
    least_layers: int
    figure: Callable[[Throughput, Sequence[Throughput]], float | None]
    is_met: Callable[[float], bool]
    unit: str
    command: str


def _goals() -> tuple[SpeedGoal, ...]:
    goals: list[SpeedGoal] = []
    for model, most, layers in (("llama3-8b", 1.25, 16), ("dsv3-16b", 1.20, 2)):
        command = f"blockscale speed {model} --weight-casts forward,step"
        for cast in ("forward", "step"):
            goals += [
                SpeedGoal(
                    f"tokens/s over bf16: {most:.2f}x", model, cast, layers,
                    speedup, lambda found, most=most: found >= most, "x", command,
                ),
                SpeedGoal(
                    "peak memory over bf16: at most 1x", model, cast, layers,
                    memory_ratio, lambda found: found <= 1, "x", command,
                )
                if cast == "forward"
                else SpeedGoal(
                    "peak memory beyond bf16: at most 2.1 bytes per converted parameter", model, cast, layers,
                    bytes_more, lambda found: found <= 2.1, " bytes", command,
                ),
                SpeedGoal(
                    "casts, share of the kernel time of a step: under 8 %", model, cast, layers,
                    casts_share, lambda found: found < 8, " %", command,
                ),
            ]  # fmt: skip
    return tuple(goals)


GOALS = _goals()


_DIGITS = {"x": 2, " bytes": 2, " %": 1}


def goals_table(rows: Sequence[Training]) -> str:
    """Verdicts as a table, with layers and tokens of each run."""
    mine = throughputs(rows)
    head = ["goal, compiled, fp8_blockwise", "figure", "met", "layers", "tokens per step", "commit", "command"]
    lines: list[list[str]] = []
    for goal in GOALS:
        for judged, row in _verdicts(goal, mine):
            size = ["-", "-"] if row is None else [str(row.layers), f"{tokens_per_step(row):,}"]
            lines.append([judged.goal, judged.figure, judged.met, *size, judged.commit, f"`{judged.command}`"])
    return table(head, lines)


def verdicts(rows: Sequence[Training]) -> list[Verdict]:
    """Verdicts of all goals, measured or not; one for each measured setting, with its tokens per step."""
    mine = throughputs(rows)
    return [
        judged if row is None else replace(judged, goal=f"{judged.goal}, {tokens_per_step(row):,} tokens per step")
        for goal in GOALS
        for judged, row in _verdicts(goal, mine)
    ]


def tokens_per_step(row: Throughput) -> int:
    """Tokens of one optimizer step."""
    return row.batch * row.accumulate * row.sequence


def _verdicts(goal: SpeedGoal, rows: Sequence[Throughput]) -> list[tuple[Verdict, Throughput | None]]:
    title = f"{goal.model}, weights cast {_cast(goal.weight_cast)}, {goal.what}"
    about = (goal.model, RECIPE, goal.weight_cast, "blocks")
    found: list[tuple[Verdict, Throughput | None]] = []
    for row in rows:
        figure = goal.figure(row, rows) if on_machine(row) else None
        if (row.model, row.recipe, row.weight_cast, row.compile) == about and figure is not None:
            is_met, digits = judge([figure], goal.is_met, _DIGITS[goal.unit])
            met = YES if is_met and row.layers >= goal.least_layers else NO
            text = f"{figure:.{digits}f}{goal.unit}"
            found.append((Verdict(title, text, met, commit(row), str(row.where.get("command"))), row))
    return found or [(Verdict(title, NOT_YET, NOT_MEASURED, "-", goal.command), None)]


def _cast(name: str) -> str:
    return {"forward": "in every forward", "twice": "once for each GEMM", "step": "once a step"}.get(name, name)


def long_table(rows: Sequence[Training]) -> str:
    """All timed runs, one table per model and size."""
    mine = throughputs(rows)
    if not mine:
        return NOT_YET.capitalize() + "."
    groups: dict[tuple[str, int, int, int, int, str], list[Throughput]] = {}
    for row in mine:
        key = (row.model, row.layers, row.sequence, row.batch, row.accumulate, row.recompute)
        groups.setdefault(key, []).append(row)
    parts: list[str] = []
    for (model, layers, sequence, batch, accumulate, recompute), group in sorted(groups.items()):
        size = f"{layers} layers, {group[0].parameters / 1e9:.2f}B parameters"
        size += f", {accumulate} x {batch} x {sequence:,} tokens per step, recompute {recompute}"
        times = f"{group[0].warm_up} steps to warm up, {group[0].timed} timed"
        parts += [f"**{model}**, {size}; {times}; `{group[0].where.get('command')}`", provenance(group)]
        parts.append(table(HEAD, [cells(row, group) for row in group]))
    return "\n\n".join(parts)


def cells(row: Throughput, rows: Sequence[Throughput]) -> list[str]:
    """Cells of a table line, as in `HEAD`."""
    cast = "-" if row.recipe == BASELINE else row.weight_cast
    names = [row.recipe, f"{row.compile}, captured" if row.captured else row.compile, cast]
    if row.step_ms is None or row.spread_ms is None or row.tokens_per_second is None:
        return [*names, "failed", *["-"] * (len(HEAD) - 4)]
    spread = f"{100 * (row.spread_ms[1] - row.spread_ms[0]) / row.step_ms:.1f} %"
    won, memory = speedup(row, rows), memory_ratio(row, rows)
    figures = [f"{row.step_ms:,.1f}", spread, f"{row.tokens_per_second:,.0f}", "-" if won is None else f"{won:.2f}x"]
    shares = [f"{100 * row.shares[kind]:.1f} %" if kind in row.shares else "-" for kind in HEAD[-4:]]
    busy = "-" if row.kernel_ms is None else f"{min(100.0, 100 * row.kernel_ms / row.step_ms):.0f} %"
    return [*names, *figures, gib(row.peak_memory), "-" if memory is None else f"{memory:.2f}x", busy, *shares]
