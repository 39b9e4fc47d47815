"""Inputs on which implementations go wrong (section 2), as float32 arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .elements import grid, spec

F32 = NDArray[np.float32]
FLT_MAX = np.finfo(np.float32).max
BF16_MAX = np.uint32(0x7F7F0000).view(np.float32)
EDGE_K = (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 127, 128, 129, 130, 300)
"""Contraction lengths off and on every block size; odd ones for fp4, K % 4 != 0 for fp6."""
EDGE_ROWS = (0, 1, 2, 5, 15, 16, 17, 31, 127, 128, 129)
"""Row (token) counts, with an empty operand and the tails of every tile."""


def _from_bits(*bits: int) -> F32:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def _neighbours(values: F32, ulps: int = 1) -> F32:
    """Non-negative finite `values` and everything within `ulps` of them; stays finite and non-negative."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.int64)
    around = (bits[:, None] + np.arange(-ulps, ulps + 1)).reshape(-1)
    return np.unique(around[(around >= 0) & (around < 0x7F800000)]).astype(np.uint32).view(np.float32)


def all_bf16() -> F32:
    """All 65536 bf16 bit patterns, NaN and Inf included, widened to fp32."""
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def edge_values(element: str) -> F32:
    """Values at which the rounding of one element changes, both signs.

    Every code value, every midpoint between neighbours (also zero and min subnormal, and max and the value that
    would follow it), each with its fp32 neighbours; then fp32 subnormals, FLT_MAX, Inf and NaN.
    """
    codes = grid(element).astype(np.float64)
    beyond = 2 * codes[-1] - codes[-2]
    points = np.append(codes, [beyond, 2 * codes[-1]])
    midpoints = (points[1:] + points[:-1]) / 2
    extra = _from_bits(0x00000001, 0x00000002, 0x00400000, 0x007FFFFF, 0x00800000, 0x7F7F0000, 0x7F7FFFFF)
    positive = _neighbours(np.concatenate((points, midpoints, extra)).astype(np.float32))
    positive = np.append(positive, np.float32(np.inf))
    return np.concatenate((positive, -positive, _from_bits(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)))


def _blocks_with_amax(amax: F32, block: int) -> F32:
    """One block per amax: the amax walks through the lanes with alternating sign, smaller values fill the rest."""
    amax = np.asarray(amax, dtype=np.float32)
    ratios = np.float32(0.83) ** np.arange(1, block + 1) * np.where(np.arange(block) % 3, 1, -1)
    out = (amax[:, None] * ratios).astype(np.float32)
    n = np.arange(len(amax))
    out[n, (n * 7) % block] = np.where(n % 2, -amax, amax)
    return out


def _padded(rows: list[list[float]], block: int) -> F32:
    out = np.zeros((len(rows), block), np.float32)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values[:block]
    return out


def edge_blocks(element: str = "e4m3", block: int = 32) -> dict[str, F32]:
    """Items 1 to 8 of section 2 as named groups of blocks [n, block]; about 4000 blocks in all.

    The thresholds belong to `element`: pass the element that is being quantised to (E4M3 for fp8_*, with block 128).
    """
    e = spec(element)
    last, middle = block - 1, block // 2
    groups = {
        "zero": np.zeros((1, block), np.float32),
        "negative_zero": np.full((1, block), -0.0, np.float32),
        "one_subnormal": _padded([[float(v)] for v in _from_bits(1, 0x80000001, 0x00400000, 0x007FFFFF)], block),
        "premature_bf16": _padded([[float(v), 1.0] for v in _from_bits(0x40600001, 0x43FFFFFF)], block),
        "huge": _padded([[float(FLT_MAX), 1.0], [-float(BF16_MAX), 1.0], [2.0**127, -(2.0**126)]], block),
    }
    tiny = [e.max * 2.0**-127, 2.0**-126, 2.0**-127, 2.0**-149]
    groups["tiny"] = _padded([[a, -a / 8, 2.0**-127, 2.0**-130] if a > 2.0**-127 else [a, -a / 8] for a in tiny], block)

    ordinary = _blocks_with_amax(np.float32([1.0]), block)[0]
    poisoned = []
    for bad in (np.nan, np.inf, -np.inf):
        for lane in (0, middle, last):
            poisoned.append(ordinary.copy())
            poisoned[-1][lane] = bad
    for nan_lane, inf_lane in ((0, last), (last, 0), (middle, middle - 1)):
        poisoned.append(ordinary.copy())
        poisoned[-1][[nan_lane, inf_lane]] = np.nan, np.inf
    groups["nonfinite"] = np.stack(poisoned)

    # Item 3: every binade, so that exponent arithmetic is exercised from the subnormals to FLT_MAX.
    with np.errstate(over="ignore"):
        k = np.arange(-160, 130)
        at_max = np.ldexp(e.max, k).astype(np.float32)
        above = (at_max.view(np.uint32).astype(np.int64)[:, None] + np.arange(-1, 9)).reshape(-1)
        powers = np.ldexp(1.0, k).astype(np.float32)
        even = np.ldexp(2.0 - 2.0 ** -(e.mbits + 1), k).astype(np.float32)
    amax_at_max = above[(above > 0) & (above < 0x7F800000)].astype(np.uint32).view(np.float32)
    groups["amax_at_max"] = _blocks_with_amax(amax_at_max, block)
    powers, even = powers[np.isfinite(powers)], even[np.isfinite(even)]
    groups["amax_at_power_of_two"] = _blocks_with_amax(_neighbours(powers), block)
    groups["amax_at_even_threshold"] = _blocks_with_amax(_neighbours(even), block)

    # Items 5 and 6: the scale is 1 (rceil, floor, even) because lane 0 holds max.
    values = edge_values(element)
    values = values[np.abs(values) <= e.max]
    values = np.append(values, np.zeros(-len(values) % last, np.float32)).reshape(-1, last)
    groups["codes_and_midpoints"] = np.concatenate((np.full((len(values), 1), e.max, np.float32), values), axis=1)
    return groups


