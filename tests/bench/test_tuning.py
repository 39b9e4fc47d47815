"""Tuner without a GPU: which plans are tried, which one wins and is stored; wrong plans are not timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from blockscale.bench import tuning
from blockscale.bench.gemms import Operands
from blockscale.bench.harness import Budget
from blockscale.bench.shapes import MODELS
from blockscale.bench.store import Where
from blockscale.bench.timing import Timing
from blockscale.gemm import heuristics, scaled_mm, tuned
from blockscale.gemm.heuristics import Plan, Problem
from blockscale.hardware import Capability
from blockscale.registry import Request, kernels

PROBLEM = Problem(128, 4096, 7168, b_1x128=False, fp32_out=False, sms=132)
WHERE = Where(
    "NVIDIA H200",
    "2.11",
    "3.6.0",
    "3.12",
    "0.1.0",
    None,
    "ptxas 12.9.86",
    "abc1234",
    True,
    "blockscale tune",
    "2026-11-20",
)
LLAMA = [(n, k) for k, n in MODELS["Llama3 8B"]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BLOCKSCALE_TUNED", str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def timing(us: float, spread: float = 0.0) -> Timing:
    return Timing(us, us * (1 - spread), us * (1 + spread), "graph", 11)


# ---- candidate plans -------------------------------------------------------------------------------------------------


def test_the_gemms_of_a_model_are_listed_once() -> None:
    found = tuning.problems_of(LLAMA, [1, 16, 4096], 132)
    assert len({tuned.same_plans(problem) for problem in found}) == len(found)
    assert {problem.m for problem in found if not problem.accumulate} == {16, 4096}, "1 and 16 have the same plans"
    added = [problem for problem in found if problem.accumulate]
    assert {(problem.m, problem.n) for problem in added} == set(LLAMA)
    assert {problem.k for problem in added} == {16, 4096}
    assert all(problem.fp32_out and problem.b_1x128 for problem in added)
    forward = tuning.problems_of(LLAMA, [4096], 132, vector=True, training=False)
    assert [(problem.n, problem.k) for problem in forward] == LLAMA
    assert all(problem.b_1x128 and not problem.fp32_out for problem in forward)


def test_only_outputs_that_the_hopper_kernel_writes_directly() -> None:
    """Only outputs with rows aligned to 16 bytes; K may be any number."""
    pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
    row = next(row for row in kernels("gemm") if row.backend == "hopper" and ("fp8_1x128",) * 2 in row.formats)
    assert tuning.problems_of([(20, 64)], [16], 132, training=False) == []
    (gradient,) = tuning.problems_of([(33, 20)], [4095], 132)
    assert (gradient.n, gradient.k, gradient.accumulate) == (20, 4095, True)
    for problem in tuning.problems_of([(48, 64), (40, 63), (64, 4105)], [1, 7, 16, 24, 4096], 132):
        shape = (problem.m, problem.n, problem.k)
        assert problem.n * (4 if problem.fp32_out else 2) % 16 == 0
        request = Request("gemm", Capability("cuda", 90), ("fp8_1x128",) * 2, shape, torch.float32)
        assert row.refusal(request) is None


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("m", [16, 128, 4096])
def test_plans_that_are_worth_trying(m: int, add: bool) -> None:
    problem = Problem(m, 4096, 7168, add, add, 132, add)
    tried = tuning.plans_for(problem)
    plans, predicted = zip(*tried, strict=True)
    assert heuristics.choose(problem)[0] in plans
    assert set(tried) <= set(heuristics.candidates(problem))
    assert list(predicted) == sorted(predicted)
    assert max(predicted) <= 2 * min(predicted)
    assert len(tried) > 3
    assert len({tuning.plan_text(plan) for plan in plans}) == len(plans)


# ---- the chosen plan -------------------------------------------------------------------------------------------------


def outcome_of(times: dict[int, Timing | str]) -> tuning.Outcome:
    """Outcome for PROBLEM; plan 0 is the heuristic's."""
    chosen, _ = heuristics.choose(PROBLEM)
    plans = [chosen, *(plan for plan, _ in heuristics.candidates(PROBLEM) if plan != chosen)]
    given = {plans[index]: found for index, found in times.items()}
    (outcome,) = tuning.tune([PROBLEM], lambda problem, tried: given)
    return outcome


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ({0: timing(100), 1: timing(97)}, True),
        ({0: timing(100), 1: timing(98.5)}, False),
        ({0: timing(100, 0.02), 1: timing(97, 0.02)}, False),
        ({0: timing(100, 0.02), 1: timing(90, 0.02)}, True),
        ({0: timing(90), 1: timing(100)}, False),
        ({0: timing(100), 1: timing(97), 2: timing(95), 3: "wrong"}, True),
    ],
)
def test_a_winner_passes_margin_and_spread(times: dict[int, Timing | str], wins: bool) -> None:
    outcome = outcome_of(times)
    assert (outcome.taken != outcome.model) is wins
    kept = tuning.entry_of(outcome, WHERE)
    assert (kept is not None) is wins
    if kept is not None:
        assert kept.plan == outcome.best
        assert kept.us == min(found.us for found in times.values() if isinstance(found, Timing))
        assert (kept.model_us, kept.gpu, kept.commit) == (100, "NVIDIA H200", "abc1234 with changes")


