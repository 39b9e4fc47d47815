"""Overlapped operations: times by hand, what must hold whatever the sizes are, and options that are refused."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from blockscale.errors import BlockscaleError
from blockscale.names import MACHINES
from blockscale.roofline import OPERATIONS, Ceilings, Link, OverlapMachine, overlap_gain, overlap_machine
from blockscale.roofline.overlap import (
    LEAST_FLOPS,
    OVERLAP_PAYLOADS,
    Constant,
    Operation,
    overlapped_seconds,
    work,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def made_up(value: float) -> Constant:
    return Constant(value, "assumed", "made up")


# a machine on which FLOPs and bytes are easy to divide by
SIMPLE = OverlapMachine(
    Ceilings("simple", "hopper", bandwidth=1e15, bf16=1e15, fp8=2e15, fp4=None, source="made up"),
    Link("simple", 1e11, 1e11, 1e-3, "assumed", "made up"),
    made_up(1e14),
    made_up(2e14),
    made_up(0.5),
    made_up(1e-4),
    made_up(0.25),
)
DENSE = {"tp": 8}
EXPERTS = {"tp": 4, "ep": 2, "experts": 32, "topk": 4}
CASES: list[tuple[Operation, dict[str, Any]]] = [
    ("all_gather_mm", DENSE), ("mm_reduce_scatter", DENSE),
    ("all_gather_grouped_mm", EXPERTS), ("grouped_mm_reduce_scatter", EXPERTS),
]  # fmt: skip
every_operation = pytest.mark.parametrize(("op", "divided"), CASES, ids=[op for op, _ in CASES])


def test_bytes_and_flops_by_hand() -> None:
    """1024 rows of 512 to 2048 features on 4 ranks: a shard of x is 131,072 values, y 2,097,152."""
    flops = 2 * 1024 * 512 * 2048 / 4
    sizes = (1024, 2048, 512)
    assert work("all_gather_mm", *sizes, tp=4) == (flops, 3 * 131_072 * 2)
    for payload, share in {
        "fp8_blockwise": 1 + 4 / 128,
        "fp8_blockwise_pow2": 1 + 4 / 128,
        "mxfp8": 1 + 1 / 32,
    }.items():
        assert work("all_gather_mm", *sizes, tp=4, payload=payload) == (flops, 3 * 131_072 * share)
        # sums travel in bf16
        assert work("mm_reduce_scatter", *sizes, tp=4, payload=payload) == (flops, 2_097_152 * 2 * 3 / 4)
    # a token has three rows; the gather sends it once
    assert work("all_gather_grouped_mm", *sizes, tp=2, ep=2, topk=3) == (3 * flops, 3 * 131_072 * 2)
    assert work("grouped_mm_reduce_scatter", *sizes, tp=2, ep=2, topk=3) == (3 * flops, 2_097_152 * 2 * 3 / 4)
    # rows that the ranks do not divide: the largest shard
    assert work("all_gather_mm", 1025, 2048, 512, tp=4)[1] == 3 * 257 * 512 * 2


def test_times_by_hand() -> None:
    """G = 2e13 / 4 / 1e14 = 50 ms, and C by the bytes at 100 GB/s."""
    sizes: dict[str, Any] = {"m": 10_000, "n": 10_000, "k": 100_000, "tp": 4, "machine": SIMPLE}
    gather, out = overlap_gain("all_gather_mm", **sizes), overlap_gain("mm_reduce_scatter", **sizes)
    product = 2e13 / 4 / 1e14
    assert gather.product == out.product == pytest.approx(product)
    assert gather.communication == pytest.approx(0.75 * 2e9 / 1e11)
    assert out.communication == pytest.approx(0.75 * 2e8 / 1e11)
    assert gather.overlapped == pytest.approx(1e-4 + 1.25 * product)
    assert out.overlapped == pytest.approx(1e-4 + 1.25 * product + out.communication / 4)
    assert (gather.bound, out.bound, gather.chunks) == ("product", "product", 4)
    assert gather.serial == pytest.approx(1e-3 + product + gather.communication)
    assert gather.exposed == pytest.approx(1e-4 + 0.25 * product)
    assert gather.efficiency == pytest.approx(1 - (1e-4 + 0.0125) / 0.015)
    # eight bits: half the product, 1.03125 instead of 2 bytes; experts at half the rate
    low = overlap_gain("all_gather_mm", **sizes, payload="fp8_blockwise")
    assert low.product == pytest.approx(product / 2)
    assert low.communication == pytest.approx(gather.communication * 1.03125 / 2)
    mixture = overlap_gain("all_gather_grouped_mm", **sizes, experts=8, topk=2)
    assert mixture.product == pytest.approx(product * 2 * 2)
    assert mixture.communication == gather.communication


def test_bound_by_the_link() -> None:
    product, communication = 1.0, 4.0
    for op in OPERATIONS:
        assert overlapped_seconds(op, product, communication, 8, 0.5, 0.1) == (0.5 + 4 + 1 / 8, "link")


def test_products_of_few_rows_are_bound_by_memory() -> None:
    """A token for each of 64 experts: a rank reads 32 weights of 512 x 1024 in bf16."""
    slow = dataclasses.replace(SIMPLE, ceilings=dataclasses.replace(SIMPLE.ceilings, bandwidth=1e9))
    found = overlap_gain("all_gather_grouped_mm", 64, 1024, 1024, tp=2, ep=2, experts=64, topk=1, machine=slow)
    moved = 32 * 512 * 1024 * 2 + 32 * 1024 * 2 + 32 * 512 * 2
    assert found.product == pytest.approx(moved / 1e9)


@every_operation
@pytest.mark.parametrize("payload", OVERLAP_PAYLOADS)
def test_times_are_monotone(op: Operation, divided: dict[str, Any], payload: str) -> None:
    """More chunks and a faster link never take longer; wider payloads, slower products and more rows never less."""

    def seconds(
        name: str, m: int = 8192, chunks: int = 8, faster: float = 1, payload: str = payload, **more: float
    ) -> float:
        machine = overlap_machine(name)
        link = dataclasses.replace(machine.link, bandwidth=machine.link.bandwidth * faster)
        machine = dataclasses.replace(machine, link=link)
        known: dict[str, Any] = {"machine": machine, "payload": payload, "chunks": chunks, **divided, **more}
        return overlap_gain(op, m, 8192, 8192, **known).overlapped

    for name in MACHINES:
        by_chunks = [seconds(name, chunks=chunks) for chunks in (1, 2, 4, 8, 64)]
        assert by_chunks == sorted(by_chunks, reverse=True)
        by_link = [seconds(name, faster=faster) for faster in (0.01, 0.1, 1, 10)]
        assert by_link == sorted(by_link, reverse=True)
        assert by_link[0] > by_link[-1]
        assert seconds(name, payload="bf16") >= seconds(name)
        by_rows = [seconds(name, m) for m in (1024, 4096, 8192, 65_536)]
        assert by_rows == sorted(by_rows)
        assert seconds(name, product=2e-3) > seconds(name, product=1e-3)


@every_operation
def test_neither_path_beats_its_longer_part(op: Operation, divided: dict[str, Any]) -> None:
    for name in MACHINES:
        found = overlap_gain(op, 8192, 8192, 8192, **divided, machine=overlap_machine(name))
        longer = max(found.product, found.communication)
        assert longer < found.overlapped
        assert found.product + found.communication < found.serial


@every_operation
def test_small_operations_take_the_plain_path(op: Operation, divided: dict[str, Any]) -> None:
    for machine in map(overlap_machine, MACHINES):
        small = overlap_gain(op, 64, 2048, 2048, **divided, machine=machine)
        assert (small.pays, small.decision[:7]) == (False, "plain: ")
        assert small.flops < LEAST_FLOPS
        assert overlap_gain(op, 0, 2048, 2048, **divided, machine=machine).decision == "plain: nothing is sent"


@every_operation
def test_one_rank_sends_nothing(op: Operation, divided: dict[str, Any]) -> None:
    alone: dict[str, Any] = {**divided, "tp": 1, **({"ep": 1} if "ep" in divided else {})}
    found = overlap_gain(op, 65_536, 8192, 8192, **alone, machine=overlap_machine("h200"))
    assert (found.communication, found.wire, found.efficiency) == (0, 0, 0)
    assert found.serial == found.product
    assert not found.pays
    assert found.decision == "plain: nothing is sent"


def test_the_decision_needs_five_percent_and_enough_flops() -> None:
    sizes: dict[str, Any] = {"m": 4096, "n": 49_152, "k": 12_288, "tp": 8, "machine": SIMPLE}
    # T = 0.1 + 12.5 ms, serial 1 + 10 + C
    rich = overlap_gain("all_gather_mm", **sizes, product=1e-2, communication=2.24e-3)
    poor = overlap_gain("all_gather_mm", **sizes, product=1e-2, communication=2.22e-3)
    assert (rich.pays, rich.decision) == (True, "overlap: 1.05x")
    assert (poor.pays, poor.decision) == (False, "plain: 1.05x, below 1.05x")
    few = overlap_gain("all_gather_mm", 500, 49_152, 12_288, tp=8, machine=SIMPLE, product=1e-2, communication=5e-3)
    assert few.flops < LEAST_FLOPS
    assert (few.gain >= 1.05, few.pays) == (True, False)


def test_ranks_default_to_a_chunk_each() -> None:
    for m, chunks in ((4096, 8), (8, 8), (5, 5), (1, 1), (0, 1)):
        assert overlap_gain("all_gather_mm", m, 1024, 1024, tp=8, machine=SIMPLE).chunks == chunks


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"op": "all_reduce_mm"}, "unknown operation 'all_reduce_mm'"),
        ({"payload": "nvfp4"}, "unknown payload 'nvfp4'"),
        ({"n": 1001}, "n=1001 on tp=4"),
        ({"op": "mm_reduce_scatter", "k": 1001}, "k=1001 on tp=4"),
        ({"m": -1}, "m=-1"),
        ({"tp": 0}, "tp=0"),
        ({"chunks": 0}, "0 chunks"),
        ({"chunks": 1025}, "1025 chunks"),
        ({"ep": 2, "experts": 8}, "ep=2, experts=8"),
        ({"op": "all_gather_grouped_mm", "experts": 8, "ep": 3}, "experts=8 on ep=3"),
        ({"op": "all_gather_grouped_mm", "experts": 8, "topk": 9}, "topk=9 of 8 experts"),
        ({"op": "grouped_mm_reduce_scatter", "experts": 0, "topk": 0}, "topk=0 of 0 experts"),
    ],
)
def test_impossible_sizes_are_refused(changed: dict[str, Any], what: str) -> None:
    given: dict[str, Any] = {"op": "all_gather_mm", "m": 1024, "n": 1024, "k": 1024, "tp": 4, "machine": SIMPLE}
    with pytest.raises(BlockscaleError) as error:
        overlap_gain(**(given | changed))
    assert what in str(error.value)
    assert "Rule: " in str(error.value)
    assert "Fix: " in str(error.value)


def test_every_machine_has_constants_with_a_basis() -> None:
    for name in MACHINES:
        machine = overlap_machine(name)
        for each in (machine.bf16, machine.fp8, machine.grouped, machine.setup, machine.slowdown):
            if each is not None:
                assert each.source
                assert each.kind in ("measured", "published", "fitted", "assumed")
        assert (machine.fp8 is None) == (name == "a100")
        assert machine.bf16.value < machine.ceilings.bf16 * 1.01
    assert [overlap_machine(name).bf16.kind for name in ("h200", "l20", "h100")] == ["measured", "published", "assumed"]
    assert overlap_machine("b200", "infiniband").link.bandwidth == 45e9


def test_measured_rates_are_those_of_the_stored_results() -> None:
    rows = [json.loads(line) for line in (RESULTS / "gemm-h200.jsonl").read_text().splitlines()]
    large = [row for row in rows if row["group"] == "large" and row["case"].startswith("1x128 @ 128x128 ")]
    large = [row for row in large if row["dtype"] == "bfloat16"]
    machine = overlap_machine("h200")
    assert machine.bf16.value == pytest.approx(machine.ceilings.bf16, rel=0.001)
    assert machine.fp8 is not None
    assert machine.fp8.value == pytest.approx(statistics.mean(row["tflop_s"] for row in large) * 1e12, rel=0.002)
    assert len(large) == 8
    assert {f"gemm-h200.jsonl (commit {row['where']['commit']})" in machine.fp8.source for row in large} == {True}
