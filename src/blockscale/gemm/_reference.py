"""Reference GEMM: the contract's formula in torch, on any device. Every other backend is tested against it.

Each block's partial sum is exact (fp64, rounded once to fp32) and then promoted: acc = fma(partial, s_a * s_b, acc) in
fp32. `exact_product` is the same GEMM without intermediate rounding, in fp64, for tests. Cost: one small GEMM and a
pass over the output per K-block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.decoding import decode_codes, decode_scale, spread
from ..formats.tensor import BlockScaled
from ..registry import kernel
from .ops import apply_tensor_scales, finish


@kernel("gemm", "reference", devices=(), priority=-100)
def scaled_mm(a: Tensor | BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """exact torch reference, fp32 promotion per block"""
    finish(block_product(a, b), out, bias, accumulate=accumulate)


def block_product(a: Tensor | BlockScaled, b: BlockScaled) -> Tensor:
    """a [M, K] @ b [N, K].mT -> fp32 [M, N], promoted block by block, tensor scales applied last."""
    plain = isinstance(a, Tensor)
    codes_a, codes_b = (a if plain else decode_codes(a)).double(), decode_codes(b).double()
    step = b.spec.granule
    scales_b = _every_scale(b)[:, ::step]
    scales_a = scales_b.new_ones(1, scales_b.shape[1]) if plain else _every_scale(a)[:, ::step]
    acc = torch.zeros(codes_a.shape[0], b.rows, dtype=torch.float32, device=b.device)
    for block in range(scales_b.shape[1]):
        span = slice(block * step, (block + 1) * step)
        partial = (codes_a[:, span] @ codes_b[:, span].mT).float()
        factor = _factor(scales_a[:, block], scales_b[:, block], rounded=b.spec.family == "fp8")
        acc = _fma(partial, factor, acc)
    return apply_tensor_scales(acc, *([b] if plain else [a, b]))


def exact_product(a: Tensor | BlockScaled, b: BlockScaled) -> Tensor:
    """The same GEMM in fp64, [M, N]. NaN scales give NaN."""
    return _exact_values(a) @ _exact_values(b).mT


def _exact_values(operand: Tensor | BlockScaled) -> Tensor:
    """Decoded operand, fp64 [rows, K]."""
    if isinstance(operand, Tensor):
        return operand.double()
    scale = _every_scale(operand).double()
    value = torch.where(scale.isnan(), torch.nan, decode_codes(operand).double() * scale)
    return value if operand.global_scale is None else value * operand.global_scale.double()


def _every_scale(operand: BlockScaled) -> Tensor:
    """Block scale of every code, fp32 [rows, K]."""
    return spread(decode_scale(operand), operand.spec, operand.rows, operand.length)


def _factor(scale_a: Tensor, scale_b: Tensor, *, rounded: bool) -> Tensor:
    """s_a * s_b for every output element, fp64. FP8 scales are multiplied in fp32; those of MX and NVFP4 exactly."""
    if rounded:
        return (scale_a[:, None] * scale_b[None, :]).double()
    return scale_a.double()[:, None] * scale_b.double()[None, :]


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z in fp64, where the product is exact, then rounded to fp32: a fused multiply-add but for rare ties."""
    return torch.addcmul(z.double(), x.double(), y).float()
