"""Plans of one product on a GPU: each held against the exact product, then all that are right timed in turns.

As in a suite: operands and outputs rotate through more than the second-level cache, slices are CUDA graphs, and every
round has its own order. All plans share one set of operands and outputs, so their number costs no memory.
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

# a plan, operands, and where the product goes
Launch = Callable[[Plan, Operands, Tensor], None]
# products draw all the power there is, and the clock follows with a delay
BUDGET = Budget(11, 0.008)


def by_hopper(plan: Plan, operands: Operands, out: Tensor) -> None:
    """Hopper's product by that plan."""
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
    """The time of each plan, or what is wrong with it."""
    if device.type != "cuda":
        return _measure(problem, plans, device, budget, launch)
    torch.cuda.empty_cache()  # of the problem before, whose tensors had other sizes
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
    """What a product is added to, or room for it."""
    if operands.acc is not None:
        return operands.acc
    dtype = torch.float32 if problem.fp32_out else torch.bfloat16
    return torch.empty(problem.m, problem.n, dtype=dtype, device=operands.x.device)
