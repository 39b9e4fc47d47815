"""Device functions that decode: codes and scales to fp32, rounding to the output dtype, inverse rotation.

Used by `dequantize` and by products that decode operands. As with `_device.py`, launch with `enable_fp_fusion=False`.
Inline PTX is used where plain Triton has no equivalent; the interpreter runs the plain branches, and tests on a GPU
compare both.
"""

# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats.tensor import BlockScaled
from ._device import butterfly, decode_e4m3, flip_signs, nan_like, power_of_two, round_to_bf16


class DecodeConfig(NamedTuple):
    """Compile-time description of an operand to decode."""

    family: str
    layout: str
    element: str
    ebits: int
    mbits: int
    bias: int
    code_bits: int  # bits from one code to the next: 4 or 8
    across: int  # rows of a block
    along: int  # length of a block
    repeats: int  # copies of its scale along K in the blocked layout
    hadamard: int  # size of a rotated group, or 0
    mask: int  # sign mask of the rotation
    factor: str  # scope of NVFP4's tensor scale: "tensor", "matrix", "row" or "group"; "" for other formats
    sm: int  # compute capability, selects PTX instructions; 0: plain Triton only


def decode_config(q: BlockScaled, sm: int) -> DecodeConfig:
    """Compile-time part of an operand.  sm: compute capability, 0 for the interpreter."""
    spec, element, mask = q.spec, q.spec.element, q.hadamard or 0
    factor = "" if q.global_scale is None else "tensor"
    if q.global_scale is not None and q.global_scale.dim():
        factor = "matrix" if len(q.shape) > 2 else "group" if q.group_align else "row"
    return DecodeConfig(
        spec.family, q.scale_layout, element.name, element.ebits, element.mbits, element.bias,
        8 // spec.codes_per_byte, *spec.block, spec.block[1] // spec.granule,
        0 if q.hadamard is None else spec.hadamard, mask - (1 << 32) if mask >> 31 else mask, factor, sm,
    )  # fmt: skip


# ---- elements --------------------------------------------------------------------------------------------------------


@triton.jit
def decode(code, S: tl.constexpr):
    """int32 with a code in its low bits (higher bits are ignored) -> fp32, exact.

    The code's fields are shifted to those of fp32, subnormals included; a power of two corrects the bias.
    """
    FIELDS: tl.constexpr = ((1 << (S.ebits + S.mbits)) - 1) << (23 - S.mbits)
    bits = ((code << (31 - S.ebits - S.mbits)) >> (8 - S.ebits)) & (FIELDS - 0x80000000)
    value = bits.to(tl.float32, bitcast=True) * (2.0 ** (127 - S.bias))
    if S.element == "e4m3":
        value = tl.where(bits & FIELDS == FIELDS, nan_like(value), value)
    elif S.element == "e5m2":
        TOP: tl.constexpr = 31 << 23
        value = tl.where(bits & FIELDS >= TOP, value * float("inf"), value)
        value = tl.where(bits & FIELDS > TOP, nan_like(value), value)
    return value


@triton.jit
def decode_pair(codes, S: tl.constexpr):
    """Two adjacent codes in the low bits, the first one lowest -> two fp32. fp16 represents every FP8 and FP4 value."""
    if S.sm >= 89 and S.element == "e4m3":
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.e4m3x2 t, $2; mov.b32 {a, b}, t;"
            " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,h", [codes.to(tl.int16)], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    elif S.sm >= 89 and S.element == "e5m2":
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.e5m2x2 t, $2; mov.b32 {a, b}, t;"
            " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,h", [codes.to(tl.int16)], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    elif S.sm and S.element == "e2m1":
        # the bit fields of these products do not overlap
        byte = codes.to(tl.int32) & 0xFF
        return _halves_to_fp32(((byte * 0x00200200) & 0x0E000E00) | ((byte * 0x01001000) & -0x7FFF8000))
    else:
        codes = codes.to(tl.int32)
        return decode(codes, S), decode(codes >> S.code_bits, S)


@triton.jit
def decode_word(word, J: tl.constexpr, S: tl.constexpr):
    """Codes 2J and 2J + 1 of the four in a word, or J and J + 4 of eight (one in each half) -> two fp32."""
    if S.code_bits == 8:
        return decode_pair(word >> (16 * J), S)
    elif S.sm:
        fields = word >> 3 if J == 3 else word << (9 - 4 * J)
        return _halves_to_fp32((fields & 0x0E000E00) | ((word << (12 - 4 * J)) & -0x7FFF8000))
    else:
        return decode(word >> (4 * J), S), decode(word >> (4 * J + 16), S)


