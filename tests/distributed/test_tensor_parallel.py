"""Tensor parallel layers that cast before they gather: the bits of one process, and bytes on the wire."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from support.ranks import start_ranks
from support.tensor_parallel_rank import run

Results = dict[str, Any]
GATHER, SCATTER, SUM = "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "all_reduce"
# forwards gather x and sum y; backwards gather both operands of dy and x's columns, and sum dx
OWNER = [GATHER, SCATTER, GATHER, GATHER, GATHER, SCATTER]
WITH_BIAS = [GATHER, SCATTER, SUM, *OWNER[2:]]
REQUANTIZED = [GATHER, SCATTER, GATHER, SCATTER]


def results_of(run: Callable[..., None], ranks: int, folder: Path) -> list[Results]:
    """What every rank found; errors are shown."""
    start_ranks(run, (ranks, str(folder)), ranks)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for each in found:
        wrong = {label: text for label, text in each.items() if isinstance(text, str)}
        assert not wrong, f"{len(wrong)} of {len(each)} failed, first: {next(iter(wrong.items()))}"
        assert each.keys() == found[0].keys()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(tmp_path: Path, ranks: int):
    """One test for all cases, since starting ranks costs seconds; see support/tensor_parallel_rank.py."""
    kinds = {
        "gathered": 9,
        "layers": 11,
        "requantized": 4,
        "trained": 7,
        "fsdp": 1,
        "experts": 5,
        "moe": 1,
        "ep": 1,
        "shared": 3,
    }
    if ranks == 4:
        kinds = {"gathered": 3, "layers": 2, "requantized": 2, "fsdp": 3, "dp": 1, "experts": 0, "mesh": 2, "ep": 1}
    for found in results_of(run, ranks, tmp_path):
        counts = Counter(label.split(" ")[0] for label in found)
        assert all(counts[kind] >= number for kind, number in kinds.items()), counts
        for label, each in found.items():
            kind = label.split(" ")[0]
            if kind == "gathered":
                assert len(each) == 4, label
                assert all(each.values()), label
            elif kind == "layers":
                check_layers(label, each, ranks)
            elif kind == "requantized":
                check_requantized(label, each, ranks)
            elif kind == "trained":
                check_trained(label, each)
            elif kind == "experts":
                check_experts(label, each, ranks)
            elif kind == "mesh":
                check_cut(label, each, ranks)
            elif kind == "shared":
                assert each["same"] == [True] * 6, label
                assert each["x off"] < 3e-7, label
                assert each["bytes"] == pytest.approx(1 / 3 if "wgrad" not in label else 4 / (3 * (1.03125 + 4))), label
                one = label == "shared owner"
                assert each["calls"] == [GATHER, *[GATHER] * one, SCATTER], label
            elif kind == "ep":
                assert max(each.values()) < 1e-6, label
            elif kind == "compiled":
                assert each == {"same": True}, label
            elif kind == "moe":
                check_moe(label, each)
            elif kind in ("fsdp", "dp"):
                # gradients are also averaged over the data parallel ranks
                assert each["gradients"] < (1e-6 if "experts" in label else 3e-7), label
                assert (each["loaded"], each["filled"]) == (0.0, 0.0), label
        check_refusals(found["refusals"], REFUSED)
        if ranks == 2:
            assert found["accumulated"] == {"grad": True, "torch.float32": True, "torch.bfloat16": True}
            check_frozen(found["frozen owner"], columns=[GATHER])
            check_frozen(found["frozen requantized"], columns=[])
            assert found["evaluated"] == {"h": True, "calls": [GATHER]}
            assert {"compiled", "compiled cut", "compiled divided"} <= found.keys()
            check_refusals(found["expert refusals"], REFUSED_BY_EXPERTS)
            check_refusals(found["style refusals"], REFUSED_BY_STYLES)
            assert "modified by an inplace operation" in found["changed"]["error"]
            assert found["copied"] == {"off": 0.0}


def check_frozen(found: Results, columns: list[str]) -> None:
    """Only what a gradient needs is gathered.  columns: collectives of x's column operand."""
    assert found["column_parallel weight"] == [0.0, [GATHER, *columns]]
    assert found["row_parallel weight"] == [0.0, [SCATTER, GATHER]]
    assert found["row_parallel x"] == [0.0, [SCATTER, GATHER]]
    off, calls = found["column_parallel x"]
    assert off < 2**-8, "a sum of two parts, each rounded to bf16"
    assert calls == [GATHER, SCATTER]


