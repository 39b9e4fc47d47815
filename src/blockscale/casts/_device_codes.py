"""Codes from values: the contract's rounding by integers, and what the hardware has shorter ways to.

Every function takes tiles of fp32 values, or words of two bf16 values, that have been multiplied by their block's
factor. Inline PTX makes several codes at once, because a GPU's integer pipe is what a cast to 4 bits runs out of: it
has half the width of the others. The interpreter and older GPUs take the plain functions; tests compare the two.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """fp32 -> pattern of |x|: integer order is the order of magnitudes, NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def nan_like(x):
    """The canonical NaN in x's shape."""
    return tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def cast_e4m3(v):
    """Non-negative fp32 -> E4M3 code (int32) by the conversion instruction; NaN gives 7F."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 t; .reg .f32 z; mov.f32 z, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 t, z, $1; cvt.u32.u16 $0, t; }",
        "=r,f", [v], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def decode_e4m3(code):
    """Non-negative E4M3 code (int32) -> fp32; 7F is NaN."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    return tl.where(code == 0x7F, nan_like(value), value)


@triton.jit
def encode(v, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, NAN_CODE: tl.constexpr):
    """fp32 -> element code (int32) without its sign, round to nearest even, saturating.

    Adding a power of two whose last place is the last place of the code rounds it, in normals and subnormals alike; the
    sum's low bits count from the exponent's first code.
    """
    magnitude = magnitude_bits(v)
    clamped = tl.minimum(magnitude, MAX_BITS)
    LOWEST: tl.constexpr = (128 - BIAS) << 23
    exponent = tl.maximum(clamped & 0x7F800000, LOWEST)
    magic = exponent + ((23 - MBITS) << 23)
    total = clamped.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    code = total.to(tl.int32, bitcast=True) - magic + ((exponent - LOWEST) >> (23 - MBITS))
    return tl.where(magnitude > 0x7F800000, NAN_CODE, code)


@triton.jit
def encode_stochastic(v, word, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, NAN_CODE: tl.constexpr):
    """fp32 and a random uint32 each -> code (int32) without its sign: up iff the word is below the fraction * 2^32."""
    SHIFT: tl.constexpr = 23 - MBITS
    magnitude = magnitude_bits(v)
    clamped = tl.minimum(magnitude, MAX_BITS)
    normal = (clamped >> SHIFT) - ((127 - BIAS) << MBITS)
    normal_part = (clamped << (32 - SHIFT)).to(tl.uint32, bitcast=True)
    units = clamped.to(tl.float32, bitcast=True) * (2.0 ** (MBITS - 1 + BIAS))
    whole = units.to(tl.int32)
    units_part = ((units - whole.to(tl.float32)) * 4294967296.0).to(tl.uint32)
    is_subnormal = clamped < ((128 - BIAS) << 23)
    code = tl.where(is_subnormal, whole, normal)
    part = tl.where(is_subnormal, units_part, normal_part)
    return tl.where(magnitude > 0x7F800000, NAN_CODE, code + (word < part).to(tl.int32))


@triton.jit
def encode_signed(v, word, S: tl.constexpr):
    """fp32 -> element code with its sign (int32); the canonical NaN code has none."""
    if S.stochastic:
        code = encode_stochastic(v, word, S.mbits, S.bias, S.max_bits, S.nan_code)
    else:
        code = encode(v, S.mbits, S.bias, S.max_bits, S.nan_code)
    sign = (v.to(tl.int32, bitcast=True) >> 31) & 1
    return tl.where(magnitude_bits(v) > 0x7F800000, code, code | (sign << (S.ebits + S.mbits)))


@triton.jit
def _encode_two(a, b, word_a, word_b, S: tl.constexpr):
    """Two values -> two adjacent codes in the low bits of an int32, the first one lowest."""
    return encode_signed(a, word_a, S) | (encode_signed(b, word_b, S) << S.code_bits)


# ---- several codes at once -------------------------------------------------------------------------------------------

