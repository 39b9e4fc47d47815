"""Element codes: encode and decode against ml_dtypes and gfloat, on tens of millions of fp32 patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale.formats import ELEMENTS, decode, encode, grid
from blockscale.formats.scales import e8m0_decode
from support.helpers import bits, expand, f32, golden, same_bits, u8

pytest.importorskip("ml_dtypes", reason="the element oracle is ml_dtypes")

CHUNK = 1 << 21
EIGHT_BIT = ("e4m3", "e5m2")


def encoded(values: NDArray[np.float32], element: str, device: torch.device) -> NDArray[np.uint8]:
    return bits(encode(torch.from_numpy(values).to(device), ELEMENTS[element]))


def check(patterns: NDArray[np.uint32], element: str, device: torch.device) -> int:
    values = patterns.view(np.float32)
    return same_bits(encoded(values, element, device), oracles.encode(values, element), element)


def strided_patterns(stride: int) -> Iterator[NDArray[np.uint32]]:
    """Every `stride`-th of the 2^32 fp32 patterns, in chunks; an odd stride walks through all low mantissa bits."""
    count = (1 << 32) // stride
    for first in range(0, count, CHUNK):
        yield (np.arange(first, min(first + CHUNK, count), dtype=np.uint64) * np.uint64(stride)).astype(np.uint32)


# ---- to nearest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_every_bf16_pattern(element: str, device: torch.device, compared: Counter[str]) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32) << 16
    compared[f"ml_dtypes {element} encode"] += check(patterns, element, device)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_around_every_rounding_point(element: str, device: torch.device, compared: Counter[str]) -> None:
    """Codes and midpoints have at most five significant bits, so each is a bf16 pattern: all of those, +-2 ulp."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
    compared[f"ml_dtypes {element} encode"] += check((upper[:, None] | lower).reshape(-1), element, device)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_codes_and_midpoints(element: str, device: torch.device, compared: Counter[str]) -> None:
    values = oracles.edge_values(element)
    compared[f"ml_dtypes {element} encode"] += check(values.view(np.uint32), element, device)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_strided_fp32_patterns(element: str, device: torch.device, compared: Counter[str]) -> None:
    """47 million patterns for 8-bit elements, 17 million for the narrower ones."""
    for patterns in strided_patterns(91 if element in EIGHT_BIT else 251):
        compared[f"ml_dtypes {element} encode"] += check(patterns, element, device)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_equals_gfloat(element: str, device: torch.device, compared: Counter[str]) -> None:
    gfloat = pytest.importorskip("gfloat", reason="the specification oracle is gfloat")
    info = getattr(pytest.importorskip("gfloat.formats"), f"format_info_ocp_{element}")
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, 2000, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(1000) * oracles.spec(element).max / 3).astype(np.float32)
    small = (rng.standard_normal(1000) * oracles.spec(element).min_subnormal * 4).astype(np.float32)
    values = np.concatenate((words, near, small))
    values = values[~np.isnan(values)]
    codes = encoded(values, element, device)
    for value, code in zip(values.tolist(), codes.tolist(), strict=True):
        rounded = gfloat.round_float(info, value, gfloat.RoundMode.TiesToEven, True)
        assert gfloat.encode_float(info, rounded) == code, value
    compared[f"gfloat {element} encode"] += values.size


@pytest.mark.parametrize(
    ("element", "code"), [("e4m3", 0x7F), ("e5m2", 0x7F), ("e2m3", 0x1F), ("e3m2", 0x1F), ("e2m1", 0x7)]
)
def test_nan_has_one_code(element: str, code: int, device: torch.device) -> None:
    """Quiet and signalling, of either sign and with any payload."""
    payloads = np.array([1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], np.uint32)
    patterns = np.concatenate((payloads | 0x7F800000, payloads | 0xFF800000))
    assert set(encoded(patterns.view(np.float32), element, device).tolist()) == {code}
    assert ELEMENTS[element].nan_code == code


