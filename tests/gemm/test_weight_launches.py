"""Launches of the weight-only kernel without a GPU: requests that it refuses, forecasts, counters of a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import blockscale as bs
from blockscale.gemm import pack_weight
from blockscale.gemm.packed_ops import packed_request
from blockscale.gemm.weight_only import weight_only_request
from blockscale.hardware import Capability
from blockscale.registry import Kernel, Request, kernels

_weights = pytest.importorskip("blockscale.gemm._hopper_weights", reason="this Triton has no Gluon for Hopper")
HOPPER = Capability("cuda", 90)


def entry() -> Kernel:
    return next(each for each in kernels("gemm") if each.backend == "hopper_weights")


def request(m: int, *, dtype: torch.dtype = torch.bfloat16, packed: bool = True, where: Capability = HOPPER) -> Request:
    q, x = bs.quantize(torch.zeros(64, 96), "mxfp4"), torch.zeros(m, 96, dtype=dtype)
    if packed:
        made = packed_request(x, pack_weight(q), torch.bfloat16, bias=False)
    else:
        made = weight_only_request(x, q, torch.bfloat16, bias=False)
    return Request(made.op, where, made.formats, made.shape, made.dtype, made.layouts, made.options)


def test_requests() -> None:
    for m in (1, 64, 65, 256):
        assert entry().refusal(request(m)) is None
    for refused, why in (
        (request(257), "at most 256 rows"),
        (request(0), "no empty operands"),
        (request(1, dtype=torch.float16), "does not serve fp16 @ mxfp4"),
        (request(1, packed=False), "packed by pack_weight"),
        (request(1, where=Capability("cuda", 100)), "needs sm_90"),
        (request(1, where=Capability("cpu", 0)), "runs on cuda"),
    ):
        reason = entry().refusal(refused)
        assert reason is not None
        assert why in reason


def test_only_if_forced() -> None:
    """It has never run on a GPU."""
    assert entry().forced_only
    assert entry().deferral(request(1)) == "only if forced"


def test_forecast() -> None:
    assert entry().forecast is not None
    found = entry().forecast(request(16))
    assert found.bound_us < found.us < 20
    assert "256x16" in found.configuration


def test_launches_of_a_capture_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: dict[int, int | None]
    captures, device = {7: 1, 8: 1}, torch.device("cuda")
    stream = SimpleNamespace(cuda_stream=7)
    zeros = torch.zeros
    monkeypatch.setattr(_weights, "_COUNTERS", {})
    monkeypatch.setattr(_weights, "capture_id", captures.get)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    first = _weights._counters(device)
    assert not first.any()
    assert _weights._counters(device) is first
    stream.cuda_stream = 8  # a branch of the same graph
    other = _weights._counters(device)
    assert other is not first
    stream.cuda_stream, captures[7] = 7, 2  # the next graph
    assert _weights._counters(device) is not first
    captures[7] = None  # a driver that does not tell
    assert _weights._counters(device) is not _weights._counters(device)
    capturing = False
    eager = _weights._counters(device)
    assert eager is _weights._counters(device)
    assert eager is not first
    capturing, captures[7] = True, 3
    assert _weights._counters(device) is not eager
    assert _weights._counters(torch.device("cpu")) is not _weights._counters(torch.device("cpu"))
