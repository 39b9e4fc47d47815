"""BLOCKSCALE_LOG, read when the library is imported."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = "import torch, blockscale as bs; q = bs.quantize(torch.ones(2, 128), 'fp8_1x128'); bs.scaled_mm(q, q)"


def run(level: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BLOCKSCALE_LOG": level}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_unknown_level_is_refused_with_the_known_ones() -> None:
    result = run("warnings")
    assert result.returncode != 0
    assert "did you mean warning" in result.stderr


def test_a_level_is_accepted() -> None:
    result = run("debug")
    assert (result.returncode, result.stderr) == (0, "")