@pytest.mark.parametrize("times", [{0: "wrong", 1: timing(10)}, {0: "wrong"}, {}])
def test_nothing_is_stored_if_the_heuristics_plan_fails(times: dict[int, Timing | str]) -> None:
    outcome = outcome_of(times)
    assert outcome.taken is None
    assert tuning.entry_of(outcome, WHERE) is None


def test_measuring_again_can_undo_tuning(folder: Path) -> None:
    path = tuned.own_file(WHERE.gpu, 132)
    for times, stored in (
        ({0: timing(100), 1: timing(100)}, None),
        ({0: timing(100), 1: timing(90)}, 1),
        ({0: timing(80), 1: timing(90)}, 0),
    ):
        outcome = outcome_of(times)
        kept = tuning.entry_of(outcome, WHERE)
        if kept is not None:
            tuned.store(path, [kept])
        entry = tuned.choose(PROBLEM, WHERE.gpu).entry
        assert (entry and entry.plan) == (None if stored is None else list(outcome.times)[stored])
    assert len(path.read_text().splitlines()) == 1


def test_no_problem_starts_after_the_budget() -> None:
    clock = iter([0.0, 0.0, 6.0, 11.0])
    problems = tuning.problems_of(LLAMA, [4096], 132)
    measured: list[Problem] = []

    def measure(problem: Problem, plans: Sequence[Plan]) -> dict[Plan, Timing | str]:
        measured.append(problem)
        return {plan: timing(10) for plan in plans}

    done = list(tuning.tune(problems, measure, seconds=10, clock=lambda: next(clock)))
    assert [outcome.problem for outcome in done] == measured == problems[:2]
    assert len(list(tuning.tune(problems, measure))) == len(problems)


# ---- measurement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [False, True])
def test_plans_are_checked_and_then_timed(add: bool) -> None:
    """With the reference in place of the kernel: one plan is correct, one wrong, one raises."""
    problem = Problem(16, 64, 128, add, add, 132, add)
    plans = [plan for plan, _ in heuristics.candidates(problem)][:3]

    def launch(plan: Plan, operands: Operands, out: torch.Tensor) -> None:
        if plan == plans[2]:
            raise RuntimeError("out of shared memory")
        product = scaled_mm(operands.a, operands.b, torch.float32) * (1.0005 if plan == plans[1] else 1.0)
        out.copy_(product + out if add else product)

    cpu = torch.device("cpu")
    found = tuning.measure_plans(problem, plans, device=cpu, budget=Budget(3, 1e-4), launch=launch)
    assert list(found) == plans
    right, wrong, raised = found.values()
    assert isinstance(right, Timing)
    assert right.us > 0
    assert right.rounds == 3
    if add:
        assert "dB from the exact one" in str(wrong)
    else:
        assert isinstance(wrong, Timing), "half a thousandth is well within a rounding to bf16"
    assert "out of shared memory" in str(raised)
