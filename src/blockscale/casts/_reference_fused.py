"""Reference fused casts: a tensor as `activation.py` specifies it, then the reference cast of that tensor.

They are not faster than the unfused pair. They define the bytes for kernels that need one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..formats.cast_spec import Cast
from ..formats.layout import pack_scale, scale_buffer_shape
from ..library import empty
from ..registry import kernel
from . import activation
from ._reference import Buffers, quantize, quantize_both

Casts = Sequence[Cast]
Outs = Sequence[Buffers]


@kernel("swiglu", "reference", devices=(), priority=-100)
def swiglu(gate_up: Tensor, cast: Cast, axis: int, out: Buffers, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    quantize(activation.swiglu(gate_up), cast, axis, out, offs)


@kernel("swiglu_both", "reference", devices=(), priority=-100)
def swiglu_both(gate_up: Tensor, casts: Casts, outs: Outs, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    quantize_both(activation.swiglu(gate_up), casts, outs, None, offs)


@kernel("swiglu_backward_both", "reference", devices=(), priority=-100)
def swiglu_backward_both(grad: Tensor, gate_up: Tensor, casts: Casts, outs: Outs, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    quantize_both(activation.swiglu_backward(grad, gate_up), casts[:2], outs[:2], None, offs)
    for cast, out in zip(casts[2:], outs[2:], strict=True):
        swiglu(gate_up, cast, -2, out, offs)


@kernel("rmsnorm", "reference", devices=(), priority=-100)
def rmsnorm(x: Tensor, weight: Tensor, eps: float, cast: Cast, out: Buffers, rstd: Tensor) -> None:
    """exact torch reference, any device"""
    y, factor = activation.rmsnorm(x, weight, eps)
    rstd.copy_(factor)
    quantize(y, cast, -1, out, None)


@kernel("rmsnorm_both", "reference", devices=(), priority=-100)
def rmsnorm_both(
    x: Tensor, weight: Tensor, eps: float, casts: Casts, outs: Outs, rstd: Tensor, offs: Tensor | None
) -> None:
    """exact torch reference, any device"""
    y, factor = activation.rmsnorm(x, weight, eps)
    rstd.copy_(factor)
    quantize_both(y, casts, outs, None, offs)


@kernel("permute_both", "reference", devices=(), priority=-100)
def permute_both(
    x: Tensor, indices: Tensor, gate_weights: Tensor | None, casts: Casts, outs: Outs, offs: Tensor
) -> None:
    """exact torch reference, any device"""
    quantize_both(activation.gather_rows(x, indices, gate_weights), casts, outs, None, offs)


@kernel("permute_columns", "reference", devices=(), priority=-100)
def permute_columns(x: Tensor, indices: Tensor, cast: Cast, out: Buffers, offs: Tensor) -> None:
    """exact torch reference, any device"""
    quantize(activation.gather_rows(x, indices), cast, -2, out, offs)


@kernel("permute", "reference", devices=(), priority=-100)
def permute(x: Tensor, indices: Tensor, cast: Cast, out: Buffers) -> None:
    """exact torch reference, any device"""
    plan, spec = cast.plan, cast.plan.spec
    source = activation.with_zero_row(x)  # a row of zeros does not change the amax
    length = plan.stored_length(x.shape[1])
    data = empty((source.shape[0], out[0].shape[1]), spec.data_dtype, x.device)
    shape = scale_buffer_shape(spec, source.shape[0], length, "plain")
    scale = empty(shape, spec.scale_dtype, x.device)
    quantize(source, cast._replace(plan=replace(plan, layout="plain")), -1, (data, scale, out[2]), None)
    rows = activation.zero_row_for_padding(indices, x.shape[0])
    out[0].copy_(_take(data, rows))
    out[1].copy_(pack_scale(spec, _take(scale, rows), indices.shape[0], length, plan.layout))


def _take(buffer: Tensor, rows: Tensor) -> Tensor:
    """Gathered rows of codes or scales; one-byte dtypes as uint8, since torch does not index all of them."""
    raw = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer
    return raw.index_select(0, rows).view(buffer.dtype)
