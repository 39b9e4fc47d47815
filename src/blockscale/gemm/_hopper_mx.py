"""MXFP8 GEMM for Hopper, registry entry of the Gluon kernel: choice of the plan, launch, forecast."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats.tensor import BlockScaled
from ..hardware import sm_count
from ..registry import Forecast, Request, kernel
from ._gluon import gl
from ._hopper import LANGUAGE, PASS, problem_of
from ._hopper_launch import (
    TmaTensor,
    empty_for_tma,
    is_tma_addressable,
    is_tma_writable,
    kernel_dtype,
    specialization_of,
    start_kernel,
    unpadded,
)
from ._hopper_mx_kernel import scaled_mm_mx_kernel
from .heuristics import SUBTILE_M, Plan, Problem, bound, kernel_problem
from .heuristics_mx import choose
from .ops import finish, reject_fp8_of_hopper
from .tuned import Choice

CODES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
_ROWWISE, _WEIGHT = ("mxfp8_e4m3", "mxfp8_e5m2"), "mxfp8_e4m3_128x128"
PAIRS = [(name, _WEIGHT) for name in _ROWWISE]
LAYOUTS = dict.fromkeys((*_ROWWISE, _WEIGHT), "plain")


def forecast(request: Request) -> Forecast:
    """Plan and time of `scaled_mm_mx`, for this GPU if it is a Hopper."""
    problem, elsewhere = problem_of(request)
    launched, pass_us = kernel_problem(problem)
    chosen = Choice(*choose(launched), entry=None)
    flops = 2 * problem.m * problem.n * problem.k
    note = chosen.origin + (PASS if pass_us else "") + elsewhere
    return Forecast(chosen.plan.label, chosen.us + pass_us, flops, *bound(problem), note)


def precompile_key(request: Request) -> Hashable:
    """Everything that the compiled kernel depends on."""
    accumulates, count = "accumulate" in request.options, sm_count(torch.device("meta"))
    launched, _ = kernel_problem(Problem(*request.shape, False, request.dtype == torch.float32, count, accumulates))
    return choose(launched)[0].tile, specialization_of(launched.n), request.formats, request.dtype, request.options


@kernel(
    "gemm",
    "hopper",
    sm=(90, 90),
    formats=PAIRS,
    layouts=LAYOUTS,
    priority=12,
    reject=reject_fp8_of_hopper,
    forecast=forecast,
    precompile_key=precompile_key,
)
def scaled_mm_mx(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: warp-specialized MXFP8 GEMM, promoted after every 32 of K"""
    direct = is_tma_writable(out)
    dtype = kernel_dtype(out, accumulate=accumulate, direct=direct)
    fp32_out, accumulates = dtype == torch.float32, accumulate and direct
    plan, _ = choose(Problem(a.rows, b.rows, a.length, False, fp32_out, sm_count(out.device), accumulates))
    if direct:
        return launch(a, b, out, bias, accumulate=accumulate, plan=plan)
    # TMA cannot store there: rows are not multiples of 16 bytes, or the buffer is not aligned
    product = empty_for_tma(out.shape, dtype, out.device)
    launch(a, b, product, bias, accumulate=False, plan=plan)
    finish(product, out, None, accumulate=accumulate)


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan) -> None:
    """Launch the GEMM with a given plan."""
    assert is_tma_addressable(out), "the kernel would write a copy of the output, which is lost"
    assert {a.scale_layout, b.scale_layout} == {"plain"}
    tile, k = plan.tile, a.length
    b_scale, a_layout = b.scale.view(torch.uint8), shared_layout(SUBTILE_M, 128, CODES[a.data.dtype])
    start_kernel(
        scaled_mm_mx_kernel,
        plan.ctas,
        (
            TmaTensor(unpadded(a.data, k), (min(tile.a_rows, tile.bm), 128), a_layout),
            TmaTensor(unpadded(b.data, k), (tile.bn, 128), shared_layout(tile.bn, 128, CODES[b.data.dtype])),
            TmaTensor(out, (SUBTILE_M, tile.bn), shared_layout(SUBTILE_M, tile.bn, LANGUAGE[out.dtype])),
        ),
        (scale_words(a), b_scale, None if bias is None else bias.contiguous()),
        (a.rows, b.rows, k, b_scale.stride(0)),
        (tile, bias is not None, accumulate),
    )


@functools.lru_cache(maxsize=64)
def shared_layout(rows: int, columns: int, dtype: object) -> object:
    """Swizzled shared-memory layout of a tile of codes or of the output."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def scale_words(operand: BlockScaled) -> Tensor:
    """Scales as int32 [rows, K / 128], four bytes per word: a view, or a copy if rows are not aligned to words."""
    scale = operand.scale.view(torch.uint8)
    missing = -scale.shape[1] % 4
    if missing or scale.data_ptr() % 4 or not scale.is_contiguous():
        scale = pad(scale, (0, missing)).clone(memory_format=torch.contiguous_format)
    return scale.view(torch.int32)
