"""Precompilation: the list of kernels is complete, has each kernel once, and a launch finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from triton import knobs

from aot.compiled import CAN_COMPILE, compiled_for
from blockscale import quantize, quantize_both
from blockscale.bench.shapes import MODELS
from blockscale.casts._kernels import cast_kernel
from blockscale.diagnostics import precompile
from blockscale.gemm.heuristics import TILES, Problem, candidates, choose, stream_k_plan
from blockscale.hardware import CPU, Capability, capability, compiling_for, sm_count
from blockscale.registry import Request

_hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
pytestmark = pytest.mark.skipif(
    not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"
)

HOPPER = precompile.Target(Capability("cuda", 90))
LLAMA = [(n, k) for k, n in MODELS["Llama3 8B"]]
SMALL = Request("cast", HOPPER.capability, ("fp8_1x128",), (16, 256), torch.bfloat16, ("mn_major",))


@contextmanager
def keys() -> Iterator[set[tuple[str, str]]]:
    """Context with the names and keys of the kernels that launches in it would compile."""
    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn: object, **_: object) -> bool:
        seen.add((fn.name, key))  # type: ignore[attr-defined]
        return True

    with compiled_for(90), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        yield seen


@contextmanager
def fresh() -> Iterator[Path]:
    """Empty kernel caches, in memory and on disk."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        forget()
        yield Path(folder)
        forget()


def forget() -> None:
    cast_kernel.device_caches.clear()
    _hopper.scaled_mm_kernel.device_caches.clear()


@pytest.mark.parametrize("model", MODELS)
def test_every_model_needs_few_kernels(model: str) -> None:
    layers = [(n, k) for k, n in MODELS[model]]
    calls = precompile.needed(precompile.layer_requests(layers, HOPPER), HOPPER)
    assert {"triton", "hopper"} <= {call.backend for call in calls} <= {"triton", "hopper", "hopper_rows"}
    assert all(call.kernels for call in calls)
    products = [call for call in calls if call.request.op == "gemm"]
    assert 5 <= len(products) <= 20
    assert len(calls) <= 64
    again = precompile.needed([call.request for call in calls], HOPPER)
    assert again == calls, "each call needs a kernel of its own"


def test_inference_needs_less_and_given_tokens_fewer() -> None:
    every = precompile.needed(precompile.layer_requests(LLAMA, HOPPER), HOPPER)
    forward = precompile.needed(precompile.layer_requests(LLAMA, HOPPER, training=False), HOPPER)
    assert {call.request.op for call in every} == {"cast", "cast_both", "gemm"}
    assert {call.request.op for call in forward} == {"cast", "gemm"}
    assert len(forward) < len(every)
    one = precompile.layer_requests(LLAMA, HOPPER, tokens=[4096], training=False)
    assert {request.shape[0] for request in one if request.formats == ("fp8_1x128", "fp8_128x128")} == {4096}


def test_every_token_count_uses_a_precompiled_kernel() -> None:
    """The product, over every count up to 2048 and some above; casts of both kinds, up to 1024 and some above."""
    n, k = 4096, 1024
    calls = precompile.needed(precompile.layer_requests([(n, k)], HOPPER), HOPPER)
    with compiling_for(HOPPER.capability):
        made = {_hopper.precompile_key(call.request) for call in calls if call.request.op == "gemm"}
        for m in (*range(1, 2049), 4095, 4096, 6001, 12345, 16384):
            for request in precompile.layer_requests([(n, k)], HOPPER, tokens=[m]):
                if request.op == "gemm":
                    assert _hopper.precompile_key(request) in made, str(request)
    with keys() as seen:
        for call in calls:
            if call.request.op != "gemm":
                with compiling_for(HOPPER.capability):
                    precompile._launch(call.request, precompile.select(call.request))
        compiled = set(seen)
        for m in (*range(1, 1025), 1500, 2047, 2048, 3000, 4095, 4096, 6000):
            x = torch.empty(m, k, dtype=torch.bfloat16)
            quantize(x, "fp8_1x128")
            quantize_both(x, "fp8_1x128", "fp8_1x128")
            assert seen == compiled, f"{m} tokens"


def step(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, multiply: Callable[..., None]) -> None:
    """Forward and backward of a linear layer, with wgrad accumulated into a buffer."""
    x_row, x_col = quantize_both(x, "fp8_1x128", "fp8_1x128")
    dy_row, dy_col = quantize_both(dy, "fp8_1x128", "fp8_1x128")
    w_row, w_col = quantize_both(w, "fp8_128x128", "fp8_128x128")
    multiply(x_row, w_row, torch.empty_like(dy), bias=None, accumulate=False)
    multiply(dy_row, w_col.mT, torch.empty_like(x), bias=None, accumulate=False)
    buffer = torch.zeros(w.shape, device=w.device)
    multiply(dy_col.mT, x_col.mT, buffer, bias=None, accumulate=True)


@pytest.mark.parametrize(("tokens", "n", "k"), [(16, 640, 384), (48, 640, 384), (1040, 640, 384), (999, 331, 1)])
def test_a_training_step_needs_no_other_kernel(tokens: int, n: int, k: int) -> None:
    """With real operands of casts, transposed ones too."""
    compiled: set[tuple[str, str]] = set()
    with compiling_for(HOPPER.capability), precompile._compiler(HOPPER) as keys_of:
        for request in precompile.layer_requests([(n, k)], HOPPER):
            compiled |= keys_of(request, precompile.select(request))
    with keys() as seen:
        x, w, dy = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((tokens, k), (n, k), (tokens, n)))
        step(x, w, dy, _hopper.scaled_mm)
        assert len(seen) >= 4
        assert seen <= compiled


