"""`blockscale bench overlap` on a CPU: order of the virtual link, the check and what it finds, rows, mistakes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

from blockscale import hardware
from blockscale.bench import expert_overlaps, harness, overlaps, store, timing
from blockscale.bench.suites import overlap as suite
from blockscale.bench.virtual_link import LateCopies, ReadyLink, VirtualGathering, VirtualLink, VirtualSummation
from blockscale.cli import bench_overlap
from blockscale.cli.main import main
from blockscale.distributed.collectives import Tokens
from blockscale.distributed.overlap import expert_ops
from blockscale.distributed.overlap.expert_rows import RowsOfTokens, multiply_rows
from blockscale.distributed.overlap.products import PendingRows, Times, sum_of_products
from blockscale.roofline import overlap_gain

CPU = torch.device("cpu")
RANKS = 4
OPS = ("all_gather_mm", "mm_reduce_scatter")
MIXED = ("all_gather_grouped_mm", "grouped_mm_reduce_scatter")


def problem(op: Any = "all_gather_mm", **changed: Any) -> suite.Problem:
    """A problem of four ranks; one of experts has 2 x 2 of them."""
    divided: dict[str, Any] = {"tp": 2, "ep": 2, "experts": 6, "topk": 2} if op in MIXED else {"tp": RANKS}
    cut = 128 * divided["tp"]
    sizes = (32, cut, 256) if op.startswith("all_gather") else (32, 256, cut)
    return suite.Problem(op, *sizes, **divided | {"payload": "bf16"} | changed)


def share(op: Any = "all_gather_mm", **changed: Any) -> overlaps.Share:
    made = problem(op, **changed)
    return suite.SHARES[op](made, CPU)


def shards(rows: int = 3) -> list[list[torch.Tensor]]:
    return [[torch.full((rows, 2), float(rank))] for rank in range(RANKS)]


# ---- the link --------------------------------------------------------------------------------------------------------


def test_rows_are_there_when_their_rank_has_arrived() -> None:
    link = VirtualLink(2, RANKS, CPU, shards=shards())
    link.poisons = True
    gathering = link.gather(shards()[2])
    seen: list[int] = []
    for rank in gathering.arrivals():
        seen.append(rank)
        there = {at for at in range(RANKS) if not gathering.whole[0][gathering.spans(at)[0]].isnan().any()}
        assert there == {*seen}
    assert seen == [2, 3, 0, 1]
    assert gathering.whole[0][:, 0].tolist() == [rank for rank in range(RANKS) for _ in range(3)]


def test_parts_come_as_ranks_in_step_make_them() -> None:
    parts = torch.arange(RANKS, dtype=torch.float32)[:, None, None].expand(RANKS, 3, 2).contiguous()
    link, started = VirtualLink(1, RANKS, CPU, parts=parts), list[Any]()

    class Watched(LateCopies):
        def run(self, copy: Any) -> Any:
            started.append(copy.args[0])
            return super().run(copy)

    link.incoming = link.outgoing = Watched()
    total = link.sum((3, 2), torch.float32)
    assert total.destinations() == [2, 3, 0, 1]
    for rank in total.destinations():
        total.push(rank, torch.full((3, 2), 10.0 + rank))
    # the part of rank - s comes while the part for rank + s leaves
    assert [int(each[0, 0]) for each in started[::2]] == [12, 13, 10]
    assert [int(each[0, 0]) for each in started[1::2]] == [0, 3, 2]
    assert total.finish()[0, 0] == 0 + 11 + 2 + 3
    assert link.sent is not None
    assert [int(link.sent[rank, 0, 0]) for rank in (2, 3, 0)] == [12, 13, 10]


def rows_times(weight: torch.Tensor) -> tuple[Times, list[int]]:
    """A product, and the numbers of rows that it was called with."""
    calls: list[int] = []

    def product(operand: Any, values: Any, out: Any) -> torch.Tensor:
        calls.append(values.shape[0])
        return torch.mm(values, weight, out=out)

    return Times(product, weight.shape[1]), calls


@pytest.mark.parametrize(
    ("rank", "groups", "gathers", "sums"),
    [
        (0, (), [2] * 8, [2] * 8),
        (0, (1, 3), [2, 2, 6, 6], [6, 6, 2, 2]),
        (2, (1, 3), [2, 2, 4, 6, 2], [4, 6, 2, 2, 2]),  # of 3, 0, 1: those of 3 lie before the next run's of 0
        (3, (1, 2), [2, 2, 4, 4, 2, 2], [2, 2, 4, 4, 2, 2]),
        (1, (4,), [16], [16]),
    ],
)
def test_groups_of_ranks_share_products(rank: int, groups: tuple[int, ...], gathers: list[int], sums: list[int]):
    runs, rows = 2, 4
    pieces = [[torch.randn(rows, 8)] for _ in range(RANKS)]
    link, weight = VirtualLink(rank, RANKS, CPU, shards=pieces, groups=groups), torch.randn(8, 5)
    link.poisons = True
    times, calls = rows_times(weight)
    pending = PendingRows.start(None, pieces[rank][0], torch.float32, runs, link)
    (result,), _, values = pending.multiply([times], None, torch.float32)
    assert values is not None
    whole = torch.stack([each[0].view(runs, -1, 8) for each in pieces], 1).view(-1, 8)
    assert torch.equal(values, whole)
    assert calls == gathers
    torch.testing.assert_close(result, whole @ weight)
    times, calls = rows_times(weight)
    link = ReadyLink(rank, RANKS, groups=groups)
    made = sum_of_products(link, Tokens(runs, rows // runs), times, None, whole, torch.float32)
    assert sorted(calls) == sorted(sums)
    assert made.wait().shape == (rows, 5)
    for owner, part in made.summation.parts.items():  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(part, pieces[owner][0] @ weight)


# ---- the check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", ["bf16", "fp8_blockwise_pow2", "mxfp8"])
@pytest.mark.parametrize("op", OPS + MIXED)
@pytest.mark.parametrize(("rank", "groups"), [(0, ()), (3, (1, 1, 2)), (2, (1, 3))])
def test_right_operations_pass(op: str, payload: str, rank: int, groups: tuple[int, ...]) -> None:
    """A chunk of rank 2 has the rows of ranks 3, 0 and 1, which are not adjacent in memory: it is two products."""
    verdict = share(op, payload=payload, rank=rank, groups=groups).check()
    assert (verdict.wrong_bytes, verdict.problem) == (0, "")
    assert verdict.sqnr_db is not None
    assert verdict.sqnr_db > 54
    assert verdict.details["chunks"] == (len(groups) or RANKS)
    assert verdict.details.keys() == {"values_unlike_one_launch", "chunks"}


def corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    take = VirtualGathering._take

    def wrong(self: VirtualGathering, rank: int, pieces: Any) -> None:
        take(self, rank, pieces)
        if rank == 2:
            self.whole[0].view(torch.uint8)[self.spans(rank)[0].start, 5] ^= 1

    monkeypatch.setattr(VirtualGathering, "_take", wrong)


def do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrivals(self: VirtualGathering) -> Iterator[int]:
        yield from range(RANKS)
        for wait in self._waits.values():
            wait()

    monkeypatch.setattr(VirtualGathering, "arrivals", arrivals)


def do_not_wait_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualSummation, "wait", lambda self: None)


def send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCopies, "run", functools.partialmethod(drop, itertools.count()))


def drop(self: LateCopies, calls: Iterator[int], copy: Any) -> Any:
    return (lambda: None) if next(calls) % (2 * (RANKS - 1)) == 0 else functools.cache(copy)


def send_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    push = VirtualSummation.push
    monkeypatch.setattr(
        VirtualSummation, "push", lambda self, rank, part: push(self, rank, part * (1 if rank == 0 else 2))
    )


FAULTS: dict[str, list[Callable[[pytest.MonkeyPatch], None]]] = {
    "all_gather_mm": [corrupt, do_not_wait],
    "mm_reduce_scatter": [do_not_wait_for_parts, send_nothing, send_elsewhere],
    "all_gather_grouped_mm": [corrupt, do_not_wait],
    "grouped_mm_reduce_scatter": [do_not_wait_for_parts, send_nothing, send_elsewhere],
}


@pytest.mark.parametrize(("op", "fault"), [(op, fault) for op, faults in FAULTS.items() for fault in faults])
def test_wrong_copies_and_lost_waits_are_found(
    op: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = share(op)
    assert made.check().wrong_bytes == 0
    fault(monkeypatch)
    assert made.check().wrong_bytes > 0


def test_a_corrupted_copy_fails_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corrupt(monkeypatch)
    path = tmp_path / "overlap.jsonl"
    words = ["--device", "cpu", "--tp", "4", "--json", str(path)]
    assert main(["bench", "overlap", *words]) == 1
    assert "WRONG all_gather_mm fp8_blockwise_pow2 M=32 N=512 K=256 TP4: " in capsys.readouterr().out
    (row,) = store.read(path)
    assert row.us is None
    assert row.wrong_bytes > 0
    assert row.peers == {}


@pytest.mark.parametrize("op", OPS + MIXED)
def test_a_wrong_product_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = share(op)
    exact = made.exact
    monkeypatch.setattr(type(made), "exact", lambda self, some: 1.1 * exact(some))
    assert made.check().problem.startswith("the product is 2")


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "groups", "arriving", "leaving"),
    [
        (0, (), [(0, 8), (8, 16), (16, 24), (24, 32)], [(8, 16), (16, 24), (24, 32), (0, 8)]),
        (0, (1, 3), [(0, 8), (8, 32)], [(8, 32), (0, 8)]),
        (2, (1, 3), [(16, 24), (0, 16), (24, 32)], [(0, 16), (24, 32), (16, 24)]),  # wraps around
        (3, (4,), [(0, 32)], [(0, 32)]),
    ],
)
def test_experts_of_adjacent_ranks_share_products(
    rank: int, groups: tuple[int, ...], arriving: list[Any], leaving: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []

    def watched(a: Any, weight: Any, at: RowsOfTokens, *rest: Any) -> None:
        found.append((at.tokens.start, at.tokens.stop))
        multiply_rows(a, weight, at, *rest)

    monkeypatch.setattr(expert_ops, "multiply_rows", watched)
    for op, spans in zip(MIXED, (arriving, leaving), strict=True):
        found.clear()
        share(op, rank=rank, groups=groups).overlapped()
        assert found == spans


def test_tokens_go_to_different_experts_and_each_slot_to_one_group_of_ranks() -> None:
    m, experts, topk = 512, 8, 3
    loads = list[int]()
    for rank in range(4):
        rows, gates = expert_overlaps.route_tokens(m, experts, topk, (2, 2), rank, CPU)
        torch.testing.assert_close(gates.sum(1), torch.ones(m))
        tokens, _ = rows.routing.permutation
        ends = rows.routing.offs.tolist()
        for start, end in itertools.pairwise([0, *ends]):
            assert len({*tokens[start:end].tolist()}) == end - start
        if rank % 2 == 0:  # TP ranks have the same experts
            loads += rows.routing.load().tolist()
        else:
            assert rows.routing.load().tolist() == loads[-len(ends) :]
    assert sum(loads) == m * topk
    mean = m * topk / experts
    assert all(0.8 * mean < load < 1.2 * mean for load in loads)


@pytest.mark.parametrize("payload", ["bf16", "fp8_blockwise_pow2"])
@pytest.mark.parametrize("op", MIXED)
def test_contenders_of_experts_have_one_result(op: str, payload: str) -> None:
    """Copies before or after one product, and an input set with another weight."""
    first: Any = share(op, payload=payload, rank=1)
    near = {"rtol": 0.02, "atol": 0.1} if payload == "bf16" else {"rtol": 0.0, "atol": 0.0}  # sums of torch differ
    torch.testing.assert_close(first.serial(), first.overlapped(), **near)
    torch.testing.assert_close(first.permuted(), first.all_chunks(), **near)
    case = suite.case(problem(op, payload=payload, rank=1), "")
    assert case.another is not None
    (second,) = case.another(first)
    assert second.check().wrong_bytes == 0
    assert not torch.equal(first.product(), second.product())


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS + MIXED)
def test_rows_have_all_times_and_figures(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, divided = tmp_path / "overlap.jsonl", "--tp 2 --ep 2" if op in MIXED else "--tp 4"
    words = f"--op {op} --device cpu {divided} --payload bf16 --quick --tokens 4,32 --json {path}"
    assert main(["bench", "overlap", *words.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a dry run with copies of the CPU" in text
    assert "attained" in text
    rows = store.read(path)
    cut = 256 if op in MIXED else 512
    sizes = (cut, 256) if op.startswith("all_gather") else (256, cut)
    assert [tuple(row.shape) for row in rows] == [(4, *sizes), (32, *sizes)]
    for row in rows:
        assert (row.suite, row.group, row.format, row.backend) == ("overlap", op, "bf16", "torch")
        assert row.us is not None
        assert {*row.peers} == {
            overlaps.ONE, overlaps.CHUNKED, overlaps.COPIES, overlaps.SERIAL, overlaps.BESIDE, overlaps.AUTO,
            *([overlaps.PERMUTED] if op in MIXED else []),
        }  # fmt: skip
        assert all(cell["us"] > 0 for cell in row.peers.values())
        us = {name: cell["us"] for name, cell in row.peers.items()} | {overlaps.OURS: row.us}
        for name, value in overlaps.figures(us, RANKS).items():
            assert row.details[name] == pytest.approx(value, rel=0.01, abs=0.01), name
        assert row.details["decides_to_overlap"] == 0, "below 1e11 FLOP"
        assert row.details["auto_over_serial"] > 0
        assert row.details["modelled_us"] > 0
        found = suite.named(row.case)
        assert found is not None
        assert found == (op, tuple(row.shape), *((2, 2, 8, 2) if op in MIXED else (4, 1, 1, 1)))


def test_a_model_sets_both_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of the model on a GPU; a dry run keeps its experts, of which each token has as many."""
    found = list[harness.Case]()
    monkeypatch.setattr(bench_overlap, "timed", lambda console, cases, *rest, **options: found.extend(cases) or [])
    words = "bench overlap --model qwen1.5-moe --payload bf16 --device"
    assert main([*words.split(), "cpu"]) == 0
    assert [case.name for case in found] == [
        "all_gather_grouped_mm bf16 M=64 N=1024 K=256 TP8 EP1 E60 top-4",
        "grouped_mm_reduce_scatter bf16 M=64 N=256 K=1024 TP8 EP1 E60 top-4",
    ]
    found.clear()
    monkeypatch.setattr(hardware, "named_device", torch.device)
    monkeypatch.setattr(hardware, "gpu_name", lambda device: "NVIDIA H200")
    assert main([*words.split(), "cuda", "--op", MIXED[1], "--m", "4096", "--ep", "2", "--tp", "4"]) == 0
    assert [case.name for case in found] == ["grouped_mm_reduce_scatter bf16 M=4096 N=2048 K=1408 TP4 EP2 E60 top-4"]


