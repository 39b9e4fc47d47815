"""What a run leaves and shows: JSON lines, TensorBoard's files, plain lines, a live table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.train import train
from blockscale.train.branch import StopAfter
from blockscale.train.metrics import JsonLines, TensorBoard
from small_runs import DENSE, small

rich = pytest.importorskip("rich.console", reason="the view needs rich")
RUN = small("bf16", model=replace(DENSE, layers=1), steps=3, log_every=2)


def test_json_lines_of_a_run_that_resumed(tmp_path: Path):
    run = replace(RUN, folder=tmp_path)
    train(run, hooks=[JsonLines(tmp_path), StopAfter(2)])
    result = train(replace(run, resume=True), hooks=[JsonLines(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "run"] == [0, 2]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["loss"] for line in steps] == [each.loss for each in result.history]
    assert lines[0]["data_hash"] == result.data_hash
    assert lines[0]["config"]["model"]["dim"] == 32
    assert lines[-1]["stopped"] == "done"
    assert lines[-1]["loss"] == result.loss
    assert steps[-1]["tokens_per_second"] > 0


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    result = train(RUN, hooks=[TensorBoard(tmp_path)])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    values = [event.value for event in found.Scalars("train/loss")]
    assert values == pytest.approx([each.loss for each in result.history])
    assert len(found.Scalars("validation/loss")) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_the_view(terminal: bool):
    from blockscale.train.view import View

    out = io.StringIO()
    result = train(RUN, hooks=[View(rich.Console(file=out, force_terminal=terminal, width=160))])
    text = out.getvalue()
    assert "small: 0.0M parameters, bf16, cpu, 3 steps of 32 tokens" in text
    assert "all layers in bf16" in text
    assert f"{result.history[-1].loss:.4f}" in text
    assert f"done at step 3: validation loss {result.loss:.4f}" in text
    assert "speed on a CPU says nothing" in text
    assert ("step      2  loss" in text) == (not terminal)
