"""Layers under FSDP2 and DDP: two real ranks train as one process does to the bit, and count their casts of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from support.fully_sharded import BLOCKS, RANKS, run
from support.ranks import start_ranks

WEIGHTS = 2 * BLOCKS
Results = dict[str, Any]


@pytest.mark.slow
def test_two_ranks_and_one_process(tmp_path: Path):
    """One test, since every worker that had a part of it would start ranks of its own; see support/fully_sharded.py."""
    start_ranks(run, (str(tmp_path),), RANKS)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    wrong = {label: found for label, found in first.items() if isinstance(found, str) and "Traceback" in found}
    assert not wrong, f"{len(wrong)} of {len(first)} failed, first: {next(iter(wrong.items()))}"
    assert first == second
    check_bits(first)
    check_controls(first["control"])
    check_casts(first)
    check_refusals(first)
    check_samples(first)


def check_bits(results: Results) -> None:
    """Reduced gradients and stepped weights are those of one process that had both ranks' batches."""
    compared = {label: found for label, found in results.items() if "grads" in found}
    assert len(compared) >= 40
    assert {label: found["grads"] for label, found in compared.items() if found["grads"]} == {}
    assert {label: found["weights"] for label, found in compared.items() if found.get("weights")} == {}


def check_controls(control: dict[str, float]) -> None:
    """The comparison detects the planted differences."""
    assert control["forgotten"] > 0.1
    assert control["stale"] > 0.01


def check_casts(results: Results) -> None:
    seen = 0
    for label, found in results.items():
        weight_cast, *_ = words = label.removeprefix("ddp ").split()
        if "casts" not in found:
            continue
        microbatches = int(next(word for word in words if word.startswith("m=")).removeprefix("m="))
        recompute = not label.startswith("ddp") and words[4] == "True"
        if label.startswith("ddp step"):  # cast after the step before, once for all microbatches
            expected = {}
        elif weight_cast == "twice":  # a recomputed forward casts its operand again, the backward the other
            expected = {"quantize": (2 + recompute) * WEIGHTS * microbatches}
        else:  # under FSDP "step" acts as "forward": operands cannot be refreshed
            expected = {"quantize_both": (1 + recompute) * WEIGHTS * microbatches}
        assert found["casts"] == expected, label
        seen += 1
    assert seen >= 36


def check_refusals(results: Results) -> None:
    refused = [found for label, found in results.items() if label.startswith("refused")]
    assert len(refused) == 6
    for text in refused:
        assert text.startswith("a shared cast of a sharded weight"), text
        assert "weight_cast='twice'" in text


def check_samples(results: Results) -> None:
    """Numerics by layer, of sharded and of replicated models."""
    found = {label: each for label, each in results.items() if label.startswith("measured")}
    assert len(found) == 2
    for label, each in found.items():
        assert each == {"same": True, "finite": True, "layers": WEIGHTS, "left": 0.0}, label
