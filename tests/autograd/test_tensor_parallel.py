"""Layers under torch's tensor parallel styles: torch's own collectives, the whole layer's bits, errors in time.

Two real ranks; see tests/support/tensor_parallel.py for the cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from support.ranks import start_ranks
from support.tensor_parallel import LOW, PLANS, RANKS, THOROUGH, run

Results = dict[str, Any]
# case -> parts of its error: of the value, of the rule and of the fix
REFUSED = {
    "hidden 384, colwise": ("0.weight (384, 256) in shards of 192 along axis 0", "every 128 values", "degree"),
    "hidden 384, rowwise": ("0.weight (256, 384) in shards of 192 along axis 1", "every 128 values", "degree"),
    "one block for two ranks": ("in shards of 16", "every 32 values", "multiple of 32"),
    "converted after": ("0.weight (384, 256) in shards of 192", "whole blocks", "degree"),
    "nvfp4": ("for recipe 'nvfp4'", "one scale for the whole tensor", "leave the layer out"),
    "nvfp4 converted after": ("for recipe 'nvfp4'", "one scale for the whole tensor", "leave the layer out"),
    "nvfp4 sharded tokens": ("an input placed (Shard(dim=0),)", "one scale for the whole tensor", "FSDP2"),
    "swiglu": ("weight (1024, 256) placed (Shard(dim=0),)", "all gates, then all ups", "two torch.nn.Linear"),
    "swiglu with bias": ("weight (1024, 256) placed", "all gates, then all ups", "two torch.nn.Linear"),
    "swiglu from linears": ("weight (512, 256) placed", "all gates, then all ups", "two torch.nn.Linear"),
    "swiglu by hand": ("gate_up_weight (512, 256)", "all gates, then all ups", "two torch.nn.Linear"),
    "moe": ("GroupedLinear.weight", "not sharded by DTensor", "FSDP2 and DDP"),
    "experts": ("(4, 128, 64) placed (Shard(dim=0),)", "not sharded by DTensor", "FSDP2 and DDP"),
    "experts behind its back": ("placed (Shard(dim=0),)", "not sharded by DTensor", "FSDP2 and DDP"),
    "moe with a DTensor": ("MoE: a DTensor (8, 64)", "plain tensors", "FSDP2 and DDP"),
    "plain input": ("the input is a plain tensor (8, 256)", "both are DTensors", "ColwiseParallel"),
    "plain weight": ("the weight a plain tensor (512, 256)", "both are DTensors", "ColwiseParallel"),
    "tokens and rows": ("an input placed S(0) for a weight placed S(0)", "gather", "redistribute"),
    "features and a whole weight": ("an input placed S(1) for a weight placed R", "gather", "redistribute"),
    "bias placed otherwise": ("a bias that is a DTensor (512,) placed (Replicate(),)", "Shard(dim=0)", "place both"),
    "main_grad": ("weight.main_grad", "weight.grad", "delete"),
    "misaligned by hand": ("the weight (96, 256) in shards of 48", "every 128 values", "degree"),
    "converted again": ("for recipe 'nvfp4'", "one scale for the whole tensor", "leave the layer out"),
    "drawn along the second axis": ("(2, 8, 512) that is sharded along axis 1", "counted by row", "first axis"),
    "only the bias": ("the input is a plain tensor (8, 256)", "both are DTensors", "ColwiseParallel"),
    "cast": ("x (4, 192) placed (Shard(dim=1),)", "never gathered unasked", "redistribute"),
    "product": ("placed (Shard(dim=0),)", "never gathered unasked", "redistribute"),
}
ALLOWED = (
    *("hidden 384, mxfp8", "converted after, fits", "dequantize"),
    *("changed input, cast kept", "changed input, frozen weight"),
)


@pytest.mark.slow
def test_two_ranks_compute_their_own_shards(tmp_path: Path):
    """One test, since every worker that had a part of it would start ranks of its own."""
    start_ranks(run, (str(tmp_path),), RANKS)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        wrong = {label: each for label, each in found.items() if isinstance(each, str) and "Traceback" in each}
        assert not wrong, f"{len(wrong)} of {len(found)} failed, first: {next(iter(wrong.items()))}"
        check_collectives(found, compiled=THOROUGH or rank == RANKS - 1)
        check_numbers(found)
        check_refusals(found)


def of_kind(results: Results, kind: str) -> Results:
    return {label: found for label, found in results.items() if label.startswith(kind)}


def check_collectives(results: Results, *, compiled: bool) -> None:
    """Exactly those of torch's own layers, eager and compiled; whatever the recipe, the dtype and the style."""
    styles, graphs = of_kind(results, "style"), of_kind(results, "compiled")
    assert len(styles) == (len(PLANS) * len(LOW) * 3 if THOROUGH else len(PLANS) - 1 + len(LOW) * 3)
    assert len(graphs) == (2 * len(LOW) if THOROUGH else 2)
    others = {label: found for label, found in (styles | graphs).items() if found["ours"] != found["torch"]}
    assert others == {}
    counted = styles | graphs if compiled else styles
    assert all(sum(found["torch"].values()) >= 2 for found in counted.values())  # there is something to compare


def check_numbers(results: Results) -> None:
    """Bits of single layers; gradients of blocks of two layers within the rounding of partial sums."""
    found = of_kind(results, "numbers") | of_kind(results, "swiglu")
    assert len(found) >= 3 * len(LOW)
    assert {label: each for label, each in found.items() if not all(each.values())} == {}
    assert {label: each for label, each in of_kind(results, "compiled").items() if not each["same"]} == {}
    styles = of_kind(results, "style")
    assert {
        label: each for label, each in styles.items() if not each["error"] < (0.1 if "mxfp4" in label else 0.03)
    } == {}


def check_refusals(results: Results) -> None:
    """Our errors on every rank, with the value, the rule and the fix."""
    found = {label.removeprefix("refused "): text for label, text in of_kind(results, "refused").items()}
    for name in ("changed weight", "changed input", "changed input, wgrad in bf16"):
        assert "modified by an inplace operation" in found.pop(name)
    assert {*found} == {*REFUSED, *ALLOWED}
    assert {name: found[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, "nothing")
    for name, parts in REFUSED.items():
        kind, _, text = found[name].partition(": ")
        assert kind in ("ShardingError", "OptionError"), found[name]
        for part in parts:
            assert part in text, f"{name}: {text}"