@pytest.mark.parametrize("element", ELEMENTS)
def test_sign_of_zero_survives(element: str, device: torch.device) -> None:
    half = np.float32(oracles.spec(element).min_subnormal / 2)
    values = np.array([0.0, -0.0, half, -half, 1e-45, -1e-45], np.float32)
    sign = 1 << (ELEMENTS[element].bits - 1)
    assert encoded(values, element, device).tolist() == [0, sign] * 3


@pytest.mark.parametrize("element", ELEMENTS)
def test_infinities_saturate(element: str, device: torch.device) -> None:
    largest = len(oracles.grid(element)) - 1
    sign = 1 << (ELEMENTS[element].bits - 1)
    values = np.array([np.inf, -np.inf, np.finfo(np.float32).max], np.float32)
    assert encoded(values, element, device).tolist() == [largest, largest | sign, largest]


def test_encode_keeps_shape_and_input(device: torch.device) -> None:
    x = torch.randn(3, 1, 5, device=device)
    before = bits(x).copy()
    codes = encode(x, ELEMENTS["e4m3"])
    assert codes.shape == x.shape
    assert codes.dtype == torch.uint8
    same_bits(bits(x), before)
    assert encode(x[:0], ELEMENTS["e4m3"]).shape == (0, 1, 5)


# ---- decode --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ELEMENTS)
def test_decode_every_code(element: str, device: torch.device, compared: Counter[str]) -> None:
    codes = np.arange(1 << ELEMENTS[element].bits, dtype=np.uint8)
    values = bits(decode(torch.from_numpy(codes).to(device), ELEMENTS[element]))
    compared[f"ml_dtypes {element} decode"] += same_bits(values, oracles.decode(codes, element))


@pytest.mark.parametrize("element", ELEMENTS)
def test_decode_then_encode_is_the_identity(element: str, device: torch.device) -> None:
    codes = torch.arange(1 << ELEMENTS[element].bits, dtype=torch.uint8, device=device)
    values = decode(codes, ELEMENTS[element])
    finite = values.isfinite()
    assert finite.sum() == 2 * len(oracles.grid(element))
    same_bits(bits(encode(values[finite], ELEMENTS[element])), bits(codes[finite]))


@pytest.mark.parametrize("element", ELEMENTS)
def test_grid_and_facts(element: str) -> None:
    mine, theirs = ELEMENTS[element], oracles.spec(element)
    assert grid(mine) == oracles.grid(element).tolist()
    assert (mine.bits, mine.mbits, mine.emax, mine.emin) == (theirs.bits, theirs.mbits, theirs.emax, theirs.emin)
    assert (mine.max_normal, mine.min_subnormal) == (theirs.max, theirs.min_subnormal)


# ---- stochastic ----------------------------------------------------------------------------------------------------


def encode_sr(values: NDArray[np.float32], element: str, words: NDArray, device: torch.device) -> NDArray[np.uint8]:
    random = torch.from_numpy(words.astype(np.int64)).to(device)
    return bits(encode(torch.from_numpy(values).to(device), ELEMENTS[element], random))


@pytest.mark.parametrize("element", ELEMENTS)
def test_stochastic_encode(element: str, device: torch.device, compared: Counter[str]) -> None:
    """Any pattern with any word, then rounding points with the words that decide them."""
    rng = np.random.default_rng(1)
    for _ in range(4):
        v = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
        v[::2] = (rng.standard_normal(1 << 17) * oracles.spec(element).max / 2).astype(np.float32)
        v[1::8] = (rng.standard_normal(1 << 15) * oracles.spec(element).min_subnormal).astype(np.float32)
        words = rng.integers(0, 1 << 32, v.size, dtype=np.uint32)
        same = same_bits(encode_sr(v, element, words, device), oracles.encode_sr(v, element, words))
        compared[f"exact {element} stochastic encode"] += same
    v = oracles.edge_values(element)
    for word in (0, 1, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF):
        words = np.full(v.size, word, np.uint32)
        same = same_bits(encode_sr(v, element, words, device), oracles.encode_sr(v, element, words), hex(word))
        compared[f"exact {element} stochastic encode"] += same


