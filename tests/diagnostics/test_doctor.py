"""`doctor`: a sound machine passes, and every kind of broken kernel is found."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace

import pytest
import torch

import blockscale as bs
from blockscale import registry
from blockscale.casts import _reference as casts_reference
from blockscale.diagnostics import DoctorReport, doctor
from blockscale.formats import FORMATS
from blockscale.gemm import _reference as gemm_reference
from blockscale.grouped import _reference as grouped_reference
from blockscale.registry import kernel


@pytest.fixture
def broken(monkeypatch):
    """Register a kernel with the highest priority; the registry is restored after the test. Two formats are enough."""
    few = {name: FORMATS[name] for name in ("mxfp8_e4m3", "nvfp4")}
    monkeypatch.setattr(importlib.import_module("blockscale.diagnostics.doctor"), "FORMATS", few)
    kept = {op: list(entries) for op, entries in registry._REGISTRY.items()}

    def add(op: str, launch) -> None:
        kernel(op, "broken", devices=("cpu", "cuda"), priority=1000)(launch)

    yield add
    for op, entries in kept.items():
        registry._REGISTRY[op][:] = entries
    registry._select.cache_clear()
    assert "broken" not in registry.backends()


@pytest.fixture(scope="module")
def sound() -> DoctorReport:
    """One report of this machine's CPU, for the tests that only read it."""
    return doctor("cpu")


def failed(report: DoctorReport) -> set[str]:
    """First words of the names of the checks that failed."""
    return {check.name.split(",")[0].split(" ")[0] for check in report.checks if not check.passed}


def test_a_sound_machine(device):
    """As the command runs it: on a GPU with several processes, since kernels may have to be compiled."""
    report = doctor(device, workers=8 if device.type == "cuda" else 1)
    assert report.ok, str(report)
    assert report.to_dict()["ok"] is True
    # 7 s to 45 s alone; other workers compile kernels on the same cores
    assert report.seconds < (60 if device.type == "cpu" or "PYTEST_XDIST_WORKER" not in os.environ else 240)


def test_worker_processes_give_the_same_report(monkeypatch):
    """Also with a forced backend, which the workers must force too."""
    module = importlib.import_module("blockscale.diagnostics.doctor")
    # the first check runs in this process; without the forced backend another one serves mxfp4's products
    monkeypatch.setattr(module, "FORMATS", {name: FORMATS[name] for name in ("fp8_1x128", "mxfp4")})
    seen: list[str] = []
    with bs.use_backend("reference"):
        alone = doctor("cpu")
        monkeypatch.setattr(module, "_COMPILING_SECONDS", 0.0)
        together = doctor("cpu", workers=2, on_check=seen.append)
    assert together.choices == alone.choices
    assert [check.name for check in together.checks] == [check.name for check in alone.checks]
    assert together.ok
    assert len(seen) == module.check_count()
    assert "products of mxfp4" in seen


def test_a_process_that_dies_is_a_failed_check(monkeypatch):
    module = importlib.import_module("blockscale.diagnostics.doctor")
    monkeypatch.setattr(module, "FORMATS", {"mxfp4": FORMATS["mxfp4"]})
    monkeypatch.setattr(module, "force_backends", os._exit)
    assert doctor("cpu", workers=2).ok, "nothing was compiled, so no worker was started"
    monkeypatch.setattr(module, "_COMPILING_SECONDS", 0.0)
    report = doctor("cpu", workers=2)
    assert not report.ok
    first, *others = (f"{part} of mxfp4" for part in module.PARTS)
    assert {check.name for check in report.checks if not check.passed} == set(others), first
    assert "died before it answered" in str(report)


