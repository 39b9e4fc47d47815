"""Verdicts on made-up numbers: every rule has a case, and a broken recipe comes out as worse."""

from __future__ import annotations

import math
import re

import pytest

from blockscale.compare.statistics import (
    LEAST_EVALUATIONS,
    LEAST_EVALUATIONS_OF_FEW_SEEDS,
    LEAST_SEEDS,
    LEAST_STEPS,
    SHORT_RUN_BUDGETS,
    Gap,
    Length,
    drift_of,
    judge,
    noise_of,
    paired,
    student,
)

BUDGET = 0.0025
LONG = Length(3000, 12)


def gap(*percent: float) -> Gap:
    return Gap(tuple(each / 100 for each in percent))


def test_student_is_students():
    """Integrates the density: the tails beyond the quantile hold 5 %."""
    for degrees in (1, 2, 4, 9, 30, 31, 200):
        norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
        edge, count = student(degrees), 20_000
        width = edge / count
        middle = sum(
            norm * (1 + ((i + 0.5) * width) ** 2 / degrees) ** (-(degrees + 1) / 2) * width for i in range(count)
        )
        assert 2 * middle == pytest.approx(0.95, abs=2e-4), degrees


def test_gaps_are_paired_by_seed():
    """Losses of different seeds differ far more than recipes do; pairing by seed removes that variance."""
    found = paired([2.02, 3.03, 4.04], [2.0, 3.0, 4.0])
    assert found.mean == pytest.approx(0.01)
    assert found.error == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 2.0])
    one = paired([2.02], [2.0])
    assert one.error is None
    assert str(one) == "+1.00 %"


def test_the_interval_is_students():
    found = gap(0.1, 0.2, 0.3)
    assert found.error == pytest.approx(4.303 * 0.001 / math.sqrt(3))


def test_noise_is_the_end_of_the_null_interval():
    null = gap(-0.1, -0.1, -0.1)
    assert noise_of(null) == pytest.approx(0.001)
    assert noise_of(gap(-0.2, 0.2)) == pytest.approx(12.706 * 0.004 / math.sqrt(2) / math.sqrt(2))
    # one seed: the largest gap of the second half
    assert noise_of(gap(0.01), [0.5, 0.4, -0.0007, 0.0001]) == pytest.approx(0.0007)
    assert math.isnan(noise_of(gap(math.nan, 0.1)))


@pytest.mark.parametrize(
    ("values", "noise", "kind"),
    [
        ((0.02, 0.03, 0.01), 0.05, "within noise"),
        ((-0.02, -0.03, -0.01), 0.05, "within noise"),
        ((0.10, 0.12, 0.11), 0.05, "within budget"),
        ((1.0, 1.1, 0.9), 0.05, "worse"),
        ((0.1, 0.5, 0.2), 0.05, "undecided"),
        # noise above the gap makes it undecided
        ((1.0, 1.1, 0.9), 2.0, "undecided"),
        # two seeds that disagree have a wide interval, whatever their mean
        ((0.00, 0.10), 0.05, "undecided"),
        ((math.inf, 0.1, 0.1), 0.05, "diverged"),
        # bf16 failed, which says nothing about the recipe
        ((math.nan, 0.1, 0.1), 0.05, "undecided"),
        ((0.03,), 0.05, "within noise"),
        ((0.09,), 0.05, "within budget"),
        ((0.11,), 0.05, "undecided"),
        ((3.0,), 0.05, "worse"),
        # one null run is one sample of the noise: a gap of twice its size is not significant
        ((0.66,), 0.30, "undecided"),
    ],
)
def test_each_verdict(values: tuple[float, ...], noise: float, kind: str):
    verdict = judge(gap(*values), noise / 100, BUDGET, LONG)
    assert verdict.kind == kind, verdict
    assert verdict.is_good == kind.startswith("within")


def test_no_verdict_without_a_null_run():
    assert judge(gap(0.0, 0.0, 0.0), math.nan, BUDGET, LONG).kind == "undecided"
    # a single run with a drift above the noise is undecided
    assert drift_of([5.0, 0.001, 0.004, 0.003]) == pytest.approx(0.001)
    assert judge(gap(0.3), 0.0001, BUDGET, LONG).kind == "worse"
    assert judge(gap(0.3), 0.0001, BUDGET, LONG, drift=0.001).kind == "undecided"
    assert judge(gap(0.3, 0.3), 0.0001, BUDGET, LONG, drift=0.001).kind == "worse"
    assert "one seed" in judge(gap(0.1), 0.0001, BUDGET, LONG).why


def test_a_failed_baseline_gives_no_verdict():
    broken = paired([1.0, 1.0], [math.inf, 1.0])
    assert not broken.is_finite
    verdict = judge(broken, 0.01, BUDGET, LONG)
    assert (verdict.kind, "bf16 itself" in verdict.why) == ("undecided", True)
    assert judge(paired([math.nan], [1.0]), 0.01, BUDGET, LONG).kind == "diverged"


