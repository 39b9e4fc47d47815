"""What a comparison may claim: paired gaps, their intervals, and one rule that turns them into a verdict.

A gap is (loss - bf16's loss) / bf16's loss of the same seed. Seeds are pairs, so the interval is Student's, of the mean
of the gaps. The null is bf16 against itself with sums in another order: whatever gap it has means nothing, and no
recipe is judged finer than that. Plain numbers, no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["diverged", "worse", "too short to tell", "undecided", "within budget", "within noise"]
Tone = Literal["good", "bad", "open", "short"]

# two-sided 95 %, by degrees of freedom from 1 on
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.95996
# A single null is one draw from the noise, and a second draw is larger than the first in every second case, larger than
# it three times in one of five (normal noise): gaps up to so many times the null's say little.
_ONE_DRAW = 3


def student(degrees: int) -> float:
    """The quantile that a two-sided interval of 95 % takes.

    >>> student(1), student(4), round(student(60), 2)
    (12.706, 2.776, 2.0)
    """
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    # Cornish and Fisher's expansion
    z, over = _NORMAL, 1 / degrees
    return z + (z**3 + z) / 4 * over + (5 * z**5 + 16 * z**3 + 3 * z) / 96 * over**2


@dataclass(frozen=True)
class Gap:
    """Paired relative gaps, one for each seed: infinite where its run broke down, nan where bf16's did.  error: half of
    the interval of their mean; None of a single seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        count = len(self.values)
        if count < 2:
            return None
        return student(count - 1) * statistics.stdev(self.values) / math.sqrt(count)

    @property
    def is_finite(self) -> bool:
        """Whether every run ended with a number."""
        return all(map(math.isfinite, self.values))

    def __str__(self) -> str:
        if not self.is_finite:
            return "no number"
        spread = "" if self.error is None else f" ± {100 * self.error:.2f}"
        return f"{round(100 * self.mean, 2) + 0.0:+.2f}{spread} %"  # no -0.00


def paired(losses: Sequence[float], base: Sequence[float]) -> Gap:
    """Gaps of runs to the baseline's runs of the same seeds.

    >>> print(paired([2.02, 2.04], [2.0, 2.0]))
    +1.50 ± 6.35 %
    >>> paired([float("inf"), 2.0], [2.0, float("inf")]).values  # a run that broke down, and one without a pair
    (inf, nan)
    """
    return Gap(tuple(_relative(*pair) for pair in zip(losses, base, strict=True)))


def _relative(loss: float, base: float) -> float:
    if not math.isfinite(base) or base == 0:
        return math.nan
    return loss / base - 1 if math.isfinite(loss) else math.inf


