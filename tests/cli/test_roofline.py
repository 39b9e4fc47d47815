"""`blockscale roofline`, also without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

from blockscale.autograd.recipe import get_recipe
from blockscale.bench import rooflines
from blockscale.bench.shapes import MODELS
from blockscale.cli import roofline as command
from blockscale.cli.main import main
from blockscale.roofline import MEASURED, advise, nominal, swiglu_cost


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["roofline", *words]) == 0
    return capsys.readouterr().out


def test_every_layer_and_recipe_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "linear", "--model", "deepseek-v3", "--machine", "h200")
    for k, n in MODELS["DeepSeek-V3 671B"]:
        assert f"{k} -> {n}" in text
    for recipe in ("fp8_blockwise", "mxfp8", "nvfp4"):
        assert sum(f" {recipe} " in line and "x" in line for line in text.splitlines()) >= 6
    assert "H200 measured: 4.2 TB/s" in text
    assert "H200 SXM nominal: 4.8 TB/s" in text
    # 2,551 µs and 4,764 / 2,551 are worked out in tests/roofline
    assert any(line.split()[:3] == ["fp8_blockwise", "2,551", "1.87x"] for line in text.splitlines())
    assert "mxfp8 on Hopper: no units for it" in text
    assert "measured µs" not in text


def test_machine_option_selects_another_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--shapes", "512,256", "--machine", "b200", "--recipes", "nvfp4", "--inference")
    assert "256 -> 512" in text
    assert "fp4 9,000 TFLOP/s" in text
    assert "forward only, weights cast beforehand" in text
    assert "no units" not in text


def test_a100_notes_that_fp8_does_not_pay(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not sensible" in said(capsys, "--machine", "a100", "--recipes", "fp8_blockwise", "--shapes", "512,256")


def test_microbatches_share_a_cast(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--shapes", "18432,7168", "--machine", "h200", "--recipes", "fp8_blockwise")
    once, shared = said(capsys, *words), said(capsys, *words, "--microbatches", "8")
    assert "weights cast in every forward" in once
    assert "weights cast once a step of 8 microbatches" in shared
    assert "1.87x" in once
    assert "1.95x" in shared


def test_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--shapes", "18432,7168", "--machine", "h200", "--recipes", "fp8_blockwise", "mxfp8", "--advise")
    (line,) = [line for line in said(capsys, *words).splitlines() if "251" in line]
    assert line.split() == ["7168", "->", "18432", "251", "(292)", "never"]


def test_gated_mlps(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "mlp", "--model", "llama3-8b", "--machine", "h200", "--advise")
    assert "4096 -> 14336" in text
    assert "14336 -> 4096" not in text
    assert "up fprop" in text


def test_experts(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(said(capsys, "experts", "--machine", "h200", "--recipes", "fp8_blockwise", "--advise").split())
    assert "DeepSeek-V3 671B, 8 for each token of 256 experts with 128 rows each, 4,096 tokens" in text
    assert "up cast w" in text
    assert "worth converting from this many tokens per expert" in text
    found = advise(7168, 2048, get_recipe("fp8_blockwise").formats(), MEASURED["h200"], cost=swiglu_cost)
    assert f"7168 -> 2048 {found} (" in text
    words = ("experts", "--model", "deepseek-v3", "--machine", "h200", "--recipes", "fp8_blockwise")
    shard = " ".join(said(capsys, *words, "--experts", "8").split())
    assert "8 experts with 4,096 rows each" in shard
    given = " ".join(said(capsys, "experts", "--shapes", "2048,7168", "--experts", "8", "--tokens", "32768").split())
    assert "given experts, 8 experts with 4,096 rows each" in given
    time = next(part for part in given.split("fp8_blockwise ")[1:]).split()[0]
    assert f"fp8_blockwise {time} " in shard, "the same rows on the same experts"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--model", "llama3"], "unknown model 'llama3'", "did you mean llama3-8b"),
        (["--model", "gpt-oss", "--tokens", "0"], "--tokens 0", "pass --tokens 1 or more"),
        (["--machine", "h300"], "unknown machine 'h300'", "did you mean"),
        (["--recipes", "fp9"], "unknown recipe 'fp9'", "did you mean mxfp4"),
        (["mlp", "--model", "gpt-oss"], "gpt-oss without a gated MLP", "--model llama3-8b"),
        (["experts", "--model", "llama3-8b"], "unknown model with experts 'llama3-8b'", "llama-4-scout"),
        (["experts", "--shapes", "2048,7168"], "shapes of experts without their number", "--experts 8"),
        (["experts", "--experts", "0"], "--experts 0", "pass --experts 1 or more"),
        (["mlp", "--experts", "8"], "--experts with mlp", "blockscale roofline experts"),
    ],
)
def test_errors_name_value_and_fix(words: list[str], what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", *words]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert fix in error.split("Fix: ")[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_measuring_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "--measure"]) == 2
    error = capsys.readouterr().err
    assert "--measure without a GPU" in error
    assert "Rule: ceilings and layers are measured on the GPU" in error
    assert "Fix: run it there" in error


def test_measured_times_are_shown_with_both_roofs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fake GPU."""
    roof = rooflines.as_ceilings("NVIDIA H200", "hopper", 4e12, {"bf16": 7e14, "fp8": 1.4e15})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("blockscale.hardware.gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(rooflines, "find_roofs", lambda device: rooflines.Roofs(roof, nominal("h200")))

    def fake(layers, tokens, names, device, use):
        assert device == torch.device("cuda", 0)
        for layer in layers:
            yield {(layer, tokens, name): us for name, us in zip(("bf16", *names), (5000.0, 3125.0), strict=True)}

    monkeypatch.setattr(rooflines, "time_layers", fake)
    words = ("--shapes", "18432,7168", "--recipes", "fp8_blockwise", "--measure")
    text = said(capsys, *words)
    assert "NVIDIA H200 measured: 4 TB/s, bf16 700 TFLOP/s, fp8 1,400 TFLOP/s" in text
    (line,) = [line for line in text.splitlines() if " fp8_blockwise " in line]
    # 4,638.6 µs of FLOPs in bf16; 2,319.3 in FP8 and 954,530,816 bytes of casts at 4 TB/s
    figures = "fp8_blockwise 2,558 1.81x 1.78x 9% 3,125 1.60x 88% 90% fprop 30%, fp8"
    assert " ".join(line.split()).endswith(figures)
    assert main(["roofline", *words, "--machine", "b200"]) == 2
    assert "only this GPU can be measured" in capsys.readouterr().err


def test_the_command_needs_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run() == 0
    assert "DeepSeek-V3 671B, 4,096 tokens" in capsys.readouterr().out
    assert nominal(command.DEFAULT_MACHINE).architecture == "hopper"


def test_recipes_separated_by_commas_show_bf16_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "--model", "llama3-8b", "--recipes", "bf16,mxfp8", "mxfp8", "nvfp4"]) == 0
    rows = re.findall(r"^ (?:\d+ -> \d+)? +(bf16|mxfp8|nvfp4) ", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["bf16", "mxfp8", "nvfp4"] * 4
