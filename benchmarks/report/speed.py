"""Stored throughput of training steps as tables: recipes beside bf16, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockscale.bench.trainings import HEAD, Throughput, Training, baseline, cells, memory_ratio, speedup, throughputs

from .goals import NOT_YET, Goal, Verdict, at_least, at_most
from .goals import verdicts as judge_all
from .tables import commit, provenance, table
from .training import on_machine

RECIPE = "fp8_blockwise"
Figure = Callable[[Throughput, Sequence[Throughput]], float | None]
_WHEN = {"forward": "in every forward", "step": "once a step"}


def bytes_more(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Peak memory beyond that of bf16, in bytes per converted parameter."""
    base = baseline(row, rows)
    if base is None or base.peak_memory is None or row.peak_memory is None or not row.converted:
        return None
    return (row.peak_memory - base.peak_memory) / row.converted


def casts_share(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Casts, in percent of the kernel time of a step."""
    return None if "casts" not in row.shares else 100 * row.shares["casts"]


def goals(rows: Sequence[Throughput]) -> list[Goal[Throughput]]:
    """Goals of compiled steps in FP8 on the machine of the goals; figures are beside bf16 in `rows`."""
    found: list[Goal[Throughput]] = []
    for model, least, layers in (("llama3-8b", 1.25, 16), ("dsv3-16b", 1.20, 2)):
        for cast in ("forward", "step"):

            def about(row: Throughput, this: object = (model, RECIPE, cast, "blocks"), layers: int = layers) -> bool:
                of_goal = (row.model, row.recipe, row.weight_cast, row.compile) == this
                return of_goal and row.layers >= layers and on_machine(row)

            def goal(
                what: str, bound: str, figure: Figure, met: Callable[[float], bool], unit: str = "x",
                *, model: str = model, cast: str = cast, about: Callable[[Throughput], bool] = about,
            ) -> Goal[Throughput]:  # fmt: skip
                return Goal(
                    f"{model}, weights cast {_WHEN[cast]}, {what}", bound,
                    f"blockscale speed {model} --weight-casts forward,step", about, lambda row: figure(row, rows), met,
                    unit, digits=1 if unit == " %" else 2, sets=lambda mine: [[row] for row in mine],
                )  # fmt: skip

            found.append(goal("tokens/s over bf16", f"{least:.2f}x", speedup, at_least(least)))
            if cast == "forward":
                found.append(goal("peak memory over bf16", "at most 1x", memory_ratio, at_most(1)))
            else:
                bound = "at most 2.1 bytes per converted parameter"
                found.append(goal("peak memory beyond bf16", bound, bytes_more, at_most(2.1), " bytes"))
            what = "casts, share of the kernel time of a step"
            found.append(goal(what, "under 8 %", casts_share, lambda figure: figure < 8, " %"))
    return found


def verdicts(rows: Sequence[Training]) -> list[Verdict]:
    """Verdicts of all goals, measured or not; one for each measured setting."""
    mine = throughputs(rows)
    return judge_all(goals(mine), mine, unmeasured=True)


def goals_table(rows: Sequence[Training]) -> str:
    """Verdicts as a table, with layers and tokens of each run."""
    head = ["goal, compiled, fp8_blockwise", "figure", "met", "layers", "tokens per step", "commit", "command"]
    lines: list[list[str]] = []
    for each in verdicts(rows):
        run = ["-", "-", "-", f"`{each.goal.command}`"]
        for row in each.rows:
            run = [str(row.layers), f"{tokens_per_step(row):,}", commit(row), f"`{row.where.get('command')}`"]
        lines.append([each.goal.text, each.figure, each.met, *run])
    return table(head, lines)


def tokens_per_step(row: Throughput) -> int:
    """Tokens of one optimizer step."""
    return row.batch * row.accumulate * row.sequence


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
