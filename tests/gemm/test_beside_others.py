"""GEMMs in several processes that share one GPU, which time-slices between them and preempts kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .beside_others import PRODUCTS

_SCRIPT = Path(__file__).with_name("beside_others.py")
_SECONDS, _START_UP = 8, 60


@pytest.mark.gpu
@pytest.mark.sm90
def test_gemms_finish_under_time_slicing():
    running = {
        name: subprocess.Popen([sys.executable, str(_SCRIPT), name, str(_SECONDS)], stdout=subprocess.PIPE, text=True)
        for name in PRODUCTS
    }
    hung: list[str] = []
    try:
        for name, process in running.items():
            try:
                said, _ = process.communicate(timeout=_SECONDS + _START_UP)
            except subprocess.TimeoutExpired:
                hung.append(name)
            else:
                assert process.returncode == 0
                assert name in said
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert not hung
