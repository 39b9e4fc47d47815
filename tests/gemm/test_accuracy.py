"""Gate B of docs/numerics.md: casts and GEMM together, against a float64 GEMM of the bf16 inputs.

The gate is the true value less 0.5 dB. More than 0.5 dB above the true value would be a bug in this test.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import blockscale as bs
from blockscale import CastSpec, Stochastic, rng_state
from blockscale.diagnostics.quality import sqnr_db
from support.products import gaussian

M, N, K = 256, 256, 2048
MARGIN = 0.5


@dataclass(frozen=True)
class Cast:
    """Cast options of one operand; stochastic: the role whose stream is used, None for nearest."""

    format: str
    rule: str | None = None
    stochastic: str | None = None
    hadamard: bool = False

    def spec(self, device: torch.device) -> CastSpec:
        rounding = Stochastic(rng_state(0, device=device), "layers.0") if self.stochastic else "nearest"
        return CastSpec(self.format, self.rule, rounding, self.hadamard, self.stochastic)


def both(*args: object) -> tuple[Cast, Cast]:
    return Cast(*args), Cast(*args)


# true value in dB, gate in dB, operands: the table of section 12, column "Gaussian"
TABLE: dict[str, tuple[float, float, tuple[Cast, Cast]]] = {
    "fp8 1x128 by 128x128": (28.7, 28.2, (Cast("fp8_1x128"), Cast("fp8_128x128"))),
    "fp8 1x128 by 128x128 pow2": (28.5, 28.0, (Cast("fp8_1x128", "pow2"), Cast("fp8_128x128", "pow2"))),
    "fp8 1x128 by 1x128": (28.8, 28.3, both("fp8_1x128")),
    "fp8 1x128 by 1x128 pow2": (28.5, 28.0, both("fp8_1x128", "pow2")),
    "mxfp8_e4m3": (28.5, 28.0, both("mxfp8_e4m3")),
    "mxfp8_e4m3 by 128x128": (28.5, 28.0, (Cast("mxfp8_e4m3"), Cast("mxfp8_e4m3_128x128"))),
    "mxfp8_e5m2": (22.5, 22.0, both("mxfp8_e5m2")),
    "mxfp6_e3m2": (22.5, 22.0, both("mxfp6_e3m2")),
    "mxfp6_e2m3": (27.9, 27.4, both("mxfp6_e2m3")),
    "mxfp4": (16.0, 15.5, both("mxfp4")),
    "mxfp4 rceil": (15.8, 15.3, both("mxfp4", "rceil")),
    "mxfp4 dgrad": (14.0, 13.5, (Cast("mxfp4", stochastic="dgrad_dy"), Cast("mxfp4"))),
    "mxfp4 wgrad": (14.1, 13.6, (Cast("mxfp4", stochastic="wgrad_dy", hadamard=True), Cast("mxfp4", hadamard=True))),
    "nvfp4": (17.4, 16.9, both("nvfp4")),
    "nvfp4 by 16x16": (16.7, 16.2, (Cast("nvfp4"), Cast("nvfp4_16x16"))),
    "nvfp4 dgrad": (15.0, 14.5, (Cast("nvfp4", stochastic="dgrad_dy"), Cast("nvfp4_16x16"))),
    "nvfp4 dgrad up": (14.6, 14.1, (Cast("nvfp4", "up", "dgrad_dy"), Cast("nvfp4_16x16"))),
    "nvfp4 wgrad": (15.5, 15.0, (Cast("nvfp4", stochastic="wgrad_dy", hadamard=True), Cast("nvfp4", hadamard=True))),
    "nvfp4 wgrad up": (15.1, 14.6, (Cast("nvfp4", "up", "wgrad_dy", True), Cast("nvfp4", hadamard=True))),
}


def end_to_end(casts: tuple[Cast, Cast], device: torch.device, m: int = M, n: int = N, k: int = K) -> float:
    x, w = gaussian(m, k, device=device, seed=10), gaussian(n, k, device=device, seed=11)
    a, b = bs.quantize(x, casts[0].spec(device)), bs.quantize(w, casts[1].spec(device))
    return sqnr_db(x.double() @ w.double().mT, bs.scaled_mm(a, b, torch.float32)).item()


@pytest.mark.parametrize("name", TABLE)
def test_gate_b(device, name, record_property):
    true, gate, casts = TABLE[name]
    found = end_to_end(casts, device)
    record_property("sqnr_db", round(found, 2))
    assert gate <= found <= true + MARGIN
    # the table itself: a gate is its true value less the margin
    assert gate == pytest.approx(true - MARGIN)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (both("mxfp8_e4m3", "floor"), "mxfp8_e4m3"),
        (both("mxfp4", "ceil"), "mxfp4"),
        ((Cast("nvfp4_16x16"), Cast("nvfp4_16x16")), "nvfp4"),
        (both("mxfp8_e5m2"), "mxfp8_e4m3"),
        ((Cast("mxfp4", stochastic="dgrad_dy"), Cast("mxfp4", stochastic="dgrad_w")), "mxfp4 dgrad"),
    ],
    ids=["floor for rceil", "ceil for even", "16x16 for 1x16", "e5m2 for e4m3", "stochastic twice"],
)
def test_the_gate_rejects_a_worse_cast(device, wrong, right):
    """Control: a gate that passes these casts would be useless."""
    assert end_to_end(wrong, device) < TABLE[right][1]


def test_floor_rule_has_its_measured_accuracy(device):
    assert end_to_end(both("mxfp8_e4m3", "floor"), device) == pytest.approx(27.6, abs=0.1)


# calc_diff of the table's Gaussian column, and 10^(-dB/10) / 2
@pytest.mark.parametrize(("name", "want"), [("mxfp8_e4m3", 7.1e-4), ("nvfp4", 9.0e-3), ("mxfp4", 1.25e-2)])
def test_calc_diff_agrees(device, name, want):
    x, w = gaussian(M, K, device=device, seed=10), gaussian(N, K, device=device, seed=11)
    y = bs.scaled_mm(bs.quantize(x, name), bs.quantize(w, name), torch.float32).double()
    true = x.double() @ w.double().mT
    calc_diff = (1 - 2 * (true * y).sum() / (true.square().sum() + y.square().sum())).item()
    assert calc_diff == pytest.approx(want, rel=0.05)
