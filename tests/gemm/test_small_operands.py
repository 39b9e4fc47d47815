"""FP8 GEMM of tiny operands: the product of two fp32 scales becomes subnormal and loses accuracy.

The bound is in docs/numerics.md, section 11, deviation 4.
"""

from __future__ import annotations

import math

import pytest
import torch

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats.tensor import BlockScaled
from blockscale.gemm import exact_mm
from support.products import gaussian

PAIRS = [("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")]
# the table of docs/numerics.md: Gaussian operands times 2^e, dB
TABLE = {
    ("fp8_1x128", "fp8_128x128"): {-60: 101, -61: 89, -62: 77, -63: 65, -64: 53, -66: 29},
    ("fp8_1x128", "fp8_1x128"): {-60: 97, -61: 85, -62: 73, -63: 61, -64: 49, -66: 25},
}
# least product of the amax of two multiplied blocks at which a GEMM keeps the gate of 80 dB
SAFE = 1.5e-36


def operands(pair: tuple[str, str], e: int, rule: str = "fp32") -> tuple[BlockScaled, BlockScaled]:
    x, w = (gaussian(256, 1024, seed=seed).float() * 2.0**e for seed in (0, 1))
    return bs.quantize(x, pair[0], scale_rule=rule), bs.quantize(w, pair[1], scale_rule=rule)


def accuracy(a: BlockScaled, b: BlockScaled) -> float:
    return sqnr_db(exact_mm(a, b), bs.scaled_mm(a, b, torch.float32)).item()


def smallest(a: BlockScaled, b: BlockScaled) -> float:
    """Least exact product of the scales of two multiplied blocks."""
    scales = a.plain_scale().double().amin(0), b.plain_scale().double().amin(0)
    return (scales[0] * scales[1]).min().item()


@pytest.mark.parametrize("pair", PAIRS, ids="@".join)
@pytest.mark.parametrize("e", [0, -40, -50, -56, -58, -60])
def test_operands_of_the_documented_sizes_keep_the_gate(pair: tuple[str, str], e: int):
    a, b = operands(pair, e)
    assert smallest(a, b) * 448**2 >= SAFE, "within the documented range"
    assert accuracy(a, b) >= 80


@pytest.mark.parametrize("pair", PAIRS, ids="@".join)
@pytest.mark.parametrize("e", [-56, -60, -62, -64, -66])
def test_the_error_is_within_half_a_subnormal_of_each_scale_product(pair: tuple[str, str], e: int):
    """The documented bound: 2^-150 over the least product of two scales, and 2^-24 if that is normal."""
    a, b = operands(pair, e)
    assert accuracy(a, b) >= -20 * math.log10(max(2.0**-24, 2.0**-150 / smallest(a, b)))


@pytest.mark.parametrize("pair", PAIRS, ids="@".join)
def test_accuracy_of_smaller_operands_is_as_documented(pair: tuple[str, str]):
    for e, want in TABLE[pair].items():
        assert accuracy(*operands(pair, e)) == pytest.approx(want, abs=1)
    a, b = operands(pair, -72)
    assert not bs.scaled_mm(a, b, torch.float32).any(), "scale products below 2^-150 are zero"
    assert exact_mm(a, b).any()


@pytest.mark.parametrize("pair", PAIRS, ids="@".join)
def test_power_of_two_scales_keep_accuracy(pair: tuple[str, str]):
    assert accuracy(*operands(pair, -64, "pow2")) >= 140


@pytest.mark.parametrize("pair", PAIRS, ids="@".join)
def test_scaling_an_operand_before_the_cast_restores_accuracy(pair: tuple[str, str]):
    """Multiplying one operand by 2^40 and the result by 2^-40 is exact, and restores the accuracy of the gate."""
    a, b = operands(pair, -64)
    x = bs.dequantize(a, torch.float32)
    larger = bs.quantize(x * 2.0**40, pair[0])
    y = bs.scaled_mm(larger, b, torch.float32).double() * 2.0**-40
    assert sqnr_db(exact_mm(larger, b) * 2.0**-40, y).item() >= 80