def wander(along: Sequence[float]) -> float:
    """How far the gap of a single run strayed from where it ended, over the second half of the run."""
    late = along[len(along) // 2 :]
    return max((abs(each - late[-1]) for each in late), default=0.0)


def noise_of(null: Gap, along: Sequence[float] = ()) -> float:
    """The largest gap that may mean nothing: the far end of the null's interval. One seed has no interval; then it is
    the largest gap that the null had in the second half of its run.  along: its gaps in the order of the steps."""
    if not null.is_finite:
        return math.nan
    if null.error is not None:
        return abs(null.mean) + null.error
    late = along[len(along) // 2 :]
    return max(abs(each) for each in (null.mean, *late))


# The shortest comparison that is judged; docs/compare.md has the measurements behind each number.
# Steps since the runs of a seed parted. Sums in another order differ by 0.05 % after 100 steps of the tiny model and by
# 1 % from 200 on: a shorter null run measures no noise.
LEAST_STEPS = 300
# Paired seeds whose interval is useful: t is 12.7 with two, 4.3 with three.
LEAST_SEEDS = 3
# Evaluations since the runs parted. Two of three lie in the second half: the fewest that show whether a gap moves.
LEAST_EVALUATIONS = 3
# With fewer seeds the second half of the run stands in for the interval: four evaluations of it at least.
LEAST_EVALUATIONS_OF_FEW_SEEDS = 8
# Budgets that the whole interval must exceed to count as worse in a short comparison too: on their way to the end
# correct recipes of 8 bits strayed by up to 3 in the mean of three seeds.
FAR = 4


@dataclass(frozen=True)
class Length:
    """How much was run.  steps: all of them.  parted: those before the runs of a seed differ (`branch_at`, `since`).
    evaluations: on held-out text after that."""

    steps: int
    evaluations: int
    parted: int = 0

    def shortage(self, seeds: int) -> str:
        """What was run and what a verdict needs, with the options that give it; empty if it is enough.

        >>> Length(16, 4).shortage(3)
        '16 steps, 4 evaluations and 3 seeds were run; a verdict needs 300 steps (--steps 300)'
        """
        after = f" after step {self.parted}" if self.parted else ""
        needs: list[str] = []
        if self.steps - self.parted < LEAST_STEPS:
            needs.append(f"{LEAST_STEPS} steps{after} (--steps {self._goal})")
        if seeds >= LEAST_SEEDS and self.evaluations < LEAST_EVALUATIONS:
            needs.append(f"{LEAST_EVALUATIONS} evaluations{after} (--eval-every {self._every})")
        if seeds < LEAST_SEEDS and self.evaluations < LEAST_EVALUATIONS_OF_FEW_SEEDS:
            many = f"{LEAST_EVALUATIONS_OF_FEW_SEEDS} evaluations{after} (--eval-every {self._every})"
            needs.append(f"{LEAST_SEEDS} seeds (--seeds {LEAST_SEEDS}) or {many}")
        if not needs:
            return ""
        run = (f"{_count(self.steps - self.parted, 'step')}{after}", _count(self.evaluations, "evaluation"))
        return f"{', '.join(run)} and {_count(seeds, 'seed')} were run; a verdict needs {', and '.join(needs)}"

    def options(self, seeds: int) -> dict[str, int]:
        """Options of `blockscale compare` that are enough for a verdict."""
        return {
            "--steps": self._goal,
            "--seeds": max(seeds, LEAST_SEEDS),
            "--eval-every": self._every,
        }

    @property
    def _goal(self) -> int:
        return max(self.steps, self.parted + LEAST_STEPS)

    @property
    def _every(self) -> int:
        """Steps between evaluations that are enough for any number of seeds."""
        return (self._goal - self.parted) // LEAST_EVALUATIONS_OF_FEW_SEEDS


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Verdict:
    """kind: what may be said.  why: in words, with the figures it rests on."""

    kind: Kind
    why: str

    @property
    def is_good(self) -> bool:
        return self.kind in ("within budget", "within noise")

    @property
    def is_bad(self) -> bool:
        return self.kind in ("worse", "diverged")

    @property
    def tone(self) -> Tone:
        """How it is coloured."""
        return "good" if self.is_good else "bad" if self.is_bad else "open" if self.kind == "undecided" else "short"


def judge(gap: Gap, noise: float, budget: float, length: Length, strayed: float = 0.0) -> Verdict:
    """The verdict on a recipe.  noise: of the null, see `noise_of`.  budget: the largest relative gap that is accepted.
    length: how much was run.  strayed: of a single seed, see `wander`.

    The gap's interval decides; a single seed has none, and three times the null's noise stand in its place, or how far
    the gap strayed if that is more. Below the budget with all of it: within noise if the mean is no larger than the
    noise, else within budget. Above budget and noise with all of it: worse. Anything else is open, and so is everything
    where the null is no number. Below the least length nothing of that is said, but that a run diverged, and that a
    recipe is worse where LEAST_SEEDS have an interval above FAR budgets and the noise.
    """
    if any(map(math.isnan, gap.values)):
        return Verdict("undecided", "bf16 itself ended without a loss that is a number")
    if not gap.is_finite:
        return Verdict("diverged", "a run ended without a loss that is a number")
    if not math.isfinite(noise):
        return Verdict("undecided", "the null has no finite gap, so the noise is not known")
    error = max(_ONE_DRAW * noise, strayed) if gap.error is None else gap.error
    low, high = gap.mean - error, gap.mean + error
    reach = f"from {low:+.2%} to {high:+.2%}" + (
        " (one seed: by three times the null's gap, or by how far its own strayed)" if gap.error is None else ""
    )
    shortage = length.shortage(len(gap.values))
    if shortage:
        far = FAR * budget
        if len(gap.values) >= LEAST_SEEDS and low > max(far, noise):
            return Verdict("worse", f"{reach}, all above {far:.2%}, {FAR} budgets, which a short run is enough for")
        return Verdict("too short to tell", shortage)
    if high <= budget and abs(gap.mean) <= noise:
        return Verdict("within noise", f"{reach}; the null alone makes {noise:.2%}")
    if high <= budget:
        return Verdict("within budget", f"{reach}; budget {budget:.2%}")
    if low > max(budget, noise):
        return Verdict("worse", f"{reach}, all above the budget of {budget:.2%} and the noise of {noise:.2%}")
    return Verdict("undecided", f"{reach}, budget {budget:.2%}, noise {noise:.2%}: more seeds or steps would tell")


def resolves(noise: float, budget: float) -> bool:
    """Whether a comparison can see a budget at all: its noise is at most a third of it."""
    return noise <= budget / 3
