"""Grouped GEMMs in plain Triton for sm_80 and newer and every legal pair of formats: the portable backend, which also
runs in the interpreter.

The mainloop of the dense GEMM (`gemm/_triton.py`) over the tile list: FP8 partial sums are promoted to fp32 after every
128 of K, MX and NVFP4 codes are decoded to bf16 as they are loaded. Any group sizes, any N and K, every epilogue, any
scale layout. No host sync; allocates only the tile list.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..casts._device_decode import decode_config
from ..formats.layout import ceil_div
from ..formats.spec import FORMATS, LEGAL_PAIRS
from ..gemm._triton import DEVICES, INTERPRETED, accumulate_k_blocks, data_of, dot_type, scale_of, tile_shape
from ..hardware import capability
from ..launch import launch
from ..registry import kernel
from ._tiles import count_tiles, group_strides, reject, store_group, tile_coords, tile_list
from .ops import Inputs


@triton.jit(do_not_specialize=["groups", "M"])
def _grouped_mm_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, ga_ptr, gb_ptr, bias_ptr, c_ptr, list_ptr, groups, M, N, K,
    a_stride, b_stride, b_g, sa_t, sa_b, sb_t, sb_b, sb_g, c_g, c_m, c_n, ga_g, gb_g,
    A: tl.constexpr, B: tl.constexpr, DOT: tl.constexpr, K_GROUPED: tl.constexpr, BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """A, B, DOT, EVEN: as in the dense kernel.  x_g: group stride of x."""
    tile = tl.program_id(0)
    if tile >= count_tiles(list_ptr, groups, M, N, K_GROUPED, BM, BN):
        return
    group, row, column, k_start, k_stop, begin, end = tile_coords(
        tile, list_ptr, groups, M, N, K, K_GROUPED, BM, BN, GROUP_M
    )
    m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
    if not K_GROUPED:
        b_ptr += group.to(tl.int64) * b_g
        sb_ptr += group.to(tl.int64) * sb_g
    acc = accumulate_k_blocks(
        a_ptr, b_ptr, sa_ptr, sb_ptr, m, n, end, N, k_start, k_stop, K, a_stride, b_stride, sa_t, sa_b, sb_t, sb_b,
        A, B, DOT, EVEN, BM, BN, BK,
    )  # fmt: skip
    store_group(
        acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, group, m, n, begin, end, N, c_g, c_m, c_n, ga_g, gb_g, k_stop > k_start,
        K_GROUPED, A.factor != "", BIAS, ACCUMULATE, DOT == "fp32",
    )  # fmt: skip


# no scale block may span two groups: 1-D blocks for a (m-grouped), for a and b (k-grouped)
M_PAIRS = sorted(pair for pair in LEGAL_PAIRS if not FORMATS[pair[0]].is_2d)
K_PAIRS = [pair for pair in M_PAIRS if not FORMATS[pair[1]].is_2d]


@kernel("m_grouped", "triton", devices=DEVICES, sm=(80, 999), formats=M_PAIRS, priority=8, reject=reject)
@kernel("k_grouped", "triton", devices=DEVICES, sm=(80, 999), formats=K_PAIRS, priority=8, reject=reject)
def scaled_grouped_mm(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """Triton: FP8 dot and promotion, or exact upcast in the kernel"""
    a, b, offs, _, bias = inputs
    sm = 0 if INTERPRETED else capability(out.device).sm
    k_grouped, is_fp8 = len(b.shape) == 2, a.spec.family == "fp8"
    dot = dot_type(sm, is_fp8=is_fp8)
    # m-grouped: BM for the mean group size
    tile = tile_shape(a.rows if k_grouped else ceil_div(a.rows, offs.shape[0]), is_fp8=is_fp8, sm=sm)
    (sa, sa_strides), (sb, sb_strides) = scale_of(a), scale_of(b)
    b_group, sb_group = (0, 0) if k_grouped else (b.data.stride(0), sb.stride(0))
    tiles, programs = tile_list(inputs, tile)
    tensors = (
        data_of(a, dot), data_of(b, dot), sa, sb, a.global_scale, b.global_scale,
        None if bias is None else bias.contiguous(), out, tiles,
    )  # fmt: skip
    numbers = (
        offs.shape[0], a.rows, b.rows, a.length, a.data.stride(0), b.data.stride(-2), b_group, *sa_strides,
        *sb_strides, sb_group, *group_strides(a, b, out),
    )  # fmt: skip
    constants = (
        decode_config(a, sm), decode_config(b, sm), dot, k_grouped, bias is not None, accumulate,
        a.length % tile.bk == 0, tile.bm, tile.bn, tile.bk, tile.group_m,
    )  # fmt: skip
    launch(
        _grouped_mm_kernel, (programs,), tensors, (*numbers, *constants),
        num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=is_fp8,  # FMA of the scaled sums; off where a tensor scale and a bias round separately
    )  # fmt: skip
