"""`explain` names the kernel that the call itself takes, and gives a reason for every other one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import blockscale as bs
from blockscale import CastSpec, Stochastic, registry, rng_state
from blockscale.formats import FORMATS
from blockscale.hardware import Capability
from blockscale.registry import Explanation, Kernel
from support.products import ONE_D, gaussian, offsets, partner


def spied(call: Callable[[], object]) -> list[tuple[str, str]]:
    """(operation, summary) of every kernel that a call launches, without kernels that those kernels launch (a product
    may decode its operands first)."""
    seen: list[tuple[str, str]] = []
    inside = 0
    kept = {op: list(entries) for op, entries in registry._REGISTRY.items()}

    def spy(entry: Kernel) -> Kernel:
        def launch(*args, **named):
            nonlocal inside
            if not inside:
                seen.append((entry.op, entry.summary))
            inside += 1
            try:
                return entry.launch(*args, **named)
            finally:
                inside -= 1

        return replace(entry, launch=launch)

    for entries in registry._REGISTRY.values():
        entries[:] = map(spy, entries)
    registry._select.cache_clear()
    try:
        call()
    finally:
        for op, entries in kept.items():
            registry._REGISTRY[op][:] = entries
        registry._select.cache_clear()
    return seen


def taken(explanation: Explanation) -> tuple[str, str]:
    assert explanation.taken is not None
    return explanation.request.op, explanation.taken.summary


@pytest.mark.parametrize("name", FORMATS)
def test_it_names_what_runs(device, name):
    x = gaussian(48, 64, device=device)
    q, w = bs.quantize(x, name), bs.quantize(gaussian(32, 64, device=device), partner(name))
    acc = torch.zeros(48, 32, device=device)
    calls = [
        (lambda: bs.quantize(x, name), bs.explain("cast", x, name)),
        (lambda: bs.quantize_both(x, name, name), bs.explain("cast_both", x, name, name)),
        (lambda: bs.dequantize(q), bs.explain("dequantize", q)),
        (lambda: bs.scaled_mm(q, w), bs.explain("gemm", q, w)),
        (lambda: bs.scaled_mm(q, w, torch.float32), bs.explain("gemm", q, w, out_dtype=torch.float32)),
        (lambda: bs.scaled_mm(q, w, accumulate=acc), bs.explain("gemm", q, w, accumulate=True)),
        (lambda: bs.scaled_mm(x, w), bs.explain("gemm", x, w)),
        (lambda: bs.scaled_mm(x.float(), w, torch.float32), bs.explain("gemm", x.float(), w, out_dtype=torch.float32)),
    ]
    for call, explanation in calls:
        assert spied(call) == [taken(explanation)]


@pytest.mark.parametrize("name", ONE_D)
def test_it_names_what_runs_in_groups(device, name):
    offs = offsets([5, 0, 43], device)
    a = bs.quantize(gaussian(48, 64, device=device), name)
    b = bs.quantize(gaussian(3, 32, 64, device=device), name)
    tokens = bs.quantize(gaussian(48, 64, device=device), name, axis=-2, offs=offs).mT
    calls = [
        (lambda: bs.scaled_grouped_mm(a, b, offs), bs.explain("grouped", a, b, offs), "m_grouped"),
        (lambda: bs.scaled_grouped_mm(tokens, tokens, offs), bs.explain("grouped", tokens, tokens, offs), "k_grouped"),
    ]
    x = gaussian(48, 64, device=device)
    calls.append((lambda: bs.scaled_grouped_mm(x, b, offs), bs.explain("grouped", x, b, offs), "m_grouped"))
    for call, explanation, op in calls:
        assert explanation.request.op == op
        assert spied(call) == [taken(explanation)]


def test_it_names_what_runs_in_fused_casts(device):
    gate_up, grad = gaussian(48, 256, device=device), gaussian(48, 128, device=device)
    x, weight, offs = gaussian(30, 64, device=device), gaussian(64, device=device), offsets([5, 0, 43], device)
    indices = torch.randint(-1, 30, (48,), dtype=torch.int32, device=device)
    row, col = "mxfp8_e4m3", CastSpec("nvfp4", amax=torch.tensor(3.0, device=device))
    calls = [
        (lambda: bs.swiglu_quantize(gate_up, row), bs.explain("swiglu", gate_up, row)),
        (lambda: bs.swiglu_quantize_both(gate_up, row, col), bs.explain("swiglu_both", gate_up, row, col)),
        (
            lambda: bs.swiglu_quantize_both(gate_up, row, row, offs=offs),
            bs.explain("swiglu_both", gate_up, row, row, offs=offs),
        ),
        (
            lambda: bs.swiglu_backward_quantize_both(grad, gate_up, row, col),
            bs.explain("swiglu_backward_both", grad, gate_up, row, col),
        ),
        (
            lambda: bs.swiglu_backward_quantize_both(grad, gate_up, row, col, hidden=row),
            bs.explain("swiglu_backward_both", grad, gate_up, row, col, row),
        ),
        (lambda: bs.rmsnorm_quantize(x, weight, row), bs.explain("rmsnorm", x, weight, row)),
        (lambda: bs.rmsnorm_quantize_both(x, weight, row, col), bs.explain("rmsnorm_both", x, weight, row, col)),
        (lambda: bs.quantize_permute(x, indices, row), bs.explain("permute", x, indices, row)),
        (
            lambda: bs.permute_quantize_both(x, indices, offs, row, col),
            bs.explain("permute_both", x, indices, offs, row, col),
        ),
        (
            lambda: bs.permute_quantize_columns(x, indices, offs, col),
            bs.explain("permute_columns", x, indices, offs, col),
        ),
    ]
    for call, explanation in calls:
        assert spied(call) == [taken(explanation)]


def explain_backward(hidden: int):
    gate_up, grad = torch.empty(64, 2 * hidden, device="meta"), torch.empty(64, hidden, device="meta")
    return bs.explain("swiglu_backward_both", grad, gate_up, "mxfp4", "mxfp4", on=Capability("cuda", 90))


def test_a_fused_cast_that_triton_refuses():
    explanation = explain_backward(101)
    assert explanation.taken.backend == "reference"
    assert "needs an even hidden size, this is 101" in str(explanation)
    assert explanation.request.shape == (64, 202)


@pytest.mark.parametrize("hidden", [100, 2880, 10944, 18432])
def test_hidden_sizes_of_models_are_served_by_triton(hidden: int):
    assert explain_backward(hidden).taken.backend == "triton"


@pytest.mark.parametrize(
    ("op", "operands", "says"),
    [
        ("swiglu", (torch.zeros(4, 63), "mxfp4"), "shape (4, 63)"),
        ("swiglu_backward_both", (torch.zeros(4, 64), torch.zeros(4, 64), "mxfp4", "mxfp4"), "grad has shape (4, 64)"),
        ("rmsnorm", (torch.zeros(4, 64), torch.zeros(63), "mxfp4"), "weight has shape (63,)"),
        ("permute", (torch.zeros(4, 64), torch.zeros(3).int(), "fp8_128x128"), "quantize_permute to fp8_128x128"),
        ("permute_both", (torch.zeros(4, 64), torch.zeros(3).int(), "mxfp4", "mxfp4"), "operands (Tensor, Tensor, str"),
        ("swiglu_both", (torch.zeros(4, 64), "mxfp4"), "operands (Tensor, str)"),
        ("rmsnorm", (torch.zeros(4, 64), "mxfp4", torch.zeros(64)), "operands (Tensor, str, Tensor)"),
    ],
)
def test_fused_casts_are_checked_as_the_call_would(op, operands, says):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        bs.explain(op, *operands)
    assert says in str(caught.value)


def test_the_request_is_that_of_the_call():
    x = gaussian(48, 64)
    spec = CastSpec("mxfp4", rounding=Stochastic(rng_state(0), "layer"), role="dgrad_dy", hadamard=True)
    request = bs.explain("cast", x, spec).request
    assert request.options == {"stochastic", "hadamard"}
    assert (request.shape, request.dtype, request.formats) == ((48, 64), torch.bfloat16, ("mxfp4",))
    a, b = bs.quantize(x, "nvfp4"), bs.quantize(gaussian(32, 64), "nvfp4_16x16", scale_layout="blocked")
    request = bs.explain("gemm", a, b, out_dtype=torch.float16, bias=True).request
    assert request.shape == (48, 32, 64)
    assert request.layouts == ("plain", "blocked")
    assert request.options == {"bias"}
    assert request.dtype == torch.float16


def test_every_kernel_appears_with_a_reason():
    q = bs.quantize(gaussian(16, 128), "fp8_1x128")
    explanation = bs.explain("gemm", q, q)
    assert [each.backend for each in explanation.candidates] == [each.backend for each in registry.kernels("gemm")]
    assert all(each.reason and each.summary for each in explanation.candidates)
    assert explanation.taken.backend == "reference"
    assert str(explanation).splitlines()[0] == "gemm fp8_1x128 @ fp8_1x128 16x16x128 bfloat16 on cpu"
    marked = [line for line in str(explanation).splitlines() if line.startswith("->")]
    assert len(marked) == 1
    assert marked[0].startswith("-> reference")
    assert marked[0].endswith("best kernel that accepts")
    assert "runs on cuda, not on cpu" in str(explanation)


def test_it_launches_nothing():
    x = gaussian(16, 64)
    q = bs.quantize(x, "mxfp4")
    assert spied(lambda: (bs.explain("gemm", q, q), bs.explain("cast", x, "mxfp4"))) == []


def test_it_respects_a_forced_backend():
    q = bs.quantize(gaussian(16, 64), "mxfp4")
    with bs.use_backend("reference"):
        assert bs.explain("gemm", q, q).taken.backend == "reference"
    assert bs.explain("gemm", q, q).taken.backend == "torch"


def forecast_of(shape: tuple[int, int, int], weight: str = "fp8_128x128", **named: bool):
    m, n, k = shape
    a, b = (torch.empty(rows, k, device="meta") for rows in (m, n))
    operands = bs.quantize(a, "fp8_1x128"), bs.quantize(b, weight)
    return bs.explain("gemm", *operands, on=Capability("cuda", 90), **named)


def test_hopper_forecasts_its_product():
    pytest.importorskip("blockscale.gemm._hopper", reason="needs a triton with Gluon")
    explanation = forecast_of((8192, 8192, 8192))
    forecast = explanation.taken.forecast
    assert forecast.configuration.startswith("192x128, 3 warpgroups, 4 stages; 132 CTAs, ")
    assert 1000 < forecast.tflop_s < 1450
    assert forecast.bound_by.startswith("FP8 units")
    assert 0.5 < forecast.share < 1
    assert f"   {forecast}" in str(explanation).splitlines()
    few = forecast_of((16, 2112, 7168)).taken.forecast
    assert "then stream-K" in few.configuration
    assert few.bound_by.startswith("memory")
    assert few.us < 20
    assert "132 SMs" in few.note or torch.cuda.is_available()
    gradient = forecast_of((4096, 4096, 4096), "fp8_1x128", accumulate=True).taken.forecast
    assert gradient.us > forecast_of((4096, 4096, 4096), accumulate=True).taken.forecast.us
    plain = forecast_of((4096, 4096, 4096), "fp8_1x128").taken.forecast
    assert gradient.us > 1.1 * plain.us, "accumulation takes time"


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
def test_hopper_takes_any_size(weight):
    """An odd K costs what the next multiple of 128 does; an odd N a pass over the output, and explain says so."""
    pytest.importorskip("blockscale.gemm._hopper", reason="needs a triton with Gluon")
    even, odd = (forecast_of((7168, 2112, k), weight, accumulate=True).taken for k in (4096, 4095))
    assert (even.backend, odd.backend) == ("hopper", "hopper")
    assert odd.forecast.configuration == even.forecast.configuration
    assert odd.forecast.us == pytest.approx(even.forecast.us, rel=0.001)
    assert "a pass over the output" not in odd.forecast.note
    for named in ({}, {"accumulate": True}):
        passed = forecast_of((7168, 2111, 4095), weight, **named).taken
        assert passed.backend == "hopper"
        assert "a pass over the output, whose rows do not start at multiples of 16 bytes" in passed.forecast.note
    direct, passed = (forecast_of((7168, n, 4095), weight).taken.forecast.us for n in (2112, 2111))
    assert passed > direct + 2.5
    for m, n, k in ((1, 1, 1), (65, 15, 17), (128, 14335, 4096), (100, 10240, 8191)):
        assert forecast_of((m, n, k), weight).taken.backend in ("hopper", "hopper_rows")


def test_hopper_forecasts_its_mxfp8_product():
    pytest.importorskip("blockscale.gemm._hopper", reason="needs a triton with Gluon")
    a, b = (torch.empty(4096, 4096, device="meta") for _ in range(2))
    operands = bs.quantize(a, "mxfp8_e4m3"), bs.quantize(b, "mxfp8_e4m3_128x128")
    taken = bs.explain("gemm", *operands, on=Capability("cuda", 90)).taken
    assert taken.backend == "hopper"
    assert taken.forecast.configuration.startswith("128x128, 2 warpgroups, 5 stages; 132 CTAs")
    assert 600 < taken.forecast.tflop_s < 800


def test_kernels_that_refuse_or_have_no_model_have_no_forecast():
    explanation = forecast_of((64, 60, 0))
    assert [each.forecast for each in explanation.candidates] == [None] * len(explanation.candidates)
    assert "predicted" not in str(explanation)
