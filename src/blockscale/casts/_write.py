"""How a tile (`_tiles.py`) leaves: as part of the row operand, where it stood, or of the column operand, transposed.

`rows_end` and `columns` bound the source; pads of codes and scales are written as zeros.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from ._device import block_scale, random_word, random_words
from ._device_codes import (
    encode_eight_words,
    encode_four_words,
    encode_row_words,
    encode_two,
    factor_words,
    is_exact,
    takes_words,
)
from ._tiles import column_maxima, rotate_columns, rotate_rows, row_maxima, values


@triton.jit
def _store_scales(scale_ptr, scale, tile, block, rows, length, pitch, S: tl.constexpr):
    """scale [tiles, blocks] of an operand [rows, length], at tile [T, 1] and block [1, B], pads included.

    pitch: from one row of the scale buffer to the next; for the blocked layout, 512-byte tiles beside each other.
    """
    tiles, blocks = tl.cdiv(rows, S.across), tl.cdiv(length, S.along)
    t, b = tile.to(tl.int64), block.to(tl.int64)
    if S.scale_bytes:
        scale = scale.to(tl.uint8)
    if S.layout == "blocked" and S.repeats == 4:
        # a block is 128 rows of four scales: 512 bytes that lie together, all of them its scale but for the pads
        tl.static_assert(S.across == 128)
        i = tl.arange(0, 512)[None, None, :]
        r = tile[:, :, None] * S.across + i % 16 // 4 * 32 + i // 16
        c = block[:, :, None] * 4 + i % 4
        value = tl.where((r < rows) & (c < tl.cdiv(length, S.along // 4)), scale[:, :, None], 0).to(tl.uint8)
        mask = (tile < tl.cdiv(rows, 128)) & (block < pitch)
        tl.store(scale_ptr + (512 * (t * pitch + b))[:, :, None] + i, value, mask=mask[:, :, None])
    elif S.layout == "blocked":
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
        most = row_maxima(lo, hi, "any", False, S)
    else:
        most = row_maxima(lo, hi, MODE, PACKED, S)
    scale, factor = block_scale(most, factors[0], factors[1], S)
    BY_WORDS: tl.constexpr = PACKED and takes_words(MODE, S)
    spread = factor_words(factor, factor) if BY_WORDS and is_exact(S) else factor
    spread = tl.broadcast_to(spread[:, None, :, None], (NR, S.across, NL, S.along // 2))
    spread = tl.reshape(spread, (MQ, J, W))
    m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
    w = pk * W + tl.arange(0, W)[None, None, :]
    if BY_WORDS:
        if not EVEN.columns:
            # Past the tail words are zero, and so must their codes be, in a block with a NaN too. Not by choosing among
            # codes: the assembler of CUDA 12.8 loses halves of merged conversions that are taken apart again.
            spread = tl.where(2 * w < columns, spread, tl.zeros_like(spread))
        code = encode_row_words(lo, spread, S)
    else:
        if not S.hadamard:
            lo, hi = values(lo, hi, MODE)
        word_lo, word_hi = _random_pair(random, m, pk, W, S)
        code = encode_two(lo * spread, hi * spread, word_lo, word_hi, S)
        if not EVEN.columns:
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
    if EVEN.rows and EVEN.columns:
        tl.store(at, code)
    elif EVEN.rows:
        tl.store(at, code, mask=w < row_units)
    elif EVEN.columns:
        tl.store(at, code, mask=m < rows_end - row0)
    else:
        tl.store(at, code, mask=(m < rows_end - row0) & (w < row_units))
    tile = row0 // S.across + tl.arange(0, NR)[:, None]
    block = pk * NL + tl.arange(0, NL)[None, :]
    if EVEN.rows:
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
        most = column_maxima(lo, hi, "any", False, S)
    else:
        most = column_maxima(lo, hi, MODE, PACKED, S)
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
        word_lo, word_hi = _random_pair(random, m, pk, W, S)
        low, high = _pack_rows(lo * low, word_lo, S), _pack_rows(hi * high, word_hi, S)
    packed = tl.reshape(tl.join(low, high), (BM // PER_WORD, 2 * W))
    word = tl.arange(0, BM // PER_WORD)[:, None]
    if not (EVEN.rows or GROUPED):
        # the tail of a block with a NaN would not be zero by itself
        kept = tl.minimum(tl.maximum(length - position - word * PER_WORD, 0), PER_WORD)
        packed = packed & tl.where(kept == PER_WORD, -1, (1 << (kept * S.code_bits)) - 1)
    if GROUPED and not ENCODE_ZEROS:
        packed = tl.where(live, packed, 0)
    k = tl.arange(0, 2 * W)[None, :]
    at = data_ptr + (pk.to(tl.int64) * (2 * W) * row_units + position // PER_WORD) + k * row_units + word
    if EVEN.rows and EVEN.columns:
        tl.store(at, packed)
    elif EVEN.rows:
        tl.store(at, packed, mask=k < columns - pk * (2 * W))
    elif EVEN.columns:
        tl.store(at, packed, mask=word < row_units - position // PER_WORD)
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
def _random_pair(random, m, pk, W: tl.constexpr, S: tl.constexpr):
    """Random words of the pairs pk * W .. of rows m [MQ, J, 1], or anything when codes are rounded to nearest.

    A draw gives four words: those of neighbours in a row where rows start at multiples of four, one draw for four
    values. Elsewhere each value makes its own and drops three.
    """
    if S.fours:
        state_ptr, stream, group, first, stride = random
        row = tl.cast(first, tl.int64) // 4 + m.to(tl.int64) * (stride // 4)
        a, b, c, d = random_words(row + pk * (W // 2) + tl.arange(0, W // 2)[None, None, :], group, state_ptr, stream)
        shape: tl.constexpr = (m.shape[0], m.shape[1], W)
        return tl.reshape(tl.join(a, c), shape), tl.reshape(tl.join(b, d), shape)
    elif S.stochastic:
        state_ptr, stream, group, first, stride = random
        position = first + m.to(tl.int64) * stride + 2 * (pk * W + tl.arange(0, W)[None, None, :])
        return random_word(position, group, state_ptr, stream), random_word(position + 1, group, state_ptr, stream)
    else:
        return 0, 0
