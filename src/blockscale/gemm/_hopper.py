"""FP8 blockwise GEMM for Hopper, registry entry of the Gluon kernel: choice of the plan, launch, forecast."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..formats.tensor import BlockScaled
from ..hardware import DEFAULT_SM_COUNT, capability, gpu_name, sm_count
from ..launch import note_persistent_buffer
from ..library import empty
from ..registry import Forecast, Request, kernel
from . import tuned
from ._hopper_kernel import scaled_mm_kernel
from ._hopper_launch import (
    empty_for_tma,
    is_tma_addressable,
    is_tma_writable,
    kernel_dtype,
    specialization_of,
    start_kernel,
    unpadded,
)
from .heuristics import SUBTILE_M, Plan, Problem, bound, kernel_problem
from .ops import finish, reject_fp8_of_hopper, reject_fp8_of_vendor

PASS = ", and a pass over the output, whose rows do not start at multiples of 16 bytes"
Choose = Callable[[Problem, str], tuned.Choice]


def _problem(request: Request, count: int) -> Problem:
    m, n, k = request.shape
    accumulates = "accumulate" in request.options
    return Problem(m, n, k, request.formats[1] == "fp8_1x128", request.dtype == torch.float32, count, accumulates)


def problem_of(request: Request) -> tuple[Problem, str]:
    """Problem of a request on this GPU, or on an H200 if this GPU is not a Hopper; then the string says so."""
    if torch.cuda.is_available() and capability("cuda") == request.capability:
        return _problem(request, sm_count(torch.device("cuda"))), ""
    elsewhere = f", for an H200 with {DEFAULT_SM_COUNT} SMs: there is no Hopper GPU here"
    return _problem(request, DEFAULT_SM_COUNT), elsewhere


def forecast(request: Request, choose: Choose = tuned.choose) -> Forecast:
    """Chosen plan and predicted time, for this GPU if it is a Hopper."""
    problem, elsewhere = problem_of(request)
    launched, pass_us = kernel_problem(problem)
    chosen = choose(launched, "" if elsewhere else gpu_name(torch.device("cuda")))
    flops = 2 * problem.m * problem.n * problem.k
    note = chosen.origin + (PASS if pass_us else "") + elsewhere
    return Forecast(chosen.plan.label, chosen.us + pass_us, flops, *bound(problem), note)


def precompile_key(request: Request, choose: Choose = tuned.choose) -> Hashable:
    """Everything that the compiled kernel depends on."""
    meta = torch.device("meta")
    launched, _ = kernel_problem(_problem(request, sm_count(meta)))
    plan = choose(launched, gpu_name(meta)).plan
    return plan.tile, plan.stream_k, specialization_of(launched.n), request.formats, request.dtype, request.options


def _defer(request: Request) -> str | None:
    """Defer to F.scaled_mm where it needs no second pass: for 65 to 128 rows its tiles beat ours of 128x128, and for
    weights with scales 1x128 up to 96 rows (docs/design/gemm.md)."""
    rows, most = request.shape[0], 2 * SUBTILE_M if request.formats[1] == "fp8_128x128" else 96
    if not SUBTILE_M < rows <= most or request.options or request.dtype == torch.float16:
        return None
    problem, elsewhere = problem_of(request)
    tile = tuned.choose(problem, "" if elsewhere else gpu_name(torch.device("cuda"))).plan.tile
    if tile.bm != 2 * SUBTILE_M or reject_fp8_of_vendor(request) is not None:
        return None
    return f"F.scaled_mm is 4 to 30 % quicker for {rows} rows where this takes tiles of 128x128"


@kernel(
    "gemm",
    "hopper",
    sm=(90, 90),
    formats=[("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")],
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    priority=25,  # above F.scaled_mm: docs/design/gemm.md has both times
    reject=reject_fp8_of_hopper,
    defer=_defer,
    forecast=forecast,
    precompile_key=precompile_key,
)
def scaled_mm(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: warp-specialized FP8 GEMM, promoted after every 128 of K"""
    run(a, b, out, bias, accumulate=accumulate, choose=tuned.choose, launch=launch)


def run(
    a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None,
    *, accumulate: bool, choose: Choose, launch: Callable[..., None],
) -> None:  # fmt: skip
    """Choose a plan and launch into `out`, or into a buffer and a second pass if TMA cannot store to `out`."""
    direct = is_tma_writable(out)
    dtype = kernel_dtype(out, accumulate=accumulate, direct=direct)
    fp32_out, accumulates = dtype == torch.float32, accumulate and direct
    b_1x128 = b.format == "fp8_1x128"
    problem = Problem(a.rows, b.rows, a.length, b_1x128, fp32_out, sm_count(out.device), accumulates)
    plan = choose(problem, gpu_name(out.device)).plan
    if direct:
        return launch(a, b, out, bias, accumulate=accumulate, plan=plan)
    # TMA cannot store there: rows are not multiples of 16 bytes, or the buffer is not aligned
    product = empty_for_tma(out.shape, dtype, out.device)
    launch(a, b, product, bias, accumulate=False, plan=plan)
    finish(product, out, None, accumulate=accumulate)


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan) -> None:
    """Launch the GEMM with a given plan."""
    assert is_tma_addressable(out), "the kernel would write a copy of the output, which is lost"
    tile, b_1x128 = plan.tile, not b.spec.is_2d
    m, n, k = a.rows, b.rows, a.length
    a_scale, b_scale = a.scale.mT, b.scale.mT if b_1x128 else b.scale
    counters, partials = workspace_for(plan, out.device) if plan.stream_k else (out, out)
    start_kernel(
        scaled_mm_kernel,
        plan.ctas,
        (
            (unpadded(a.data, k), (min(tile.a_rows, tile.bm // tile.a_loads), 128)),
            (unpadded(b.data, k), (tile.bn, 128)),
            (a_scale, (1, tile.span)),
            (b_scale if b_1x128 else a_scale, (1, tile.bn)),
            (out, (SUBTILE_M, tile.bn)),
        ),
        (b_scale, None if bias is None else bias.contiguous(), counters, partials),
        (m, n, k, b_scale.stride(0), plan.waves),
        (tile, b_1x128, bias is not None, accumulate, plan.stream_k),
    )


def workspace_for(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Stream-K workspace: a counter per m_subtile of a split tile, and one fp32 partial tile per CTA. The partials go
    back to the allocator after the call."""
    return _counters(device), empty((plan.ctas * plan.tile.bm * plan.tile.bn,), torch.float32, device)


def _counters(device: torch.device) -> Tensor:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        # a CUDA graph may run beside other work, so it has its own counters
        return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    if (found := _COUNTERS.get((device, stream))) is None:
        _COUNTERS[device, stream] = found = torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    note_persistent_buffer(found, functools.partial(_counters, device))
    return found


# By device and stream: a launch leaves them at zero, and launches of one stream do not overlap.
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
MOST_COUNTERS = 1024  # m_subtiles of split tiles: up to four for each tile of the last, incomplete wave
