"""`benchmarks.weights` on a CPU: rows, and a wrong result."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import weights

SMALL = ["--formats", "mxfp4,nvfp4", "--sizes", "96x64", "--rows", "1,3", "--rounds", "1"]


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert weights.main([*SMALL, "--out", f"{tmp_path}/rows.jsonl"]) == 0
    rows = [json.loads(row) for row in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["format"], row["m"]) for row in rows] == [("mxfp4", 1), ("mxfp4", 3), ("nvfp4", 1), ("nvfp4", 3)]
    assert all(set(row["us"]) == {"hopper_weights", "bf16", "decoded", "copy"} for row in rows)
    assert rows[0]["where"]["command"].startswith("python -m benchmarks.weights --formats mxfp4,nvfp4 --sizes 96x64")
    assert capsys.readouterr().out.count("x bf16") == 4


def test_a_wrong_result_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(weights, "ours", lambda x, w: torch.zeros(x.shape[0], w.rows)):
        assert weights.main(SMALL) == 1
    assert capsys.readouterr().out.count("WRONG") == 4
