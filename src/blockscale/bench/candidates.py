"""Candidate plans of one GEMM on a GPU: each compared with the exact result, then all correct ones timed in turns.

As in a suite, operands and outputs rotate through more than L2, slices are CUDA graphs, and every round has its own
order. All plans share one set of operands and outputs, so more plans need no more memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..gemm.heuristics import Plan, Problem, moved_bytes
from .harness import Budget
from .products import Operands, judge, make_operands
from .timing import Timing, input_sets, measure, prepare

# launches a plan with operands and an output
Launch = Callable[[Plan, Operands, Tensor], None]
# GEMMs reach the power limit, and the clock follows with a delay: longer slices than for casts
BUDGET = Budget(11, 0.008)


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
    """Timing of each plan, or its fault as text."""
    if device.type != "cuda":
        return _measure(problem, plans, device, budget, launch)
    torch.cuda.empty_cache()  # cached blocks of the previous problem have other sizes
    with torch.cuda.device(device):
        return _measure(problem, plans, device, budget, launch)


def _measure(
    problem: Problem, plans: Sequence[Plan], device: torch.device, budget: Budget, launch: Launch
) -> dict[Plan, Timing | str]:
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
    slices = {
        str(number): prepare([functools.partial(launch, plan, *one) for one in written], device, seconds=budget.seconds)
        for number, plan in enumerate(plans)
        if not faults[plan]
    }
    timings = measure(slices, rounds=budget.rounds)
    return {plan: faults[plan] or timings[str(number)] for number, plan in enumerate(plans)}


def _output(problem: Problem, operands: Operands) -> Tensor:
    """The accumulator, or an empty output."""
    if operands.acc is not None:
        return operands.acc
    dtype = torch.float32 if problem.fp32_out else torch.bfloat16
    return torch.empty(problem.m, problem.n, dtype=dtype, device=operands.x.device)
