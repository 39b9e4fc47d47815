"""torchtitan's runs, made once for all workers of a test run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

TESTS = Path(__file__).parent.parent
MARK = "RESULT "
Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What titan_ranks.py found, by run. Workers share it."""
    own = tmp_path_factory.getbasetemp()
    file = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "titan-ranks.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps(run_ranks()))
    return json.loads(file.read_text()).__getitem__


def run_ranks() -> dict[str, Any]:
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.titan_ranks"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            for group in json.loads(line.removeprefix(MARK)).values():
                results |= group
    return results