# Two values after each other in 16 bits; the assembler merges a pair of these into one register for nothing.
_PAIR_E4M3 = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $2;"
    " mov.b32 $0, {a, b}; }"
)
_FOUR_E4M3 = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
    " mov.b32 $0, {a, b}; }"
)
_PAIR_E5M2 = tl.constexpr(_PAIR_E4M3.value.replace("e4m3", "e5m2"))
_FOUR_E5M2 = tl.constexpr(_FOUR_E4M3.value.replace("e4m3", "e5m2"))


_SELECT = 0xE4  # lop3: the first operand where the third has a bit, else the second


def _eight_e2m1(operands: list[int]) -> tl.constexpr:
    """Eight fp32 values, given as operands, to a word of E2M1 codes.

    As `encode`, with the number that is added carrying the exponent's first code in its low bits: the sum ends in the
    code, and a funnel shift takes its last four bits into the word. Signs are put in at the end, eight at a time. NaN
    saturates to 7, the code it should have, and a NaN that was computed has no sign.
    """
    lines = [".reg .b32 word, e, a, b, even, odd;", ".reg .f32 m, g;", "mov.b32 word, 0;"]
    for operand in operands:
        lines += [
            f"abs.f32 m, ${operand};", "min.f32 m, m, 0f40C00000;", "mov.b32 e, m;", "shr.u32 e, e, 23;",
            "max.u32 e, e, 127;", f"mad.lo.u32 e, e, {(1 << 23) + 2}, {(22 << 23) - 254};", "mov.b32 g, e;",
            "add.rn.f32 m, m, g;", "mov.b32 e, m;", "shf.r.wrap.b32 word, word, e, 4;",
        ]  # fmt: skip
    bits = {"even": operands[0::2], "odd": operands[1::2]}
    for name, (v0, v1, v2, v3) in bits.items():
        lines += [
            f"{{ .reg .b32 u, v; mov.b32 u, ${v0}; mov.b32 v, ${v1}; prmt.b32 a, u, v, 0x0073;",
            f"mov.b32 u, ${v2}; mov.b32 v, ${v3}; prmt.b32 b, u, v, 0x0073; }}",
            f"prmt.b32 {name}, a, b, 0x5410;",
        ]
    lines += [
        "shr.u32 even, even, 4;", f"lop3.b32 even, even, odd, 0x08080808, {_SELECT};",
        f"lop3.b32 $0, word, even, 0x77777777, {_SELECT};",
    ]  # fmt: skip
    return tl.constexpr("{ " + " ".join(lines) + " }")


def _nibbles(words: list[int]) -> list[str]:
    """For each operand, a word of two bf16 values: a register z whose halves begin with their E2M1 codes.

    The same sum as above in bf16, two values an instruction; 1 is multiplied by, since sm_80 has no other addition.
    """
    lines = [".reg .b32 one, c, e, m, t;", "mov.b32 one, 0x3F803F80;"]
    for i, word in enumerate(words):
        lines += [
            f".reg .b32 z{i};", f"abs.bf16x2 c, ${word};", "{ .reg .b32 six; mov.b32 six, 0x40C040C0;",
            "min.bf16x2 c, c, six; }", "max.bf16x2 e, c, one;", "and.b32 e, e, 0x7F807F80;", "shr.u32 m, e, 6;",
            "add.u32 m, m, e;", "add.u32 m, m, 0x02020202;", "fma.rn.bf16x2 t, c, one, m;", "shl.b32 t, t, 12;",
            f"lop3.b32 z{i}, ${word}, t, 0x80008000, {_SELECT};",
        ]  # fmt: skip
    return lines


def _interleave(even: str, odd: str, out: str) -> list[str]:
    """Bytes that begin with the codes of even and odd places -> bytes of two codes."""
    return [f"shr.u32 {even}, {even}, 4;", f"lop3.b32 {out}, {even}, {odd}, 0x0F0F0F0F, {_SELECT};"]


def _row_words_e2m1() -> tl.constexpr:
    """Four words along a row -> a word of their eight codes."""
    lines = [*_nibbles([1, 2, 3, 4]), ".reg .b32 a, b, even, odd;"]
    lines += ["prmt.b32 a, z0, z1, 0x7531;", "prmt.b32 b, z2, z3, 0x7531;"]
    lines += ["prmt.b32 even, a, b, 0x6420;", "prmt.b32 odd, a, b, 0x7531;", *_interleave("even", "odd", "$0")]
    return tl.constexpr("{ " + " ".join(lines) + " }")


