"""The cast operators (torch.ops.blockscale): their allocations, registry requests, bodies and sharding rules.

A `Cast` describes each operand that is made. A body selects a kernel and fills buffers; the fake shares the allocation.
The operator returns the operand's contiguous buffers (codes, scales, tensor scale; the last is None unless NVFP4), and
a call wraps them in a `BlockScaled`. These functions check no arguments; `quantize` and its siblings do.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats.cast_spec import Cast, CastPlan
from ..formats.layout import (
    check_group_ends,
    code_row_bytes,
    cuts_evenly,
    cuts_length,
    cuts_rows,
    padded_length,
    scale_buffer_shape,
)
from ..formats.tensor import BlockScaled, assemble
from ..hardware import Capability, capability
from ..library import Sharding, define_op, empty
from ..registry import Request, select

Maybe = Tensor | None
Buffers = tuple[Tensor, Tensor, Maybe]
Both = tuple[Tensor, Tensor, Maybe, Tensor, Tensor, Maybe]
BothAndMore = tuple[Tensor, Tensor, Maybe, Tensor, Tensor, Maybe, Maybe]
Pair = tuple[BlockScaled, BlockScaled]
Shape = tuple[int, ...]
Plans = tuple[CastPlan, ...]

# ---- buffers and operands ------------------------------------------------------------------------------------------


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


def allocate(x: Tensor, cast: Cast, axis: int, offs: Tensor | None) -> Buffers:
    """The buffers of one operand, for kernels and fakes alike.  x: has the shape and device of the source."""
    shapes_of = _cached_shapes if type(x) is Tensor else _buffer_shapes
    amax, groups = None if cast.amax is None else cast.amax.shape, None if offs is None else offs.shape[0]
    codes, scales, tensor_scale = shapes_of(cast.plan, x.shape, axis, amax, groups)
    spec, device = cast.plan.spec, x.device
    return (
        empty(codes, spec.data_dtype, device),
        empty(scales, spec.scale_dtype, device),
        None if tensor_scale is None else empty(tensor_scale, torch.float32, device),
    )


def allocate_both(x: Tensor, row: Cast, col: Cast, offs: Tensor | None) -> Both:
    """The buffers of both operands."""
    return *allocate(x, row, -1, offs), *allocate(x, col, -2, offs)


def operand(made: Any, shape: Sequence[int], cast: Cast, axis: int, offs: Tensor | None) -> BlockScaled:
    """Operand of the first three tensors that an operator returned.  shape: of the source."""
    return assemble(cast.plan, made[:3], shape, axis, groups=None if offs is None or axis == -1 else offs.shape[0])


def pair(made: Any, shape: Sequence[int], row: Cast, col: Cast, offs: Tensor | None) -> Pair:
    """Row and column operand of the first six tensors that an operator returned.  shape: of the source."""
    return operand(made, shape, row, -1, offs), operand(made[3:], shape, col, -2, offs)


# ---- requests ------------------------------------------------------------------------------------------------------


def cast_request(op: str, x: Tensor, plans: Plans, offs: Tensor | None = None) -> Request:
    """Registry request of a cast."""
    groups = None if offs is None else offs.shape[0]
    return _cast_request(op, capability(x.device), x.shape, x.stride(), x.dtype, plans, groups)


def is_far(shape: Shape, strides: Shape) -> bool:
    """Whether rows of a tensor, or of its operand, are so far apart that offsets in a tile of 256 rows exceed 2^31."""
    return max(*strides[-2:], *shape[-2:]) >= 1 << 23


def _options(**options: bool) -> frozenset[str]:
    return frozenset(name for name, on in options.items() if on)


@functools.lru_cache(maxsize=8192)
def _cast_request(
    op: str, where: Capability, shape: Shape, strides: Shape, dtype: torch.dtype, plans: Plans, groups: int | None
) -> Request:
    options = _options(
        far=is_far(shape, strides),
        offs=groups is not None,
        many_groups=groups is not None and groups > 4096,
        stochastic=any(plan.stream is not None for plan in plans),
        hadamard=any(plan.hadamard is not None for plan in plans),
    )
    formats, layouts = tuple(plan.format for plan in plans), tuple(plan.layout for plan in plans)
    return Request(op, where, formats, (math.prod(shape[:-1]), shape[-1]), dtype, layouts, options)


def dequantize_request(q: BlockScaled, dtype: torch.dtype, offs: Tensor | None = None) -> Request:
    """Registry request of a decode."""
    options = _options(
        far=is_far(q.data.shape, q.data.stride()) or max(q.shape[-2:]) >= 1 << 23,
        offs=offs is not None,
        many_groups=offs is not None and q.group_align > 0 and offs.shape[0] > 4096,
        hadamard=q.hadamard is not None,
    )
    shape = (q.rows, q.length)
    return Request("dequantize", capability(q.device), (q.format,), shape, dtype, (q.scale_layout,), options)


# ---- sharding rules ------------------------------------------------------------------------------------------------
# Dimensions along which the cast of a shard is the shard of the cast. Group ends count rows of the full tensor, so
# casts with `offs` are never sharded.

Dims = tuple[int, int, int | None]


def _buffers(parts: int, x: Tensor, dim: int, cast: Cast, axis: int) -> Dims | None:
    """Dimensions along which codes, scales and tensor scale are sharded if x is sharded along `dim`.

    None if the bytes of the shards would differ."""
    plan, amax = cast.plan, cast.amax
    spec, rank, size = plan.spec, len(x.shape), x.shape[dim]
    nvfp4, batch = spec.family == "nvfp4", dim < rank - 2
    grouped = plan.grouped_amax if amax is None else len(amax.shape) == 1
    if plan.stream is not None:
        return None  # random words depend on the position in the full tensor; a shard would count from its own start
    if nvfp4 and amax is None and not (grouped and batch):
        return None  # the tensor scale needs the amax of the full tensor
    if batch:
        return (dim, dim, 0 if nvfp4 and grouped else None) if cuts_evenly(size, parts) else None
    across, along = (rank - 1, rank - 2) if plan.layout == "mn_major" else (rank - 2, rank - 1)
    if dim == rank - 3 - axis:
        return (rank - 2, across, None) if cuts_rows(spec, size, plan.layout, parts) else None
    # a rotated group is a block, so it is not split either
    return (rank - 1, along, None) if cuts_length(spec, size, plan.layout, parts) else None


def _amax_cuts(**outputs: Dims) -> dict[str, int]:
    """Supplied amaxes per group are sharded with the tensor scales computed from them."""
    return {f"{name}_amax": 0 for name, dims in outputs.items() if dims[2] is not None}


def _shard_cast(parts: int, x: Tensor, cast: Cast, axis: int, offs: Tensor | None) -> Iterator[Sharding]:
    """Every dimension whose shards split no block, pad or amax."""
    for dim in range(len(x.shape) if offs is None else 0):
        outputs = _buffers(parts, x, dim, cast, axis)
        if outputs is not None:
            yield Sharding({"x": dim} | _amax_cuts(cast=outputs), outputs)


def _shard_both(parts: int, x: Tensor, row: Cast, col: Cast, offs: Tensor | None, colsum: bool) -> Iterator[Sharding]:
    """Dimensions valid for both casts. Not M with `colsum`: sums are rounded once, not reduced from rounded shards."""
    rank = len(x.shape)
    for dim in range(rank if offs is None else 0):
        first, second = _buffers(parts, x, dim, row, -1), _buffers(parts, x, dim, col, -2)
        if first is None or second is None or (colsum and dim == rank - 2):
            continue
        total = min(dim, rank - 2) if colsum else None
        yield Sharding({"x": dim} | _amax_cuts(row=first, col=second), (*first, *second, total))


def _shard_dequantize(parts: int, q: BlockScaled, offs: Tensor | None, dtype: torch.dtype) -> Iterator[Sharding]:
    """Batches and rows; not the scaled axis, whose length is an argument."""
    if offs is not None or q.group_align:
        return
    rank, layout = len(q.data.shape), q.scale_layout
    for dim in range(rank - 2):
        if cuts_evenly(q.data.shape[dim], parts):
            scales = {"q_global": 0} if q.global_scale is not None and len(q.global_scale.shape) else {}
            yield Sharding({"q": dim, "q_scale": dim} | scales, (dim,))
    rows = rank - 3 - q.axis
    if cuts_rows(q.spec, q.rows, layout, parts):
        yield Sharding({"q": rows, "q_scale": rank - 2 if layout == "blocked" else rows}, (rows,))


# ---- operators -----------------------------------------------------------------------------------------------------


@define_op(
    "quantize",
    fake=allocate,
    wrap=lambda made, x, cast, axis, offs: operand(made, x.shape, cast, axis, offs),
    sharding=_shard_cast,
)
def cast(x: Tensor, cast: Cast, axis: int, offs: Tensor | None) -> Buffers:
    """`quantize` without checks."""
    check_group_ends(offs, x.shape[-2])
    out = allocate(x, cast, axis, offs)
    kernel = select(cast_request("cast", x, (cast.plan,), offs))
    kernel.launch(x, cast, axis, out, offs)
    return out


def _allocate_sums(x: Tensor, row: Cast, col: Cast, offs: Tensor | None, colsum: bool) -> BothAndMore:
    """The buffers of both operands, and of column sums if they are requested."""
    both, lead = allocate_both(x, row, col, offs), x.shape[:-2] if offs is None else (offs.shape[0],)
    return *both, empty((*lead, x.shape[-1]), torch.float32, x.device) if colsum else None


@define_op(
    "quantize_both",
    fake=_allocate_sums,
    wrap=lambda made, x, row, col, offs, colsum: (*pair(made, x.shape, row, col, offs), made[6]),
    sharding=_shard_both,
)
def cast_both(x: Tensor, row: Cast, col: Cast, offs: Tensor | None, colsum: bool) -> BothAndMore:
    """`quantize_both` without checks: both operands, and the column sums, undefined unless `colsum`."""
    check_group_ends(offs, x.shape[-2])
    out = _allocate_sums(x, row, col, offs, colsum)
    kernel = select(cast_request("cast_both", x, (row.plan, col.plan), offs))
    kernel.launch(x, (row, col), (out[0:3], out[3:6]), out[6], offs)
    return out


@define_op(mutates=("data", "scale", "factor"))
def requantize_(data: Tensor, scale: Tensor, factor: Tensor | None, x: Tensor, cast: Cast, axis: int) -> None:
    """Cast x into existing buffers, allocated by `quantize` for a tensor of the same shape and plan."""
    kernel = select(cast_request("cast", x, (cast.plan,)))
    kernel.launch(x, cast, axis, _typed(cast.plan, data, scale, factor), None)


@define_op(mutates=("row_data", "row_scale", "row_factor", "col_data", "col_scale", "col_factor"))
def requantize_both_(
    row_data: Tensor,
    row_scale: Tensor,
    row_factor: Tensor | None,
    col_data: Tensor,
    col_scale: Tensor,
    col_factor: Tensor | None,
    x: Tensor,
    row: Cast,
    col: Cast,
) -> None:
    """Cast x into existing buffers, allocated by `quantize_both` for a tensor of the same shape and plans."""
    outs = _typed(row.plan, row_data, row_scale, row_factor), _typed(col.plan, col_data, col_scale, col_factor)
    kernel = select(cast_request("cast_both", x, (row.plan, col.plan)))
    kernel.launch(x, (row, col), outs, None, None)


def _typed(plan: CastPlan, data: Tensor, scale: Tensor, factor: Tensor | None) -> Buffers:
    """Buffers viewed in the dtypes of the format; they may arrive as bytes."""
    return data.view(plan.spec.data_dtype), scale.view(plan.spec.scale_dtype), factor


def _allocate_values(q: BlockScaled, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    return empty(q.shape, dtype, q.device)


@define_op(fake=_allocate_values, sharding=_shard_dequantize)
def dequantize(q: BlockScaled, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Values of an operand in the shape of its source; rotated back if it has a rotation."""
    # tokens run along the scaled axis of a padded operand, else along the other one
    check_group_ends(offs, q.shape[q.axis] if q.group_align else q.rows)
    out = _allocate_values(q, offs, dtype)
    select(dequantize_request(q, dtype, offs)).launch(q, out, offs=offs)
    return out
