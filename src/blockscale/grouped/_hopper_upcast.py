"""Registry entries of the grouped GEMMs for MX and NVFP4 on Hopper: exact upcast to bf16, then a Gluon bf16 GEMM.

Serves formats without tensor-core support on Hopper, with every epilogue: fp32 and fp16 outputs, bias, accumulation,
tensor scales. The upcast costs a pass over the operands.
"""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools

from torch import Tensor

from ..formats.spec import BF16_EXACT_PAIRS
from ..gemm._hopper import is_tma_addressable, start_kernel
from ..gemm.heuristics import SUBTILE_M
from ..gemm.ops import exact_bf16
from ..hardware import sm_count
from ..registry import Request, kernel
from . import _hopper
from ._hopper_upcast_kernel import grouped_mm_upcast_kernel
from ._schedule import group_spans, row_tiles
from .heuristics import UPCAST, Tile
from .ops import Inputs

_STAGE_K = 64  # K of one pipeline stage: 128 bytes


def _reject(request: Request) -> str | None:
    k = request.shape[2]
    if request.op == "m_grouped" and k % 8:
        return f"needs decoded rows that start at multiples of 16 bytes, K = {k} is no multiple of 8"
    return _hopper.reject(request)


def _defer(request: Request) -> str | None:
    return "upcasts the weights of all experts, too slow for few rows" if "starts" in request.options else None


_entry = functools.partial(
    kernel,
    backend="hopper_upcast",
    sm=(90, 90),
    formats=BF16_EXACT_PAIRS,
    priority=20,
    reject=_reject,
    forecast=functools.partial(_hopper.forecast, model=UPCAST),
    precompile_key=functools.partial(_hopper.precompile_key, model=UPCAST),
)


@_entry("m_grouped", defer=_defer)
@_entry("k_grouped")
def scaled_grouped_mm(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """exact upcast, then Gluon: warp-specialised grouped bf16 GEMM"""
    _hopper.run(inputs, out, accumulate=accumulate, model=UPCAST, launch=launch)


def launch(inputs: Inputs, out: Tensor, tile: Tile, *, accumulate: bool) -> None:
    """Upcast both operands and launch the kernel. out: a matrix; for k-grouped, the outputs of all groups stacked."""
    assert is_tma_addressable(out), "TMA would write to a copy of the output"
    a, b, offs, starts, bias = inputs
    x, y = exact_bf16(a), exact_bf16(b)
    k_grouped = y.dim() == 2
    tile_list = group_spans(offs) if k_grouped else row_tiles(offs, a.rows, tile.bm, 1, starts)
    tensor_scales = [q.global_scale for q in (a, b)]
    strides = [0 if scale is None else scale.dim() for scale in tensor_scales]
    start_kernel(
        grouped_mm_upcast_kernel,
        sm_count(out.device),
        (
            (x, (tile.bm, _STAGE_K)),
            (x, (SUBTILE_M, _STAGE_K)),
            (y.flatten(0, -2), (tile.bn, _STAGE_K)),
            (out, (SUBTILE_M, tile.bn)),
        ),
        (tile_list, out, *tensor_scales, None if bias is None else bias.contiguous()),
        (offs.shape[0], a.rows, b.rows, a.length, *strides, out.stride(0)),
        (tile, k_grouped, bias is not None, accumulate, tensor_scales[0] is not None),
    )
