"""What every test shares: poisoned outputs, devices, the count of values compared with oracles, GPU result lines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# before blockscale is imported: outputs start as NaN bytes, so what a kernel forgets to write is seen
os.environ["BLOCKSCALE_POISON"] = "1"
# inductor would compile and run a program for each vector unit of the CPU; its own loops around our casts may be scalar
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# and start processes that import torch to compile in, more than one per worker of xdist
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# plans tuned on this machine are not under test
os.environ["BLOCKSCALE_TUNED"] = "off"

import pytest
import torch

from support.selection import Selection

_COMPARED: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that are marked sweep")
    parser.addoption("--results", type=Path, default=None, help="append one JSON line per GPU test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Deselects tests by their marks; programs that tests start are told of --all."""
    config.pluginmanager.register(Selection(config))
    if config.getoption("--all"):
        os.environ["ALL_TESTS"] = "1"  # not BLOCKSCALE_*: those are the library's, and doctor reports others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long starts first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test that takes it runs on the CPU and, where there is one, on the GPU."""
    return torch.device(request.param)


@pytest.fixture
def compared() -> Counter[str]:
    """`compared["ml_dtypes e4m3"] += n`: values compared with an oracle, summed up at the end of the run."""
    return _COMPARED


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """An empty store of recorded calls (`blockscale.launch`); buffers are not poisoned, as replays do not."""
    from blockscale import library
    from blockscale.launch import recording

    known: dict[Any, Any] = {}
    monkeypatch.setattr(recording, "_RECORDINGS", known)
    monkeypatch.setattr(library, "_POISON", False)
    return known


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was replayed: recordings of `blockscale.launch`."""
    from blockscale.launch import Recording

    found: list[Any] = []
    plain = Recording.replay

    def counted(self: Recording, inputs: Any) -> list[torch.Tensor | None]:
        found.append(self)
        return plain(self, inputs)

    monkeypatch.setattr(Recording, "replay", counted)
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under xdist every worker hands its counts to the controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["compared"] = dict(_COMPARED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    _COMPARED.update(getattr(node, "workeroutput", {}).get("compared", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _COMPARED:
        return
    terminalreporter.section("values compared, all equal")
    for name, count in sorted(_COMPARED.items()):
        terminalreporter.write_line(f"{count:>14,d}  {name}")
    theirs = sum(count for name, count in _COMPARED.items() if name.startswith(("ml_dtypes", "onnx", "gfloat")))
    terminalreporter.write_line(f"{theirs:>14,d}  in all with third-party oracles (ml_dtypes, onnx, gfloat)")
    terminalreporter.write_line(f"{sum(_COMPARED.values()) - theirs:>14,d}  in all with our own independent ones")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With --results: one JSON line per GPU test, flushed as it goes, so that a run that is cut off still tells."""
    outcome = yield
    report = outcome.get_result()
    path = item.config.getoption("--results")
    if path is None or report.when != "call" or not item.get_closest_marker("gpu"):
        return
    line = {
        "test": item.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        "figures": dict(item.user_properties),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
