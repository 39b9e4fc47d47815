"""Hopper's MXFP8 product in Gluon as a row of the table: descriptors, the launch, and weights with fewer scales."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats.tensor import BlockScaled
from ..hardware import multiprocessors
from ..registry import kernel
from . import _assembly
from ._gluon import gl
from ._hopper import LANGUAGE
from ._hopper_launch import can_be_described, descriptor
from ._hopper_mx_kernel import scaled_mm_mx_kernel
from .epilogue import finish
from .heuristics import PART, Plan, Problem
from .heuristics_mx import choose
from .ops import reject_fp8_of_hopper

_CODES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
_ROWWISE, _WEIGHT = ("mxfp8_e4m3", "mxfp8_e5m2"), "mxfp8_e4m3_128x128"
WEIGHT_BLOCK = 128  # rows of b that `launch` can take to have the same scales


@kernel(
    "gemm",
    "hopper",
    sm=(90, 90),
    formats=[(a, b) for a in _ROWWISE for b in (*_ROWWISE, _WEIGHT)],
    layouts=dict.fromkeys((*_ROWWISE, _WEIGHT), "plain"),
    priority=12,
    reject=reject_fp8_of_hopper,
    by_demand=True,  # right on an H200, but the exact upcast is as fast or faster (docs/design/gemm.md)
)
def scaled_mm_mx(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: warp-specialised MXFP8 product, promoted after every 32 of K"""
    direct = can_be_described(out)
    wide, add = out.dtype == torch.float32, accumulate and direct
    plan = choose(Problem(a.rows, b.rows, a.length, not b.spec.is_2d, wide, multiprocessors(out.device), add))
    rows = b.spec.block[0]
    if direct:
        return launch(a, b, out, bias, accumulate=accumulate, plan=plan, weight_block=rows)
    # a buffer of the caller's that the copy engine cannot write to
    product = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    launch(a, b, product, bias, accumulate=False, plan=plan, weight_block=rows)
    finish(product, out, None, accumulate=accumulate)


def launch(
    a: BlockScaled,
    b: BlockScaled,
    out: Tensor,
    bias: Tensor | None,
    *,
    accumulate: bool,
    plan: Plan,
    weight_block: int = 1,
) -> None:
    """The product by one plan.

    weight_block: 128 where scales of b repeat over blocks of so many rows, by its format or because the caller knows
    (`repeats_over_rows` looks); the result is the same, with half the multiplications outside of the tensor cores.
    """
    assert can_be_described(out), "a copy of the output would be written, and lost"
    assert weight_block in (1, WEIGHT_BLOCK)
    assert {a.scale_layout, b.scale_layout} == {"plain"}
    tile, k = plan.tile, a.length
    a_codes, b_codes = _CODES[a.data.dtype], _CODES[b.data.dtype]
    _assembly.launch(functools.partial(
        scaled_mm_mx_kernel[(plan.programs,)],
        descriptor(a.data[:, :k], (min(tile.rows, tile.bm // tile.loads), 128), _layout(PART, 128, a_codes)),
        descriptor(b.data[:, :k], (tile.bn, 128), _layout(tile.bn, 128, b_codes)),
        descriptor(out, (PART, tile.bn), _layout(PART, tile.bn, LANGUAGE[out.dtype])),
        _scale_words(a), _scale_words(b), None if bias is None else bias.contiguous(), a.rows, b.rows, k,
        tile, weight_block == 1, bias is not None, accumulate, num_warps=4,
        enable_fp_fusion=True,  # of the scaled sums: the contract's fused multiply-add
    ))  # fmt: skip


def product_of_shared_scales(a: BlockScaled, b: BlockScaled) -> Tensor:
    """To bf16, for a weight whose scales repeat over `WEIGHT_BLOCK` rows, which nobody checks here."""
    out = torch.empty(a.rows, b.rows, dtype=torch.bfloat16, device=a.device)
    plan = choose(Problem(a.rows, b.rows, a.length, False, False, multiprocessors(out.device)))
    launch(a, b, out, None, accumulate=False, plan=plan, weight_block=WEIGHT_BLOCK)
    return out


def _layout(rows: int, columns: int, dtype: object) -> object:
    """Of a tile of codes or of the output in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def _scale_words(operand: BlockScaled) -> Tensor:
    """int32 [rows, K / 128]: four scale bytes a word. The scales themselves, or a copy where rows start elsewhere, or
    where a 128x128 block has one byte (then rows past the last fill its block)."""
    scale = operand.scale.view(torch.uint8)
    if operand.spec.is_2d:
        tiles, blocks = scale.shape
        words = scale[:, None, :, None].expand(tiles, WEIGHT_BLOCK, blocks, 4)
        return words.reshape(tiles * WEIGHT_BLOCK, blocks * 4).view(torch.int32)
    missing = -scale.shape[1] % 4
    if missing or scale.data_ptr() % 4 or not scale.is_contiguous():
        scale = pad(scale, (0, missing)).clone(memory_format=torch.contiguous_format)
    return scale.view(torch.int32)


def repeats_over_rows(operand: BlockScaled, rows: int = WEIGHT_BLOCK) -> bool:
    """Whether all rows of each block of so many have the same scales. It reads them, so on a GPU the host waits."""
    scale = operand.plain_scale().view(torch.uint8)
    heads = scale[::rows].repeat_interleave(rows, dim=0)[: scale.shape[0]]
    return torch.equal(scale, heads)
