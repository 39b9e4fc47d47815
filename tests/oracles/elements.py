"""Element codes (section 3): one value to one code and back, through `ml_dtypes`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .third_party import third_party

ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
NAN32 = np.uint32(0x7FC00000).view(np.float32)
"""The canonical NaN: the only one that dequantisation and fp32 scales may contain."""
E8M0_NAN = 0xFF

# The contract's choice, so it cannot come from a library: E4M3 and E5M2 write 7F, formats without NaN +max normal.
_ML_DTYPE_AND_NAN_CODE = {
    "e4m3": ("float8_e4m3fn", 0x7F),
    "e5m2": ("float8_e5m2", 0x7F),
    "e2m3": ("float6_e2m3fn", 0x1F),
    "e3m2": ("float6_e3m2fn", 0x1F),
    "e2m1": ("float4_e2m1fn", 0x07),
}


@dataclass(frozen=True)
class Element:
    """Facts about an element type, as `ml_dtypes.finfo` states them (all but the NaN code)."""

    name: str
    dtype: np.dtype
    bits: int
    mbits: int
    emax: int
    emin: int
    max: float
    min_subnormal: float
    nan_code: int


@cache
def spec(element: str) -> Element:
    """Facts about `element`; `emax` and `emin` are the exponents of the largest and smallest normal number."""
    name, nan_code = _ML_DTYPE_AND_NAN_CODE[element]
    ml_dtypes = third_party("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name))
    info = ml_dtypes.finfo(dtype)
    largest = float(info.max)
    return Element(
        name=element,
        dtype=dtype,
        bits=info.bits,
        mbits=info.nmant,
        emax=int(np.frexp(largest)[1]) - 1,
        emin=int(np.frexp(float(info.smallest_normal))[1]) - 1,
        max=largest,
        min_subnormal=float(info.smallest_subnormal),
        nan_code=nan_code,
    )


def encode(v: ArrayLike, element: str) -> NDArray[np.uint8]:
    """Round fp32 values to `element`, nearest even and saturating; one code per byte.

    `ml_dtypes` overflows (E4M3 to NaN beyond 464, E5M2 to Inf), hence the clip: +-Inf becomes +-max. It also has
    its own NaN codes (7F or FF by sign for E4M3, 7E or FE for E5M2, a signed zero for FP6 and FP4), so NaN is
    written by hand. Casting from float32 matters: going through another type would round twice.
    """
    v = np.asarray(v, dtype=np.float32)
    e = spec(element)
    limit = np.float32(e.max)
    with np.errstate(invalid="ignore"):
        codes = np.clip(v, -limit, limit).astype(e.dtype).view(np.uint8)
    return np.where(np.isnan(v), np.uint8(e.nan_code), codes)


def decode(codes: ArrayLike, element: str) -> NDArray[np.float32]:
    """The fp32 value of every code (exact). NaN codes come back as `NAN32`, E5M2 7C and FC as +-Inf."""
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    values = codes.view(spec(element).dtype).astype(np.float32)
    return np.where(np.isnan(values), NAN32, values)


@cache
def grid(element: str) -> NDArray[np.float32]:
    """The non-negative finite values in increasing order; the index of a value is its code."""
    e = spec(element)
    values = decode(np.arange(1 << (e.bits - 1)), element)
    values = values[np.isfinite(values)]
    values.flags.writeable = False
    return values


def e8m0_decode(scale: ArrayLike) -> NDArray[np.float32]:
    """2^(byte-127) as fp32. Byte 00 is the subnormal 2^-127 and FF is NaN.

    Only the decoding direction of `ml_dtypes` is usable: its cast *to* E8M0 rounds to nearest and turns zero and
    negative values into NaN.
    """
    scale = np.ascontiguousarray(scale, dtype=np.uint8)
    values = scale.view(third_party("ml_dtypes").float8_e8m0fnu).astype(np.float32)
    return np.where(scale == E8M0_NAN, NAN32, values)


def to_bf16(v: ArrayLike) -> NDArray[np.uint16]:
    """Bit patterns of `v` rounded to bf16, nearest even."""
    return np.asarray(v, dtype=np.float32).astype(third_party("ml_dtypes").bfloat16).view(np.uint16)
