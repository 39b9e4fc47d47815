"""MXFP8 GEMM for Hopper, registry entry of the Gluon kernel: choice of the plan, launch, forecast."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats.tensor import BlockScaled
from ..registry import kernel
from . import _hopper
from ._hopper import is_tma_addressable, start_kernel, unpadded
from ._hopper_mx_kernel import scaled_mm_mx_kernel
from .heuristics import SUBTILE_M, Plan, Problem
from .heuristics_mx import choose
from .ops import reject_fp8_of_hopper
from .tuned import Choice

_ROWWISE, _WEIGHT = ("mxfp8_e4m3", "mxfp8_e5m2"), "mxfp8_e4m3_128x128"
PAIRS = [(name, _WEIGHT) for name in _ROWWISE]
LAYOUTS = dict.fromkeys((*_ROWWISE, _WEIGHT), "plain")


def _by_model(problem: Problem, gpu: str) -> Choice:
    """The model's plan: there are no tuned ones."""
    return Choice(*choose(problem), entry=None)


@kernel(
    "gemm",
    "hopper",
    sm=(90, 90),
    formats=PAIRS,
    layouts=LAYOUTS,
    priority=12,
    reject=reject_fp8_of_hopper,
    forecast=functools.partial(_hopper.forecast, choose=_by_model),
    precompile_key=functools.partial(_hopper.precompile_key, choose=_by_model),
)
def scaled_mm_mx(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: warp-specialized MXFP8 GEMM, promoted after every 32 of K"""
    _hopper.run(a, b, out, bias, accumulate=accumulate, choose=_by_model, launch=launch)


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan) -> None:
    """Launch the GEMM with a given plan."""
    assert is_tma_addressable(out), "the kernel would write a copy of the output, which is lost"
    assert {a.scale_layout, b.scale_layout} == {"plain"}
    tile, k = plan.tile, a.length
    b_scale = b.scale.view(torch.uint8)
    start_kernel(
        scaled_mm_mx_kernel,
        plan.ctas,
        (
            (unpadded(a.data, k), (min(tile.a_rows, tile.bm), 128)),
            (unpadded(b.data, k), (tile.bn, 128)),
            (out, (SUBTILE_M, tile.bn)),
        ),
        (scale_words(a), b_scale, None if bias is None else bias.contiguous()),
        (a.rows, b.rows, k, b_scale.stride(0)),
        (tile, bias is not None, accumulate),
    )


def scale_words(operand: BlockScaled) -> Tensor:
    """Scales as int32 [rows, K / 128], four bytes per word: a view, or a copy if rows are not aligned to words."""
    scale = operand.scale.view(torch.uint8)
    missing = -scale.shape[1] % 4
    if missing or scale.data_ptr() % 4 or not scale.is_contiguous():
        scale = pad(scale, (0, missing)).clone(memory_format=torch.contiguous_format)
    return scale.view(torch.int32)