@pytest.mark.parametrize("element", ELEMENTS)
def test_stochastic_encode_equals_gfloat(element: str, device: torch.device, compared: Counter[str]) -> None:
    pytest.importorskip("gfloat", reason="the specification oracle is gfloat")
    rng = np.random.default_rng(2)
    v = (rng.standard_normal(2000) * oracles.spec(element).max / 3).astype(np.float32)
    v[:500] *= np.float32(oracles.spec(element).min_subnormal / oracles.spec(element).max)
    words = rng.integers(0, 1 << 32, v.size, dtype=np.uint32)
    words[::7], words[1::7] = 0, 0xFFFFFFFF
    same = same_bits(encode_sr(v, element, words, device), oracles.gfloat_encode_sr(v, element, words))
    compared[f"gfloat {element} stochastic encode"] += same


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
@pytest.mark.parametrize("element", ELEMENTS)
def test_extreme_random_words(element: str, word: int, device: torch.device) -> None:
    """R = 0 takes every fraction of 2^-32 or more up in magnitude, R = FFFFFFFF none; exact values never move."""
    values = oracles.grid(element)
    codes = np.arange(len(values), dtype=np.uint8)
    words = np.full(len(values), word, np.uint32)
    same_bits(encode_sr(values.copy(), element, words, device), codes)
    above = np.nextafter(values[:-1], np.float32(np.inf), dtype=np.float32)
    above[0] = np.float32(oracles.spec(element).min_subnormal * 2.0**-32)  # the smallest fraction that can move
    same_bits(encode_sr(above, element, words[:-1], device), codes[:-1] + (word == 0))
    sign = np.uint8(1 << (ELEMENTS[element].bits - 1))
    same_bits(encode_sr(-above, element, words[:-1], device), (codes[:-1] + (word == 0)) | sign)


@pytest.mark.parametrize("element", ELEMENTS)
def test_stochastic_expectation_is_the_value(element: str, device: torch.device) -> None:
    """Within 4 standard errors of a binomial whose parameter is known exactly."""
    n = 1 << 18
    words = np.random.default_rng(3).integers(0, 1 << 32, n, dtype=np.uint32)
    facts = oracles.spec(element)
    for value in (0.3, -2.75, facts.min_subnormal * 0.1, facts.max * 0.99, -facts.max * 0.9701):
        v = np.float32(value)
        codes = encode_sr(np.full(n, v), element, words, device)
        values = oracles.decode(codes, element).astype(np.float64)
        low, high = values.min(), values.max()
        assert low <= v <= high
        if low == high:  # the value is on the grid
            assert v == low
            continue
        assert set(np.unique(values)) == {low, high}
        share = (float(v) - low) / (high - low)
        error = abs(values.mean() - float(v)) / (high - low)
        assert error <= 4 * (share * (1 - share) / n) ** 0.5


# ---- golden --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("elements"), ids=lambda case: f"{case['format']}: {case['name']}")
def test_golden(case: dict, device: torch.device) -> None:
    if case["op"] == "encode":
        same_bits(encoded(f32(case["x"]), case["format"], device), u8(case["expect"]["codes"]))
        return
    assert case["op"] == "decode"
    codes = torch.from_numpy(u8(case["codes"])).to(device)
    if case["format"] == "e8m0":
        values = e8m0_decode(codes)
    else:
        values = decode(codes, ELEMENTS[case["format"]])
    same_bits(bits(values), f32(case["expect"]["values"]))


SR_CASES = [case for case in golden("stochastic") if case["op"] == "encode_sr"]


@pytest.mark.parametrize("case", SR_CASES, ids=lambda case: case["name"])
def test_golden_stochastic(case: dict, device: torch.device) -> None:
    words = np.array(expand(case["R"]), np.uint32)
    same_bits(encode_sr(f32(case["x"]), case["format"], words, device), u8(case["expect"]["codes"]))
