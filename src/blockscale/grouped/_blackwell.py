"""Grouped GEMMs on Blackwell's block-scaled tensor cores, in plain Triton: the mainloop of the dense GEMM
(`gemm/_blackwell.py`) over the tile list.

Blocked scales come in tiles of 128 rows, so m-grouped output tiles start at multiples of 128 rows of the whole operand,
not of a group. A tile that holds rows of several groups is multiplied once for each, and each stores its own rows. The
scales of each expert, and of each group of a k-grouped operand, start a new scale tile.

Compiled for sm_100 and sm_120 and run in the interpreter; never run on a GPU (docs/design/grouped.md).
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAssignmentType=false

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..formats.layout import ceil_div
from ..formats.spec import get_format
from ..formats.tensor import BlockScaled
from ..gemm import _blackwell as dense
from ..gemm._blackwell import (
    INTERPRETED,
    MX,
    NVFP4,
    PAIRS,
    accumulate_k_blocks,
    is_mixed,
    reject_mixed,
    tma_descriptors,
)
from ..gemm._tiles import Tile
from ..hardware import sm_count
from ..launch import launch
from ..registry import Request, kernel
from ._tiles import count_tiles, group_strides, reject, store_group, tile_coords, tile_list
from .ops import Inputs

_SCALE_ROWS = 128


@triton.jit(do_not_specialize=["groups", "M", "K"])
def _grouped_mm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, ga_ptr, gb_ptr, bias_ptr, c_ptr, list_ptr, groups, M, N, K,
    c_g, c_m, c_n, ga_g, gb_g,
    A: tl.constexpr, B: tl.constexpr, ALONG: tl.constexpr, K_GROUPED: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A, B, ALONG, SCALED: as in the dense kernel.  x_g: group stride of x."""
    tile = tl.program_id(0)
    if tile >= count_tiles(list_ptr, groups, M, N, K_GROUPED, BM, BN):
        return
    group, row, column, k_start, k_stop, begin, end = tile_coords(
        tile, list_ptr, groups, M, N, K, K_GROUPED, BM, BN, GROUP_M
    )
    b_row = column if K_GROUPED else group * N + column
    sb_row = column if K_GROUPED else group * tl.cdiv(N, 128) * 128 + column
    acc = accumulate_k_blocks(
        a_desc, b_desc, sa_desc, sb_desc, row, b_row, row, sb_row, k_start, k_stop, A, B, ALONG, BM, BN, BK
    )  # fmt: skip
    m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
    store_group(
        acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, group, m, n, begin, end, N, c_g, c_m, c_n, ga_g, gb_g, k_stop > k_start,
        K_GROUPED, SCALED, BIAS, ACCUMULATE, INTERPRETED,
    )  # fmt: skip


M_PAIRS = [pair for pair in PAIRS if not get_format(pair[0]).is_2d]
K_PAIRS = [pair for pair in M_PAIRS if not get_format(pair[1]).is_2d]


def _reject(request: Request) -> str | None:
    return reject(request) or reject_mixed(request)


def tile_for_sm100(inputs: Inputs, out: Tensor) -> Tile:
    """Tile of the dense GEMM; for k-grouped, the one for a single group on its share of the SMs."""
    a, b, offs, _, _ = inputs
    groups = offs.shape[0] if len(b.shape) == 2 else 1
    return _with_group_bk(dense.tile_for_sm100(a, b, out.dtype, ceil_div(sm_count(out.device), groups)), b)


def tile_for_sm120(a: BlockScaled, b: BlockScaled) -> Tile:
    """Tile of the dense GEMM; BK = 128 if k-grouped."""
    return _with_group_bk(dense.tile_for_sm120(a, b), b)


def _with_group_bk(tile: Tile, b: BlockScaled) -> Tile:
    """BK = 128 if k-grouped: a group may have an odd number of K-blocks of 128."""
    return tile._replace(bk=128) if len(b.shape) == 2 else tile


_entry = functools.partial(
    kernel,
    backend="blackwell",
    layouts=dict.fromkeys((*MX, *NVFP4), "blocked"),
    priority=4,
    reject=_reject,
    forced_only=True,  # never run on a GPU
)


@_entry("m_grouped", sm=(100, 103), formats=M_PAIRS)
@_entry("k_grouped", sm=(100, 103), formats=K_PAIRS)
def scaled_grouped_mm_sm100(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """Triton: block-scaled GEMM on sm_100's tensor cores (tcgen05)"""
    launch_gemm(inputs, out, tile_for_sm100(inputs, out), accumulate=accumulate)


# Triton widens FP8 by FP4 to bf16 here
@_entry("m_grouped", sm=(120, 121), formats=[pair for pair in M_PAIRS if not is_mixed(pair)])
@_entry("k_grouped", sm=(120, 121), formats=[pair for pair in K_PAIRS if not is_mixed(pair)])
def scaled_grouped_mm_sm120(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """Triton: block-scaled GEMM on sm_120's tensor cores (mma.sync)"""
    launch_gemm(inputs, out, tile_for_sm120(inputs.a, inputs.b), accumulate=accumulate)


def launch_gemm(inputs: Inputs, out: Tensor, tile: Tile, *, accumulate: bool) -> None:
    """Launch the kernel with a given tile; scales in the blocked layout."""
    a, b, offs, _, bias = inputs
    assert {a.scale_layout, b.scale_layout} == {"blocked"}
    assert tile.bm == _SCALE_ROWS
    k_grouped = len(b.shape) == 2
    tiles, programs = tile_list(inputs, tile, _SCALE_ROWS)
    tensors = (
        *tma_descriptors(a, b, tile), a.global_scale, b.global_scale,
        None if bias is None else bias.contiguous(), out, tiles,
    )  # fmt: skip
    constants = (
        a.spec.element.name, b.spec.element.name, a.spec.granule, k_grouped, a.global_scale is not None,
        bias is not None, accumulate, tile.bm, tile.bn, tile.bk, tile.group_m, INTERPRETED,
    )  # fmt: skip
    launch(
        _grouped_mm_kernel, (programs,), tensors,
        (offs.shape[0], a.rows, b.rows, a.length, *group_strides(a, b, out), *constants),
        num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,  # a tensor scale and a bias round separately
    )  # fmt: skip
