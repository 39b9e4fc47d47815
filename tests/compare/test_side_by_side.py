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

TOLD_TO_END = """
import sys
from dataclasses import replace
from pathlib import Path
from blockscale.compare.comparison import compare
from support.small_runs import small
if __name__ == "__main__":
    try:
        compare(small("bf16", steps=100_000, log_every=1), [], out=Path(sys.argv[1]), jobs=2)
    except KeyboardInterrupt:
        print("ended", flush=True)
"""


# torch is imported within tests alone: worker processes import this module
@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.sweep), "SIGTERM to all", "SIGKILL"])
def test_worker_processes_end_with_their_parent(how: str, tmp_path: Path):
    from blockscale.compare.stored import read

    program = tmp_path / "program.py"
    program.write_text(TOLD_TO_END)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command, environment = [sys.executable, str(program), str(tmp_path / "out")], {**os.environ, "PYTHONPATH": path}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    try:
        wait_for(lambda: sum('"kind": "step"' in each.read_text() for each in tmp_path.rglob("metrics.jsonl")) == 2)
        files, number = [*tmp_path.rglob("metrics.jsonl")], getattr(signal, how.split()[0])
        (os.killpg if how.endswith("all") else os.kill)(child.pid, number)
        said, _ = child.communicate(timeout=90)
        assert said == (b"" if how == "SIGKILL" else b"ended\n")
        wait_for(lambda: all(read(each).end.get("stopped") == "interrupted" for each in files))
        assert len([*tmp_path.rglob("metrics.jsonl")]) == 2, "no other began"
        wait_for(lambda: is_gone(child.pid))
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
