"""FP8 blockwise GEMM for Hopper, registry entry of the Gluon kernel: choice of the plan, launch, forecast.

Also the TMA descriptors and launches of all Gluon kernels for Hopper, dense and grouped, with the chosen ptxas.
"""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..formats.layout import round_up
from ..formats.tensor import BlockScaled
from ..hardware import DEFAULT_SM_COUNT, capability, gpu_name, sm_count
from ..launch import launch as launch_kernel
from ..launch import note_persistent_buffer
from ..library import empty
from ..registry import Forecast, Request, kernel
from . import _ptxas, tuned
from ._gluon import TensorDescriptor, gl
from ._hopper_kernel import scaled_mm_kernel
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


# ---- TMA descriptors and launches ------------------------------------------------------------------------------------

LANGUAGE = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
Block = tuple[int, int]


def start_kernel(
    kernel: Any,
    ctas: int,
    tensors: tuple[tuple[Tensor, Block], ...],
    pointers: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[object, ...],
) -> None:
    """Launch a kernel whose arguments are descriptors, pointers, integers and constants, in that order.

    tensors: matrices that TMA reads or writes, and their blocks.  numbers and constants: they follow from the layouts
    of the tensors and from the operator's arguments.
    """
    launch_kernel(
        kernel, (ctas,), (*(descriptor(*one) for one in tensors), *pointers), (*numbers, *constants),
        through=_ptxas.launch, num_warps=4,
        enable_fp_fusion=True,  # the contract promotes by fused multiply-add
    )  # fmt: skip


def is_tma_addressable(tensor: Tensor) -> bool:
    """Whether TMA can address the matrix: contiguous rows that start at multiples of 16 bytes."""
    size = tensor.element_size()
    return tensor.stride(1) == 1 and tensor.stride(0) * size % 16 == 0 and tensor.data_ptr() % 16 == 0


def is_tma_writable(tensor: Tensor) -> bool:
    """Whether TMA can store to the matrix and to nothing else: rows also end at multiples of 16 bytes. Seen on an H200:
    past the end of a shorter row TMA overwrites its neighbours up to the next multiple."""
    return is_tma_addressable(tensor) and tensor.shape[1] * tensor.element_size() % 16 == 0


def kernel_dtype(out: Tensor, *, accumulate: bool, direct: bool) -> torch.dtype:
    """Dtype the kernel writes: the output's, or fp32 if a second pass accumulates."""
    return torch.float32 if accumulate and not direct else out.dtype


def empty_for_tma(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized matrix that TMA can address: rows are padded to multiples of 16 bytes."""
    rows, columns = shape
    step = round_up(columns, max(1, 16 // dtype.itemsize))
    # TMA also writes the padding of the last row, so it is allocated
    return torch.empty(rows, step, dtype=dtype, device=device)[:, :columns]


def specialization_of(size: int) -> int:
    """Triton's specialization class of an integer: 1, 16 for multiples of 16, else 0."""
    return 1 if size == 1 else 0 if size % 16 else 16


def unpadded(codes: Tensor, length: int) -> Tensor:
    """Codes without the padding of their rows, [rows, length]."""
    return codes if codes.shape[1] == length else codes[:, :length]


def descriptor(tensor: Tensor, block: Block) -> TensorDescriptor:
    """TMA descriptor of the tensor, or of a copy if TMA cannot address it."""
    if not is_tma_addressable(tensor):
        tensor = empty_for_tma(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
    layout = _shared_layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


@functools.lru_cache(maxsize=256)
def _shared_layout(block: Block, dtype: torch.dtype) -> object:
    """Layout of a block in shared memory: with the widest swizzle, or without one if it is a row of scales."""
    return gl.NVMMASharedLayout.get_default_for(list(block), LANGUAGE[dtype])
