"""A quantized weight in another format: exactly where that is possible, and said so; else rounded.

Exactly means: both decode to the same fp32 values, and NVFP4's tensor scale is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..casts import quantize
from ..formats.cast_spec import CastSpec
from ..formats.decoding import decode_operand
from ..formats.layout import ceil_div
from ..formats.scales import e8m0_decode
from ..formats.spec import get_format
from ..formats.storage import operand_of
from ..formats.tensor import BlockScaled, as_bytes
from .layouts.layout import e8m0_bytes

PLAIN_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def reexpress(q: BlockScaled, format: str) -> tuple[Tensor | BlockScaled, bool]:
    """A weight [..., N, K] in another format, and whether it is exact.  format: one of the ten, or of `PLAIN_FORMATS`.

    >>> import blockscale as bs
    >>> reexpress(bs.quantize(torch.randn(128, 128), "mxfp4"), "fp8_128x128")[1]
    True
    """
    if format == q.format:
        return q, True
    kept = _with_same_codes(q, format)
    if kept is not None:
        return kept, True
    if len(q.shape) > 2:  # one expert at a time: values in fp32 take eight times the memory
        return _stacked([reexpress(expert_of(q, at), format) for at in range(q.shape[0])])
    return _cast(decode_operand(q), format)


def cast_plain(values: Tensor, format: str) -> BlockScaled:
    """An unquantized weight [..., N, K] in a format, rounded by its default scale rule."""
    return quantize(values, format)


def _cast(values: Tensor, format: str) -> tuple[Tensor | BlockScaled, bool]:
    """fp32 values in a format. A power of two as scale of an FP8 block is taken if it is exact."""
    if format in PLAIN_FORMATS:
        plain = values.to(PLAIN_FORMATS[format])
        return plain, torch.equal(plain.float(), values)
    spec = get_format(format)
    if spec.family == "fp8":
        found = quantize(values, CastSpec(format, scale_rule="pow2"))
        if torch.equal(decode_operand(found), values):
            return found, True
    found = quantize(values, format)
    return found, torch.equal(decode_operand(found), values)


def _with_same_codes(q: BlockScaled, format: str) -> BlockScaled | None:
    """The same codes with scales for another block, if the format has them."""
    change = _SCALES.get((q.format, format))
    scale = None if change is None else change(q.plain_scale(), q)
    if scale is None:
        return None
    return operand_of(get_format(format), q.operand.data, scale, q.global_scale, q.shape)


def _repeated(scale: Tensor, q: BlockScaled, rows: int, blocks: int) -> Tensor:
    """Scales of tiles as scales of a format with smaller blocks: each repeated for `rows` rows and `blocks` blocks."""
    raw = scale.view(torch.uint8)
    columns = ceil_div(q.shape[-1], q.spec.block[1] // blocks)
    return raw.repeat_interleave(rows, -2)[..., : q.shape[-2], :].repeat_interleave(blocks, -1)[..., :columns]


def _powers(scale: Tensor, q: BlockScaled) -> Tensor | None:
    """fp32 scales as E8M0 bytes if all are powers of two."""
    return e8m0_bytes(scale)


def _powers_repeated(scale: Tensor, q: BlockScaled) -> Tensor | None:
    found = e8m0_bytes(scale)
    return None if found is None else _repeated(found, q, 128, 4)


_SCALES: dict[tuple[str, str], Callable[[Tensor, BlockScaled], Tensor | None]] = {
    ("mxfp8_e4m3_128x128", "fp8_128x128"): lambda scale, q: e8m0_decode(scale.view(torch.uint8)),
    ("mxfp8_e4m3_128x128", "mxfp8_e4m3"): lambda scale, q: _repeated(scale, q, 128, 4),
    ("fp8_128x128", "mxfp8_e4m3_128x128"): _powers,
    ("fp8_128x128", "mxfp8_e4m3"): _powers_repeated,
    ("nvfp4_16x16", "nvfp4"): lambda scale, q: _repeated(scale, q, 16, 1),
}


def expert_of(q: BlockScaled, at: int) -> BlockScaled:
    """One weight [N, K] of experts [E, N, K] with plain or grid scales."""
    factor = None if q.global_scale is None else q.global_scale.reshape(-1)[at]
    return replace(q, data=q.data[at], scale=q.scale[at], global_scale=factor, shape=q.shape[1:])


def _stacked(found: list[tuple[Any, bool]]) -> tuple[Tensor | BlockScaled, bool]:
    values = [value for value, _ in found]
    exact = all(each for _, each in found)
    return (stack(values) if isinstance(values[0], BlockScaled) else torch.stack(values)), exact


def stack(experts: list[BlockScaled]) -> BlockScaled:
    """Weights [N, K] of one format as [E, N, K], with a tensor scale for each."""
    first = experts[0]
    codes = torch.stack([each.operand.data.view(torch.uint8) for each in experts])
    scales = torch.stack([as_bytes(each.plain_scale()) for each in experts])
    factors = [each.global_scale.reshape([]) for each in experts if each.global_scale is not None]
    factor = torch.stack(factors) if factors else None
    return operand_of(first.spec, codes, scales, factor, (len(experts), *first.shape))
