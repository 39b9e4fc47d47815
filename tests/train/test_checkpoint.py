"""Checkpoints: written atomically, the last ones are kept, and damaged or foreign ones raise errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from blockscale.compare import stored
from blockscale.errors import CheckpointError
from blockscale.train import DataConfig, Run, train
from blockscale.train import checkpoint as checkpoints
from blockscale.train.files import folder_lock
from blockscale.train.records import StopAfter
from support.small_runs import DENSE, small

RUN = small("bf16", model=replace(DENSE, layers=1), steps=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    train(replace(RUN, folder=tmp_path / "run", save_every=1), hooks=[StopAfter(2)])
    assert [path.name for path in checkpoints.complete(tmp_path / "run")] == ["step-00000001", "step-00000002"]
    return tmp_path / "run"


def resumed(folder: Path, **changes):
    return train(replace(RUN, folder=folder, resume=True, **changes))


def test_keep_limits_the_checkpoints(tmp_path: Path):
    train(replace(RUN, folder=tmp_path, save_every=1, keep=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000003"]


def test_tensors_are_those_of_the_plain_model(folder: Path):
    about = checkpoints.read_about(folder / "step-00000002")
    names = [name.removeprefix("model.") for name in about["tensors"] if name.startswith("model.")]
    from blockscale.models import Transformer

    assert names == sorted(Transformer.build(RUN.model, 16, device="meta").state_dict())
    assert "optimizer.embedding.weight.exp_avg_sq" in about["tensors"]


def test_a_run_resumes_by_another_recipe(folder: Path):
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
    with pytest.raises(CheckpointError, match="resumes from step-00000001"):
        resumed(folder)
    shutil.rmtree(last)  # the fix of the message
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
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000001", "step-00000002"]
    assert resumed(folder).steps == 3


def test_a_disk_that_fills_up_while_torch_writes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """torch's error derives from BaseException and holds the traceback of every process."""

    def fails(self: object, *args: object, **named: object) -> None:
        error = RuntimeError("unexpected pos 704 vs 598")  # torch's writer fails again when it closes the file
        error.__context__ = OSError(28, "No space left on device")
        raise error

    monkeypatch.setattr(FileSystemWriter, "write_data", fails)
    with pytest.raises(CheckpointError, match=r"in .*run: \[Errno 28\] No space left on device. Rule:") as raised:
        resumed(folder)
    assert "Traceback" not in str(raised.value)
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("text", ["[]", "1", '{"format": 1}', '{"format": 1, "step": "2"}', '{"format": 2}'])
def test_a_foreign_run_json_is_refused(text: str, folder: Path):
    (folder / "step-00000002" / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match="step-00000002"):
        resumed(folder)


def test_other_folders_and_files_beside_checkpoints(folder: Path):
    (folder / "step-00000002" / ".notes").mkdir()  # a folder of the user
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
from blockscale.distributed import sharded_files
from blockscale.train import train
from support.small_runs import DENSE, small
real = sharded_files.checksums
def slow(folder, *pattern):
    # the tensors of step 2 are on disk, run.json is not
    if "00000002" in folder.name:
        print("saving", flush=True)
        time.sleep(60)
    return real(folder, *pattern)
sharded_files.checksums = slow
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


def test_folders_of_other_names_are_the_users(folder: Path):
    """They are not resumed from, do not count for `keep`, and are not removed."""
    for name in ("step-best", "step-00000002.bak", "step-2"):
        shutil.copytree(folder / "step-00000001", folder / name)
    result = resumed(folder, save_every=1, keep=1)
    assert result.checkpoint == folder / "step-00000003"
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert names == ["step-00000002.bak", "step-00000003", "step-2", "step-best"]


def test_many_steps_are_sorted_by_number(tmp_path: Path):
    for step in (99_999_999, 100_000_000, 5):
        made = tmp_path / checkpoints.name_of(step)
        made.mkdir()
        (made / "run.json").write_text("{}")
    assert [path.name for path in checkpoints.complete(tmp_path)][-1] == "step-100000000"


@pytest.mark.parametrize("key", ["step", "history", "config", "files"])
def test_run_json_that_was_changed(key: str, folder: Path):
    path = folder / "step-00000002" / "run.json"
    about = json.loads(path.read_text())
    changed = {"step": 1, "history": [[1, 2]], "config": about["config"] | {"model": 5}, "files": {}}
    path.write_text(json.dumps(about | {key: changed[key]}))
    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged: run\.json does not match its checksum"):
        resumed(folder)
    path.write_text(json.dumps(about, indent=1, sort_keys=True))  # the same content in another layout
    assert resumed(folder).steps == 3


def test_a_checkpoint_of_the_first_versions_has_no_check(folder: Path):
    path = folder / "step-00000002" / "run.json"
    about = json.loads(path.read_text())
    del about["check"]
    path.write_text(json.dumps(about))
    assert resumed(folder).steps == 3


def test_leftovers_of_a_process_with_the_same_pid_are_removed(tmp_path: Path):
    left = tmp_path / f".saving-00000003-{os.getpid()}"
    left.mkdir()
    (left / "half").write_text("")
    saved = train(replace(RUN, folder=tmp_path)).checkpoint
    assert saved is not None
    assert not left.exists()
    assert not (saved / "half").exists()


def test_ctrl_c_within_torch_is_a_keyboard_interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(self: object, *args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resumed(folder)
    assert not list(folder.glob(".saving*"))


def test_files_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoints, "checksum", denied)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied.*check the permissions"):
        resumed(folder)


# ---- one run in a folder ---------------------------------------------------------------------------------------------


def test_a_folder_has_one_run_at_a_time(tmp_path: Path):
    script = f"""
import sys
from pathlib import Path
from blockscale.train.files import folder_lock
with folder_lock(Path({str(tmp_path / "run")!r})):
    print("mine", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "mine\n"
    with pytest.raises(CheckpointError, match=r"in use by another run\. Rule: one run at a time"):
        train(replace(RUN, folder=tmp_path / "run"))
    assert not checkpoints.complete(tmp_path / "run")
    other.kill()  # releases its lock
    other.communicate()
    assert train(replace(RUN, folder=tmp_path / "run")).steps == 3


def test_an_impossible_folder_fails_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Run, "advance", lambda self: pytest.fail("a step was made"))
    with pytest.raises(CheckpointError, match=r"file: File exists.*name a folder that can be written to"):
        train(replace(RUN, folder=tmp_path / "file"))


def test_a_folder_is_free_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError), folder_lock(Path("run")), folder_lock(tmp_path / "run"):
        _go_and_fail(tmp_path.parent)
    refused = pytest.raises(CheckpointError, match="one run at a time")
    with folder_lock(tmp_path / "run"), ThreadPoolExecutor(1) as pool, refused:
        pool.submit(_own, tmp_path / "run").result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_own, tmp_path / "run").result()


def _go_and_fail(folder: Path) -> None:
    os.chdir(folder)
    raise KeyError


def _own(folder: Path) -> None:
    with folder_lock(folder):
        pass


def test_runs_of_a_comparison_are_locked_too(tmp_path: Path):
    config = replace(RUN, steps=1)
    refused = pytest.raises(CheckpointError, match="one run at a time")
    with ThreadPoolExecutor(1) as pool, folder_lock(stored.folder_of("bf16", config, tmp_path)), refused:
        pool.submit(stored.run_or_read, "bf16", config, tmp_path, measurements=()).result()
