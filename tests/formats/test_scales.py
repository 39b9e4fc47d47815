"""Scale rules: each over every bf16 amax, and over full binades of mantissas, against exact oracles and onnx."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale.formats import ELEMENTS
from blockscale.formats.scales import (
    e8m0_decode,
    e8m0_reciprocal,
    fp8_scale,
    magnitude_bits,
    mx_scale,
    nvfp4_block_scale,
    nvfp4_tensor_scale,
)
from support.helpers import bits, first_of, same_bits

pytest.importorskip("ml_dtypes", reason="the exact scale oracles take the facts of an element from ml_dtypes")

NON_NEGATIVE_BF16 = np.arange(1 << 15, dtype=np.uint32) << 16
BINADES = (1, 120, 127, 200, 253)
"""Biased exponents: where scales clamp at byte 00, ordinary ones, and the last but one."""


def patterns(values: NDArray, device: torch.device) -> torch.Tensor:
    """fp32 values or their patterns as the int32 tensor that the scale functions take."""
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int32).copy()).to(device)


def mx_bytes(amax: NDArray, element: str, rule: str, device: torch.device, *, satfinite: bool = False) -> NDArray:
    byte, factor = mx_scale(patterns(amax, device), ELEMENTS[element], rule, satfinite=satfinite)
    same_bits(bits(factor), bits(e8m0_reciprocal(byte)))
    return bits(byte)


def amax_samples(element: str) -> NDArray[np.float32]:
    """Every bf16 amax, NaN included, and the thresholds of every rule in every binade with their neighbours."""
    edge = [oracles.block_amax(blocks) for blocks in oracles.edge_blocks(element).values()]
    words = np.random.default_rng(0).integers(0, 1 << 31, 1 << 20, dtype=np.uint32)
    return np.concatenate((NON_NEGATIVE_BF16.view(np.float32), *edge, words.view(np.float32)))


# ---- E8M0 ----------------------------------------------------------------------------------------------------------


def test_e8m0_decode_every_byte(device: torch.device, compared: Counter[str]) -> None:
    byte = np.arange(256, dtype=np.uint8)
    got = bits(e8m0_decode(torch.from_numpy(byte).to(device)))
    compared["ml_dtypes e8m0 decode"] += same_bits(got, oracles.e8m0_decode(byte))
    assert (got[0], got[255]) == (0x00400000, 0x7FC00000)


def test_e8m0_reciprocal_is_exact(device: torch.device) -> None:
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    got = e8m0_reciprocal(byte).cpu().tolist()
    assert got[:255] == [math.ldexp(1.0, 127 - b) for b in range(255)]
    assert math.isnan(got[255])


def test_magnitude_bits_rank_nan_over_inf_over_finite(device: torch.device) -> None:
    rising = [0.0, -1e-45, 1.0, -3e38, float("inf"), float("nan")]
    ranked = magnitude_bits(torch.tensor(rising, device=device)).tolist()
    assert ranked == sorted(set(ranked))
    assert magnitude_bits(torch.tensor([-0.0], device=device)).item() == 0


# ---- MX ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("rule", oracles.MX_RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_rules_equal_the_exact_oracle(
    element: str, rule: str, satfinite: bool, device: torch.device, compared: Counter[str]
) -> None:
    amax = amax_samples(element)
    got = mx_bytes(amax, element, rule, device, satfinite=satfinite)
    compared[f"exact mx {rule} scale"] += same_bits(got, oracles.mx_scale(amax, element, rule, satfinite))
    infinite = np.isinf(amax)
    assert infinite.any()
    assert set(got[infinite].tolist()) == {0xFE if satfinite else 0xFF}
    assert set(got[np.isnan(amax)].tolist()) == {0xFF}


@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_rules_equal_onnx(element: str, rule: str, device: torch.device, compared: Counter[str]) -> None:
    pytest.importorskip("onnx", reason="the scale oracle is onnx")
    amax = amax_samples(element)
    got = mx_bytes(amax, element, rule, device)
    compared[f"onnx mx {rule} scale"] += same_bits(got, oracles.onnx_mx_scale(amax, element, rule))


# an element sets a threshold of mantissas, and a binade is added to the exponent: one with all of the other
@pytest.mark.parametrize(
    ("element", "binade"),
    first_of(itertools.product(ELEMENTS, BINADES), lambda case: case[0] == "e4m3" or case[1] == 127),
)
def test_rceil_on_all_mantissas(element: str, binade: int, device: torch.device, compared: Counter[str]) -> None:
    """The rule that logarithms get wrong a few ulp above a power of two times the largest code."""
    amax = np.arange(binade << 23, (binade + 1) << 23, dtype=np.uint32).view(np.float32)
    got = mx_bytes(amax, element, "rceil", device)
    compared["exact mx rceil scale"] += same_bits(got, oracles.mx_scale(amax, element, "rceil"))


# floor and ceil know an element by its largest exponent alone, even also by its mantissa bits
@pytest.mark.parametrize(
    ("element", "rule"),
    first_of(
        itertools.product(ELEMENTS, ["floor", "ceil", "even"]), lambda case: case[0] == "e4m3" or case[1] == "even"
    ),
)
def test_other_rules_on_all_mantissas(element: str, rule: str, device: torch.device, compared: Counter[str]) -> None:
    amax = np.arange(127 << 23, 128 << 23, dtype=np.uint32).view(np.float32)
    got = mx_bytes(amax, element, rule, device)
    compared[f"exact mx {rule} scale"] += same_bits(got, oracles.mx_scale(amax, element, rule))


@pytest.mark.parametrize("element", ELEMENTS)
def test_even_equals_its_frexp_form(element: str, device: torch.device, compared: Counter[str]) -> None:
    """The formula of the contract's section 14, by numpy's frexp."""
    amax = amax_samples(element)
    amax = amax[np.isfinite(amax) & (amax > 0)]
    facts = oracles.spec(element)
    m, exponent = np.frexp(amax.astype(np.float64))
    up = 2 * m >= 2 - 2.0 ** -(facts.mbits + 1)
    want = np.clip(exponent - 1 + up - facts.emax + 127, 0, 254).astype(np.uint8)
    compared["frexp mx even scale"] += same_bits(mx_bytes(amax, element, "even", device), want)


@pytest.mark.parametrize(
    ("element", "highest"), [("e4m3", 0xF7), ("e5m2", 0xF0), ("e3m2", 0xFB), ("e2m3", 0xFD), ("e2m1", 0xFD)]
)
def test_highest_byte_of_finite_input(element: str, highest: int, device: torch.device) -> None:
    largest = np.array([0x7F7FFFFF, 0x7F7F0000], np.uint32)
    for rule in ("rceil", "ceil", "even"):
        assert mx_bytes(largest, element, rule, device).tolist() == [highest] * 2
    assert mx_bytes(largest, element, "floor", device).tolist() == [highest - 1] * 2


# ---- FP8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
def test_fp8_scales(rule: str, device: torch.device, compared: Counter[str]) -> None:
    edge = [oracles.block_amax(blocks) for blocks in oracles.fp8_edge_blocks().values()]
    binade = np.arange(127 << 23, 128 << 23, dtype=np.uint32).view(np.float32)
    amax = np.concatenate((amax_samples("e4m3"), *edge, binade))
    dec, enc = fp8_scale(patterns(amax, device), rule)
    want_enc, want_dec = oracles.fp8_scales(amax, rule)
    same_bits(bits(dec), want_dec, "dec")
    same_bits(bits(enc), want_enc, "enc")
    compared[f"numpy fp8 {rule} scale"] += amax.size
    # every stored scale is a normal number or the canonical NaN
    assert set(np.unique(bits(dec) >> 23)) <= {*range(1, 255), 0xFF}
    assert (bits(dec)[~np.isfinite(amax)] == 0x7FC00000).all()


def test_fp8_encode_factor_is_correctly_rounded(device: torch.device) -> None:
    """448 / a, and the reciprocal of that, by exact rational arithmetic on both sides of every result."""
    rng = np.random.default_rng(4)
    amax = (rng.integers(30, 220, 300) << 23 | rng.integers(0, 1 << 23, 300)).astype(np.uint32).view(np.float32)
    dec, enc = (t.cpu().numpy() for t in fp8_scale(patterns(amax, device), "fp32"))
    for a, got, back in zip(amax, enc, dec, strict=True):
        assert nearest(got, Fraction(448) / Fraction(float(a)))
        assert nearest(back, 1 / Fraction(float(got)))


def nearest(got: np.float32, exact: Fraction) -> bool:
    """Whether no fp32 number is closer to `exact`."""
    error = abs(Fraction(float(got)) - exact)
    around = (np.nextafter(got, np.float32(s * np.inf), dtype=np.float32) for s in (-1, 1))
    return all(error <= abs(Fraction(float(n)) - exact) for n in around)


# ---- NVFP4 ---------------------------------------------------------------------------------------------------------


def tensor_amaxes() -> NDArray[np.float32]:
    """Zero, subnormals, the 2^126 bound (3.2e-35), ordinary ones, FLT_MAX, Inf and NaN."""
    bound = np.float32(2688 * 2.0**-126)
    special = [0, 2.0**-149, 1e-42, 1e-38, 1e-35, bound, 1e-30, 0.5, 1, 3, 2688, 1e30, 3e38, np.inf, np.nan]
    around = [np.nextafter(bound, np.float32(s)) for s in (0, 1)]
    return np.array([*special, *around, np.finfo(np.float32).max], np.float32)


def test_nvfp4_tensor_scale(device: torch.device, compared: Counter[str]) -> None:
    amax = np.concatenate((NON_NEGATIVE_BF16.view(np.float32)[::17], tensor_amaxes()))
    dec, enc = nvfp4_tensor_scale(patterns(amax, device))
    want = [oracles.nvfp4_scales(np.zeros(1, np.float32), a) for a in amax]
    same_bits(bits(dec), np.array([w.S_dec for w in want], np.float32))
    same_bits(bits(enc), np.array([w.S_enc for w in want], np.float32))
    compared["numpy nvfp4 tensor scale"] += amax.size


@pytest.mark.parametrize("rule", ["nearest", "up"])
def test_nvfp4_block_scale(rule: str, device: torch.device, compared: Counter[str]) -> None:
    """Every bf16 block amax, and a million others, under each of many tensor amaxes."""
    words = np.random.default_rng(5).integers(0, 1 << 31, 1 << 16, dtype=np.uint32).view(np.float32)
    block = np.concatenate((NON_NEGATIVE_BF16.view(np.float32), words))
    for tensor_amax in tensor_amaxes():
        pair = nvfp4_tensor_scale(patterns(np.array([tensor_amax]), device))
        near = np.random.default_rng(6).random(1 << 14) * 2.0 ** -(np.arange(1 << 14) % 22)
        near = (near * np.nan_to_num(np.float64(tensor_amax), posinf=1)).astype(np.float32)
        amax = np.concatenate((block, near, np.float32([tensor_amax, tensor_amax / 6, tensor_amax / 2688])))
        byte, factor = nvfp4_block_scale(patterns(amax, device), pair, rule)
        want = oracles.nvfp4_scales(amax, tensor_amax, rule)
        same_bits(bits(byte), want.s_b, (tensor_amax, "byte"))
        # a NaN factor is never stored, so its payload is not specified
        got, factor_nan = bits(factor), np.isnan(want.enc_b)
        same_bits(got[~factor_nan], want.enc_b[~factor_nan], (tensor_amax, "factor"))
        assert np.isnan(got[factor_nan].view(np.float32)).all()
        compared[f"numpy nvfp4 {rule} block scale"] += amax.size


def test_nvfp4_up_never_lies_below(device: torch.device) -> None:
    """The smallest E4M3 number at or above t: no block below its own tensor amax is lost or clipped."""
    one = np.float32(1)
    amax = np.linspace(2.0**-20, 1, 200_001, dtype=np.float32)
    pair = nvfp4_tensor_scale(patterns(np.array([one]), device))
    byte, _ = nvfp4_block_scale(patterns(amax, device), pair, "up")
    byte = bits(byte)
    wanted = np.minimum(amax * oracles.nvfp4_scales(amax, one).c6, np.float32(448))
    assert (oracles.decode(byte, "e4m3") >= wanted).all()
    assert (oracles.decode(byte - 1, "e4m3") < wanted).all()
    assert byte.min() == 1