def test_chunks_and_method_are_in_the_name() -> None:
    made = problem(groups=(1, 3), rank=2, captured=True)
    case = suite.case(made, "")
    assert case.name == "all_gather_mm bf16 M=32 N=512 K=256 TP4 chunks 1,3 rank 2 graph"
    assert case.captured
    assert suite.case(problem(), "").captured is False
    row = harness.run_case(
        case, "overlap", CPU, store.where(CPU, "0.1.0", "x"), harness.Budget(1, 1e-4), timing.Telemetry()
    )
    assert "modelled_us" not in row.details, "the model has chunks of equal size"
    assert row.details["attainment"] > 0


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.8, 1, 1.5, 2])
@pytest.mark.parametrize("payload", ["bf16", "fp8_blockwise_pow2", "mxfp8"])
@pytest.mark.parametrize("op", OPS + MIXED)
def test_sizes_of_a_ratio_have_it_by_the_model(op: Any, payload: str, ratio: float) -> None:
    mixture = {"ep": 2, "experts": 8, "topk": 2} if op in MIXED else {}
    first = suite.Problem(op, 8192, 12288, 12288, 4 if mixture else 8, payload, **mixture)
    machine = suite.virtual_machine(op, "NVIDIA H200")
    found = suite.at_ratio(first, ratio, machine)
    suite.check(found)
    gain = overlap_gain(op, found.m, found.n, found.k, **found.divided, machine=machine, payload=payload)
    assert gain.communication / gain.product == pytest.approx(ratio, rel=0.06)
    assert gain.product > 0.4e-3
    kept = (found.m, found.k) if op.startswith("all_gather") else (found.m, found.n)
    assert kept == (8192, 12288)


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("--op all_gather_grouped_mm --experts 6 --ep 4", "experts=6 on 4 ranks", "pass a multiple of 4"),
        ("--op all_gather_grouped_mm --experts 4 --topk 5", "topk=5 of 4 experts", "pass 1 to 4"),
        ("--ep 2", "--ep 2 with all_gather_mm", "leave --ep out"),
        ("--op nonsense", "invalid choice 'nonsense'", "pass such a value"),
        ("--experts 8", "--experts 8 with all_gather_mm", "leave --experts out"),
        ("--model mixtral9", "unknown model with experts 'mixtral9'", "did you mean mixtral-8x7b"),
        ("--model mixtral --topk 1", "--topk with --model", "leave --topk or --model out"),
        ("--model mixtral --op mm_reduce_scatter", "--op mm_reduce_scatter with --model", "leave --op"),
        ("--model mixtral --ratio 1", "--ratio with --model", "leave --ratio or --model out"),
        ("--ratio 0", "--ratio 0", "pass 0.25 to 2"),
        ("--ratio 1 --n 128", "--ratio with --n", "leave one of them out"),
        ("--ratio 1 --k 128 --op mm_reduce_scatter", "--ratio with --k", "leave one of them out"),
        ("--tokens 64 --m 64", "--tokens with --m", "leave one of them out"),
        ("--tokens 7", "M=7 on 8 ranks", "pass a multiple of 8"),
        ("--n 100", "N=100 on 8 ranks", "pass a multiple of 8"),
        ("--tp 1", "1 rank", "pass --tp 2 or more"),
        ("--rank 8", "rank 8 of 8", "pass 0 to 7"),
        ("--chunks 1,3", "chunks of 1,3 ranks", "pass positive numbers with the sum 8"),
        ("--ranks 8", "unknown option --ranks 8", "did you mean --rank 8"),
    ],
)
def test_mistakes_are_explained(words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", "--device", "cpu", *words.split()]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "Rule: " in error
    assert fix in error.split("Fix: ")[1]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("payload", ["bf16", "fp8_blockwise_pow2"])
@pytest.mark.parametrize("op", OPS + MIXED)
def test_rows_on_a_gpu(op: Any, payload: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, budget = torch.device("cuda"), harness.Budget(rounds=2, seconds=1e-3)
    sizes = (1024, 4096, 1024) if op.startswith("all_gather") else (1024, 1024, 4096)
    divided = {"tp": 2, "ep": 2, "experts": 8, "topk": 2} if op in MIXED else {"tp": RANKS}
    made = suite.Problem(op, *sizes, **divided, payload=payload, groups=(1, 3), captured=captured)
    case, where = suite.case(made, torch.cuda.get_device_name()), store.where(device, "0.1.0", "test")
    row = harness.run_case(case, "overlap", device, where, budget, timing.Telemetry())
    assert row.fault == ""
    assert row.method == ("graph" if captured else "events")
    assert {*row.peers} == {*overlaps.contenders(permutes=op in MIXED)}
    assert not [cell for cell in row.peers.values() if "note" in cell]
    if op.startswith("all_gather"):
        corrupt(monkeypatch)
        assert harness.run_case(case, "overlap", device, where, budget, timing.Telemetry()).wrong_bytes > 0
