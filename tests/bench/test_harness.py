"""Harness: correct kernels are timed, wrong ones are not, and peers compute what they claim."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from blockscale import dequantize, quantize
from blockscale.bench import harness, peers, store, timing
from blockscale.bench.suites import casts
from support.helpers import has_cpp_compiler

CPU = torch.device("cpu")
EXTENT = casts.extent(CPU)
BUDGET = harness.Budget(rounds=1, seconds=1e-4)
WHERE = store.where(CPU, "0.1.0", "test")


def run(case: harness.Case) -> store.Row:
    return harness.run_case(case, "casts", CPU, WHERE, BUDGET, timing.Telemetry())


def single(format: str = "mxfp8_e4m3", axis: int = -1) -> harness.Case:
    return casts.single(format, axis, (256, 512), EXTENT, group="one operand")


def test_a_correct_kernel_is_timed():
    row = run(single())
    assert row.wrong_bytes == 0
    assert row.checked == "every byte"
    assert row.us is not None
    assert row.bytes == 256 * 512 * 3 + 256 * 16
    assert row.gb_s == pytest.approx(row.bytes / row.us / 1e3, abs=0.06)
    assert row.peers["eager"]["ratio"] == pytest.approx(row.peers["eager"]["us"] / row.us, rel=1e-2)


class Wrong:
    """Correct with the reference backend, else one byte off."""

    def __init__(self, case: harness.Case) -> None:
        self.case, self.calls = case, itertools.count()

    def __call__(self, *args):
        result = self.case.run(*args)
        if next(self.calls) < 2:  # the two checked runs; the third call is the reference
            result.data.view(torch.uint8)[3, 5] ^= 1
        return result


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["one", "both", "experts"])
def test_a_row_on_a_gpu(kind: str):
    device = torch.device("cuda")
    extent = casts.extent(device)
    case = {
        "one": lambda: casts.single("fp8_1x128", -2, (1024, 2048), extent, group=""),
        "both": lambda: casts.both("mxfp8_e4m3", (1024, 2048), extent, group=""),
        "experts": lambda: casts.both("fp8_128x128", (2, 512, 1024), extent, group=""),
    }[kind]()
    (row,) = harness.run_cases([case], "casts", device, WHERE, BUDGET)
    assert (row.wrong_bytes, row.method, row.backend) == (0, "graph", "triton")
    assert row.peers["eager"]["method"] == "graph"
    assert "note" not in row.peers["eager"]
    assert row.percent_of_copy is not None
    assert 0 < row.percent_of_copy < 200


@pytest.mark.gpu
def test_host_time_on_a_gpu():
    rows = list(
        harness.run_cases(casts.dispatch_cases(torch.device("cuda")), "dispatch", torch.device("cuda"), WHERE, BUDGET)
    )
    assert {row.method for row in rows} == {"host"}
    assert all(row.us is not None and {"copy", "triton launch"} <= set(row.peers) for row in rows)


def test_a_wrong_kernel_is_not_timed():
    case = single()
    row = run(dataclasses.replace(case, run=Wrong(case)))
    assert row.wrong_bytes == 1
    assert (row.us, row.gb_s, row.percent_of_copy, row.peers) == (None, None, None, {})


def test_unwritten_bytes_are_detected():
    """A kernel that writes nothing: memory holds the poison, not the result of an earlier run."""
    case, kept = single(), []

    def forgetful(*args):
        if not kept:
            kept.append(case.run(*args))
        return kept[0]

    first = forgetful(*case.make(CPU))
    held = quantize(torch.zeros(256, 512, dtype=torch.bfloat16), "mxfp8_e4m3")
    output = harness._on_poisoned_memory(dataclasses.replace(case, run=forgetful), ())
    assert output is first
    assert (first.data.view(torch.uint8) == 0xFF).all()
    assert harness.count_wrong(first, held) > 256 * 512 * 0.9


def test_experts_are_checked_one_by_one():
    case = casts.both("mxfp8_e4m3", (3, 256, 128), EXTENT, group="expert weights")
    row = run(case)
    assert "each of 3 experts" in row.checked
    assert row.us is not None

    def wrong(x):
        row, col = case.run(x)
        if x.dim() == 3:
            col.data.view(torch.uint8)[2] ^= 1
        return row, col

    assert run(dataclasses.replace(case, run=wrong)).wrong_bytes == 256 * 128


def test_a_peer_that_computes_something_else_is_labelled():
    def other(x):
        return (peers.plain_cast(x / 3, "mxfp8_e4m3", -1),)

    peer = harness.Peer(other, lambda parts: peers.as_operands("mxfp8_e4m3", parts))
    row = run(dataclasses.replace(single(), peers={"other": peer, "absent": "has none"}))
    assert "differs" in row.peers["other"]["note"]
    assert row.peers["absent"] == {"note": "has none"}


def test_a_failing_peer_becomes_a_note():
    def fails(x):
        raise RuntimeError("no such\nthing")

    row = run(dataclasses.replace(single(), peers={"bad": harness.Peer(fails)}))
    assert row.us is not None
    assert row.peers == {"bad": {"note": "fails: RuntimeError: no such"}}


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", ["fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "nvfp4_16x16"])
def test_plain_casts_are_the_same_casts(format: str, axis: int):
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    (theirs,) = peers.as_operands(format, (peers.plain_cast(x, format, axis),))
    ours = quantize(x, format, axis=axis)
    assert harness.closeness_db(ours, theirs) > harness.SAME_DB[ours.spec.element.bits]


@pytest.mark.parametrize("format", ["fp8_1x128", "fp8_128x128", "mxfp8_e4m3"])
def test_plain_decodes_are_exact(format: str):
    q = quantize(torch.randn(256, 512, dtype=torch.bfloat16), format)
    assert torch.equal(peers.plain_dequantize(q), dequantize(q))


def test_other_casts_are_below_the_gate():
    """The most similar other cast, another scale rule, lies below the gate for the same cast."""
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    for format, rule in (("mxfp8_e4m3", "floor"), ("mxfp4", "rceil")):
        ours, other = quantize(x, format), quantize(x, format, scale_rule=rule)
        assert harness.closeness_db(ours, other) < harness.SAME_DB[ours.spec.element.bits]


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="torch.compile needs a C++ compiler")
def test_the_plain_cast_compiles_in_one_piece():
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    found = peers.casts("mxfp8_e4m3", (-1, -2), x.numel(), frozenset({"compile"}), compiling=True)["compile"]
    assert isinstance(found, harness.Peer)
    row, col = found.view(found.run(x))
    assert harness.closeness_db(quantize(x, "mxfp8_e4m3"), row) > 40
    assert harness.closeness_db(quantize(x, "mxfp8_e4m3", axis=-2), col) > 40


def test_the_suite_lists_each_case_once():
    names = [case.name for case in casts.cases(EXTENT)]
    assert len(names) == len(set(names)) > 20
    assert len(list(casts.dispatch_cases(CPU))) == 9


def test_the_fewest_bytes_of_nvfp4():
    shape, elements = (256, 512), 256 * 512
    given = casts.single("nvfp4", -1, shape, EXTENT, group="", given=True)
    own = casts.single("nvfp4", -1, shape, EXTENT, group="")
    assert given.bytes == elements * 2.5625 + 4
    assert own.bytes == elements * 4.5625 + 4


def test_dequantize_is_checked_too():
    row = run(casts.back("nvfp4", (256, 512), EXTENT))
    assert row.wrong_bytes == 0
    case = casts.back("nvfp4", (256, 512), EXTENT)
    row = run(dataclasses.replace(case, run=lambda q: dequantize(q) + (next(CALLS) < 2)))
    assert row.wrong_bytes > 0


CALLS = itertools.count()
