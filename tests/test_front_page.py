"""README is one screen that keeps its promises: size, example, support matrix, links in a checkout and in a package."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

from blockscale import diagnostics as diagnostics  # registers every kernel
from blockscale.formats import FORMATS
from blockscale.hardware import Capability
from blockscale.registry import Request, explain_request

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_readme_fits_in_9_kb() -> None:
    assert len(README.encode()) <= 9 * 1024


def test_changelog_has_at_most_60_lines() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


def test_glossary_fits_on_two_screens() -> None:
    assert len((ROOT / "docs" / "glossary.md").read_text().splitlines()) <= 80


def test_readme_example_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Six statements, and their output as README shows it."""
    ((example, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


# ---- the support matrix ----------------------------------------------------------------------------------------------

_PAIRS = {
    "FP8 blockwise": ("fp8_1x128", "fp8_128x128"),
    "MXFP8, weights in 128x128 blocks": ("mxfp8_e4m3", "mxfp8_e4m3_128x128"),
    "MXFP8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "MXFP6": ("mxfp6_e2m3", "mxfp6_e2m3"),
    "MXFP4": ("mxfp4", "mxfp4"),
    "NVFP4": ("nvfp4", "nvfp4"),
}
_DEVICES = (("CPU", 0), ("sm_80: A100", 80), ("sm_90: H100, H200", 90), ("sm_100: B200", 100), ("sm_120: RTX 50", 120))
_NATIVE = {"hopper", "hopper_rows", "blackwell", "torch_sm100"}


def support(pair: tuple[str, str], sm: int) -> str:
    """What the registry says of a dense and of an m-grouped GEMM; both must agree."""
    where, found = Capability("cuda", sm) if sm else Capability("cpu", 0), set()
    for op, shape in (("gemm", (4096, 4096, 4096)), ("m_grouped", (4096, 4096, 4096, 8))):
        layouts = tuple(FORMATS[name].default_layout for name in pair)
        explained = explain_request(Request(op, where, pair, shape, torch.bfloat16, layouts))
        able = {each.backend for each in explained.candidates if each.fits}
        assert explained.taken is not None
        if explained.taken.backend in _NATIVE:
            found.add("native")
        # Triton's FP8 dot multiplies FP8 blockwise on Blackwell, too
        elif able & _NATIVE or (sm >= 100 and pair[0] == "fp8_1x128" and "triton" in able):
            found.add("compiled, never run")
        else:
            found.add("emulated")
    assert len(found) == 1, (pair, sm, found)
    return found.pop()


def test_support_matrix_is_the_registrys() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:2] == "| "]
    head = ["format", *(name for name, _ in _DEVICES)]
    matrix = rows[rows.index(head) + 1 :][: len(_PAIRS)]
    assert matrix == [[name, *(support(pair, sm) for _, sm in _DEVICES)] for name, pair in _PAIRS.items()]


# ---- links -----------------------------------------------------------------------------------------------------------


def hook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """tools/package_readme.py, without the build backend that it is written for."""
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["hatchling.metadata.plugin.interface"].MetadataHookInterface = object  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("package_readme", ROOT / "tools" / "package_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_package_start_with_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]
    made = hook(monkeypatch).PackageReadme()
    made.root, metadata = str(ROOT), dict(project)
    made.update(metadata)
    targets = re.findall(r"\]\(([^)]+)\)", metadata["readme"]["text"])
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", README)) > 10
    for target in targets:
        path = re.fullmatch(rf"{re.escape(repository)}/(?:raw|blob)/main/([^#]+)(?:#.*)?", target)
        assert path is not None, target
        assert (ROOT / path[1]).exists(), target
