"""Triton casts, sm_80 and newer: grids and arguments for the kernels in `_kernels.py`.

Everything here follows from shapes, and a recorded call skips it: a cast of a few microseconds must not be bound by
the host.
"""

# pyright: basic, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..formats.cast_spec import Cast, CastPlan
from ..formats.layout import (
    GROUP_ALIGN,
    blocked_columns,
    ceil_div,
    code_row_bytes,
    padded_length,
    round_up,
    scale_counts,
)
from ..hardware import capability
from ..launch import launch
from ..library import empty
from ..registry import Request, kernel
from ._kernels import amax_kernel, cast_kernel, colsum_kernel
from ._source import Even, Source, Tile, dense, operand_config, plain, power_of_two, tile_shape

Buffers = tuple[Tensor, Tensor, Tensor | None]

# Under TRITON_INTERPRET=1 kernels run in numpy on the CPU; its fp8 casts do not round, so codes use integer rounding.
INTERPRETED = not isinstance(cast_kernel, triton.runtime.JITFunction)


# Compute capabilities where a kernel with two bodies or three operands does not spill. 0 is the interpreter.
_LARGE_BODY_SMS = (0, 90)


def _covered(plan: CastPlan, rows: int, length: int) -> tuple[int, int]:
    """Rows and length that the grid must cover, so that pads of codes and scales are written too."""
    tiles, blocks = scale_counts(plan.spec, rows, length)
    across, along = plan.spec.block
    length = max(code_row_bytes(plan.spec, length) * plan.spec.codes_per_byte, blocks * along)
    if plan.layout == "mn_major":
        return max(rows, round_up(tiles, 4) * across), length
    if plan.layout == "grid":
        return rows, max(length, round_up(blocks, 4) * along)
    if plan.layout == "blocked":
        return round_up(rows, 128), max(length, round_up(blocks * along, 4 * plan.spec.granule))
    return rows, length


class Output(NamedTuple):
    """One operand to write: the fields of its `Cast`, and buffers (codes, scales, tensor scale)."""

    plan: CastPlan
    state: Tensor | None
    amax: Tensor | None
    buffers: Buffers


def launch_cast(
    source: Source,
    row: Output | None,
    col: Output | None,
    *,
    colsum: Tensor | None = None,
    offs: Tensor | None = None,
    hidden: Output | None = None,
) -> None:
    """Fill the buffers of one operand or both, from one read unless that is slower.  hidden: column operand of
    silu(gate) * up, recomputed by SwiGLU's backward if `fuses_hidden`."""
    if row is not None and col is not None and _is_compute_bound(row.plan, col.plan):
        _launch(source, row, None, None, offs)
        _launch(source, None, col, colsum, offs)
    else:
        _launch(source, row, col, colsum, offs, hidden)


def fuses_hidden(source: Source, plans: tuple[CastPlan, CastPlan], hidden: CastPlan) -> bool:
    """Whether SwiGLU's backward also writes the recomputed activation's operand from the same read.

    It needs full tiles, 1-D blocks without a tensor scale, and the format of the column operand, which fits the tile.
    """
    row, col = plans
    plain = not (_is_compute_bound(row, col, hidden) or col.spec.is_2d or col.spec.family == "nvfp4")
    alike = hidden.spec == col.spec and _sm(source) in _LARGE_BODY_SMS
    return source.name == "swiglu_backward" and plain and alike


def _is_compute_bound(*plans: CastPlan | None) -> bool:
    """Whether any cast rotates or rounds stochastically: bound by instructions, not by bytes.

    Each operand is then written by its own kernel: registers and barriers of a fused one cost more than a second read.
    """
    return any(plan is not None and (plan.stream is not None or plan.hadamard is not None) for plan in plans)


def _sm(source: Source) -> int:
    """Compute capability that kernels are compiled for; 0 is the interpreter."""
    return 0 if INTERPRETED else capability(source.x.device).sm


