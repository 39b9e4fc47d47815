"""What a cast did to a tensor: noise, clipping and underflow, on any device and without a host sync until read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..casts import dequantize
from ..errors import OptionError, ShapeError, message
from ..formats.decoding import decode_scale, global_factor, spread
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
        raise ShapeError(
            message(f"x has shape {tuple(x.shape)}, q {tuple(q.shape)}", rule="q is the cast of x", fix="pass both")
        )
    if q.group_align or q.hadamard is not None:
        raise OptionError(
            message(
                f"q is {q}",
                rule="values are compared where they stand, so groups must not be padded nor values rotated",
                fix="measure a cast without offs and hadamard, or dequantize it and use sqnr_db",
            )
        )
    decoded = dequantize(q, torch.float32).double()
    source = x.double()
    block_scale = decode_scale(q)
    limit = spread(block_scale, q.spec, q.rows, q.length).double() * q.spec.element.max_normal
    if q.global_scale is not None:
        limit = limit * global_factor(q, None, limit)
    limit = limit if q.axis == -1 else limit.mT
    nonzero = source != 0
    return Quality(
        sqnr_db=sqnr_db(source, decoded),
        # a block whose scale underflowed has no largest code to exceed: its values are lost, not clipped
        clipped=((limit > 0) & (source.abs() > limit * _CLIP_SLACK)).double().mean(),
        underflow=(nonzero & (decoded == 0)).double().sum() / nonzero.double().sum().clamp(min=1),
        poisoned=block_scale.isnan().double().mean(),
    )


def sqnr_db(reference: Tensor, value: Tensor) -> Tensor:
    """Signal to quantisation noise in decibels, computed in fp64; infinite for equal tensors."""
    reference, value = reference.double(), value.double()
    return 20 * torch.log10(reference.norm() / (reference - value).norm())
