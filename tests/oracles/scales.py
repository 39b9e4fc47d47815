"""Scales and full blocks (sections 4, 5, 6, 10).

The MX rules are written as what they mean, a comparison of the amax with a table of 255 thresholds in exact float64,
not as arithmetic on bit fields. fp8_* and nvfp4 are numpy fp32 operations in the written order: numpy rounds every
operation once, keeps subnormals and never contracts.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .elements import E8M0_NAN, NAN32, decode, e8m0_decode, encode, grid, spec
from .rounding import encode_sr
from .third_party import third_party

MX_RULES = ("floor", "ceil", "rceil", "even")
_F = np.float32
_TWO_126 = _F(2.0**126)
_FLT_MAX = np.finfo(np.float32).max


def block_amax(x: ArrayLike, axis: int | tuple[int, ...] = -1) -> NDArray[np.float32]:
    """Largest magnitude. `numpy.max` propagates NaN, which is the contract's NaN > Inf > finite."""
    return np.abs(np.asarray(x, dtype=np.float32)).max(axis=axis, initial=_F(0))


def to_blocks(x: ArrayLike, tile: tuple[int, int]) -> NDArray:
    """Split a matrix into zero padded tiles: [row tiles, column tiles, tile rows * tile columns]."""
    x = np.asarray(x)
    (rows, cols), (tr, tc) = x.shape, tile
    padded = np.pad(x, ((0, -rows % tr), (0, -cols % tc)))
    grid_rows, grid_cols = padded.shape[0] // tr, padded.shape[1] // tc
    return padded.reshape(grid_rows, tr, grid_cols, tc).swapaxes(1, 2).reshape(grid_rows, grid_cols, tr * tc)


def from_blocks(blocks: ArrayLike, tile: tuple[int, int], shape: tuple[int, int]) -> NDArray:
    """Inverse of `to_blocks`; the padding is cut off."""
    blocks = np.asarray(blocks)
    (grid_rows, grid_cols, _), (tr, tc) = blocks.shape, tile
    full = blocks.reshape(grid_rows, grid_cols, tr, tc).swapaxes(1, 2).reshape(grid_rows * tr, grid_cols * tc)
    return full[: shape[0], : shape[1]]


# ---- MX (section 4) ------------------------------------------------------------------------------------------------


@cache
def _thresholds(element: str, rule: str) -> NDArray[np.float64]:
    """For byte b = 0 .. 254 the amax at which b starts (floor, even) or up to which b suffices (ceil, rceil)."""
    e = spec(element)
    reference = {
        "floor": 2.0**e.emax,
        "ceil": 2.0**e.emax,
        "rceil": e.max,
        # Halfway between the largest (mbits+1)-bit significand below 2^emax and 2^emax itself: rounds up from there.
        "even": 2.0**e.emax * (1 - 2.0 ** -(e.mbits + 2)),
    }[rule]
    return np.ldexp(reference, np.arange(255) - 127)


def mx_scale(amax: ArrayLike, element: str, rule: str, satfinite: bool = False) -> NDArray[np.uint8]:
    """E8M0 byte for a block's amax.

    floor: largest power of two with 2^emax * scale <= amax. ceil: smallest with 2^emax * scale >= amax. rceil:
    smallest with max * scale >= amax, so nothing clips. even: floor, after rounding amax half up to mbits + 1
    significant bits. Always within 00 .. FE, FF if amax is not finite. `satfinite` gives FE for an infinite amax.
    """
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        amax = np.asarray(amax, dtype=np.float64)
    table = _thresholds(element, rule)
    if rule in ("ceil", "rceil"):
        index = np.searchsorted(table, amax, side="left")
    else:
        index = np.searchsorted(table, amax, side="right") - 1
    byte = np.clip(index, 0, 254).astype(np.uint8)
    byte = np.where(np.isfinite(amax), byte, np.uint8(E8M0_NAN))
    return np.where(np.isinf(amax) & satfinite, np.uint8(0xFE), byte)


