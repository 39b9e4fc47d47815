"""Values to element codes and back, at bit level: the only rounding code of the reference.

`encode` takes fp32 and returns one code per byte; it rounds to nearest even and saturates, or rounds stochastically
when random words are given. `decode` is exact. Torch's own casts are not used: their saturation differs by version.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .spec import Element


def magnitude_bits(x: Tensor) -> Tensor:
    """fp32 [...] -> int32 patterns of |x|; integer order is the order of magnitudes, with NaN on top."""
    return x.view(torch.int32) & 0x7FFFFFFF


def encode(v: Tensor, element: Element, random: Tensor | None = None) -> Tensor:
    """fp32 [...] -> uint8 [...], one code per byte; NaN gives the canonical NaN code.

    random: int64 words in [0, 2^32) of v's shape. A value between two codes goes up iff its word is below the fraction
    times 2^32, so exact values never move and the expectation is the value itself.

    >>> from .spec import E2M1
    >>> encode(torch.tensor([0.25, 0.75, 2.5, 5.0, -9.0]), E2M1).tolist()
    [0, 2, 4, 6, 15]
    """
    shift = 23 - element.mbits
    bits = v.view(torch.int32)
    magnitude = magnitude_bits(v)
    clamped = magnitude.clamp(max=element.max_bits)
    # normal range: drop low mantissa bits and rebias; a later carry moves into the next binade
    base = (clamped >> shift) - ((127 - element.bias) << element.mbits)
    fraction = (clamped & ((1 << shift) - 1)).float() * 2.0**-shift
    # subnormal range: a fixed-point number in units of the smallest subnormal; the product is exact
    units = clamped.view(torch.float32) * 2.0 ** (element.mbits - element.emin)
    is_subnormal = clamped < ((element.emin + 127) << 23)
    base = torch.where(is_subnormal, units.to(torch.int32), base)
    fraction = torch.where(is_subnormal, units - units.floor(), fraction)
    if random is None:
        up = (fraction > 0.5) | ((fraction == 0.5) & (base & 1).bool())
    else:
        up = random < (fraction * 2.0**32).to(torch.int64)
    code = (base + up) | ((bits >> 31 & 1) << (element.bits - 1))
    return torch.where(magnitude > 0x7F800000, element.nan_code, code).to(torch.uint8)


def decode(codes: Tensor, element: Element) -> Tensor:
    """uint8 codes [...] -> their exact fp32 values; special codes give NaN and infinities.

    >>> from .spec import E4M3
    >>> decode(torch.tensor([0x00, 0x01, 0x38, 0xFE], dtype=torch.uint8), E4M3).tolist()
    [0.0, 0.001953125, 1.0, -448.0]
    """
    # a lookup takes a third of the time; traced tensors index no table, and a table must not be made in a CUDA graph
    if type(codes) is Tensor and codes.device.type == "cpu" and not torch.compiler.is_compiling():
        return _values(element)[codes.to(torch.int32)]
    return _decode(codes, element)


@functools.cache
def _values(element: Element) -> Tensor:
    """Values of all 256 bytes, fp32 [256]."""
    with torch.inference_mode(False):
        return _decode(torch.arange(256, dtype=torch.uint8, device="cpu"), element)


def _decode(codes: Tensor, element: Element) -> Tensor:
    """`decode` by the definition of an element's bits."""
    code = codes.to(torch.int32)
    magnitude = code & ((1 << (element.bits - 1)) - 1)
    negative = (code >> (element.bits - 1) & 1).bool()
    shift = 23 - element.mbits
    normal = ((magnitude + ((127 - element.bias) << element.mbits)) << shift).view(torch.float32)
    subnormal = magnitude.float() * element.min_subnormal
    value = torch.where(magnitude < (1 << element.mbits), subnormal, normal)
    if element.has_inf:
        top = ((1 << element.ebits) - 1) << element.mbits
        value = torch.where(magnitude == top, torch.inf, value)
        is_nan = magnitude > top
    else:
        is_nan = magnitude == (element.nan_code if element.has_nan else -1)
    return torch.where(is_nan, torch.nan, torch.where(negative, -value, value))


def grid(element: Element) -> list[float]:
    """The non-negative finite values of an element, ascending: what a block can express before scaling.

    >>> from .spec import E2M1
    >>> grid(E2M1)
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    codes = torch.arange(1 << (element.bits - 1), dtype=torch.uint8)
    values = decode(codes, element)
    return values[values.isfinite()].tolist()
