"""Triton casts, sm_80 and newer: grids and arguments for the kernel in `_kernels.py`.

What depends on shapes alone is worked out once per shape, and later calls go straight to the compiled kernel: a cast of
a few microseconds must not wait for the host.
"""

# pyright: basic, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .. import call_recording
from ..formats.cast_spec import CastPlan
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
from ..library import empty
from ..registry import Request, kernel
from ._kernels import amax_kernel, cast_kernel, colsum_kernel
from ._launch_cache import launcher, start
from ._source import Source, Tile, dense, plain, power_of_two, tile_shape
from ._tiles import Even, side

Buffers = tuple[Tensor, Tensor, Tensor | None]

# Under TRITON_INTERPRET=1 kernels run in numpy on the CPU; its fp8 casts do not round, so codes are made by integers.
INTERPRETED = not isinstance(cast_kernel, triton.runtime.JITFunction)


# Where programs may be larger for fewer instructions: elsewhere their tiles spill. 0 is the interpreter.
_LARGER_PROGRAMS = (0, 90)


def _covered(plan: CastPlan, rows: int, length: int) -> tuple[int, int]:
    """Rows and length that programs must walk over, so that pads of codes and scales are written too."""
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
    """One operand to make: its plan, its buffers, and the tensors that its cast reads."""

    plan: CastPlan
    buffers: Buffers
    state: Tensor | None
    amax: Tensor | None


def launch(
    source: Source,
    row: Output | None,
    col: Output | None,
    *,
    colsum: Tensor | None = None,
    offs: Tensor | None = None,
    third: Output | None = None,
) -> None:
    """Fill the buffers of one operand or both, from one read unless that is slower.  third: the column operand of what
    SwiGLU's backward is the backward of, where `takes_third` says so."""
    if row is not None and col is not None and _is_arithmetic(row.plan, col.plan):
        _launch(source, row, None, None, offs, last=False)
        _launch(source, None, col, colsum, offs)
    else:
        _launch(source, row, col, colsum, offs, third)


def takes_third(source: Source, plans: tuple[CastPlan, CastPlan], third: CastPlan) -> bool:
    """Whether SwiGLU's backward writes the operand of its forward's result from the same read: where tiles are whole,
    blocks are plain, and it has the format of the column operand, which the tile is chosen for."""
    row, col = plans
    plain = not (_is_arithmetic(row, col, third) or col.spec.is_2d or col.spec.family == "nvfp4")
    alike = third.spec == col.spec and _sm(source) in _LARGER_PROGRAMS
    return source.name == "swiglu_backward" and plain and alike


def _is_arithmetic(*plans: CastPlan | None) -> bool:
    """Whether values are rotated, or rounded by random words: many instructions, not bytes. Then each operand is made
    by itself, since what two do not share costs more, in registers and barriers, than a second read."""
    return any(plan is not None and (plan.stream is not None or plan.hadamard is not None) for plan in plans)


def _sm(source: Source) -> int:
    """What kernels are compiled for; 0 is the interpreter."""
    return 0 if INTERPRETED else capability(source.x.device).sm


def _launch(
    source: Source,
    row: Output | None,
    col: Output | None,
    colsum: Tensor | None,
    offs: Tensor | None,
    third: Output | None = None,
    *,
    last: bool = True,
) -> None:
    """One kernel. What depends on shapes alone is worked out once per shape.  last: none follows for this cast."""
    row, col, offs = _dense(row), _dense(col), dense(offs)
    x = source.x
    address, device = x.data_ptr(), x.get_device()  # -1 for the CPU
    others: tuple[Tensor | None, ...] = (source.y, source.z, source.indices, offs)
    alone = source.y is None and source.indices is None and offs is None
    key = (
        source.name, source.columns, source.eps, x.shape, x.stride(), x.dtype, device, address % 16,
        None if alone else tuple(map(_layout, others)), _recipe(row), _recipe(col), _recipe(third), colsum is None,
    )  # fmt: skip
    known = _LAUNCHES.get(key)
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # kernels go to the current device
            return _launch(source, row, col, colsum, offs, third, last=last)
    if known is None:
        return _prepare(source, row, col, colsum, offs, third, key)
    amaxes = _amaxes(source, row, col, offs) if known.reads_amax else (None, None)  # held until the kernel has them
    addresses = _NO_OTHERS if alone else map(_address, others)
    sums = None if known.sums is None else empty(known.sums.shape, torch.float64, x.device)
    pointers = (
        address, *addresses, _address(sums), *_addresses(row, amaxes[0]), *_addresses(col, amaxes[1]),
        *_addresses(third, None)[:2],
    )  # fmt: skip
    known.launch(device, *pointers, *known.rest)
    if not known.reads_amax:
        call_recording.note_launch(known.launch, pointers, known.rest, last=last and colsum is None)
    if known.sums is not None:
        pointers = (_address(sums), _address(offs), _address(colsum))
        known.sums.launch(device, *pointers, *known.sums.rest)
        call_recording.note_launch(known.sums.launch, pointers, known.sums.rest)