def check_trained(label: str, found: Results) -> None:
    """Two steps of a model: gradients and weights are within the order of sums of one process."""
    weights = {name: off for name, off in found["gradients"].items() if "bias" not in name and "norm" not in name}
    assert len(weights) == 2
    assert max(found["gradients"].values()) < 1e-6, label
    assert max(found["y"], found["weights"]) < 1e-6, label
    requantizes = "requantized" in label
    if not requantizes:
        calls = [each for each in found["calls"] if each != SUM]
        assert calls == OWNER, label
    assert (found["cast"] > 0) == requantizes, label


def check_layers(label: str, found: Results, ranks: int) -> None:
    """Bits of one process; sums over ranks are those of their parts."""
    assert (found["h"], found["dh"], found["up"], found["down"]) == (0.0,) * 4, label
    check_sums(label, found, ranks)
    if label == "layers bias":
        assert found["up bias"] == 0.0
        assert found["down bias"] < 1e-6
        assert found["calls"] == WITH_BIAS
    elif label == "layers all unquantized":
        assert found["calls"] == [GATHER, SCATTER, GATHER, GATHER, SCATTER]
    else:
        assert found["calls"] == OWNER, label
    shares = {
        "layers mxfp4": 0.53125,
        "layers wgrad unquantized": (4 + 2 * 1.03125) / 4,
        "layers dgrad unquantized": (2 + 3 * 1.03125) / 4,
        "layers fprop unquantized": (2 + 3 * 1.03125) / 4,
        "layers all unquantized": 3.0,  # x twice and dy once, in fp32
    }
    assert found["share"] == shares.get(label, 1.03125), label
    assert found["counted"] == [0, 0], "nothing is requantized unasked"


def check_sums(label: str, found: Results, ranks: int) -> None:
    for name in ("y", "x"):
        assert found[f"{name} in bound"] is True, label
        if "fp32" in label or "requantized" in label or "mxfp4" in label or "all unquantized" in label:
            assert found[f"{name} off"] < 3e-7, label
        if ranks == 2:
            assert found[f"{name} is the sum"] is True, label
    assert found["summed"] == 1.0, "y and dx travel once, in their dtype"


def check_requantized(label: str, found: Results, ranks: int) -> None:
    assert (found["h"], found["dh"], found["from rows"]) == (0.0, 0.0, True), label
    check_sums(label, found, ranks)
    assert found["calls"] == REQUANTIZED, label
    assert found["share"] <= 0.53, label
    lost, values = found["counted"]
    assert lost == found["lost"], label
    if "spread=True" in label:
        assert lost > 0.3 * values, "the data shows nothing"
        assert 0 < max(found["up"], found["down"]) < 1e-3, label
    else:
        assert lost == 0, label
        assert max(found["up"], found["down"]) <= 2e-7, label


def check_experts(label: str, found: Results, ranks: int) -> None:
    """Experts that are cut: weight gradients have the bits of one process, with payload="low" of one whose x has the
    values of its codes; sums over ranks are those of their parts."""
    check_cut(label, found, ranks)
    # slots and tokens, y; the gradients of y, of x and of the gate weights
    assert found["calls"] == [GATHER, GATHER, SCATTER, GATHER, SCATTER, SCATTER], label
    assert found["summed"] == 1.0, label
    low = "low" in label
    assert (found["counted"] > 0) == low, label
    x = 1.03125 / (4 if "fp32" in label else 2) if low else 1.0
    assert found["gathered"] == (x + 1.0) / 2, "of x and dy in their dtype"