def onnx_mx_scale(amax: ArrayLike, element: str, rule: str) -> NDArray[np.uint8]:
    """The same byte from onnx's fp32 -> E8M0 conversion; floor, ceil and rceil only.

    Known deviations, corrected here: rounding up, onnx gives 01 to every nonzero quotient <= 2^-127, which is 00.
    Rounding down, the *caller's* fp32 quotient can be wrong: for the one amax 2^(emax-126) - 1 ulp it is subnormal
    and rounds up to 2^-126, byte 01 instead of 00. (Just above a threshold the quotient never rounds down to it.)
    """
    amax = np.asarray(amax, dtype=np.float32)
    e = spec(element)
    divisor = e.max if rule == "rceil" else 2.0**e.emax
    mode = {"floor": "down", "ceil": "up", "rceil": "up"}[rule]
    convert = third_party("onnx.numpy_helper").to_float8e8m0
    with np.errstate(invalid="ignore"):  # a signalling NaN
        byte = convert(amax / _F(divisor), saturate=True, round_mode=mode).view(np.uint8)
    # Both bounds are fp32 numbers, so these comparisons with amax itself are exact.
    wrong = amax < _F(divisor * 2.0**-126) if rule == "floor" else amax <= _F(divisor * 2.0**-127)
    return np.where(wrong, np.uint8(0), byte)


