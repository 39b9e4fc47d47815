"""Statistics of a comparison: paired gaps, their confidence intervals, and the rule that turns them into a verdict.

A gap is (loss - bf16's loss) / bf16's loss of the same seed. Runs are paired by seed, so the interval is Student's t
interval of the mean gap. The null run (bf16 with another reduction order) measures run-to-run noise: no gap below it is
significant. Plain numbers, no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["diverged", "worse", "too short to tell", "undecided", "within budget", "within noise"]

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.95996
# Half width of a single seed's interval, in gaps of the null run. One null run is one sample of the noise: for normal
# noise a second sample is larger in half of all cases, and more than three times as large in one of five.
_SINGLE_SEED_FACTOR = 3


def student(degrees: int) -> float:
    """Quantile of Student's t for a two-sided 95 % interval.

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
    """Paired relative gaps, one for each seed: infinite if its run failed, NaN if bf16's did.  error: half width of the
    95 % interval of the mean; None for a single seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        count = len(self.values)
        return student(count - 1) * statistics.stdev(self.values) / math.sqrt(count) if count > 1 else None

    @property
    def is_finite(self) -> bool:
        """Whether every run ended with a finite loss."""
        return all(map(math.isfinite, self.values))

    def __str__(self) -> str:
        if not self.is_finite:
            return "not finite"
        spread = "" if self.error is None else f" ± {100 * self.error:.2f}"
        return f"{round(100 * self.mean, 2) + 0.0:+.2f}{spread} %"  # no -0.00


def paired(losses: Sequence[float], base: Sequence[float]) -> Gap:
    """Relative gaps of runs to the baseline's runs of the same seeds.

    >>> print(paired([2.02, 2.04], [2.0, 2.0]))
    +1.50 ± 6.35 %
    """
    return Gap(tuple(_relative(*pair) for pair in zip(losses, base, strict=True)))


def _relative(loss: float, base: float) -> float:
    if not math.isfinite(base) or base == 0:
        return math.nan
    return loss / base - 1 if math.isfinite(loss) else math.inf


def drift_of(along: Sequence[float]) -> float:
    """Drift of a gap: its largest distance from its final value, over the second half of the run."""
    late = along[len(along) // 2 :]
    return max((abs(each - late[-1]) for each in late), default=0.0)


def noise_of(null: Gap, along: Sequence[float] = ()) -> float:
    """Largest gap that chance explains: the end of the null run's 95 % interval farther from zero. One seed has no
    interval: then the null run's largest gap in the second half of the run.  along: its gaps in the order of steps."""
    if not null.is_finite:
        return math.nan
    if null.error is not None:
        return abs(null.mean) + null.error
    late = along[len(along) // 2 :]
    return max(abs(each) for each in (null.mean, *late))


# Minimum length for a verdict; docs/compare.md has the measurements behind each number.
# Steps after the shared ones. Another reduction order changes the loss of the tiny model by 0.05 % after 100 steps and
# by 1 % from step 200 on: a shorter null run measures no noise.
LEAST_STEPS = 300
# Paired seeds with a useful interval: t is 12.7 with two, 4.3 with three.
LEAST_SEEDS = 3
# Evaluations after the shared steps. Two of three lie in the second half: the fewest that show a drift.
LEAST_EVALUATIONS = 3
# With fewer seeds the second half of the run replaces the interval: at least four evaluations of it.
LEAST_EVALUATIONS_OF_FEW_SEEDS = 8
# Multiple of the budget that the whole interval must exceed to count as worse in a short comparison. During a run the
# mean gap of correct 8-bit recipes over three seeds reached 3 budgets.
SHORT_RUN_BUDGETS = 4


@dataclass(frozen=True)
class Length:
    """Length of a comparison.  steps: of a run.  evaluations: on held-out text, after the shared steps.  shared_steps:
    before the runs of a seed differ (`branch_at`, `since`)."""

    steps: int
    evaluations: int
    shared_steps: int = 0

    def shortage(self, seeds: int) -> str:
        """Sentence on what was run and what a verdict needs, with the options; empty if it is long enough.

        >>> Length(16, 4).shortage(3)
        '16 steps, 4 evaluations and 3 seeds were run; a verdict needs 300 steps (--steps 300)'
        """
        after = f" after step {self.shared_steps}" if self.shared_steps else ""
        goal = max(self.steps, self.shared_steps + LEAST_STEPS)
        # enough evaluations for any number of seeds
        every = f"(--eval-every {(goal - self.shared_steps) // LEAST_EVALUATIONS_OF_FEW_SEEDS})"
        needs: list[str] = []
        if self.steps - self.shared_steps < LEAST_STEPS:
            needs.append(f"{LEAST_STEPS} steps{after} (--steps {goal})")
        if seeds >= LEAST_SEEDS and self.evaluations < LEAST_EVALUATIONS:
            needs.append(f"{LEAST_EVALUATIONS} evaluations{after} {every}")
        if seeds < LEAST_SEEDS and self.evaluations < LEAST_EVALUATIONS_OF_FEW_SEEDS:
            many = f"{LEAST_EVALUATIONS_OF_FEW_SEEDS} evaluations{after} {every}"
            needs.append(f"{LEAST_SEEDS} seeds (--seeds {LEAST_SEEDS}) or {many}")
        run = (f"{_count(self.steps - self.shared_steps, 'step')}{after}", _count(self.evaluations, "evaluation"))
        said = f"{', '.join(run)} and {_count(seeds, 'seed')} were run; a verdict needs {', and '.join(needs)}"
        return said if needs else ""


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Verdict:
    """Verdict on a recipe.  kind: the conclusion.  why: the reason with its figures."""

    kind: Kind
    why: str

    @property
    def is_good(self) -> bool:
        return self.kind in ("within budget", "within noise")

    @property
    def is_bad(self) -> bool:
        return self.kind in ("worse", "diverged")

    @property
    def tone(self) -> str:
        """Colour class of the verdict: good, bad, open or short."""
        return "good" if self.is_good else "bad" if self.is_bad else "open" if self.kind == "undecided" else "short"


def judge(gap: Gap, noise: float, budget: float, length: Length, drift: float = 0.0) -> Verdict:
    """Verdict on a recipe.  noise: of the null run, see `noise_of`.  budget: largest accepted relative gap.  length: of
    the comparison.  drift: of a single seed's gap, see `drift_of`.

    The 95 % interval of the gap decides (docs/compare.md has the table). For a single seed its half width is three
    times the noise, or the drift if that is larger. Below the minimum length the verdict is "too short to tell", unless
    a run diverged, or the whole interval of LEAST_SEEDS seeds or more is above SHORT_RUN_BUDGETS budgets and the noise.
    """
    if any(map(math.isnan, gap.values)):
        return Verdict("undecided", "bf16 itself ended without a finite loss")
    if not gap.is_finite:
        return Verdict("diverged", "a run ended without a finite loss")
    if not math.isfinite(noise):
        return Verdict("undecided", "the null run has no finite gap, so the noise is not known")
    error = max(_SINGLE_SEED_FACTOR * noise, drift) if gap.error is None else gap.error
    low, high = gap.mean - error, gap.mean + error
    reach = f"from {low:+.2%} to {high:+.2%}"
    if gap.error is None:
        reach += " (one seed: half width three times the null run's gap, or the drift of its own)"
    shortage, far = length.shortage(len(gap.values)), SHORT_RUN_BUDGETS * budget
    if shortage and len(gap.values) >= LEAST_SEEDS and low > max(far, noise):
        enough = f"{SHORT_RUN_BUDGETS} budgets, for which a short run is enough"
        return Verdict("worse", f"{reach}, all above {far:.2%}, {enough}")
    if shortage:
        return Verdict("too short to tell", shortage)
    if high <= budget and abs(gap.mean) <= noise:
        return Verdict("within noise", f"{reach}; noise of the null run {noise:.2%}")
    if high <= budget:
        return Verdict("within budget", f"{reach}; budget {budget:.2%}")
    if low > max(budget, noise):
        return Verdict("worse", f"{reach}, all above the budget of {budget:.2%} and the noise of {noise:.2%}")
    return Verdict("undecided", f"{reach}, budget {budget:.2%}, noise {noise:.2%}: more seeds or steps would tell")
