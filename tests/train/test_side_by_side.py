"""Runs in processes of their own end with the one that began them, whether that is told to or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blockscale.train.stored import read

TOLD_TO_END = """
import sys
from dataclasses import replace
from pathlib import Path
from blockscale.train.compare import compare
from small_runs import small
if __name__ == "__main__":
    try:
        compare(small("bf16", steps=100_000, log_every=1), [], out=Path(sys.argv[1]), jobs=2)
    except KeyboardInterrupt:
        print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_runs_in_other_processes_end_with_the_one_that_began_them(number: signal.Signals, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(TOLD_TO_END)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command, environment = [sys.executable, str(program), str(tmp_path / "out")], {**os.environ, "PYTHONPATH": path}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert child.stdout is not None
    wait_for(lambda: sum('"step"' in each.read_text() for each in tmp_path.rglob("metrics.jsonl")) == 2)
    files = [*tmp_path.rglob("metrics.jsonl")]
    child.send_signal(number)
    if number == signal.SIGTERM:
        assert child.stdout.read() == b"ended\n"
    child.wait()
    wait_for(lambda: all(read(each).end.get("stopped") == "interrupted" for each in files))
    assert len([*tmp_path.rglob("metrics.jsonl")]) == 2, "no other began"


def wait_for(is_so: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.2)
