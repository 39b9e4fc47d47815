"""Scale rules: from a block's amax to its stored scale and encode factor.

Each function takes the amax as fp32 bit *patterns* (int32, sign bit clear: exact, order-free, NaN > Inf > finite by
construction) and returns the stored scale and the factor that elements are multiplied by before they are encoded. A
stored scale is always the decode factor. There is no epsilon and no floor. A non-finite amax gives a NaN scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elements import decode, encode
from .elements import magnitude_bits as magnitude_bits
from .spec import E4M3, Element

_INF_BITS, _NAN_BITS = 0x7F800000, 0x7FC00000
E8M0_NAN = 0xFF
# keeps every stored fp32 scale normal, so that a product which flushes subnormals agrees with one that does not
_LARGEST_ENCODE = 2.0**126
_FLT_MAX = torch.finfo(torch.float32).max


def mx_scale(amax: Tensor, element: Element, rule: str, *, satfinite: bool = False) -> tuple[Tensor, Tensor]:
    """E8M0 byte (uint8) and the exact fp32 power of two to multiply by.

    floor is OCP MX v1.0; rceil is the smallest power of two that clips nothing; ceil ignores the mantissa of the
    largest code; even rounds the amax to the element's precision first. satfinite sends infinities to the largest
    code instead of poisoning the block.
    """
    exponent, mantissa = amax >> 23, amax & 0x7FFFFF
    if rule == "floor":
        power = exponent - element.emax
    elif rule == "ceil":
        power = exponent - element.emax + (mantissa != 0)
    elif rule == "rceil":
        power = exponent - element.emax + (mantissa > element.max_mantissa)
    else:
        assert rule == "even", rule
        power = ((amax + (1 << (22 - element.mbits))) >> 23) - element.emax
    byte = torch.where(amax >= _INF_BITS, E8M0_NAN, power.clamp(0, 254))
    if satfinite:
        byte = torch.where(amax == _INF_BITS, 0xFE, byte)
    return byte.to(torch.uint8), e8m0_reciprocal(byte)


def e8m0_decode(byte: Tensor) -> Tensor:
    """uint8 -> fp32 2^(byte - 127); 00 is a subnormal, FF is NaN: shifting the byte alone gets both wrong."""
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def e8m0_reciprocal(byte: Tensor) -> Tensor:
    """uint8 -> fp32 2^(127 - byte), built from bits; FF is NaN."""
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 0xFE, 0x00400000, (254 - byte) << 23)
    return torch.where(byte == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def fp8_scale(amax: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """fp32 decode factor and encode factor of an FP8 block.

    fp32: encode first, 448 / amax, and store its reciprocal; pow2: the rceil power of two, at least 2^-126.
    """
    if rule == "pow2":
        exponent, mantissa = amax >> 23, amax & 0x7FFFFF
        byte = (exponent - E4M3.emax + (mantissa > E4M3.max_mantissa)).clamp(1, 254)
        byte = torch.where(amax == 0, 127, byte)
        byte = torch.where(amax >= _INF_BITS, E8M0_NAN, byte)
        return e8m0_decode(byte), e8m0_reciprocal(byte)
    assert rule == "fp32", rule
    value = amax.view(torch.float32)
    # a tensor divided by a tensor: with a Python scalar some devices multiply by the reciprocal and miss the last bit
    factor = (torch.full_like(value, E4M3.max_normal) / value).clamp(max=_LARGEST_ENCODE)
    return _with_reciprocal(torch.where(amax == 0, 1.0, factor), amax)


def supplied_amax(amax: Tensor) -> Tensor:
    """int32 bit patterns of a supplied amax (fp32, any shape); NaN where it is negative."""
    return torch.where(amax < 0, _NAN_BITS, magnitude_bits(amax))


def nvfp4_tensor_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The stored per-tensor factor S_dec and S_enc = 2688 / amax (2688 = 6 * 448), for int32 patterns of any shape."""
    value = amax.view(torch.float32)
    encode_factor = (torch.full_like(value, 6.0 * 448.0) / value).clamp(max=_LARGEST_ENCODE)
    return _with_reciprocal(torch.where(amax == 0, 1.0, encode_factor), amax)


def _with_reciprocal(factor: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(1 / factor, factor), both the canonical NaN where the amax is not finite: devices differ in NaN payloads."""
    finite = amax < _INF_BITS
    return torch.where(finite, torch.ones_like(factor) / factor, torch.nan), torch.where(finite, factor, torch.nan)


def nvfp4_block_scale(amax: Tensor, tensor_scale: tuple[Tensor, Tensor], rule: str) -> tuple[Tensor, Tensor]:
    """E4M3 byte (uint8) and encode factor of NVFP4 blocks; `tensor_scale` is (S_dec, S_enc), broadcast to `amax`.

    The order of the multiplications is part of the contract. A block far below the tensor's amax gets scale 00 and
    is lost, except under the rule "up", which takes the smallest E4M3 at or above the wanted scale.
    """
    decode_factor, encode_factor = tensor_scale
    # 1/6 in fp32; tensor by tensor so that every device rounds once
    sixth = torch.full_like(encode_factor, 1.0 / 6.0)
    wanted = amax.view(torch.float32) * (encode_factor * sixth)
    wanted = torch.where(wanted > E4M3.max_normal, E4M3.max_normal, wanted)  # keeps NaN
    wanted = torch.where(amax >= _INF_BITS, torch.nan, wanted)
    byte = encode(wanted, E4M3)
    if rule == "up":
        too_low = decode(byte, E4M3) < wanted
        byte = (byte + too_low).to(torch.uint8)
    else:
        assert rule == "nearest", rule
    factor = torch.ones_like(wanted) / (decode(byte, E4M3) * decode_factor)
    return byte, torch.where(factor > _FLT_MAX, _FLT_MAX, factor)
