"""Casts of shards of a weight in square blocks, by the scales of the whole, and its column operand from its codes.

A square block has one scale for its rows and its columns, so the row and the column operand of a weight hold the same
codes, and transposing them replaces a cast. A shard that starts or ends inside a block needs the amax of the whole
block. Rows of zeros with that amax in one of them have the same scale, so no kernel takes a scale from outside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats.cast_spec import Cast, CastPlan, flatten_cast
from ..formats.layout import ceil_div, pack_scale
from ..formats.scales import fp8_scale, magnitude_bits, mx_scale
from ..formats.spec import Format
from ..formats.tensor import BlockScaled, assemble
from ..library import OPERATORS
from .transpose import transpose_codes


class Rows(NamedTuple):
    """Rows [first, first + size) of each matrix [total, K] of a weight: the part that one rank has."""

    first: int
    size: int
    total: int

    @property
    def end(self) -> int:
        return self.first + self.size

    def tiles(self, spec: Format) -> range:
        """Row tiles that the rows touch."""
        return range(self.first // spec.block[0], ceil_div(self.end, spec.block[0]) if self.size else 0)

    def edges(self, spec: Format) -> tuple[int, int]:
        """Rows in a first and in a last tile that other ranks have rows of, too."""
        tile = spec.block[0]
        head = min(-self.first % tile, self.size)
        tail = 0 if self.end == self.total else min(self.end % tile, self.size - head)
        return head, tail


def block_amax(x: Tensor, spec: Format, rows: Rows) -> Tensor:
    """amax of the part of each block that these rows hold: int32 bit patterns [..., tiles touched, blocks].

    x: [..., size, K]. Patterns order as magnitudes do, with NaN on top, so their maximum over ranks is the amax of the
    whole.
    """
    across, along = spec.block
    bits = magnitude_bits(x.float())
    before = rows.first % across if rows.size else 0
    bits = pad(bits, (0, -x.shape[-1] % along, before, -(before + rows.size) % across))
    tiles = bits.unflatten(-1, (bits.shape[-1] // along, along)).unflatten(-3, (bits.shape[-2] // across, across))
    return tiles.amax((-3, -1))


def scales_from_amax(amax: Tensor, plan: CastPlan) -> Tensor:
    """Stored scales of blocks, of the shape of amax: int32 bit patterns. Not for NVFP4, whose blocks share a factor."""
    if plan.spec.family == "mx":
        byte, _ = mx_scale(amax, plan.spec.element, plan.rule, satfinite=plan.satfinite)
        return byte.view(plan.spec.scale_dtype)
    assert plan.spec.family == "fp8", plan.format
    return fp8_scale(amax, plan.rule)[0]


def cast_rows(
    x: Tensor, cast: Cast, rows: Rows, first: Tensor | None, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Row operand of these rows as the cast of the whole has it: code bytes [..., size, row bytes], bytes of the plain
    scales [..., tiles touched, bytes of blocks] and NVFP4's tensor scale.

    cast: in plain layout, to square blocks.  first, last: amax of the whole's blocks [..., blocks] in the first and in
    the last tile touched, as `block_amax`; read only where other ranks have rows of that tile.
    """
    spec, size = cast.plan.spec, rows.size
    head, tail = rows.edges(spec)
    if not head and not tail:
        return _buffers(x, cast)
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    if head:
        assert first is not None, "the first tile has rows on other ranks"
        parts.append(_cast_edge(x[..., :head, :], cast, first))
    if size > head + tail:
        parts.append(_buffers(x[..., head : size - tail, :], cast))
    if tail:
        assert last is not None, "the last tile has rows on other ranks"
        parts.append(_cast_edge(x[..., size - tail :, :], cast, last))
    codes, scales, factors = zip(*parts, strict=True)
    return torch.cat(codes, dim=-2), torch.cat(scales, dim=-2), factors[0]


def _buffers(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bytes of codes and of scales, and tensor scale, of a cast along the last axis."""
    codes, scales, factor = OPERATORS["quantize"](x, *flatten_cast(cast), -1, None)
    return codes.view(torch.uint8), scales.view(torch.uint8), factor if factor.numel() else None


def _cast_edge(x: Tensor, cast: Cast, amax: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of one tile, fewer than it has, by an amax [..., blocks] of its blocks."""
    across, along = cast.plan.spec.block
    tile = x.new_zeros(*x.shape[:-2], across, x.shape[-1])
    tile[..., : x.shape[-2], :] = x
    tile[..., -1, ::along] = amax.view(torch.float32).to(x.dtype)
    codes, scales, factor = _buffers(tile, cast)
    return codes[..., : x.shape[-2], :], scales, factor


def transpose_square(q: BlockScaled, plan: CastPlan) -> BlockScaled:
    """Column operand (axis=-2) of a tensor in square blocks from its row operand, byte for byte the cast's.

    plan: of the column operand: same format and rule, any scale layout.
    """
    spec, (rows, length) = q.spec, q.shape[-2:]
    codes = transpose_codes(q.data.view(torch.uint8), length, spec.element.bits)
    scales = pack_scale(spec, q.plain_scale().mT, length, rows, plan.layout)
    return assemble(plan, (codes.view(spec.data_dtype), scales, q.global_scale), q.shape, -2)
