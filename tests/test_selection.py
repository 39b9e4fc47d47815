"""Which tests a run leaves out, and what it says about them (tests/support/selection.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import blockscale.env
import blockscale.hardware  # noqa: F401  (each run below would import it again)

pytest_plugins = ["pytester"]

CONFTEST = """
from support import selection


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")


def pytest_configure(config):
    config.pluginmanager.register(selection.Selection(config))
    if hasattr(config, "workerinput"):  # a process of its own, which need not import torch to find no GPU
        selection.missing_gpu = lambda item: "need a GPU"
    for mark in ("gpu", "sm90", "sm100", "sweep", "long"):
        config.addinivalue_line("markers", mark)
"""
TESTS = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(3))
def test_gpu(number):
    assert not number, "no GPU here"

@pytest.mark.sweep
def test_sweep():
    pass

@pytest.mark.long
def test_long():
    pass

@pytest.mark.gpu
@pytest.mark.sweep
def test_gpu_sweep():
    pass

def test_plain():
    pass

def test_skipped():
    pytest.skip("a real reason")
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("BLOCKSCALE_REQUIRE_GPU", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    return pytester


def run(project: pytest.Pytester, *words: str) -> tuple[int, str]:
    result = project.runpytest_inprocess("-p", "no:cacheprovider", "-rs", *words)
    return int(result.ret), result.stdout.str()


def test_left_out_tests_are_deselected_and_counted_by_reason(project: pytest.Pytester):
    code, text = run(project)
    assert code == 0
    assert "6 deselected: 4 need a GPU, 1 are sweep cases (--all), 1 take minutes (-m long)" in text
    assert "1 passed, 1 skipped, 6 deselected" in text
    assert "a real reason" in text


def test_workers_report_what_they_left_out_once(project: pytest.Pytester):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    code, text = run(project, "-p", "xdist", "-n", "2")
    assert code == 0
    assert "6 deselected: 4 need a GPU, 1 are sweep cases (--all), 1 take minutes (-m long)" in text
    assert "1 passed, 1 skipped" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--all"], "5 deselected: 4 need a GPU, 1 take minutes (-m long)"),
        (["-m", "not gpu and not long"], "\n1 deselected: 1 are sweep cases (--all)"),
    ],
    ids=["sweep cases too", "counts only what -m selects"],
)
def test_options_say_what_runs(project: pytest.Pytester, words: list[str], said: str):
    code, text = run(project, *words)
    assert code == 0
    assert said in text


def test_long_tests_run_if_selected(project: pytest.Pytester):
    code, text = run(project, "-m", "long")
    assert code == 0
    assert "1 passed, 7 deselected" in text


def test_gpu_tests_without_a_gpu_are_no_success(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    code, text = run(project, "-m", "gpu")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "4 deselected: 4 need a GPU" in text
    code, text = run(project, "test_it.py::test_gpu_sweep")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "1 deselected: 1 need a GPU" in text
    monkeypatch.setenv("BLOCKSCALE_REQUIRE_GPU", "1")
    code, text = run(project, "-m", "gpu")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 1 passed" in text


def test_tests_of_another_architecture_are_deselected(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("blockscale.hardware.capability", lambda device: SimpleNamespace(sm=90))
    mark = "import pytest\n@pytest.mark.gpu\n@pytest.mark.{}\ndef test_it():\n    pass\n"
    project.makepyfile(test_it="", test_hopper=mark.format("sm90"), test_blackwell=mark.format("sm100"))
    code, text = run(project)
    assert code == 0
    assert "1 deselected: 1 need sm_100 (found sm_90)" in text
    assert "1 passed, 1 deselected" in text
