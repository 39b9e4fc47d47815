"""FSDP2 that gathers codes: the same bits as one process and as FSDP2 that gathers weights, and bytes on the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from support.gathered import run
from support.ranks import start_ranks

Results = dict[str, Any]


def results_of(ranks: int, folder: Path) -> Results:
    """What the first rank found; all ranks ran, and their errors are shown."""
    start_ranks(run, (ranks, str(folder), ()), ranks)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for each in found:
        wrong = {label: text for label, text in each.items() if isinstance(text, str) and "Traceback" in text}
        assert not wrong, f"{len(wrong)} of {len(each)} failed, first: {next(iter(wrong.items()))}"
        assert each.keys() == found[0].keys()
    return found[0]


@pytest.mark.slow
def test_two_ranks(tmp_path: Path):
    """One test, since every worker that had a part of it would start ranks of its own; see support/gathered.py."""
    results = results_of(2, tmp_path)
    trained = {label: found for label, found in results.items() if label.startswith("weight_cast=")}
    assert len(trained) >= 14
    for label, found in trained.items():
        assert (found["grads"], found["weights"], found["formats"]) == (0.0, 0.0, 4), label
        check_exchanges(label, found["exchanges"])
    for label in ("control hidden=96", "control hidden=101"):
        assert results[label]["grads"] > 0.01, "without the exchange of maxima, straddling blocks have other codes"
        assert results[label]["weights"] > 0.0005
    for label in (label for label in results if label.startswith("mixed")):
        assert results[label] == {"grads": 0.0}, label
    for label in (label for label in results if label.startswith("evaluated")):
        assert results[label] == {"worst": 0.0}, label
    for label in (label for label in results if label.startswith("one shard")):
        assert results[label] == {"grads": 0.0, "weights": 0.0, "formats": 4}, label
    for label in (label for label in results if label.startswith("inductor")):
        assert results[label] == {"grads": 0.0, "weights": 0.0, "formats": 4}, label
    assert results["stepped on one rank"] == {"grads": 0.0}
    assert results["cached state"] == {"weights": 0.0}
    found = results["dropped"]
    assert found["during"] > 20
    assert found["after"] == 0, "a model that is deleted keeps memory"
    assert results["sharded one by one"] == {"worst": 0.0}
    # refused until a refresh, and right after it
    assert results["written elsewhere"] == dict.fromkeys(
        ("state dict", "data", "foreach", "out=", "loaded in place"), "written after 0.0"
    )
    check_experts(results)
    check_checkpoints(results)
    check_refusals(results["refusals"])
    check_reports(results["reports"])
    check_wire(results)


def check_experts(results: Results) -> None:
    """Transformers' experts; for torchtitan's see integrations/test_torchtitan_ranks.py."""
    found = {label: each for label, each in results.items() if label.startswith(("packed", "transposed"))}
    assert len(found) >= 3
    for label, each in found.items():
        assert (each["grads"], each["weights"], each["decoded"]) == (0.0, 0.0, 0), label
        assert each["others"] == {}, label


def check_exchanges(label: str, exchanges: int) -> None:
    """One all-reduce for all weights: once a step with shared casts, else once for each microbatch; none for shards of
    whole blocks."""
    microbatches = 2 if "microbatches=2" in label else 1
    # NVFP4 always exchanges the amax of the tensor
    if "hidden=256" in label and "nvfp4" not in label:
        # the second weight is [64, 256], of which a rank has half a block
        assert exchanges == 1, label
    else:
        assert exchanges == (1 if "weight_cast=step" in label else microbatches), label


def check_checkpoints(results: Results) -> None:
    found = {label: each for label, each in results.items() if label.startswith("checkpoints")}
    assert len(found) == 3
    for label, each in found.items():
        same = {"unquantized": 0.0, "resumed": 0.0, "resumed weights": 0.0, "whole": 0.0}
        assert each == same | {"types": ["Tensor"], "names us": []}, label


def check_refusals(found: dict[str, str]) -> None:
    assert "(101, 64) in 2 shards" in found["uneven nvfp4"]
    assert "was written after the ranks exchanged the maxima" in found["written"]
    assert "the recipe of 0.mlp.0.weight has changed" in found["changed recipe"]
    assert "in torch.bfloat16, and before in torch.float32" in found["changed dtype"]
    assert "in another model" in found["assigned"]
    assert "unquantized" in found["unquantized"]
    assert "into a gathered weight" in found["gathered weight"]
    assert found["views"] == "[(6144,), (64, 96), (2, 2)]", "views of a gathered weight are views of its values"
    assert "is not the cast of its present values" in found["checked"]


def check_reports(found: dict[str, Any]) -> None:
    """Every layer that gathers its own dtype has a reason."""
    assert "1-D blocks" in found["mxfp8"]["0.weight"]
    assert "1-D blocks" in found["mxfp8_wgrad_bf16"]["0.weight"]
    assert "unquantized" in found["fp8_blockwise_dgrad_bf16"]["0.weight"]
    assert found["bf16"] == {}
    assert "changes with the step" in found["since"]["0.weight"]
    assert set(found["tied"]) == {"0.weight", "1.weight"}
    assert "several modules" in found["tied"]["0.weight"]
    assert found["late"] == ["it is a DTensor already: call gather_low_ before fully_shard"]
    assert found["twice"] == ["it is gathered as codes already"]
    assert (found["copy"], found["copy gathers"]) == (["Parameter"], 4)
    assert (found["pickled"], found["pickled y"]) == (["Parameter"], 0.0)
    assert found["alone"] == 0.0, "without FSDP the model computes as before"


def check_wire(results: Results) -> None:
    """Bytes of weights beside those in bf16. 320 rows: blocks straddle the shards."""
    for name, bar in (("fp8_blockwise", 0.52), ("mxfp8_128x128", 0.52), ("nvfp4", 0.27)):
        for size in (512, 320):
            found = results[f"wire {name} {size}"]
            assert found["calls"] == 1
            assert bar / 2 < found["share"] <= bar
            assert found["share"] + found["exchanged"] <= bar
            if size == 512 and name != "nvfp4":
                assert found["exchanged"] == 0.0, "shards of whole blocks exchange nothing"


@pytest.mark.slow
def test_four_ranks(tmp_path: Path):
    """Also in two replicas of two shards, with experts sharded along their rows, ranks without any row, and weights
    that tensor or expert parallelism shards too."""
    results = results_of(4, tmp_path)
    beside = [results.pop(label) for label in list(results) if label.startswith(("over", "beside"))]
    assert len(beside) >= 3
    for found in beside:
        weights = len(found.pop("formats"))
        assert weights in (2, 4)
        assert found == {"same": True, "others": {}, "decoded": 0, "fewer bytes": True}
    worlds = [results.pop(label) for label in list(results) if label.startswith("worlds")]
    readers = {"1 to 2", "2 to 1", "2 to 4", "4 to 2"}
    assert worlds, "files of one, two and four ranks are read by the others"
    assert all(readers <= found.keys() and all(found.values()) for found in worlds)
    assert len(results) >= 7
    for label, found in results.items():
        assert found == {"grads": 0.0, "weights": 0.0, "formats": 4}, label