def check_cut(label: str, found: Results, ranks: int) -> None:
    """Weight gradients have the bits of one process; sums over ranks are those of their parts."""
    down = "mesh low" not in label  # its columns of dy are cast from rows
    assert len(found["bits"]) == (4 if "bias" in label else 2) - (not down), label
    assert all(found["bits"].values()), label
    for name in ("y", "x", "gates"):
        assert found[f"{name} in bound"] is True, label
        assert found[f"{name} off"] < (3e-7 if "fp32" in label else 2**-7), label
        assert found.get(f"{name} is the sum", ranks > 2 and "mesh" not in label) is True, label
    assert found["weights off"] <= (5e-7 if "low" in label else 0.0), label


def check_moe(label: str, found: Results) -> None:
    """A step of a mixture of experts with a shared expert, whose router's gradient is summed over ranks; the second
    step has other last bits."""
    assert len(found["gradients"]) == 10
    assert max(found["gradients"].values()) < (1e-5 if "low" in label else 2e-6), label
    assert max(found["y"], found["weights"]) < (1e-5 if "low" in label else 2e-6), label
    assert found["load"] is True, label
    assert (found["cast"] > 0) == ("low" in label)


REFUSED_BY_EXPERTS = {
    "hidden": "in shards of 64 along axis 1",
    "stochastic": "experts that are cut along the hidden units, with recipe 'mxfp4'",
    "low": "recipe 'fp8_blockwise'",
    "payload": "unknown payload 'fp8'",
    "linear": "ExpertTensorParallel for a Linear",
    "mesh": "a mesh of 2 dimensions",
    "no gates": "without gate weights",
    "tokens": "x (3, 64) for a routing of 4 tokens",
    "ends": "the ends of sorted rows",
    "twice": "ExpertTensorParallel for a TensorParallelExperts",
    "hooks": "with hooks",
    "main_grad": "delete main_grad",
    "step": "a shared cast of a sharded weight",
}
REFUSED = {
    "tokens fp8": "multiple of 128 tokens",
    "tokens mx": "multiple of 32 tokens",
    "tokens row": "48 contiguous tokens a rank",
    "runs": "32 contiguous tokens a rank",
    "uneven": "all ranks have as many tokens",
    "rows of the weight": "in shards of 64 along axis 0",
    "columns of the weight": "in shards of 64 along axis 1",
    "nvfp4": "one scale for the whole tensor",
    "requantized fp8_blockwise": "for recipe 'fp8_blockwise'",
    "requantized row fp8_blockwise": "dgrad_dy fp8_1x128 fp32",
    "requantized mxfp6": "8-bit elements",
    "requantized row mxfp6": "8-bit elements",
    "requantized mxfp8_wgrad_bf16": "wgrad_x None",
    "requantized row mxfp8_wgrad_bf16": "wgrad_dy None",
    "source": "saves='source'",
    "scattered runs": "lie in 2 runs",
    "no stream": "without a state for stochastic rounding",
    "wgrad": "'anywhere'",
    "gather_dim": "gather_dim=1 for x (128, 256)",
    "shared, late gradients": "gathered without gradients",
    "shared, whole layer": "for a layer that is not column-parallel",
    "shared, recipe": "cast by 'mxfp8' for a layer with 'fp8_blockwise'",
    "mesh": "a mesh of 2 dimensions",
    "group": "group is",
}
REFUSED_BY_STYLES = {
    "plain": "ColwiseParallel for a Linear",
    "packed": "use SwiGLUParallel",
    "nvfp4": "one scale for the whole tensor",
    "blocks": "in shards of 48 along axis 0",
    "hidden": "in shards of 64 along axis 1",
    "stochastic": "recipe 'mxfp4'",
    "twice": "ColwiseParallel for a ColumnParallelLinear",
    "activation": "that several layers share",
    "main_grad": "delete main_grad",
    "step": "a shared cast of a sharded weight",
    "unquantize": "unquantize_ for a ColumnParallelLinear",
}


def check_refusals(found: dict[str, str], wanted: dict[str, str]) -> None:
    assert found.keys() == wanted.keys()
    for label, text in wanted.items():
        assert text in found[label], (label, found[label])
        assert "Fix: " in found[label], label
