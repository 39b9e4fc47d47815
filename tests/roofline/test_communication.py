"""Bytes of collectives by hand, and what must hold whatever the sizes are. tests/distributed/test_page.py compares them
with the bytes that two ranks count."""

from __future__ import annotations

import pytest

from blockscale.autograd.recipe import get_recipe
from blockscale.bench.blocks import BLOCKS
from blockscale.bench.shapes import MIXTURES, MODELS
from blockscale.errors import OptionError, UnknownNameError
from blockscale.roofline import (
    LINKS,
    MEASURED,
    Block,
    Link,
    ep_transfers,
    fsdp_transfers,
    linear_cost,
    parallel_cost,
    swiglu_cost,
    tp_transfers,
)

FP8 = get_recipe("fp8_blockwise").formats()
# a link on which a byte is easy to divide by
SIMPLE = Link("simple", 1e9, 1e9, 1e-3, "assumed", "made up")


def test_bytes_of_fsdp_by_hand() -> None:
    """A weight of 256x128: 32,768 values in two square blocks of fp32 scales, on 4 ranks."""
    found = [(each.name, each.given, each.wire) for each in fsdp_transfers(32_768, "fp8_128x128", 4)]
    shard = (32_768 + 2 * 4) / 4
    assert found == [
        ("weights", shard, 3 * shard),
        ("weights again", shard, 3 * shard),
        ("gradients", 65_536, 3 * 65_536 / 4),
    ]
    assert [each.given for each in fsdp_transfers(32_768, None, 4)] == [65_536 / 4, 65_536 / 4, 65_536]


@pytest.mark.parametrize(("gathers", "share"), [("bf16", 1.0), ("owner", 1.03125), ("requantized", 0.515625)])
def test_bytes_of_tensor_parallel_by_hand(gathers: str, share: float) -> None:
    """512 tokens of 256 features on 4 ranks: x and dy in bf16 are 65,536 bytes of a rank each."""
    *gathered, y, dx = tp_transfers(512, 256, FP8, 4, gathers=gathers)
    assert sum(each.given for each in gathered) == share * 2 * 65_536
    assert sum(each.wire for each in gathered) == 3 * share * 2 * 65_536
    assert (y.given, y.wire) == (dx.given, dx.wire) == (262_144, 3 * 65_536)


def test_bytes_of_expert_parallel_by_hand() -> None:
    """128 tokens of 256 features to 2 of 16 experts each, on 4 ranks: 65,536 values."""
    numbers, *rows = ep_transfers(128, 256, 2, 16, FP8, 4)
    assert (numbers.given, numbers.wire) == (8 * 16 + 32, 3 * 160)
    assert [each.given for each in rows] == [65_536 * 1.03125, 131_072, 65_536 * 1.03125, 131_072]
    assert [each.wire for each in rows] == [0.75 * each.given for each in rows]
    assert [each.given for each in ep_transfers(128, 256, 2, 16, None, 4)[1:]] == [131_072] * 4


def test_a_step_by_hand() -> None:
    """Two blocks: milliseconds of three collectives, and the rooflines of their layers."""
    block, h200 = Block(2, ((256, 256),), (256, 512)), MEASURED["h200"]
    cost = parallel_cost("fsdp", "bf16", [block], 4096, FP8, h200, SIMPLE, 2)
    weights = 256 * 256 + 3 * 256 * 512
    assert cost.wire == 2 * 3 * weights
    assert cost.link == pytest.approx(2 * (3e-3 + 3 * weights / 1e9))
    each = linear_cost(4096, 256, 256, FP8, h200).seconds + swiglu_cost(4096, 256, 512, FP8, h200).seconds
    assert cost.compute == pytest.approx(2 * each)
    assert (cost.serial, cost.overlapped) == (cost.link + cost.compute, max(cost.link, cost.compute))
    half = parallel_cost("tp", "owner", [block], 4096, FP8, h200, SIMPLE, 2)
    assert half.compute == pytest.approx(cost.compute / 2)
    # attention and the MLP: four gathers and two sums each
    assert half.link == pytest.approx(2 * 2 * 6e-3 + half.wire / 1e9)


def test_one_rank_sends_nothing() -> None:
    for kind, payload, model in (
        ("fsdp", "codes", "Llama3 8B"),
        ("tp", "owner", "Llama3 8B"),
        ("ep", "low", "DeepSeek 16B"),
    ):
        assert parallel_cost(kind, payload, BLOCKS[model], 4096, FP8, MEASURED["h200"], SIMPLE, 1).wire == 0


def test_names_and_ranks_are_checked() -> None:
    for kind, payload in (("dp", "bf16"), ("fsdp", "low")):
        with pytest.raises(UnknownNameError):
            parallel_cost(kind, payload, BLOCKS["Llama3 8B"], 4096, FP8, MEASURED["h200"], SIMPLE, 8)
    with pytest.raises(OptionError, match="0 ranks"):
        parallel_cost("fsdp", "bf16", BLOCKS["Llama3 8B"], 4096, FP8, MEASURED["h200"], SIMPLE, 0)


def test_blocks_are_those_of_the_other_tables() -> None:
    (llama,), (dense, mixture) = BLOCKS["Llama3 8B"], BLOCKS["DeepSeek 16B"]
    assert (*llama.linears, llama.mlp, llama.mlp[::-1]) == MODELS["Llama3 8B"]
    assert (*dense.linears, dense.mlp, dense.mlp[::-1]) == MODELS["DeepSeek 16B"]
    assert (mixture.experts, mixture.top_k, *mixture.expert) == tuple(MIXTURES["DeepSeek 16B"])
    assert mixture.mlp == (2048, 2 * 1408), "two shared experts"
    # 8.03 billion less 2 * 128,256 * 4096 of embeddings and head; 15.7 less 2 * 102,400 * 2048
    assert llama.count * llama.weights == pytest.approx(8.03e9 - 1.05e9, rel=0.001)
    assert dense.weights + 26 * mixture.weights == pytest.approx(15.7e9 - 0.42e9, rel=0.002)


def test_links_state_their_basis() -> None:
    assert {name for name, link in LINKS.items() if link.kind == "assumed"} == {"nvlink3", "nvlink4", "infiniband"}
    for link in LINKS.values():
        assert 0.5 < link.bandwidth / link.nominal < 1
        assert link.source
        assert 1e-5 < link.latency < 1e-4
