"""Element codes from values: integer rounding as docs/numerics.md defines it, and inline PTX for packed bf16x2 words.

The plain functions take fp32 values already multiplied by their block's encode factor. The interpreter runs them, and a
GPU where no PTX exists. For packed 32-bit words of two bf16 values, the case of training, inline PTX goes from words
and factors to words of codes. It encodes several values at once, because 4-bit casts are bound by the integer pipe
(half the width of the others), and it leaves no tile of fp32 values for the compiler to keep in registers.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """fp32 -> int32 bit pattern of |x|: integer order is the order of magnitudes, NaN highest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def nan_like(x):
    """Canonical NaN in the shape of x."""
    return tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def cast_e4m3(v):
    """Non-negative fp32 -> E4M3 code (int32) by the cvt instruction; NaN gives 7F."""
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

    Adding a power of two whose last place equals that of the code rounds the value, for normals and subnormals alike.
    The low bits of the sum count from the first code of the exponent.
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
def encode_stochastic(
    v, random, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, NAN_CODE: tl.constexpr
):
    """fp32 values and uint32 random words -> codes (int32) without sign: up iff the word is below fraction * 2^32."""
    SHIFT: tl.constexpr = 23 - MBITS
    magnitude = magnitude_bits(v)
    clamped = tl.minimum(magnitude, MAX_BITS)
    normal = (clamped >> SHIFT) - ((127 - BIAS) << MBITS)
    normal_fraction = (clamped << (32 - SHIFT)).to(tl.uint32, bitcast=True)
    units = clamped.to(tl.float32, bitcast=True) * (2.0 ** (MBITS - 1 + BIAS))
    integer = units.to(tl.int32)
    subnormal_fraction = ((units - integer.to(tl.float32)) * 4294967296.0).to(tl.uint32)
    is_subnormal = clamped < ((128 - BIAS) << 23)
    code = tl.where(is_subnormal, integer, normal)
    fraction = tl.where(is_subnormal, subnormal_fraction, normal_fraction)
    return tl.where(magnitude > 0x7F800000, NAN_CODE, code + (random < fraction).to(tl.int32))


@triton.jit
def encode_signed(v, random, S: tl.constexpr):
    """fp32 -> element code with its sign (int32); the canonical NaN code has none."""
    if S.stochastic:
        code = encode_stochastic(v, random, S.mbits, S.bias, S.max_bits, S.nan_code)
    else:
        code = encode(v, S.mbits, S.bias, S.max_bits, S.nan_code)
    sign = (v.to(tl.int32, bitcast=True) >> 31) & 1
    return tl.where(magnitude_bits(v) > 0x7F800000, code, code | (sign << (S.ebits + S.mbits)))


# ---- from packed bf16x2 words to words of codes ---------------------------------------------------------------------

_SELECT = 0xE4  # lop3 table: bits of the first operand where the third is set, else of the second


def _scaled_values(words: list[int], factors: list[tuple[int, int]]) -> list[str]:
    """PTX: fp32 registers v0, v1, ... = both values of each packed word times their factors."""
    lines = [".reg .b32 u;"]
    for i, (word, (first, second)) in enumerate(zip(words, factors, strict=True)):
        lines += [f".reg .f32 v{2 * i}, v{2 * i + 1};", f"shl.b32 u, ${word}, 16;", f"mov.b32 v{2 * i}, u;"]
        lines += [f"mul.rn.f32 v{2 * i}, v{2 * i}, ${first};", f"and.b32 u, ${word}, 0xFFFF0000;"]
        lines += [f"mov.b32 v{2 * i + 1}, u;", f"mul.rn.f32 v{2 * i + 1}, v{2 * i + 1}, ${second};"]
    return lines


def _scaled_words(words: list[int], factors: list[int]) -> list[str]:
    """PTX: registers x0, x1, ... = each packed word times a packed word of two factors, both powers of two.

    A product below the smallest normal number may round; its code is zero either way.
    """
    lines = [".reg .b32 minus_zero;", "mov.b32 minus_zero, 0x80008000;"]
    for i, (word, factor) in enumerate(zip(words, factors, strict=True)):
        lines += [f".reg .b32 x{i};", f"fma.rn.bf16x2 x{i}, ${word}, ${factor}, minus_zero;"]
    return lines


