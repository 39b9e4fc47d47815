"""Plans of a Hopper GEMM for `blockscale tune`: which are tried, their times, and the one that is stored.

The function that times plans on a GPU (`measure_plans`) is a parameter of the others, so those run on a CPU.

A plan is stored if it beats the heuristic's by more than `MARGIN` and its upper quartile is below the lower quartile of
the heuristic's plan. If a plan is stored already, the outcome replaces it, even by the heuristic's own plan, so that
measuring again can undo tuning.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gemm import heuristics, tuned
from ..gemm.heuristics import Plan, Problem, moved_bytes
from . import timing
from .gemms import Operands, judge, make_operands
from .harness import Budget
from .store import Where
from .timing import Call, Timing, input_sets, prepare

MARGIN = 0.02
# Plans with a predicted time above this multiple of the best are not tried: the cost model is not that wrong.
WORTH_TRYING = 2.0

# Timing of each plan for a problem, or its fault as text.
Measure = Callable[[Problem, Sequence[Plan]], Mapping[Plan, Timing | str]]
# launches a plan with operands and an output
Launch = Callable[[Plan, Operands, Tensor], None]
# GEMMs reach the power limit, and the clock follows with a delay: longer slices than for casts
BUDGET = Budget(11, 0.008)


def problems_of(
    layers: Iterable[tuple[int, int]],
    tokens: Iterable[int],
    sms: int,
    *,
    vector: bool = False,
    training: bool = True,
) -> list[Problem]:
    """GEMMs of linear layers with weights (N, K) whose outputs the Hopper kernel writes directly: fprop; with training
    also dgrad, and wgrad into fp32.  vector: weights have 1x128 scales.

    Of problems that share a plan (`tuned.same_plans`) only the one with the most tokens is listed.
    """
    every: list[Problem] = []
    for n, k in layers:
        for m in sorted(tokens):
            every.append(Problem(m, n, k, vector, False, sms))
            if training:
                every.append(Problem(m, k, n, vector, False, sms))
                every.append(Problem(n, k, m, True, True, sms, accumulate=True))
    return list({tuned.same_plans(problem): problem for problem in every if problem.direct}.values())


def plans_for(problem: Problem) -> list[tuple[Plan, float]]:
    """Plans worth trying with their predicted µs, best first; includes the heuristic's choice."""
    chosen, _ = heuristics.choose(problem)
    ranked = sorted(heuristics.candidates(problem), key=lambda pair: pair[1])
    most = WORTH_TRYING * ranked[0][1]
    return [(plan, us) for plan, us in ranked if us <= most or plan == chosen]


@dataclass(frozen=True)
class Outcome:
    """Measurements of a problem: the heuristic's plan (`model`), times of plans, and faults of wrong ones."""

    problem: Problem
    model: Plan
    times: Mapping[Plan, Timing]
    faults: Mapping[Plan, str]

    @property
    def best(self) -> Plan | None:
        """The fastest correct plan; None if there is none."""
        return min(self.times, key=lambda plan: self.times[plan].us, default=None)

    @property
    def taken(self) -> Plan | None:
        """The fastest plan if it beats the heuristic's, else the heuristic's; None if the heuristic's plan is wrong."""
        if self.best is None or self.model not in self.times:
            return None
        ours, models = self.times[self.best], self.times[self.model]
        beaten = ours.us < (1 - MARGIN) * models.us and ours.high < models.low
        return self.best if beaten else self.model


