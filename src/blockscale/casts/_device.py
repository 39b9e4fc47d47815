"""Tile functions of the Triton casts: scales and codes of a tile in registers, for casts and for whatever fuses one.

Every function is the contract (docs/numerics.md) on a tile, statement by statement, and must be launched with
`enable_fp_fusion=False`: a contracted multiply-add would round differently. Patterns are int32, values fp32.
"""

# pyright: basic, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """fp32 -> pattern of |x|: integer order is the order of magnitudes, NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_of_two(byte):
    """E8M0 byte -> fp32 2^(byte - 127)."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def mx_scale(
    amax,
    RULE: tl.constexpr,
    EMAX: tl.constexpr,
    MBITS: tl.constexpr,
    MAX_MANTISSA: tl.constexpr,
    SATFINITE: tl.constexpr,
):
    """Pattern of a block's maximum -> E8M0 byte and the exact factor 2^(127 - byte)."""
    exponent = amax >> 23
    mantissa = amax & 0x7FFFFF
    if RULE == "floor":
        power = exponent - EMAX
    elif RULE == "ceil":
        power = exponent - EMAX + (mantissa != 0).to(tl.int32)
    elif RULE == "rceil":
        power = exponent - EMAX + (mantissa > MAX_MANTISSA).to(tl.int32)
    else:
        tl.static_assert(RULE == "even")
        power = ((amax + (1 << (22 - MBITS))) >> 23) - EMAX
    byte = tl.minimum(tl.maximum(power, 0), 254)
    byte = tl.where(amax >= 0x7F800000, 255, byte)
    if SATFINITE:
        byte = tl.where(amax == 0x7F800000, 254, byte)
    return byte, power_of_two(tl.where(byte == 255, 255, 254 - byte))


@triton.jit
def fp8_scale(amax, RULE: tl.constexpr):
    """Pattern of a block's maximum -> decode and encode factor of an FP8 block."""
    if RULE == "pow2":
        byte = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
        byte = tl.minimum(tl.maximum(byte, 1), 254)
        byte = tl.where(amax == 0, 127, byte)
        byte = tl.where(amax >= 0x7F800000, 255, byte)
        return power_of_two(byte), power_of_two(tl.where(byte == 255, 255, 254 - byte))
    else:
        tl.static_assert(RULE == "fp32")
        return encode_factor(amax, 448.0)


@triton.jit
def encode_factor(amax, LARGEST: tl.constexpr):
    """(decode, encode): encode = min(LARGEST / amax, 2^126), 1 for zero; decode its reciprocal; NaN if not finite."""
    value = amax.to(tl.float32, bitcast=True)
    one = tl.full(value.shape, 1.0, tl.float32)
    factor = tl.minimum(tl.div_rn(tl.full(value.shape, LARGEST, tl.float32), tl.where(amax == 0, 1.0, value)), 2.0**126)
    factor = tl.where(amax == 0, 1.0, factor)
    decode = tl.div_rn(one, factor)
    finite = amax < 0x7F800000
    nan = tl.full(value.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(finite, decode, nan), tl.where(finite, factor, nan)


@triton.jit
def nvfp4_scale(amax, tensor_decode, tensor_encode, RULE: tl.constexpr):
    """Pattern of a block's maximum and the tensor's factors -> E4M3 byte and encode factor of the block."""
    nan = tl.full(amax.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    sixth = 0.16666667163372039794921875  # fp32(1 / 6)
    wanted = amax.to(tl.float32, bitcast=True) * (tensor_encode * sixth)
    wanted = tl.where(wanted > 448.0, 448.0, wanted)
    wanted = tl.where(amax >= 0x7F800000, nan, wanted)
    byte = encode(wanted, 3, 7, 0x43E00000, 0x7F)
    if RULE == "up":
        byte = byte + (decode_e4m3(byte) < wanted).to(tl.int32)
    factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), decode_e4m3(byte) * tensor_decode)
    return byte, tl.where(factor > 3.4028234663852886e38, 3.4028234663852886e38, factor)


@triton.jit
def decode_e4m3(code):
    """Non-negative E4M3 code (int32) -> fp32; 7F is NaN."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    nan = tl.full(code.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(code == 0x7F, nan, value)


@triton.jit
def encode(v, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, NAN_CODE: tl.constexpr):
    """fp32 -> element code (int32) without its sign, round to nearest even, saturating; integer arithmetic only.

    Normals round by adding just under half a unit (the carry walks into the next binade), subnormals by adding a number
    whose last place is the smallest subnormal.
    """
    SHIFT: tl.constexpr = 23 - MBITS
    magnitude = magnitude_bits(v)
    clamped = tl.minimum(magnitude, MAX_BITS)
    odd = (clamped >> SHIFT) & 1
    normal = ((clamped + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT) - ((127 - BIAS) << MBITS)
    MAGIC: tl.constexpr = (127 + 23 + 1 - BIAS - MBITS) << 23
    magic = tl.full(v.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (clamped.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    code = tl.where(clamped < ((128 - BIAS) << 23), subnormal, normal)
    return tl.where(magnitude > 0x7F800000, NAN_CODE, code)


@triton.jit
def encode_signed(
    v, EBITS: tl.constexpr, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, NAN_CODE: tl.constexpr
):
    """fp32 -> element code with its sign (int32); the canonical NaN code has none."""
    code = encode(v, MBITS, BIAS, MAX_BITS, NAN_CODE)
    sign = (v.to(tl.int32, bitcast=True) >> 31) & 1
    is_nan = magnitude_bits(v) > 0x7F800000
    return tl.where(is_nan, code, code | (sign << (EBITS + MBITS)))
