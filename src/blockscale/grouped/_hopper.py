"""Registry entries of the Gluon grouped FP8 GEMMs for Hopper: choice of a tile, launch, forecast."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..gemm._hopper import (
    PASS,
    empty_for_tma,
    is_tma_addressable,
    is_tma_writable,
    kernel_dtype,
    specialization_of,
    start_kernel,
    unpadded,
)
from ..gemm.heuristics import SUBTILE_M
from ..gemm.ops import finish
from ..hardware import DEFAULT_SM_COUNT, capability, current_cuda_device, sm_count
from ..registry import Forecast, Request, kernel
from . import heuristics
from ._hopper_kernel import grouped_mm_kernel
from ._schedule import MAX_GROUPS, group_spans, row_tiles
from .heuristics import FP8, Model, Problem, Tile, choose
from .ops import Inputs


def _problem(request: Request, sms: int) -> Problem:
    m, n, k, groups = request.shape
    accumulate = "accumulate" in request.options
    return Problem(m, n, k, groups, request.op == "k_grouped", request.dtype == torch.float32, sms, accumulate)


def forecast(request: Request, model: Model = FP8) -> Forecast:
    """Chosen tile and predicted time, on this GPU if it has the requested capability, else on an H200."""
    here = torch.cuda.is_available() and capability("cuda") == request.capability
    sms = sm_count(torch.device("cuda")) if here else DEFAULT_SM_COUNT
    problem = _problem(request, sms)
    kernel_problem, pass_us = heuristics.kernel_part(problem)
    tile, us = choose(model, kernel_problem)
    note = heuristics.ASSUMED + (PASS if pass_us else "")
    note += "" if here else f", for {sms} SMs, an H200's: none is here"
    return Forecast(tile.label, us + pass_us, problem.flops, *heuristics.bound(problem), note)


def precompile_key(request: Request, model: Model = FP8) -> Hashable:
    """Everything the compiled kernel depends on."""
    kernel_problem, _ = heuristics.kernel_part(_problem(request, sm_count(torch.device("meta"))))
    tile, _ = choose(model, kernel_problem)
    return tile, specialization_of(kernel_problem.n), request.op, request.formats, request.dtype, request.options


def reject(request: Request) -> str | None:
    """Reason why no Gluon grouped GEMM takes the request, or None."""
    groups = request.shape[3]
    if 0 in request.shape[2:]:
        return "takes no empty operands"
    if "strided" in request.options:
        return "needs scales with the strides of their layout, and these are copies without"
    return f"takes at most {MAX_GROUPS} groups, these are {groups}" if groups > MAX_GROUPS else None


_entry = functools.partial(
    kernel,
    backend="hopper",
    sm=(90, 90),
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    priority=25,
    reject=reject,
    forecast=forecast,
    precompile_key=precompile_key,
)


@_entry("m_grouped", formats=[("fp8_1x128", "fp8_128x128")])
@_entry("k_grouped", formats=[("fp8_1x128", "fp8_1x128")])
def scaled_grouped_mm(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """Gluon: warp-specialised grouped FP8 GEMM, promoted after every 128 of K"""
    run(inputs, out, accumulate=accumulate, model=FP8, launch=launch)


def run(inputs: Inputs, out: Tensor, *, accumulate: bool, model: Model, launch: Callable[..., None]) -> None:
    """Choose a tile and launch into `out`, or into a buffer and a second pass if TMA cannot store to `out`."""
    if out.numel() == 0:
        return
    a, b, offs, starts, _ = inputs
    direct = _is_matrix(out) and is_tma_writable(out.view(-1, out.shape[-1]))
    dtype = kernel_dtype(out, accumulate=accumulate, direct=direct)
    fp32_out, in_kernel = dtype == torch.float32, accumulate and direct  # in_kernel: c += in the epilogue
    sizes = (a.rows, b.rows, a.length, offs.shape[0])
    tile, _ = choose(model, Problem(*sizes, len(b.shape) == 2, fp32_out, sm_count(out.device), in_kernel))
    with current_cuda_device(out.device):  # kernels launch on the current device
        if direct:
            return launch(inputs, out.view(-1, out.shape[-1]), tile, accumulate=accumulate)
        # TMA cannot store to `out`: its rows are not aligned to 16 bytes (odd N, or a caller's buffer)
        product = empty_for_tma((out.shape[:-1].numel(), out.shape[-1]), dtype, out.device)
        if accumulate and starts is not None:
            product.zero_()  # the kernel does not write rows of no group; the second pass adds all rows
        launch(inputs, product, tile, accumulate=False)
        finish(product.unflatten(0, out.shape[:-1]), out, None, accumulate=accumulate)


def _is_matrix(out: Tensor) -> bool:
    """Whether `out` can be viewed as one matrix (k-grouped: [G * M, N])."""
    return out.dim() == 2 or out.stride(0) == out.shape[1] * out.stride(1)


def launch(inputs: Inputs, out: Tensor, tile: Tile, *, accumulate: bool) -> None:
    """Launch the kernel with a given tile. out: a matrix; for k-grouped, the outputs of all groups stacked."""
    assert is_tma_addressable(out), "TMA would write to a copy of the output"
    a, b, offs, starts, bias = inputs
    k_grouped, groups = len(b.shape) == 2, offs.shape[0]
    m, n, k = a.rows, b.rows, a.length
    a_codes, b_codes, a_scale = unpadded(a.data, k), b.data, a.scale.mT
    if k_grouped:
        tile_list, b_scale, strides = group_spans(offs), b.scale.mT, (0, 0)
    else:
        tile_list = row_tiles(offs, m, tile.bm, starts=starts)
        b_codes, b_scale, strides = b_codes.flatten(0, 1), b.scale, (b.scale.stride(1), b.scale.stride(0))
    start_kernel(
        grouped_mm_kernel,
        sm_count(out.device),
        (
            (a_codes, (tile.bm // tile.a_loads, 128)),
            (a_codes, (SUBTILE_M, 128)),
            (unpadded(b_codes, k), (tile.bn, 128)),
            (a_scale, (1, tile.span)),
            (b_scale if k_grouped else a_scale, (1, tile.bn)),
            (out, (SUBTILE_M, tile.bn)),
        ),
        (tile_list, out, b_scale, None if bias is None else bias.contiguous()),
        (groups, m, n, k, *strides, out.stride(0)),
        (tile, k_grouped, bias is not None, accumulate),
    )
