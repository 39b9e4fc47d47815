"""Verdicts by made-up numbers: every rule is met, and what is broken comes out as worse."""

from __future__ import annotations

import math

import pytest

from blockscale.train.statistics import Gap, judge, noise_of, paired, resolves, student, wander

BUDGET = 0.0025


def gap(*percent: float) -> Gap:
    return Gap(tuple(each / 100 for each in percent))


def test_student_is_students():
    """Against the density itself: the tails beyond the quantile hold one part in twenty."""
    for degrees in (1, 2, 4, 9, 30, 31, 200):
        norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
        edge, count = student(degrees), 20_000
        width = edge / count
        middle = sum(
            norm * (1 + ((i + 0.5) * width) ** 2 / degrees) ** (-(degrees + 1) / 2) * width for i in range(count)
        )
        assert 2 * middle == pytest.approx(0.95, abs=2e-4), degrees


def test_gaps_are_paired_by_seed():
    """Seeds that differ by far more than recipes do: paired, their difference is plain."""
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


def test_noise_is_the_far_end_of_the_null():
    null = gap(-0.1, -0.1, -0.1)
    assert noise_of(null) == pytest.approx(0.001)
    assert noise_of(gap(-0.2, 0.2)) == pytest.approx(12.706 * 0.004 / math.sqrt(2) / math.sqrt(2))
    # one seed: its own late gaps, not the early ones
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
        # a null as noisy as the fault hides it, and says so
        ((1.0, 1.1, 0.9), 2.0, "undecided"),
        # two seeds that disagree know little, whatever their mean is
        ((0.00, 0.10), 0.05, "undecided"),
        ((math.inf, 0.1, 0.1), 0.05, "diverged"),
        # bf16 broke down, which says nothing of the recipe
        ((math.nan, 0.1, 0.1), 0.05, "undecided"),
        ((0.03,), 0.05, "within noise"),
        ((0.09,), 0.05, "within budget"),
        ((0.11,), 0.05, "undecided"),
        ((3.0,), 0.05, "worse"),
        # one null is one draw from the noise: twice as much is no proof, though all of it lies above both
        ((0.66,), 0.30, "undecided"),
    ],
)
def test_each_rule(values: tuple[float, ...], noise: float, kind: str):
    verdict = judge(gap(*values), noise / 100, BUDGET)
    assert verdict.kind == kind, verdict
    assert verdict.is_good == kind.startswith("within")


def test_nothing_is_judged_without_a_null():
    assert judge(gap(0.0, 0.0, 0.0), math.nan, BUDGET).kind == "undecided"
    # a single run whose gap still moves by more than the null does is no proof
    assert wander([5.0, 0.001, 0.004, 0.003]) == pytest.approx(0.001)
    assert judge(gap(0.3), 0.0001, BUDGET).kind == "worse"
    assert judge(gap(0.3), 0.0001, BUDGET, strayed=0.001).kind == "undecided"
    assert judge(gap(0.3, 0.3), 0.0001, BUDGET, strayed=0.001).kind == "worse"
    assert "one seed" in judge(gap(0.1), 0.0001, BUDGET).why


def test_a_third_of_the_budget_is_resolved():
    assert resolves(BUDGET / 3, BUDGET)
    assert not resolves(BUDGET / 2, BUDGET)
    assert not resolves(math.nan, BUDGET)


def test_a_baseline_that_broke_down_judges_nobody():
    broken = paired([1.0, 1.0], [math.inf, 1.0])
    assert not broken.is_finite
    verdict = judge(broken, 0.01, BUDGET)
    assert (verdict.kind, "bf16 itself" in verdict.why) == ("undecided", True)
    assert judge(paired([math.nan], [1.0]), 0.01, BUDGET).kind == "diverged"


def test_a_loss_of_zero_is_no_measure():
    assert math.isnan(paired([0.1], [0.0]).values[0])