def tune(
    problems: Sequence[Problem],
    measure: Measure,
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Measure problem by problem.  seconds: time after which no other problem is started."""
    started = clock()
    for problem in problems:
        if seconds is not None and clock() - started >= seconds:
            return
        found = measure(problem, [plan for plan, _ in plans_for(problem)])
        times = {plan: timing for plan, timing in found.items() if isinstance(timing, Timing)}
        faults = {plan: fault for plan, fault in found.items() if isinstance(fault, str)}
        yield Outcome(problem, heuristics.choose(problem)[0], times, faults)


def entry_of(outcome: Outcome, where: Where) -> tuned.Entry | None:
    """Entry to store: a plan that beats the heuristic's, or the chosen plan if one is stored already; else None."""
    plan, problem = outcome.taken, outcome.problem
    if plan is None or (plan == outcome.model and tuned.choose(problem, where.gpu).entry is None):
        return None
    best = outcome.times[plan]
    return tuned.Entry(
        problem=problem,
        plan=plan,
        us=round(best.us, 3),
        spread_us=(round(best.low, 3), round(best.high, 3)),
        model_us=round(outcome.times[outcome.model].us, 3),
        gpu=where.gpu,
        triton=where.triton or "none",
        ptxas=where.assembler or "unknown",  # codespell:ignore assembler
        blockscale=where.blockscale,
        commit=where.commit and where.commit + (" with changes" if where.dirty else ""),
        utc=where.utc,
    )


def problem_text(problem: Problem) -> str:
    """A problem as text.

    >>> problem_text(Problem(16, 512, 4096, b_1x128=False, fp32_out=False, sms=132))
    '16x512x4096 1x128 @ 128x128'
    """
    weights = "1x128" if problem.b_1x128 else "128x128"
    result = " fp32 +=" if problem.accumulate else " fp32" if problem.fp32_out else ""
    return f"{problem.m}x{problem.n}x{problem.k} 1x128 @ {weights}{result}"


def plan_text(plan: Plan) -> str:
    """A plan as short text, unique among the candidates of a problem.

    >>> plan_text(heuristics.choose(Problem(8192, 8192, 8192, b_1x128=False, fp32_out=False, sms=132))[0])
    '192x128'
    """
    tile = plan.tile
    unroll = f" run {tile.k_unroll}" if tile.k_unroll > 1 else ""
    # shared: stream-K
    return f"{tile.bm}x{tile.bn}{unroll}{' shared' if plan.stream_k else ''}"


# ---- measurement -----------------------------------------------------------------------------------------------------


def by_hopper(plan: Plan, operands: Operands, out: Tensor) -> None:
    """Launch the Hopper GEMM by a plan."""
    from ..gemm import _hopper  # late: it needs Triton

    _hopper.launch(operands.a, operands.b, out, None, accumulate=operands.acc is not None, plan=plan)


def measure_plans(
    problem: Problem,
    plans: Sequence[Plan],
    *,
    device: torch.device,
    budget: Budget = BUDGET,
    launch: Launch = by_hopper,
) -> dict[Plan, Timing | str]:
    """Timing of each plan, or its fault as text.

    Each plan is compared with the exact result, then all correct ones are timed in turns. As in a suite, operands and
    outputs rotate through more than L2, slices are CUDA graphs, and every round has its own order. All plans share one
    set of operands and outputs, so more plans need no more memory.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cached blocks of the previous problem have other sizes
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        formats = ("fp8_1x128", "fp8_1x128" if problem.b_1x128 else "fp8_128x128")
        product = (problem.m, problem.n, problem.k)
        make = functools.partial(make_operands, product, formats, device, accumulate=problem.accumulate)
        operands = make()

        def multiplied(plan: Plan, given: Operands) -> Tensor:
            out = _output(problem, given)
            launch(plan, given, out)
            return out

        faults = {plan: judge(functools.partial(multiplied, plan), operands).problem for plan in plans}
        sets = [operands, *(make() for _ in range(input_sets(moved_bytes(problem), device) - 1))]
        written = [(given, _output(problem, given)) for given in sets]

        def calls(plan: Plan) -> list[Call]:
            return [functools.partial(launch, plan, *one) for one in written]

        slices = {
            str(number): prepare(calls(plan), device, seconds=budget.seconds)
            for number, plan in enumerate(plans)
            if not faults[plan]
        }
        timings = timing.measure(slices, rounds=budget.rounds)
        return {plan: faults[plan] or timings[str(number)] for number, plan in enumerate(plans)}


def _output(problem: Problem, operands: Operands) -> Tensor:
    """The accumulator, or an empty output."""
    if operands.acc is not None:
        return operands.acc
    dtype = torch.float32 if problem.fp32_out else torch.bfloat16
    return torch.empty(problem.m, problem.n, dtype=dtype, device=operands.x.device)
