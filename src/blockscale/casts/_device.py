"""Device functions of the casts, statement by statement as docs/numerics.md: scales, rotation, random words, groups.

Kernels that use them must be launched with `enable_fp_fusion=False`: a contracted multiply-add would round differently.
Bit patterns are int32, values fp32. `FAST` selects inline PTX where plain Triton has no equivalent; the interpreter
runs the plain branches, and tests on a GPU compare the two.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from ._device_codes import cast_e4m3, decode_e4m3, encode, magnitude_bits, nan_like

# ---- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def block_scale(amax, tensor_decode, tensor_encode, S: tl.constexpr):
    """Bit pattern of a block's amax -> stored block scale (byte as int32, or fp32) and encode factor (fp32)."""
    if S.family == "mx":
        return mx_scale(amax, S)
    elif S.family == "fp8":
        return fp8_scale(amax, S)
    else:
        return nvfp4_scale(amax, tensor_decode, tensor_encode, S)


@triton.jit
def power_of_two(byte):
    """E8M0 byte -> fp32 2^(byte - 127)."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def mx_scale(amax, S: tl.constexpr):
    """Bit pattern of a block's amax -> E8M0 byte and the exact encode factor 2^(127 - byte)."""
    exponent = amax >> 23
    mantissa = amax & 0x7FFFFF
    if S.rule == "floor":
        power = exponent - S.emax
    elif S.rule == "ceil":
        power = exponent - S.emax + (mantissa != 0).to(tl.int32)
    elif S.rule == "rceil":
        power = exponent - S.emax + (mantissa > (S.max_bits & 0x7FFFFF)).to(tl.int32)
    else:
        tl.static_assert(S.rule == "even")
        power = ((amax + (1 << (22 - S.mbits))) >> 23) - S.emax
    byte = tl.minimum(tl.maximum(power, 0), 254)
    byte = tl.where(amax >= 0x7F800000, 255, byte)
    if S.satfinite:
        byte = tl.where(amax == 0x7F800000, 254, byte)
    return byte, power_of_two(tl.where(byte == 255, 255, 254 - byte))


@triton.jit
def fp8_scale(amax, S: tl.constexpr):
    """Bit pattern of a block's amax -> decode and encode factor of an FP8 block."""
    if S.rule == "pow2":
        byte = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
        byte = tl.minimum(tl.maximum(byte, 1), 254)
        byte = tl.where(amax == 0, 127, byte)
        byte = tl.where(amax >= 0x7F800000, 255, byte)
        return power_of_two(byte), power_of_two(tl.where(byte == 255, 255, 254 - byte))
    else:
        tl.static_assert(S.rule == "fp32")
        return encode_factor(amax, 448.0, S.fast)


@triton.jit
def encode_factor(amax, LARGEST: tl.constexpr, FAST: tl.constexpr):
    """(decode, encode): encode = min(LARGEST / amax, 2^126), 1 for zero; decode its reciprocal; NaN if not finite."""
    value = amax.to(tl.float32, bitcast=True)
    if FAST:
        # Below 2^-118 the quotient is capped anyway; dividing by 256 keeps the reciprocal normal. One Newton step on
        # the approximate reciprocal rounds correctly: compared for all 2^31 patterns on a GPU.
        divisor = tl.maximum(value, 2.0**-118) * (1.0 / 256)
        guess = _reciprocal(divisor)
        factor = (LARGEST / 256) * guess
        factor = tl.fma(tl.fma(-factor, divisor, LARGEST / 256), guess, factor)
        factor = tl.where(amax == 0, 1.0, tl.minimum(factor, 2.0**126))
        guess = _reciprocal(factor)
        decode = tl.fma(tl.fma(-factor, guess, 1.0), guess, guess)
    else:
        factor = tl.div_rn(tl.full(value.shape, LARGEST, tl.float32), tl.where(amax == 0, 1.0, value))
        factor = tl.where(amax == 0, 1.0, tl.minimum(factor, 2.0**126))
        decode = tl.div_rn(tl.full(value.shape, 1.0, tl.float32), factor)
    finite = amax < 0x7F800000
    return tl.where(finite, decode, nan_like(value)), tl.where(finite, factor, nan_like(value))


