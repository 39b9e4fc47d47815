"""Grouped products by Blackwell's block-scaled tensor cores, in plain Triton: the dense product's inner loop
(`gemm/_blackwell.py`) on tiles of groups.

Blocked scales lie in tiles of 128 rows, so tiles of an m-grouped product start at multiples of 128 rows of all, not of
a group: where a group ends within one, the tile is multiplied for each group that it holds rows of, and each stores its
own. Scales of an expert start a tile, and so do the groups of a k-grouped operand.

Compiled for sm_100 and sm_120 and run in the interpreter; it has never run on a GPU (docs/design/grouped.md).
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAssignmentType=false

from __future__ import annotations

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
from ..hardware import made_current, sm_count
from ..registry import Request, kernel
from ._tiles import count_tiles, group_steps, listed, place_of, reject, store_group

_SCALE_ROWS = 128


@triton.jit(do_not_specialize=["groups", "M", "K"])
def _grouped_mm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, ga_ptr, gb_ptr, bias_ptr, c_ptr, list_ptr, groups, M, N, K,
    c_g, c_m, c_n, ga_g, gb_g,
    A: tl.constexpr, B: tl.constexpr, ALONG: tl.constexpr, K_GROUPED: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A, B, ALONG, SCALED: as of the dense product.  x_g: from a group's to the next group's x."""
    tile = tl.program_id(0)
    if tile >= count_tiles(list_ptr, groups, M, N, K_GROUPED, BM, BN):
        return
    group, row, column, start, stop, begin, end = place_of(tile, list_ptr, groups, M, N, K, K_GROUPED, BM, BN, GROUP_M)
    b_row = column if K_GROUPED else group * N + column
    sb_row = column if K_GROUPED else group * tl.cdiv(N, 128) * 128 + column
    acc = accumulate_k_blocks(
        a_desc, b_desc, sa_desc, sb_desc, row, b_row, row, sb_row, start, stop, A, B, ALONG, BM, BN, BK
    )  # fmt: skip
    m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
    store_group(
        acc, c_ptr, bias_ptr, ga_ptr, gb_ptr, group, m, n, begin, end, N, c_g, c_m, c_n, ga_g, gb_g, stop > start,
        K_GROUPED, SCALED, BIAS, ADD, INTERPRETED,
    )  # fmt: skip


M_PAIRS = [pair for pair in PAIRS if not get_format(pair[0]).is_2d]
K_PAIRS = [pair for pair in M_PAIRS if not get_format(pair[1]).is_2d]
LAYOUTS = dict.fromkeys((*MX, *NVFP4), "blocked")


def _reject(request: Request) -> str | None:
    return reject(request) or reject_mixed(request)


def tile_for_sm100(a: BlockScaled, b: BlockScaled, offs: Tensor, out: Tensor) -> Tile:
    """The dense product's, of one group where all have the same sizes."""
    groups = offs.shape[0] if len(b.shape) == 2 else 1
    return _fitted(dense.tile_for_sm100(a, b, out.dtype, ceil_div(sm_count(out.device), groups)), b)


def tile_for_sm120(a: BlockScaled, b: BlockScaled) -> Tile:
    """The dense product's."""
    return _fitted(dense.tile_for_sm120(a, b), b)


def _fitted(tile: Tile, b: BlockScaled) -> Tile:
    """Groups of tokens may be an odd number of blocks of 128."""
    return tile._replace(bk=128) if len(b.shape) == 2 else tile


@kernel(
    "m_grouped",
    "blackwell",
    sm=(100, 103),
    formats=M_PAIRS,
    layouts=LAYOUTS,
    priority=4,
    reject=_reject,
    forced_only=True,  # it has never run
)
def m_grouped_sm100(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None,
    accumulate: bool,
    starts: Tensor | None = None,
) -> None:
    """Triton: block-scaled product of sm_100's tensor cores (tcgen05) by tiles of groups"""
    launch(a, b, offs, out, bias, accumulate=accumulate, tile=tile_for_sm100(a, b, offs, out), starts=starts)


@kernel(
    "k_grouped",
    "blackwell",
    sm=(100, 103),
    formats=K_PAIRS,
    layouts=LAYOUTS,
    priority=4,
    reject=_reject,
    forced_only=True,  # it has never run
)
def k_grouped_sm100(
    a: BlockScaled, b: BlockScaled, offs: Tensor, out: Tensor, *, bias: None = None, accumulate: bool
) -> None:
    """Triton: block-scaled product of sm_100's tensor cores (tcgen05) over tokens of groups"""
    launch(a, b, offs, out, None, accumulate=accumulate, tile=tile_for_sm100(a, b, offs, out))


@kernel(
    "m_grouped",
    "blackwell",
    sm=(120, 121),
    formats=[pair for pair in M_PAIRS if not is_mixed(pair)],  # Triton widens the others to bf16 here
    layouts=LAYOUTS,
    priority=4,
    reject=_reject,
    forced_only=True,  # it has never run
)
def m_grouped_sm120(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None,
    accumulate: bool,
    starts: Tensor | None = None,
) -> None:
    """Triton: block-scaled product of sm_120's tensor cores (mma.sync) by tiles of groups"""
    launch(a, b, offs, out, bias, accumulate=accumulate, tile=tile_for_sm120(a, b), starts=starts)


@kernel(
    "k_grouped",
    "blackwell",
    sm=(120, 121),
    formats=[pair for pair in K_PAIRS if not is_mixed(pair)],
    layouts=LAYOUTS,
    priority=4,
    reject=_reject,
    forced_only=True,  # it has never run
)
def k_grouped_sm120(
    a: BlockScaled, b: BlockScaled, offs: Tensor, out: Tensor, *, bias: None = None, accumulate: bool
) -> None:
    """Triton: block-scaled product of sm_120's tensor cores (mma.sync) over tokens of groups"""
    launch(a, b, offs, out, None, accumulate=accumulate, tile=tile_for_sm120(a, b))


def launch(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out: Tensor,
    bias: Tensor | None,
    *,
    accumulate: bool,
    tile: Tile,
    starts: Tensor | None = None,
) -> None:
    """The product by tiles of one shape; scales are blocked."""
    assert {a.scale_layout, b.scale_layout} == {"blocked"}
    assert tile.bm == _SCALE_ROWS
    k_grouped = len(b.shape) == 2
    with made_current(out.device):  # kernels go to the current device
        tiles, programs = listed(a, b, offs, tile, _SCALE_ROWS, starts)
        _grouped_mm_kernel[(programs,)](
            *tma_descriptors(a, b, tile), a.global_scale, b.global_scale,
            None if bias is None else bias.contiguous(), out, tiles, offs.shape[0], a.rows, b.rows, a.length,
            *group_steps(a, b, out), a.spec.element.name, b.spec.element.name, a.spec.granule, k_grouped,
            a.global_scale is not None, bias is not None, accumulate,
            tile.bm, tile.bn, tile.bk, tile.group_m, INTERPRETED,
            num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=False,  # a tensor scale and a bias are two roundings
        )  # fmt: skip
