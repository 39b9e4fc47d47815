"""House rules that a tool can check: import layers, one reader of the environment, short files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "blockscale"
FILES = sorted(SRC.rglob("*.py"))
LONGEST = 600


def test_sources_were_found():
    assert len(FILES) > 30


def lint_imports(cwd: Path, source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_layer_contract():
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    result = lint_imports(ROOT, SRC.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", result.stdout)
    assert kept is not None, result.stdout
    contracts = (ROOT / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")
    assert int(kept.group(1)) == contracts > 0


def registers_a_kernel(path: Path) -> bool:
    """Whether a file imports the decorator `kernel`; some apply it with shared options."""
    imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return any(name.name == "kernel" for node in imports if node.module == "registry" for name in node.names)


def test_the_backend_contract_names_every_file_that_registers_a_kernel():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["name"].startswith("Backends of one operation"))
    folders = [ROOT / "src" / each.replace(".", "/") for each in contract["containers"]]
    backends = {path.stem for folder in folders for path in folder.glob("*.py") if registers_a_kernel(path)}
    assert {name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")} == backends
    assert {"_hopper_rows", "_hopper_upcast", "_triton_rows", "_torch"} < backends


def test_the_layer_contract_can_fail(tmp_path):
    """A control: the contract fails for a copy with an upward import and with a file of no layer."""
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for path in FILES:
        copy = tmp_path / "src" / path.relative_to(SRC.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    errors = tmp_path / "src" / "blockscale" / "errors.py"
    errors.write_text(errors.read_text() + "\n\ndef peek():\n    from . import registry\n    return registry\n")
    (tmp_path / "src" / "blockscale" / "stray.py").write_text('"""Belongs nowhere."""\n')
    result = lint_imports(tmp_path, tmp_path / "src")
    assert result.returncode != 0
    assert "blockscale.errors -> blockscale.registry" in result.stdout
    assert "stray" in result.stdout


def test_only_env_reads_the_environment():
    readers = {str(path.relative_to(SRC)) for path in FILES if re.search(r"\benviron\b|\bgetenv\b", path.read_text())}
    assert readers == {"env.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST
    assert text.startswith('"""')


def test_no_folder_lacks_an_init():
    for path in FILES:
        assert (path.parent / "__init__.py").exists()


def test_nothing_depends_on_one_machine():
    """No absolute paths in the package."""
    for path in FILES:
        found = re.findall(r"[\"'](/(?:home|work|tmp|Users|root)/[^\"']*)", path.read_text())
        assert found == [], path
