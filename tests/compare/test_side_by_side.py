"""Worker processes end with their parent, whether it receives a signal or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from blockscale.compare.side_by_side import side_by_side
from blockscale.errors import ProcessError

PROGRAM = """
import sys
from pathlib import Path
from tasks import {task}
from blockscale.compare.side_by_side import side_by_side
if __name__ == "__main__":
    try:
        side_by_side({task}, [(Path(sys.argv[1]) / str(place),) for place in range(3)], jobs=2)
    except KeyboardInterrupt:
        print("ended", flush=True)
"""
# each writes its state; `work` stands for a run and needs no torch
TASKS = """
import time

def work(folder):
    folder.mkdir(parents=True)
    (folder / "state").write_text("step")
    try:
        time.sleep(300)
    finally:
        (folder / "state").write_text("interrupted")

def run(folder):
    from blockscale.train import Hooks, train
    from support.small_runs import small

    class State(Hooks):
        def on_log(self, run, records, speed):
            (folder / "state").write_text("step")

        def on_end(self, run, result):
            (folder / "state").write_text(result.stopped)

    folder.mkdir(parents=True)
    train(small("bf16", steps=100_000, log_every=1), hooks=[State()])
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("work", "SIGTERM"),
        ("work", "SIGKILL"),
        ("run", "SIGTERM to all"),
        pytest.param("run", "SIGKILL", marks=pytest.mark.sweep),
    ],
)
def test_worker_processes_end_with_their_parent(task: str, how: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM.format(task=task))
    (tmp_path / "tasks.py").write_text(TASKS)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": path}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )

    def states() -> list[str]:
        return [each.read_text() for each in tmp_path.glob("out/*/state")]

    try:
        wait_for(lambda: states() == ["step", "step"])
        (os.killpg if how.endswith("all") else os.kill)(child.pid, getattr(signal, how.split()[0]))
        said, _ = child.communicate(timeout=90)
        assert said == (b"" if how == "SIGKILL" else b"ended\n")
        wait_for(lambda: states() == ["interrupted", "interrupted"])
        wait_for(lambda: is_gone(child.pid))
        assert len(states()) == 2, "no other began"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def killed(place: int) -> int:
    if place:
        os.kill(os.getpid(), signal.SIGKILL)
    return place


def test_a_killed_process_raises_a_message():
    with pytest.raises(ProcessError, match=r"ended without a message.*memory runs out.*__main__.*fewer jobs"):
        side_by_side(killed, [(1,)], jobs=1)


def test_nothing_begins_after_an_error(tmp_path: Path):
    tasks = [(tmp_path / "one",), (tmp_path / "no folder" / "two",), (tmp_path / "three",)]
    with pytest.raises(FileNotFoundError):
        side_by_side(Path.touch, tasks, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["one"]


def test_results_have_the_order_of_their_tasks():
    assert side_by_side(pow, [(place, 2) for place in range(4)], 2) == [0, 1, 4, 9]


def is_gone(group: int) -> bool:
    """Whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for(is_so: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.2)
