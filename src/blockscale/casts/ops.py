"""The cast operators (torch.ops.blockscale): they take and return tensors, and a `CastPlan` as text.

Bodies select a kernel and fill buffers; the fakes share the allocation. A cast returns the operand's contiguous buffers
(codes, scales, tensor scale; the last is None unless NVFP4), and `formats.tensor.assemble` wraps them.
"""

import functools
import math

import torch
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import check_group_ends, code_row_bytes, padded_length, scale_buffer_shape
from ..formats.tensor import BlockScaled, from_parts
from ..hardware import Capability, capability
from ..library import define_op, empty
from ..registry import Request, select
from . import sharding

Buffers = tuple[Tensor, Tensor, Tensor | None]
BothAndColsum = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]
Shape = tuple[int, ...]


def _buffer_shapes(
    plan: CastPlan, shape: Shape, axis: int, amax: Shape | None, groups: int | None
) -> tuple[Shape, Shape, Shape | None]:
    """Shapes of codes, scales and tensor scale of an operand.  shape: of the source.  amax: shape of a supplied one."""
    spec, lead = plan.spec, shape[:-2]
    rows, length = shape[-3 - axis], plan.stored_length(shape[axis])
    if groups is not None and axis == -2:
        length = padded_length(shape[-2], groups)
    tensor_scale: Shape | None = None
    if spec.family == "nvfp4":
        per_group = (shape[0] if groups is None else groups,) if plan.grouped_amax else ()
        tensor_scale = per_group if amax is None else amax
    codes = (*lead, rows, code_row_bytes(spec, length))
    return codes, (*lead, *scale_buffer_shape(spec, rows, length, plan.layout)), tensor_scale


# for plain ints only: sizes are symbols while tracing
_cached_shapes = functools.lru_cache(maxsize=8192)(_buffer_shapes)


def allocate(x: Tensor, plan: CastPlan, axis: int, amax: Tensor | None, offs: Tensor | None) -> Buffers:
    """The buffers of one operand, for kernels and fakes alike."""
    shapes_of = _cached_shapes if type(x) is Tensor else _buffer_shapes
    supplied, groups = None if amax is None else amax.shape, None if offs is None else offs.shape[0]
    codes, scales, tensor_scale = shapes_of(plan, x.shape, axis, supplied, groups)
    spec, device = plan.spec, x.device
    return (
        empty(codes, spec.data_dtype, device),
        empty(scales, spec.scale_dtype, device),
        None if tensor_scale is None else empty(tensor_scale, torch.float32, device),
    )


def cast_request(op: str, x: Tensor, plans: tuple[CastPlan, ...], offs: Tensor | None = None) -> Request:
    """Registry request of a cast."""
    groups = None if offs is None else offs.shape[0]
    return _cast_request(op, capability(x.device), x.shape, x.stride(), x.dtype, plans, groups)


def is_far(shape: Shape, strides: Shape) -> bool:
    """Whether rows of a tensor, or of its operand, are so far apart that offsets in a tile of 256 rows exceed 2^31."""
    return max(*strides[-2:], *shape[-2:]) >= 1 << 23


@functools.lru_cache(maxsize=8192)
def _cast_request(
    op: str,
    where: Capability,
    shape: Shape,
    strides: Shape,
    dtype: torch.dtype,
    plans: tuple[CastPlan, ...],
    groups: int | None,
) -> Request:
    options_on = {
        "far": is_far(shape, strides),
        "offs": groups is not None,
        "many_groups": groups is not None and groups > 4096,
        "stochastic": any(plan.stream is not None for plan in plans),
        "hadamard": any(plan.hadamard is not None for plan in plans),
    }
    formats, layouts = tuple(plan.format for plan in plans), tuple(plan.layout for plan in plans)
    options = frozenset(name for name, on in options_on.items() if on)
    return Request(op, where, formats, (math.prod(shape[:-1]), shape[-1]), dtype, layouts, options)


def _fake_quantize(
    x: Tensor, plan: str, axis: int, state: Tensor | None, amax: Tensor | None, offs: Tensor | None
) -> Buffers:
    return allocate(x, CastPlan.parse(plan), axis, amax, offs)