@triton.jit
def _reciprocal(x):
    """1 / x to about one unit in the last place, one instruction."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def nvfp4_scale(amax, tensor_decode, tensor_encode, S: tl.constexpr):
    """Bit pattern of a block's amax and the tensor factors -> E4M3 byte and encode factor of the block."""
    sixth = 0.16666667163372039794921875  # fp32(1 / 6)
    wanted = amax.to(tl.float32, bitcast=True) * (tensor_encode * sixth)
    wanted = tl.where(wanted > 448.0, 448.0, wanted)
    wanted = tl.where(amax >= 0x7F800000, nan_like(wanted), wanted)
    if S.sm_89:
        byte = cast_e4m3(wanted)
    else:
        byte = encode(wanted, 3, 7, 0x43E00000, 0x7F)
    if S.rule == "up":
        byte = byte + (decode_e4m3(byte) < wanted).to(tl.int32)
    divisor = decode_e4m3(byte) * tensor_decode
    if S.fast:
        factor = inverse(divisor)
    else:
        factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), divisor)
    return byte, tl.where(factor > 3.4028234663852886e38, 3.4028234663852886e38, factor)


@triton.jit
def inverse(x):
    """1 / x correctly rounded for x >= 0, without a branch: Newton as in `encode_factor`, small divisors scaled up."""
    scale = tl.where(x < 2.0**-60, 2.0**60, 1.0)
    divisor = x * scale
    guess = _reciprocal(divisor)
    result = tl.fma(tl.fma(-divisor, guess, 1.0), guess, guess) * scale
    return tl.where(x == 0, float("inf"), result)


# ---- rotation and random words ---------------------------------------------------------------------------------------


@triton.jit
def butterfly(x, A: tl.constexpr, B: tl.constexpr):
    """One Hadamard stage of x seen as [A, 2, B]: (a, b) -> (a + b, a - b)."""
    a, b = tl.split(tl.permute(tl.reshape(x, (A, 2, B)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), x.shape)


@triton.jit
def flip_signs(x, index, MASK: tl.constexpr, SIZE: tl.constexpr):
    """x negated where MASK has bit `index % SIZE` set."""
    return x * tl.where((MASK >> (index % SIZE)) & 1 != 0, -1.0, 1.0)  # a product, so that zeros change sign too


@triton.jit
def round_to_bf16(x):
    """fp32 -> the nearest bf16 as fp32, by integers; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(magnitude_bits(x) > 0x7F800000, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def random_words(quad, group, state_ptr, stream):
    """int64 position // 4 in the full source tensor -> uint32 random words of its four positions (one Philox call).

    A pure function of seed, tick, stream and group."""
    seed = tl.load(state_ptr)
    tick = tl.load(state_ptr + 1)
    c0 = quad.to(tl.uint32)
    c1 = (group.to(tl.int64) * 65536 + (quad >> 32)).to(tl.uint32)
    zero = tl.zeros(quad.shape, tl.uint32)
    return tl.philox(seed, c0, c1, zero + tick.to(tl.uint32), zero + stream.to(tl.uint32))


@triton.jit
def random_word(position, group, state_ptr, stream):
    """Random word of each position."""
    w0, w1, w2, w3 = random_words(position >> 2, group, state_ptr, stream)
    slot = position & 3
    return tl.where(slot < 2, tl.where(slot == 0, w0, w1), tl.where(slot == 2, w2, w3))


# ---- groups ----------------------------------------------------------------------------------------------------------


@triton.jit
def locate(offs_ptr, groups, position, M, GROUPS: tl.constexpr, ALIGN: tl.constexpr):
    """Group of the tile at a padded position: (index, first source row of the tile, group's first row, group's end).

    Rows past the last group belong to no group: their index is `groups`."""
    i = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + i, mask=i < groups, other=0)
    starts = tl.load(offs_ptr + i - 1, mask=(i > 0) & (i < groups), other=0)
    padded_ends = tl.cumsum(tl.cdiv(tl.where(i < groups, ends - starts, 0), ALIGN) * ALIGN, 0)
    # The last padded end at or before the position, and its index: ends ascend, so one max over (end, index) finds
    # both. A second reduction would add barriers before the first load.
    passed = tl.where((padded_ends <= position) & (i < groups), padded_ends.to(tl.int64) * (2 * GROUPS) + i + 1, 0)
    last_passed = tl.max(passed)
    group = (last_passed % (2 * GROUPS)).to(tl.int32)
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group, mask=group < groups, other=0)
    end = tl.where(group < groups, end, M)
    row0 = start + position - (last_passed // (2 * GROUPS)).to(tl.int32)
    return group, row0, start, end
