"""Products beside the rows that they need or make: the bits of the plain path, and waits that cannot be left out."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from blockscale.distributed.overlap.arena import HEADER, SharedArena
from support.overlapped import run
from support.overlapped_link import CALLS, TIMEOUT, WITHOUT, lose_a_rank
from support.ranks import start_ranks

GATHER, SUM, SCATTER = "all_gather_into_tensor_coalesced", "all_reduce", "reduce_scatter_tensor"


def results_of(ranks: int, folder: Path, start: Callable[..., Any] = start_ranks) -> list[dict[str, Any]]:
    """What every rank found; errors are shown."""
    start(run, (ranks, str(folder)), ranks)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for each in found:
        wrong = {label: text for label, text in each.items() if isinstance(text, str) and "Traceback" in text}
        assert not wrong, f"{len(wrong)} of {len(each)} failed, first: {next(iter(wrong.items()))}"
    return found


def check_layers(label: str, found: dict[str, Any], ranks: int) -> None:
    """The bits of collectives before and after products, but for sums over more than two ranks."""
    sums = ("y", "x")
    assert {name for name, wrong in found["differ"].items() if wrong} <= (set(sums) if ranks > 2 else set()), label
    # a collective rounds after each addition, and the link once
    assert all(off <= ranks * 2**-8 for off in found["off"].values()), label
    assert found["y of parts"], "parts are added in the order of ranks, and rounded once"
    # only columns for weight gradients still travel by collectives, and sums of biases
    columns = {"layers pow2 requantized": 0, "layers of sequences": 0, "layers bf16": 1}.get(label, 2)
    assert found["calls"] == [SUM] * ("bias" in label) + [GATHER] * columns, label


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(tmp_path: Path, ranks: int):
    """One test for all cases, since starting ranks costs seconds; see support/overlapped.py. Faults are in
    test_failures.py."""
    before = set(Path("/dev/shm").glob("blockscale-*"))
    for found in results_of(ranks, tmp_path):
        layers = [label for label in found if label.startswith("layers")]
        assert len(layers) == (6 if ranks == 2 else 4)
        for label in layers:
            check_layers(label, found[label], ranks)
        assert found["many calls"] == {"wrong": 0, "calls": 100}
        assert found["broken off"] == {"wrong": 0, "sums": 6}
        for label in (label for label in found if label.startswith(("experts", "divided", "mesh"))):
            check_experts(label, found[label], ranks)
        if ranks == 2:
            check_two(found)
            check_operations(found)
        check_trained(found["trained experts" if ranks == 2 else "trained mesh"])
    assert not set(Path("/dev/shm").glob("blockscale-*")) - before, "a file of an arena is left behind"


def check_trained(found: dict[str, Any]) -> None:
    """Experts learn the same, overlapped or not. Sums over more than two ranks are rounded otherwise."""
    assert found["moved"] > 0.01
    assert found["apart"] < 1e-6
    assert found["on"] == pytest.approx(found["off"], rel=1e-6)
    assert len(set(found["on"])) == 4


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes run on the one GPU; gloo alone starts them."""
    monkeypatch.setenv("OVERLAP_ON", "cuda")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.usefixtures("one_gpu")
