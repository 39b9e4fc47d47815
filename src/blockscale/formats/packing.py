"""Codes narrower than a byte: FP4 two to a byte (in memory), FP6 four to three bytes (on disk).

The first element takes the low bits. Tails are filled with code 0, so any length packs; unpacking takes the length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 [..., K] codes -> uint8 [..., ceil(K / 2)], the even element in the low nibble.

    >>> [hex(b) for b in pack_fp4(torch.tensor([0x7, 0xE, 0x6, 0x4], dtype=torch.uint8)).tolist()]
    ['0xe7', '0x46']
    """
    pairs = pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, ((codes.shape[-1] + 1) // 2, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_fp4(packed: Tensor, length: int) -> Tensor:
    """uint8 [..., ceil(length / 2)] -> uint8 [..., length]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :length]


def pack_fp6(codes: Tensor) -> Tensor:
    """uint8 [..., K] codes -> uint8 [..., 3 * ceil(K / 4)], little endian.

    >>> [hex(b) for b in pack_fp6(torch.tensor([0x1F, 0x20, 0x01, 0x3F], dtype=torch.uint8)).tolist()]
    ['0x1f', '0x18', '0xfc']
    """
    quads = pad(codes, (0, -codes.shape[-1] % 4)).unflatten(-1, ((codes.shape[-1] + 3) // 4, 4)).to(torch.int32)
    word = quads[..., 0] | quads[..., 1] << 6 | quads[..., 2] << 12 | quads[..., 3] << 18
    return torch.stack((word & 0xFF, word >> 8 & 0xFF, word >> 16), dim=-1).flatten(-2).to(torch.uint8)


def unpack_fp6(packed: Tensor, length: int) -> Tensor:
    """uint8 [..., 3 * ceil(length / 4)] -> uint8 [..., length]."""
    triples = packed.unflatten(-1, (packed.shape[-1] // 3, 3)).to(torch.int32)
    word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes = torch.stack((word & 63, word >> 6 & 63, word >> 12 & 63, word >> 18), dim=-1)
    return codes.flatten(-2)[..., :length].to(torch.uint8)
