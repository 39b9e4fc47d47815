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
    first one in its low bits. EVEN: tiles cover both matrices exactly.

    The codes of four rows become one word before the tile is turned, so shared memory sees 32-bit words, not bytes.
    """
    pid = tl.program_id(0)
    pl, pr, e = pid % tiles_l, (pid // tiles_l) % tiles_r, (pid // tiles_l // tiles_r).to(tl.int64)
    r = pr * BR + 4 * tl.arange(0, BR // 4)
    j = pl * BL + tl.arange(0, BL)
    codes_ptr += e * stride_e
    words = tl.zeros((BR // 4, BL), tl.uint32)
    for i in tl.static_range(4):
        inside = (r[:, None] + i < rows) & (j[None, :] < row_bytes)
        row = codes_ptr + (r + i).to(tl.int64)[:, None] * stride_m + j[None, :]
        codes = tl.load(row, mask=None if EVEN else inside, other=None if EVEN else 0).to(tl.uint32)
        # rows 0, 2, 1, 3 if FOUR_BIT, so that each exchange below is one of two nibbles
        words |= codes << (8 * i if not FOUR_BIT else 16 * (i % 2) + 8 * (i // 2))
    if FOUR_BIT:  # first codes of the bytes to the low half, second ones to the high half
        swapped = (words ^ (words >> 12)) & 0xF0F0
        words ^= swapped ^ (swapped << 12)
    words = tl.trans(words)
    out_ptr += e * out_e
    column = pr * (BR // 4) + tl.arange(0, BR // 4)
    if FOUR_BIT:
        for part in tl.static_range(2):
            i = 2 * j[:, None] + part
            fits = (i < length) & (column[None, :] * 2 < out_bytes)
            to = (out_ptr + i.to(tl.int64) * out_m).to(tl.pointer_type(tl.uint16), bitcast=True) + column[None, :]
            tl.store(to, (words >> (16 * part)).to(tl.uint16), mask=None if EVEN else fits)
    else:
        fits = (j[:, None] < length) & (column[None, :] * 4 < out_bytes)
        to = (out_ptr + j.to(tl.int64)[:, None] * out_m).to(tl.pointer_type(tl.uint32), bitcast=True) + column[None, :]
        tl.store(to, words, mask=None if EVEN else fits)


INTERPRETED = not isinstance(_transpose_kernel, triton.runtime.JITFunction)


def _reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty tensors"
    if "strided" in request.options:
        return "needs codes that are contiguous along a row"
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
