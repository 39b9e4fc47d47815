"""Triton `dequantize`, sm_80 and newer: one read of codes and scales, one write of values, bound by memory.

An operand is [rows, length] with its scaled axis last. A CTA reads one tile and writes it as it lies or transposed
(axis=-2). Values are kept in pairs of neighbours of the output, because two 16-bit values are one word. For a
transposed tile, words of codes cross threads before they are decoded: a half or a quarter of the bytes of the values.

Any strides are supported, if need be byte by byte: copies of operands made elsewhere have no pads.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.layout import GROUP_ALIGN, blocked_columns, ceil_div, padded_length, round_up
from ..formats.tensor import BlockScaled
from ..hardware import capability
from ..launch import launch, refuse
from ..registry import Request, kernel
from ._device import locate
from ._device_decode import (
    decode,
    decode_config,
    decode_pair,
    decode_word,
    load_scales,
    rotate_pairs_back,
    rotate_rows_back,
    round_pair,
    scaled,
)
from ._source import dense

# ---- loading and storing ---------------------------------------------------------------------------------------------


@triton.jit
def _load_codes(
    data_ptr, r, unit, row_stride, step, rows, left, BYTES: tl.constexpr, BY_UNITS: tl.constexpr, EVEN: tl.constexpr
):
    """Load units of BYTES bytes of codes; `rows` rows and `left` per row remain from data_ptr on.

    BY_UNITS: data_ptr points at such units; row_stride and `left` count units. Else units are assembled from bytes.
    """
    if EVEN:
        return tl.load(data_ptr + r * row_stride + unit)
    elif BY_UNITS:
        return tl.load(data_ptr + r * row_stride + unit, mask=(r < rows) & (unit < left), other=0)
    else:
        at = data_ptr + r.to(tl.int64) * row_stride
        word = tl.zeros((r.shape[0], unit.shape[1]), tl.int32)
        for i in tl.static_range(BYTES):
            at_byte = unit * BYTES + i
            byte = tl.load(at + at_byte.to(tl.int64) * step, mask=(r < rows) & (at_byte < left), other=0)
            word = word | (byte.to(tl.int32) << (8 * i))
        return word


@triton.jit
def _store(
    out_ptr, lo, hi, row, rows, columns, units,
    OUT: tl.constexpr, PAIRED: tl.constexpr, EVEN: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Store pairs [A, W] at rows [A, 1] of the output; `rows` and `columns` remain from out_ptr on; `units` per row.

    PAIRED: every pair is one aligned word; out_ptr points at words and `units` counts them.
    """
    w = tl.arange(0, lo.shape[1])[None, :]
    word = round_pair(lo, hi, OUT, SM)
    if EVEN:
        tl.store(out_ptr + row * units + w, word)
    elif PAIRED:
        tl.store(out_ptr + row * units + w, word, mask=(row < rows) & (w < columns // 2))
    else:
        HALF: tl.constexpr = 32 if OUT == "fp32" else 16
        TYPE: tl.constexpr = tl.int32 if OUT == "fp32" else tl.int16
        at = out_ptr + row * units + 2 * w
        tl.store(at, word.to(TYPE), mask=(row < rows) & (2 * w < columns))
        tl.store(at + 1, (word >> HALF).to(TYPE), mask=(row < rows) & (2 * w + 1 < columns))


@triton.jit
def _row_factors(global_ptr, offs_ptr, r0, groups, BR: tl.constexpr, STEPS: tl.constexpr):
    """Tensor scales [BR] of the groups of rows [r0, r0 + BR); 1 for rows outside all groups.

    Bisection finds the group of the first row, which usually is the group of all rows.
    """
    low, high = tl.zeros((), tl.int32), groups
    for _ in tl.static_range(STEPS):
        middle = (low + high) >> 1
        is_past = tl.load(offs_ptr + middle, mask=low < high, other=0x7FFFFFFF) <= r0
        low, high = tl.where(is_past, middle + 1, low), tl.where(is_past, high, middle)
    r = r0 + tl.arange(0, BR)
    group = tl.zeros((BR,), tl.int32) + low
    end = tl.load(offs_ptr + low, mask=low < groups, other=0x7FFFFFFF)
    while end < r0 + BR:
        group += (end <= r).to(tl.int32)
        low += 1
        end = tl.load(offs_ptr + low, mask=low < groups, other=0x7FFFFFFF)
    return tl.load(global_ptr + group, mask=group < groups, other=1.0)


# ---- the kernel ------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_kernel(
    data_ptr, scale_ptr, global_ptr, offs_ptr, out_ptr,
    rows, length, logical, data_units, data_e, data_r, data_l, scale_e, scale_t, scale_b, out_e, out_units,
    tiles_r, tiles_l, groups, per_factor,
    S: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr, MANY: tl.constexpr, BY_UNITS: tl.constexpr,
    EVEN: tl.constexpr, PAIRED: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr, ALIGN: tl.constexpr,
    BR: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Decode one tile of the operand [rows, length] as stored.  logical: its length in the output.  data_units,
    out_units: units per row. Strides are in units of their pointers."""
    pid = tl.program_id(0)
    if TRANSPOSED:  # rasterise along the rows of the output
        pr, pl = pid % tiles_r, pid // tiles_r
    else:
        pr, pl = pid // tiles_l, pid % tiles_l
    e = tl.zeros((), tl.int64)
    if MANY:
        if TRANSPOSED:
            e, pl = (pl // tiles_l).to(tl.int64), pl % tiles_l
        else:
            e, pr = (pr // tiles_r).to(tl.int64), pr % tiles_r
    r0, l0 = pr * BR, pl * BL
    rows_left = rows - r0
    if GROUPS:  # groups start at multiples of ALIGN in the operand, so a tile lies within one
        group, first, _, end = locate(offs_ptr, groups, l0, logical, GROUPS, ALIGN)
        inside = group < groups
    else:
        group, first, end, inside = 0, l0, logical, True
    factor = 1.0
    if S.factor == "tensor":
        factor = tl.load(global_ptr)
    elif S.factor == "matrix":
        factor = tl.load(global_ptr + e // per_factor)
    elif S.factor == "group":
        factor = tl.load(global_ptr + group, mask=inside, other=1.0)
    elif S.factor == "row":
        factor = _row_factors(global_ptr, offs_ptr, r0, groups, BR, STEPS)

    UNIT: tl.constexpr = 4 if TRANSPOSED else S.code_bits // 4  # bytes: a word of codes, or a pair
    UNITS: tl.constexpr = BL * S.code_bits // 8 // UNIT
    r, unit = tl.arange(0, BR)[:, None], tl.arange(0, UNITS)[None, :]
    if not TRANSPOSED:
        # This many pairs per thread are 16 bytes of output; with wider loads, values would have to cross threads.
        unit = tl.max_contiguous(unit, (1, 2 if OUT == "fp32" else 4))
    data_ptr += e * data_e + r0.to(tl.int64) * data_r
    passed = pl * (UNITS if BY_UNITS else UNITS * UNIT)
    data_ptr += passed.to(tl.int64) * data_l
    codes = _load_codes(data_ptr, r, unit, data_r, data_l, rows_left, data_units - passed, UNIT, BY_UNITS, EVEN)
    BLOCKS: tl.constexpr = BL // S.along
    block = pl * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    ok = (r < rows_left) & (block * S.along < length)
    scale = load_scales(scale_ptr + e * scale_e, (r0 + r) // S.across, block, ok, scale_t, scale_b, EVEN, S)

    out_ptr += e * out_e
    if not TRANSPOSED:
        W: tl.constexpr = BL // 2
        out_ptr += r0.to(tl.int64) * out_units + (first // 2 if PAIRED else first)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BR, BLOCKS, S.along // 2)), (BR, W))
        if S.factor == "row":
            factor = factor[:, None]
        lo, hi = decode_pair(codes, S)
        lo, hi = scaled(lo, scale, factor, S), scaled(hi, scale, factor, S)
        if S.hadamard:
            lo, hi = rotate_pairs_back(lo, hi, S)
        if GROUPS:
            lo, hi = tl.where(inside, lo, 0.0), tl.where(inside, hi, 0.0)
        _store(out_ptr, lo, hi, r, rows_left, end - first, out_units, OUT, PAIRED, EVEN, S.sm)
    else:
        W: tl.constexpr = BR // 2
        PER_WORD: tl.constexpr = 32 // S.code_bits
        out_ptr += tl.cast(first, tl.int64) * out_units + (r0 // 2 if PAIRED else r0)
        even, odd = tl.split(tl.reshape(tl.trans(codes), (UNITS, W, 2)))
        spread = tl.broadcast_to(tl.trans(scale)[:, None, :], (BLOCKS, UNITS // BLOCKS, BR))
        scale_lo, scale_hi = tl.split(tl.reshape(spread, (UNITS, W, 2)))
        factor_lo, factor_hi = factor, factor
        if S.factor == "row":
            factor_lo, factor_hi = tl.split(tl.reshape(factor, (1, W, 2)))
        word = tl.arange(0, UNITS)[:, None] * PER_WORD
        if S.hadamard:
            j = tl.arange(0, PER_WORD)[None, :, None] * S.code_bits
            lo, hi = decode(even[:, None, :] >> j, S), decode(odd[:, None, :] >> j, S)
            lo = tl.reshape(scaled(lo, scale_lo[:, None, :], factor_lo, S), (BL, W))
            hi = tl.reshape(scaled(hi, scale_hi[:, None, :], factor_hi, S), (BL, W))
            lo, hi = rotate_rows_back(lo, S), rotate_rows_back(hi, S)
            if GROUPS:
                lo, hi = tl.where(inside, lo, 0.0), tl.where(inside, hi, 0.0)
            row = tl.arange(0, BL)[:, None]
            _store(out_ptr, lo, hi, row, end - first, rows_left, out_units, OUT, PAIRED, EVEN, S.sm)
        else:
            for j in tl.static_range(PER_WORD // 2):
                lo, lo_next = decode_word(even, j, S)
                hi, hi_next = decode_word(odd, j, S)
                for i in tl.static_range(2):
                    low = scaled(lo if i == 0 else lo_next, scale_lo, factor_lo, S)
                    high = scaled(hi if i == 0 else hi_next, scale_hi, factor_hi, S)
                    if GROUPS:
                        low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
                    row = word + (j + 4 * i if S.code_bits == 4 else 2 * j + i)
                    _store(out_ptr, low, high, row, end - first, rows_left, out_units, OUT, PAIRED, EVEN, S.sm)


INTERPRETED = not isinstance(_dequantize_kernel, triton.runtime.JITFunction)


# ---- launching -------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Tile of one CTA: rows by length of the operand, and its number of warps."""

    rows: int
    length: int
    warps: int = 4


def tile_shape(length: int, code_bits: int, *, transposed: bool, grouped: bool) -> Tile:
    """Tile of an operand.  grouped: groups start at multiples of 128, and no tile may span two."""
    if transposed or grouped:
        return Tile((512 if transposed else 256) // code_bits, GROUP_ALIGN)
    width = min((1024, 512, 256, 128), key=lambda width: (round_up(length, width), -width))  # least padding
    return Tile(8192 // width, width)


def _reads_units(data: Tensor, unit: int) -> bool:
    """Whether every row of bytes can be read in aligned units, its last one included."""
    count, rows, size = data.shape
    strides = data.stride()
    if strides[2] != 1 or any(step % unit for step in (data.data_ptr(), *strides[:2])):
        return False
    end = data.storage_offset() + (count - 1) * strides[0] + (rows - 1) * strides[1] + round_up(size, unit)
    return end <= data.untyped_storage().nbytes()


_DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
_MAX_GROUPS = 4096  # every CTA reads all group ends
_OUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _reject(request: Request) -> str | None:
    if "far" in request.options:
        return "takes rows and columns that lie less than 2^23 values apart: offsets within a tile are 32-bit"
    return f"takes at most {_MAX_GROUPS} padded groups" if "many_groups" in request.options else None


@kernel("dequantize", "triton", devices=_DEVICES, sm=(80, 999), priority=50, reject=_reject)
def dequantize(q: BlockScaled, out: Tensor, *, offs: Tensor | None = None) -> None:
    """Triton: one read, one write"""
    factor, offs = dense(q.global_scale), dense(offs)
    if out.numel() == 0:
        return
    operand, transposed = q.operand, q.axis == -2
    codes = operand.data.view(torch.uint8)
    rows, length, logical = q.rows, q.length, q.shape[q.axis]
    data = codes.reshape(-1, rows, codes.shape[-1])
    count = data.shape[0]
    scale = operand.scale if operand.scale.element_size() == 4 else operand.scale.view(torch.uint8)
    if q.scale_layout == "blocked":
        scale = scale.reshape(count, -1).contiguous()
        scale_strides = scale.stride(0), ceil_div(blocked_columns(q.spec, length), 4), 1
    else:
        scale = scale.reshape(count, *scale.shape[-2:])
        scale_strides = scale.stride()
    S = decode_config(q, 0 if INTERPRETED else capability(q.device).sm)
    groups = 0 if offs is None else offs.shape[0]
    padded = q.group_align > 0
    tile = tile_shape(length, S.code_bits, transposed=transposed, grouped=padded)
    unit = 4 if transposed else S.code_bits // 4
    by_units = _reads_units(data, unit)
    data_units = ceil_div(data.shape[-1], unit) if by_units else data.shape[-1]
    data_strides = (*(step // unit for step in data.stride()[:2]), 1) if by_units else data.stride()
    # a group may start at any column of the output if the operand is not transposed, so pairs may be unaligned
    paired = out.shape[-1] % 2 == 0 and not (padded and not transposed)
    word = out.element_size() * (2 if paired else 1)
    tiles_r = ceil_div(rows, tile.rows)
    tiles_l = ceil_div(padded_length(logical, groups) if padded else logical, tile.length)
    exact = rows % tile.rows == 0 and logical % tile.length == 0 and length == logical
    scalars = (
        rows, length, logical, data_units, *data_strides, *scale_strides, rows * logical * out.element_size() // word,
        out.shape[-1] * out.element_size() // word, tiles_r, tiles_l, groups,
        1 if factor is None or not factor.dim() else count // max(factor.shape[0], 1),
    )  # fmt: skip
    constants = (
        S, _OUT[out.dtype], transposed, count > 1, by_units, exact and by_units and paired and not padded, paired,
        triton.next_power_of_2(max(groups, 1)) if padded else 0,
        groups.bit_length() if S.factor == "row" else 0, GROUP_ALIGN, tile.rows, tile.length,
    )  # fmt: skip
    if by_units and data.shape[-1] % unit:
        refuse("the last unit of a row, which depends on the storage behind it")
    launch(
        _dequantize_kernel, (count * tiles_r * tiles_l,),
        (
            data.as_strided((unit,), (1,)).view(_UNITS[unit]) if by_units else data,
            scale, factor, offs, out.view(_UNITS[word]),
        ),
        (*scalars, *constants), num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
