"""Shares of a step's time: GPU kernels as profiler events, classified by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from blockscale.train import breakdown as breakdowns
from blockscale.train.breakdown import breakdown


def test_a_cpu_has_no_shares():
    assert breakdown(lambda: None) == breakdowns.Breakdown({}, {}, None)


def test_kernels_are_added_by_name(monkeypatch: pytest.MonkeyPatch):
    """GPU kernels as profiler events, among operators of the host."""
    kernels = [("cast_kernel", 30.0), ("nvjet_tst_128x256", 100.0), ("nvjet_tst_128x256", 50.0), ("fused_adamw", 20.0)]
    events = [SimpleNamespace(name=name, device_type="DeviceType.CUDA", device_time_total=us) for name, us in kernels]
    events.append(SimpleNamespace(name="aten::mm", device_type="DeviceType.CPU", device_time_total=7.0))
    ranges = {"name": "Optimizer.step#AdamW.step", "device_time_total": 20.0, "is_user_annotation": True}
    events.append(SimpleNamespace(device_type="DeviceType.CUDA", **ranges))
    monkeypatch.setattr(breakdowns, "_recorded", lambda work, path: events)
    found = breakdown(lambda: None)
    assert found.longest == {"nvjet_tst_128x256": 0.75, "cast_kernel": 0.15, "fused_adamw": 0.1}
    assert found.shares == {"products": 0.75, "casts": 0.15, "attention": 0.0, "other": 0.1}
    assert found.kernel_ms == pytest.approx(0.2)


def test_our_kernels_are_listed_by_operator(monkeypatch: pytest.MonkeyPatch):
    """Two operators launch the same kernel; a third launch of it belongs to neither."""

    def launched_by(name: str, us: float) -> SimpleNamespace:
        kernels = [SimpleNamespace(name="cast_kernel", device=0, duration=us)]
        return SimpleNamespace(name=name, device_type="DeviceType.CPU", device_time_total=us, kernels=kernels)

    events = [
        SimpleNamespace(name="cast_kernel", device_type="DeviceType.CUDA", device_time_total=us) for us in (10, 20, 30)
    ]
    operators = [("blockscale::quantize_both", 10.0), ("blockscale::swiglu_quantize", 20.0), ("aten::mm", 30.0)]
    events += [launched_by(*each) for each in operators]
    monkeypatch.setattr(breakdowns, "_recorded", lambda work, path: events)
    found = breakdown(lambda: None)
    assert found.shares["casts"] == 1
    assert found.longest == pytest.approx(
        {"cast_kernel": 1 / 2, "cast_kernel of swiglu_quantize": 1 / 3, "cast_kernel of quantize_both": 1 / 6}
    )


def test_names_that_begin_alike_are_one_kernel(monkeypatch: pytest.MonkeyPatch):
    """A truncated name has the sum of all kernels that share it."""
    events = [
        SimpleNamespace(name="k" * 100 + end, device_type="DeviceType.CUDA", device_time_total=us)
        for end, us in (("a", 60.0), ("b", 40.0))
    ]
    monkeypatch.setattr(breakdowns, "_recorded", lambda work, path: events)
    assert breakdown(lambda: None).longest == {"k" * 72: 1.0}