@pytest.mark.gpu
@pytest.mark.sm90
def test_on_a_gpu_the_first_step_compiles_nothing() -> None:
    n, k, tokens = 640, 384, 48
    gpu = torch.device("cuda", 0)
    target = precompile.Target(capability(gpu), sm_count(gpu))
    with fresh():
        for call in precompile.needed(precompile.layer_requests([(n, k)], target, tokens=[tokens]), target):
            precompile.compile_call(call.request, target)
        forget()
        hits: list[bool] = []
        with knobs.compilation.scope():
            knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
            x, w, dy = (
                torch.zeros(shape, dtype=torch.bfloat16, device=gpu) for shape in ((tokens, k), (n, k), (tokens, n))
            )
            step(x, w, dy, _hopper.scaled_mm)
            torch.cuda.synchronize()
        assert hits
        assert all(hits)


@pytest.mark.parametrize(
    ("formats", "kernels"),
    [
        (("nvfp4", "nvfp4_16x16"), {"amax_kernel", "cast_kernel"}),
        (("mxfp8_e4m3", "mxfp8_e4m3_128x128"), {"cast_kernel", "scaled_mm_mx_kernel"}),
    ],
    ids=["nvfp4", "mxfp8"],
)
def test_other_formats_compile_casts_and_name_the_backend_of_products(
    formats: tuple[str, str], kernels: set[str]
) -> None:
    requests = precompile.layer_requests([(512, 256)], HOPPER, tokens=[64], formats=formats)
    calls = precompile.needed(requests, HOPPER)
    names = {name for call in calls for name in call.kernels}
    assert names == kernels
    assert {call.backend for call in calls if not call.kernels} == {"torch"}


def test_another_gpu_has_other_kernels() -> None:
    ampere = precompile.Target(Capability("cuda", 80))
    calls = precompile.needed(precompile.layer_requests([(512, 256)], ampere, tokens=[64]), ampere)
    assert {call.request.op for call in calls if call.kernels} == {"cast", "cast_both"}
    assert {call.backend for call in calls if not call.kernels} == {"reference"}


def test_meta_tensors_stand_for_a_gpu_only_inside_the_context() -> None:
    meta = torch.device("meta")
    assert capability(meta) == Capability("meta")
    with compiling_for(HOPPER.capability, 78):
        assert (capability(meta), sm_count(meta)) == (HOPPER.capability, 78)
        with compiling_for(Capability("cuda", 100), 148):
            assert sm_count(meta) == 148
        assert (capability(meta), sm_count(meta)) == (HOPPER.capability, 78)
        assert capability("cpu") == CPU
    assert (capability(meta), sm_count(meta)) == (Capability("meta"), 132)


def test_a_plan_can_be_given() -> None:
    """Each plan of a product has a kernel of its own, and the model's has that of the ordinary call."""
    problem = Problem(300, 512, 1024, False, False, HOPPER.sms)
    request = precompile.product_request(problem, HOPPER)
    with HOPPER.compiling(), precompile._compiler(HOPPER) as keys_of:
        usual = keys_of(request, precompile.select(request))
        found = {plan: keys_of(request, precompile._with_plan(plan)) for plan, _ in candidates(problem)}
    assert found[choose(problem)[0]] == usual
    assert len(set(map(frozenset, found.values()))) == len(found) > 6
    added = precompile.product_request(replace(problem, b_1x128=True, fp32_out=True, accumulate=True), HOPPER)
    assert added in precompile.layer_requests([(300, 512)], HOPPER, tokens=[1024])


def test_listing_compiles_nothing() -> None:
    with fresh() as folder:
        precompile.needed([SMALL], HOPPER)
        assert list(folder.rglob("*")) == []


@pytest.mark.slow
def test_a_launch_finds_precompiled_kernels() -> None:
    with fresh() as folder:
        first = precompile.compile_call(SMALL, HOPPER)
        assert (first.kernels, first.found) == (1, 0)
        forget()
        second = precompile.compile_call(SMALL, HOPPER)
        assert (second.kernels, second.found) == (1, 1)
        forget()
        hits: list[bool] = []
        with compiled_for(90), knobs.compilation.scope():
            knobs.cache.dir = str(folder)
            knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
            quantize(torch.zeros(48, 256, dtype=torch.bfloat16), "fp8_1x128")
        assert hits == [True]


@pytest.mark.slow
def test_processes_compile_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gemm = precompile.layer_requests([(256, 128)], HOPPER, tokens=[16], training=False)[-1]
    assert gemm.op == "gemm"
    plan = stream_k_plan(TILES[-1], Problem(16, 256, 1024, False, False, HOPPER.sms))
    assert plan is not None
    done = list(precompile.compile_all([SMALL, gemm], HOPPER, 2, [None, plan]))
    assert {item.request.op for item in done} == {"cast", "gemm"}
    assert all((item.kernels, item.found) == (1, 0) for item in done)
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_obstacles_to_precompilation_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precompile.obstacle() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert precompile.obstacle() == "triton is not installed"


def test_a_layer_without_a_plan_of_hopper() -> None:
    """The vendor's kernel serves weights on the left but not this K: the list names the backend."""
    formats, layouts = ("fp8_128x128", "fp8_1x128"), ("grid", "mn_major")
    odd = replace(SMALL, op="gemm", formats=formats, shape=(64, 64, 24), layouts=layouts)
    (call,) = precompile.needed([odd], HOPPER)
    assert (call.backend, call.kernels) == ("reference", ())