def _column_words_e2m1() -> tl.constexpr:
    """Eight words below each other -> a word of codes for the first column, and one for the second."""
    lines = [*_nibbles([2, 3, 4, 5, 6, 7, 8, 9]), ".reg .b32 a, b, even, odd, even1, odd1;"]
    for name, (i, j, k, m) in {"even": (0, 2, 4, 6), "odd": (1, 3, 5, 7)}.items():
        lines += [f"prmt.b32 a, z{i}, z{j}, 0x7351;", f"prmt.b32 b, z{k}, z{m}, 0x7351;"]
        lines += [f"prmt.b32 {name}, a, b, 0x5410;", f"prmt.b32 {name}1, a, b, 0x7632;"]
    lines += [*_interleave("even", "odd", "$0"), *_interleave("even1", "odd1", "$1")]
    return tl.constexpr("{ " + " ".join(lines) + " }")


_PAIRS_E2M1 = _eight_e2m1([1, 5, 2, 6, 3, 7, 4, 8])  # four firsts, four seconds
_EIGHT_E2M1 = _eight_e2m1([1, 2, 3, 4, 5, 6, 7, 8])
_ROW_WORDS_E2M1 = _row_words_e2m1()
_COLUMN_WORDS_E2M1 = _column_words_e2m1()


@triton.jit
def encode_pair(a, b, word_a, word_b, S: tl.constexpr):
    """Two neighbours along a row -> their codes as they are stored: two bytes in an int16, or one."""
    if S.hardware == "e4m3":
        return tl.inline_asm_elementwise(_PAIR_E4M3, "=r,f,f,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=2)
    elif S.hardware == "e5m2":
        return tl.inline_asm_elementwise(_PAIR_E5M2, "=r,f,f,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=2)
    elif S.hardware == "e2m1":
        return tl.inline_asm_elementwise(
            _PAIRS_E2M1, "=r,f,f,f,f,f,f,f,f", [a, b], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        code = _encode_two(a, b, word_a, word_b, S)
        return code.to(tl.int16) if S.code_bits == 8 else code.to(tl.uint8)


@triton.jit
def encode_four(a, b, c, d, words, S: tl.constexpr):
    """Four values -> four codes in an int32, the first one lowest; words: a random word for each."""
    if S.hardware == "e4m3":
        return tl.inline_asm_elementwise(_FOUR_E4M3, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    elif S.hardware == "e5m2":
        return tl.inline_asm_elementwise(_FOUR_E5M2, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = _encode_two(a, b, words[0], words[1], S), _encode_two(c, d, words[2], words[3], S)
        return low | (high << (2 * S.code_bits))


@triton.jit
def encode_eight(a, b, c, d, e, f, g, h):
    """Eight values -> their E2M1 codes in an int32."""
    return tl.inline_asm_elementwise(
        _EIGHT_E2M1, "=r,f,f,f,f,f,f,f,f", [a, b, c, d, e, f, g, h], dtype=tl.int32, is_pure=True, pack=1
    )


# ---- words of two bf16 values ----------------------------------------------------------------------------------------


@triton.jit
def multiply_words(words, factors):
    """Words times words, each half by itself: exact where the factors are powers of two.

    (A product below the smallest normal number may round, to something whose code is zero all the same.)
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
        "=r,r,r", [words, factors], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def factor_words(first, second):
    """Two fp32 factors, powers of two or NaN -> a word of both."""
    high = second.to(tl.int32, bitcast=True) & -65536
    return high | ((first.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)


@triton.jit
def encode_row_words(words):
    """Words along a row -> bytes of two E2M1 codes."""
    return tl.inline_asm_elementwise(_ROW_WORDS_E2M1, "=r,r,r,r,r", [words], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def encode_column_words(a, b, c, d, e, f, g, h):
    """Words of eight rows -> the E2M1 codes of their first column in an int32, and of their second."""
    return tl.inline_asm_elementwise(
        _COLUMN_WORDS_E2M1, "=r,=r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
