"""`blockscale tune --compile-only`, also without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")
pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE
from blockscale.cli import tune
from blockscale.cli.main import main
from blockscale.diagnostics import precompile
from blockscale.hardware import Capability

pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler, and no TRITON_INTERPRET")


def test_dry_run_lists_the_kernels_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "llama3-8b", "--compile-only", "--dry-run", "--device", "sm_90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    products, casts = [[line for line in lines if f"{name}_kernel" in line] for name in ("scaled_mm", "cast")]
    assert lines[-1] == f"{len(products) + len(casts)} kernels for llama3-8b on cuda sm_90; none was compiled"
    assert any("float32 +=" in line for line in products), "gradients of weights"
    assert all("hopper" in line for line in products)
    assert "132 SMs" in lines[0]


def test_dry_run_of_given_layers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shapes", "512,256; 256,512", "--m", "1,16", "--device", "sm_90", "--dry-run"]
    assert main(["tune", "--compile-only", *words, "--inference"]) == 0
    text = capsys.readouterr().out
    assert "cast_both" not in text
    assert "1x512x256" in text
    assert main(["tune", "--compile-only", *words, "--formats", "mxfp8_e4m3@mxfp8_e4m3"]) == 0
    assert "gemm mxfp8_e4m3 @ mxfp8_e4m3 by torch: nothing to precompile" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("words", [[], ["--device", "sm_90"], ["--device", "cuda"], ["--device", "cpu"]], ids=str)
def test_without_a_gpu_nothing_is_compiled(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "llama3-8b", "--compile-only", *words]) == 1
    said = capsys.readouterr().err
    assert "nothing was compiled" in said
    assert "GPU" in said
    assert "Rule: " in said
    assert "Fix: " in said


def test_compiled_and_cached_kernels_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fake GPU and a fake compiler."""
    here = (precompile.Target(Capability("cuda", 90)), torch.device("cpu"))
    monkeypatch.setattr(tune, "_gpu", lambda device: here)
    asked: list[int] = []

    def compile_all(requests, target, workers):
        asked.append(workers)
        return iter([precompile.Compiled(request, 0.1, 1, number % 2) for number, request in enumerate(requests)])

    monkeypatch.setattr(precompile, "compile_all", compile_all)
    assert main(["tune", "--compile-only", "--shapes", "512,256", "--m", "16", "--workers", "3"]) == 0
    text = capsys.readouterr().out
    assert "7 kernels for 1 layers on cuda sm_90: 4 compiled, 3 were cached" in text
    assert "with 3 processes" in text
    assert f"stored in {precompile.cache_folder()}" in text
    assert asked == [3]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "neither a model nor --shapes"),
        (["llama3-8b", "--shapes", "16,16"], "model 'llama3-8b' and --shapes 16,16"),
        (["llama9"], "unknown model 'llama9'"),
        (["--shapes", "512"], "each weight is N,K"),
        (["--shapes", "512,-16"], "two positive integers"),
        (["--shapes", "512,x"], "two positive integers"),
        (["llama3-8b", "--m", "0"], "sizes are positive integers"),
        (["llama3-8b", "--formats", "fp8_1x128"], "one format each"),
        (["llama3-8b", "--formats", "fp8_1x128@mxfp4"], "no product of fp8_1x128 with mxfp4"),
        (["llama3-8b", "--formats", "fp8_1x128@fp8"], "unknown format 'fp8'"),
        (["llama3-8b", "--device", "sm_x", "--dry-run"], "pass sm_90 for an H100"),
        (["llama3-8b", "--workers", "0"], "at least one process"),
        (["llama3-8b", "--budget", "5"], "--budget with --compile-only"),
    ],
)
def test_errors_name_the_reason(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--compile-only", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Fix: " in said
