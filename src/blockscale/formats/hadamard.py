"""The random Hadamard transform of FP4 training: spreads an outlier over its group before a block is scaled.

x'_j = h^-1/2 * sum_i x_i d_i (-1)^popcount(i & j) in groups of h along the last axis, d from a sign mask. Both operands
of a product are rotated, so the product is unchanged. Order of operations and the final rounding to bf16 are part of
the contract; a tail group is filled with zeros, so a rotated row has round_up(K, h) values.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 16: the fixed vector of NVIDIA's NVFP4 recipe; 32: the first Philox word of an all-zero counter and key
DEFAULT_MASKS = {16: 0xD7E8, 32: 0x6627E8D5}


def _signs(size: int, mask: int, device: torch.device) -> Tensor:
    flips = [-1.0 if mask >> i & 1 else 1.0 for i in range(size)]
    return torch.tensor(flips, dtype=torch.float32, device=device)


def _butterflies(groups: Tensor) -> Tensor:
    """[..., h] fp32: stages of stride 1, 2, 4, ..., each (a, b) -> (a + b, a - b) with one rounding per result."""
    size = groups.shape[-1]
    stride = 1
    while stride < size:
        pairs = groups.unflatten(-1, (size // (2 * stride), 2, stride))
        a, b = pairs.unbind(-2)
        groups = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return groups


def _norm(size: int, device: torch.device) -> Tensor:
    return torch.tensor(size**-0.5, dtype=torch.float32, device=device)


def rotate(x: Tensor, size: int, mask: int) -> Tensor:
    """fp32 [..., K] -> fp32 [..., round_up(K, size)], each value rounded to bf16.

    >>> rotate(torch.arange(1.0, 17.0), 16, 0xD7E8)[:4].tolist()
    [-15.5, -7.5, 7.5, -0.5]
    """
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
    groups = padded.unflatten(-1, (padded.shape[-1] // size, size)) * _signs(size, mask, x.device)
    rotated = _butterflies(groups) * _norm(size, x.device)
    return rotated.to(torch.bfloat16).float().flatten(-2)


def rotate_back(x: Tensor, size: int, mask: int) -> Tensor:
    """The inverse in fp32, without a rounding to bf16: the transform is orthogonal and symmetric up to its signs."""
    groups = x.unflatten(-1, (x.shape[-1] // size, size))
    return (_butterflies(groups) * _norm(size, x.device) * _signs(size, mask, x.device)).flatten(-2)
