"""A tile of a matrix in registers, and how it leaves as the row operand, the column operand, or both.

A tile is [MQ, J, W] pairs of neighbours along K: row mq * J + j, columns 2w and 2w + 1. Triton keeps the J rows and 8
pairs of a row in one thread, so a thread can pack J codes of a column by itself and only whole 32-bit words cross
threads: that makes the transposed write as cheap as the straight one. A pair of 16-bit values stays in one word until
it is multiplied, and a maximum of such words takes one instruction for two values (`PACKED`).

The caller's grid decides what a tile covers. `rows_end` and `columns` bound the source; everything outside is zero.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats.cast_spec import CastPlan
from ._device import block_scale, butterfly, encode_factor, flip_signs, random_word, round_to_bf16
from ._device_codes import (
    encode_eight_words,
    encode_four_words,
    encode_row_words,
    encode_two,
    factor_words,
    is_exact,
    magnitude_bits,
    takes_words,
)


class Side(NamedTuple):
    """All that a kernel must know about one operand at compile time."""

    family: str
    rule: str
    layout: str
    satfinite: bool
    ebits: int
    mbits: int
    bias: int
    emax: int
    max_bits: int
    nan_code: int
    code_bits: int  # distance from one code to the next: 4 or 8
    scale_bytes: bool
    across: int  # rows of a block
    along: int  # length of a block
    hardware: str  # the element, where the GPU has a shorter way to its codes
    fast: bool  # inline PTX may be used
    sm_89: bool  # and has conversions to E4M3, and maxima of magnitudes
    hadamard: int  # size of a rotated group, or 0
    mask: int
    stochastic: bool
    grouped: bool  # one tensor scale per group, or per matrix


def side(plan: CastPlan, sm: int, *, grouped: bool) -> Side:
    """The compile-time part of a plan; sm=0 stands for the interpreter."""
    spec, element = plan.spec, plan.spec.element
    short = {"e4m3": 89, "e5m2": 89, "e2m1": 80}.get(element.name, 999)
    hardware = element.name if sm >= short and plan.stream is None else ""
    return Side(
        spec.family, plan.rule, plan.layout, plan.satfinite,
        element.ebits, element.mbits, element.bias, element.emax, element.max_bits, element.nan_code,
        8 // spec.codes_per_byte, spec.scale_dtype.itemsize == 1, *spec.block, hardware, sm > 0, sm >= 89,
        0 if plan.hadamard is None else spec.hadamard, _signed(plan.hadamard or 0), plan.stream is not None, grouped,
    )  # fmt: skip


def _signed(mask: int) -> int:
    """The same 32 bits as an int32."""
    return mask - (1 << 32) if mask >> 31 else mask


# ---- loading ---------------------------------------------------------------------------------------------------------


@triton.jit
def load_pairs(x_ptr, row_offsets, w, row_ok, columns, stride_k, MODE: tl.constexpr, EVEN: tl.constexpr):
    """Rows as they are held: row_offsets [R, 1] in units of x_ptr, w [1, W] pair indices, row_ok [R, 1].

    MODE: "bf16", "fp16" or "fp32" load whole words (x_ptr points at int32 or int64) and hold them, twice the same;
    "any" takes any dtype and stride and holds values. `values` makes fp32 pairs of either, as late as possible: a tile
    of fp32 values takes twice the registers of its words.
    """
    if MODE == "any":
        mask_lo = row_ok & (2 * w < columns)
        mask_hi = row_ok & (2 * w + 1 < columns)
        at = x_ptr + row_offsets + (2 * w).to(tl.int64) * stride_k
        lo = tl.load(at, mask=mask_lo, other=0.0).to(tl.float32)
        hi = tl.load(at + stride_k, mask=mask_hi, other=0.0).to(tl.float32)
        return lo, hi
    else:
        if EVEN:
            words = tl.load(x_ptr + row_offsets + w)
        else:
            words = tl.load(x_ptr + row_offsets + w, mask=row_ok & (w < columns // 2), other=0)
        return words, words


@triton.jit
def values(a, b, MODE: tl.constexpr):
    """The fp32 pairs of a tile as it is held."""
    if MODE == "any":
        return a, b
    else:
        return unpack(a, MODE)


@triton.jit
def unpack(words, MODE: tl.constexpr):
    """Words -> the two values that they hold, as fp32."""
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
def hold(lo, hi, MODE: tl.constexpr, FAST: tl.constexpr):
    """fp32 pairs rounded to the type of MODE, as a tile is held: the inverse of `values` for 16-bit types."""
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


# ---- maxima ----------------------------------------------------------------------------------------------------------


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
def _max_pairs(words, AXIS: tl.constexpr, MODE: tl.constexpr, S: tl.constexpr):
    """Words of the largest magnitudes along an axis; their signs mean nothing."""
    if S.sm_89 and MODE == "bf16":
        return tl.reduce(words, AXIS, _max_magnitude_bf16x2)
    elif S.sm_89:
        return tl.reduce(words, AXIS, _max_magnitude_fp16x2)
    elif MODE == "bf16":
        return tl.reduce(words & 0x7FFF7FFF, AXIS, _max_bf16x2)
    else:
        return tl.reduce(words & 0x7FFF7FFF, AXIS, _max_fp16x2)


@triton.jit
def _row_maxima(lo, hi, MODE: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr):
    """Patterns [MQ * J / across, W * 2 / along] of blocks along K."""
    MQ: tl.constexpr = lo.shape[0]
    J: tl.constexpr = lo.shape[1]
    NL: tl.constexpr = lo.shape[2] * 2 // S.along
    NR: tl.constexpr = MQ * J // S.across
    if not PACKED:
        lo, hi = values(lo, hi, MODE)
        bits = tl.maximum(magnitude_bits(lo), magnitude_bits(hi))
        most = tl.max(tl.reshape(bits, (MQ, J, NL, S.along // 2)), axis=3)
        if S.across > 1:
            most = tl.max(tl.reshape(most, (NR, S.across, NL)), axis=1)
        return tl.reshape(most, (NR, NL))
    else:
        pairs = _max_pairs(tl.reshape(lo, (MQ, J, NL, S.along // 2)), 3, MODE, S)
        if S.across > 1:
            pairs = _max_pairs(tl.reshape(pairs, (NR, S.across, NL)), 1, MODE, S)
        low, high = unpack(tl.reshape(pairs, (NR, NL)), MODE)
        return tl.maximum(magnitude_bits(low), magnitude_bits(high))


@triton.jit
def _column_maxima(lo, hi, MODE: tl.constexpr, PACKED: tl.constexpr, S: tl.constexpr):
    """Patterns [MQ * J / along, W * 2 / across] of blocks along M."""
    MQ: tl.constexpr = lo.shape[0]
    W: tl.constexpr = lo.shape[2]
    NB: tl.constexpr = MQ * lo.shape[1] // S.along
    if not PACKED:
        lo, hi = values(lo, hi, MODE)
        low = tl.max(tl.reshape(tl.max(magnitude_bits(lo), axis=1), (NB, MQ // NB, W)), axis=1)
        high = tl.max(tl.reshape(tl.max(magnitude_bits(hi), axis=1), (NB, MQ // NB, W)), axis=1)
    else:
        pairs = _max_pairs(lo, 1, MODE, S)
        pairs = _max_pairs(tl.reshape(pairs, (NB, MQ // NB, W)), 1, MODE, S)
        lowest, highest = unpack(pairs, MODE)
        low, high = magnitude_bits(lowest), magnitude_bits(highest)
    if S.across > 1:
        return tl.max(tl.reshape(tl.maximum(low, high), (NB, 2 * W // S.across, S.across // 2)), axis=2)
    else:
        return tl.reshape(tl.join(low, high), (NB, 2 * W))


# ---- the tensor's own scale ------------------------------------------------------------------------------------------


@triton.jit
def tensor_factors(amax_ptr, global_ptr, index, inside, is_first, count, COUNT: tl.constexpr, S: tl.constexpr):
    """NVFP4's (decode, encode) for this tile; the first program also stores the decode factors of all groups.

    Tiles of no group (`inside` is false) take 1. Other formats have none.
    """
    if S.family == "nvfp4":
        if is_first:
            every = tl.arange(0, COUNT)
            tops = tl.load(amax_ptr + every, mask=every < count, other=0) & 0x7FFFFFFF
            decode, encode = encode_factor(tops, 2688.0, False)
            tl.store(global_ptr + every, decode, mask=every < count)
        top = tl.load(amax_ptr + (index if S.grouped else 0), mask=inside | (not S.grouped), other=0) & 0x7FFFFFFF
        decode, encode = encode_factor(top + tl.zeros((1, 1), tl.int32), 2688.0, False)
        if S.grouped:
            decode, encode = tl.where(inside, decode, 1.0), tl.where(inside, encode, 1.0)
        return decode, encode
    else:
        return 1.0, 1.0


# ---- rotation --------------------------------------------------------------------------------------------------------


@triton.jit
def rotate_rows(lo, hi, S: tl.constexpr):
    """Groups along K: the first stage is within pairs."""
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
    """Groups along M."""
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


# ---- writing ---------------------------------------------------------------------------------------------------------


@triton.jit
def _store_scales(scale_ptr, scale, tile, block, rows, length, pitch, S: tl.constexpr):
    """scale [tiles, blocks] of an operand [rows, length], at tile [T, 1] and block [1, B], pads included.

    pitch: from one row of the scale buffer to the next; for the blocked layout, 512-byte tiles beside each other.
    """
    tiles, blocks = tl.cdiv(rows, S.across), tl.cdiv(length, S.along)
    t, b = tile.to(tl.int64), block.to(tl.int64)
    if S.scale_bytes:
        scale = scale.to(tl.uint8)
    if S.layout == "blocked":
        # a tile's scale stands in each of its rows; 128 rows by 4 blocks are 512 bytes
        ROWS: tl.constexpr = S.across
        for i in tl.static_range(ROWS):
            r = t * S.across + i
            place = 512 * ((r // 128) * pitch + b // 4) + (r % 32) * 16 + ((r % 128) // 32) * 4 + b % 4
            value = tl.where((r < rows) & (block < blocks), scale, tl.zeros_like(scale))
            tl.store(scale_ptr + place, value, mask=(r < tl.cdiv(rows, 128) * 128) & (b < pitch * 4))
    elif S.layout == "mn_major":
        value = tl.where((tile < tiles) & (block < blocks), scale, tl.zeros_like(scale))
        tl.store(scale_ptr + b * pitch + t, value, mask=(tile < pitch) & (block < blocks))
    else:
        value = tl.where((tile < tiles) & (block < blocks), scale, tl.zeros_like(scale))
        tl.store(scale_ptr + t * pitch + b, value, mask=(tile < tiles) & (block < pitch))


@triton.jit
def write_row(
    data_ptr, scale_ptr, lo, hi, row0, rows_end, rows, pk, columns, row_units, pitch, factors, random,
    MODE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The tile as part of a row operand [rows, columns]: blocks along K, codes where the source stood.

    row0: first row of the tile; rows from rows_end on are another's.  data_ptr: int16 for 8-bit codes, uint8 for 4-bit
    ones, a pair each; row_units of them a row.  factors: NVFP4's tensor scale.  random: (state, stream, group, first
    position, positions a row) for stochastic rounding.
    """
    MQ: tl.constexpr = lo.shape[0]
    J: tl.constexpr = lo.shape[1]
    W: tl.constexpr = lo.shape[2]
    NL: tl.constexpr = 2 * W // S.along
    NR: tl.constexpr = MQ * J // S.across
    if S.hadamard:
        lo, hi = values(lo, hi, MODE)
        lo, hi = rotate_rows(lo, hi, S)
        columns = tl.cdiv(columns, S.hadamard) * S.hadamard
        most = _row_maxima(lo, hi, "any", False, S)
    else:
        most = _row_maxima(lo, hi, MODE, PACKED, S)
    scale, factor = block_scale(most, factors[0], factors[1], S)
    BY_WORDS: tl.constexpr = PACKED and takes_words(MODE, S)
    spread = factor_words(factor, factor) if BY_WORDS and is_exact(S) else factor
    spread = tl.broadcast_to(spread[:, None, :, None], (NR, S.across, NL, S.along // 2))
    spread = tl.reshape(spread, (MQ, J, W))
    m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
    w = pk * W + tl.arange(0, W)[None, None, :]
    if BY_WORDS:
        if not EVEN:
            # Past the tail words are zero, and so must their codes be, in a block with a NaN too. Not by choosing among
            # codes: the assembler of CUDA 12.8 loses halves of merged conversions that are taken apart again.
            spread = tl.where(2 * w < columns, spread, tl.zeros_like(spread))
        code = encode_row_words(lo, spread, S)
    else:
        if not S.hadamard:
            lo, hi = values(lo, hi, MODE)
        word_lo, word_hi = _random_pair(random, m, w, S)
        code = encode_two(lo * spread, hi * spread, word_lo, word_hi, S)
        if not EVEN:
            code = tl.where(2 * w + 1 < columns, code, tl.where(2 * w < columns, code & ((1 << S.code_bits) - 1), 0))
        code = code.to(tl.int16) if S.code_bits == 8 else code.to(tl.uint8)
    if J == 4 or (S.code_bits == 4 and J > 1):
        # another shape than the load has, so that Triton gives the codes their own layout: 16 bytes of them are 16 or
        # 32 columns a thread
        m = tl.arange(0, MQ * J)[None, :, None]
        code = tl.reshape(code, (1, MQ * J, W))
    else:
        # in the order of the load, whose layout then serves the store too
        i = tl.arange(0, MQ * J)[:, None]
        m, w = (i % MQ) * J + i // MQ, pk * W + tl.arange(0, W)[None, :]
        code = tl.reshape(tl.permute(code, (1, 0, 2)), (MQ * J, W))
    at = data_ptr + tl.cast(row0, tl.int64) * row_units + m * row_units + w
    if EVEN:
        tl.store(at, code)
    else:
        tl.store(at, code, mask=(m < rows_end - row0) & (w < row_units))
    tile = row0 // S.across + tl.arange(0, NR)[:, None]
    block = pk * NL + tl.arange(0, NL)[None, :]
    if EVEN:
        _store_scales(scale_ptr, scale, tile, block, rows, columns, pitch, S)
    else:
        # rows of the next group are not ours; past the last row there are only pads
        mine = (tile * S.across < rows_end) | (rows_end == rows)
        _store_scales(scale_ptr, scale, tl.where(mine, tile, 0x40000000), block, rows, columns, pitch, S)


@triton.jit
def write_column(
    data_ptr, scale_ptr, lo, hi, position, length, live, pk, columns, row_units, pitch, factors, random,
    MODE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The tile as part of a column operand [columns, length]: blocks along M, codes K-major, transposed on the way.

    position: where the tile's first row goes along the operand's length (a rotated tail counts).  GROUPED: groups fill
    whole tiles, and a tile that is not `live` belongs to none and is written as zeros.  data_ptr: int32, row_units of
    them a row.
    """
    MQ: tl.constexpr = lo.shape[0]
    J: tl.constexpr = lo.shape[1]
    W: tl.constexpr = lo.shape[2]
    BM: tl.constexpr = MQ * J
    NB: tl.constexpr = BM // S.along
    PER_WORD: tl.constexpr = 32 // S.code_bits
    # codes of zeros need not be zero: a rotated zero may be negative, and a tensor's NaN scale reaches every block
    ENCODE_ZEROS: tl.constexpr = S.hadamard > 0 or S.family == "nvfp4"
    if GROUPED and ENCODE_ZEROS:
        lo, hi = tl.where(live, lo, tl.zeros_like(lo)), tl.where(live, hi, tl.zeros_like(hi))
    if S.hadamard:
        lo, hi = values(lo, hi, MODE)
        lo, hi = rotate_columns(lo, S), rotate_columns(hi, S)
        most = _column_maxima(lo, hi, "any", False, S)
    else:
        most = _column_maxima(lo, hi, MODE, PACKED, S)
    if GROUPED:
        most = tl.where(live, most, 0)
    scale, factor = block_scale(most, factors[0], factors[1], S)  # [NB, 2W / across]
    spread = tl.broadcast_to(factor[:, :, None], (NB, 2 * W // S.across, S.across))
    low, high = tl.split(tl.reshape(spread, (NB, W, 2)))
    low, high = _over_rows(low, MQ), _over_rows(high, MQ)
    if PACKED and takes_words(MODE, S):
        low, high = _pack_words(lo, low, high, S)
    else:
        if not S.hadamard:
            lo, hi = values(lo, hi, MODE)
        m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
        word_lo, word_hi = _random_pair(random, m, pk * W + tl.arange(0, W)[None, None, :], S)
        low, high = _pack_rows(lo * low, word_lo, S), _pack_rows(hi * high, word_hi, S)
    packed = tl.reshape(tl.join(low, high), (BM // PER_WORD, 2 * W))
    word = tl.arange(0, BM // PER_WORD)[:, None]
    if not (EVEN or GROUPED):
        # the tail of a block with a NaN would not be zero by itself
        kept = tl.minimum(tl.maximum(length - position - word * PER_WORD, 0), PER_WORD)
        packed = packed & tl.where(kept == PER_WORD, -1, (1 << (kept * S.code_bits)) - 1)
    if GROUPED and not ENCODE_ZEROS:
        packed = tl.where(live, packed, 0)
    k = tl.arange(0, 2 * W)[None, :]
    at = data_ptr + (pk.to(tl.int64) * (2 * W) * row_units + position // PER_WORD) + k * row_units + word
    if EVEN:
        tl.store(at, packed)
    else:
        tl.store(at, packed, mask=(k < columns - pk * (2 * W)) & (word < row_units - position // PER_WORD))
    block = position // S.along + tl.arange(0, NB)[:, None]
    tile = pk * (2 * W // S.across) + tl.arange(0, 2 * W // S.across)[None, :]
    _store_scales(scale_ptr, tl.trans(scale), tl.trans(tile), tl.trans(block), columns, length, pitch, S)


@triton.jit
def _over_rows(x, MQ: tl.constexpr):
    """[blocks, W] -> [MQ, 1, W], for the groups of rows in each block."""
    NB: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (NB, MQ // NB, W)), (MQ, 1, W))


@triton.jit
def _alternate(x):
    """Rows [MQ, J, W] -> the even ones and the odd ones, [MQ, J / 2, W] each."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2, x.shape[2])), (0, 1, 3, 2)))


@triton.jit
def _fours(x):
    """Rows by their place among four neighbours."""
    even, odd = _alternate(x)
    a, c = _alternate(even)
    b, d = _alternate(odd)
    return a, b, c, d


@triton.jit
def _pack_words(words, low, high, S: tl.constexpr):
    """Codes of neighbouring rows, 32 bits of them in an int32, for each word's first column and for its second:
    [MQ, J, W] -> [MQ * J * bits / 32, W]. low, high: the columns' factors."""
    ROWS: tl.constexpr = words.shape[0] * words.shape[1] * S.code_bits // 32
    W: tl.constexpr = words.shape[2]
    if S.code_bits == 8:
        a, b, c, d = _fours(words)
        low, high = encode_four_words(a, b, c, d, low, high, S)
    else:
        even, odd = _alternate(words)
        a, c, e, g = _fours(even)
        b, d, f, h = _fours(odd)
        low, high = encode_eight_words(a, b, c, d, e, f, g, h, low, high, S)
    return tl.reshape(low, (ROWS, W)), tl.reshape(high, (ROWS, W))


@triton.jit
def _pack_rows(v, word, S: tl.constexpr):
    """The same for values of one column each, and a random word for each."""
    ROWS: tl.constexpr = v.shape[0] * v.shape[1] * S.code_bits // 32
    even, odd = _alternate(v)
    word_even, word_odd = word, word
    if S.stochastic:
        word_even, word_odd = _alternate(word)
    low, high = _alternate(encode_two(even, odd, word_even, word_odd, S))
    code = low | (high << (2 * S.code_bits))
    if S.code_bits == 4:
        low, high = _alternate(code)
        code = low | (high << 16)
    return tl.reshape(code, (ROWS, v.shape[2]))


@triton.jit
def _random_pair(random, m, w, S: tl.constexpr):
    """Random words of the tile's pairs, or anything when codes are rounded to nearest."""
    if S.stochastic:
        state_ptr, stream, group, first, stride = random
        position = first + m.to(tl.int64) * stride + 2 * w
        return random_word(position, group, state_ptr, stream), random_word(position + 1, group, state_ptr, stream)
    else:
        return 0, 0