def _unpack_exact(count: int) -> list[str]:
    """PTX: the fp32 registers of `_scaled_values` from the packed words of `_scaled_words`."""
    lines = [".reg .b32 u;"]
    for i in range(count):
        lines += [f".reg .f32 v{2 * i}, v{2 * i + 1};", f"shl.b32 u, x{i}, 16;", f"mov.b32 v{2 * i}, u;"]
        lines += [f"and.b32 u, x{i}, 0xFFFF0000;", f"mov.b32 v{2 * i + 1}, u;"]
    return lines


def _four_codes(out: str, v: list[str], element: str) -> list[str]:
    """PTX: four values to a word of 8-bit codes; ptxas merges the halves at no cost."""
    convert = f"cvt.rn.satfinite.{element}x2.f32"
    return [f"{{ .reg .b16 a, b; {convert} a, {v[1]}, {v[0]}; {convert} b, {v[3]}, {v[2]}; mov.b32 {out}, {{a, b}}; }}"]


def _eight_codes(out: str, v: list[str]) -> list[str]:
    """PTX: eight values to a word of E2M1 codes.

    As `encode`, but the added number carries the exponent's first code in its low bits. The sum then ends in the code,
    and a funnel shift moves its last four bits into the word. Signs are inserted at the end, eight at a time. NaN
    saturates to 7, its specified code; a computed NaN has no sign.
    """
    lines = ["{", ".reg .b32 word, e, a, b, even, odd;", ".reg .f32 m, g;", "mov.b32 word, 0;"]
    for value in v:
        lines += [f"abs.f32 m, {value};", "min.f32 m, m, 0f40C00000;", "mov.b32 e, m;", "shr.u32 e, e, 23;"]
        lines += ["max.u32 e, e, 127;", f"mad.lo.u32 e, e, {(1 << 23) + 2}, {(22 << 23) - 254};", "mov.b32 g, e;"]
        lines += ["add.rn.f32 m, m, g;", "mov.b32 e, m;", "shf.r.wrap.b32 word, word, e, 4;"]
    for name, (v0, v1, v2, v3) in {"even": v[0::2], "odd": v[1::2]}.items():
        lines += [f"{{ .reg .b32 p, q; mov.b32 p, {v0}; mov.b32 q, {v1}; prmt.b32 a, p, q, 0x0073;"]
        lines += [f"mov.b32 p, {v2}; mov.b32 q, {v3}; prmt.b32 b, p, q, 0x0073; }}"]
        lines += [f"prmt.b32 {name}, a, b, 0x5410;"]
    lines += ["shr.u32 even, even, 4;", f"lop3.b32 even, even, odd, 0x08080808, {_SELECT};"]
    return [*lines, f"lop3.b32 {out}, word, even, 0x77777777, {_SELECT};", "}"]


def _e2m1_nibbles(count: int) -> list[str]:
    """PTX: registers z0, z1, ... = E2M1 codes of the words of `_scaled_words`, in the top four bits of each half.

    The addition of `_eight_codes` in bf16, two values per instruction; an fma with 1, since sm_80 has no add.bf16x2.
    """
    lines = [".reg .b32 one, six, c, e, m, t;", "mov.b32 one, 0x3F803F80;", "mov.b32 six, 0x40C040C0;"]
    for i in range(count):
        lines += [f".reg .b32 z{i};", f"abs.bf16x2 c, x{i};", "min.bf16x2 c, c, six;", "max.bf16x2 e, c, one;"]
        lines += ["and.b32 e, e, 0x7F807F80;", "shr.u32 m, e, 6;", "add.u32 m, m, e;", "add.u32 m, m, 0x02020202;"]
        lines += ["fma.rn.bf16x2 t, c, one, m;", "shl.b32 t, t, 12;", f"lop3.b32 z{i}, x{i}, t, 0x80008000, {_SELECT};"]
    return lines


def _interleave(out: str, even: str, odd: str) -> list[str]:
    """PTX: bytes with the codes of even and of odd elements in their high nibbles -> bytes of two codes."""
    return [f"shr.u32 {even}, {even}, 4;", f"lop3.b32 {out}, {even}, {odd}, 0x0F0F0F0F, {_SELECT};"]