def test_it_covers_everything(sound):
    report = sound
    everywhere = {"cast", "cast_both", "dequantize", "gemm"}
    everywhere |= {"swiglu", "swiglu_both", "swiglu_backward_both", "rmsnorm", "rmsnorm_both"}
    one_d = {"m_grouped", "k_grouped", "permute", "permute_both", "permute_columns"}
    cells = {(choice.operation, choice.format) for choice in report.choices}
    for name, spec in FORMATS.items():
        wanted = everywhere if spec.is_2d else everywhere | one_d
        assert {operation for operation, form in cells if form == name} == wanted
        assert {operation for operation, form in cells if form == f"bf16 @ {name}"} == {"gemm", "m_grouped"}
        for plain in ("bf16", "fp16", "fp32"):
            ends = [check.name.split(" ")[0] for check in report.checks if check.name.endswith(f", {plain} @ {name}")]
            assert {*ends} == {"gemm", "m_grouped"}
        checked = {check.name.split(",")[0].split(" ")[0] for check in report.checks if check.name.endswith(name)}
        some = importlib.import_module("blockscale.diagnostics.selfcheck").FUSED_FORMATS
        fused = {"swiglu", "swiglu_backward", "rmsnorm", "permute"} if name in some else set()
        assert checked >= {"cast", "gemm"} | fused
    moves = {"permute_rows", "combine_rows", "combine_dots", "clear_rows", "place_rows", "transpose_codes"}
    assert {operation for operation, form in cells if form == "any"} == moves
    assert {check.name.split(",")[0] for check in report.checks if check.name.endswith(", any")} == moves
    assert everywhere | one_d | moves == set(registry.operations()), "an operation without a check"
    assert {c.name for c in report.checks if c.name.startswith("known bytes")} == {
        f"known bytes, {name}" for name in ("mxfp8_e4m3", "fp8_1x128", "mxfp4", "nvfp4")
    }
    assert all(choice.reason for choice in report.choices)
    assert all(check.detail for check in report.checks)


def test_choices_are_those_of_the_registry(sound):
    backends = {(choice.operation, choice.format): choice.backend for choice in sound.choices}
    assert backends["gemm", "mxfp4"] == backends["m_grouped", "nvfp4"] == "torch"
    assert backends["gemm", "fp8_1x128"] == backends["cast", "mxfp4"] == "reference"
    with bs.use_backend("reference"):
        assert {choice.backend for choice in doctor("cpu").choices} == {"reference"}


def test_figures_are_well_above_the_gate(sound):
    """A product that barely passes here would fail on the next machine; fp32 sums have 60 dB to spare."""
    figures = [float(c.detail.split(" dB")[0]) for c in sound.checks if " dB" in c.detail and "float32" in c.name]
    assert len(figures) >= len(FORMATS)
    assert min(figures) >= 120.0


def test_json_round_trip(sound):
    again = json.loads(json.dumps(sound.to_dict()))
    assert again["ok"] is True
    assert again["versions"]["torch"] == torch.__version__
    assert again["versions"]["blockscale"] == bs.__version__
    assert again["device"]["device"] == "cpu"


def test_text(sound):
    text = str(sound)
    assert f"blockscale {bs.__version__}" in text
    assert "FAIL" not in text
    assert all(name in text for name in FORMATS)


def test_hoppers_ptxas_is_named(sound, monkeypatch, tmp_path):
    assert sound.device["Hopper's ptxas"].startswith("Triton's default: ")
    monkeypatch.setattr(importlib.import_module("blockscale.diagnostics.doctor"), "FORMATS", {})
    monkeypatch.setenv("BLOCKSCALE_PTXAS", str(tmp_path / "none"))
    report = doctor("cpu")
    assert failed(report) == {"Hopper's"}
    assert "none' does not answer" in str(report)


def test_settings_are_shown_and_unknown_ones_fail(monkeypatch):
    monkeypatch.setenv("BLOCKSCALE_LOG", "info")
    assert doctor("cpu").settings["BLOCKSCALE_LOG"] == "info"
    monkeypatch.setenv("BLOCKSCALE_BACKED", "torch")
    report = doctor("cpu")
    assert report.unknown_settings == ["BLOCKSCALE_BACKED"]
    assert not report.ok, "a setting that nothing reads is a typo: the docstring of DoctorReport promises this"


# ---- broken kernels ------------------------------------------------------------------------------------------------


def test_a_product_that_is_slightly_off(device, broken):
    def launch(a, b, out, *, bias, accumulate):
        gemm_reference.scaled_mm(a, b, out, bias=bias, accumulate=accumulate)
        out.mul_(1.001)

    broken("gemm", launch)
    report = doctor(device)
    assert not report.ok
    assert failed(report) == {"gemm"}
    assert "FAIL" in str(report)
    assert report.to_dict()["ok"] is False


