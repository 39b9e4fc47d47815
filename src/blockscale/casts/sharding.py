"""Sharding rules of the cast operators: dimensions along which the cast of a shard is the shard of the cast.

Only shapes of tensors are read here. Group ends count rows of the full tensor, so casts with `offs` are never sharded.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import cuts_evenly, cuts_length, cuts_rows
from ..formats.tensor import parse_kind
from ..library import Sharding

Dims = tuple[int, int, int | None]


def _buffers(parts: int, x: Tensor, dim: int, plan: CastPlan, axis: int, amax: Tensor | None) -> Dims | None:
    """Dimensions along which codes, scales and tensor scale are sharded if x is sharded along `dim`.

    None if the bytes of the shards would differ."""
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


def quantize(
    parts: int, x: Tensor, plan: str, axis: int, state: Tensor | None, amax: Tensor | None, offs: Tensor | None
) -> Iterator[Sharding]:
    """Every dimension whose shards split no block, pad or amax."""
    for dim in range(len(x.shape) if offs is None else 0):
        outputs = _buffers(parts, x, dim, CastPlan.parse(plan), axis, amax)
        if outputs is not None:
            yield Sharding({"x": dim} | _amax_cuts(amax=outputs), outputs)


def _amax_cuts(**outputs: Dims) -> dict[str, int]:
    """Supplied amaxes per group are sharded with the tensor scales computed from them."""
    return {name: 0 for name, dims in outputs.items() if dims[2] is not None}


def quantize_both(
    parts: int,
    x: Tensor,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor | None,
    colsum: bool,
) -> Iterator[Sharding]:
    """Dimensions valid for both casts. Not M with `colsum`: sums are rounded once, not reduced from rounded shards."""
    rank = len(x.shape)
    for dim in range(rank if offs is None else 0):
        first = _buffers(parts, x, dim, CastPlan.parse(row), -1, row_amax)
        second = _buffers(parts, x, dim, CastPlan.parse(col), -2, col_amax)
        if first is None or second is None or (colsum and dim == rank - 2):
            continue
        total = min(dim, rank - 2) if colsum else None
        yield Sharding({"x": dim} | _amax_cuts(row_amax=first, col_amax=second), (*first, *second, total))


def dequantize(
    parts: int,
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
) -> Iterator[Sharding]:
    """Batches and rows; not the scaled axis, whose length is an argument."""
    if offs is not None or group_align:
        return
    (spec, layout), rank = parse_kind(kind), len(data.shape)
    for dim in range(rank - 2):
        if cuts_evenly(data.shape[dim], parts):
            scales = {"global_scale": 0} if global_scale is not None and len(global_scale.shape) else {}
            yield Sharding({"data": dim, "scale": dim} | scales, (dim,))
    rows = rank - 3 - axis
    if cuts_rows(spec, data.shape[rows], layout, parts):
        yield Sharding({"data": rows, "scale": rank - 2 if layout == "blocked" else rows}, (rows,))


def replicated(parts: int, *args: object, **named: object) -> Iterator[Sharding]:
    """No sharding: inputs are replicated. Fused casts are sharded by their layers."""
    return iter(())