def fp8_edge_blocks(block: int = 128) -> dict[str, F32]:
    """Item 10: amaxes around the 2^126 bound (5.3e-36) and subnormal amaxes, besides those of `edge_blocks`."""
    bound = np.float32(448 * 2.0**-126)
    return {
        **edge_blocks("e4m3", block),
        "bound": _blocks_with_amax(_neighbours(np.append(bound, bound * np.float32([0.5, 2]))), block),
        "subnormal": _blocks_with_amax(np.float32([1e-38, 1e-40, 1e-42, 2.0**-149]), block),
    }


def nvfp4_edge_tensors(seed: int = 0) -> dict[str, tuple[F32, np.float32 | None]]:
    """Item 9 and relatives: named (matrix, supplied amax_t or None)."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((4, 64)).astype(np.float32)
    unit = base / np.abs(base).max()
    out: dict[str, tuple[F32, np.float32 | None]] = {
        "zero": (np.zeros((3, 32), np.float32), None),
        "negative_zero": (np.full((3, 32), -0.0, np.float32), None),
        "t_rounds_above_448": (_padded([[3, -1.1, 0.4]], 48), None),
        "amax_t_smaller_than_data": (base, np.float32(0.5)),
        "amax_t_zero": (base, np.float32(0)),
        "amax_t_larger": (base, np.float32(1000)),
        "amax_t_nan": (base, np.float32(np.nan)),
        "amax_t_inf": (base, np.float32(np.inf)),
        "flt_max": (unit * FLT_MAX, None),
    }
    quiet = np.repeat(np.float32(2.0) ** -np.arange(0, 24, dtype=np.float32), 16)[None] * np.tile(base[0, :16], 24)
    out["quiet_blocks"] = (quiet.astype(np.float32), None)  # s_b passes through the E4M3 subnormals to 00
    for amax in (3e38, 1e-35, 1e-38, 1e-42, 2.0**-149):
        out[f"amax_t_{amax:.3g}"] = ((unit * np.float32(amax)).astype(np.float32), None)
    one_row = np.zeros((20, 24), np.float32)
    one_row[5] = base[0, :24]
    out["tile_with_one_row"] = (one_row, None)
    for name, bad in (("nan", np.nan), ("inf", np.inf), ("minus_inf", -np.inf)):
        poisoned = base.copy()
        poisoned[2, 37] = bad
        out[f"{name}_poisons_tensor"] = (poisoned, None)
        out[f"{name}_poisons_block"] = (poisoned, np.float32(4))
    return out


def random_blocks(blocks: int, block: int = 32, seed: int = 0, bf16: bool = False) -> F32:
    """Ordinary data in four equal parts: Gaussian, t(3), blocks over all fp32 binades, and Gaussian with zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((blocks, block))
    kind = np.arange(blocks) % 4
    x[kind == 1] = rng.standard_t(3, (int((kind == 1).sum()), block))
    x[kind == 2] *= 2.0 ** rng.integers(-149, 125, (int((kind == 2).sum()), 1))
    x[kind == 3] *= rng.random((int((kind == 3).sum()), block)) < 0.5
    x = x.astype(np.float32)
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if bf16 else x