def _ptx(*parts: list[str]) -> str:
    return "{ " + " ".join(line for part in parts for line in part) + " }"


def _row_ptx(element: str, exact: bool) -> str:
    """PTX text: packed words along a row, then a factor for each. Two words to four 8-bit codes, or four words to eight
    4-bit codes."""
    count = 4 if element == "e2m1" else 2
    words, factors = list(range(1, count + 1)), list(range(count + 1, 2 * count + 1))
    v = [f"v{i}" for i in range(2 * count)]
    if not exact:
        products = _scaled_values(words, [(factor, factor) for factor in factors])
        return _ptx(products, _eight_codes("$0", v) if count == 4 else _four_codes("$0", v, element))
    if count == 2:
        return _ptx(_scaled_words(words, factors), _unpack_exact(count), _four_codes("$0", v, element))
    lines = [".reg .b32 a, b, even, odd;", "prmt.b32 a, z0, z1, 0x7531;", "prmt.b32 b, z2, z3, 0x7531;"]
    lines += ["prmt.b32 even, a, b, 0x6420;", "prmt.b32 odd, a, b, 0x7531;", *_interleave("$0", "even", "odd")]
    return _ptx(_scaled_words(words, factors), _e2m1_nibbles(count), lines)


def _column_ptx(element: str, exact: bool) -> str:
    """PTX text: packed words of consecutive rows, then the factors of their two columns (one packed word if exact).
    Four 8-bit or eight 4-bit codes of the first column, and of the second."""
    count = 8 if element == "e2m1" else 4
    words, factor = list(range(2, count + 2)), count + 2
    low, high = [f"v{2 * i}" for i in range(count)], [f"v{2 * i + 1}" for i in range(count)]
    if not exact:
        products = _scaled_values(words, [(factor, factor + 1)] * count)
        if count == 8:
            return _ptx(products, _eight_codes("$0", low), _eight_codes("$1", high))
        return _ptx(products, _four_codes("$0", low, element), _four_codes("$1", high, element))
    products = _scaled_words(words, [factor] * count)
    if count == 4:
        codes = _four_codes("$0", low, element), _four_codes("$1", high, element)
        return _ptx(products, _unpack_exact(count), *codes)
    lines = [".reg .b32 a, b, even, odd, even1, odd1;"]
    for name, (i, j, k, m) in {"even": (0, 2, 4, 6), "odd": (1, 3, 5, 7)}.items():
        lines += [f"prmt.b32 a, z{i}, z{j}, 0x7351;", f"prmt.b32 b, z{k}, z{m}, 0x7351;"]
        lines += [f"prmt.b32 {name}, a, b, 0x5410;", f"prmt.b32 {name}1, a, b, 0x7632;"]
    return _ptx(
        products, _e2m1_nibbles(count), lines, _interleave("$0", "even", "odd"), _interleave("$1", "even1", "odd1")
    )


# A constexpr, so that Triton's compile cache sees a change of the PTX text.
_PTX = tl.constexpr(
    {
        (where, element, exact): make(element, exact)
        for where, make in (("row", _row_ptx), ("column", _column_ptx))
        for element in ("e4m3", "e5m2", "e2m1")
        for exact in (False, True)
    }
)


@triton.constexpr_function
def _ptx_for(where, element, exact):
    return _PTX.value[where, element, exact]


@triton.constexpr_function
def is_exact(S):
    """Whether factors are powers of two (or NaN): packed words times packed factors are then exact."""
    return S.family == "mx" or S.rule == "pow2"


@triton.constexpr_function
def encodes_packed(MODE, S):
    """Whether inline PTX encodes packed words of this operand."""
    return MODE == "bf16" and S.hadamard == 0 and S.hardware != ""


