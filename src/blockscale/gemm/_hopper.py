"""The Gluon product of Hopper as a row of the table: the choice of a tile, the launch, the forecast."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
from torch import Tensor

from .. import call_recording, env
from ..errors import OptionError, message
from ..formats.tensor import BlockScaled
from ..hardware import DEFAULT_SM_COUNT, capability, gpu_name, sm_count
from ..library import empty
from ..registry import Forecast, Request, kernel
from . import tuned
from ._gluon import HAS_MULTICAST, gl
from ._hopper_kernel import scaled_mm_kernel
from ._hopper_launch import (
    Described,
    addressable,
    can_be_described,
    can_be_written,
    kernel_dtype,
    kind_of,
    start_kernel,
    whole,
)
from .epilogue import finish
from .heuristics import SUBTILE_M, Plan, Problem, bound, in_clusters, kernel_part
from .ops import reject_fp8_of_hopper, reject_fp8_of_vendor

SETTING = "BLOCKSCALE_MULTICAST"
PASS = ", and a pass over the output, whose rows start at no multiples of 16 bytes"
LANGUAGE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def _problem(request: Request, count: int) -> Problem:
    m, n, k = request.shape
    add = "accumulate" in request.options
    return Problem(m, n, k, request.formats[1] == "fp8_1x128", request.dtype == torch.float32, count, add)


def problem_of(request: Request) -> tuple[Problem, str]:
    """What a request asks of this GPU, or of an H200 where no such one is here: then the second says so."""
    if torch.cuda.is_available() and capability("cuda") == request.capability:
        return _problem(request, sm_count(torch.device("cuda"))), ""
    elsewhere = f", for {DEFAULT_SM_COUNT} multiprocessors, an H200's: none is here"
    return _problem(request, DEFAULT_SM_COUNT), elsewhere


def _choose(problem: Problem, gpu: str) -> tuned.Choice:
    """The plan to launch on a GPU of that name, in clusters where these are demanded."""
    chosen = tuned.choose(problem, gpu)
    if not env.flag(SETTING):
        return chosen
    if not HAS_MULTICAST:
        rule = "clusters need Triton 3.9 or newer"
        raise OptionError(message(f"{SETTING}=1", rule=rule, fix="unset it, or install a newer Triton"))
    return chosen._replace(plan=in_clusters(chosen.plan, problem))


def forecast(request: Request) -> Forecast:
    """The plan that `scaled_mm` would take, on this GPU if it is such a one."""
    problem, elsewhere = problem_of(request)
    part, pass_us = kernel_part(problem)
    chosen = _choose(part, "" if elsewhere else gpu_name(torch.device("cuda")))
    apart = ", the time without clusters, which change it by -5 to 3 %" if chosen.plan.tile.cluster > 1 else ""
    flops = 2 * problem.m * problem.n * problem.k
    note = chosen.origin + apart + (PASS if pass_us else "") + elsewhere
    return Forecast(chosen.plan.label, chosen.us + pass_us, flops, *bound(problem), note)


def precompile_key(request: Request) -> Hashable:
    """All that the compiled kernel depends on."""
    meta = torch.device("meta")
    part, _ = kernel_part(_problem(request, sm_count(meta)))
    plan = _choose(part, gpu_name(meta)).plan
    return plan.tile, plan.stream_k, kind_of(part.n), request.formats, request.dtype, request.options


def _defer(request: Request) -> str | None:
    """To the vendor's product, where it serves without a second pass: for 65 to 128 rows its tiles are the better ones
    wherever ours are 128x128, and up to 96 rows also for weights with scales 1x128 (docs/design/gemm.md)."""
    rows, most = request.shape[0], 2 * SUBTILE_M if request.formats[1] == "fp8_128x128" else 96
    if not SUBTILE_M < rows <= most or request.options or request.dtype == torch.float16:
        return None
    problem, elsewhere = problem_of(request)
    tile = _choose(problem, "" if elsewhere else gpu_name(torch.device("cuda"))).plan.tile
    if tile.bm != 2 * SUBTILE_M or tile.cluster > 1 or reject_fp8_of_vendor(request) is not None:
        return None
    return f"F.scaled_mm is 4 to 30 % quicker for {rows} rows where this takes tiles of 128x128"


@kernel(
    "gemm",
    "hopper",
    sm=(90, 90),
    formats=[("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")],
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    priority=25,  # above the vendor's: docs/design/gemm.md has both
    reject=reject_fp8_of_hopper,
    defer=_defer,
    forecast=forecast,
    precompile_key=precompile_key,
)
def scaled_mm(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: warp-specialised FP8 product, promoted after every 128 of K"""
    direct = can_be_written(out)
    m, n, k = a.rows, b.rows, a.length
    dtype = kernel_dtype(out, accumulate=accumulate, direct=direct)
    wide, add = dtype == torch.float32, accumulate and direct
    problem = Problem(m, n, k, not b.spec.is_2d, wide, sm_count(out.device), add)
    plan = _choose(problem, gpu_name(out.device)).plan
    if direct:
        return launch(a, b, out, bias, accumulate=accumulate, plan=plan)
    # the copy engine cannot write there: N is odd, or it is a buffer of the caller's
    product = addressable(out.shape, dtype, out.device)
    launch(a, b, product, bias, accumulate=False, plan=plan)
    finish(product, out, None, accumulate=accumulate)


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan) -> None:
    """The product by one plan."""
    assert can_be_described(out), "a copy of the output would be written, and lost"
    tile, vector = plan.tile, not b.spec.is_2d
    m, n, k = a.rows, b.rows, a.length
    a_scale, b_scale = a.scale.mT, b.scale.mT if vector else b.scale
    a_layout, b_layout, scale_layout, out_layout = shared_layouts(tile.bn, out.dtype, tile.cluster)
    counters, pieces = workspace_for(plan, out.device) if plan.stream_k else (out, out)
    start_kernel(
        scaled_mm_kernel,
        plan.ctas,
        (
            Described(whole(a.data, k), (min(tile.a_rows, tile.bm // tile.a_loads), 128), a_layout),
            Described(whole(b.data, k), (tile.bn, 128), b_layout),
            Described(a_scale, (1, tile.span), scale_layout),
            Described(b_scale if vector else a_scale, (1, tile.bn), scale_layout),
            Described(out, (SUBTILE_M * tile.cluster, tile.bn), out_layout),
        ),
        (b_scale, None if bias is None else bias.contiguous(), counters, pieces),
        (m, n, k, b_scale.stride(0), plan.waves),
        (tile, vector, bias is not None, accumulate, plan.stream_k),
        cluster=tile.cluster,
    )


def workspace_for(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counters, one for each part of a shared tile, and room for a piece of a tile from each program, which goes back
    to the allocator after the call."""
    return _counters(device), empty((plan.ctas * plan.tile.bm * plan.tile.bn,), torch.float32, device)


def _counters(device: torch.device) -> Tensor:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        # a graph may run beside other work, so it has some of its own
        return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    if (found := _COUNTERS.get((device, stream))) is None:
        _COUNTERS[device, stream] = found = torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    call_recording.note_persistent_buffer(found, functools.partial(_counters, device))
    return found


# By device and stream: a launch leaves them at zero, and launches of one stream follow each other.
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
MOST_COUNTERS = 1024  # parts of shared tiles: four for each of fewer than two rounds of tiles


@functools.lru_cache(maxsize=64)
def shared_layouts(bn: int, dtype: torch.dtype, cluster: int = 1) -> tuple[object, ...]:
    """Of tiles of a, b, scales and the output in shared memory."""
    shared = gl.NVMMASharedLayout
    # of two multiprocessors one has the upper half of the rows, or both have all
    split, same = ([[1, 0]], [[0, 0]]) if cluster == 2 else ([], [])
    return (
        shared.get_default_for([SUBTILE_M * cluster, 128], gl.float8e4nv, cga_layout=split),
        shared.get_default_for([bn, 128], gl.float8e4nv, cga_layout=same),
        shared(swizzle_byte_width=0, element_bitwidth=32, rank=2, cga_layout=same),
        shared.get_default_for([SUBTILE_M * cluster, bn], LANGUAGE[dtype], cga_layout=split),
    )
