"""GEMM in plain Triton for sm_80 and newer and every legal pair: the portable path, which also runs in the interpreter.

FP8 blocks are multiplied as FP8 if the GPU can (else as bf16, which represents every code) and scaled in fp32 after
every 128 of K. A code of MX or NVFP4 times its block scale is exact in bf16 (docs/numerics.md), so those operands are
decoded while loading, and only the accumulation rounds. Scales are read in any layout.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..casts._device_decode import decode, decode_config, decode_pair, load_scales
from ..formats.layout import blocked_columns, ceil_div
from ..formats.spec import LEGAL_PAIRS
from ..formats.tensor import BlockScaled
from ..hardware import capability
from ..launch import launch
from ..registry import Request, kernel
from ._tiles import Tile, store_tile, tile_at


@triton.jit
def _codes(
    ptr, row, rows, k, K, stride,
    S: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Values [R, BK] of codes without scales: FP8 for an FP8 dot, else fp32. Zero outside the operand."""
    ok = row[:, None] < rows
    first = ptr + row.to(tl.int64)[:, None] * stride
    if S.code_bits == 4:
        byte = k // 2 + tl.arange(0, BK // 2)[None, :]
        if not EVEN:
            ok &= byte < (K + 1) // 2  # an odd K is padded with a zero code
        lo, hi = decode_pair(tl.load(first + byte, mask=ok, other=0), S)
        return tl.reshape(tl.join(lo, hi), (R, BK))
    else:
        at = k + tl.arange(0, BK)[None, :]
        if not EVEN:
            ok &= at < K
        if DOT == "fp8":
            return tl.load(first + at, mask=ok, other=0.0)
        else:
            return decode(tl.load(first + at, mask=ok, other=0).to(tl.int32), S)


