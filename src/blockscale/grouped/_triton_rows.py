"""Row permutations of MoE routing in Triton (permute, combine, gradients of the gate weights, clear).

Each row is read once and summed in registers, in the order and with the roundings of the reference: bitwise equal. Only
the dot products are summed in another order, which is also fixed.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..casts._device import round_to_bf16
from ..casts._source import power_of_two
from ..formats.layout import ceil_div
from ..launch import launch
from ..registry import Request, kernel

MAX_SLOTS = 16  # slots are unrolled
_CLEAR_PROGRAMS = 256  # loop over the rows to clear; usually there are none


@triton.jit
def _round_to(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round to a dtype; the interpreter's cast to bf16 does not round."""
    if INTERPRETED and dtype == tl.bfloat16:
        value = round_to_bf16(value)
    return value.to(dtype)


@triton.jit
def _permute_rows_kernel(
    x_ptr, tokens_ptr, rows_ptr, gate_weights_ptr, out_ptr, M, D, x_stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token = tl.load(tokens_ptr + m, mask=m < M, other=0).to(tl.int64)
    ok = (m < M)[:, None] & (d < D)[None, :]
    value = tl.load(x_ptr + token[:, None] * x_stride + d[None, :], mask=ok)
    if WEIGHTED:
        factor = tl.zeros([BM], tl.float32)
        for slot in tl.static_range(K):  # the slot of its token that this row fills
            row = tl.load(rows_ptr + token * K + slot, mask=m < M, other=-1)
            factor = tl.where(row == m, tl.load(gate_weights_ptr + token * K + slot, mask=m < M, other=0.0), factor)
        value = _round_to(value.to(tl.float32) * factor[:, None], out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + m[:, None] * D + d[None, :], value, mask=ok)


@triton.jit
def _term(x_ptr, rows_ptr, gate_weights_ptr, t, inside, d, ok, x_stride, slot, K: tl.constexpr, WEIGHTED: tl.constexpr):
    """Term of one slot in the sums of a tile of tokens, fp32 [BM, BD]."""
    row = tl.load(rows_ptr + t * K + slot, mask=inside, other=0).to(tl.int64)
    term = tl.load(x_ptr + row[:, None] * x_stride + d[None, :], mask=ok, other=0.0).to(tl.float32)
    if WEIGHTED:
        term = term * tl.load(gate_weights_ptr + t * K + slot, mask=inside, other=0.0)[:, None]
    return term


@triton.jit
def _combine_rows_kernel(
    x_ptr, rows_ptr, gate_weights_ptr, out_ptr, T, D, x_stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = (t < T)[:, None] & (d < D)[None, :]
    # starts with the first term: 0 + (-0) would lose the sign
    total = _term(x_ptr, rows_ptr, gate_weights_ptr, t, t < T, d, ok, x_stride, 0, K, WEIGHTED)
    for slot in tl.static_range(1, K):
        total += _term(x_ptr, rows_ptr, gate_weights_ptr, t, t < T, d, ok, x_stride, slot, K, WEIGHTED)
    total = _round_to(total, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + t[:, None] * D + d[None, :], total, mask=ok)


@triton.jit
def _combine_dots_kernel(
    x_ptr, grad_ptr, rows_ptr, out_ptr, T, D, x_stride, grad_stride,
    K: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # the slots of a token are consecutive programs, so its gradient is read from memory once
    slot = tl.program_id(0) % K
    t = (tl.program_id(0) // K).to(tl.int64) * BM + tl.arange(0, BM)
    row = tl.load(rows_ptr + t * K + slot, mask=t < T, other=0).to(tl.int64)
    total = tl.zeros([BM, BD], tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        ok = (t < T)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + d[None, :], mask=ok, other=0.0).to(tl.float32)
        total += x * tl.load(grad_ptr + t[:, None] * grad_stride + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * K + slot, tl.sum(total, 1), mask=t < T)


@triton.jit
def _clear_rows_kernel(out_ptr, last_ptr, M, D, out_stride, BD: tl.constexpr):
    row = (tl.maximum(tl.load(last_ptr), 0) + tl.program_id(0)).to(tl.int64)
    while row < M:
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            tl.store(out_ptr + row * out_stride + d, tl.zeros([BD], out_ptr.dtype.element_ty), mask=d < D)
        row += tl.num_programs(0)


@triton.jit
def _place_rows_kernel(
    x_ptr, rows_ptr, out_ptr, T, D, x_stride, x_slot_stride, out_stride, out_column_stride,
    K: tl.constexpr, BY_SLOT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = (t < T)[:, None] & (d < D)[None, :]
    source = x_ptr + t[:, None] * x_stride + d[None, :]
    value = tl.load(source, mask=ok)
    for slot in tl.static_range(K):
        if BY_SLOT and slot > 0:
            value = tl.load(source + slot * x_slot_stride, mask=ok)
        row = tl.load(rows_ptr + t * K + slot, mask=t < T, other=0).to(tl.int64)
        tl.store(out_ptr + row[:, None] * out_stride + d[None, :] * out_column_stride, value, mask=ok)


INTERPRETED = not isinstance(_combine_rows_kernel, triton.runtime.JITFunction)
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORDS = (*DTYPES, torch.int64, torch.int32, torch.int16, torch.uint8)


def _reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty tensors"
    if "strided" in request.options:
        return "needs rows that are contiguous in memory"
    if "many_slots" in request.options:
        return f"unrolls the slots of a token, up to {MAX_SLOTS}"
    return None


def _reject_placed(request: Request) -> str | None:
    return _reject(replace(request, options=request.options - {"strided"}))


def _tile(columns: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile: 16 bytes per thread and row, enough rows to keep it busy."""
    width = min(1024, max(16, power_of_two(columns)))
    return max(1, 2048 // width), width


@kernel("permute_rows", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """Triton: one read, one write"""
    (m, columns), slots = out.shape, rows.shape[1]
    bm, bd = _tile(columns)
    rest = (m, columns, x.stride(0), slots, gate_weights is not None, INTERPRETED, bm, bd)
    tensors, grid = (x, tokens, rows, _fp32(gate_weights), out), (ceil_div(m, bm), ceil_div(columns, bd))
    launch(_permute_rows_kernel, grid, tensors, rest, enable_fp_fusion=False)


@kernel("combine_rows", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def combine_rows(x: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """Triton: each row is read once, sums in registers"""
    (count, columns), slots = out.shape, rows.shape[1]
    bm, bd = _tile(columns)
    rest = (count, columns, x.stride(0), slots, gate_weights is not None, INTERPRETED, bm, bd)
    tensors, grid = (x, rows, _fp32(gate_weights), out), (ceil_div(count, bm), ceil_div(columns, bd))
    # no FMA: the weighted row is rounded before it is added
    launch(_combine_rows_kernel, grid, tensors, rest, enable_fp_fusion=False)


@kernel("combine_dots", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def combine_dots(x: Tensor, grad: Tensor, rows: Tensor, out: Tensor) -> None:
    """Triton: one program per tile of tokens and slot"""
    (count, slots), columns = rows.shape, x.shape[1]
    bm, bd = _tile(columns)
    rest = (count, columns, x.stride(0), grad.stride(0), slots, bm, bd)
    launch(_combine_dots_kernel, (ceil_div(count, bm) * slots,), (x, grad, rows, out), rest)


@kernel("clear_rows", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def clear_rows(x: Tensor, offs: Tensor) -> None:
    """Triton: reads the last offset; writes nothing if every row has a group"""
    rows, columns = x.shape
    rest = (rows, columns, x.stride(0), _tile(columns)[1])
    launch(_clear_rows_kernel, (min(rows, _CLEAR_PROGRAMS),), (x, offs[-1:]), rest)


@kernel("place_rows", "triton", devices=DEVICES, sm=(80, 999), dtypes=WORDS, priority=50, reject=_reject_placed)
def place_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Triton: each row is read once, and written for every slot"""
    (count, slots), columns = rows.shape, x.shape[-1]
    bm, bd = _tile(columns)
    strides = x.stride(0), x.stride(1) if x.dim() == 3 else 0, *out.stride()
    rest = (count, columns, *strides, slots, x.dim() == 3, bm, bd)
    launch(_place_rows_kernel, (ceil_div(count, bm), ceil_div(columns, bd)), (x, rows, out), rest)


def _fp32(gate_weights: Tensor | None) -> Tensor | None:
    return None if gate_weights is None else gate_weights.to(torch.float32).contiguous()
