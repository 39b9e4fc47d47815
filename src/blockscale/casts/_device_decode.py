"""Codes back to values on tiles in registers: elements, rounding to the output's type, rotation.

For `dequantize` and for whatever else decodes. As with `_device.py`, launched with `enable_fp_fusion=False`; inline PTX
stands where plain Triton has no equal, the interpreter runs the plain branches, and tests on a GPU compare both.
"""

# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats.tensor import BlockScaled
from ._device import butterfly, decode_e4m3, flip_signs, nan_like, power_of_two, round_to_bf16


class Source(NamedTuple):
    """All that the kernel must know about an operand at compile time."""

    family: str
    layout: str
    element: str
    ebits: int
    mbits: int
    bias: int
    code_bits: int  # distance from one code to the next: 4 or 8
    across: int  # rows of a block
    along: int  # length of a block
    repeats: int  # how often its scale stands beside itself in the blocked layout
    hadamard: int  # size of a rotated group, or 0
    mask: int
    factor: str  # whose NVFP4's second scale is: "tensor", "matrix", "row" or "group"; "" for other formats
    sm: int  # which instructions there are; 0: plain Triton only


def source(q: BlockScaled, sm: int) -> Source:
    """The compile-time part of an operand; sm=0 stands for the interpreter."""
    spec, element, mask = q.spec, q.spec.element, q.hadamard or 0
    factor = "" if q.global_scale is None else "tensor"
    if q.global_scale is not None and q.global_scale.dim():
        factor = "matrix" if len(q.shape) > 2 else "group" if q.group_align else "row"
    return Source(
        spec.family, q.scale_layout, element.name, element.ebits, element.mbits, element.bias,
        8 // spec.codes_per_byte, *spec.block, spec.block[1] // spec.granule,
        0 if q.hadamard is None else spec.hadamard, mask - (1 << 32) if mask >> 31 else mask, factor, sm,
    )  # fmt: skip


# ---- elements --------------------------------------------------------------------------------------------------------


@triton.jit
def decode(code, S: tl.constexpr):
    """int32 with a code in its low bits, anything above them -> fp32.

    The code's fields become fp32's, subnormals included, and a power of two makes up for the other bias: exact.
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
def decode_two(codes, S: tl.constexpr):
    """Two adjacent codes in the low bits, the first one lowest -> two fp32. FP8 and FP4 values are all among fp16's."""
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
        # the parts of these products do not overlap
        byte = codes.to(tl.int32) & 0xFF
        return _from_halves(((byte * 0x00200200) & 0x0E000E00) | ((byte * 0x01001000) & -0x7FFF8000))
    else:
        codes = codes.to(tl.int32)
        return decode(codes, S), decode(codes >> S.code_bits, S)


@triton.jit
def decode_word(word, J: tl.constexpr, S: tl.constexpr):
    """Codes 2J and 2J + 1 of the four in a word, or J and J + 4 of eight, which lie in its halves as fp16 will."""
    if S.code_bits == 8:
        return decode_two(word >> (16 * J), S)
    elif S.sm:
        fields = word >> 3 if J == 3 else word << (9 - 4 * J)
        return _from_halves((fields & 0x0E000E00) | ((word << (12 - 4 * J)) & -0x7FFF8000))
    else:
        return decode(word >> (4 * J), S), decode(word >> (4 * J + 16), S)


@triton.jit
def _from_halves(word):
    """E2M1 fields in the places of fp16's -> two fp32; as in `decode`, a power of two makes up for the bias."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 a, b; mov.b32 t, 0x74007400; mul.rn.f16x2 t, $2, t; mov.b32 {a, b}, t;"
        " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scaled(value, scale, factor, S: tl.constexpr):
    """Each product is rounded to fp32; NaN scales need no more."""
    if S.factor == "":
        return value * scale
    else:
        return value * scale * factor


@triton.jit
def round_two(lo, hi, OUT: tl.constexpr, SM: tl.constexpr):
    """Two fp32 -> their patterns in the output's type as one word, the first one lowest; one NaN for all."""
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
        if SM >= 90:  # the conversion gives 7FFF, so there are only bits to clear
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
    """Scales at tile [T, 1] and block [1, B] as fp32. Blocked: stride_t is the 512-byte tiles beside each other."""
    t, b = tile.to(tl.int64), block.to(tl.int64)
    if S.layout == "blocked":
        r, b = t * S.across, b * S.repeats
        place = 512 * ((r // 128) * stride_t + b // 4) + (r % 32) * 16 + ((r % 128) // 32) * 4 + b % 4
    else:
        place = t * stride_t + b * stride_b
    scale = tl.load(scale_ptr + place) if EVEN else tl.load(scale_ptr + place, mask=ok, other=0)
    if S.family == "mx":
        return power_of_two(scale.to(tl.int32))
    elif S.family == "nvfp4":
        value = decode_e4m3(scale.to(tl.int32) & 0x7F)
        return value * tl.where(scale < 0x80, 1.0, -1.0)  # no cast writes a negative one
    else:
        return scale


# ---- rotation --------------------------------------------------------------------------------------------------------


@triton.jit
def rotate_pairs(lo, hi, S: tl.constexpr):
    """Back, groups along pairs [A, W]: the first stage is within them."""
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
def rotate_rows(x, S: tl.constexpr):
    """Back, groups along the rows of [A, W]."""
    A: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    STAGES: tl.constexpr = 5 if S.hadamard == 32 else 4
    for stage in tl.static_range(STAGES):
        x = butterfly(x, A >> (stage + 1), W << stage)
    norm = 0.25 if S.hadamard == 16 else 0.17677669529663688
    return flip_signs(x * norm, tl.arange(0, A)[:, None], S.mask, S.hadamard)