def test_a_product_with_one_wrong_value(device, broken):
    def launch(a, b, out, *, bias, accumulate):
        gemm_reference.scaled_mm(a, b, out, bias=bias, accumulate=accumulate)
        out[3, 5] += 1

    broken("gemm", launch)
    assert failed(doctor(device)) == {"gemm"}


def test_a_product_that_does_not_write(device, broken):
    """Outputs start poisoned in tests, so an unwritten value is NaN, and a NaN figure fails."""
    broken("gemm", lambda a, b, out, *, bias, accumulate: None)
    assert failed(doctor(device)) == {"gemm"}


def test_a_weight_only_product_that_rounds_its_rows(device, broken):
    def launch(a, b, out, *, bias, accumulate):
        a = a.bfloat16().float() if isinstance(a, torch.Tensor) else a
        gemm_reference.scaled_mm(a, b, out, bias=bias, accumulate=accumulate)

    broken("gemm", launch)
    bad = {check.name for check in doctor(device).checks if not check.passed}
    assert bad == {f"gemm float32, {a} @ {b}" for a in ("fp16", "fp32") for b in ("mxfp8_e4m3", "nvfp4")}


def test_a_grouped_product_that_mistakes_its_group(device, broken):
    def launch(inputs, out, *, accumulate):
        # FP4 cannot be indexed, bytes can
        codes = inputs.b.data
        rolled = codes.view(torch.uint8).roll(1, 0).view(codes.dtype)
        mistaken = inputs._replace(b=replace(inputs.b, data=rolled))
        grouped_reference.m_grouped(mistaken, out, accumulate=accumulate)

    broken("m_grouped", launch)
    assert failed(doctor(device)) == {"m_grouped"}


def test_a_k_grouped_product_that_swaps_groups(device, broken):
    def launch(inputs, out, *, accumulate):
        grouped_reference.k_grouped(inputs, out, accumulate=accumulate)
        out.copy_(out.flip(0))

    broken("k_grouped", launch)
    assert failed(doctor(device)) == {"k_grouped"}


def test_a_cast_with_one_wrong_code(device, broken):
    def launch(x, cast, axis, out, offs):
        casts_reference.quantize(x, cast, axis, out, offs)
        out[0].view(torch.uint8).view(-1)[0] = 0

    broken("cast", launch)
    assert failed(doctor(device)) == {"cast", "known"}


def test_a_double_cast_that_is_one_bit_off(device, broken):
    def launch(x, casts, outs, colsum, offs):
        casts_reference.quantize_both(x, casts, outs, colsum, offs)
        outs[1][1].view(torch.uint8).view(-1)[0] ^= 8

    broken("cast_both", launch)
    assert "cast" in failed(doctor(device))


def test_a_decode_that_is_one_bit_off(device, broken):
    def launch(q, out, *, offs=None):
        casts_reference.dequantize(q, out, offs=offs)
        out.view(-1)[0] = torch.nextafter(out.view(-1)[0], torch.tensor(9e9, device=out.device, dtype=out.dtype))

    broken("dequantize", launch)
    # on a GPU the exact upcast of MX products uses that kernel too
    assert failed(doctor(device)) == ({"cast", "gemm"} if device.type == "cuda" else {"cast"})


FUSED = {
    "swiglu": ("swiglu", 3),
    "swiglu_both": ("swiglu", 2),
    "swiglu_backward_both": ("swiglu_backward", 3),
    "rmsnorm": ("rmsnorm", 4),
    "rmsnorm_both": ("rmsnorm", 4),
    "permute": ("permute", 3),
    "permute_both": ("permute", 4),
    "permute_columns": ("permute", 3),
}


@pytest.mark.parametrize("op", FUSED)
def test_a_fused_cast_with_one_wrong_code(op, device, broken):
    check, where = FUSED[op]

    def launch(*args):
        getattr(casts_reference, op)(*args)
        out = args[where][0] if op.endswith("_both") else args[where]
        codes = out[0].view(torch.uint8).view(-1)
        codes[0] = codes[0] ^ 1

    broken(op, launch)
    assert failed(doctor(device)) == {check}


def test_an_rstd_that_is_one_bit_off(device, broken):
    def launch(x, weight, eps, cast, out, rstd):
        casts_reference.rmsnorm(x, weight, eps, cast, out, rstd)
        rstd.view(torch.int32)[3] += 1

    broken("rmsnorm", launch)
    assert failed(doctor(device)) == {"rmsnorm"}
