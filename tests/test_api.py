"""The public API: names and signatures, lazy imports, runnable examples in docstrings, and settings."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import blockscale
from blockscale import env

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
GOLDEN = Path(__file__).parent / "golden" / "api.txt"
REGENERATE = "PYTHONPATH=src python tests/test_api.py"
# need tyro and rich, or another library's trainer; they have their own tests
OPTIONAL = ("blockscale.cli", "blockscale.__main__", "blockscale.integrations.t")
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(blockscale.__path__, "blockscale.")
    if not module.name.startswith(OPTIONAL)
)


# ---- the snapshot --------------------------------------------------------------------------------------------------


def parameter(p: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is p.empty else f": {p.annotation}"
    default = "" if p.default is p.empty else f" = {p.default!r}"
    return f"{star}{p.name}{kind}{default}"


def signature(function: object) -> str:
    """As written in the source: annotations are strings, so their text does not depend on the Python version."""
    found = inspect.signature(function)
    words: list[str] = []
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in words and not any(w.startswith("*") for w in words):
            words.append("*")
        words.append(parameter(p))
    returns = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    return f"({', '.join(words)}){returns}"


def describe(name: str) -> list[str]:
    thing = getattr(blockscale, name)
    if isinstance(thing, str):
        return [f"{name}: str"]
    if not inspect.isclass(thing):
        return [f"{name}{signature(thing)}"]
    assert dataclasses.is_dataclass(thing)
    lines = [f"class {name}"]
    for field in dataclasses.fields(thing):
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        lines.append(f"    {field.name}: {field.type}{default}")
    fields = {field.name for field in dataclasses.fields(thing)}
    for member, value in sorted(vars(thing).items()):
        if member.startswith("_") or member in fields:
            continue
        if isinstance(value, property):
            lines.append(f"    @property {member} -> {value.fget.__annotations__['return']}")
        else:
            lines.append(f"    def {member}{signature(value)}")
    return lines


def snapshot() -> str:
    return "\n".join(line for name in sorted(blockscale.__all__) for line in describe(name)) + "\n"


def test_the_public_api_is_as_recorded():
    assert snapshot() == GOLDEN.read_text(), (
        f"The public API changed. If that is meant, run `{REGENERATE}`, look at the difference in {GOLDEN.name}, "
        "and note it in CHANGELOG.md."
    )


def test_public_names():
    assert set(blockscale._MODULE) | {"__version__"} == set(blockscale.__all__)
    assert set(blockscale.__all__) | set(blockscale._SUBMODULES) <= set(dir(blockscale))
    for name in blockscale.__all__:
        assert getattr(blockscale, name) is not None
    for name in blockscale._SUBMODULES:
        assert getattr(blockscale, name).__name__ == f"blockscale.{name}"
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        blockscale.quantise  # noqa: B018


def test_public_functions_have_docstrings_with_examples():
    for name in sorted(set(blockscale.__all__) - {"__version__", "BlockScaled", "Stochastic"}):
        assert ">>>" in (getattr(blockscale, name).__doc__ or ""), f"{name} has no runnable example"
    for name in ("BlockScaled", "Stochastic"):
        assert getattr(blockscale, name).__doc__


def test_version():
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert written is not None
    assert blockscale.__version__ == written.group(1)


# ---- imports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["blockscale", "blockscale.errors", "blockscale.env", "blockscale.cli.main"])
def test_importing_does_not_import_torch(module):
    """Importing torch takes seconds; `blockscale --help` must not."""
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'rich', 'tyro', 'matplotlib'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


# ---- examples in docstrings ----------------------------------------------------------------------------------------

WITH_EXAMPLES = {
    "blockscale.casts",
    "blockscale.diagnostics.doctor",
    "blockscale.diagnostics.explain",
    "blockscale.diagnostics.quality",
    "blockscale.errors",
    "blockscale.formats.cast_spec",
    "blockscale.formats.elements",
    "blockscale.formats.hadamard",
    "blockscale.formats.layout",
    "blockscale.formats.packing",
    "blockscale.formats.spec",
    "blockscale.formats.stochastic",
    "blockscale.gemm",
    "blockscale.grouped",
    "blockscale.hardware",
    "blockscale.nn.convert",
    "blockscale.nn.linear",
    "blockscale.nn.report",
    "blockscale.registry",
}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    failed, attempted = doctest.testmod(module, optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    assert failed == 0
    if name in WITH_EXAMPLES:
        assert attempted > 0


def test_the_list_of_modules_with_examples_is_current():
    assert set(MODULES) >= WITH_EXAMPLES


# ---- settings ------------------------------------------------------------------------------------------------------


def test_every_variable_that_is_read_is_declared():
    """And every declared variable is read, by the sources or by the tests' conftest."""
    declared = {variable.name for variable in env.VARIABLES}
    mentioned: set[str] = set()
    for path in SRC.rglob("*.py"):
        if path.name != "env.py":
            mentioned |= set(re.findall(r"BLOCKSCALE_[A-Z_]+[A-Z]", path.read_text()))
    assert mentioned <= declared
    set_up = "".join((ROOT / "tests" / name).read_text() for name in ("conftest.py", "support/selection.py"))
    readers = mentioned | set(re.findall(r"BLOCKSCALE_[A-Z_]+[A-Z]", set_up))
    assert declared <= readers, "declared but read nowhere"


def test_variables_have_help_and_the_prefix():
    for variable in env.VARIABLES:
        assert variable.name.startswith(env.PREFIX)
        assert variable.help


def test_env_reads_at_call_time(monkeypatch):
    monkeypatch.delenv("BLOCKSCALE_REQUIRE_GPU", raising=False)
    assert not env.flag("BLOCKSCALE_REQUIRE_GPU")
    assert env.get("BLOCKSCALE_REQUIRE_GPU") == "0"
    for value, want in (("1", True), (" yes ", True), ("TRUE", True), ("on", True), ("0", False), ("", False)):
        monkeypatch.setenv("BLOCKSCALE_REQUIRE_GPU", value)
        assert env.flag("BLOCKSCALE_REQUIRE_GPU") is want
    assert "BLOCKSCALE_REQUIRE_GPU" in env.current()
    with pytest.raises(KeyError):
        env.get("BLOCKSCALE_TYPO")


def test_undeclared_variables_are_found(monkeypatch):
    monkeypatch.setenv("BLOCKSCALE_BACKED", "torch")
    assert env.undeclared() == ["BLOCKSCALE_BACKED"]
    assert "BLOCKSCALE_BACKED" not in env.current()


if __name__ == "__main__":
    GOLDEN.write_text(snapshot())
    print(f"wrote {GOLDEN}")
