"""Output of a run: JSON lines, TensorBoard's files, plain lines, a live table."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.compare import stored
from blockscale.diagnostics import store
from blockscale.errors import OptionError
from blockscale.train import Hooks, Run, train
from blockscale.train.metrics import JsonLines, TensorBoard
from blockscale.train.numerics import NumericsLog
from blockscale.train.records import StopAfter
from blockscale.train.view import View
from support.small_runs import DENSE, small

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


@pytest.mark.parametrize("leaves", [False, True], ids=["no checkpoint", "a checkpoint"])
def test_tensorboard_of_a_run_that_was_killed_and_resumed(leaves: bool, tmp_path: Path):
    """Steps after the checkpoint are repeated and appear once."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Dies(Hooks):
        def before_step(self, run: Run) -> None:
            if run.step == 2:
                raise KeyError

    run = replace(RUN, folder=tmp_path, save_every=1, log_every=1)
    with pytest.raises(KeyError):
        train(run, hooks=[TensorBoard(tmp_path), Dies()])
    shutil.rmtree(tmp_path / "step-00000002")
    if not leaves:
        shutil.rmtree(tmp_path / "step-00000001")
    train(replace(run, resume=True), hooks=[TensorBoard(tmp_path)])
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3]


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
    # the status line of a terminal is written over
    assert any(line.startswith("step      2  loss") for line in text.splitlines()) == (not terminal)


def test_the_view_shows_no_loss_without_evaluation():
    out = io.StringIO()
    result = train(RUN, hooks=[View(rich.Console(file=out, width=160)), StopAfter(2)])
    assert (result.stopped, result.evaluations) == ("interrupted", ())
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("interrupted at step 2: ")]
    assert line.endswith(" tokens/s")
    assert "loss" not in line
    assert "nan" not in line


def test_a_missing_loss_is_null(tmp_path: Path):
    train(replace(RUN, eval_batches=0), hooks=[JsonLines(tmp_path)])
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert math.isnan(stored.read(tmp_path / "metrics.jsonl").loss)


@pytest.mark.parametrize("left", ["", '{"kind": "st', '{"kind": "step", "long": "' + "x" * 200_000])
def test_a_partial_last_line_is_removed(left: str, tmp_path: Path):
    """A process was killed in the middle of a line; the line may be longer than one read."""
    path = tmp_path / "metrics.jsonl"
    whole = '{"kind": "arm", "name": "é"}\n'
    path.write_text(whole + left)
    log = JsonLines(tmp_path)
    log._write("end", loss=1.0)
    log.close()
    assert path.read_text() == whole + '{"kind": "end", "loss": 1.0}\n'
    path.write_text(left)
    JsonLines(tmp_path).close()
    assert path.read_text() == ""


def test_numerics_resume_after_a_partial_line(tmp_path: Path):
    run = replace(RUN, recipe=small("mxfp8").recipe, folder=tmp_path, numerics_every=1)
    train(run, hooks=[NumericsLog(tmp_path, 1), StopAfter(2)])
    path = tmp_path / "numerics.jsonl"
    path.write_text(path.read_text()[:-100])
    train(replace(run, resume=True), hooks=[NumericsLog(tmp_path, 1)])
    assert sorted(store.read(tmp_path).samples) == [0, 1, 2, 3]


def test_a_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(OptionError, match="Rule: a run writes metrics to its folder"):
        JsonLines(tmp_path / "file")


def test_changed_options_are_shown(tmp_path: Path):
    train(replace(RUN, folder=tmp_path), hooks=[StopAfter(2)])
    console = rich.Console(file=io.StringIO(), width=200)
    changed = replace(RUN, folder=tmp_path, resume=True, recipe=small("mxfp8").recipe, batch=4)
    train(changed, hooks=[View(console)])
    assert "changed options: batch 2 -> 4, recipe.name bf16 -> mxfp8" in console.file.getvalue()
