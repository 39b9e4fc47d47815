"""FP8 blockwise GEMM for Hopper with few rows (M <= 32), registry entry of the Gluon kernel: choice and launch."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..formats.tensor import BlockScaled
from ..hardware import sm_count
from ..registry import Forecast, Request, kernel
from ._hopper import problem_of, specialization_of, start_kernel, unpadded
from ._hopper_rows_kernel import few_rows_kernel
from .heuristics import (
    MAX_FEW_ROWS,
    Plan,
    Problem,
    bound,
    choose,
    choose_few_rows,
    few_rows_tile,
    few_rows_win,
    kernel_problem,
    token_scales,
)
from .ops import reject_fp8_of_hopper


def _reject(request: Request) -> str | None:
    if request.shape[0] > MAX_FEW_ROWS:
        return f"takes at most {MAX_FEW_ROWS} rows, these are {request.shape[0]}"
    return reject_fp8_of_hopper(request)


def _defer(request: Request) -> str | None:
    problem, _ = problem_of(request)
    if few_rows_win(problem):
        return None
    launched, pass_us = kernel_problem(problem)
    hopper_us = choose(launched)[1] + pass_us
    return f"would take {choose_few_rows(problem)[1]:.0f} us by the model, backend hopper {hopper_us:.0f}"


def forecast(request: Request) -> Forecast:
    """Plan and time of `scaled_mm`."""
    problem, where = problem_of(request)
    plan, us = choose_few_rows(problem)
    note = "by the model, which is fitted to one H200" + where
    return Forecast(plan.label, us, 2 * problem.m * problem.n * problem.k, *bound(problem), note)


def precompile_key(request: Request) -> Hashable:
    """Everything that the compiled kernel depends on."""
    m, n, _ = request.shape
    return few_rows_tile(m), specialization_of(n), request.formats, request.dtype, request.options


@kernel(
    "gemm",
    "hopper_rows",
    sm=(90, 90),
    formats=[("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")],
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    priority=26,
    reject=_reject,
    defer=_defer,
    forecast=forecast,
    precompile_key=precompile_key,
)
def scaled_mm(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: FP8 GEMM of few rows, operands swapped: weights are the MMA's M"""
    fp32_out = out.dtype == torch.float32
    problem = Problem(a.rows, b.rows, a.length, not b.spec.is_2d, fp32_out, sm_count(out.device), accumulate)
    plan, _ = choose_few_rows(problem)
    launch(a, b, out, bias, accumulate=accumulate, plan=plan)


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan) -> None:
    """Launch the GEMM with a given plan."""
    tile, w_1x128 = plan.tile, not b.spec.is_2d
    m, n, k = a.rows, b.rows, a.length
    a_scale, b_scale = a.scale.mT, b.scale.mT if w_1x128 else b.scale
    rows = tile.bm // tile.a_loads
    start_kernel(
        few_rows_kernel,
        plan.ctas,
        (
            (unpadded(b.data, k), (rows, 128)),
            (unpadded(a.data, k), (tile.bn, 128)),
            (b_scale if w_1x128 else a_scale, (1, tile.span)),
            (a_scale, (1, token_scales(tile.bn))),
        ),
        (out, b_scale, None if bias is None else bias.contiguous()),
        (m, n, k, b_scale.stride(0), *out.stride()),
        (tile, w_1x128, bias is not None, accumulate),
    )
