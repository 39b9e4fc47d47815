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
from ._device import round_to_bf16
from ._device_fused import swiglu, swiglu_backward
from ._tiles import (
    hold,
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
def _place(offs_ptr, e, position, M, groups, GROUPS: tl.constexpr, ALIGN: tl.constexpr):
    """What the tile at a (padded) position covers: its group, its first source row, the group's first row and end, and
    whether there is a group. Past the last group come the rows of no group, under the number `groups`; without groups
    every matrix is one."""
    if GROUPS:
        i = tl.arange(0, GROUPS)
        ends = tl.load(offs_ptr + i, mask=i < groups, other=0)
        starts = tl.load(offs_ptr + i - 1, mask=(i > 0) & (i < groups), other=0)
        sizes = tl.where(i < groups, ends - starts, 0)
        padded = tl.cdiv(sizes, ALIGN) * ALIGN
        group = tl.sum(((tl.cumsum(padded, 0) <= position) & (i < groups)).to(tl.int32))
        start = tl.sum(tl.where(i < group, sizes, 0))
        end = tl.where(group < groups, start + tl.sum(tl.where(i == group, sizes, 0)), M)
        row0 = start + position - tl.sum(tl.where(i < group, padded, 0))
        return group, row0, start, end, group < groups
    else:
        return e, position, 0, M, e >= 0


@triton.jit
def _load_tile(
    x_ptr, index_ptr, row0, rows_end, pk, columns, stride_m, stride_k,
    MODE: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile at (row0, pk * BK) of a matrix, as it is held; strides are in words unless MODE is "any"."""
    m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
    w = pk * (BK // 2) + tl.arange(0, BK // 2)[None, None, :]
    ok = m < rows_end - row0
    if GATHER:
        source = tl.load(index_ptr + row0 + m, mask=ok, other=-1).to(tl.int64)
        return load_pairs(x_ptr, source * stride_m, w, ok & (source >= 0), columns, stride_k, MODE, EVEN)
    else:
        # within a tile 32 bits are enough, and 64-bit offsets for each row would cost a third of the registers
        return load_pairs(
            x_ptr + tl.cast(row0, tl.int64) * stride_m, m * stride_m, w, ok, columns, stride_k, MODE, EVEN
        )


@triton.jit
def _load_source(
    source, e, row0, rows_end, pk, M, K,
    SOURCE: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile of what is cast and, for a backward of SwiGLU, the tile beside it: as they are held.

    plain: x itself.  swiglu: x is [gate | up], the cast tensor its half.  swiglu_backward: y is the gradient of that,
    and the cast tensor [gradient of gate | gradient of up].  rmsnorm: y is rstd [rows], z the weight [columns]. What is
    computed is rounded to the type of x.
    """
    x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m = source
    x_ptr += e * stride_e
    if SOURCE == "plain":
        lo, hi = _load_tile(
            x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK
        )  # fmt: skip
        return lo, hi, lo, hi
    elif SOURCE == "rmsnorm":
        a, b = _load_tile(x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK)
        lo, hi = values(a, b, MODE)
        m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
        factor = tl.load(y_ptr + e * M + row0 + m, mask=m < rows_end - row0, other=0.0)
        k = pk * BK + 2 * tl.arange(0, BK // 2)[None, None, :]
        first = tl.load(z_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        second = tl.load(z_ptr + k + 1, mask=k + 1 < K, other=0.0).to(tl.float32)
        lo, hi = _rounded((lo * factor) * first, (hi * factor) * second, x_ptr, MODE, FAST)
        return lo, hi, lo, hi
    else:
        H = K if SOURCE == "swiglu" else K // 2
        up_ptr = x_ptr + (H * stride_k if MODE == "any" else H // 2)
        a, b = _load_tile(x_ptr, index_ptr, row0, rows_end, pk, H, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK)
        c, d = _load_tile(up_ptr, index_ptr, row0, rows_end, pk, H, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK)
        gate_lo, gate_hi = values(a, b, MODE)
        up_lo, up_hi = values(c, d, MODE)
        if SOURCE == "swiglu":
            lo, hi = _rounded(swiglu(gate_lo, up_lo), swiglu(gate_hi, up_hi), x_ptr, MODE, FAST)
            return lo, hi, lo, hi
        else:
            y_ptr += e * y_e
            a, b = _load_tile(y_ptr, index_ptr, row0, rows_end, pk, H, y_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK)
            dy_lo, dy_hi = values(a, b, MODE)
            gate_lo, up_lo = swiglu_backward(dy_lo, gate_lo, up_lo)
            gate_hi, up_hi = swiglu_backward(dy_hi, gate_hi, up_hi)
            gate_lo, gate_hi = _rounded(gate_lo, gate_hi, x_ptr, MODE, FAST)
            up_lo, up_hi = _rounded(up_lo, up_hi, x_ptr, MODE, FAST)
            return gate_lo, gate_hi, up_lo, up_hi


@triton.jit
def _rounded(lo, hi, x_ptr, MODE: tl.constexpr, FAST: tl.constexpr):
    """fp32 pairs rounded to the source's type, as they are held."""
    if MODE == "any" and x_ptr.dtype.element_ty == tl.bfloat16:
        return round_to_bf16(lo), round_to_bf16(hi)
    elif MODE == "any" and x_ptr.dtype.element_ty == tl.float16:
        return lo.to(tl.float16).to(tl.float32), hi.to(tl.float16).to(tl.float32)
    else:
        return hold(lo, hi, MODE, FAST)


@triton.jit
def _write_tile(
    lo, hi, row, col, sums_ptr, e, pk, pm, place, position, is_first, M, K, length, tiles_m, count, zero,
    ROW: tl.constexpr, COL: tl.constexpr, HELD: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    GROUPED: tl.constexpr, SUMS: tl.constexpr, COUNT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the operands of a tile. place: (group, first row, group's first row, its end, whether there is a group);
    row, col: the kernel's arguments for each."""
    group, row0, start, rows_end, inside = place
    if SUMS:
        low, high = values(lo, hi, HELD)
        low, high = tl.sum(tl.sum(low.to(tl.float64), 1), 0), tl.sum(tl.sum(high.to(tl.float64), 1), 0)
        k = pk * BK + tl.arange(0, BK)
        tl.store(sums_ptr + (e * tiles_m + pm) * K + k, tl.reshape(tl.join(low, high), (BK,)), mask=k < K)
    if COL is not None:
        data, scale, factor, amax, state, units, pitch, scales, stream, number, first_row, origin, stride = col
        factors = tensor_factors(amax, factor, group, inside, is_first, count, COUNT, COL)
        first = ((e * M + row0 - start) + first_row) * stride + origin
        random = (state, stream, group + number if GROUPED else e * 0, first, stride)
        write_column(
            data + e * K * units, scale + e * scales, lo, hi, position, length, inside, pk, K, units, pitch, factors,
            random, HELD, PACKED, EVEN, GROUPED, COL,
        )  # fmt: skip
    if ROW is not None:
        if COL is not None and PACKED:
            # Words that the compiler takes for new ones, so that it unpacks them once more: keeping the fp32 values of
            # a whole tile would leave room for two programs instead of three.
            lo = lo ^ zero
            hi = lo
        data, scale, factor, amax, state, units, pitch, scales, stream, number, first_row, origin, stride = row
        factors = tensor_factors(amax, factor, group, inside, is_first, count, COUNT, ROW)
        first = ((e * M + row0 - start) + first_row) * stride + origin
        random = (state, stream, group + number if GROUPED else e * 0, first, stride)
        write_row(
            data + e * M * units, scale + e * scales, lo, hi, row0, rows_end, M, pk, K, units, pitch, factors, random,
            HELD, PACKED, EVEN, ROW,
        )  # fmt: skip


@triton.jit
def _cast_kernel(
    x_ptr, y_ptr, z_ptr, index_ptr, offs_ptr, sums_ptr,
    row_data, row_scale, row_global, row_amax, row_state, col_data, col_scale, col_global, col_amax, col_state,
    M, K, stride_e, stride_m, stride_k, y_e, y_m, row_units, col_units, row_pitch, col_pitch, row_scales, col_scales,
    length, tiles_m, tiles_k, groups, count, zero,
    row_stream, row_group, row_first, row_origin, row_stride,
    col_stream, col_group, col_first, col_origin, col_stride,
    ROW: tl.constexpr, COL: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr, HELD: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr, GATHER: tl.constexpr, SUMS: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pk, pm, e = pid % tiles_k, (pid // tiles_k) % tiles_m, (pid // tiles_k // tiles_m).to(tl.int64)
    position = pm * (MQ * J)
    place = _place(offs_ptr, e, position, M, groups, GROUPS, ALIGN)
    source = (x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m)
    row = (row_data, row_scale, row_global, row_amax, row_state, row_units, row_pitch, row_scales,
           row_stream, row_group, row_first, row_origin, row_stride)  # fmt: skip
    col = (col_data, col_scale, col_global, col_amax, col_state, col_units, col_pitch, col_scales,
           col_stream, col_group, col_first, col_origin, col_stride)  # fmt: skip
    lo, hi, next_lo, next_hi = _load_source(
        source, e, place[1], place[3], pk, M, K, SOURCE, MODE, EVEN, GATHER, FAST, J, MQ, BK
    )  # fmt: skip
    _write_tile(
        lo, hi, row, col, sums_ptr, e, pk, pm, place, position, pid == 0, M, K, length, tiles_m, count, zero,
        ROW, COL, HELD, PACKED, EVEN, GROUPS > 0, SUMS, COUNT, BK,
    )  # fmt: skip
    if SOURCE == "swiglu_backward":
        _write_tile(
            next_lo, next_hi, row, col, sums_ptr, e, pk + tiles_k, pm, place, position, False, M, K, length, tiles_m,
            count, zero, ROW, COL, HELD, PACKED, EVEN, GROUPS > 0, SUMS, COUNT, BK,
        )  # fmt: skip


@triton.jit
def _amax_kernel(
    x_ptr, y_ptr, z_ptr, index_ptr, offs_ptr, amax_ptr, M, K, stride_e, stride_m, stride_k, y_e, y_m,
    tiles_m, tiles_k, groups,
    PER_GROUP: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr, HELD: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, GATHER: tl.constexpr, ALIGN: tl.constexpr, FAST: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Largest pattern of the tensor, or of each group, as one side will see it: rotated, when it rotates."""
    pid = tl.program_id(0)
    pk, pm, e = pid % tiles_k, (pid // tiles_k) % tiles_m, (pid // tiles_k // tiles_m).to(tl.int64)
    group, row0, _, rows_end, inside = _place(offs_ptr, e, pm * (MQ * J), M, groups, GROUPS, ALIGN)
    source = (x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m)
    lo, hi, next_lo, next_hi = _load_source(
        source, e, row0, rows_end, pk, M, K, SOURCE, MODE, EVEN, GATHER, FAST, J, MQ, BK
    )
    most = _tile_maximum(lo, hi, HELD, ROW, COL)
    if SOURCE == "swiglu_backward":
        most = tl.maximum(most, _tile_maximum(next_lo, next_hi, HELD, ROW, COL))
    tl.atomic_max(amax_ptr + (group if PER_GROUP else 0), most, mask=inside, sem="relaxed")


@triton.jit
def _tile_maximum(lo, hi, HELD: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr):
    lo, hi = values(lo, hi, HELD)
    if ROW is not None:
        lo, hi = rotate_rows(lo, hi, ROW)
    if COL is not None:
        lo, hi = rotate_columns(lo, COL), rotate_columns(hi, COL)
    most = tl.maximum(tl.abs(lo), tl.abs(hi), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(most.to(tl.int32, bitcast=True))


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


class Source(NamedTuple):
    """What is cast, and from what: `name` as in `_load_source`, x and its companions, and the columns of the result."""

    name: str
    x: Tensor  # [matrices, rows, ...]
    columns: int
    y: Tensor | None = None
    z: Tensor | None = None
    index: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.x.shape[1] if self.index is None else self.index.shape[0]

    @property
    def walked(self) -> int:
        """Columns that programs walk over: a backward of SwiGLU writes two tiles for each that it reads."""
        return self.columns // 2 if self.name == "swiglu_backward" else self.columns

    @property
    def mode(self) -> str:
        """How pairs are loaded: by whole words where every pair lies on one, else value by value."""
        tensors = [self.x] if self.y is None or self.name == "rmsnorm" else [self.x, self.y]
        if self.columns % (4 if self.name == "swiglu_backward" else 2):
            return "any"
        return _WORDS[self.x.dtype] if all(map(_in_pairs, tensors)) else "any"

    @property
    def held(self) -> str:
        """How a tile stays in registers: the mode, except that what is computed in fp32 is kept as values."""
        return "any" if self.mode == "fp32" and self.name != "plain" else self.mode

    def arguments(self) -> tuple[Tensor | None, ...]:
        return _words(self.x, self.mode), None if self.y is None else self._y(), self.z, self.index

    def steps(self) -> tuple[int, ...]:
        """Strides of x and y, in words."""
        divisor = 1 if self.mode == "any" else 2
        y = (0, 0) if self.y is None or self.name == "rmsnorm" else self.y.stride()[:2]
        x = self.x.stride()
        return x[0] // divisor, x[1] // divisor, x[2], y[0] // divisor, y[1] // divisor

    def _y(self) -> Tensor:
        assert self.y is not None
        return self.y if self.name == "rmsnorm" else _words(self.y, self.mode)


def plain(x: Tensor) -> Source:
    """A tensor [..., M, K] as it is."""
    return Source("plain", x.reshape(-1, x.shape[-2], x.shape[-1]), x.shape[-1])


_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _in_pairs(x: Tensor) -> bool:
    """Whether every pair of neighbours along the last axis lies on a whole word."""
    even = x.shape[-1] % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1])
    return even and x.stride(-1) == 1 and x.data_ptr() % (2 * x.element_size()) == 0


class Tile(NamedTuple):
    """MQ groups of J rows by BK columns, for a program of `warps`; see `_tiles.py`. `registers`: the most a thread may
    take, so that three programs fit on a multiprocessor."""

    J: int
    MQ: int
    BK: int
    warps: int
    registers: int | None = None


def tile_shape(row: CastPlan | None, col: CastPlan | None, *, sm: int, source: Source, whole: bool) -> Tile:
    """The tile for a cast. whole: tiles cover the source exactly, and there are no groups.

    Measured on an H200, see docs/design/casts.md; the ahead-of-time tests hold every choice to zero spills.
    """
    plans = [plan for plan in (row, col) if plan is not None]
    light = source.held in ("bf16", "fp16") and all(plan.stream is None and plan.hadamard is None for plan in plans)
    if col is None:
        assert row is not None
        if row.spec.block[0] == 128:
            return Tile(1, 128, 128, 4 if light else 8)
        # the widest strip that wastes least
        width = min((1024, 512, 256, 128), key=lambda width: (round_up(source.columns, width), -width))
        rows = max(row.spec.block[0], (8 if light else 4) * 1024 // width)
        return Tile(1, rows, width, 4 if light or rows * width <= 8192 else 8)
    if row is None and source.held == "any":
        return Tile(8, 16, 128, 8)
    if row is None:
        wide = whole and col.spec.block[0] != 128
        return Tile(16, 16 if wide else 8, 64 if wide else 128, 4 if source.held != "fp32" else 8)
    if row.spec.codes_per_byte == 2 or col.spec.codes_per_byte == 2:
        return Tile(16, 8, 128, 4 if light else 8)
    if not light:
        return Tile(4, 32, 128, 8, 128) if source.held == "fp32" else Tile(4, 32, 128, 16)
    capped = whole and sm >= 89 and source.name in ("plain", "swiglu")
    return Tile(8, 16, 128, 4, 168 if capped else None)


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


class Output(NamedTuple):
    """One operand to make: its plan, its buffers, and the tensors that its cast reads."""

    plan: CastPlan
    buffers: Buffers
    state: Tensor | None
    amax: Tensor | None


def launch(
    source: Source, row: Output | None, col: Output | None, *, colsum: Tensor | None = None, offs: Tensor | None = None
) -> None:
    """Fill the buffers of one operand or both."""
    count, rows, columns = source.x.shape[0], source.rows, source.columns
    mode, held = source.mode, source.held
    sm = 0 if INTERPRETED else capability(source.x.device).sm
    groups = 0 if offs is None else offs.shape[0]
    dense = offs is None and source.index is None
    plans = [None if out is None else out.plan for out in (row, col)]
    whole = dense and rows % 256 == 0 and columns % 128 == 0
    tile = tile_shape(plans[0], plans[1], sm=sm, source=source, whole=whole)
    block_rows = tile.J * tile.MQ
    length = rows if offs is None else padded_length(rows, groups)
    stored = length if col is None or offs is not None else col.plan.stored_length(length)
    cover_m, cover_k, even = rows, columns, dense and rows % block_rows == 0 and source.walked % tile.BK == 0
    if row is not None:
        need = _covered(row.plan, rows, row.plan.stored_length(columns))
        cover_m, cover_k, even = need[0], need[1], even and need == (rows, columns)
    if col is not None:
        need = _covered(col.plan, columns, stored)
        cover_m, cover_k = max(cover_m, need[1]), max(cover_k, need[0])
        even = even and need == (columns, rows)
    if offs is not None:
        cover_m = max(length, rows + (GROUP_ALIGN - 1) * (groups + 1))
    tiles_m, tiles_k = ceil_div(cover_m, block_rows), ceil_div(cover_k, tile.BK)
    if source.walked != columns:  # a program writes the tile and the one beside it
        tiles_k = source.walked // tile.BK
    amaxes = [_tensor_amax(source, out, offs, transposed=across) for out, across in ((row, False), (col, True))]
    sides = [None if out is None else side(out.plan, sm, grouped=_per_group(out)) for out in (row, col)]
    sums = None
    if colsum is not None:
        sums = torch.empty(count, tiles_m, columns, dtype=torch.float64, device=colsum.device)
    scopes = max((1 if top is None or top.dim() == 0 else top.shape[0]) for top in amaxes)
    _cast_kernel[(count * tiles_m * tiles_k,)](
        *source.arguments(), offs, sums,
        *_pointers(row, amaxes[0], transposed=False), *_pointers(col, amaxes[1], transposed=True),
        rows, columns, *source.steps(),
        0 if row is None else row.buffers[0].stride(-2) * row.plan.spec.codes_per_byte // 2,
        0 if col is None else col.buffers[0].stride(-2) // 4,
        _pitch(row, columns), _pitch(col, stored), _scales(row, count), _scales(col, count),
        stored, tiles_m, tiles_k, groups, scopes, 0, *_random(row, columns), *_random(col, columns),
        ROW=sides[0], COL=sides[1], SOURCE=source.name, MODE=mode, HELD=held, PACKED=sm > 0 and held in ("bf16", "fp16"), EVEN=even, FAST=sm > 0,
        GROUPS=_group_bound(offs), GATHER=source.index is not None, SUMS=colsum is not None,
        COUNT=triton.next_power_of_2(scopes), ALIGN=GROUP_ALIGN, J=tile.J, MQ=tile.MQ, BK=tile.BK,
        num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    if colsum is not None:
        _colsum_kernel[(ceil_div(columns, 256), groups if offs is not None else count)](
            sums, offs, colsum, rows, columns, tiles_m, groups, GROUPS=_group_bound(offs), ALIGN=GROUP_ALIGN,
            BM=block_rows, BK=256, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _group_bound(offs: Tensor | None) -> int:
    """Group ends as kernels load them: a power of two, 0 without groups."""
    return 0 if offs is None else triton.next_power_of_2(max(offs.shape[0], 1))


def _words(x: Tensor, mode: str) -> Tensor:
    """x as the words that pairs are loaded by."""
    return x if mode == "any" else x.view(torch.int64 if mode == "fp32" else torch.int32)


def _pointers(out: Output | None, amax: Tensor | None, *, transposed: bool) -> tuple[Tensor | None, ...]:
    """Codes by the unit that they are stored in, scales as bytes or fp32, the tensor's scale, its maximum, the state."""
    if out is None:
        return (None,) * 5
    data, scale, factor = out.buffers
    unit = torch.int32 if transposed else torch.uint8 if out.plan.spec.codes_per_byte == 2 else torch.int16
    scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    return data.view(torch.uint8).view(unit), scale, factor, amax, out.state


def _pitch(out: Output | None, length: int) -> int:
    """From one row of the scale buffer to the next; 512-byte tiles beside each other in the blocked layout."""
    if out is None:
        return 0
    if out.plan.layout == "blocked":
        return ceil_div(ceil_div(out.plan.stored_length(length), out.plan.spec.block[1]), 4)
    return out.buffers[1].shape[-1]


def _scales(out: Output | None, count: int) -> int:
    """Scales of one matrix, pads included."""
    return 0 if out is None else out.buffers[1].numel() // count


def _random(out: Output | None, columns: int) -> tuple[int, int, int, int, int]:
    """Stream and first group, first row, first column and columns of the whole tensor."""
    if out is None or out.plan.stream is None:
        return 0, 0, 0, 0, 0
    return out.plan.stream, out.plan.first_group, *(out.plan.origin or (0, 0, columns))


def _per_group(out: Output | None) -> bool:
    return out is not None and (out.plan.grouped_amax or (out.amax is not None and out.amax.dim() == 1))


def _tensor_amax(source: Source, out: Output | None, offs: Tensor | None, *, transposed: bool) -> Tensor | None:
    """int32 patterns of the tensor's maximum, or of each group's: supplied, or from one more read."""
    if out is None or out.plan.spec.family != "nvfp4":
        return None
    if out.amax is not None:
        return out.amax.view(torch.int32)
    count, rows, columns, groups = source.x.shape[0], source.rows, source.columns, 0 if offs is None else offs.shape[0]
    rotated = None if out.plan.hadamard is None else side(out.plan, 0, grouped=False)
    scopes = (groups if offs is not None else count) if out.plan.grouped_amax else 1
    top = torch.zeros(scopes, dtype=torch.int32, device=source.x.device)
    narrow = source.name == "swiglu_backward" or (rotated is not None and transposed)
    tile = Tile(16, 8, 128, 4) if narrow else Tile(1, 8, 1024, 4)
    block_rows = tile.J * tile.MQ
    tiles_m = ceil_div(rows if offs is None else rows + (GROUP_ALIGN - 1) * (groups + 1), block_rows)
    tiles_k = ceil_div(source.walked, tile.BK)
    even = rows % block_rows == 0 and source.walked % tile.BK == 0 and offs is None and source.index is None
    _amax_kernel[(count * tiles_m * tiles_k,)](
        *source.arguments(), offs, top, rows, columns, *source.steps(), tiles_m, tiles_k, groups,
        PER_GROUP=out.plan.grouped_amax, SOURCE=source.name, MODE=source.mode, HELD=source.held, EVEN=even,
        FAST=not INTERPRETED, GATHER=source.index is not None, GROUPS=_group_bound(offs), ALIGN=GROUP_ALIGN,
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
    output = Output(plan, out, state, amax)
    if x.stride(-1) != 1 and x.stride(-2) == 1 and state is None and offs is None:
        x, axis = x.mT, -3 - axis  # the transposed source is the one that lies in memory
    launch(plain(x), output if axis == -1 else None, output if axis == -2 else None, offs=offs)


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
    row, col = (Output(*parts) for parts in zip(plans, outs, states, amaxes, strict=True))
    launch(plain(x), row, col, colsum=colsum, offs=offs)
