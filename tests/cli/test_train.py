"""`blockscale train`: presets, nested options, and error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockscale.cli.main import main
from blockscale.train import PRESETS

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")
SMALL = [
    *("--device", "cpu", "--steps", "2", "--batch", "1", "--sequence", "16", "--eval-batches", "1"),
    *("--layers", "1", "--model.dim", "32", "--model.hidden", "32", "--model.heads", "2"),
]


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(tmp_path / "run")
    assert main(["train", "tiny", "--recipe", "mxfp8", *SMALL, "--folder", folder, "--rate=0.001"]) == 0
    text = capsys.readouterr().out
    assert "tiny: 0.0M parameters, mxfp8, cpu, 2 steps of 16 tokens" in text
    assert "done at step 2" in text
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["config"]["optimizer"]["rate"] == 0.001
    assert first["config"]["recipe"]["name"] == "mxfp8"
    assert first["config"]["model"]["layers"] == 1
    # again without resume: refused, and nothing is lost
    assert main(["train", "tiny", *SMALL, "--folder", folder]) == 2
    assert "pass --resume to resume it" in capsys.readouterr().err
    longer = [*SMALL, "--folder", folder, "--resume"]
    longer[longer.index("2")] = "3"
    assert main(["train", "tiny", "--recipe", "mxfp8", *longer]) == 0
    assert "resuming from step 2" in capsys.readouterr().out


def test_experts_are_options_too(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["train", "tiny_moe", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "usage: blockscale train tiny_moe" in text
    assert "--model.experts.top-k" in text
    assert "--model.latent.kv-rank" in text
    assert all(f"  {name} " in text for name in PRESETS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tinny"], "did you mean tiny"),
        (["--recipe", "fp9"], "unknown recipe 'fp9'"),
        (["tiny", "--layers", "0"], "--layers 0. "),
        (["tiny", "--source", "nowhere/at/all"], "a file or folder that exists"),
        (["tiny", "--resume"], "--resume without a folder"),
    ],
)
def test_errors_name_value_and_fix(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", *words, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_invalid_paths_give_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The error is one line for every kind of path."""
    (tmp_path / "file").write_text("text")
    quick = ["--steps", "1", "--eval-batches", "1", "--device", "cpu"]
    for words in (
        ["train", "tiny", *quick, "--folder", str(tmp_path / "file")],
        ["train", "tiny", *quick, "--export", str(tmp_path / "file")],
        ["compare", "tiny", *quick, "--out", str(tmp_path / "file")],
        ["compare", "tiny", *quick, "--seeds", "0"],
        ["compare", "tiny", *quick, "--rows", str(tmp_path / "file" / "a.jsonl")],
    ):
        status = main(words)
        said = capsys.readouterr()
        assert status in (1, 2), words
        assert "Traceback" not in said.err + said.out
    (tmp_path / "folder").mkdir()
    assert main(["advise", str(tmp_path), "--out", str(tmp_path / "folder")]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_help_imports_no_torch():
    code = "import sys; from blockscale.cli.train import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False"
