"""The decisions of tools/setup_venv.py: which torch, what is said before a large download, and the pins."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "tools" / "setup_venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*names: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("torch", "sympy"), "CPU build, without CUDA packages"),
        (("torch", "nvidia-cublas-cu13"), "CUDA build: about 3 GB"),
        (("torch", "cuda-toolkit", "sympy"), "CUDA build: about 3 GB"),
    ],
)
def test_the_build_of_torch_is_announced(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
    says: str,
) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout=report(*names), stderr="")
    monkeypatch.setattr(tool.subprocess, "run", lambda *args, **named: answer)
    tool.announce_torch(["torch==2.13.0"])
    text = capsys.readouterr().out
    assert says in text
    assert ("TORCH_INDEX" in text) == ("CUDA build:" in text)


@pytest.mark.parametrize(
    ("option", "torch", "taken"),
    [
        ("", {"version": "2.11.0+cu130", "gpu": "H200"}, "2.11.0+cu130"),
        ("", {"version": "2.13.0+cpu", "gpu": None}, None),
        ("1", {"version": "2.13.0+cpu", "gpu": None}, "2.13.0+cpu"),
        ("0", {"version": "2.13.0", "gpu": "H200"}, None),
        ("", {"version": "2.9.1", "gpu": "H200"}, None),
        ("", {"error": "broken"}, None),
    ],
)
def test_which_torch_is_borrowed(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, option: str, torch: dict[str, str], taken: str | None
) -> None:
    monkeypatch.setattr(tool, "ask_torch", lambda python: torch)
    assert tool.find_system_torch(option) == taken


@pytest.mark.parametrize("torch", [{"version": "2.9.1", "gpu": "H200"}, {"error": "broken"}])
def test_requiring_an_unusable_torch_is_an_error(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, torch: dict[str, str]
) -> None:
    monkeypatch.setattr(tool, "ask_torch", lambda python: torch)
    with pytest.raises(tool.SetupError, match=r"Fix: install torch 2.11 or newer"):
        tool.find_system_torch("1")


def test_an_old_python_is_refused(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "OLDEST_PYTHON", (sys.version_info[0], sys.version_info[1] + 1))
    with pytest.raises(tool.SetupError, match="Fix: name a newer one"):
        tool.main()


def test_every_tool_that_is_installed_is_pinned(tool: ModuleType) -> None:
    pins = tool.read_pins()
    assert tool.wanted_packages() <= set(pins)
    assert {"torch", "triton", "numpy"} <= set(pins)


def test_torchtitan_comes_without_wandb(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(tool, "pip", lambda task, *arguments: asked.append(arguments))
    requires = ["torchdata>=0.8.0", "datasets<4.8.0,>=3.6.0", "wandb", "spmd_types==0.2.3", 'pytest; extra == "dev"']
    monkeypatch.setattr(tool, "list_packages", lambda: {"torchtitan": requires})
    pins = tool.read_pins()
    tool.install_torchtitan(pins)
    assert asked[0] == ("--no-deps", pins["torchtitan"])
    assert asked[1][2:] == ("torchdata>=0.8.0", "datasets<4.8.0,>=3.6.0", "spmd_types==0.2.3")


def test_the_package_needs_torch_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["torch>=2.11"]
    assert not any("torch" in line for line in project["build-system"]["requires"])
