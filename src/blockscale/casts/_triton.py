"""Triton casts, sm_80 and newer: one kernel makes the row operand, the column operand, or both from one read.

A program takes a tile of the source and writes codes and scales where a product reads them (`_tiles.py`); NVFP4 without a
supplied maximum reads the tensor once more before. Group ends and gathered rows are read on the device. Offsets are
64-bit. docs/design/casts.md has the figures behind the tiles.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import GROUP_ALIGN, ceil_div, code_row_bytes, padded_length, round_up, scale_counts
from ..hardware import capability
from ..registry import Request, kernel
from ._tiles import (
    load_pairs,
    rotate_columns,
    rotate_rows,
    side,
    tensor_factors,
    values,
    write_column,
    write_row,
)

Buffers = tuple[Tensor, Tensor, Tensor]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _locate(offs_ptr, groups, position, M, GROUPS: tl.constexpr, ALIGN: tl.constexpr):
    """The group that the tile at a padded position lies in: its number, the tile's first source row, the group's first
    row, and its end. Past the last group come the rows of no group, under the number `groups`."""
    i = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + i, mask=i < groups, other=0)
    starts = tl.load(offs_ptr + i - 1, mask=(i > 0) & (i < groups), other=0)
    sizes = tl.where(i < groups, ends - starts, 0)
    padded = tl.cdiv(sizes, ALIGN) * ALIGN
    group = tl.sum(((tl.cumsum(padded, 0) <= position) & (i < groups)).to(tl.int32))
    start = tl.sum(tl.where(i < group, sizes, 0))
    end = tl.where(group < groups, start + tl.sum(tl.where(i == group, sizes, 0)), M)
    row0 = start + position - tl.sum(tl.where(i < group, padded, 0))
    return group, row0, start, end


@triton.jit
def _load_tile(
    x_ptr, index_ptr, e, row0, rows_end, pk, K, stride_e, stride_m, stride_k,
    MODE: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Pairs [MQ, J, W] of the tile at (row0, pk * BK) of matrix e; strides are in words unless MODE is "any".

    Loaded as a matrix whose rows are in the order (j, mq): then lanes and warps take the MQ groups and a thread keeps
    the J rows of one, by a rule that every Triton has for matrices. Among three dimensions versions choose differently.
    """
    i = tl.arange(0, J * MQ)[:, None]
    m = (i % MQ) * J + i // MQ
    w = pk * (BK // 2) + tl.arange(0, BK // 2)[None, :]
    ok = m < rows_end - row0
    x_ptr += e * stride_e
    if GATHER:
        source = tl.load(index_ptr + row0 + m, mask=ok, other=-1).to(tl.int64)
        lo, hi = load_pairs(x_ptr, source * stride_m, w, ok & (source >= 0), K, stride_k, MODE, EVEN)
    else:
        # within a tile 32 bits are enough, and 64-bit offsets for each row would cost a third of the registers
        lo, hi = load_pairs(x_ptr + row0.to(tl.int64) * stride_m, m * stride_m, w, ok, K, stride_k, MODE, EVEN)
    lo = tl.permute(tl.reshape(lo, (J, MQ, BK // 2)), (1, 0, 2))
    hi = tl.permute(tl.reshape(hi, (J, MQ, BK // 2)), (1, 0, 2))
    return lo, hi


@triton.jit
def _cast_kernel(
    x_ptr, index_ptr, offs_ptr, sums_ptr,
    row_data, row_scale, row_global, row_amax, row_state, col_data, col_scale, col_global, col_amax, col_state,
    M, K, stride_e, stride_m, stride_k, row_units, col_units, row_pitch, col_pitch, row_scales, col_scales,
    length, tiles_m, tiles_k, groups, count, zero,
    row_stream, row_group, row_first, row_origin, row_stride,
    col_stream, col_group, col_first, col_origin, col_stride,
    ROW: tl.constexpr, COL: tl.constexpr, MODE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, GATHER: tl.constexpr, SUMS: tl.constexpr, COUNT: tl.constexpr, ALIGN: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pk, pm, e = pid % tiles_k, (pid // tiles_k) % tiles_m, (pid // tiles_k // tiles_m).to(tl.int64)
    position = pm * (MQ * J)
    if GROUPS:
        group, row0, start, rows_end = _locate(offs_ptr, groups, position, M, GROUPS, ALIGN)
        inside = group < groups
    else:
        group, row0, start, rows_end, inside = e, position, 0, M, e >= 0
    lo, hi = _load_tile(
        x_ptr, index_ptr, e, row0, rows_end, pk, K, stride_e, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK
    )
    if SUMS:
        low, high = values(lo, hi, MODE)
        low, high = tl.sum(tl.sum(low.to(tl.float64), 1), 0), tl.sum(tl.sum(high.to(tl.float64), 1), 0)
        k = pk * BK + tl.arange(0, BK)
        tl.store(sums_ptr + (e * tiles_m + pm) * K + k, tl.reshape(tl.join(low, high), (BK,)), mask=k < K)
    if COL is not None:
        factors = tensor_factors(col_amax, col_global, group, inside, pid == 0, count, COUNT, COL)
        first = ((e * M + row0 - start) + col_first) * col_stride + col_origin
        number = group + col_group if GROUPS else e * 0
        write_column(
            col_data + e * K * col_units, col_scale + e * col_scales, lo, hi,
            position, length, inside, pk, K, col_units, col_pitch, factors, (col_state, col_stream, number, first, col_stride),
            MODE, PACKED, EVEN, GROUPS > 0, COL,
        )  # fmt: skip
    if ROW is not None:
        if COL is not None and PACKED:
            # Words that the compiler takes for new ones, so that it unpacks them once more: keeping the fp32 values of
            # a whole tile would leave room for two programs instead of three.
            lo = lo ^ zero
            hi = lo
        factors = tensor_factors(row_amax, row_global, group, inside, pid == 0, count, COUNT, ROW)
        first = ((e * M + row0 - start) + row_first) * row_stride + row_origin
        number = group + row_group if GROUPS else e * 0
        write_row(
            row_data + e * M * row_units, row_scale + e * row_scales, lo, hi,
            row0, rows_end, M, pk, K, row_units, row_pitch, factors, (row_state, row_stream, number, first, row_stride),
            MODE, PACKED, EVEN, ROW,
        )  # fmt: skip


@triton.jit
def _amax_kernel(
    x_ptr, index_ptr, offs_ptr, amax_ptr, M, K, stride_e, stride_m, stride_k, tiles_m, tiles_k, groups,
    PER_GROUP: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr, GATHER: tl.constexpr,
    ALIGN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Largest pattern of the tensor, or of each group, as one side will see it: rotated, when it rotates."""
    pid = tl.program_id(0)
    pk, pm, e = pid % tiles_k, (pid // tiles_k) % tiles_m, (pid // tiles_k // tiles_m).to(tl.int64)
    if GROUPS:
        group, row0, start, rows_end = _locate(offs_ptr, groups, pm * (MQ * J), M, GROUPS, ALIGN)
        inside = group < groups
    else:
        group, row0, rows_end, inside = e, pm * (MQ * J), M, e >= 0
    lo, hi = _load_tile(
        x_ptr, index_ptr, e, row0, rows_end, pk, K, stride_e, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK
    )
    lo, hi = values(lo, hi, MODE)
    if ROW is not None:
        lo, hi = rotate_rows(lo, hi, ROW)
    if COL is not None:
        lo, hi = rotate_columns(lo, COL), rotate_columns(hi, COL)
    most = tl.maximum(tl.abs(lo), tl.abs(hi), propagate_nan=tl.PropagateNan.ALL)
    most = tl.max(most.to(tl.int32, bitcast=True))
    tl.atomic_max(amax_ptr + (group if PER_GROUP else 0), most, mask=inside, sem="relaxed")


@triton.jit
def _colsum_kernel(
    sums_ptr, offs_ptr, out_ptr, M, K, tiles_m, groups, GROUPS: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Partial sums of tiles, added in their order: fp64 [matrices, tiles, K] -> fp32 [matrices or groups, K]."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    g = tl.program_id(1).to(tl.int64)
    first, last = g * tiles_m, (g + 1) * tiles_m
    if GROUPS:
        i = tl.arange(0, GROUPS)
        ends = tl.load(offs_ptr + i, mask=i < groups, other=0)
        starts = tl.load(offs_ptr + i - 1, mask=(i > 0) & (i < groups), other=0)
        tiles = tl.cdiv(tl.where(i < groups, ends - starts, 0), ALIGN) * (ALIGN // BM)
        first = tl.sum(tl.where(i < g, tiles, 0)).to(tl.int64)
        last = first + tl.sum(tl.where(i == g, tiles, 0))
    total = tl.zeros((BK,), tl.float64)
    for tile in range(first, last):
        total += tl.load(sums_ptr + tile * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + g * K + k, total.to(tl.float32), mask=k < K)


# Under TRITON_INTERPRET=1 kernels run in numpy on the CPU; its fp8 casts do not round, so codes are made by integers.
INTERPRETED = not isinstance(_cast_kernel, triton.runtime.JITFunction)


# ---- launching -------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """MQ groups of J rows by BK columns, for a program of `warps`; see `_tiles.py`. `registers`: the most a thread may
    take, so that three programs fit on a multiprocessor."""

    J: int
    MQ: int
    BK: int
    warps: int
    registers: int | None = None


def tile_shape(row: CastPlan | None, col: CastPlan | None, columns: int, *, sm: int, wide: bool, whole: bool) -> Tile:
    """The tile for a cast. wide: fp32 input, twice the registers.  whole: tiles cover the source exactly, no groups.

    Measured on an H200, see docs/design/casts.md; the ahead-of-time tests hold every choice to zero spills.
    """
    plans = [plan for plan in (row, col) if plan is not None]
    busy = wide or any(plan.stream is not None or plan.hadamard is not None for plan in plans)
    if col is None:
        assert row is not None
        if row.spec.block[0] == 128:
            return Tile(1, 128, 128, 8 if busy else 4)
        # the widest strip that wastes least
        width = min((1024, 512, 256, 128), key=lambda width: (round_up(columns, width), -width))
        rows = max(row.spec.block[0], (4 if busy else 8) * 1024 // width)
        return Tile(1, rows, width, 8 if rows * width > 8192 and busy else 4)
    if row is None and col.spec.block[0] != 128 and whole:
        return Tile(16, 16, 64, 8 if busy else 4)
    if row is None or row.spec.codes_per_byte == 2:
        return Tile(16, 8, 128, 8 if busy else 4)
    return Tile(8, 16, 128, 8) if busy else Tile(8, 16, 128, 4, 168 if whole and sm >= 89 else None)


def _pointer_mode(x: Tensor) -> str:
    """How pairs of x are loaded: by whole words where every pair lies on one, else value by value."""
    word = 2 * x.element_size()
    whole = x.stride(-1) == 1 and x.shape[-1] % 2 == 0 and x.data_ptr() % word == 0
    if not whole or any(step % 2 for step in x.stride()[:-1]):
        return "any"
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[x.dtype]


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
        return round_up(rows, 128), max(length, round_up(blocks, 4) * along)
    return rows, length


class _Output(NamedTuple):
    """One operand to make: its plan, its buffers, and the tensors that its cast reads."""

    plan: CastPlan
    buffers: Buffers
    state: Tensor | None
    amax: Tensor | None


def launch(
    x: Tensor,
    row: _Output | None,
    col: _Output | None,
    *,
    colsum: Tensor | None = None,
    offs: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """Fill the buffers of one operand or both from x [..., M, K]; `index` picks the rows, M of them."""
    matrices = x.reshape(-1, x.shape[-2], x.shape[-1])
    count, rows, columns = matrices.shape
    rows = rows if index is None else index.shape[0]
    mode = _pointer_mode(matrices)
    sm = 0 if INTERPRETED else capability(x.device).sm
    groups = 0 if offs is None else offs.shape[0]
    plans = [None if out is None else out.plan for out in (row, col)]
    whole = offs is None and index is None and rows % 256 == 0 and columns % 128 == 0
    tile = tile_shape(plans[0], plans[1], columns, sm=sm, wide=x.dtype == torch.float32, whole=whole)
    block_rows = tile.J * tile.MQ
    length = rows if offs is None else padded_length(rows, groups)
    stored = length if col is None or offs is not None else col.plan.stored_length(length)
    cover_m, cover_k, even = rows, columns, True
    if row is not None:
        width = row.plan.stored_length(columns)
        need = _covered(row.plan, rows, width)
        cover_m, cover_k, even = need[0], need[1], even and need == (rows, columns)
    if col is not None:
        need = _covered(col.plan, columns, stored)
        cover_m, cover_k = max(cover_m, need[1]), max(cover_k, need[0])
        even = even and need == (columns, rows)
    if offs is not None:
        cover_m = max(length, rows + (GROUP_ALIGN - 1) * (groups + 1))
    tiles_m, tiles_k = ceil_div(cover_m, block_rows), ceil_div(cover_k, tile.BK)
    even = even and rows % block_rows == 0 and columns % tile.BK == 0 and offs is None and index is None
    amaxes = [
        _tensor_amax(matrices, out, mode, offs, index, rows, transposed=transposed)
        for out, transposed in ((row, False), (col, True))
    ]
    per_group = [_per_group(out) for out in (row, col)]
    sides = [
        None if out is None else side(out.plan, sm, grouped=g) for out, g in zip((row, col), per_group, strict=True)
    ]
    sums = None
    if colsum is not None:
        sums = torch.empty(count, tiles_m, columns, dtype=torch.float64, device=x.device)
    steps = matrices.stride() if mode == "any" else tuple(step // 2 for step in matrices.stride())
    scopes = max((1 if a is None else a.shape[0] if a.dim() else 1) for a in amaxes)
    _cast_kernel[(count * tiles_m * tiles_k,)](
        _words(matrices, mode), index, offs, sums,
        *_pointers(row, amaxes[0], transposed=False), *_pointers(col, amaxes[1], transposed=True),
        rows, columns, *steps,
        0 if row is None else row.buffers[0].stride(-2) * row.plan.spec.codes_per_byte // 2,
        0 if col is None else col.buffers[0].stride(-2) // 4,
        _pitch(row, columns), _pitch(col, stored), _scales(row, count), _scales(col, count), stored, tiles_m, tiles_k, groups, scopes, 0,
        *_random(row, columns), *_random(col, columns),
        ROW=sides[0], COL=sides[1], MODE=mode, PACKED=bool(sm) and mode in ("bf16", "fp16"), EVEN=even,
        GROUPS=triton.next_power_of_2(groups) if groups else int(offs is not None), GATHER=index is not None,
        SUMS=colsum is not None, COUNT=triton.next_power_of_2(scopes), ALIGN=GROUP_ALIGN,
        J=tile.J, MQ=tile.MQ, BK=tile.BK, num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    if colsum is not None:
        _colsum_kernel[(ceil_div(columns, 256), groups if offs is not None else count)](
            sums, offs, colsum, rows, columns, tiles_m, groups,
            GROUPS=triton.next_power_of_2(groups) if groups else 0, ALIGN=GROUP_ALIGN, BM=block_rows, BK=256,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _words(x: Tensor, mode: str) -> Tensor:
    """x as the words that pairs are loaded by."""
    return x if mode == "any" else x.view(torch.int64 if mode == "fp32" else torch.int32)


def _pointers(out: _Output | None, amax: Tensor | None, *, transposed: bool) -> tuple[Tensor | None, ...]:
    """Codes by the unit that they are stored in, scales as bytes or fp32, the tensor's scale, its maximum, the state."""
    if out is None:
        return (None,) * 5
    data, scale, factor = out.buffers
    unit = torch.int32 if transposed else torch.uint8 if out.plan.spec.codes_per_byte == 2 else torch.int16
    scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    return data.view(torch.uint8).view(unit), scale, factor, amax, out.state


def _pitch(out: _Output | None, length: int) -> int:
    """From one row of the scale buffer to the next; 512-byte tiles beside each other in the blocked layout."""
    if out is None:
        return 0
    if out.plan.layout == "blocked":
        return ceil_div(ceil_div(out.plan.stored_length(length), out.plan.spec.block[1]), 4)
    return out.buffers[1].shape[-1]


def _scales(out: _Output | None, count: int) -> int:
    """Scales of one matrix, pads included."""
    return 0 if out is None else out.buffers[1].numel() // count


def _random(out: _Output | None, columns: int) -> tuple[int, int, int, int, int]:
    """Stream and first group, first row, first column and columns of the whole tensor."""
    if out is None or out.plan.stream is None:
        return 0, 0, 0, 0, 0
    return out.plan.stream, out.plan.first_group, *(out.plan.origin or (0, 0, columns))


def _per_group(out: _Output | None) -> bool:
    return out is not None and (out.plan.grouped_amax or (out.amax is not None and out.amax.dim() == 1))


def _tensor_amax(
    matrices: Tensor, out: _Output | None, mode: str, offs: Tensor | None, index: Tensor | None, rows: int,
    *, transposed: bool,
) -> Tensor | None:  # fmt: skip
    """int32 patterns of the tensor's maximum, or of each group's: supplied, or from one more read."""
    if out is None or out.plan.spec.family != "nvfp4":
        return None
    if out.amax is not None:
        return out.amax.view(torch.int32)
    count, _, columns = matrices.shape
    rotated = None if out.plan.hadamard is None else side(out.plan, 0, grouped=False)
    groups = 0 if offs is None else offs.shape[0]
    scopes = (groups if offs is not None else count) if out.plan.grouped_amax else 1
    top = torch.zeros(scopes, dtype=torch.int32, device=matrices.device)
    tile = Tile(16, 8, 128, 4) if rotated is not None and transposed else Tile(1, 8, 1024, 4)
    block_rows = tile.J * tile.MQ
    tiles_m = ceil_div(rows if offs is None else rows + (GROUP_ALIGN - 1) * (groups + 1), block_rows)
    tiles_k = ceil_div(columns, tile.BK)
    even = rows % block_rows == 0 and columns % tile.BK == 0 and offs is None and index is None
    steps = matrices.stride() if mode == "any" else tuple(step // 2 for step in matrices.stride())
    _amax_kernel[(count * tiles_m * tiles_k,)](
        _words(matrices, mode), index, offs, top, rows, columns, *steps, tiles_m, tiles_k, groups,
        PER_GROUP=out.plan.grouped_amax, MODE=mode, EVEN=even, GATHER=index is not None,
        GROUPS=triton.next_power_of_2(groups) if groups else int(offs is not None), ALIGN=GROUP_ALIGN,
        ROW=None if transposed else rotated, COL=rotated if transposed else None,
        J=tile.J, MQ=tile.MQ, BK=tile.BK, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return top


# ---- rows of the table -----------------------------------------------------------------------------------------------

_DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
_MOST_GROUPS = 4096  # their ends are read by every program


def _reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty tensors"
    if "many_groups" in request.options:
        return f"takes at most {_MOST_GROUPS} groups"
    return None


@kernel("cast", "triton", devices=_DEVICES, sm=(80, 999), priority=50, reject=_reject)
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
    output = _Output(plan, out, state, amax)
    if x.stride(-1) != 1 and x.stride(-2) == 1 and state is None and offs is None:
        x, axis = x.mT, -3 - axis  # the transposed source is the one that lies in memory
    launch(x, output if axis == -1 else None, output if axis == -2 else None, offs=offs)


@kernel("cast_both", "triton", devices=_DEVICES, sm=(80, 999), priority=50, reject=_reject)
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
    row, col = (_Output(*parts) for parts in zip(plans, outs, states, amaxes, strict=True))
    launch(x, row, col, colsum=colsum, offs=offs)