@triton.jit
def _halves_to_fp32(word):
    """E2M1 fields at the bit positions of fp16x2 -> two fp32; as in `decode`, a power of two corrects the bias."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 a, b; mov.b32 t, 0x74007400; mul.rn.f16x2 t, $2, t; mov.b32 {a, b}, t;"
        " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scaled(value, scale, factor, S: tl.constexpr):
    """value * block scale (* tensor scale for NVFP4), each product rounded to fp32. NaN scales give NaN."""
    if S.factor == "":
        return value * scale
    else:
        return value * scale * factor


@triton.jit
def round_pair(lo, hi, OUT: tl.constexpr, SM: tl.constexpr):
    """Two fp32 -> one word of two values in the output dtype, the first one lowest; NaN is canonical."""
    if OUT == "fp32":
        low = tl.where(lo == lo, lo, nan_like(lo)).to(tl.int32, bitcast=True)
        high = tl.where(hi == hi, hi, nan_like(hi)).to(tl.int32, bitcast=True)
        return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    else:
        if SM:
            CONVERT: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if OUT == "bf16" else "cvt.rn.f16x2.f32 $0, $2, $1;"
            word = tl.inline_asm_elementwise(CONVERT, "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1)
        elif OUT == "bf16":
            low = (round_to_bf16(lo).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
            word = low | (round_to_bf16(hi).to(tl.int32, bitcast=True) & -65536)
        else:
            low = lo.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            word = low | (hi.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
        NAN: tl.constexpr = 0x7FC0 if OUT == "bf16" else 0x7E00
        if SM >= 90:  # cvt writes NaN as 7FFF, so clearing bits suffices
            IS_NAN: tl.constexpr = (
                "set.nan.u32.bf16x2 $0, $1, $1;" if OUT == "bf16" else "set.nan.u32.f16x2 $0, $1, $1;"
            )
            halves = tl.inline_asm_elementwise(IS_NAN, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
            return word & ~(halves & ((0x7FFF - NAN) * 0x10001))
        else:
            word = tl.where(lo == lo, word, (word & -65536) | NAN)
            return tl.where(hi == hi, word, (word & 0xFFFF) | (NAN << 16))


# ---- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_scales(scale_ptr, tile, block, ok, stride_t, stride_b, EVEN: tl.constexpr, S: tl.constexpr):
    """Block scales at tile [T, 1] and block [1, B] as fp32. Blocked layout: stride_t is 512-byte tiles per tile row."""
    t, b = tile.to(tl.int64), block.to(tl.int64)
    if S.layout == "blocked":
        r, b = t * S.across, b * S.repeats
        offset = 512 * ((r // 128) * stride_t + b // 4) + (r % 32) * 16 + ((r % 128) // 32) * 4 + b % 4
    else:
        offset = t * stride_t + b * stride_b
    scale = tl.load(scale_ptr + offset) if EVEN else tl.load(scale_ptr + offset, mask=ok, other=0)
    if S.family == "mx":
        return power_of_two(scale.to(tl.int32))
    elif S.family == "nvfp4":
        value = decode_e4m3(scale.to(tl.int32) & 0x7F)
        return value * tl.where(scale < 0x80, 1.0, -1.0)  # casts never write a negative scale
    else:
        return scale


# ---- rotation --------------------------------------------------------------------------------------------------------


@triton.jit
def rotate_pairs_back(lo, hi, S: tl.constexpr):
    """Inverse rotation in groups along the pairs [A, W]; the first stage is within pairs."""
    W: tl.constexpr = lo.shape[1]
    SIZE: tl.constexpr = lo.shape[0] * W
    lo, hi = lo + hi, lo - hi
    STAGES: tl.constexpr = 5 if S.hadamard == 32 else 4
    for stage in tl.static_range(1, STAGES):
        lo = butterfly(lo, SIZE >> stage, 1 << (stage - 1))
        hi = butterfly(hi, SIZE >> stage, 1 << (stage - 1))
    w = tl.arange(0, W)[None, :]
    norm = 0.25 if S.hadamard == 16 else 0.17677669529663688
    return flip_signs(lo * norm, 2 * w, S.mask, S.hadamard), flip_signs(hi * norm, 2 * w + 1, S.mask, S.hadamard)


@triton.jit
def rotate_rows_back(x, S: tl.constexpr):
    """Inverse rotation in groups along the rows of [A, W]."""
    A: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    STAGES: tl.constexpr = 5 if S.hadamard == 32 else 4
    for stage in tl.static_range(STAGES):
        x = butterfly(x, A >> (stage + 1), W << stage)
    norm = 0.25 if S.hadamard == 16 else 0.17677669529663688
    return flip_signs(x * norm, tl.arange(0, A)[:, None], S.mask, S.hadamard)
