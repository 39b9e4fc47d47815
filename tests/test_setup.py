"""The decisions of tools/setup_venv.py: which torch, the pins, and what goes on without network."""

from __future__ import annotations

import importlib.util
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
    monkeypatch.setattr(tool, "installed_version", lambda package: torch.get("version", "2.13.0"))
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
    monkeypatch.setattr(tool, "pip", lambda task, *arguments: asked.append(arguments) or True)
    requires = ["torchdata>=0.8.0", "datasets<4.8.0,>=3.6.0", "wandb", "spmd_types==0.2.3", 'pytest; extra == "dev"']
    monkeypatch.setattr(tool, "requirements", lambda package: requires)
    pins = tool.read_pins()
    assert tool.install_torchtitan(pins)
    assert asked[0] == ("--no-deps", pins["torchtitan"])
    assert asked[1][2:] == ("torchdata>=0.8.0", "datasets<4.8.0,>=3.6.0", "spmd_types==0.2.3")


def test_without_network_the_packages_of_the_machine_serve(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No pin of torch, triton or numpy reaches pip, and a path file takes the place of the installation."""
    monkeypatch.setattr(tool, "VENV", tmp_path)
    monkeypatch.setattr(tool, "pip", lambda task, *arguments: False)
    monkeypatch.setattr(tool, "installed_version", lambda name: None if name == "tyro" else "1")
    written: dict[str, str] = {}
    monkeypatch.setattr(tool, "add_path_file", lambda name, lines: written.update({name: lines}))
    tool.install_beside()
    pins = (tmp_path / "constraints.txt").read_text().splitlines()
    assert pins
    assert not {tool.package_name(line) for line in pins} & tool.STACK
    assert written == {"blockscale": f"{ROOT / 'src'}\n"}
    assert "not here: tyro (what needs them will say so)" in capsys.readouterr().out


def test_the_package_needs_torch_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["torch>=2.11"]
    assert not any("torch" in line for line in project["build-system"]["requires"])
