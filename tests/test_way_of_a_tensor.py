"""How much code a tensor passes: host files of a Linear's forward and backward, and sizes of files and folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "blockscale"
MAX_HOST_FILES = 25
MAX_FILE_LINES = 450
MAX_FOLDER_LINES = {"train": 2800, "compare": 1300}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_few_host_files_run_in_a_linear():
    """On a stand-in for sm_90: kernels are selected and launched for it, and a launch does nothing."""
    pytest.importorskip("triton", reason="needs triton, which is not installed")
    pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
    script = Path(__file__).parent / "support" / "host_files.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    files = done.stdout.split()
    assert {"casts/_triton.py", "gemm/_hopper.py", "launch/kernels.py"} <= set(files), "the stand-in is not served"
    assert len(files) <= MAX_HOST_FILES, files


def test_files_are_short():
    long = {path.relative_to(SOURCE).as_posix(): lines(path) for path in SOURCE.rglob("*.py")}
    assert {name: count for name, count in long.items() if count > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("folder", MAX_FOLDER_LINES)
def test_the_trainer_is_read_in_a_sitting(folder: str):
    assert sum(map(lines, (SOURCE / folder).rglob("*.py"))) <= MAX_FOLDER_LINES[folder]
