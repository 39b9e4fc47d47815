"""Checkpoints: whole or not at all, the last ones stay, and what is damaged or foreign says so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from blockscale.errors import CheckpointError
from blockscale.train import DataConfig, train
from blockscale.train import checkpoint as checkpoints
from blockscale.train.branch import StopAfter
from small_runs import DENSE, small

RUN = small("bf16", model=replace(DENSE, layers=1), steps=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    train(replace(RUN, folder=tmp_path / "run", save_every=1), hooks=[StopAfter(2)])
    assert [path.name for path in checkpoints.complete(tmp_path / "run")] == ["step-00000001", "step-00000002"]
    return tmp_path / "run"


def resumed(folder: Path, **changes):
    return train(replace(RUN, folder=folder, resume=True, **changes))


def test_the_last_ones_stay(tmp_path: Path):
    train(replace(RUN, folder=tmp_path, save_every=1, keep=1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_tensors_are_those_of_the_plain_model(folder: Path):
    about = checkpoints.read_about(folder / "step-00000002")
    names = [name.removeprefix("model.") for name in about["tensors"] if name.startswith("model.")]
    from blockscale.train import Transformer

    assert names == sorted(Transformer.build(RUN.model, 16, device="meta").state_dict())
    assert "optimizer.embedding.weight.exp_avg_sq" in about["tensors"]


def test_one_recipe_goes_on_with_another(folder: Path):
    assert resumed(folder, recipe=small("fp8_blockwise").recipe).steps == 3


def test_no_checkpoint_means_a_new_run(tmp_path: Path):
    assert resumed(tmp_path / "new", steps=1).steps == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "about"])
def test_a_damaged_checkpoint(folder: Path, damage: str):
    last = folder / "step-00000002"
    (data,) = last.glob("*.distcp")
    if damage == "flipped":
        with data.open("r+b") as file:
            file.seek(data.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    elif damage == "cut":
        os.truncate(data, data.stat().st_size - 1)
    elif damage == "missing":
        data.unlink()
    else:
        (last / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="goes on from step-00000001"):
        resumed(folder)
    shutil.rmtree(last)  # as the message says
    assert resumed(folder).steps == 3


def test_a_foreign_checkpoint(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"hidden was 48, is 64.*same model"):
        resumed(folder, model=replace(RUN.model, hidden=64))
    with pytest.raises(CheckpointError, match="seed was 0, is 1"):
        resumed(folder, seed=1)
    (tmp_path / "book.txt").write_text("another text\n" * 100)
    with pytest.raises(CheckpointError, match="was trained on text"):
        resumed(folder, data=DataConfig(str(tmp_path / "book.txt"), sequence=16, cache=tmp_path / "cache"))
    about = folder / "step-00000002" / "run.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        resumed(folder)
    with pytest.raises(CheckpointError, match=r"has no run\.json.*one of the step-\* folders"):
        checkpoints.read_about(tmp_path)


def test_a_full_disk_leaves_the_last_one(folder: Path, monkeypatch: pytest.MonkeyPatch):
    full = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(CheckpointError, match=r"are free.*the last one is .*step-00000002"):
        resumed(folder)
    monkeypatch.undo()

    def fails(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_dict_saver, "save", fails)
    with pytest.raises(CheckpointError, match="No space left"):
        resumed(folder)
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    assert resumed(folder).steps == 3


def test_a_disk_that_fills_up_while_torch_writes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Its error derives from BaseException, and holds the traceback of every process."""

    def fails(self: object, *args: object, **named: object) -> None:
        error = RuntimeError("unexpected pos 704 vs 598")  # of its writer, which then closes what is not whole
        error.__context__ = OSError(28, "No space left on device")
        raise error

    monkeypatch.setattr(FileSystemWriter, "write_data", fails)
    with pytest.raises(CheckpointError, match=r"in .*run: \[Errno 28\] No space left on device. Rule:") as raised:
        resumed(folder)
    assert "Traceback" not in str(raised.value)
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("text", ["[]", "1", '{"format": 1}', '{"format": 1, "step": "2"}', '{"format": 2}'])
def test_what_others_call_run_json(text: str, folder: Path):
    (folder / "step-00000002" / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match="step-00000002"):
        resumed(folder)


def test_what_is_no_folder(folder: Path):
    (folder / "step-00000002" / ".notes").mkdir()  # something else of somebody else's
    assert resumed(folder).steps == 3
    (folder / "file").write_text("text")
    with pytest.raises(CheckpointError, match=r"no run\.json"):
        train(replace(RUN, start=folder / "file"))


def test_a_run_that_is_to_end_before_its_checkpoint(folder: Path):
    with pytest.raises(CheckpointError, match="step-00000002 for a run of 1 steps"):
        resumed(folder, steps=1)


KILLED = """
import sys, time
from dataclasses import replace
from pathlib import Path
from blockscale.train import checkpoint, train
from small_runs import DENSE, small
real = checkpoint._checksums
def slow(folder):
    # the tensors of step 2 are on disk, the rest is not
    if "00000002" in folder.name:
        print("saving", flush=True)
        time.sleep(60)
    return real(folder)
checkpoint._checksums = slow
train(replace(small("bf16", model=replace(DENSE, layers=1), steps=3), folder=Path(sys.argv[1]), save_every=1))
"""


def test_kill_in_the_middle_of_a_save_loses_unsaved_steps_alone(tmp_path: Path):
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"saving\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    folder = tmp_path / "run"
    begun = [path.name for path in folder.iterdir() if path.name.startswith(".saving")]
    assert len(begun) == 1
    assert checkpoints.latest(folder) == folder / "step-00000001"
    result = resumed(folder)
    assert not list(folder.glob(".saving*"))
    assert result.history == train(RUN).history
