"""Quantization error of a cast: SQNR, clipping and underflow, on any device, without a host sync until read."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..casts import dequantize
from ..errors import ShapeError, refuse
from ..formats.decoding import decode_scale
from ..formats.elements import decode
from ..formats.spec import Element
from ..formats.tensor import BlockScaled

# a block maximum that is encoded to the largest code may exceed it by the rounding of its own scale
_CLIP_SLACK = 1.0 + 2.0**-20


@dataclass(frozen=True)
class Quality:
    """Measures of one cast, as 0-d tensors on the tensor's device.

    sqnr_db: 20 log10(|x| / |x - x_hat|).  clipped: share of values beyond the largest code of their block.
    underflow: share of nonzero values that became zero.  poisoned: share of blocks with a NaN scale.
    """

    sqnr_db: Tensor
    clipped: Tensor
    underflow: Tensor
    poisoned: Tensor


def measure(x: Tensor, q: BlockScaled) -> Quality:
    """Compare a tensor with its cast; groups and rotations are not supported here.

    >>> import blockscale as bs
    >>> x = torch.tensor([[1.0, 2.0, 4.0, 0.01]])
    >>> result = measure(x, bs.quantize(x, "mxfp4"))
    >>> round(result.underflow.item(), 2), result.clipped.item()
    (0.25, 0.0)
    """
    if tuple(x.shape) != tuple(q.shape):
        refuse(
            f"x has shape {tuple(x.shape)}, q {tuple(q.shape)}",
            rule="q is the cast of x",
            fix="pass both",
            error=ShapeError,
        )
    if q.group_align or q.hadamard is not None:
        refuse(
            f"q is {q}",
            "values are compared in place, so groups must not be padded nor values rotated",
            "measure a cast without offs and hadamard, or dequantize it and use sqnr_db",
        )
    decoded = dequantize(q, torch.float32).double()
    source = x.double()
    nonzero = source != 0
    return Quality(
        sqnr_db=sqnr_db(source, decoded),
        clipped=is_clipped(source, q).double().mean(),
        underflow=(nonzero & (decoded == 0)).double().sum() / nonzero.double().sum().clamp(min=1),
        poisoned=decode_scale(q).isnan().double().mean(),
    )


def sqnr_db(reference: Tensor, value: Tensor) -> Tensor:
    """Signal-to-quantization-noise ratio in dB, computed in fp64; infinite for equal tensors."""
    reference, value = reference.double(), value.double()
    return 20 * torch.log10(reference.norm() / (reference - value).norm())


def is_clipped(source: Tensor, q: BlockScaled, offs: Tensor | None = None) -> Tensor:
    """Mask of values beyond the largest code of their block; False in a block whose scale underflowed.

    Decodes a copy of q whose codes are all the largest.  source: in fp32 or fp64.  offs: group ends, for an operand
    with padded groups or one tensor scale per group.
    """
    raw = q.data.view(torch.uint8)
    code = _largest_code(q.spec.element)
    full = torch.empty_strided(raw.shape, raw.stride(), dtype=torch.uint8, device=raw.device)
    full.fill_(code | code << 4 if q.spec.codes_per_byte == 2 else code)
    limit = dequantize(replace(q, data=full.view(q.data.dtype)), torch.float32, offs=offs).to(source.dtype)
    return (limit > 0) & (source.abs() > limit * _CLIP_SLACK)


@functools.cache
def _largest_code(element: Element) -> int:
    values = decode(torch.arange(2**element.bits, dtype=torch.uint8), element)
    return int((values == element.max_normal).nonzero()[0])
