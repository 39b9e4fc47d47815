"""`blockscale inspect`, `convert-checkpoint` and `export`: what they print, and how they fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale import checkpoints
from blockscale.cli.main import main
from blockscale.train import train
from support.checkpoints import weights_of
from support.small_runs import DENSE, small

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")
pytest.importorskip("safetensors", reason="checkpoints are read by safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    checkpoints.write(found, weights_of("compressed_tensors").items(), "compressed_tensors", shard_bytes=30_000)
    return found


def test_inspect_shows_kinds_of_weights(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(folder), "--check"]) == 0
    said = capsys.readouterr().out
    assert f"{folder}: compressed_tensors, 7 weights in" in said.replace("\n", "")
    (line,) = (line for line in said.splitlines() if "fp8_128x128" in line)
    assert line.split() == ["model.layers.*.mlp.up_proj.weight", "1", "fp8_128x128", "192", "x", "320", "61.5", "kB"]
    assert main(["inspect", str(folder), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 7
    assert {row["format"] for row in rows} == {"fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "BF16"}
    assert all(row["stored"] for row in rows)


def test_convert_says_what_became_of_every_weight(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["convert-checkpoint", str(folder), str(tmp_path / "new"), "--layout", "blockscale"]) == 0
    said = capsys.readouterr().out
    assert "compressed_tensors -> blockscale: 7 weights in 1 files" in said
    assert "re-expressed      2  nvfp4" in said
    assert main(["convert-checkpoint", str(folder), str(tmp_path / "b"), "--layout", "blockscale", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(row["label"] == "kept" for row in rows) == 5


def test_rounding_is_asked_for_by_its_option(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["convert-checkpoint", str(folder), str(tmp_path / "new"), "--layout", "blockscale", "--format", "mxfp4"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "holds only rounded" in said
    assert "Fix: pass --allow-rounding, or name another format." in said
    assert main([*words, "--allow-rounding"]) == 0
    assert "rounded" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "convert-checkpoint"])
def test_a_folder_that_is_none(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = [] if command == "inspect" else [str(tmp_path / "new"), "--layout", "deepseek"]
    assert main([command, str(tmp_path / "no"), *more]) == 2
    assert "is no folder. Rule: a checkpoint is a folder of safetensors files" in capsys.readouterr().err


def test_export_names_its_source_and_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(small("mxfp8", steps=1, folder=tmp_path / "run", model=replace(DENSE, hidden=64)))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--layout", "compressed_tensors"]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "step-00000001" in said
    assert "compressed_tensors" in said
    assert "mxfp8_e4m3" in said
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "is not empty. Rule: a checkpoint is written to a new or empty folder" in capsys.readouterr().err
