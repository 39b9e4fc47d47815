"""Registry entry of the Gluon m-grouped MXFP8 GEMM for Hopper: choice of a tile, launch, forecast."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..gemm._hopper import is_tma_addressable, start_kernel, unpadded
from ..gemm._hopper_mx import LAYOUTS, PAIRS, scale_words
from ..gemm.heuristics import SUBTILE_M
from ..hardware import sm_count
from ..registry import kernel
from . import _hopper
from ._hopper_mx_kernel import grouped_mm_mx_kernel
from ._schedule import row_tiles
from .heuristics import MX, Tile
from .ops import Inputs


@kernel(
    "m_grouped",
    "hopper",
    sm=(90, 90),
    formats=PAIRS,
    layouts=LAYOUTS,
    priority=25,
    reject=_hopper.reject,
    forecast=functools.partial(_hopper.forecast, model=MX),
    precompile_key=functools.partial(_hopper.precompile_key, model=MX),
)
def scaled_grouped_mm_mx(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """Gluon: warp-specialised m-grouped MXFP8 GEMM, promoted after every 32 of K"""
    _hopper.run(inputs, out, accumulate=accumulate, model=MX, launch=launch)


def launch(inputs: Inputs, out: Tensor, tile: Tile, *, accumulate: bool) -> None:
    """Launch the kernel with a given tile."""
    assert is_tma_addressable(out), "TMA would write to a copy of the output"
    a, b, offs, starts, bias = inputs
    assert {a.scale_layout, b.scale_layout} == {"plain"}
    m, n, k = a.rows, b.rows, a.length
    a_codes, b_codes = unpadded(a.data, k), unpadded(b.data.flatten(0, 1), k)
    b_scale = b.scale.view(torch.uint8)
    tile_list = row_tiles(offs, m, tile.bm, 1, starts)  # threads load the scales, so tiles may start at any row
    start_kernel(
        grouped_mm_mx_kernel,
        sm_count(out.device),
        (
            (a_codes, (tile.bm, 128)),
            (a_codes, (SUBTILE_M, 128)),
            (b_codes, (tile.bn, 128)),
            (out, (SUBTILE_M, tile.bn)),
        ),
        (tile_list, out, scale_words(a), b_scale, None if bias is None else bias.contiguous()),
        (offs.shape[0], m, n, k, b_scale.stride(1), b_scale.stride(0), out.stride(0)),
        (tile, bias is not None, accumulate),
    )