def _dense(out: Output | None) -> Output | None:
    if out is None or (out.amax is None and out.state is None):
        return out
    return out._replace(state=dense(out.state), amax=dense(out.amax))


class _Sums(NamedTuple):
    """How column sums are finished: room for those of the tiles, and the kernel that adds them."""

    shape: tuple[int, ...]
    launch: Callable[..., None]
    rest: tuple[object, ...]


class _Known(NamedTuple):
    """What a shape decides: a compiled kernel on its grid, and its arguments but for addresses."""

    launch: Callable[..., None]
    rest: tuple[object, ...]
    reads_amax: bool
    sums: _Sums | None


_LAUNCHES: dict[tuple[object, ...], _Known] = {}
_MOST_LAUNCHES = 4096


def _layout(x: Tensor | None) -> tuple[object, ...] | None:
    """All of a tensor that a compiled kernel depends on; Triton compiles anew for addresses off 16 bytes."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16)


def _recipe(out: Output | None) -> object:
    if out is None or (out.amax is None and out.state is None):
        return None if out is None else out.plan
    amax = None if out.amax is None else (out.amax.shape, out.amax.data_ptr() % 16)
    return out.plan, amax, None if out.state is None else out.state.data_ptr() % 16


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


_NO_OPERAND, _NO_OTHERS = (None,) * 5, (None,) * 4


def _addresses(out: Output | None, amax: Tensor | None) -> tuple[int | None, ...]:
    """As `_pointers`, for a compiled kernel."""
    if out is None:
        return _NO_OPERAND
    data, scale, factor = out.buffers
    if amax is None and out.state is None:
        return data.data_ptr(), scale.data_ptr(), None if factor is None else factor.data_ptr(), None, None
    return data.data_ptr(), scale.data_ptr(), _address(factor), _address(amax), _address(out.state)


def _prepare(
    source: Source,
    row: Output | None,
    col: Output | None,
    colsum: Tensor | None,
    offs: Tensor | None,
    third: Output | None,
    key: tuple[object, ...],
) -> None:
    """Launch through the compiler, and remember what it made."""
    matrices = source.matrices
    count, rows, columns = matrices.shape[0], source.rows, source.columns
    mode, held = source.mode, source.held
    sm = _sm(source)
    groups = 0 if offs is None else offs.shape[0]
    dense = offs is None and source.indices is None
    plans = [None if out is None else out.plan for out in (row, col)]
    whole = dense and rows % 256 == 0 and columns % 128 == 0
    tile = tile_shape(plans[0], plans[1], sm=sm, source=source, whole=whole)
    block_rows = tile.J * tile.MQ
    length = rows if offs is None else padded_length(rows, groups)
    stored = length if col is None or offs is not None else col.plan.stored_length(length)
    cover_m, cover_k = rows, columns
    if row is not None:
        cover_m, cover_k = _covered(row.plan, rows, row.plan.stored_length(columns))
    if col is not None:
        need = _covered(col.plan, columns, stored)
        cover_m, cover_k = max(cover_m, need[1]), max(cover_k, need[0])
    if third is not None:
        cover_m = max(cover_m, _covered(third.plan, source.walked, stored)[1])
    even = Even(
        dense and rows % block_rows == 0 and cover_m == rows, source.walked % tile.BK == 0 and cover_k == columns
    )
    has_two_bodies = offs is not None and sm in _LARGER_PROGRAMS and not _is_arithmetic(*plans)
    inner = Even(True, even.columns) if has_two_bodies else None
    if offs is not None:
        cover_m = max(length, rows + (GROUP_ALIGN - 1) * (groups + 1))
    tiles_m, tiles_k = ceil_div(cover_m, block_rows), ceil_div(cover_k, tile.BK)
    if source.walked != columns:  # a program writes the tile and the one beside it
        tiles_k = source.walked // tile.BK
    amaxes = _amaxes(source, row, col, offs)
    scopes = [0 if top is None else top.numel() for top in amaxes]
    sums = None
    if colsum is not None:
        sums = torch.empty(count, tiles_m, columns, dtype=torch.float64, device=colsum.device)
    grid = (count * tiles_m * tiles_k, 1, 1)
    numbers = (
        rows, columns, *source.steps(),
        0 if row is None else row.buffers[0].stride(-2) * row.plan.spec.codes_per_byte // 2,
        0 if col is None else col.buffers[0].stride(-2) // 4,
        _pitch(row, columns), _pitch(col, stored), _scales(row, count), _scales(col, count),
        0 if third is None else third.buffers[0].stride(-2) // 4, _pitch(third, stored), _scales(third, count),
        stored, tiles_m, tiles_k, groups, *scopes, 0, 1.0 / columns, source.eps,
        *_random(row, columns), *_random(col, columns),
    )  # fmt: skip
    sides = [
        None if out is None else side(out.plan, sm, grouped=_per_group(out), fours=_share_draws(out, columns))
        for out in (row, col, third)
    ]
    constants = (
        *sides, source.name, mode, held, sm > 0 and held in ("bf16", "fp16"), even, inner, _group_bound(offs),
        source.indices is not None, colsum is not None, power_of_two(max(1, *scopes)), GROUP_ALIGN, sm > 0,
        tile.J, tile.MQ, tile.BK, tile.down, tile.narrow,
    )  # fmt: skip
    compiled = start(cast_kernel, grid, source.x)(
        *source.arguments(), offs, sums,
        *_pointers(row, amaxes[0], transposed=False), *_pointers(col, amaxes[1], transposed=True),
        *_pointers(third, None, transposed=True)[:2],
        *numbers, *constants, num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    added = None
    if sums is not None and sums.numel():
        sums_grid = (ceil_div(columns, 256), groups if offs is not None else count, 1)
        rest = (rows, columns, tiles_m, groups, _group_bound(offs), GROUP_ALIGN, block_rows, 256)
        adder = start(colsum_kernel, sums_grid, source.x)(
            sums, offs, colsum, *rest, num_warps=4, enable_fp_fusion=False
        )  # fmt: skip
        if adder is not None and not source.x.is_meta:
            added = _Sums(tuple(sums.shape), launcher(adder, sums_grid), rest)
    if compiled is not None and source.in_place and not source.x.is_meta and (added is None) == (colsum is None):
        if len(_LAUNCHES) >= _MOST_LAUNCHES:
            _LAUNCHES.clear()
        _LAUNCHES[key] = _Known(launcher(compiled, grid), (*numbers, *constants), any(scopes), added)


def _group_bound(offs: Tensor | None) -> int:
    """Group ends as kernels load them: a power of two, 0 without groups."""
    return 0 if offs is None else power_of_two(max(offs.shape[0], 1))


def _pointers(out: Output | None, amax: Tensor | None, *, transposed: bool) -> tuple[Tensor | None, ...]:
    """Codes by the unit that they are stored in, scales as bytes or fp32, tensor scale, maximum, random state."""
    if out is None:
        return (None,) * 5
    data, scale, factor = out.buffers
    unit = torch.int32 if transposed else torch.uint8 if out.plan.spec.codes_per_byte == 2 else torch.int16
    scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    factor = scale.new_empty((0,), dtype=torch.float32) if factor is None else factor  # kernels are typed
    return data.view(torch.uint8).view(unit), scale, factor, amax, out.state


def _pitch(out: Output | None, length: int) -> int:
    """From one row of the scale buffer to the next; 512-byte tiles beside each other in the blocked layout."""
    if out is None:
        return 0
    if out.plan.layout == "blocked":
        return ceil_div(blocked_columns(out.plan.spec, out.plan.stored_length(length)), 4)
    return out.buffers[1].shape[-1]


def _scales(out: Output | None, count: int) -> int:
    """Scales of one matrix, pads included."""
    return 0 if out is None else out.buffers[1].numel() // count


def _random(out: Output | None, columns: int) -> tuple[int, int, int, int, int]:
    """Stream and first group, first row, first column and columns of the whole tensor."""
    if out is None or out.plan.stream is None:
        return 0, 0, 0, 0, 0
    first_row, first_column, all_columns = out.plan.origin or (0, 0, columns)
    return out.plan.stream, out.plan.first_group, first_row, first_column, all_columns


def _share_draws(out: Output, columns: int) -> bool:
    """Whether positions of four neighbours in a row, from a multiple of four columns on, differ in two bits only."""
    _, _, _, first_column, all_columns = _random(out, columns)
    return first_column % 4 == 0 and all_columns % 4 == 0


def _per_group(out: Output | None) -> bool:
    return out is not None and (out.plan.grouped_amax or (out.amax is not None and out.amax.dim() == 1))


def _amaxes(
    source: Source, row: Output | None, col: Output | None, offs: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    first = _tensor_amax(source, row, offs, transposed=False)
    return first, first if _same_amax(row, col) else _tensor_amax(source, col, offs, transposed=True)


def _same_amax(row: Output | None, col: Output | None) -> bool:
    """Whether both operands have the same tensor scales, to be found in the source: neither is rotated."""
    if row is None or col is None or row.plan.spec.family != "nvfp4" or col.plan.spec.family != "nvfp4":
        return False
    kinds = {(out.plan.hadamard, out.plan.grouped_amax, out.amax is None) for out in (row, col)}
    return kinds in ({(None, True, True)}, {(None, False, True)})


def _tensor_amax(source: Source, out: Output | None, offs: Tensor | None, *, transposed: bool) -> Tensor | None:
    """int32 patterns of the tensor's maximum, or of each group's: supplied, or from one more read."""
    if out is None or out.plan.spec.family != "nvfp4":
        return None
    if out.amax is not None:
        return out.amax.view(torch.int32)
    count, rows, columns = source.matrices.shape[0], source.rows, source.columns
    groups = 0 if offs is None else offs.shape[0]
    rotated = None if out.plan.hadamard is None else side(out.plan, 0, grouped=False)
    scopes = (groups if offs is not None else count) if out.plan.grouped_amax else 1
    top = torch.zeros(scopes, dtype=torch.int32, device=source.x.device)
    narrow = source.name.startswith("swiglu_backward") or (rotated is not None and transposed)
    tile = Tile(16, 8, 128, 4) if narrow else Tile(1, 8, 1024, 4)
    block_rows = tile.J * tile.MQ
    tiles_m = ceil_div(rows if offs is None else rows + (GROUP_ALIGN - 1) * (groups + 1), block_rows)
    tiles_k = ceil_div(source.walked, tile.BK)
    even = Even(rows % block_rows == 0 and offs is None and source.indices is None, source.walked % tile.BK == 0)
    start(amax_kernel, (count * tiles_m * tiles_k,), source.x)(
        *source.arguments(), offs, top, rows, columns, *source.steps(), tiles_m, tiles_k, groups,
        PER_GROUP=out.plan.grouped_amax, SOURCE=source.name, MODE=source.mode, HELD=source.held, EVEN=even,
        FAST=not INTERPRETED, GATHER=source.indices is not None, GROUPS=_group_bound(offs), ALIGN=GROUP_ALIGN,
        ROW=None if transposed else rotated, COL=rotated if transposed else None,
        J=tile.J, MQ=tile.MQ, BK=tile.BK, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return top


# ---- rows of the table -----------------------------------------------------------------------------------------------

DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
_MOST_GROUPS = 4096  # their ends are read by every program


def reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty tensors"
    if "far" in request.options:
        return "takes rows and columns that lie less than 2^23 values apart: offsets within a tile are 32-bit"
    if "many_groups" in request.options:
        return f"takes at most {_MOST_GROUPS} groups"
    return None


def itself(request: Request) -> Request:
    """Which kernel serves a cast is the compiler's to say: it tells kinds of sizes apart (1, multiples of 16)."""
    return request


@kernel("cast", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject, precompile_key=itself)
def quantize(
    x: Tensor,
    plan: CastPlan,
    axis: int,
    out: Buffers,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
    offs: Tensor | None = None,
) -> None:
    """Triton: one read, codes and scales in place"""
    output = Output(plan, out, state, amax)
    if x.stride(-1) != 1 and x.stride(-2) == 1 and state is None and offs is None:
        x, axis = x.mT, -3 - axis  # the transposed source is the one that lies in memory
    launch(plain(x), output if axis == -1 else None, output if axis == -2 else None, offs=offs)


@kernel("cast_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject, precompile_key=itself)
def quantize_both(
    x: Tensor,
    plans: tuple[CastPlan, CastPlan],
    outs: tuple[Buffers, Buffers],
    colsum: Tensor | None,
    *,
    states: tuple[Tensor | None, Tensor | None] = (None, None),
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None),
    offs: Tensor | None = None,
) -> None:
    """Triton: one read, both operands"""
    row, col = (Output(*parts) for parts in zip(plans, outs, states, amaxes, strict=True))
    launch(plain(x), row, col, colsum=colsum, offs=offs)
