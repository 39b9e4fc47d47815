"""Deselection of tests that a run leaves out: those that need another GPU, sweep cases, those that take minutes.

They are deselected, not skipped: a skip in the closing lines is then a missing package or a case that a kernel refuses.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def missing_gpu(item: pytest.Item) -> str | None:
    """What a GPU test lacks on this machine, or None."""
    import torch

    from blockscale import env
    from blockscale.hardware import capability

    if not torch.cuda.is_available():
        # none selected must never look like all passed: where a GPU is required the tests run, and fail
        return None if env.flag("BLOCKSCALE_REQUIRE_GPU") else "need a GPU"
    found = capability("cuda").sm
    for sm in (90, 100):
        if item.get_closest_marker(f"sm{sm}") and found // 10 != sm // 10:
            return f"need sm_{sm} (found sm_{found})"
    return None


class Selection:
    """A pytest plugin that deselects tests and counts them by reason. `--all` must be an option of the run.

    Every worker of xdist collects all tests and deselects the same ones; the controller takes the counts of any worker.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()

    def reason(self, item: pytest.Item) -> str | None:
        """Why a test is left out, as the end of "12 tests ...", or None."""
        if item.get_closest_marker("gpu") and (missing := missing_gpu(item)):
            return missing
        if item.get_closest_marker("sweep") and not self.config.getoption("--all"):
            return "are sweep cases (--all)"
        if item.get_closest_marker("long") and "long" not in self.config.getoption("-m"):
            return "take minutes (-m long)"
        return None

    @pytest.hookimpl(trylast=True)  # after -k, -m and --deselect: what they leave out is not counted here
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        reasons = [self.reason(item) for item in items]
        self.counts.update(reason for reason in reasons if reason)
        left_out = [item for item, reason in zip(items, reasons, strict=True) if reason]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["deselected"] = dict(self.counts)

    @pytest.hookimpl(optionalhook=True)  # xdist's
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.counts = Counter(getattr(node, "workeroutput", {}).get("deselected", {})) or self.counts

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.counts:
            parts = ", ".join(f"{count:,d} {reason}" for reason, count in self.counts.most_common())
            terminalreporter.write_line(f"{self.counts.total():,d} deselected: {parts}")
