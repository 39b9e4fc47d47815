"""Comparisons of trainings as tables: what recipes are meant to reach in loss, and what the stored runs say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tables import provenance, table
from .trainings import Convergence, Training, convergences

NOT_YET = "not measured yet"
PICTURE = "images/training.svg"
BASELINE, NULL = "bf16", "null"
# what the goals are for
MACHINE = "H200"
# of linear FLOPs in low precision, from where a recipe begins, below which a small gap says little
LEAST_SHARE = 0.9


@dataclass(frozen=True)
class Plan:
    """How long runs are, how many seeds at least, and what they do at first: see `Convergence.branch_at`, `since`."""

    steps: int
    seeds: int
    options: str
    branch_at: int = 0
    since: int = 0

    @property
    def text(self) -> str:
        said = f"{self.steps} steps" + (f", {self.seeds} seeds" if self.seeds > 1 else "")
        said += f", runs that part at {self.branch_at}" if self.branch_at else ""
        return said + (f", bf16 before step {self.since}" if self.since else "")

    def fits(self, row: Convergence) -> bool:
        """Whether runs were long enough, with seeds enough, and began that way."""
        long_enough = row.steps >= self.steps and len(row.seeds) >= self.seeds
        return long_enough and (row.branch_at, row.since) == (self.branch_at, self.since)


FULL = Plan(3000, 1, "")
BRANCHED = Plan(3000, 1, " --branch-at 1000", branch_at=1000)
SHORT = Plan(300, 5, " --steps 300 --seeds 5 --eval-every 100 --optimizer.warmup 0.3")
LATE = Plan(3000, 2, " --since 300 --seeds 2", since=300)


@dataclass(frozen=True)
class LossGoal:
    """A recipe on a model: gaps up to `most`, or up to the null's noise, are good.  share: of linear FLOPs that have to
    be in low precision."""

    model: str
    recipe: str
    most: float
    share: float
    plan: Plan

    @property
    def text(self) -> str:
        within = f"within {100 * self.most:g} %, or within the null's noise"
        return f"{self.model} by {self.recipe}, {self.plan.text}: {within}"

    @property
    def command(self) -> str:
        return f"blockscale compare {self.model} --recipes {self.recipe}{self.plan.options}"

    def row(self, rows: Sequence[Convergence]) -> Convergence | None:
        """The one with the most seeds of those that are long enough, or the longest of these where one seed will do."""
        mine = [row for row in rows if (row.model, row.arm) == (self.model, self.recipe) and on_machine(row)]
        fit = [row for row in mine if self.plan.fits(row)]
        return max(fit, key=lambda row: (row.steps if self.plan.seeds == 1 else 0, len(row.seeds)), default=None)

    def met(self, row: Convergence) -> str:
        """By the mean gap, which the verdict may call open; a run that broke down has none. That the null strays as far
        is said, since it is no proof that nothing is lost."""
        if row.gap is None or row.flop_share < self.share or row.gap > max(self.most, row.noise or 0.0):
            return "no"
        if row.gap > self.most:
            return "inside the null's noise"
        return "in the mean" if row.verdict in ("undecided", "too short to tell") else "yes"


def _goals() -> tuple[LossGoal, ...]:
    plans = {"125m": (FULL, LATE, BRANCHED, SHORT), "moe-500m": (FULL, BRANCHED, SHORT)}
    eight_bit = tuple(
        LossGoal(model, recipe, 0.0025, LEAST_SHARE * (1 - plan.since / plan.steps), plan)
        for model, theirs in plans.items()
        for recipe in ("fp8_blockwise", "mxfp8")
        for plan in theirs
    )
    return *eight_bit, *(LossGoal("125m", "nvfp4", 0.02, 0.0, plan) for plan in (FULL, BRANCHED, SHORT))


GOALS = _goals()


def goals_table(rows: Sequence[Training]) -> str:
    """Every goal; what was not run says so."""
    mine = convergences(rows)
    head = ["goal", "gap", "noise of the null", "low FLOPs", "verdict", "met", "seeds", "commit", "command"]
    body = table(head, [_goal_line(goal, mine) for goal in GOALS])
    picture = [f"![Loss and gap to bf16 over steps](docs/{PICTURE})"] if pictured(mine) else []
    return "\n\n".join([*picture, body])


def _goal_line(goal: LossGoal, rows: Sequence[Convergence]) -> list[str]:
    row = goal.row(rows)
    if row is None:
        return [goal.text, NOT_YET, "-", "-", "-", "-", "-", "-", f"`{goal.command}`"]
    shares = [percent(row.noise), f"{100 * row.flop_share:.1f} %"]
    says = [row.verdict, goal.met(row), str(len(row.seeds)), commit(row)]
    return [goal.text, gap_of(row), *shares, *says, f"`{row.where.get('command')}`"]


def long_table(rows: Sequence[Training]) -> str:
    """Every arm of every comparison."""
    mine = convergences(rows)
    if not mine:
        return NOT_YET.capitalize() + "."
    parts = [f"![Loss and gap to bf16 over steps]({PICTURE})"] if pictured(mine) else []
    for group in comparisons(mine):
        first = group[0]
        title = f"**{first.model}**, {first.parameters / 1e6:,.0f}M parameters, {first.steps:,} steps of "
        title += f"{first.tokens_per_step:,} tokens, {apart(first)}{len(first.seeds)} seed"
        title += f"{'s' * (len(first.seeds) > 1)}; text `{first.data_hash}`; `{first.where.get('command')}`"
        null = next((f"null: {row.says}; noise {percent(row.noise)}." for row in group if row.arm == NULL), "")
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
    """Arms that were run together, longest runs of a model first, and most seeds of these."""
    groups: dict[tuple[object, ...], list[Convergence]] = {}
    for row in rows:
        key = (row.model, -row.steps, row.branch_at, -len(row.seeds), *map(str, row.setting))
        groups.setdefault(key, []).append(row)
    return [groups[key] for key in sorted(groups)]  # pyright: ignore[reportCallIssue, reportArgumentType]


def pictured(rows: Sequence[Convergence]) -> list[list[Convergence]]:
    """The longest comparison of each model, and the longest of runs that part late."""
    longest: dict[tuple[str, bool, bool], list[Convergence]] = {}
    for group in comparisons(rows):
        longest.setdefault((group[0].model, group[0].branch_at > 0, group[0].since > 0), group)
    return list(longest.values())


def apart(row: Convergence) -> str:
    """Where its runs part, in words, if that is not at once."""
    begins = f"bf16 before step {row.since:,}, " if row.since else ""
    return (f"one run up to step {row.branch_at:,}, " if row.branch_at else "") + begins


def gap_of(row: Convergence) -> str:
    """In percent, with the half of its interval where there is one."""
    if row.gap is None:
        return "no number"
    spread = "" if row.error is None else f" ± {100 * row.error:.2f}"
    return f"{100 * row.gap:+.2f}{spread} %"


def percent(value: float | None) -> str:
    """Of a relative figure."""
    return "-" if value is None else f"{100 * value:.2f} %"


def gib(value: int | None) -> str:
    """Of bytes."""
    return "-" if value is None else f"{value / 2**30:.1f} GiB"


def on_machine(row: Training) -> bool:
    """Whether it counts for the goals."""
    return MACHINE in str(row.where.get("gpu"))


def commit(row: Training) -> str:
    """That was measured."""
    return f"{row.where.get('commit') or 'none recorded'}{', with local changes' if row.where.get('dirty') else ''}"
