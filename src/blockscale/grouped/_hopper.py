"""The Gluon grouped products of Hopper as rows of the table: the choice of a tile, the launch, the forecast."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..formats.tensor import BlockScaled
from ..gemm._hopper import PASS, shared_layouts
from ..gemm._hopper_launch import (
    TmaTensor,
    empty_for_tma,
    is_tma_addressable,
    is_tma_writable,
    kernel_dtype,
    specialization_of,
    start_kernel,
    unpadded,
)
from ..gemm.epilogue import finish
from ..gemm.heuristics import SUBTILE_M
from ..hardware import DEFAULT_SM_COUNT, capability, made_current, sm_count
from ..registry import Forecast, Request, kernel
from . import heuristics
from ._hopper_kernel import grouped_mm_kernel
from ._schedule import MOST_GROUPS, group_spans, row_tiles
from .heuristics import Problem, Tile

Choose = Callable[[Problem], tuple[Tile, float]]


def _problem(request: Request, count: int) -> Problem:
    m, n, k, groups = request.shape
    add = "accumulate" in request.options
    return Problem(m, n, k, groups, request.op == "k_grouped", request.dtype == torch.float32, count, add)


def forecast(request: Request, choose: Choose = heuristics.choose) -> Forecast:
    """The tile that would be taken, on this GPU if it is such a one."""
    here = torch.cuda.is_available() and capability("cuda") == request.capability
    count = sm_count(torch.device("cuda")) if here else DEFAULT_SM_COUNT
    problem = _problem(request, count)
    part, pass_us = heuristics.kernel_part(problem)
    tile, us = choose(part)
    note = heuristics.ASSUMED + (PASS if pass_us else "")
    note += "" if here else f", for {count} multiprocessors, an H200's: none is here"
    return Forecast(tile.label, us + pass_us, problem.flops, *heuristics.bound(problem), note)


def precompile_key(request: Request, choose: Choose = heuristics.choose) -> Hashable:
    """All that the compiled kernel depends on."""
    part, _ = heuristics.kernel_part(_problem(request, sm_count(torch.device("meta"))))
    return choose(part)[0], specialization_of(part.n), request.op, request.formats, request.dtype, request.options


def reject(request: Request) -> str | None:
    """What no grouped product of these takes."""
    groups = request.shape[3]
    if 0 in request.shape[2:]:
        return "takes no empty operands"
    if "strided" in request.options:
        return "wants scales with the strides of their layout, and these are copies without"
    return f"takes at most {MOST_GROUPS} groups, these are {groups}" if groups > MOST_GROUPS else None


@kernel(
    "m_grouped",
    "hopper",
    sm=(90, 90),
    formats=[("fp8_1x128", "fp8_128x128")],
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    priority=25,
    reject=reject,
    forecast=forecast,
    precompile_key=precompile_key,
)
def m_grouped(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None,
    accumulate: bool,
    starts: Tensor | None = None,
) -> None:
    """Gluon: warp-specialised FP8 product of groups of rows, promoted after every 128 of K"""
    serve(a, b, offs, out, bias, accumulate=accumulate, choose=heuristics.choose, launch=launch, starts=starts)


@kernel(
    "k_grouped",
    "hopper",
    sm=(90, 90),
    formats=[("fp8_1x128", "fp8_1x128")],
    layouts={"fp8_1x128": "mn_major"},
    priority=25,
    reject=reject,
    forecast=forecast,
    precompile_key=precompile_key,
)
def k_grouped(
    a: BlockScaled, b: BlockScaled, offs: Tensor, out: Tensor, *, bias: None = None, accumulate: bool
) -> None:
    """Gluon: warp-specialised FP8 product over groups of tokens, promoted after every 128 of them"""
    serve(a, b, offs, out, None, accumulate=accumulate, choose=heuristics.choose, launch=launch)


def serve(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out: Tensor,
    bias: Tensor | None,
    *,
    accumulate: bool,
    choose: Choose,
    launch: Callable[..., None],
    starts: Tensor | None = None,
) -> None:
    """By the tile that is chosen, into the output, or through a buffer where the copy engine cannot write that."""
    if out.numel() == 0:
        return
    direct = _is_matrix(out) and is_tma_writable(out.view(-1, out.shape[-1]))
    dtype = kernel_dtype(out, accumulate=accumulate, direct=direct)
    wide, add = dtype == torch.float32, accumulate and direct
    sizes = (a.rows, b.rows, a.length, offs.shape[0])
    tile, _ = choose(Problem(*sizes, len(b.shape) == 2, wide, sm_count(out.device), add))
    with made_current(out.device):  # kernels go to the current device
        if direct:
            matrix = out.view(-1, out.shape[-1])
            return launch(a, b, offs, matrix, bias, accumulate=accumulate, tile=tile, starts=starts)
        # the copy engine cannot write there: N is odd, or it is a buffer of the caller's
        product = empty_for_tma((out.shape[:-1].numel(), out.shape[-1]), dtype, out.device)
        if accumulate and starts is not None:
            product.zero_()  # rows of no group are not written, and are added all the same
        launch(a, b, offs, product, bias, accumulate=False, tile=tile, starts=starts)
        finish(product.unflatten(0, out.shape[:-1]), out, None, accumulate=accumulate)


def _is_matrix(out: Tensor) -> bool:
    """Whether the matrices of a k-grouped result lie below each other, as one."""
    return out.dim() == 2 or out.stride(0) == out.shape[1] * out.stride(1)


def launch(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out: Tensor,
    bias: Tensor | None,
    *,
    accumulate: bool,
    tile: Tile,
    starts: Tensor | None = None,
) -> None:
    """The product by one tile, into a matrix: the results of all groups below each other."""
    assert is_tma_addressable(out), "a copy of the output would be written, and lost"
    k_grouped, groups = len(b.shape) == 2, offs.shape[0]
    m, n, k = a.rows, b.rows, a.length
    a_codes, b_codes, a_scale = unpadded(a.data, k), b.data, a.scale.mT
    a_layout, b_layout, scale_layout, out_layout = shared_layouts(tile.bn, out.dtype)
    if k_grouped:
        listed, b_scale, steps = group_spans(offs), b.scale.mT, (0, 0)
    else:
        listed = row_tiles(offs, m, tile.bm, starts=starts)
        b_codes, b_scale, steps = b_codes.flatten(0, 1), b.scale, (b.scale.stride(1), b.scale.stride(0))
    start_kernel(
        grouped_mm_kernel,
        sm_count(out.device),
        (
            TmaTensor(a_codes, (tile.bm // tile.a_loads, 128), a_layout),
            TmaTensor(a_codes, (SUBTILE_M, 128), a_layout),
            TmaTensor(unpadded(b_codes, k), (tile.bn, 128), b_layout),
            TmaTensor(a_scale, (1, tile.span), scale_layout),
            TmaTensor(b_scale if k_grouped else a_scale, (1, tile.bn), scale_layout),
            TmaTensor(out, (SUBTILE_M, tile.bn), out_layout),
        ),
        (listed, out, b_scale, None if bias is None else bias.contiguous()),
        (groups, m, n, k, *steps, out.stride(0)),
        (tile, k_grouped, bias is not None, accumulate),
    )