def test_processes_on_one_gpu(tmp_path: Path, ranks: int):
    """Symmetric memory, a side stream and waits on the GPU, which ranks share in slices of time."""
    for found in results_of(ranks, tmp_path, torch.multiprocessing.spawn):
        layers = [label for label in found if label.startswith("layers")]
        assert len(layers) == 4
        for label in layers:
            check_layers(label, found[label], ranks)
        for label in (label for label in found if label.startswith("experts")):
            check_experts(label, found[label], ranks)
        for label in (label for label in found if label.startswith("fastest")):
            assert all(off <= 0.02 for off in found[label].values()), found[label]
        calls = int(os.environ.get(CALLS, 1000 if ranks == 2 else 400))
        assert found["many calls"] == {"wrong": 0, "calls": calls // 2}
        assert found["broken off"] == {"wrong": 0, "sums": 6}
        assert found["two streams"] == 0
        check_trained(found["trained mixture"])
        if ranks == 2:
            check_both(found)
            assert found["freed"]["links"] == 0
            assert found["captured"]["equal"] == [True] * 30
            assert found["replayed"]["with"] == [0, 0, 0]
            rows, parts, _ = found["replayed"]["without"]
            assert rows > 0, "a slot of graphs is not needed beside rows that are pulled late"
            assert parts > 0, "a slot of graphs is not needed beside parts that are sent late"
            assert "before the capture" in found["captured"]["larger"]


@pytest.mark.gpu
@pytest.mark.usefixtures("one_gpu")
def test_a_killed_rank_on_a_gpu(tmp_path: Path):
    """The wait of the other rank ends with the group's timeout; its next calls raise an error that names the rank."""
    started = torch.multiprocessing.spawn(lose_a_rank, (str(tmp_path),), 2, join=False)
    assert started is not None
    for process in started.processes:  # `join` would end the other one
        process.join(180)
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["wrong"] == 0
    assert found["is_nan"] == [True], "a sum that the host enqueues before it knows"
    assert TIMEOUT - 1 <= found["seconds"] < TIMEOUT + 5
    assert "an overlapped call with more memory" in found["said"].pop("more memory")
    assert found["said"].keys() == {"lost", "sum", "gather"}
    for said in found["said"].values():
        assert "no word from rank 1" in said
        assert "while rank 0 waits in overlapped call 4" in said


def check_experts(label: str, found: dict[str, Any], ranks: int) -> None:
    """The bits of the path with collectives, but for sums over more than two ranks. A dispatcher sums the slots of a
    token at its rank, and so rounds y once less."""
    dispatched = label.startswith(("divided", "mesh"))
    if label == "experts bf16":  # products by torch, whose bits may depend on the number of rows
        assert max(found["off"].values()) < 2**-8, label
        return
    sums = {"y", "x", "gates"} if ranks > 2 else {"y"} if dispatched else set[str]()
    assert {name for name, wrong in found["differ"].items() if wrong} <= sums, label
    assert max(found["off"].values()) < 2**-8, label
    # the experts and gate weights of slots, and the gradients of gate weights
    assert dispatched or found["calls"] == [GATHER, SCATTER], label
    if not dispatched:
        dim = 128 if label == "experts fp8_blockwise" else 96
        values = [[dim, 2]]
        # codes and their scales travel as one message; gradients in their dtype
        assert found["rows"] == [[[dim + 3, 1]] if label.endswith("low") else values, values], label
        assert found["sums"] == 2, label
        off, on = found["underflows"]
        assert off == on, label
        assert (on[1] > 0) == label.endswith("low"), label


def check_operations(found: dict[str, Any]) -> None:
    """Layers 0 and 1 without gradients, and what they and the layers refuse."""
    for format in ("fp8_1x128", "mxfp8_e4m3", None):
        assert found[f"expert operands {format}"] == {"off": [True] * 4, "on": [True] * 4, "sums": True}, format
    calls = "x", "gates", "weights", "biases", "autocast", "main_grad"
    assert found["partial"] == {call: [] for call in calls}
    parts = {
        "one product": "this one leaves a product unquantized",
        "tensor scale": "this one has tensor scales or rounds stochastically",
        "no gates": "without gate weights",
        "hooks": "experts with hooks",
        "odd": "5 experts on 2 ranks",
        "name": "one of auto, on, off",
        "style": "one of auto, on, off",
        "rows": "a (3, 64) for a routing of 4 tokens",
        "experts": "experts=range(0, 5) of 4",
        "weight": "weight (1, 32, 64) for 4 experts of 64 features",
        "mixed": "an operand times a tensor",
        "none": "tokens are gathered for weights",
        "uneven": "ranks that make different calls",
        "on one rank": "ranks that make different calls",
        "after it": "no error",
        "list": "experts=a list",
        "bias": "bias (4, 31) for a weight (4, 32, 64)",
        "matrix": "it is [E, N, K]",
    }
    for name, part in parts.items():
        assert part in found["refused experts"][name], name
    check_guards(found)
    wrong = found["without the wait for tokens"]
    assert wrong["with"] == 0
    assert wrong["without"] > 0


def check_guards(found: dict[str, Any]) -> None:
    """What changes after a forward is seen, and communication is beside products."""
    guarded = found["guarded"]
    assert guarded["in place 2"]
    assert guarded["in place 3"]
    for needs_grad in (True, False):
        assert "modified by an inplace operation" in guarded[f"changed {needs_grad}"]
    assert 'payload="low" for recipe' in guarded["recipe"]
    assert "weight_operands with" in guarded["operands"]
    assert found["main_grad"] == {"off": True, "on": True}
    layer_0, layer_1 = ["product", "arrived", "product"], ["product", "sent", "product", "sent"]
    assert found["events"] == [*layer_0, *layer_1, "summed", *layer_0, *layer_1, "wgrad", "wgrad", "summed"]


def check_both(found: dict[str, Any]) -> None:
    """Cases of two ranks on CPUs and on a GPU."""
    for wgrad in ("mlp mxfp8", "mlp mxfp8 requantized"):
        assert found[wgrad] == {"y": 0, "x": 0, "gate_up": 0, "down": 0}
    for wgrad, columns in (("owner", 1), ("requantized", 0)):
        check_shared(f"mxfp8 {wgrad}", columns, found)
    losses = found["trained"]
    assert losses["on"] == losses["off"]
    assert len(set(losses["on"])) == 4
    for name in ("fp8_1x128", "mxfp8_e4m3"):
        check_operands(name, 2, found)
    assert found["explained"]["agree"]
    for overlap, part in (
        ("on", 'beside the product, as overlap="on" asks for'),
        ("off", 'by a collective, as overlap="off" asks for'),
        ("auto", "by a collective, since CPU ranks gain nothing by overlap"),
    ):
        assert part in found["explained"][overlap]
        assert "model of h200, not measured: product 3,627 µs" in found["explained"][overlap]
    assert "no model of this machine" in found["explained"]["experts"]
    assert found["evaluated"]
    assert found["evaluated first"]
    assert "must match the size" in found["failing copy"]["said"]
    assert found["failing copy"]["seconds"] < 5
    assert found["failing copy"]["wrong"] == 0
    assert found["skipped step"]
    assert found["kept sums"]
    assert found["shared link"]
    assert "with different layers or sizes in overlapped call" in found["other order"]
    for name in WITHOUT:
        assert found[f"without {name}"]["with"] == 0, name
        assert found[f"without {name}"]["without"] > 0, f"{name} is not needed"


def check_decided(found: dict[str, list[Any]]) -> None:
    """Global sizes, what travels, and mixtures, as the model takes them. Experts that are divided have no model."""
    gather, add, first, second = (
        "all_gather_mm",
        "mm_reduce_scatter",
        "all_gather_grouped_mm",
        "grouped_mm_reduce_scatter",
    )
    one = [1, 1]
    assert found == {
        "column": [[gather, 64, 64, 64, "mxfp8", *one]],
        "row": [[add, 64, 96, 64, "mxfp8", *one]],
        "mlp": [[gather, 64, 128, 64, "mxfp8", *one], [add, 64, 96, 64, "mxfp8", *one]],
        "gathers": [[gather, 64, 96, 64, "bf16", *one]],
        "sums": [[add, 64, 96, 64, "bf16", *one]],
        "experts": [[first, 64, 128, 64, "mxfp8", 3, 2], [second, 64, 64, 64, "mxfp8", 3, 2]],
        "divided experts": [],
        "no model": [[gather, 64, 64, 64, None, *one]],
    }


def check_shared(name: str, columns: int, found: dict[str, Any]) -> None:
    """Layers of one activation gather columns of x alone, and sum the layers' gradients."""
    assert found[f"shared {name}"] == {"differ": [0] * 8, "calls": [GATHER] * columns + [SCATTER]}, name


def check_operands(name: str | None, results: int, found: dict[str, Any]) -> None:
    equal = [True] * results
    assert found[f"operands {name}"] == {"off": equal, "on": equal, "sums": True, "grad": False}, name


def check_two(found: dict[str, Any]) -> None:
    check_both(found)
    check_operands(None, 3, found)
    check_shared("bf16 owner", 0, found)
    check_decided(found["decided"])
    said = found["refused operands"]
    assert "without a tensor scale" in said["tensor scale"]
    assert "both are operands or both tensors" in said["mixed"]
    assert "both are operands or both tensors" in said["mixed tensors"]
    assert "no weight" in said["none"]
    assert "2 biases for 1 weights" in said["biases"]
    assert "31 rows for 2 ranks" in said["rows"]
    assert "a has rows [M, K]" in said["axes"]
    assert found["freed"]["links"] == 0
    assert found["freed"]["threads"] <= 0, "those of groups before may end meanwhile"
    assert found["daemons"] == [True], "a copy that waits for a rank that is gone would keep the process"
    assert "rank 1: the memory of ranks [0" in found["other memory"]
    assert "memory that all ranks map: rank 1: No space left on device" in found["no memory"]
    assert found["timeout"] == 7
    said = found["refusals"]
    assert "one of auto, on, off" in said["name"]
    assert "ranks that make different calls" in said["on one rank"]
    assert said["after it"] == "no error"
    assert "one rank" in said["alone"]
    assert "gathered before" in said["gathered"]
    assert "values and operands of x" in said["values and operands"]
    assert "compiled code" in said["compiled"]


def test_a_flag_passes_2_to_the_31():
    """The comparison of numbers of calls by the sign of their difference."""
    arena = SharedArena.__new__(SharedArena)
    arena.rank, arena.flags = 0, [(ctypes.c_int32 * (HEADER // 4))()]
    for written, wanted, behind in ((5, 5, False), (5, 6, True), (2**31 - 1, 2**31, True), (2**31 + 3, 2**31, False)):
        arena.signal([0], written, 0)
        assert arena.is_behind(0, wanted) == behind
