"""Stored comparisons of training runs as tables: loss of recipes beside bf16, and the goals.

The null run is bf16 with another reduction order: its gap to bf16 is the noise that any recipe has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockscale.bench.trainings import BASELINE, Convergence, Training, convergences, gib

from .goals import NO, NOT_YET, YES, Goal, Verdict
from .goals import verdicts as judge_all
from .tables import commit, provenance, table

PICTURE = "images/training.svg"
NULL = "null"
WITHIN_NOISE, MEAN_ONLY = "within noise", "mean only"
# goals count runs on this GPU only
MACHINE = "H200"
# least share of linear FLOPs in low precision, counted from the step where a recipe begins
LEAST_SHARE = 0.9


@dataclass(frozen=True)
class Plan:
    """Least number of steps and seeds, and how runs begin: see `Convergence.branch_at` and `since`."""

    steps: int
    seeds: int
    options: str
    branch_at: int = 0
    since: int = 0

    @property
    def text(self) -> str:
        said = f"{self.steps} steps" + (f", {self.seeds} seeds" if self.seeds > 1 else "")
        said += f", branched at step {self.branch_at}" if self.branch_at else ""
        return said + (f", bf16 before step {self.since}" if self.since else "")

    def fits(self, row: Convergence) -> bool:
        """True if runs have enough steps and seeds, and begin as planned."""
        long_enough = row.steps >= self.steps and len(row.seeds) >= self.seeds
        return long_enough and (row.branch_at, row.since) == (self.branch_at, self.since)


FULL = Plan(3000, 1, "")
BRANCHED = Plan(3000, 1, " --branch-at 1000", branch_at=1000)
SHORT = Plan(300, 5, " --steps 300 --seeds 5 --eval-every 100 --optimizer.warmup 0.3")
LATE = Plan(3000, 2, " --since 300 --seeds 2", since=300)


def chosen(model: str, recipe: str, plan: Plan, rows: Sequence[Convergence]) -> Convergence | None:
    """The run that counts for a goal: the one with the most seeds, or the longest if the plan needs one seed."""
    mine = [row for row in rows if (row.model, row.arm) == (model, recipe) and on_machine(row) and plan.fits(row)]
    return max(mine, key=lambda row: (row.steps if plan.seeds == 1 else 0, len(row.seeds)), default=None)


def _goal(model: str, recipe: str, most: float, share: float, plan: Plan) -> Goal[Convergence]:
    """Largest gap to bf16 of a recipe on a model.  share: least share of linear FLOPs in low precision."""

    def counted(rows: list[Convergence]) -> list[list[Convergence]]:
        found = chosen(model, recipe, plan, rows)
        return [] if found is None else [[found]]

    return Goal(
        f"{model}, {recipe}, {plan.text}",
        f"gap to bf16 at most {100 * most:g} %",
        f"blockscale compare {model} --recipes {recipe}{plan.options}",
        lambda row: True,
        lambda row: row.gap,
        sets=counted,
        words=lambda row: (gap_of(row), _met(row, most, share)),
    )


def _met(row: Convergence, most: float, share: float) -> str:
    """Verdict on the gap, rounded to 0.01 % as tables show it. A run that diverged has no gap.

    WITHIN_NOISE: above the bound, but no larger than the noise of the null run.  MEAN_ONLY: the mean is within the
    bound, the interval of 95 % is not.
    """
    if row.gap is None or row.flop_share < share:
        return NO
    gap, noise = round(row.gap, 4), round(row.noise or 0.0, 4)
    if gap > most:
        return WITHIN_NOISE if gap <= noise else NO
    return MEAN_ONLY if row.verdict in ("undecided", "too short to tell") else YES


_PLANS = {"125m": (FULL, LATE, BRANCHED, SHORT), "moe-500m": (FULL, BRANCHED, SHORT)}
GOALS = (
    *(
        _goal(model, recipe, 0.0025, LEAST_SHARE * (1 - plan.since / plan.steps), plan)
        for model, plans in _PLANS.items()
        for recipe in ("fp8_blockwise", "mxfp8")
        for plan in plans
    ),
    *(_goal("125m", "nvfp4", 0.02, 0.0, plan) for plan in (FULL, BRANCHED, SHORT)),
)


def verdicts(rows: Sequence[Training]) -> list[Verdict]:
    """Verdicts of all goals, measured or not."""
    return judge_all(GOALS, convergences(rows), unmeasured=True)


def goals_table(rows: Sequence[Training]) -> str:
    """Verdicts as a table, with the noise, the share of FLOPs and the seeds of each run."""
    lines: list[list[str]] = []
    for each in verdicts(rows):
        run, after = ["-", "-", "-"], ["-", "-", f"`{each.goal.command}`"]
        for row in each.rows:
            run = [percent(row.noise), f"{100 * row.flop_share:.1f} %", row.verdict]
            after = [str(len(row.seeds)), commit(row), f"`{row.where.get('command')}`"]
        lines.append([each.goal.text, each.figure, *run, each.met, *after])
    head = ["goal", "gap", "noise of the null run", "low FLOPs", "verdict", "met", "seeds", "commit", "command"]
    return table(head, lines)


def long_table(rows: Sequence[Training]) -> str:
    """All arms of all comparisons."""
    mine = convergences(rows)
    if not mine:
        return NOT_YET.capitalize() + "."
    parts = [f"![Loss and gap to bf16 over steps](../docs/{PICTURE})"] if pictured(mine) else []
    for group in comparisons(mine):
        first = group[0]
        title = f"**{first.model}**, {first.parameters / 1e6:,.0f}M parameters, {first.steps:,} steps of "
        title += f"{first.tokens_per_step:,} tokens, {apart(first)}{len(first.seeds)} seed"
        title += f"{'s' * (len(first.seeds) > 1)}; text `{first.data_hash}`; `{first.where.get('command')}`"
        null = next((f"Null run: {row.says}; noise {percent(row.noise)}." for row in group if row.arm == NULL), "")
        head = ["arm", "final loss", "gap to bf16", "verdict", "low FLOPs", "tokens/s", "peak memory"]
        parts += [title, provenance(group), null, table(head, [_cells(row) for row in group])]
    return "\n\n".join(part for part in parts if part)


def _cells(row: Convergence) -> list[str]:
    losses = [each for each in row.losses if each is not None]
    loss = f"{sum(losses) / len(losses):.4f}" if len(losses) == len(row.losses) else "no number"
    speed = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    gap = "" if row.arm == BASELINE else gap_of(row)
    share = "" if row.arm in (BASELINE, NULL) else f"{100 * row.flop_share:.1f} %"
    return [row.arm, loss, gap, row.verdict, share, speed, gib(row.peak_memory)]


def comparisons(rows: Sequence[Convergence]) -> list[list[Convergence]]:
    """Arms that ran together; the longest runs of a model first, then those with the most seeds."""
    groups: dict[tuple[object, ...], list[Convergence]] = {}
    for row in rows:
        key = (row.model, -row.steps, row.branch_at, -len(row.seeds), *map(str, row.setting))
        groups.setdefault(key, []).append(row)
    return [groups[key] for key in sorted(groups)]  # pyright: ignore[reportCallIssue, reportArgumentType]


def pictured(rows: Sequence[Convergence]) -> list[list[Convergence]]:
    """The longest comparison of each model, of branched runs, and of runs that begin in bf16."""
    longest: dict[tuple[str, bool, bool], list[Convergence]] = {}
    for group in comparisons(rows):
        longest.setdefault((group[0].model, group[0].branch_at > 0, group[0].since > 0), group)
    return list(longest.values())


def apart(row: Convergence) -> str:
    """Where runs branch and how long they stay in bf16, in words; "" if neither applies."""
    begins = f"bf16 before step {row.since:,}, " if row.since else ""
    return (f"one run up to step {row.branch_at:,}, " if row.branch_at else "") + begins


def gap_of(row: Convergence) -> str:
    """Gap in percent, with half of its interval of 95 % if there is one."""
    if row.gap is None:
        return "no number"
    spread = "" if row.error is None else f" ± {100 * row.error:.2f}"
    return f"{100 * row.gap:+.2f}{spread} %"


def percent(value: float | None) -> str:
    """A relative figure in percent."""
    return "-" if value is None else f"{100 * value:.2f} %"


def on_machine(row: Training) -> bool:
    """True if the run counts for the goals."""
    return MACHINE in str(row.where.get("gpu"))
