"""Stochastic rounding and the random Hadamard transform (sections 7, 8)."""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .elements import encode, spec
from .third_party import third_party

HADAMARD_MASKS = {16: 0xD7E8, 32: 0x6627E8D5}
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Philox4x32-10 (Salmon et al. 2011) of counters [..., 4] under keys [..., 2]: words [..., 4]."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, dtype=np.uint64), -1, 0)
    k0, k1 = np.moveaxis(np.asarray(key, dtype=np.uint64), -1, 0)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2  # 32 x 32 bits fit in 64
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def sr_bits(i: ArrayLike, seed: int, tick: int = 0, stream: int = 0, group: int = 0) -> NDArray[np.uint32]:
    """The 32 random bits of element `i` = row * n_cols + col of the unsharded tensor. Four elements share a counter."""
    i = np.asarray(i, dtype=np.uint64)
    counter = np.empty((*i.shape, 4), np.uint64)
    counter[..., 0] = (i >> np.uint64(2)) & _LOW
    counter[..., 1] = np.uint64(group << 16) | (i >> np.uint64(34))
    counter[..., 2] = tick & 0xFFFFFFFF
    counter[..., 3] = stream
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return np.take_along_axis(words, (i & np.uint64(3)).astype(np.int64)[..., None], axis=-1)[..., 0]


def plain_module_name(name: str) -> str:
    """`name` without the components wrappers add: compile, FSDP, checkpointing, then one leading `module` (DDP)."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def stream_id(name: str, role: int) -> int:
    """Stream of a module and role: 0 fprop-x, 1 fprop-w, 2 dgrad-dy, 3 dgrad-w, 4 wgrad-dy, 5 wgrad-x."""
    return (zlib.crc32(plain_module_name(name).encode()) & 0xFFFFFF) << 8 | role


def encode_sr(v: ArrayLike, element: str, R: ArrayLike) -> NDArray[np.uint8]:
    """Round fp32 values to `element` stochastically: up in magnitude iff R < floor(fraction * 2^32).

    The magnitude is split into quanta of the spacing at that value in exact float64; the rounded value is then a
    code value, so `encode` only looks it up. NaN and saturation are those of `encode`.
    """
    v = np.asarray(v, dtype=np.float32)
    e = spec(element)
    magnitude = np.minimum(np.abs(np.where(np.isnan(v), 0, v)).astype(np.float64), e.max)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, e.emin) - e.mbits
    quanta = np.ldexp(magnitude, -exponent)
    integer = np.floor(quanta)
    threshold = np.floor((quanta - integer) * 2.0**32).astype(np.uint64)
    up = np.asarray(R).astype(np.uint64) < threshold
    rounded = np.ldexp(integer + up, exponent).astype(np.float32)
    rounded = np.where(np.signbit(v), -rounded, rounded)
    return np.where(np.isnan(v), np.uint8(e.nan_code), encode(rounded, element))


def gfloat_encode_sr(v: ArrayLike, element: str, R: ArrayLike) -> NDArray[np.uint8]:
    """`encode_sr` by gfloat, one value at a time, for small arrays.

    Known deviation: gfloat adds fraction and random bits in float64, so a fraction needing more than 53 bits can round
    up to the threshold. That takes |v| < min_subnormal * 2^-30; such values are answered here by the exact rule.
    """
    gfloat, formats = third_party("gfloat"), third_party("gfloat.formats")
    e = spec(element)
    info = getattr(formats, f"format_info_ocp_{element}")
    mode = gfloat.RoundMode.StochasticFastest
    v, R = np.broadcast_arrays(np.asarray(v, dtype=np.float32), np.asarray(R))
    out = np.empty(v.shape, np.uint8)
    for index, value in np.ndenumerate(v):
        r, value = int(R[index]), float(value)
        quanta = abs(value) / e.min_subnormal
        if math.isnan(value):
            out[index] = e.nan_code
        elif quanta < 2.0**-30:
            sign = 0x80 >> (8 - e.bits) if math.copysign(1, value) < 0 else 0
            out[index] = sign | (r < math.floor(quanta * 2.0**32))
        else:
            rounded = gfloat.round_float(info, value, mode, True, srbits=0xFFFFFFFF - r, srnumbits=32)
            out[index] = gfloat.encode_float(info, rounded)
    return out


def hadamard(x: ArrayLike, mask: int, h: int | None = None) -> NDArray[np.float32]:
    """Random Hadamard transform along the last axis in groups of `h` (default: the full axis), rounded to bf16.

    The contract fixes fp32 butterflies with strides 1, 2, 4, ..., because a matrix product may sum in another order.
    A tail group is zero padded and returned in full: the last axis grows to a multiple of `h`. The values are
    bf16, held in float32.
    """
    x = np.asarray(x, dtype=np.float32)
    h = x.shape[-1] if h is None else h
    if h & (h - 1):
        raise ValueError(f"the group size must be a power of two, not {h}")
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % h)])
    signs = np.array([-1 if mask >> bit & 1 else 1 for bit in range(h)], np.float32)
    y = x.reshape(*x.shape[:-1], -1, h) * signs
    stride = 1
    while stride < h:
        for low in range(h):
            if not low & stride:
                a, b = y[..., low].copy(), y[..., low + stride].copy()
                y[..., low], y[..., low + stride] = a + b, a - b
        stride *= 2
    y = y * np.float32(1 / math.sqrt(h))
    return y.astype(third_party("ml_dtypes").bfloat16).astype(np.float32).reshape(x.shape)
