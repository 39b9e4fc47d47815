"""Reference fused casts: a tensor as `activation.py` specifies it, then the reference cast of that tensor.

They are not faster than the unfused pair. They define the bytes for kernels that need one pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import pack_scale, scale_buffer_shape
from ..library import empty
from ..registry import kernel
from . import activation
from ._reference import Buffers, quantize, quantize_both

Plans = tuple[CastPlan, CastPlan]
Outs = tuple[Buffers, Buffers]
Optionals = tuple[Tensor | None, Tensor | None]


@kernel("swiglu", "reference", devices=(), priority=-100)
def swiglu(
    gate_up: Tensor,
    plan: CastPlan,
    axis: int,
    out: Buffers,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
    offs: Tensor | None = None,
) -> None:
    """exact torch reference, any device"""
    quantize(activation.swiglu(gate_up), plan, axis, out, state=state, amax=amax, offs=offs)


@kernel("swiglu_both", "reference", devices=(), priority=-100)
def swiglu_both(
    gate_up: Tensor,
    plans: Plans,
    outs: Outs,
    *,
    states: Optionals = (None, None),
    amaxes: Optionals = (None, None),
    offs: Tensor | None = None,
) -> None:
    """exact torch reference, any device"""
    quantize_both(activation.swiglu(gate_up), plans, outs, None, states=states, amaxes=amaxes, offs=offs)


@kernel("swiglu_backward_both", "reference", devices=(), priority=-100)
def swiglu_backward_both(
    grad: Tensor,
    gate_up: Tensor,
    plans: Plans,
    outs: Outs,
    hidden: CastPlan | None,
    hidden_out: Buffers | None,
    *,
    states: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    amaxes: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    offs: Tensor | None = None,
) -> None:
    """exact torch reference, any device"""
    both = activation.swiglu_backward(grad, gate_up)
    quantize_both(both, plans, outs, None, states=states[:2], amaxes=amaxes[:2], offs=offs)
    if hidden is not None and hidden_out is not None:
        swiglu(gate_up, hidden, -2, hidden_out, state=states[2], amax=amaxes[2], offs=offs)


@kernel("rmsnorm", "reference", devices=(), priority=-100)
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    plan: CastPlan,
    out: Buffers,
    rstd: Tensor,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """exact torch reference, any device"""
    y, factor = activation.rmsnorm(x, weight, eps)
    rstd.copy_(factor)
    quantize(y, plan, -1, out, state=state, amax=amax)


@kernel("rmsnorm_both", "reference", devices=(), priority=-100)
def rmsnorm_both(
    x: Tensor,
    weight: Tensor,
    eps: float,
    plans: Plans,
    outs: Outs,
    rstd: Tensor,
    *,
    states: Optionals = (None, None),
    amaxes: Optionals = (None, None),
    offs: Tensor | None = None,
) -> None:
    """exact torch reference, any device"""
    y, factor = activation.rmsnorm(x, weight, eps)
    rstd.copy_(factor)
    quantize_both(y, plans, outs, None, states=states, amaxes=amaxes, offs=offs)


@kernel("permute_both", "reference", devices=(), priority=-100)
def permute_both(
    x: Tensor,
    indices: Tensor,
    gate_weights: Tensor | None,
    plans: Plans,
    outs: Outs,
    *,
    states: Optionals = (None, None),
    amaxes: Optionals = (None, None),
    offs: Tensor,
) -> None:
    """exact torch reference, any device"""
    rows = activation.gather_rows(x, indices, gate_weights)
    quantize_both(rows, plans, outs, None, states=states, amaxes=amaxes, offs=offs)


@kernel("permute_columns", "reference", devices=(), priority=-100)
def permute_columns(
    x: Tensor,
    indices: Tensor,
    plan: CastPlan,
    out: Buffers,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
    offs: Tensor,
) -> None:
    """exact torch reference, any device"""
    quantize(activation.gather_rows(x, indices), plan, -2, out, state=state, amax=amax, offs=offs)


@kernel("permute", "reference", devices=(), priority=-100)
def permute(x: Tensor, indices: Tensor, plan: CastPlan, out: Buffers, *, amax: Tensor | None = None) -> None:
    """exact torch reference, any device"""
    spec, plain = plan.spec, replace(plan, layout="plain")
    source = activation.with_zero_row(x)  # a row of zeros does not change the amax
    length = plan.stored_length(x.shape[1])
    data = empty((source.shape[0], out[0].shape[1]), spec.data_dtype, x.device)
    shape = scale_buffer_shape(spec, source.shape[0], length, "plain")
    scale = empty(shape, spec.scale_dtype, x.device)
    quantize(source, plain, -1, (data, scale, out[2]), amax=amax)
    rows = activation.zero_row_for_padding(indices, x.shape[0])
    out[0].copy_(_take(data, rows))
    out[1].copy_(pack_scale(spec, _take(scale, rows), indices.shape[0], length, plan.layout))


def _take(buffer: Tensor, rows: Tensor) -> Tensor:
    """Gathered rows of codes or scales; one-byte dtypes as uint8, since torch does not index all of them."""
    raw = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer
    return raw.index_select(0, rows).view(buffer.dtype)
