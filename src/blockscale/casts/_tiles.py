"""A tile of a matrix in registers: loads, register form, block amax, rotation.

A tile is [MQ, J, W] pairs of neighbours along K: row mq * J + j, columns 2w and 2w + 1. Triton keeps the J rows and 8
pairs of a row in one thread. A thread packs J codes of a column by itself, and only 32-bit words cross threads: the
transposed write is as cheap as the straight one.

Register form: a pair of 16-bit values stays one packed 32-bit word (bf16x2, fp16x2) until it is multiplied, and a max
of packed words takes one instruction for two values (`PACKED`). Other tiles are two fp32 tensors (lo, hi).

`_write.py` stores a tile. The caller's grid decides what a tile covers; everything outside the source is zero.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ._device import butterfly, encode_factor, flip_signs, round_to_bf16
from ._device_codes import magnitude_bits

# ---- loading ---------------------------------------------------------------------------------------------------------


@triton.jit
def load_pairs(x_ptr, row_offsets, w, row_ok, columns, stride_k, MODE: tl.constexpr, EVEN: tl.constexpr):
    """Pairs [R, W] in register form: row_offsets [R, 1] in units of x_ptr, w [1, W] pair indices, row_ok [R, 1].

    MODE: "bf16", "fp16" and "fp32" load packed words (x_ptr points at int32 or int64) and return them as both results;
    "any" takes any dtype and stride and returns fp32 values (lo, hi). `to_fp32` unpacks as late as possible: fp32
    values take twice the registers of packed 16-bit pairs.
    """
    if MODE == "any":
        mask_lo = row_ok & (2 * w < columns)
        mask_hi = row_ok & (2 * w + 1 < columns)
        at = x_ptr + row_offsets + (2 * w).to(tl.int64) * stride_k
        lo = tl.load(at, mask=mask_lo, other=0.0).to(tl.float32)
        hi = tl.load(at + stride_k, mask=mask_hi, other=0.0).to(tl.float32)
        return lo, hi
    else:
        if EVEN.rows and EVEN.columns:
            words = tl.load(x_ptr + row_offsets + w)
        elif EVEN.rows:
            words = tl.load(x_ptr + row_offsets + w, mask=w < columns // 2, other=0)
        elif EVEN.columns:
            words = tl.load(x_ptr + row_offsets + w, mask=row_ok, other=0)
        else:
            words = tl.load(x_ptr + row_offsets + w, mask=row_ok & (w < columns // 2), other=0)
        return words, words


@triton.jit
def to_fp32(a, b, MODE: tl.constexpr):
    """fp32 pairs (lo, hi) of a tile in register form."""
    if MODE == "any":
        return a, b
    else:
        return unpack(a, MODE)


@triton.jit
def unpack(words, MODE: tl.constexpr):
    """Packed words -> their two values as fp32."""
    if MODE == "bf16":
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    elif MODE == "fp16":
        low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)
    else:
        tl.static_assert(MODE == "fp32")
        return words.to(tl.int32).to(tl.float32, bitcast=True), (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def round_and_pack(lo, hi, MODE: tl.constexpr, FAST: tl.constexpr):
    """fp32 pairs rounded to the dtype of MODE, in register form: the inverse of `to_fp32` for 16-bit dtypes."""
    if MODE == "bf16":
        if FAST:
            words = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            low = (round_to_bf16(lo).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
            words = low | round_to_bf16(hi).to(tl.int32, bitcast=True)
        return words, words
    elif MODE == "fp16":
        if FAST:
            words = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            low = lo.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            words = low | (hi.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
        return words, words
    else:
        return lo, hi


# ---- block amax ------------------------------------------------------------------------------------------------------


@triton.jit
def _max_bf16x2(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_fp16x2(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_magnitude_bf16x2(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_magnitude_fp16x2(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_abs_pairs(words, AXIS: tl.constexpr, MODE: tl.constexpr, S: tl.constexpr):
    """Packed pairs with the largest magnitudes along an axis; the signs are undefined."""
    if S.sm_89 and MODE == "bf16":
        return tl.reduce(words, AXIS, _max_magnitude_bf16x2)
    elif S.sm_89:
        return tl.reduce(words, AXIS, _max_magnitude_fp16x2)
    elif MODE == "bf16":
        return tl.reduce(words & 0x7FFF7FFF, AXIS, _max_bf16x2)
    else:
        return tl.reduce(words & 0x7FFF7FFF, AXIS, _max_fp16x2)


@triton.jit
def row_block_amax(lo, hi, MODE: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr):
    """amax bit patterns of blocks along K, int32 [MQ * J / across, W * 2 / along]."""
    MQ: tl.constexpr = lo.shape[0]
    J: tl.constexpr = lo.shape[1]
    NL: tl.constexpr = lo.shape[2] * 2 // S.along
    NR: tl.constexpr = MQ * J // S.across
    if not PACKED:
        lo, hi = to_fp32(lo, hi, MODE)
        bits = tl.maximum(magnitude_bits(lo), magnitude_bits(hi))
        amax = tl.max(tl.reshape(bits, (MQ, J, NL, S.along // 2)), axis=3)
        if S.across > 1:
            amax = tl.max(tl.reshape(amax, (NR, S.across, NL)), axis=1)
        return tl.reshape(amax, (NR, NL))
    else:
        pairs = _max_abs_pairs(tl.reshape(lo, (MQ, J, NL, S.along // 2)), 3, MODE, S)
        if S.across > 1:
            pairs = _max_abs_pairs(tl.reshape(pairs, (NR, S.across, NL)), 1, MODE, S)
        low, high = unpack(tl.reshape(pairs, (NR, NL)), MODE)
        return tl.maximum(magnitude_bits(low), magnitude_bits(high))


@triton.jit
def column_block_amax(lo, hi, MODE: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr):
    """amax bit patterns of blocks along M, int32 [MQ * J / along, W * 2 / across]."""
    MQ: tl.constexpr = lo.shape[0]
    W: tl.constexpr = lo.shape[2]
    NB: tl.constexpr = MQ * lo.shape[1] // S.along
    if not PACKED:
        lo, hi = to_fp32(lo, hi, MODE)
        low = tl.max(tl.reshape(tl.max(magnitude_bits(lo), axis=1), (NB, MQ // NB, W)), axis=1)
        high = tl.max(tl.reshape(tl.max(magnitude_bits(hi), axis=1), (NB, MQ // NB, W)), axis=1)
    else:
        pairs = _max_abs_pairs(lo, 1, MODE, S)
        pairs = _max_abs_pairs(tl.reshape(pairs, (NB, MQ // NB, W)), 1, MODE, S)
        lowest, highest = unpack(pairs, MODE)
        low, high = magnitude_bits(lowest), magnitude_bits(highest)
    if S.across > 1:
        return tl.max(tl.reshape(tl.maximum(low, high), (NB, 2 * W // S.across, S.across // 2)), axis=2)
    else:
        return tl.reshape(tl.join(low, high), (NB, 2 * W))


# ---- tensor scale ----------------------------------------------------------------------------------------------------


@triton.jit
def _amax_bits(amax):
    """Bit pattern of a tensor's amax; NaN if it is negative. -0.0 counts as zero."""
    magnitude = amax & 0x7FFFFFFF
    return tl.where((amax < 0) & (magnitude != 0), 0x7FC00000, magnitude)


