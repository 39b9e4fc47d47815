"""A CPU emulates low precision: commands that compare recipes there show neither speeds nor shares of time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blockscale.bench.trainings import Throughput
from blockscale.cli import speed
from blockscale.cli.arguments import wide_console
from blockscale.cli.main import main

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")


def row(recipe: str, device: str, step_ms: float) -> Throughput:
    return Throughput(
        model="tiny", recipe=recipe, compile="none", weight_cast="forward", layers=1, sequence=16, batch=1,
        accumulate=1, recompute="none", parameters=1, converted=1, flop_share=0.5, warm_up=1, timed=2, step_ms=step_ms,
        spread_ms=[step_ms, step_ms], tokens_per_second=16e3 / step_ms, peak_memory=2**30,
        shares={"products": 0.5, "casts": 0.25, "attention": 0.125, "other": 0.125}, longest={"some_kernel": 0.5},
        kernel_ms=None, captured=False, failed="", where={"device": device},
    )  # fmt: skip


def shown(device: str, capsys: pytest.CaptureFixture[str]) -> str:
    speed._show(wide_console(speed.WIDTH), [row("bf16", device, 8.0), row("mxfp8", device, 4.0)])
    return capsys.readouterr().out


def test_speed_on_a_cpu_shows_only_dry_run_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = shown("cpu", capsys)
    table, _, note = said.partition("Speed needs a GPU")
    assert note
    assert "ms per step" in table
    assert "8.0" in table
    assert not re.search(r"tokens/s|speedup|\dx\b|GiB|GPU busy|products|casts|attention|other|kernel|50.0 %", table)
    on_gpu = shown("cuda:0", capsys)
    assert "2.00x" in on_gpu
    assert "50.0 %" in on_gpu
    assert "Speed needs a GPU" not in on_gpu


def test_progress_lines_of_compare_on_a_cpu_show_no_tokens_per_second(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = "--device cpu --steps 2 --batch 2 --sequence 16 --eval-batches 1 --eval-every 1 --layers 1 --model.dim 32"
    small += " --model.hidden 32 --model.heads 2 --recipes mxfp8"
    assert main(["compare", "tiny", *small.split(), "--out", str(tmp_path / "out")]) == 0
    said = capfd.readouterr().out
    assert re.search(r"run 3 of 3: mxfp8, seed 0: step 2 of 2, loss [\d.]+\n", said)
    assert "tokens/s" not in said
