"""Ranks as forks of one process that has imported everything: a scenario costs what its ranks compute.

Another fork has the store of all of them, as torchrun's agent has, so ranks may be killed. The process that forks has
no thread, such as that of a store: a fork that copies a lock of another thread waits for it forever. Each rank writes
what it found, or the text of its error, to `<scenario>-<rank>.json`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
Scenario = Callable[[int, Path], Any]


class Launcher:
    """Starts scenarios of several ranks, one after the other, or beside each other with `start` and `wait`."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.folder, self.count = folder, 0
        _serve(port)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def start(self, name: str, scenario: Scenario, ranks: int) -> list[int]:
        """Process ids of the ranks."""
        self.count += 1
        return [self._fork(name, scenario, rank, ranks) for rank in range(ranks)]

    def _fork(self, name: str, scenario: Scenario, rank: int, ranks: int) -> int:
        child = _fork()
        if child:
            return child
        faulthandler.register(signal.SIGUSR1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": str(self.count)}
        start, found, status = time.monotonic(), {"value": None}, 1
        try:
            found["value"], status = scenario(rank, self.folder), 0
        except BaseException as error:
            found |= {"error": type(error).__name__, "said": str(error), "traceback": traceback.format_exc()}
        found["seconds"] = time.monotonic() - start
        (self.folder / f"{name}-{rank}.json").write_text(json.dumps(found))
        os._exit(status)

    def wait(self, children: list[int]) -> None:
        for child in children:
            os.waitpid(child, 0)

    def run(self, name: str, scenario: Scenario, ranks: int = 2) -> None:
        self.wait(self.start(name, scenario, ranks))


def _fork() -> int:
    """0 in the new process, which ends with this one: nothing outlives a test that was stopped."""
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return child


def _serve(port: int) -> None:
    """Start the process that has the store, and wait until it listens."""
    if not _fork():
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        while store.port:
            signal.pause()
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError("the store does not listen")


def results(folder: Path) -> dict[str, dict[int, Mapping[str, Any]]]:
    """What ranks wrote, by scenario and rank."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("*-*.json")):
        name, _, rank = path.stem.rpartition("-")
        found.setdefault(name, {})[int(rank)] = json.loads(path.read_text())
    return found