@triton.jit
def tensor_factors(amax_ptr, global_ptr, index, inside, is_first, amax_count, COUNT: tl.constexpr, S: tl.constexpr):
    """(decode, encode) tensor factors of this tile for NVFP4, (1, 1) for other formats and tiles outside all groups.

    The first program also stores the decode factors (tensor scales) of all groups.
    """
    if S.family == "nvfp4":
        if is_first:
            i = tl.arange(0, COUNT)
            amaxes = _amax_bits(tl.load(amax_ptr + i, mask=i < amax_count, other=0))
            decode, encode = encode_factor(amaxes, 2688.0, False)
            tl.store(global_ptr + i, decode, mask=i < amax_count)
        amax = _amax_bits(tl.load(amax_ptr + (index if S.grouped else 0), mask=inside | (not S.grouped), other=0))
        decode, encode = encode_factor(amax + tl.zeros((1, 1), tl.int32), 2688.0, False)
        if S.grouped:
            decode, encode = tl.where(inside, decode, 1.0), tl.where(inside, encode, 1.0)
        return decode, encode
    else:
        return 1.0, 1.0


# ---- rotation --------------------------------------------------------------------------------------------------------


@triton.jit
def rotate_rows(lo, hi, S: tl.constexpr):
    """Hadamard rotation in groups along K; the first stage is within pairs."""
    W: tl.constexpr = lo.shape[2]
    ROWS: tl.constexpr = lo.shape[0] * lo.shape[1]
    w = tl.arange(0, W)[None, None, :]
    lo, hi = flip_signs(lo, 2 * w, S.mask, S.hadamard), flip_signs(hi, 2 * w + 1, S.mask, S.hadamard)
    lo, hi = lo + hi, lo - hi
    STAGES: tl.constexpr = 5 if S.hadamard == 32 else 4
    for stage in tl.static_range(1, STAGES):
        lo = butterfly(lo, ROWS * W >> stage, 1 << (stage - 1))
        hi = butterfly(hi, ROWS * W >> stage, 1 << (stage - 1))
    norm = 0.25 if S.hadamard == 16 else 0.17677669529663688
    return round_to_bf16(lo * norm), round_to_bf16(hi * norm)


@triton.jit
def rotate_columns(x, S: tl.constexpr):
    """Hadamard rotation in groups along M."""
    J: tl.constexpr = x.shape[1]
    W: tl.constexpr = x.shape[2]
    ROWS: tl.constexpr = x.shape[0] * J
    row = tl.arange(0, x.shape[0])[:, None, None] * J + tl.arange(0, J)[None, :, None]
    x = flip_signs(x, row, S.mask, S.hadamard)
    STAGES: tl.constexpr = 5 if S.hadamard == 32 else 4
    for stage in tl.static_range(STAGES):
        x = butterfly(x, ROWS >> (stage + 1), W << stage)
    norm = 0.25 if S.hadamard == 16 else 0.17677669529663688
    return round_to_bf16(x * norm)
