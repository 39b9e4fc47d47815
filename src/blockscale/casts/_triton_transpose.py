"""Transposed codes by Triton, sm_80 and newer: tiles of bytes turned in registers and shared memory."""

# Type checkers do not know Triton: a constexpr stands for its value.
# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..formats.layout import ceil_div
from ..launch import launch
from ..registry import Request, kernel

BR, BL = 128, 128  # rows and bytes of a tile


@triton.jit
def _transpose_kernel(
    codes_ptr, out_ptr, rows, row_bytes, length, out_bytes, stride_e, stride_m, out_e, out_m, tiles_r, tiles_l,
    EVEN: tl.constexpr, FOUR_BIT: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Tile [BR, BL] of code bytes [rows, row_bytes] -> out [length, out_bytes]. A byte holds two codes if FOUR_BIT, the
    first one in its low bits. EVEN: tiles cover both matrices exactly."""
    pid = tl.program_id(0)
    pl, pr, e = pid % tiles_l, (pid // tiles_l) % tiles_r, (pid // tiles_l // tiles_r).to(tl.int64)
    r = tl.arange(0, BR)
    j = tl.arange(0, BL)
    codes_ptr += e * stride_e + (pr * BR).to(tl.int64) * stride_m + pl * BL
    inside = (pr * BR + r[:, None] < rows) & (pl * BL + j[None, :] < row_bytes)
    tile = tl.load(
        codes_ptr + r[:, None] * stride_m + j[None, :], mask=None if EVEN else inside, other=None if EVEN else 0
    )
    PER_BYTE: tl.constexpr = 2 if FOUR_BIT else 1
    column = tl.arange(0, BR // PER_BYTE)
    out_ptr += e * out_e + (pl * BL * PER_BYTE).to(tl.int64) * out_m + pr * (BR // PER_BYTE)
    for part in tl.static_range(PER_BYTE):
        turned = tl.trans((tile >> (4 * part)) & 15 if FOUR_BIT else tile)
        if FOUR_BIT:
            low, high = tl.split(tl.reshape(turned, (BL, BR // 2, 2)))
            turned = low | (high << 4)
        i = j[:, None] * PER_BYTE + part
        fits = (pl * BL * PER_BYTE + i < length) & (pr * (BR // PER_BYTE) + column[None, :] < out_bytes)
        tl.store(out_ptr + i * out_m + column[None, :], turned, mask=None if EVEN else fits)


INTERPRETED = not isinstance(_transpose_kernel, triton.runtime.JITFunction)


def _reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty tensors"
    if "strided" in request.options:
        return "needs codes that are contiguous along a row"
    if "far" in request.options:
        return "takes rows and columns that lie less than 2^23 values apart: offsets within a tile are 32-bit"
    return None


@kernel(
    "transpose_codes", "triton", devices=("cuda", "cpu") if INTERPRETED else ("cuda",), sm=(80, 999), priority=50,
    reject=_reject,
)  # fmt: skip
def transpose_codes(codes: Tensor, out: Tensor, length: int, bits: int) -> None:
    """Triton: one read, one write"""
    rows, row_bytes = codes.shape[-2], ceil_div(length * bits, 8)
    matrices, results = codes.reshape(-1, rows, codes.shape[-1]), out.view(-1, *out.shape[-2:])
    per_byte = 8 // bits
    tiles_r, tiles_l = ceil_div(out.shape[-1] * per_byte, BR), ceil_div(row_bytes, BL)
    # the padding of out is written too, with zeros: rows past the last are loaded as zeros
    even = rows % BR == 0 and row_bytes % BL == 0 and length == row_bytes * per_byte
    launch(
        _transpose_kernel, (matrices.shape[0] * tiles_r * tiles_l,), (matrices, results),
        (
            rows, row_bytes, length, out.shape[-1], *matrices.stride()[:2], *results.stride()[:2], tiles_r, tiles_l,
            even, bits == 4, BR, BL,
        ),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
