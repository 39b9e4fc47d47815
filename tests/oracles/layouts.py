"""Packing and scale layouts (section 9). Layouts move bytes, never values."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def _grouped(codes: ArrayLike, n: int) -> NDArray[np.uint32]:
    """Rows of codes as [..., groups, n]; the row tail is filled with code 0."""
    codes = np.asarray(codes, dtype=np.uint8)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % n)])
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // n, n).astype(np.uint32)


def pack_fp4(codes: ArrayLike) -> NDArray[np.uint8]:
    """Two codes per byte along the last axis, the even element in the low nibble."""
    pairs = _grouped(codes, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)


def unpack_fp4(packed: ArrayLike, K: int) -> NDArray[np.uint8]:
    """Inverse of `pack_fp4` for rows of `K` codes."""
    packed = np.asarray(packed, dtype=np.uint8)
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)[..., :K]


def pack_fp6(codes: ArrayLike) -> NDArray[np.uint8]:
    """Four codes in three bytes, little endian: w = c0 | c1 << 6 | c2 << 12 | c3 << 18."""
    c = _grouped(codes, 4)
    w = c[..., 0] | c[..., 1] << 6 | c[..., 2] << 12 | c[..., 3] << 18
    packed = np.stack((w & 255, w >> 8 & 255, w >> 16), axis=-1).astype(np.uint8)
    return packed.reshape(*w.shape[:-1], w.shape[-1] * 3)


def unpack_fp6(packed: ArrayLike, K: int) -> NDArray[np.uint8]:
    """Inverse of `pack_fp6` for rows of `K` codes."""
    b = _grouped(packed, 3)
    w = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    codes = np.stack([w >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1).astype(np.uint8)
    return codes.reshape(*w.shape[:-1], w.shape[-1] * 4)[..., :K]


def blocked_offset(r: ArrayLike, c: ArrayLike, C: int) -> NDArray[np.int64]:
    """Byte offset of the scale at row `r`, column `c` of a grid with `C` columns in the swizzled 32x4x4 layout."""
    r, c = np.asarray(r, dtype=np.int64), np.asarray(c, dtype=np.int64)
    return 512 * (r // 128 * -(-C // 4) + c // 4) + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def swizzle_32_4_4(scales: ArrayLike) -> NDArray[np.uint8]:
    """A plain scale grid [rows, C] as the flat swizzled buffer: padded to 128 x 4, pad bytes 00."""
    scales = np.asarray(scales, dtype=np.uint8)
    rows, C = scales.shape
    out = np.zeros(-(-rows // 128) * -(-C // 4) * 512, np.uint8)
    r, c = np.indices(scales.shape)
    out[blocked_offset(r, c, C)] = scales
    return out


def mn_major_index(m: ArrayLike, kb: ArrayLike, M: int) -> NDArray[np.int64]:
    """Index of the 1x128 scale of row `m` and K block `kb` in the MN-major buffer [K blocks, align(M, 4)]."""
    return np.asarray(kb, dtype=np.int64) * (-(-M // 4) * 4) + np.asarray(m, dtype=np.int64)


def mn_major(scales: ArrayLike) -> NDArray[np.float32]:
    """A plain fp32 scale grid [M, K blocks] as the MN-major buffer [K blocks, align(M, 4)], pads 0.0."""
    scales = np.asarray(scales, dtype=np.float32)
    M, kbs = scales.shape
    out = np.zeros((kbs, -(-M // 4) * 4), np.float32)
    m, kb = np.indices(scales.shape)
    out.reshape(-1)[mn_major_index(m, kb, M)] = scales
    return out
