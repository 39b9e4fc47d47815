"""Moves of rows in Triton: one read of each row, sums in registers, in the order of the reference and with its
roundings, so that bits are the same. Only dot products are summed in another order, which is fixed too.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..casts._device import round_to_bf16
from ..casts._launch_cache import CachedLaunch, launch_cached
from ..casts._source import power_of_two
from ..formats.layout import ceil_div
from ..registry import Request, kernel

# slots are unrolled
MOST_SLOTS = 16
_CLEARING = 256  # programs that clear rows, of which there are mostly none


@triton.jit
def _rounded(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """To the dtype of a result; the interpreter's bf16 does not round."""
    if INTERPRETED and dtype == tl.bfloat16:
        value = round_to_bf16(value)
    return value.to(dtype)


@triton.jit
def _permute_rows_kernel(
    x_ptr, tokens_ptr, rows_ptr, weights_ptr, out_ptr, M, D, step,
    K: tl.constexpr, WEIGHTED: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token = tl.load(tokens_ptr + m, mask=m < M, other=0).to(tl.int64)
    ok = (m < M)[:, None] & (d < D)[None, :]
    value = tl.load(x_ptr + token[:, None] * step + d[None, :], mask=ok)
    if WEIGHTED:
        factor = tl.zeros([BM], tl.float32)
        for slot in tl.static_range(K):  # which of its token's slots a row is
            row = tl.load(rows_ptr + token * K + slot, mask=m < M, other=-1)
            factor = tl.where(row == m, tl.load(weights_ptr + token * K + slot, mask=m < M, other=0.0), factor)
        value = _rounded(value.to(tl.float32) * factor[:, None], out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + m[:, None] * D + d[None, :], value, mask=ok)


@triton.jit
def _term(x_ptr, rows_ptr, weights_ptr, t, inside, d, ok, step, slot, K: tl.constexpr, WEIGHTED: tl.constexpr):
    """What a slot adds to a tile of tokens."""
    row = tl.load(rows_ptr + t * K + slot, mask=inside, other=0).to(tl.int64)
    term = tl.load(x_ptr + row[:, None] * step + d[None, :], mask=ok, other=0.0).to(tl.float32)
    if WEIGHTED:
        term = term * tl.load(weights_ptr + t * K + slot, mask=inside, other=0.0)[:, None]
    return term


@triton.jit
def _combine_rows_kernel(
    x_ptr, rows_ptr, weights_ptr, out_ptr, T, D, step,
    K: tl.constexpr, WEIGHTED: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = (t < T)[:, None] & (d < D)[None, :]
    # the first is not added to a zero, which would lose the sign of another
    total = _term(x_ptr, rows_ptr, weights_ptr, t, t < T, d, ok, step, 0, K, WEIGHTED)
    for slot in tl.static_range(1, K):
        total += _term(x_ptr, rows_ptr, weights_ptr, t, t < T, d, ok, step, slot, K, WEIGHTED)
    total = _rounded(total, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + t[:, None] * D + d[None, :], total, mask=ok)


@triton.jit
def _combine_dots_kernel(
    x_ptr, grad_ptr, rows_ptr, out_ptr, T, D, step, grad_step,
    K: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # slots of the same tokens follow each other, so that a gradient is fetched once for all of them
    slot = tl.program_id(0) % K
    t = (tl.program_id(0) // K).to(tl.int64) * BM + tl.arange(0, BM)
    row = tl.load(rows_ptr + t * K + slot, mask=t < T, other=0).to(tl.int64)
    total = tl.zeros([BM, BD], tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        ok = (t < T)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * step + d[None, :], mask=ok, other=0.0).to(tl.float32)
        total += x * tl.load(grad_ptr + t[:, None] * grad_step + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * K + slot, tl.sum(total, 1), mask=t < T)


@triton.jit
def _clear_rows_kernel(out_ptr, last_ptr, M, D, step, BD: tl.constexpr):
    row = (tl.maximum(tl.load(last_ptr), 0) + tl.program_id(0)).to(tl.int64)
    while row < M:
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            tl.store(out_ptr + row * step + d, tl.zeros([BD], out_ptr.dtype.element_ty), mask=d < D)
        row += tl.num_programs(0)


INTERPRETED = not isinstance(_combine_rows_kernel, triton.runtime.JITFunction)
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KNOWN: dict[tuple[object, ...], CachedLaunch] = {}


def _reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty tensors"
    if "strided" in request.options:
        return "wants rows whose values lie beside each other"
    if "many_slots" in request.options:
        return f"unrolls the slots of a token, up to {MOST_SLOTS}"
    return None


def _tile(columns: int) -> tuple[int, int]:
    """Rows and columns of a program's tile: 16 bytes for a thread and row, and enough rows to keep it busy."""
    width = min(1024, max(16, power_of_two(columns)))
    return max(1, 2048 // width), width


@kernel("permute_rows", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """Triton: one read, one write"""
    (m, columns), slots = out.shape, rows.shape[1]
    bm, bd = _tile(columns)
    rest = (m, columns, x.stride(0), slots, gate_weights is not None, INTERPRETED, bm, bd)
    tensors, grid = (x, tokens, rows, _fp32(gate_weights), out), (ceil_div(m, bm), ceil_div(columns, bd), 1)
    launch_cached(_KNOWN, _permute_rows_kernel, grid, tensors, rest, enable_fp_fusion=False)


@kernel("combine_rows", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def combine_rows(x: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """Triton: every row is read once, sums in registers"""
    (count, columns), slots = out.shape, rows.shape[1]
    bm, bd = _tile(columns)
    rest = (count, columns, x.stride(0), slots, gate_weights is not None, INTERPRETED, bm, bd)
    tensors, grid = (x, rows, _fp32(gate_weights), out), (ceil_div(count, bm), ceil_div(columns, bd), 1)
    # a product is rounded before it is added
    launch_cached(_KNOWN, _combine_rows_kernel, grid, tensors, rest, enable_fp_fusion=False)


@kernel("combine_dots", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def combine_dots(x: Tensor, grad: Tensor, rows: Tensor, out: Tensor) -> None:
    """Triton: a program for some tokens and a slot"""
    (count, slots), columns = rows.shape, x.shape[1]
    bm, bd = _tile(columns)
    rest = (count, columns, x.stride(0), grad.stride(0), slots, bm, bd)
    launch_cached(_KNOWN, _combine_dots_kernel, (ceil_div(count, bm) * slots, 1, 1), (x, grad, rows, out), rest)


@kernel("clear_rows", "triton", devices=DEVICES, sm=(80, 999), dtypes=DTYPES, priority=50, reject=_reject)
def clear_rows(x: Tensor, offs: Tensor) -> None:
    """Triton: looks at the last end, and touches nothing where all rows have a group"""
    rows, columns = x.shape
    rest = (rows, columns, x.stride(0), _tile(columns)[1])
    launch_cached(_KNOWN, _clear_rows_kernel, (min(rows, _CLEARING), 1, 1), (x, offs[-1:]), rest)


def _fp32(gate_weights: Tensor | None) -> Tensor | None:
    return None if gate_weights is None else gate_weights.to(torch.float32).contiguous()