def _launch(
    source: Source,
    row: Output | None,
    col: Output | None,
    colsum: Tensor | None,
    offs: Tensor | None,
    hidden: Output | None = None,
) -> None:
    """Launch one cast kernel, and the sum of its partial column sums."""
    row, col, offs = _dense(row), _dense(col), dense(offs)
    matrices = source.matrices
    count, rows, columns = matrices.shape[0], source.rows, source.columns
    mode, reg_mode = source.mode, source.reg_mode
    sm = _sm(source)
    groups = 0 if offs is None else offs.shape[0]
    is_dense = offs is None and source.indices is None
    plans = [None if out is None else out.plan for out in (row, col)]
    full_tiles = is_dense and rows % 256 == 0 and columns % 128 == 0
    tile = tile_shape(plans[0], plans[1], sm=sm, source=source, full_tiles=full_tiles)
    block_rows = tile.J * tile.MQ
    length = rows if offs is None else padded_length(rows, groups)
    stored = length if col is None or offs is not None else col.plan.stored_length(length)
    covered_m, covered_k = rows, columns
    if row is not None:
        covered_m, covered_k = _covered(row.plan, rows, row.plan.stored_length(columns))
    if col is not None:
        needed = _covered(col.plan, columns, stored)
        covered_m, covered_k = max(covered_m, needed[1]), max(covered_k, needed[0])
    if hidden is not None:
        covered_m = max(covered_m, _covered(hidden.plan, source.grid_columns, stored)[1])
    even = Even(
        is_dense and rows % block_rows == 0 and covered_m == rows,
        source.grid_columns % tile.BK == 0 and covered_k == columns,
    )
    has_full_body = offs is not None and sm in _LARGE_BODY_SMS and not _is_compute_bound(*plans)
    even_full = Even(True, even.columns) if has_full_body else None
    if offs is not None:
        covered_m = max(length, rows + (GROUP_ALIGN - 1) * (groups + 1))
    tiles_m, tiles_k = ceil_div(covered_m, block_rows), ceil_div(covered_k, tile.BK)
    if source.grid_columns != columns:  # a CTA writes the tiles of both halves
        tiles_k = source.grid_columns // tile.BK
    amaxes = _amaxes(source, row, col, offs)
    amax_counts = [0 if amax is None else amax.numel() for amax in amaxes]
    partials = None if colsum is None else empty((count, tiles_m, columns), torch.float64, colsum.device)
    scalars = (
        rows, columns, *source.steps(),
        0 if row is None else row.buffers[0].stride(-2) * row.plan.spec.codes_per_byte // 2,
        0 if col is None else col.buffers[0].stride(-2) // 4,
        _pitch(row, columns), _pitch(col, stored), _scales_per_matrix(row, count), _scales_per_matrix(col, count),
        0 if hidden is None else hidden.buffers[0].stride(-2) // 4, _pitch(hidden, stored),
        _scales_per_matrix(hidden, count), stored, tiles_m, tiles_k, groups, *amax_counts, 0, 1.0 / columns, source.eps,
        *_random_args(row, columns), *_random_args(col, columns),
    )  # fmt: skip
    configs = [
        None
        if out is None
        else operand_config(out.plan, sm, grouped=_per_group(out), shared_philox=_shares_philox(out, columns))
        for out in (row, col, hidden)
    ]
    constants = (
        *configs, source.name, mode, reg_mode, sm > 0 and reg_mode in ("bf16", "fp16"), even, even_full,
        _group_bound(offs), source.indices is not None, colsum is not None, power_of_two(max(1, *amax_counts)),
        GROUP_ALIGN, sm > 0, tile.J, tile.MQ, tile.BK, tile.down, tile.narrow,
    )  # fmt: skip
    tensors = (
        *source.arguments(), offs, partials,
        *_pointers(row, amaxes[0], transposed=False), *_pointers(col, amaxes[1], transposed=True),
        *_pointers(hidden, None, transposed=True)[:2],
    )  # fmt: skip
    launch(
        cast_kernel, (count * tiles_m * tiles_k,), tensors, (*scalars, *constants),
        num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    if partials is not None and partials.numel():
        launch(
            colsum_kernel, (ceil_div(columns, 256), groups if offs is not None else count), (partials, offs, colsum),
            (rows, columns, tiles_m, groups, _group_bound(offs), GROUP_ALIGN, block_rows, 256),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _dense(out: Output | None) -> Output | None:
    return None if out is None else out._replace(state=dense(out.state), amax=dense(out.amax))


def _group_bound(offs: Tensor | None) -> int:
    """Number of group ends that kernels load: a power of two, 0 without groups."""
    return 0 if offs is None else power_of_two(max(offs.shape[0], 1))


def _pointers(out: Output | None, amax: Tensor | None, *, transposed: bool) -> tuple[Tensor | None, ...]:
    """Codes viewed by their store unit, scales as bytes or fp32, tensor scale, amax, random state."""
    if out is None:
        return (None,) * 5
    data, scale, factor = out.buffers
    unit = torch.int32 if transposed else torch.uint8 if out.plan.spec.codes_per_byte == 2 else torch.int16
    scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    factor = scale.new_empty((0,), dtype=torch.float32) if factor is None else factor  # pointer arguments are typed
    return data.view(torch.uint8).view(unit), scale, factor, amax, out.state


def _pitch(out: Output | None, length: int) -> int:
    """Row stride of the scale buffer; in the blocked layout, 512-byte tiles per row of tiles."""
    if out is None:
        return 0
    if out.plan.layout == "blocked":
        return ceil_div(blocked_columns(out.plan.spec, out.plan.stored_length(length)), 4)
    return out.buffers[1].shape[-1]


def _scales_per_matrix(out: Output | None, count: int) -> int:
    """Scales of one matrix, pads included."""
    return 0 if out is None else out.buffers[1].numel() // count


def _random_args(out: Output | None, columns: int) -> tuple[int, int, int, int, int]:
    """Stream, first group, first row, first column, and columns of the full tensor: position of a shard."""
    if out is None or out.plan.stream is None:
        return 0, 0, 0, 0, 0
    first_row, first_column, all_columns = out.plan.origin or (0, 0, columns)
    return out.plan.stream, out.plan.first_group, first_row, first_column, all_columns


def _shares_philox(out: Output, columns: int) -> bool:
    """Whether four neighbours in a row share one Philox call: rows start at positions that are multiples of four."""
    _, _, _, first_column, all_columns = _random_args(out, columns)
    return first_column % 4 == 0 and all_columns % 4 == 0


def _per_group(out: Output | None) -> bool:
    return out is not None and (out.plan.grouped_amax or (out.amax is not None and out.amax.dim() == 1))


def _amaxes(
    source: Source, row: Output | None, col: Output | None, offs: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    first = _tensor_amax(source, row, offs, transposed=False)
    return first, first if _share_amax(row, col) else _tensor_amax(source, col, offs, transposed=True)


def _share_amax(row: Output | None, col: Output | None) -> bool:
    """Whether both operands have the same tensor scales, computed from the source: neither is rotated."""
    if row is None or col is None or row.plan.spec.family != "nvfp4" or col.plan.spec.family != "nvfp4":
        return False
    keys = {(out.plan.hadamard, out.plan.grouped_amax, out.amax is None) for out in (row, col)}
    return keys in ({(None, True, True)}, {(None, False, True)})


def _tensor_amax(source: Source, out: Output | None, offs: Tensor | None, *, transposed: bool) -> Tensor | None:
    """int32 bit patterns of the amax of the tensor or of each group: supplied, or computed by a second read."""
    if out is None or out.plan.spec.family != "nvfp4":
        return None
    if out.amax is not None:
        return out.amax.view(torch.int32)
    count, rows, columns = source.matrices.shape[0], source.rows, source.columns
    groups = 0 if offs is None else offs.shape[0]
    rotated = None if out.plan.hadamard is None else operand_config(out.plan, 0, grouped=False)
    amax_count = (groups if offs is not None else count) if out.plan.grouped_amax else 1
    amax = torch.zeros(amax_count, dtype=torch.int32, device=source.x.device)
    narrow = source.name.startswith("swiglu_backward") or (rotated is not None and transposed)
    tile = Tile(16, 8, 128, 4) if narrow else Tile(1, 8, 1024, 4)
    block_rows = tile.J * tile.MQ
    tiles_m = ceil_div(rows if offs is None else rows + (GROUP_ALIGN - 1) * (groups + 1), block_rows)
    tiles_k = ceil_div(source.grid_columns, tile.BK)
    even = Even(rows % block_rows == 0 and offs is None and source.indices is None, source.grid_columns % tile.BK == 0)
    constants = (
        out.plan.grouped_amax, source.name, source.mode, source.reg_mode, even, _group_bound(offs),
        source.indices is not None, GROUP_ALIGN, not INTERPRETED, None if transposed else rotated,
        rotated if transposed else None, tile.J, tile.MQ, tile.BK,
    )  # fmt: skip
    launch(
        amax_kernel, (count * tiles_m * tiles_k,), (*source.arguments(), offs, amax),
        (rows, columns, *source.steps(), tiles_m, tiles_k, groups, *constants),
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return amax


# ---- registry entries ------------------------------------------------------------------------------------------------

DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
_MAX_GROUPS = 4096  # every CTA reads all group ends


def reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty tensors"
    if "far" in request.options:
        return "takes rows and columns that lie less than 2^23 values apart: offsets within a tile are 32-bit"
    if "many_groups" in request.options:
        return f"takes at most {_MAX_GROUPS} groups"
    return None


def full_request(request: Request) -> Request:
    """Precompile key of a cast: the full request, since Triton specializes on sizes (1, multiples of 16)."""
    return request


@kernel("cast", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject, precompile_key=full_request)
def quantize(x: Tensor, cast: Cast, axis: int, out: Buffers, offs: Tensor | None) -> None:
    """Triton: one read, codes and scales in place"""
    output = Output(*cast, out)
    if x.stride(-1) != 1 and x.stride(-2) == 1 and cast.state is None and offs is None:
        x, axis = x.mT, -3 - axis  # the transposed source is the contiguous one
    launch_cast(plain(x), output if axis == -1 else None, output if axis == -2 else None, offs=offs)


@kernel("cast_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject, precompile_key=full_request)
def quantize_both(
    x: Tensor, casts: Sequence[Cast], outs: Sequence[Buffers], colsum: Tensor | None, offs: Tensor | None
) -> None:
    """Triton: one read, both operands"""
    row, col = (Output(*cast, out) for cast, out in zip(casts, outs, strict=True))
    launch_cast(plain(x), row, col, colsum=colsum, offs=offs)