@triton.jit
def pack_factors(first, second):
    """Two fp32 factors, powers of two or NaN -> one packed bf16x2 word."""
    high = second.to(tl.int32, bitcast=True) & -65536
    return high | ((first.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)


@triton.jit
def encode_packed_row(words, factors, S: tl.constexpr):
    """Packed words along a row and their factors (fp32, or `pack_factors` if exact) -> stored codes of each pair: int16
    for 8-bit codes, uint8 for 4-bit codes."""
    PTX: tl.constexpr = _ptx_for("row", S.hardware, is_exact(S))
    if S.hardware == "e2m1" and is_exact(S):
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r,r,r,r,r,r,r", [words, factors], dtype=tl.uint8, is_pure=True, pack=4
        )
    elif S.hardware == "e2m1":
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r,r,r,f,f,f,f", [words, factors], dtype=tl.uint8, is_pure=True, pack=4
        )
    elif is_exact(S):
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r,r,r", [words, factors], dtype=tl.int16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r,f,f", [words, factors], dtype=tl.int16, is_pure=True, pack=2
        )  # fmt: skip


@triton.jit
def encode_packed_4_rows(a, b, c, d, low, high, S: tl.constexpr):
    """Packed words of four rows and the factors of their two columns -> int32 of four 8-bit codes per column."""
    PTX: tl.constexpr = _ptx_for("column", S.hardware, is_exact(S))
    if is_exact(S):
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,r,r,r,r,r", [a, b, c, d, pack_factors(low, high)],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,r,r,r,r,f,f", [a, b, c, d, low, high],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def encode_packed_8_rows(a, b, c, d, e, f, g, h, low, high, S: tl.constexpr):
    """As `encode_packed_4_rows`, for 4-bit codes of eight rows."""
    PTX: tl.constexpr = _ptx_for("column", S.hardware, is_exact(S))
    if is_exact(S):
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h, pack_factors(low, high)],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,r,r,r,r,r,r,r,r,f,f", [a, b, c, d, e, f, g, h, low, high],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


# ---- from fp32 values -----------------------------------------------------------------------------------------------


def _stochastic_code(out: str, value: str, random: str) -> list[str]:
    """PTX: a value and its random word to an E2M1 code; `encode_stochastic` without cvt instructions, which are slow.

    x is the mantissa with its leading one in the top bit, c the shift to the binary point. x followed by 32 zeros,
    shifted right by c, gives the code's last bits and the fraction. Adding the complement of the random word carries
    iff the word is below the fraction.
    """
    lines = [f"abs.f32 m, {value};", "min.f32 m, m, 0f40C00000;", "mov.b32 x, m;", "shr.u32 e, x, 23;"]
    lines += ["shl.b32 x, x, 8;", "or.b32 x, x, 0x80000000;", "max.u32 b, e, 127;", "mad.lo.u32 b, b, 2, 2;"]
    lines += ["min.u32 e, e, 127;", "sub.s32 c, 157, e;", "sub.s32 q, 125, e;", "max.s32 q, q, 0;", "shr.u32 q, x, q;"]
    lines += ["shf.r.clamp.b32 q, 0, q, c;", "shr.u32 x, x, c;", f"not.b32 c, {random};", "add.cc.u32 q, q, c;"]
    lines += ["addc.u32 x, x, b;", f"mov.b32 c, {value};", "shr.u32 c, c, 28;"]
    return [*lines, f"lop3.b32 {out}, x, c, 7, {_SELECT};"]


_STOCHASTIC_PAIR = tl.constexpr(
    _ptx(
        [".reg .b32 x, e, b, c, q, s;", ".reg .f32 m;"],
        _stochastic_code("s", "$2", "$4"),
        _stochastic_code("$0", "$1", "$3"),
        ["shl.b32 s, s, 4;", "or.b32 $0, $0, s;"],
    )
)


@triton.jit
def encode_pair(a, b, random_a, random_b, S: tl.constexpr):
    """Two values -> two adjacent codes in the low bits of an int32, the first one lowest."""
    if S.stochastic and S.fast and S.ebits == 2 and S.mbits == 1:
        return tl.inline_asm_elementwise(
            _STOCHASTIC_PAIR, "=&r,f,f,r,r", [a, b, random_a, random_b], dtype=tl.int32, is_pure=True, pack=1
        )
    elif S.hardware == "e4m3":
        return tl.inline_asm_elementwise(
            "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }",
            "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif S.hardware == "e5m2":
        return tl.inline_asm_elementwise(
            "{ .reg .b16 t; cvt.rn.satfinite.e5m2x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }",
            "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return encode_signed(a, random_a, S) | (encode_signed(b, random_b, S) << S.code_bits)
