"""Stores of a tile (`_tiles.py`): codes and scales of the row operand in place, of the column operand transposed.

`rows_end` and `columns` bound the source; pads of codes and scales are written as zeros.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from ._device import block_scale, random_word, random_words
from ._device_codes import (
    encode_packed_4_rows,
    encode_packed_8_rows,
    encode_packed_row,
    encode_pair,
    encodes_packed,
    is_exact,
    pack_factors,
)
from ._tiles import column_block_amax, rotate_columns, rotate_rows, row_block_amax, to_fp32


@triton.jit
def _store_scales(scale_ptr, scale, tile, block, rows, length, pitch, S: tl.constexpr):
    """Store block scales [T, B] of an operand [rows, length] at tile [T, 1] and block [1, B], pads included.

    pitch: row stride of the scale buffer; for the blocked layout, 512-byte tiles per row of tiles.
    """
    tiles, blocks = tl.cdiv(rows, S.across), tl.cdiv(length, S.along)
    t, b = tile.to(tl.int64), block.to(tl.int64)
    if S.scale_bytes:
        scale = scale.to(tl.uint8)
    if S.layout == "blocked" and S.repeats == 4:
        # a block is 128 rows x 4 scales: 512 contiguous bytes, all equal to its scale except for pads
        tl.static_assert(S.across == 128)
        i = tl.arange(0, 512)[None, None, :]
        r = tile[:, :, None] * S.across + i % 16 // 4 * 32 + i // 16
        c = block[:, :, None] * 4 + i % 4
        value = tl.where((r < rows) & (c < tl.cdiv(length, S.along // 4)), scale[:, :, None], 0).to(tl.uint8)
        mask = (tile < tl.cdiv(rows, 128)) & (block < pitch)
        tl.store(scale_ptr + (512 * (t * pitch + b))[:, :, None] + i, value, mask=mask[:, :, None])
    elif S.layout == "blocked":
        # the scale is repeated in each row of the block; 128 rows x 4 blocks are 512 bytes
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
    """Write the tile to a row operand [rows, columns]: blocks along K, codes at the positions of the source.

    row0: first row of the tile; rows from rows_end on belong to another group.  data_ptr: one unit per pair, int16 for
    8-bit codes and uint8 for 4-bit codes; row_units per row.  factors: NVFP4's (decode, encode) tensor factors.
    random: (state, stream, group, first position, positions per row) for stochastic rounding.
    """
    MQ: tl.constexpr = lo.shape[0]
    J: tl.constexpr = lo.shape[1]
    W: tl.constexpr = lo.shape[2]
    NL: tl.constexpr = 2 * W // S.along
    NR: tl.constexpr = MQ * J // S.across
    if S.hadamard:
        lo, hi = to_fp32(lo, hi, MODE)
        lo, hi = rotate_rows(lo, hi, S)
        columns = tl.cdiv(columns, S.hadamard) * S.hadamard
        amax = row_block_amax(lo, hi, "any", False, S)
    else:
        amax = row_block_amax(lo, hi, MODE, PACKED, S)
    scale, factor = block_scale(amax, factors[0], factors[1], S)
    FROM_PACKED: tl.constexpr = PACKED and encodes_packed(MODE, S)
    tile_factor = pack_factors(factor, factor) if FROM_PACKED and is_exact(S) else factor
    tile_factor = tl.broadcast_to(tile_factor[:, None, :, None], (NR, S.across, NL, S.along // 2))
    tile_factor = tl.reshape(tile_factor, (MQ, J, W))
    m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
    w = pk * W + tl.arange(0, W)[None, None, :]
    if FROM_PACKED:
        if not EVEN.columns:
            # Codes past the tail must be zero, also in a block with a NaN factor: zero the factor. Selecting among
            # codes miscompiles: ptxas of CUDA 12.8 loses halves of merged conversions that are split again.
            tile_factor = tl.where(2 * w < columns, tile_factor, tl.zeros_like(tile_factor))
        code = encode_packed_row(lo, tile_factor, S)
    else:
        if not S.hadamard:
            lo, hi = to_fp32(lo, hi, MODE)
        random_lo, random_hi = _random_pair(random, m, pk, W, S)
        code = encode_pair(lo * tile_factor, hi * tile_factor, random_lo, random_hi, S)
        if not EVEN.columns:
            code = tl.where(2 * w + 1 < columns, code, tl.where(2 * w < columns, code & ((1 << S.code_bits) - 1), 0))
        code = code.to(tl.int16) if S.code_bits == 8 else code.to(tl.uint8)
    if J == 4 or (S.code_bits == 4 and J > 1):
        # A shape unlike the load's, so that Triton gives the codes their own layout: 16 bytes, i.e. 16 or 32 columns,
        # per thread.
        m = tl.arange(0, MQ * J)[None, :, None]
        code = tl.reshape(code, (1, MQ * J, W))
    else:
        # in the order of the load, so that the store reuses its layout
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
        # skip rows of the next group; past the last row of the tensor there are only pads
        in_group = (tile * S.across < rows_end) | (rows_end == rows)
        _store_scales(scale_ptr, scale, tl.where(in_group, tile, 0x40000000), block, rows, columns, pitch, S)


@triton.jit
def write_column(
    data_ptr, scale_ptr, lo, hi, position, length, inside, pk, columns, row_units, pitch, factors, random,
    MODE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Write the tile, transposed, to a column operand [columns, length]: blocks along M, codes K-major.

    position: offset of the tile's first row along `length` (a rotated tail counts).  GROUPED: groups start at full
    tiles; a tile not `inside` any group is written as zeros.  data_ptr: int32, row_units per row.
    """
    MQ: tl.constexpr = lo.shape[0]
    J: tl.constexpr = lo.shape[1]
    W: tl.constexpr = lo.shape[2]
    BM: tl.constexpr = MQ * J
    NB: tl.constexpr = BM // S.along
    PER_WORD: tl.constexpr = 32 // S.code_bits
    # zeros may have nonzero codes: a rotated zero can be -0.0, and a NaN tensor scale reaches every block
    ENCODE_ZEROS: tl.constexpr = S.hadamard > 0 or S.family == "nvfp4"
    if GROUPED and ENCODE_ZEROS:
        lo, hi = tl.where(inside, lo, tl.zeros_like(lo)), tl.where(inside, hi, tl.zeros_like(hi))
    if S.hadamard:
        lo, hi = to_fp32(lo, hi, MODE)
        lo, hi = rotate_columns(lo, S), rotate_columns(hi, S)
        amax = column_block_amax(lo, hi, "any", False, S)
    else:
        amax = column_block_amax(lo, hi, MODE, PACKED, S)
    if GROUPED:
        amax = tl.where(inside, amax, 0)
    scale, factor = block_scale(amax, factors[0], factors[1], S)  # [NB, 2W / across]
    tile_factor = tl.broadcast_to(factor[:, :, None], (NB, 2 * W // S.across, S.across))
    low, high = tl.split(tl.reshape(tile_factor, (NB, W, 2)))
    low, high = _repeat_rows(low, MQ), _repeat_rows(high, MQ)
    if PACKED and encodes_packed(MODE, S):
        low, high = _pack_words(lo, low, high, S)
    else:
        if not S.hadamard:
            lo, hi = to_fp32(lo, hi, MODE)
        m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
        random_lo, random_hi = _random_pair(random, m, pk, W, S)
        low, high = _pack_rows(lo * low, random_lo, S), _pack_rows(hi * high, random_hi, S)
    packed = tl.reshape(tl.join(low, high), (BM // PER_WORD, 2 * W))
    word = tl.arange(0, BM // PER_WORD)[:, None]
    if not (EVEN.rows or GROUPED):
        # a NaN block would write nonzero codes past the tail
        kept = tl.minimum(tl.maximum(length - position - word * PER_WORD, 0), PER_WORD)
        packed = packed & tl.where(kept == PER_WORD, -1, (1 << (kept * S.code_bits)) - 1)
    if GROUPED and not ENCODE_ZEROS:
        packed = tl.where(inside, packed, 0)
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
def _repeat_rows(x, MQ: tl.constexpr):
    """[blocks, W] -> [MQ, 1, W]: each block's value repeated for its groups of J rows."""
    NB: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (NB, MQ // NB, W)), (MQ, 1, W))


@triton.jit
def _even_odd(x):
    """Rows [MQ, J, W] -> even rows and odd rows, [MQ, J / 2, W] each."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2, x.shape[2])), (0, 1, 3, 2)))


@triton.jit
def _split_4(x):
    """Rows [MQ, J, W] -> four tensors [MQ, J / 4, W]: rows 0, 1, 2, 3 modulo 4."""
    even, odd = _even_odd(x)
    a, c = _even_odd(even)
    b, d = _even_odd(odd)
    return a, b, c, d


@triton.jit
def _pack_words(words, low, high, S: tl.constexpr):
    """Packed words [MQ, J, W] -> int32 words of codes of neighbouring rows, [MQ * J * bits / 32, W] for the first and
    for the second column of each pair.  low, high: factors of the two columns."""
    ROWS: tl.constexpr = words.shape[0] * words.shape[1] * S.code_bits // 32
    W: tl.constexpr = words.shape[2]
    if S.code_bits == 8:
        a, b, c, d = _split_4(words)
        low, high = encode_packed_4_rows(a, b, c, d, low, high, S)
    else:
        even, odd = _even_odd(words)
        a, c, e, g = _split_4(even)
        b, d, f, h = _split_4(odd)
        low, high = encode_packed_8_rows(a, b, c, d, e, f, g, h, low, high, S)
    return tl.reshape(low, (ROWS, W)), tl.reshape(high, (ROWS, W))


@triton.jit
def _pack_rows(v, random, S: tl.constexpr):
    """fp32 values [MQ, J, W] of one column of each pair, and their random words -> int32 words of codes."""
    ROWS: tl.constexpr = v.shape[0] * v.shape[1] * S.code_bits // 32
    even, odd = _even_odd(v)
    random_even, random_odd = random, random
    if S.stochastic:
        random_even, random_odd = _even_odd(random)
    low, high = _even_odd(encode_pair(even, odd, random_even, random_odd, S))
    code = low | (high << (2 * S.code_bits))
    if S.code_bits == 4:
        low, high = _even_odd(code)
        code = low | (high << 16)
    return tl.reshape(code, (ROWS, v.shape[2]))


@triton.jit
def _random_pair(random, m, pk, W: tl.constexpr, S: tl.constexpr):
    """Random words for stochastic rounding of pairs [pk * W, (pk + 1) * W) in rows m [MQ, J, 1]; unused otherwise.

    A Philox call gives four words. Where rows start at multiples of four positions, four neighbours in a row share one
    call. Elsewhere each value makes its own call and drops three words.
    """
    if S.shared_philox:
        state_ptr, stream, group, first, all_columns = random
        row = tl.cast(first, tl.int64) // 4 + m.to(tl.int64) * (all_columns // 4)
        a, b, c, d = random_words(row + pk * (W // 2) + tl.arange(0, W // 2)[None, None, :], group, state_ptr, stream)
        shape: tl.constexpr = (m.shape[0], m.shape[1], W)
        return tl.reshape(tl.join(a, c), shape), tl.reshape(tl.join(b, d), shape)
    elif S.stochastic:
        state_ptr, stream, group, first, all_columns = random
        position = first + m.to(tl.int64) * all_columns + 2 * (pk * W + tl.arange(0, W)[None, None, :])
        return random_word(position, group, state_ptr, stream), random_word(position + 1, group, state_ptr, stream)
    else:
        return 0, 0