@define_op(fake=_fake_quantize, sharding=sharding.quantize)
def quantize(
    x: Tensor, plan: str, axis: int, state: Tensor | None, amax: Tensor | None, offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One operand of x, blocks along `axis`: codes, scales, tensor scale."""
    resolved = CastPlan.parse(plan)
    check_group_ends(offs, x.shape[-2])
    out = allocate(x, resolved, axis, amax, offs)
    chosen = select(cast_request("cast", x, (resolved,), offs))
    chosen.launch(x, resolved, axis, out, state=state, amax=amax, offs=offs)
    return out


def allocate_both(
    x: Tensor, plans: tuple[CastPlan, CastPlan], amaxes: tuple[Tensor | None, Tensor | None], offs: Tensor | None
) -> tuple[Buffers, Buffers]:
    """The buffers of both operands."""
    return allocate(x, plans[0], -1, amaxes[0], offs), allocate(x, plans[1], -2, amaxes[1], offs)


def _allocate_colsum(x: Tensor, offs: Tensor | None, colsum: bool) -> Tensor | None:
    if not colsum:
        return None
    lead = x.shape[:-2] if offs is None else (offs.shape[0],)
    return empty((*lead, x.shape[-1]), torch.float32, x.device)


def _fake_quantize_both(
    x: Tensor,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor | None,
    colsum: bool,
) -> BothAndColsum:
    plans = (CastPlan.parse(row), CastPlan.parse(col))
    outs = allocate_both(x, plans, (row_amax, col_amax), offs)
    return *outs[0], *outs[1], _allocate_colsum(x, offs, colsum)


@define_op(fake=_fake_quantize_both, sharding=sharding.quantize_both)
def quantize_both(
    x: Tensor,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor | None,
    colsum: bool,
) -> BothAndColsum:
    """Both operands of x from one read, and its column sums if `colsum`."""
    plans = (CastPlan.parse(row), CastPlan.parse(col))
    check_group_ends(offs, x.shape[-2])
    amaxes = (row_amax, col_amax)
    outs = allocate_both(x, plans, amaxes, offs)
    total = _allocate_colsum(x, offs, colsum)
    chosen = select(cast_request("cast_both", x, plans, offs))
    states = (row_state, col_state)
    chosen.launch(x, plans, outs, total, states=states, amaxes=amaxes, offs=offs)
    return *outs[0], *outs[1], total


def _fake_requantize_(data: Tensor, scale: Tensor, factor: Tensor | None, x: Tensor, plan: str, axis: int) -> None:
    return None


@define_op(fake=_fake_requantize_, sharding=sharding.replicated, mutates=("data", "scale", "factor"))
def requantize_(data: Tensor, scale: Tensor, factor: Tensor | None, x: Tensor, plan: str, axis: int) -> None:
    """Cast x into existing buffers, allocated by `quantize` for a tensor of the same shape and plan."""
    resolved = CastPlan.parse(plan)
    chosen = select(cast_request("cast", x, (resolved,), None))
    chosen.launch(x, resolved, axis, _typed(resolved, data, scale, factor), state=None, amax=None, offs=None)


def _fake_requantize_both_(
    row_data: Tensor,
    row_scale: Tensor,
    row_factor: Tensor | None,
    col_data: Tensor,
    col_scale: Tensor,
    col_factor: Tensor | None,
    x: Tensor,
    row: str,
    col: str,
) -> None:
    return None


_WRITTEN = ("row_data", "row_scale", "row_factor", "col_data", "col_scale", "col_factor")


@define_op(fake=_fake_requantize_both_, sharding=sharding.replicated, mutates=_WRITTEN)
def requantize_both_(
    row_data: Tensor,
    row_scale: Tensor,
    row_factor: Tensor | None,
    col_data: Tensor,
    col_scale: Tensor,
    col_factor: Tensor | None,
    x: Tensor,
    row: str,
    col: str,
) -> None:
    """Cast x into existing buffers, allocated by `quantize_both` for a tensor of the same shape and plans."""
    plans = (CastPlan.parse(row), CastPlan.parse(col))
    outs = _typed(plans[0], row_data, row_scale, row_factor), _typed(plans[1], col_data, col_scale, col_factor)
    chosen = select(cast_request("cast_both", x, plans, None))
    chosen.launch(x, plans, outs, None, states=(None, None), amaxes=(None, None), offs=None)


def _typed(plan: CastPlan, data: Tensor, scale: Tensor, factor: Tensor | None) -> Buffers:
    """Buffers viewed in the dtypes of the format; they may arrive as bytes."""
    return data.view(plan.spec.data_dtype), scale.view(plan.spec.scale_dtype), factor


def _decoded_shape(data: Tensor, axis: int, length: int) -> tuple[int, ...]:
    return (*data.shape[:-1], length) if axis == -1 else (*data.shape[:-2], length, data.shape[-1])


def _fake_dequantize(
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    kind: str,
    axis: int,
    length: int,
    group_align: int,
    hadamard: int | None,
    offs: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return empty(_decoded_shape(data, axis, length), dtype, data.device)


@define_op(fake=_fake_dequantize, sharding=sharding.dequantize)
def dequantize(
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    kind: str,
    axis: int,
    length: int,
    group_align: int,
    hadamard: int | None,
    offs: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Values of an operand, `length` along its scaled axis; rotated back if `hadamard` (its sign mask) is given."""
    shape = _decoded_shape(data, axis, length)
    source = from_parts(data, scale, global_scale, kind, shape, axis=axis, group_align=group_align, hadamard=hadamard)
    # tokens run along the scaled axis of a padded operand, else along the other one
    check_group_ends(offs, shape[axis] if group_align else shape[-3 - axis])
    out = empty(shape, dtype, source.device)
    select(dequantize_request(source, dtype, offs)).launch(source, out, offs=offs)
    return out


def dequantize_request(q: BlockScaled, dtype: torch.dtype, offs: Tensor | None = None) -> Request:
    """Registry request of a decode."""
    groups = None if offs is None else offs.shape[0]
    layout_key = (q.data.shape, q.data.stride(), q.shape, q.axis, q.group_align, q.hadamard)
    return _dequantize_request(capability(q.device), q.format, q.scale_layout, q.length, dtype, groups, *layout_key)


@functools.lru_cache(maxsize=8192)
def _dequantize_request(
    where: Capability,
    format: str,
    layout: str,
    length: int,
    dtype: torch.dtype,
    groups: int | None,
    codes: Shape,
    strides: Shape,
    shape: Shape,
    axis: int,
    group_align: int,
    hadamard: int | None,
) -> Request:
    options_on = {
        "far": is_far(codes, strides) or max(shape[-2:]) >= 1 << 23,
        "offs": groups is not None,
        "many_groups": groups is not None and group_align > 0 and groups > 4096,
        "hadamard": hadamard is not None,
    }
    options = frozenset(name for name, on in options_on.items() if on)
    return Request("dequantize", where, (format,), (shape[-3 - axis], length), dtype, (layout,), options)
