"""What `measure` says of a cast, on tensors whose answer can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

import blockscale as bs
from blockscale.diagnostics import measure
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import FORMATS
from support.products import gaussian


def test_sqnr_is_its_formula(device):
    reference = torch.tensor([3.0, 4.0], device=device)
    value = torch.tensor([3.0, 4.5], device=device)
    assert sqnr_db(reference, value).item() == 20.0  # |ref| = 5, |error| = 0.5
    assert sqnr_db(reference, reference).item() == math.inf
    assert sqnr_db(reference, torch.zeros_like(reference)).item() == 0.0
    assert sqnr_db(reference, torch.full_like(reference, torch.nan)).isnan()


def test_sqnr_is_computed_in_fp64(device):
    """One part in 2^30 is lost in fp32."""
    reference = torch.ones(4, dtype=torch.float64, device=device)
    assert sqnr_db(reference, reference + 2.0**-30).item() == pytest.approx(20 * 30 * math.log10(2), abs=1e-6)


def test_clipped_counts_values_beyond_the_largest_code(device):
    """E2M1 under `floor`: 7 and 6.5 lie beyond 6 * 2^0, the rest does not."""
    x = torch.ones(2, 64, device=device)
    x[0, 0], x[0, 1], x[1, 40] = 7.0, -6.5, 6.0
    found = measure(x, bs.quantize(x, "mxfp4", scale_rule="floor"))
    assert found.clipped.item() == 2 / 128
    assert measure(x, bs.quantize(x, "mxfp4", scale_rule="rceil")).clipped.item() == 0
    assert found.underflow.item() == 0
    assert found.poisoned.item() == 0


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_clips_under_the_rules_that_round_up(device, name):
    rule = {"mx": "rceil", "nvfp4": "up", "fp8": "fp32"}[FORMATS[name].family]
    for axis in (-1, -2):
        x = gaussian(60, 70, device=device)
        found = measure(x, bs.quantize(x, name, axis=axis, scale_rule=rule))
        assert found.clipped.item() == 0.0


@pytest.mark.parametrize(("name", "share"), [("mxfp8_e4m3", 0.17), ("mxfp6_e2m3", 0.09), ("mxfp4", 0.30)])
def test_floor_clips_the_share_of_block_maxima_that_the_contract_quotes(device, name, share):
    """docs/numerics.md, section 4: the block maximum clips in 17, 9 and 30 % of Gaussian blocks."""
    x = gaussian(512, 1024, device=device).float()
    q = bs.quantize(x, name, scale_rule="floor")
    limit = torch.exp2(q.scale.view(torch.uint8).double() - 127) * q.spec.element.max_normal
    beyond = x.double().abs().view(512, 32, 32) > limit[..., None]
    assert beyond.any(-1).double().mean().item() == pytest.approx(share, abs=0.01)
    assert measure(x, q).clipped.item() == beyond.double().mean().item()


def test_underflow_counts_nonzero_values_that_became_zero(device):
    x = torch.zeros(1, 32, device=device)
    x[0, :4] = torch.tensor([6.0, 0.3, 0.2, -0.1])  # half the smallest code is 0.25
    found = measure(x, bs.quantize(x, "mxfp4"))
    assert found.underflow.item() == 2 / 4


def test_a_zero_tensor_has_no_underflow(device):
    x = torch.zeros(4, 64, device=device)
    for name in FORMATS:
        found = measure(x, bs.quantize(x, name))
        assert (found.clipped.item(), found.underflow.item(), found.poisoned.item()) == (0.0, 0.0, 0.0)


def test_an_nvfp4_block_that_is_lost_counts_as_underflow(device):
    x = torch.zeros(1, 32, device=device)
    x[0, :16], x[0, 16:] = 1.0, 2.0**-20
    assert measure(x, bs.quantize(x, "nvfp4")).underflow.item() == 0.5
    assert measure(x, bs.quantize(x, "nvfp4", scale_rule="up")).underflow.item() == 0.0


def test_poisoned_counts_blocks(device):
    x = gaussian(4, 128, device=device)
    x[1, 5] = torch.nan
    x[2, 100] = torch.inf
    found = measure(x, bs.quantize(x, "mxfp8_e4m3"))
    assert found.poisoned.item() == 2 / 16
    assert found.sqnr_db.isnan()
    assert measure(x, bs.quantize(x, "nvfp4")).poisoned.item() == 1.0
    assert measure(x, bs.quantize(x, "fp8_128x128")).poisoned.item() == 1.0


@pytest.mark.parametrize("name", FORMATS)
def test_both_axes_and_leading_dimensions(device, name):
    x = gaussian(3, 40, 40, device=device)
    along = measure(x, bs.quantize(x, name, axis=-1))
    across = measure(x.mT, bs.quantize(x.mT, name, axis=-2))
    for field in ("sqnr_db", "clipped", "underflow", "poisoned"):
        got, want = getattr(across, field), getattr(along, field)
        assert got.device.type == device.type
        assert got.dim() == 0
        # the same numbers, summed in another order
        assert got.item() == pytest.approx(want.item(), rel=1e-12)


def test_a_scale_per_leading_index(device):
    x = gaussian(3, 40, 64, device=device)
    x[1] *= 2.0**-12
    together = measure(x[1:2], bs.quantize(x[1:2], "nvfp4"))
    apart = measure(x, bs.quantize(x, "nvfp4", amax="group"))
    tensor = measure(x, bs.quantize(x, "nvfp4"))
    assert apart.underflow.item() < tensor.underflow.item()
    assert together.underflow.item() < 0.1
    assert apart.clipped.item() < 0.05


# dB of one cast of Gaussian data, docs/numerics.md sections 4 to 7
@pytest.mark.parametrize(
    ("name", "rule", "want"),
    [
        ("mxfp8_e4m3", "rceil", 31.5),
        ("mxfp8_e4m3", "floor", 30.6),
        ("mxfp8_e4m3_128x128", "rceil", 31.5),
        ("mxfp4", "floor", 18.8),
        ("mxfp4", "rceil", 18.8),
        ("mxfp4", "ceil", 16.8),
        ("mxfp4", "even", 19.0),
        ("fp8_1x128", "fp32", 31.8),
        ("fp8_1x128", "pow2", 31.5),
        ("nvfp4", "nearest", 20.4),
        ("nvfp4_16x16", "nearest", 19.1),
    ],
)
def test_figures_that_the_contract_quotes(device, name, rule, want):
    x = gaussian(512, 1024, device=device)
    assert measure(x, bs.quantize(x, name, scale_rule=rule)).sqnr_db.item() == pytest.approx(want, abs=0.1)