def mx_quantize(
    x: ArrayLike, element: str, rule: str, satfinite: bool = False, R: ArrayLike | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Quantise blocks [..., 32] to (E8M0 bytes [...], codes [..., 32]); random words `R` select stochastic rounding."""
    x = np.asarray(x, dtype=np.float32)
    byte = mx_scale(block_amax(x), element, rule, satfinite)
    shift = 127 - byte.astype(np.int32)[..., None]
    with np.errstate(invalid="ignore"):
        v = np.ldexp(x.astype(np.float64), shift).astype(np.float32)  # RN(x * 2^(127-byte)), one rounding
    v = np.where(byte[..., None] == E8M0_NAN, NAN32, v)
    return byte, encode(v, element) if R is None else encode_sr(v, element, R)


def mx_dequantize(byte: ArrayLike, codes: ArrayLike, element: str) -> NDArray[np.float32]:
    """RN(value(code) * scale); a NaN scale yields `NAN32` whatever the code."""
    return fp8_dequantize(e8m0_decode(byte), codes, element)


def gfloat_mx_block(row: ArrayLike, element: str, rule: str) -> tuple[int, NDArray[np.uint8]]:
    """One block by the specification oracle: gfloat, exact Python floats, about a millisecond each.

    Known deviations: gfloat gives an infinite amax scale FE (the contract's `satfinite`) and cannot encode NaN in FP6
    and FP4, so a poisoned block is answered from section 1. Rounding zero up to E8M0 returns 0, hence the guard.
    `even` is not in gfloat: its exponent comes from `math.frexp`.
    """
    gfloat, formats = third_party("gfloat"), third_party("gfloat.formats")
    info = getattr(formats, f"format_info_mxfp{spec(element).bits}_{element}")
    row = np.asarray(row, dtype=np.float32).astype(np.float64)
    amax = float(np.abs(row).max())
    if not math.isfinite(amax):
        return E8M0_NAN, np.full(row.shape, spec(element).nan_code, np.uint8)
    emax = info.etype.emax
    if rule == "floor":
        scale = float(gfloat.compute_scale_amax(emax, row))
    elif rule == "even":
        m, exponent = math.frexp(amax)
        up = 2 * m >= 2 - 2.0**-(info.etype.precision)  # precision = mbits + 1
        scale = 2.0 ** min(max(exponent - 1 + up - emax, -127), 127) if amax else 2.0**-127
    else:
        quotient = amax / (info.etype.max if rule == "rceil" else 2.0**emax)
        up = gfloat.RoundMode.TowardPositive
        scale = 2.0**-127 if quotient < 2.0**-127 else gfloat.round_float(info.stype, quotient, up, True)
    byte, *codes = gfloat.encode_block(info, scale, row / scale)
    return byte, np.array(codes, np.uint8)


# ---- fp8_1x128 and fp8_128x128 (section 5) -------------------------------------------------------------------------


def fp8_scales(a: ArrayLike, rule: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(encode multiplier, stored decode scale) for block amaxes `a`; rule `fp32` or `pow2`."""
    a = np.asarray(a, dtype=np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if rule == "fp32":
            enc = np.minimum(_F(448) / a, _TWO_126)
            dec = _F(1) / enc
        elif rule == "pow2":
            byte = np.clip(mx_scale(a, "e4m3", "rceil"), 1, 254).astype(np.int32)
            enc, dec = np.ldexp(_F(1), 127 - byte), np.ldexp(_F(1), byte - 127)
        else:
            raise ValueError(f"rule must be fp32 or pow2, not {rule!r}")
    one = np.where(a == 0, _F(1), NAN32)
    normal = np.isfinite(a) & (a != 0)
    return np.where(normal, enc, one), np.where(normal, dec, one)


def fp8_quantize(x: ArrayLike, rule: str = "fp32") -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Quantise blocks [..., n] to (decode scales [...], E4M3 codes [..., n]); n is 128, or 128*128 for a tile."""
    x = np.asarray(x, dtype=np.float32)
    enc, dec = fp8_scales(block_amax(x), rule)
    with np.errstate(invalid="ignore"):
        return dec, encode(x * enc[..., None], "e4m3")


def fp8_dequantize(scale: ArrayLike, codes: ArrayLike, element: str = "e4m3") -> NDArray[np.float32]:
    """RN(value(code) * scale) for codes [..., n] under fp32 scales [...]; any NaN comes back as `NAN32`."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = decode(codes, element) * np.asarray(scale, dtype=np.float32)[..., None]
    return np.where(np.isnan(values), NAN32, values)


# ---- nvfp4 (section 6) ---------------------------------------------------------------------------------------------


class Nvfp4Scales(NamedTuple):
    """Every intermediate of section 6; t, s_b and enc_b have one entry per block or tile."""

    S_enc: np.float32
    S_dec: np.float32
    c6: np.float32
    t: NDArray[np.float32]
    s_b: NDArray[np.uint8]
    enc_b: NDArray[np.float32]


def nvfp4_scales(amax_b: ArrayLike, amax_t: float | np.float32 | None = None, rule: str = "nearest") -> Nvfp4Scales:
    """Scales for block amaxes `amax_b` under the tensor amax `amax_t` (by default their maximum).

    `numpy.minimum` propagates NaN, as the contract asks of both minima.
    """
    amax_b = np.asarray(amax_b, dtype=np.float32)
    amax_t = _F(amax_b.max(initial=_F(0)) if amax_t is None else amax_t)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if amax_t == 0:
            S_enc = _F(1)
        else:
            S_enc = np.minimum(_F(2688) / amax_t, _TWO_126) if np.isfinite(amax_t) else NAN32
        S_dec = NAN32 if np.isnan(S_enc) else _F(1) / S_enc
        c6 = S_enc * np.uint32(0x3E2AAAAB).view(np.float32)
        t = np.minimum(amax_b * c6, _F(448))
        t = np.where(np.isfinite(amax_b), t, NAN32)
        if rule == "nearest":
            s_b = encode(t, "e4m3")
        elif rule == "up":
            s_b = np.where(np.isnan(t), 0x7F, np.searchsorted(grid("e4m3"), t, side="left")).astype(np.uint8)
        else:
            raise ValueError(f"rule must be nearest or up, not {rule!r}")
        enc_b = np.minimum(_F(1) / (decode(s_b, "e4m3") * S_dec), _FLT_MAX)
    return Nvfp4Scales(S_enc, S_dec, c6, t, s_b, enc_b)


def nvfp4_quantize(
    x: ArrayLike,
    amax_t: float | np.float32 | None = None,
    rule: str = "nearest",
    tile: tuple[int, int] = (1, 16),
    R: ArrayLike | None = None,
) -> tuple[np.float32, NDArray[np.uint8], NDArray[np.uint8]]:
    """Quantise a matrix [rows, K] to (S_dec, E4M3 block scales on the tile grid, unpacked codes [rows, K]).

    `tile` is (1, 16) or (16, 16), `rule` the rounding of the block scale, `R` [rows, K] the words for stochastic
    rounding. Overflow of x * enc_b to Inf saturates like any other large value.
    """
    x = np.asarray(x, dtype=np.float32)
    blocks = to_blocks(x, tile)
    s = nvfp4_scales(block_amax(blocks), amax_t, rule)
    with np.errstate(invalid="ignore", over="ignore"):
        v = from_blocks(blocks * s.enc_b[..., None], tile, x.shape)
    return s.S_dec, s.s_b, encode(v, "e2m1") if R is None else encode_sr(v, "e2m1", R)


def nvfp4_dequantize(
    S_dec: float | np.float32, s_b: ArrayLike, codes: ArrayLike, tile: tuple[int, int] = (1, 16)
) -> NDArray[np.float32]:
    """RN((value(code) * value(s_b)) * S_dec), the inner product being exact; a NaN scale yields `NAN32`."""
    codes = np.asarray(codes, dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        inner = decode(to_blocks(codes, tile), "e2m1") * decode(s_b, "e4m3")[..., None]
        values = from_blocks(inner * _F(S_dec), tile, codes.shape)
    return np.where(np.isnan(values), NAN32, values)
