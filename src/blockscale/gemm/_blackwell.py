"""GEMM by Blackwell's block-scaled tensor cores, in plain Triton: `tl.dot_scaled` on the stored codes.

The tensor cores multiply FP8 and FP4 codes, apply the block scales and accumulate in fp32; nothing is decoded. TMA
loads codes and scales, with zeros outside an operand, so tails need no code. Scales are read in the `blocked`
layout: its tiles of 128 rows by 4 blocks are what sm_100 copies to its tensor memory. Triton has no FP6 here.

Compiled for sm_100 and sm_120 and run in the interpreter; it has never run on a GPU (docs/design/gemm.md).
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAssignmentType=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..formats.layout import blocked_columns, ceil_div, round_up
from ..formats.spec import get_format
from ..formats.tensor import BlockScaled
from ..hardware import sm_count
from ..launch import launch
from ..registry import Request, kernel
from ._tiles import Tile, store_tile, tile_at


@triton.jit
def _blocked_scales(desc, row, block, R: tl.constexpr, C: tl.constexpr):
    """Scales [R, C] from tiles of 512 bytes, where (r, c) is at (r % 32) * 16 + (r // 32) * 4 + c. On sm_100 the
    compiler folds the permutation and copies whole tiles from shared to tensor memory."""
    tiles = desc.load([row // 128, block // 4, 0, 0])
    tiles = tl.reshape(tiles, (R // 128, C // 4, 32, 4, 4))
    return tl.reshape(tl.permute(tiles, (0, 3, 2, 1, 4)), (R, C))


@triton.jit
def accumulate_k_blocks(
    a_desc, b_desc, sa_desc, sb_desc, a_row, b_row, sa_row, sb_row, start, stop,
    A: tl.constexpr, B: tl.constexpr, ALONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Accumulator, fp32 [BM, BN], of BM rows of a and BN rows of b over K [start, stop), before tensor scales.
    sa_row, sb_row: first rows of the stored scales, multiples of 128, as is `start`."""
    PACK_A: tl.constexpr = 2 if A == "e2m1" else 1
    PACK_B: tl.constexpr = 2 if B == "e2m1" else 1
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(start, stop, BK):
        a = a_desc.load([a_row, k // PACK_A])
        b = b_desc.load([b_row, k // PACK_B])
        scale_a = _blocked_scales(sa_desc, sa_row, k // ALONG, BM, BK // ALONG)
        scale_b = _blocked_scales(sb_desc, sb_row, k // ALONG, BN, BK // ALONG)
        acc = tl.dot_scaled(a, scale_a, A, tl.trans(b), scale_b, B, acc)
    return acc


@triton.jit(do_not_specialize=["M", "K"])
def _scaled_mm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, ga_ptr, gb_ptr, bias_ptr, c_ptr, M, N, K, c_m, c_n,
    A: tl.constexpr, B: tl.constexpr, ALONG: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A, B: element types.  ALONG: codes per scale.  SCALED: operands have tensor scales."""
    tile_m, tile_n = tile_at(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP_M)
    row, column = tile_m * BM, tile_n * BN
    acc = accumulate_k_blocks(
        a_desc, b_desc, sa_desc, sb_desc, row, column, row, column, 0, K, A, B, ALONG, BM, BN, BK
    )  # fmt: skip
    m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
    store_tile(acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, m, n, M, N, c_m, c_n, SCALED, BIAS, ACCUMULATE, INTERPRETED)


INTERPRETED = not isinstance(_scaled_mm_kernel, triton.runtime.JITFunction)
# in the blocked layout 2-D formats have the scales of their 1-D formats
MX, NVFP4 = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3_128x128", "mxfp4"), ("nvfp4", "nvfp4_16x16")
PAIRS = [(a, b) for names in (MX, NVFP4) for a in names for b in names]


def is_mixed(pair: tuple[str, ...]) -> bool:
    """Whether one operand is FP8 and the other FP4."""
    return len({get_format(name).codes_per_byte for name in pair}) == 2


def _reject(request: Request) -> str | None:
    return "takes no empty operands" if 0 in request.shape else reject_mixed(request)


def reject_mixed(request: Request) -> str | None:
    """Reason to refuse FP8 by FP4, or None: TMA unpacks FP4 codes to bytes only if K is a multiple of 128."""
    k = request.shape[2]
    if is_mixed(request.formats) and k % 128:
        return f"wants K in multiples of 128 for FP8 by FP4, this is {k}"
    return None


def tile_for_sm100(a: BlockScaled, b: BlockScaled, dtype: torch.dtype, sms: int) -> Tile:
    """Wide tiles if they fill the GPU. In the epilogue 256 columns of fp32 do not fit in the registers."""
    if dtype != torch.float32 and ceil_div(a.rows, 128) * ceil_div(b.rows, 256) >= sms:
        return Tile(128, 256, _depth(a, b), 8, 4)
    return Tile(128, 128, _depth(a, b), 8, 3)  # two CTAs per SM: one computes while the other stores


def tile_for_sm120(a: BlockScaled, b: BlockScaled) -> Tile:
    """The accumulator is in registers, and shared memory has 99 KiB."""
    return Tile(128, 128, _depth(a, b), 8, 3)


def _depth(a: BlockScaled, b: BlockScaled) -> int:
    """BK: rows of 128 bytes, the widest TMA swizzle. FP4 beside FP8 takes a byte per code in shared memory."""
    return 256 if a.spec.codes_per_byte == b.spec.codes_per_byte == 2 else 128


_entry = functools.partial(
    kernel,
    "gemm",
    "blackwell",
    layouts=dict.fromkeys((*MX, *NVFP4), "blocked"),
    priority=4,  # below F.scaled_mm until both have been timed
    reject=_reject,
    forced_only=True,  # it has never run
)


@_entry(sm=(100, 103), formats=PAIRS)
def scaled_mm_sm100(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Triton: block-scaled GEMM by the tensor cores of sm_100 (tcgen05), accumulator in tensor memory"""
    tile = tile_for_sm100(a, b, out.dtype, sm_count(out.device))
    launch_gemm(a, b, out, bias, accumulate=accumulate, tile=tile)


@_entry(sm=(120, 121), formats=[pair for pair in PAIRS if not is_mixed(pair)])  # Triton widens the others to bf16 here
def scaled_mm_sm120(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Triton: block-scaled GEMM by the tensor cores of sm_120 (mma.sync), accumulator in registers"""
    launch_gemm(a, b, out, bias, accumulate=accumulate, tile=tile_for_sm120(a, b))


def launch_gemm(
    a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, tile: Tile
) -> None:
    """Launch the GEMM with a given tile; scales are in the blocked layout."""
    assert {a.scale_layout, b.scale_layout} == {"blocked"}
    grid = (ceil_div(a.rows, tile.bm) * ceil_div(b.rows, tile.bn),)
    tensors = (
        *tma_descriptors(a, b, tile), a.global_scale, b.global_scale,
        None if bias is None else bias.contiguous(), out,
    )  # fmt: skip
    constants = (
        a.spec.element.name, b.spec.element.name, a.spec.granule, a.global_scale is not None, bias is not None,
        accumulate, tile.bm, tile.bn, tile.bk, tile.group_m, INTERPRETED,
    )  # fmt: skip
    launch(
        _scaled_mm_kernel, grid, tensors, (a.rows, b.rows, a.length, *out.stride(), *constants),
        num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,  # a tensor scale and a bias round separately
    )  # fmt: skip


def tma_descriptors(a: BlockScaled, b: BlockScaled, tile: Tile) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of the codes and the scales of both operands; stacked matrices are concatenated along rows."""
    align = 32 if is_mixed((a.format, b.format)) else 16  # row alignment of TMA in bytes; 32 where it unpacks FP4
    sides = (a, tile.bm), (b, tile.bn)
    codes = [_codes(q, rows, tile.bk, align) for q, rows in sides]
    return (*codes, *(_scales(q, rows, tile.bk) for q, rows in sides))


def _codes(operand: BlockScaled, rows: int, length: int, align: int) -> TensorDescriptor:
    """Descriptor of codes, FP4 two per byte; of a copy if rows are not aligned for TMA."""
    pack = operand.spec.codes_per_byte
    codes = (operand.data.view(torch.uint8) if pack == 2 else operand.data).flatten(0, -2)
    if codes.stride(1) != 1 or codes.stride(0) % align or codes.data_ptr() % align:
        size, stride = codes.shape, (round_up(codes.shape[1], align), 1)
        codes = torch.empty_strided(size, stride, dtype=codes.dtype, device=codes.device).copy_(codes)
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [rows, length // pack])


def _scales(operand: BlockScaled, rows: int, length: int) -> TensorDescriptor:
    """Descriptor of scale tiles, each as two rows of 256 bytes, the widest TMA box. Its dtype tells E8M0 from E4M3."""
    scale = operand.scale if operand.spec.family == "nvfp4" else operand.scale.view(torch.uint8)
    beside = ceil_div(blocked_columns(operand.spec, operand.length), 4)
    scale = scale.contiguous().view(-1, beside, 2, 256)
    return TensorDescriptor.from_tensor(scale, [rows // 128, length // operand.spec.granule // 4, 2, 256])
