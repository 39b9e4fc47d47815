"""The command line: output, exit status, and start-up time."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale import registry
from blockscale.cli.main import COMMANDS, main
from blockscale.formats import ELEMENTS, FORMATS
from blockscale.hardware import default_device

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "blockscale", *words], capture_output=True, text=True, timeout=300)


def test_closed_pipe_is_no_error_in_help() -> None:
    """As in `blockscale train tiny --help | head`."""
    gone, output = os.pipe()
    os.close(gone)
    try:
        words = [sys.executable, "-m", "blockscale", "train", "tiny", "--help"]
        result = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, timeout=300)
    finally:
        os.close(output)
    assert (result.returncode, result.stderr) == (141, "")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys, blockscale.cli.main as m; m.main(['--help']); print('torch' in sys.modules)"
    started = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False"
    # well under a second of its own on an idle machine; the bound leaves room for a busy one
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: blockscale {command}" in capsys.readouterr().out


def test_unknown_command_proposes_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docter"]) == 2
    assert "did you mean doctor" in capsys.readouterr().err


def test_version_from_the_module() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout.strip()) == (0, "0.1.0")


def test_doctor_json_describes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert all(check["passed"] for check in report["checks"])
    choices = {(row["operation"], row["format"]): row["backend"] for row in report["choices"]}
    assert {name for _, name in choices} == {*FORMATS, *(f"bf16 @ {name}" for name in FORMATS), "any"}
    assert choices["permute", "mxfp4"] == choices["swiglu_both", "nvfp4"] == "reference"
    assert choices["gemm", "mxfp8_e4m3"] == "torch"
    assert choices["gemm", "fp8_1x128"] == "reference"


def test_doctor_shows_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["format"]]
    assert {name for head in heads for name in head[1:]} == set(registry.operations())


def test_doctor_fails_when_a_check_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = importlib.import_module("blockscale.diagnostics.selfcheck")

    monkeypatch.setattr(checks, "_GATE_DB", 1000.0)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_explain_for_a_gpu_not_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gemm", "--a", "fp8_1x128", "--device", "sm_90"]) == 0
    taken = next(line for line in capsys.readouterr().out.splitlines() if "->" in line)
    assert "hopper" in taken
    for a, b, backend in (("fp8_1x128", "fp8_1x128", "hopper"), ("fp8_128x128", "fp8_1x128", "reference")):
        sizes = ["--m", "4097", "--n", "2111", "--k", "4095"]
        assert main(["explain", "gemm", "--a", a, "--b", b, *sizes, "--device", "sm_90"]) == 0
        taken = next(line for line in capsys.readouterr().out.splitlines() if "->" in line)
        assert backend in taken


@pytest.mark.parametrize("operation", ["gemm", "m_grouped"])
def test_explain_knows_plain_left_operands(operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    for plain in ("bf16", "fp16", "fp32"):
        assert main(["explain", operation, "--a", plain, "--b", "mxfp4", "--device", "sm_90"]) == 0
        assert f"{operation} {plain} @ mxfp4" in capsys.readouterr().out


def test_explain_shows_configuration_prediction_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("blockscale.gemm._hopper", reason="needs a triton with Gluon")
    assert main(["explain", "gemm", "--a", "fp8_1x128", "--m", "8192", "--n", "8192", "--device", "sm_90"]) == 0
    words = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert "192x128, 3 warpgroups" in words["configuration"]
    assert "TFLOP/s" in words["predicted"]
    assert "by FP8 units at" in words["bound"]
    assert main(["explain", "gemm", "--device", "cpu"]) == 0
    assert "predicted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "operation",
    [
        "swiglu",
        "swiglu_both",
        "swiglu_backward_both",
        "rmsnorm",
        "rmsnorm_both",
        "permute",
        "permute_both",
        "permute_columns",
    ],
)
def test_explain_knows_fused_casts(operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", operation, "--device", "sm_90", "--n", "512"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{operation} mxfp8_e4m3")
    assert "triton" in next(line for line in text.splitlines() if "->" in line)


@pytest.mark.parametrize("device", ["sm90", "h200", "sm_9999", "sm_"])
def test_explain_lists_valid_device_names(device: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "gemm", "--device", device]) == 2
    assert "pass sm_90 for an H100" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["explain", "gemm", "--a", "mxfp9"], "did you mean"),
        (["explain", "gemm", "--a", "mxfp4", "--b", "nvfp4"], "no product of mxfp4 with nvfp4"),
        (["explain", "cast", "--device", "sm_"], "a device is cpu"),
    ],
)
def test_explain_refuses_with_a_reason(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_formats_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FORMATS)
    assert all(name.upper() in text for name in ELEMENTS)


def test_formats_measures_the_error_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--errors"]) == 0
    text = capsys.readouterr().out.partition("SQNR")[2]
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip().startswith(tuple(FORMATS))}
    assert {*rows} == {*FORMATS}
    weight = {name: float(row[0]) for name, row in rows.items()}
    assert weight["fp8_1x128"] > weight["mxfp8_e5m2"] > weight["nvfp4"] + 4 > weight["mxfp4"] + 4 > 20, "dB"
    used = bs.explain("cast", torch.ones(2, 64, device=default_device()), "mxfp4").taken
    assert used is not None
    assert f"backend {used.backend}: {used.summary}" in " ".join(text.split())


def test_missing_packages_are_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 2
    assert "needs rich and tyro. Fix: pip install rich tyro" in capsys.readouterr().err


def test_closed_pipe_exits_with_141() -> None:
    """`head` closes the pipe: no traceback, and the exit status of SIGPIPE."""
    command = [sys.executable, "-m", "blockscale", "formats"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141


def test_a_folder_in_use_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record of the other run is not touched either."""
    from blockscale.train.files import folder_lock

    (tmp_path / "metrics.jsonl").write_text('{"kind": "st')
    with ThreadPoolExecutor(1) as pool, folder_lock(tmp_path):
        assert pool.submit(main, ["train", "tiny", "--steps", "1", "--folder", str(tmp_path)]).result() == 2
    assert "one run at a time" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "metrics.jsonl").read_text() == '{"kind": "st'
