"""Exact decoding of block-scaled operands to fp32: shared by the reference casts and by products that decode first.

All results have the scaled axis last. A NaN scale gives the canonical NaN whatever the codes are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elements import decode
from .layout import locate, padded_ends
from .packing import unpack_fp4
from .scales import e8m0_decode
from .spec import E4M3, Format
from .tensor import BlockScaled


def decode_codes(q: BlockScaled) -> Tensor:
    """Element values, scales not applied: fp32 [..., rows, length]."""
    raw = q.operand.data.view(torch.uint8)
    codes = unpack_fp4(raw, q.length) if q.spec.codes_per_byte == 2 else raw
    return decode(codes, q.spec.element)


def decode_scale(q: BlockScaled) -> Tensor:
    """Block scales as fp32 [..., row tiles, blocks]; NVFP4's tensor scale is not applied."""
    scale = q.plain_scale()
    if scale.dtype == torch.float8_e8m0fnu:
        return e8m0_decode(scale.view(torch.uint8))
    if scale.dtype == torch.float8_e4m3fn:
        return decode(scale.view(torch.uint8), E4M3)
    return scale


def spread(scale: Tensor, spec: Format, rows: int, length: int) -> Tensor:
    """[..., row tiles, blocks] -> [..., rows, length]: each block's scale at each of its elements."""
    if spec.is_2d:
        scale = scale.repeat_interleave(spec.block[0], dim=-2)[..., :rows, :]
    return scale.repeat_interleave(spec.block[1], dim=-1)[..., :length]


def decode_blocks(q: BlockScaled) -> Tensor:
    """Values with block scales but without NVFP4's tensor scale: fp32 [..., rows, length], each product exact."""
    scale = spread(decode_scale(q), q.spec, q.rows, q.length)
    return torch.where(scale.isnan(), torch.nan, decode_codes(q) * scale)


def decode_operand(q: BlockScaled, offs: Tensor | None = None) -> Tensor:
    """Values of an operand: fp32 [..., rows, length]. `offs` is required if there is a tensor scale per group."""
    values = decode_blocks(q)
    if q.global_scale is None:
        return values
    factor = global_factor(q, offs, values)
    return torch.where(values.isnan() | factor.isnan(), torch.nan, values * factor)


def global_factor(q: BlockScaled, offs: Tensor | None, like: Tensor) -> Tensor:
    """NVFP4's tensor scale, shaped to multiply [..., rows, length]."""
    assert q.global_scale is not None
    group: Tensor | None = None
    if q.global_scale.dim() == 1 and like.dim() == 2:
        assert offs is not None, "a scale per group of tokens needs the offsets"
        ends = padded_ends(offs) if q.group_align else offs.to(torch.int64)
        tokens = q.length if q.group_align else q.rows
        group, _ = locate(torch.arange(tokens, device=q.device), ends)
    return group_values(q.global_scale, like, None, group, -2 if q.group_align else -1)


def group_values(value: Tensor, like: Tensor, spec: Format | None, group: Tensor | None, axis: int) -> Tensor:
    """A tensor-wide [] or per-group [G] value, shaped to broadcast over `like`, elements or blocks of an operand.

    group: the group of each token when tokens are grouped; they run along `like`'s rows (axis=-1) or along its last
    axis (axis=-2, `spec` given when that axis counts blocks). Without it [G] goes with the leading axis. Tokens outside
    all groups get 1.
    """
    if value.dim() == 0:
        return value
    if group is None:
        return value.view(-1, *([1] * (like.dim() - 1)))
    per_token = torch.cat((value, value.new_ones(1)))[group]
    if axis == -1:
        return per_token[:, None]
    return per_token[None, :: spec.block[1]] if spec else per_token[None, :]
