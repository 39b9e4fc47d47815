"""`blockscale tune`, also without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

from blockscale.bench import tuning
from blockscale.bench.timing import Timing
from blockscale.cli import tune
from blockscale.cli.main import main
from blockscale.diagnostics import precompile
from blockscale.gemm import heuristics, tuned
from blockscale.gemm.heuristics import Plan, Problem
from blockscale.hardware import Capability, describe
from blockscale.registry import Request

CPU = torch.device("cpu")
GPU = describe(CPU)["name"]
HOPPER = precompile.Target(Capability("cuda", 90), 132, GPU)


def test_dry_run_lists_plans_and_predicted_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "llama3-8b", "--dry-run", "-m", "16,4096", "--inference"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plans that would be timed; ")
    assert sum("->" in line for line in lines[:-1]) == 8, "one choice for each product"
    assert any("16x4096x14336 1x128 @ 128x128" in line for line in lines)
    assert any("64x64 run 4 shared" in line for line in lines)
    assert lines[-1].endswith("plans of 8 GEMMs; -> is the choice of the heuristic; none was timed")


def test_dry_run_of_given_layers_with_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shapes", "512,256", "--m", "4096", "--dry-run", "--formats", "fp8_1x128@fp8_1x128"]
    assert main(["tune", *words]) == 0
    text = capsys.readouterr().out
    for product in ("4096x512x256 1x128 @ 1x128", "4096x256x512 1x128 @ 1x128", "512x256x4096 1x128 @ 1x128 fp32 +="):
        assert product in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("words", [[], ["--device", "cuda"], ["--device", "cpu"]], ids=str)
def test_without_a_gpu_nothing_is_tuned(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "llama3-8b", *words]) == 1
    said = capsys.readouterr().err
    assert "nothing was tuned: torch finds no GPU" in said
    assert "Rule: " in said
    assert "Fix: run it there, or list what it would do with --dry-run" in said


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        tune, "_gpu", lambda device: (precompile.Target(Capability("cuda", 80), 108, "NVIDIA A100"), CPU)
    )
    assert main(["tune", "llama3-8b"]) == 1
    assert "NVIDIA A100 is cuda sm_80" in capsys.readouterr().err


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[Request, Plan]]]:
    """A fake GPU: the plan of the heuristic takes 100 µs, 128x128 with k_unroll 2 takes 90. Yields compiled plans."""
    monkeypatch.setenv("BLOCKSCALE_TUNED", str(tmp_path / "own"))
    monkeypatch.setattr(tune, "_gpu", lambda device: (HOPPER, CPU))
    monkeypatch.setattr(precompile, "obstacle", lambda: None)
    compiled: list[tuple[Request, Plan]] = []

    def compile_all(
        requests: Sequence[Request], target: precompile.Target, workers: int, plans: Sequence[Plan]
    ) -> Iterator[precompile.Compiled]:
        compiled.extend(zip(requests, plans, strict=True))
        return (precompile.Compiled(request, 0.1, 1, 0) for request in requests)

    def measure_plans(problem: Problem, plans: Sequence[Plan], *, device: torch.device) -> dict[Plan, Timing | str]:
        def quick(plan: Plan) -> bool:
            return plan.tile.bm == 128 and plan.tile.k_unroll == 2 and not plan.stream_k

        return {plan: Timing(us := 90.0 if quick(plan) else 100.0, us, us, "graph", 11) for plan in plans}

    monkeypatch.setattr(precompile, "compile_all", compile_all)
    monkeypatch.setattr(tuning, "measure_plans", measure_plans)
    tuned.forget()
    yield compiled
    tuned.forget()


def test_winners_are_stored_shown_and_used(
    hopper: list[tuple[Request, Plan]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shapes", "4096,7168", "-m", "128,4096", "--inference", "--commit", "abc1234"]
    assert main(["tune", *words]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "4096x4096x7168" in line)
    assert "100.0" in row
    assert "128x128 run 2" in row
    assert "10.0 %" in row
    assert "kept" in row
    path = tuned.own_file(GPU, 132)
    assert f"stored in {path}" in text
    problem = Problem(4096, 4096, 7168, False, False, 132)
    chosen = tuned.choose(problem, GPU)
    assert chosen.entry is not None
    assert (chosen.us, chosen.entry.model_us, chosen.entry.commit) == (90.0, 100.0, "abc1234")
    assert chosen.plan.tile.k_unroll == 2


def test_each_kernel_is_compiled_once(hopper: list[tuple[Request, Plan]]) -> None:
    assert main(["tune", "llama3-8b"]) == 0
    kernels = [(plan.tile, plan.stream_k, request.formats, request.dtype, request.options) for request, plan in hopper]
    assert len(set(kernels)) == len(kernels) > 10
    assert {request.options for request, _ in hopper} == {frozenset(), frozenset({"accumulate"})}


def test_out_names_the_file(hopper: object, tmp_path: Path) -> None:
    words = ["--shapes", "4096,7168", "-m", "4096", "--inference", "--out", str(tmp_path / "plans" / "mine.jsonl")]
    assert main(["tune", *words]) == 0
    assert len((tmp_path / "plans" / "mine.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "own").exists()


def test_gemms_past_the_budget_are_reported(
    hopper: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("blockscale.bench.tuning.tune.__kwdefaults__", {"seconds": None, "clock": lambda: next(clock)})
    assert main(["tune", "llama3-8b", "-m", "4096", "--inference", "--budget", "5"]) == 0
    text = capsys.readouterr().out
    assert "of 2 GEMMs have a plan that beats the heuristic" in text
    assert "2 were not started within the budget" in text


def test_a_wrong_plan_is_reported_and_fails(
    hopper: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_plans(problem: Problem, plans: Sequence[Plan], *, device: torch.device) -> dict[Plan, Timing | str]:
        chosen, _ = heuristics.choose(problem)
        return {plan: "7 values differ" if plan == chosen else Timing(9, 9, 9, "graph", 3) for plan in plans}

    monkeypatch.setattr(tuning, "measure_plans", measure_plans)
    assert main(["tune", "--shapes", "4096,7168", "-m", "4096", "--inference"]) == 1
    text = capsys.readouterr().out
    assert "WRONG 4096x4096x7168 1x128 @ 128x128 by" in text
    assert "7 values differ" in text
    assert "0 of 1 GEMMs" in text


def test_disabled_plans_cannot_be_stored(
    hopper: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKSCALE_TUNED", "off")
    assert main(["tune", "llama3-8b"]) == 2
    assert "BLOCKSCALE_TUNED=off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "neither a model nor --shapes"),
        (["llama3-8b", "--shapes", "16,16"], "model 'llama3-8b' and --shapes 16,16"),
        (["llama9"], "unknown model 'llama9'"),
        (["--shapes", "512,-16"], "two positive integers"),
        (["--shapes", "23,25"], "N a multiple of 8, in fp32 of 4"),
        (["llama3-8b", "--m", "0"], "sizes are positive integers"),
        (["llama3-8b", "--formats", "mxfp4@mxfp4"], "only the FP8 GEMM for Hopper has plans"),
        (["llama3-8b", "--formats", "fp8_1x128@mxfp4"], "no product of fp8_1x128 with mxfp4"),
        (["llama3-8b", "--budget", "0"], "a time in seconds"),
        (["llama3-8b", "--workers", "0"], "at least one process"),
    ],
)
def test_errors_name_the_reason(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Fix: " in said