@triton.jit
def _operand(
    ptr, scale_ptr, row, rows, k, K, stride, stride_t, stride_b,
    S: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Tile [R, BK] for the dot, with the scales of MX and NVFP4 applied."""
    value = _codes(ptr, row, rows, k, K, stride, S, R, BK, DOT, EVEN)
    if S.family != "fp8":
        N: tl.constexpr = (BK + S.along - 1) // S.along  # a block may be longer than the tile
        block = k // S.along + tl.arange(0, N)[None, :]
        ok = row[:, None] < rows
        if not EVEN:
            ok &= block * S.along < K
        scale = load_scales(scale_ptr, row[:, None] // S.across, block, ok, stride_t, stride_b, False, S)
        value = tl.reshape(tl.reshape(value, (R, N, BK // N)) * scale[:, :, None], (R, BK))
    return value.to(tl.bfloat16) if DOT == "bf16" else value


@triton.jit
def _block_scale(scale_ptr, row, rows, k, stride_t, stride_b, S: tl.constexpr):
    """FP8 scales [R] of one K-block."""
    return tl.load(scale_ptr + (row // S.across).to(tl.int64) * stride_t + k * stride_b, mask=row < rows, other=0.0)


@triton.jit
def accumulate_k_blocks(
    a_ptr, b_ptr, sa_ptr, sb_ptr, m, n, M, N, start, stop, K, a_stride, b_stride, sa_t, sa_b, sb_t, sb_b,
    A: tl.constexpr, B: tl.constexpr, DOT: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Accumulator, fp32 [BM, BN], of rows m of a and n of b over K [start, stop), before tensor scales.  start: a
    multiple of BK."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(start, stop, BK):
        a = _operand(a_ptr, sa_ptr, m, M, k, K, a_stride, sa_t, sa_b, A, BM, BK, DOT, EVEN)
        b = _operand(b_ptr, sb_ptr, n, N, k, K, b_stride, sb_t, sb_b, B, BN, BK, DOT, EVEN)
        if A.family == "fp8":
            scale_a = _block_scale(sa_ptr, m, M, k // 128, sa_t, sa_b, A)
            scale_b = _block_scale(sb_ptr, n, N, k // 128, sb_t, sb_b, B)
            acc += tl.dot(a, tl.trans(b), input_precision="ieee") * (scale_a[:, None] * scale_b[None, :])
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def _scaled_mm_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, ga_ptr, gb_ptr, bias_ptr, c_ptr, M, N, K,
    a_stride, b_stride, sa_t, sa_b, sb_t, sb_b, c_m, c_n, tiles_m, tiles_n,
    A: tl.constexpr, B: tl.constexpr, DOT: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """DOT: input type of the tensor cores, "fp8" or "bf16"; "fp32" in the interpreter, whose bf16 does not round.
    EVEN: BK divides K."""
    tile_m, tile_n = tile_at(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    acc = accumulate_k_blocks(
        a_ptr, b_ptr, sa_ptr, sb_ptr, m, n, M, N, 0, K, K, a_stride, b_stride, sa_t, sa_b, sb_t, sb_b,
        A, B, DOT, EVEN, BM, BN, BK,
    )  # fmt: skip
    store_tile(
        acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, M, N, c_m, c_n,
        A.factor == "tensor", BIAS, ACCUMULATE, DOT == "fp32",
    )  # fmt: skip


INTERPRETED = not isinstance(_scaled_mm_kernel, triton.runtime.JITFunction)
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)


def tile_shape(m: int, *, is_fp8: bool, sm: int) -> Tile:
    """Tile by number of rows and GPU: shared memory and registers of sm_80 and sm_120 hold less."""
    if INTERPRETED:
        return Tile(32, 64, 128, 4, 1)
    stages = 3 if sm in (80, 90, 100, 103) else 2
    if m <= 32:
        return Tile(16, 64, 128, 4, stages)
    if m <= 64:
        return Tile(64, 64, 128, 4, stages)
    if not is_fp8:
        return Tile(128, 128, 64, 8, stages)
    return Tile(128, 128 if sm // 10 in (9, 10) else 64, 128, 8, stages)


def dot_type(sm: int, *, is_fp8: bool) -> str:
    """DOT argument of the kernels: "fp8", "bf16" or "fp32"."""
    return "fp32" if INTERPRETED else "fp8" if is_fp8 and sm >= 89 else "bf16"


def _reject(request: Request) -> str | None:
    return "takes no empty operands" if 0 in request.shape else None


@kernel(
    "gemm",
    "triton",
    devices=DEVICES,
    sm=(80, 999),
    formats=sorted(LEGAL_PAIRS),
    priority=8,
    reject=_reject,
    forced_only=True,  # correct on an H200, but slower than the others there; not run on other GPUs
)
def scaled_mm(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Triton: FP8 dot and promotion, or exact upcast in the kernel"""
    sm = 0 if INTERPRETED else capability(out.device).sm
    is_fp8 = a.spec.family == "fp8"
    sides = decode_config(a, sm), decode_config(b, sm)
    dot = dot_type(sm, is_fp8=is_fp8)
    tile = tile_shape(a.rows, is_fp8=is_fp8, sm=sm)
    tiles_m, tiles_n = ceil_div(a.rows, tile.bm), ceil_div(b.rows, tile.bn)
    scales = [scale_of(q) for q in (a, b)]
    tensors = (
        *(data_of(q, dot) for q in (a, b)), *(scale for scale, _ in scales), a.global_scale, b.global_scale,
        None if bias is None else bias.contiguous(), out,
    )  # fmt: skip
    numbers = (
        a.rows, b.rows, a.length, a.data.stride(0), b.data.stride(0), *scales[0][1], *scales[1][1], *out.stride(),
        tiles_m, tiles_n,
    )  # fmt: skip
    constants = (
        *sides, dot, bias is not None, accumulate, a.length % tile.bk == 0, tile.bm, tile.bn, tile.bk, tile.group_m,
    )  # fmt: skip
    launch(
        _scaled_mm_kernel, (tiles_m * tiles_n,), tensors, (*numbers, *constants),
        num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=is_fp8,  # FP8 promotes by fused multiply-add; a tensor scale and a bias round separately
    )  # fmt: skip


def data_of(operand: BlockScaled, dot: str) -> Tensor:
    """Codes in the dtype of the dot, or as bytes."""
    return operand.data if dot == "fp8" else operand.data.view(torch.uint8)


def scale_of(operand: BlockScaled) -> tuple[Tensor, tuple[int, int]]:
    """Scales as bytes or fp32, and their strides for `load_scales`."""
    scale = operand.scale if operand.scale.dtype == torch.float32 else operand.scale.view(torch.uint8)
    if operand.scale_layout == "blocked":
        return scale.contiguous(), (ceil_div(blocked_columns(operand.spec, operand.length), 4), 1)
    return scale, (scale.stride(-2), scale.stride(-1))
