"""Experts of several ranks: the numbers of one process that has the tokens of all ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from support.expert_parallel import run
from support.ranks import start_ranks

Results = dict[str, Any]


SAID = {
    "low fp8_blockwise": "recipe 'fp8_blockwise'.*fprop_x is cast to fp8_1x128 fp32.*fp8_blockwise_pow2",
    "low nvfp4": "recipe 'nvfp4'.*fprop_x is cast to nvfp4 nearest",
    "low mxfp4": "recipe 'mxfp4'.*fprop_x is cast to mxfp4 even",
    "low mxfp6": "recipe 'mxfp6'.*fprop_x is cast to mxfp6_e2m3",
    "low mxfp8_wgrad_bf16": "wgrad_x is unquantized",
    "low bf16": "fprop_x is unquantized",
    "low since": "unquantized at some steps",
    "payload": "unknown payload 'fp8'",
    "rows": "rows=0",
    "linear": "expert_parallel_ of a Linear",
    "mesh": "one dimension",
    "ranks": "ranks differ in down.weight: .*4, 160, 96.*5, 160, 96",
    "dispatchers": "ranks differ in the dispatcher: .*rows=4.*rows=5",
    "twice": "whole experts are divided, once",
    "dtypes": "ranks that differ in dtype: float32, bfloat16",
    "slots": "ranks that differ in experts of a token: 1, 2",
    "rows alone": "the ends of sorted rows",
    "experts": "a routing to 5 experts for 4",
    "one evaluates": "ranks that differ in needed gradients: 0, ",
    "dtypes fixed": "ranks that differ in dtype: float32, bfloat16",
    "changed": "modified by an inplace operation",
    "changed low": "modified by an inplace operation",
    "main_grad": "weight.main_grad",
    "attach": "a shared cast of a sharded weight",
    "hooks": "with hooks",
    "activation": "an activation of their own",
    "unconverted": "expert_parallel_ of an? Experts.*convert experts of Transformers with quantize_ first",
}


def results_of(ranks: int, folder: Path, start: Callable[..., Any] = start_ranks) -> Results:
    """What all ranks found, the same; their errors are shown."""
    start(run, (ranks, str(folder), ()), ranks)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for each in found:
        wrong = {label: text for label, text in each.items() if isinstance(text, str) and "Traceback" in text}
        assert not wrong, f"{len(wrong)} of {len(each)} failed, first: {next(iter(wrong.items()))}"
        assert each == found[0], "every rank has the same results, and the same errors"
    return found[0]


def check_results(results: Results) -> None:
    full = {label: found for label, found in results.items() if "16 bits" in label}
    assert len(full) >= 6
    for label, found in full.items():
        assert found == dict.fromkeys(found, 0.0), label
        assert {"y"} < set(found)
    low = {label: found for label, found in results.items() if label.startswith("low")}
    assert len(low) >= 4
    for label, found in low.items():
        exact = {name: value for name, value in found.items() if "weight" not in name}
        assert exact == dict.fromkeys(exact, 0.0), label
        assert {"y", "dx", "gates", "requantized"} <= set(exact)
        # rows of one expert that differ in size lose their smallest values to the largest of their column block
        worst = max(found["gate_up.weight"], found["down.weight"])
        assert worst <= (1e-5 if "spread" in label else 2e-7 if "even" in label else 5e-7), label
    assert results["low hot"]["down.weight"] > 0
    for label in (label for label in results if label.startswith("no expert")):
        assert results[label] == {"y": 0.0, "dx": 0.0, "gates": 0.0}, label
    others = {label: found for label, found in results.items() if label.startswith(("fsdp", "transformers"))}
    assert len(others) >= 2
    for label, found in others.items():
        weights = {name: each for name, each in found.items() if label.endswith("low") and "bias" not in name}
        weights = {name: each for name, each in weights.items() if "down" in name or "gate_up" in name}
        exact = {name: each for name, each in found.items() if name not in weights}
        assert exact == dict.fromkeys(exact, 0.0), label
        assert all(each <= 5e-7 for each in weights.values()), label
    if "refusals" in results:
        assert results["refusals"].keys() == SAID.keys()
        for name, pattern in SAID.items():
            assert re.search(pattern, results["refusals"][name], re.DOTALL), (name, results["refusals"][name])
    found = results["checkpoints"]
    assert 0 <= found.pop("trained") <= 1e-6, "the order of sums over one process's and two ranks' losses"
    assert found == dict.fromkeys(found, 0.0) | {"names us": False}
    said = results["overflow"]
    assert all("12 rows from rank 0 to rank" in each and "at most 11" in each for each in said["11 rows"])
    assert set(said["12 rows"]) == {"1"}
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


@pytest.mark.gpu
def test_four_processes_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`FixedCapacity` over symmetric memory, which all ranks have on one GPU; gloo alone starts them."""
    monkeypatch.setenv("EXPERTS_ON", "cuda")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    # new processes: CUDA, and the environment that was set here
    results = results_of(4, tmp_path, torch.multiprocessing.spawn)
    assert len(results) == 8
    for label, found in results.items():
        weights = {name: value for name, value in found.items() if name in ("gate_up.weight", "down.weight")}
        exact = {name: value for name, value in found.items() if name not in weights}
        assert exact == dict.fromkeys(exact, 0.0), label
        assert max(weights.values()) <= (0.0 if "16 bits" in label else 5e-7), label