def test_a_baseline_loss_of_zero_gives_no_gap():
    assert math.isnan(paired([0.1], [0.0]).values[0])


ENOUGH = Length(LEAST_STEPS, LEAST_EVALUATIONS)


@pytest.mark.parametrize("values", [(0.0, 0.0, 0.0), (0.1, 0.1, 0.1), (0.5, 0.5, 0.5), (-0.5, 0.5, 0.0)])
def test_a_short_comparison_says_neither_yes_nor_no(values: tuple[float, ...]):
    """Each of these has another verdict once it is long enough."""
    shorter = [Length(LEAST_STEPS - 1, LEAST_EVALUATIONS), Length(LEAST_STEPS, LEAST_EVALUATIONS - 1)]
    for length in shorter:
        verdict = judge(gap(*values), 0.0005, BUDGET, length)
        assert (verdict.kind, verdict.tone, verdict.is_good, verdict.is_bad) == (
            "too short to tell",
            "short",
            False,
            False,
        )
    assert judge(gap(*values), 0.0005, BUDGET, ENOUGH).kind != "too short to tell"


def test_few_seeds_need_more_evaluations():
    few, many = LEAST_EVALUATIONS_OF_FEW_SEEDS - 1, LEAST_EVALUATIONS_OF_FEW_SEEDS
    for seeds in range(1, LEAST_SEEDS):
        values = gap(*[0.01] * seeds)
        assert judge(values, 0.0005, BUDGET, Length(LEAST_STEPS, few)).kind == "too short to tell"
        assert judge(values, 0.0005, BUDGET, Length(LEAST_STEPS, many)).kind == "within noise"
    assert judge(gap(*[0.01] * LEAST_SEEDS), 0.0005, BUDGET, ENOUGH).kind == "within noise"


def test_shared_steps_do_not_count():
    late = Length(1000 + LEAST_STEPS - 1, 12, shared_steps=1000)
    verdict = judge(gap(0.0, 0.0, 0.0), 0.0005, BUDGET, late)
    assert verdict.kind == "too short to tell"
    assert f"{LEAST_STEPS - 1} steps after step 1000" in verdict.why
    assert f"--steps {1000 + LEAST_STEPS}" in verdict.why
    assert judge(gap(0.0, 0.0, 0.0), 0.0005, BUDGET, Length(1000 + LEAST_STEPS, 12, 1000)).is_good


def test_shortage_names_the_options():
    assert Length(2, 2).shortage(1) == (
        "2 steps, 2 evaluations and 1 seed were run; a verdict needs 300 steps (--steps 300), and 3 seeds (--seeds 3) "
        "or 8 evaluations (--eval-every 37)"
    )
    assert Length(600, 1).shortage(5).endswith("a verdict needs 3 evaluations (--eval-every 75)")
    assert Length(3000, 7).shortage(2).endswith("3 seeds (--seeds 3) or 8 evaluations (--eval-every 375)")
    assert Length(3000, 12).shortage(1) == ENOUGH.shortage(3) == ""


@pytest.mark.parametrize("length", [Length(2, 1), Length(16, 4), Length(1020, 2, 1000), Length(5000, 1)])
@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
def test_the_options_of_a_shortage_are_enough(length: Length, seeds: int):
    said = dict(re.findall(r"(--[a-z-]+) (\d+)", length.shortage(seeds)))
    steps, many = int(said.get("--steps", length.steps)), int(said.get("--seeds", seeds))
    every = int(said.get("--eval-every", (steps - length.shared_steps) // LEAST_EVALUATIONS_OF_FEW_SEEDS))
    assert Length(steps, (steps - length.shared_steps) // every, length.shared_steps).shortage(many) == ""


def test_a_short_comparison_still_says_what_is_broken():
    short = Length(2, 1)
    assert judge(gap(math.inf, 0.1, 0.1), 0.0005, BUDGET, short).kind == "diverged"
    assert judge(gap(math.nan, 0.1, 0.1), 0.0005, BUDGET, short).kind == "undecided", "bf16 itself failed"
    far = 100 * SHORT_RUN_BUDGETS * BUDGET
    assert judge(gap(*[far + 0.1] * LEAST_SEEDS), 0.0005, BUDGET, short).kind == "worse"
    assert judge(gap(*[far - 0.1] * LEAST_SEEDS), 0.0005, BUDGET, short).kind == "too short to tell"
    # too few seeds for a useful interval, or noise of the same size, leave it open
    assert judge(gap(*[3 * far] * (LEAST_SEEDS - 1)), 0.0005, BUDGET, short).kind == "too short to tell"
    assert judge(gap(3 * far), 0.0005, BUDGET, short).kind == "too short to tell"
    assert judge(gap(*[far + 0.1] * LEAST_SEEDS), 1.0, BUDGET, short).kind == "too short to tell"
