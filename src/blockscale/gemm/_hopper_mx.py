"""Hopper's MXFP8 product in Gluon as a row of the table: the choice of a tile, the launch, the forecast."""

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
    Described,
    addressable,
    can_be_described,
    can_be_written,
    kernel_dtype,
    kind_of,
    start_kernel,
    whole,
)
from ._hopper_mx_kernel import scaled_mm_mx_kernel
from .epilogue import finish
from .heuristics import SUBTILE_M, Plan, Problem, bound, kernel_part
from .heuristics_mx import choose
from .ops import reject_fp8_of_hopper
from .tuned import Choice

CODES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
_ROWWISE, _WEIGHT = ("mxfp8_e4m3", "mxfp8_e5m2"), "mxfp8_e4m3_128x128"
PAIRS = [(name, _WEIGHT) for name in _ROWWISE]
LAYOUTS = dict.fromkeys((*_ROWWISE, _WEIGHT), "plain")


def forecast(request: Request) -> Forecast:
    """The plan that `scaled_mm_mx` would take, on this GPU if it is such a one."""
    problem, elsewhere = problem_of(request)
    part, pass_us = kernel_part(problem)
    chosen = Choice(*choose(part), entry=None)
    flops = 2 * problem.m * problem.n * problem.k
    note = chosen.origin + (PASS if pass_us else "") + elsewhere
    return Forecast(chosen.plan.label, chosen.us + pass_us, flops, *bound(problem), note)


def precompile_key(request: Request) -> Hashable:
    """All that the compiled kernel depends on."""
    add, count = "accumulate" in request.options, sm_count(torch.device("meta"))
    part, _ = kernel_part(Problem(*request.shape, False, request.dtype == torch.float32, count, add))
    return choose(part)[0].tile, kind_of(part.n), request.formats, request.dtype, request.options


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
    """Gluon: warp-specialised MXFP8 product, promoted after every 32 of K"""
    direct = can_be_written(out)
    dtype = kernel_dtype(out, accumulate=accumulate, direct=direct)
    wide, add = dtype == torch.float32, accumulate and direct
    plan, _ = choose(Problem(a.rows, b.rows, a.length, False, wide, sm_count(out.device), add))
    if direct:
        return launch(a, b, out, bias, accumulate=accumulate, plan=plan)
    # the copy engine cannot write there: N is odd, or it is a buffer of the caller's
    product = addressable(out.shape, dtype, out.device)
    launch(a, b, product, bias, accumulate=False, plan=plan)
    finish(product, out, None, accumulate=accumulate)


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan) -> None:
    """The product by one plan."""
    assert can_be_described(out), "a copy of the output would be written, and lost"
    assert {a.scale_layout, b.scale_layout} == {"plain"}
    tile, k = plan.tile, a.length
    b_scale = b.scale.view(torch.uint8)
    start_kernel(
        scaled_mm_mx_kernel,
        plan.ctas,
        (
            Described(
                whole(a.data, k), (min(tile.a_rows, tile.bm), 128), shared_layout(SUBTILE_M, 128, CODES[a.data.dtype])
            ),
            Described(whole(b.data, k), (tile.bn, 128), shared_layout(tile.bn, 128, CODES[b.data.dtype])),
            Described(out, (SUBTILE_M, tile.bn), shared_layout(SUBTILE_M, tile.bn, LANGUAGE[out.dtype])),
        ),
        (scale_words(a), b_scale, None if bias is None else bias.contiguous()),
        (a.rows, b.rows, k, b_scale.stride(0)),
        (tile, bias is not None, accumulate),
    )


@functools.lru_cache(maxsize=64)
def shared_layout(rows: int, columns: int, dtype: object) -> object:
    """Of a tile of codes or of the output in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def scale_words(operand: BlockScaled) -> Tensor:
    """int32 [rows, K / 128]: four scale bytes a word. The scales themselves, or a copy where rows start elsewhere."""
    scale = operand.scale.view(torch.uint8)
    missing = -scale.shape[1] % 4
    if missing or scale.data_ptr() % 4 or not scale.is_contiguous():
        scale = pad(scale, (0, missing)).clone(memory_format=torch.contiguous_format)
    return scale.view(torch.int32)
