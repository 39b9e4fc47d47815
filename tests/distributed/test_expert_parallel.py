"""Experts of several ranks: the numbers of one process that has the tokens of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from support.expert_parallel import run

Results = dict[str, Any]


def results_of(ranks: int, folder: Path) -> Results:
    """What the first rank found; all ranks ran, and their errors are shown."""
    torch.multiprocessing.spawn(run, (ranks, str(folder), ()), nprocs=ranks)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for each in found:
        wrong = {label: text for label, text in each.items() if isinstance(text, str) and "Traceback" in text}
        assert not wrong, f"{len(wrong)} of {len(each)} failed, first: {next(iter(wrong.items()))}"
        assert each.keys() == found[0].keys()
    return found[0]


def check_results(results: Results) -> None:
    full = {label: found for label, found in results.items() if "16 bits" in label}
    assert len(full) >= 16
    for label, found in full.items():
        assert found == dict.fromkeys(found, 0.0), label
        assert {"y"} < set(found)
    low = {label: found for label, found in results.items() if label.startswith("low")}
    assert len(low) >= 12
    for label, found in low.items():
        exact = {name: value for name, value in found.items() if "weight" not in name}
        assert exact == dict.fromkeys(exact, 0.0), label
        assert {"y", "dx", "gates", "requantized"} <= set(exact)
        # rows of one expert that differ in size lose their smallest values to the largest of their column block
        worst = max(found["gate_up.weight"], found["down.weight"])
        assert worst <= (1e-5 if "spread" in label else 2e-7 if "even" in label else 5e-7), label
    assert results["low hot"]["down.weight"] > 0
    for label in (label for label in results if label.startswith("wire")):
        found = results[label]
        assert 0.5 < found["dispatch"] == found["gradient of combine"] <= 0.52, label
        assert found["combine"] == found["gradient of dispatch"] == 1.0, label


@pytest.mark.slow
def test_two_ranks(tmp_path: Path):
    """One test, since every worker that had a part of it would start ranks of its own."""
    check_results(results_of(2, tmp_path))


@pytest.mark.slow
def test_four_ranks(tmp_path: Path):
    """Also a rank without tokens, and ranks without experts."""
    check_results(results_of(4, tmp_path))
