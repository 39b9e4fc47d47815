"""Overlapped products on one GPU over a virtual link of pinned host memory: time, the parts of it, and what is hidden.

A case is one operation at given sizes, as one rank of TP x EP sees it: its product, and the rows that it exchanges with
the others. `at_ratio` chooses sizes whose copies take a given multiple of the product's time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...errors import refuse
from ...roofline import OPERATIONS, OverlapMachine, machine_of, overlap_gain, overlap_machine, stored_bytes
from ...roofline.overlap import OVERLAP_PAYLOADS, Constant, Operation, gathers, work
from ..expert_overlaps import gathered_experts, summed_experts
from ..harness import Case
from ..overlaps import (
    AUTO,
    CHUNKED,
    COPIES,
    ONE,
    SERIAL,
    Share,
    check_share,
    contenders,
    figures,
    gather_share,
    sum_share,
    weight_operand,
)

SUITE = "overlap"
# bytes per second each way while copies run both ways, as those of sums do (`roofline/links.py`)
DUPLEX = 47e9
# sizes of chosen ratios are multiples of this on every rank
UNIT = 128


@dataclass(frozen=True)
class Problem:
    """An overlapped operation.  m, n, k: global sizes.  groups: numbers of ranks whose rows share a chunk, in the order
    of arrival of a gather; sums take them backwards, and without them the library chooses.  rank: the one that is
    timed.  captured: in a CUDA graph."""

    op: Operation
    m: int
    n: int
    k: int
    tp: int
    payload: str
    ep: int = 1
    experts: int = 1
    topk: int = 1
    groups: tuple[int, ...] = ()
    rank: int = 0
    captured: bool = False

    @property
    def name(self) -> str:
        """Name of the case.

        >>> Problem("all_gather_mm", 4096, 49152, 12288, 8, "bf16", groups=(1, 3, 4), captured=True).name
        'all_gather_mm bf16 M=4096 N=49152 K=12288 TP8 chunks 1,3,4 graph'
        """
        mixture = f" EP{self.ep} E{self.experts} top-{self.topk}" if self.grouped else ""
        chunks = f" chunks {','.join(map(str, self.groups))}" if self.groups else ""
        rank, graph = f" rank {self.rank}" if self.rank else "", " graph" if self.captured else ""
        sizes = f"M={self.m} N={self.n} K={self.k} TP{self.tp}"
        return f"{self.op} {self.payload} {sizes}{mixture}{chunks}{rank}{graph}"

    @property
    def grouped(self) -> bool:
        """True for the operations of a mixture."""
        return "grouped" in self.op

    @property
    def divided(self) -> dict[str, int]:
        """How ranks divide the operation, as the model takes it."""
        return {"tp": self.tp, "ep": self.ep, "experts": self.experts, "topk": self.topk}

    @property
    def ranks(self) -> int:
        return self.tp * self.ep

    @property
    def local(self) -> tuple[int, int, int]:
        """(M, N, K) of the product of one rank."""
        return (self.m, self.n // self.tp, self.k) if gathers(self.op) else (self.m, self.n, self.k // self.tp)


class Named(NamedTuple):
    """Sizes and division in the name of a case, without its recipe, its chunks and its method."""

    op: Operation
    sizes: tuple[int, int, int]
    tp: int
    ep: int
    experts: int
    topk: int


def named(case: str) -> Named | None:
    """What a case is, from its name; None for other names.

    >>> named("grouped_mm_reduce_scatter bf16 M=8192 N=8192 K=8192 TP4 EP2 E32 top-4 chunks 1,3,4")
    Named(op='grouped_mm_reduce_scatter', sizes=(8192, 8192, 8192), tp=4, ep=2, experts=32, topk=4)
    """
    found = re.match(r"(\w+) \w+ M=(\d+) N=(\d+) K=(\d+) TP(\d+)(?: EP(\d+) E(\d+) top-(\d+))?", case)
    if found is None or found[1] not in OPERATIONS:
        return None
    op = OPERATIONS[OPERATIONS.index(found[1])]
    m, n, k, tp, ep, experts, topk = (int(count or 1) for count in found.groups()[1:])
    return Named(op, (m, n, k), tp, ep, experts, topk)


def _gather(problem: Problem, device: torch.device) -> Share:
    return gather_share(*problem.local, problem.ranks, problem.rank, problem.payload, problem.groups, device)


def _sum(problem: Problem, device: torch.device) -> Share:
    return sum_share(*problem.local, problem.ranks, problem.rank, problem.payload, problem.groups, device)


def _gather_experts(problem: Problem, device: torch.device) -> Share:
    return gathered_experts(*_mixture(problem), problem.groups, device)


def _sum_experts(problem: Problem, device: torch.device) -> Share:
    return summed_experts(*_mixture(problem), problem.groups, device)


def _mixture(problem: Problem) -> tuple[int, int, int, int, int, tuple[int, int], int, str]:
    """Arguments that shares of both layers take."""
    ranks = problem.tp, problem.ep
    return *problem.local, problem.experts, problem.topk, ranks, problem.rank, problem.payload


SHARES: Mapping[Operation, Callable[[Problem, torch.device], Share]] = {
    "all_gather_mm": _gather,
    "mm_reduce_scatter": _sum,
    "all_gather_grouped_mm": _gather_experts,
    "grouped_mm_reduce_scatter": _sum_experts,
}


def check(problem: Problem) -> None:
    """Raise for a problem that cannot be timed."""
    cut, name = (problem.n, "N") if gathers(problem.op) else (problem.k, "K")
    divided = (("M", problem.m, problem.ranks), (name, cut, problem.tp), ("experts", problem.experts, problem.ep))
    for what, size, parts in divided:
        if size % parts:
            refuse(f"{what}={size} on {parts} ranks", "all ranks have as many", f"pass a multiple of {parts}")
    if problem.topk > problem.experts:
        what = f"topk={problem.topk} of {problem.experts} experts"
        refuse(what, "a token has one or more of them", f"pass 1 to {problem.experts}")
    if problem.ranks < 2:
        refuse(f"{problem.ranks} rank", "communication that hides needs another rank", "pass --tp 2 or more")
    if not 0 <= problem.rank < problem.ranks:
        what = f"rank {problem.rank} of {problem.ranks}"
        refuse(what, "ranks count from 0", f"pass 0 to {problem.ranks - 1}")
    if problem.groups and (min(problem.groups) < 1 or sum(problem.groups) != problem.ranks):
        what = f"chunks of {','.join(map(str, problem.groups))} ranks"
        refuse(what, f"chunks are of all {problem.ranks} ranks", f"pass positive numbers with the sum {problem.ranks}")


def virtual_machine(op: Operation, gpu: str) -> OverlapMachine:
    """Constants of a GPU, an H200 if it is not known, whose link is its host's memory: its own copies lengthen its
    products by less than an exchange with seven others does."""
    source = "captured calls of overlap-h200.jsonl"
    measured = {"setup": Constant(10e-6, "measured", source), "slowdown": Constant(0.02, "measured", source)}
    machine = replace(overlap_machine(machine_of(gpu) or "h200", "pcie5"), **measured)
    return machine if gathers(op) else replace(machine, link=replace(machine.link, bandwidth=DUPLEX))


def at_ratio(problem: Problem, ratio: float, machine: OverlapMachine) -> Problem:
    """The problem with the N of a gather, or the K of a sum, at which copies take that multiple of the product's time.

    >>> asked = Problem("all_gather_mm", 8192, 0, 12288, 8, "fp8_blockwise_pow2")
    >>> at_ratio(asked, 1.0, virtual_machine("all_gather_mm", "")).n // 8
    9856
    """
    unit = UNIT * problem.tp
    first = replace(problem, n=unit) if gathers(problem.op) else replace(problem, k=unit)
    flops, wire = work(
        first.op, first.m, first.n, first.k, tp=first.tp, ep=first.ep, topk=first.topk, payload=first.payload
    )
    units = machine.engine(problem.payload).units
    rate = machine.bf16 if units == "bf16" or machine.fp8 is None else machine.fp8
    seconds = flops / (rate.value * (machine.grouped.value if problem.grouped else 1))
    # FLOPs grow with that size, and bytes do not
    size = max(1, round(wire / machine.link.bandwidth / seconds / ratio)) * unit
    return replace(problem, n=size) if gathers(problem.op) else replace(problem, k=size)


def case(problem: Problem, gpu: str, *, decides: bool = False) -> Case:
    """Case of a problem.  gpu: its name.  decides: time the path that the model chooses, too."""
    check(problem)
    machine, (m, n, k) = virtual_machine(problem.op, gpu), problem.local
    m, experts = m * problem.topk // problem.ep, problem.experts // problem.ep  # of this rank, if loads are equal
    predict = functools.partial(
        overlap_gain, problem.op, problem.m, problem.n, problem.k, **problem.divided,
        machine=machine, payload=problem.payload,
    )  # fmt: skip
    pays = predict().pays if decides else None

    def derive(us: Mapping[str, float]) -> dict[str, float]:
        found = figures(us, problem.ranks)
        if found and not problem.groups:  # the model has chunks of equal size
            known = {"product": us[ONE] / 1e6, "communication": us[COPIES] / 1e6, "stretch": us[CHUNKED] / us[ONE]}
            found["modelled_us"] = round(predict(**known).overlapped * 1e6, 3)
        if AUTO in us:
            found["auto_over_serial"] = round(us[AUTO] / us[SERIAL], 3)
        return found

    def another(share: Share) -> tuple[Share]:
        return (share.with_weight(weight_operand(problem.payload, share.weight.shape, share.link.device)),)

    moved = sum(map(stored_bytes, (m * k, experts * n * k), OVERLAP_PAYLOADS[problem.payload], (2, 2))) + 2 * m * n
    return Case(
        name=problem.name,
        group=problem.op,
        format=problem.payload,
        axis="",
        shape=(problem.m, problem.n, problem.k),
        make=lambda device: (SHARES[problem.op](problem, device),),
        another=another,
        run=lambda share: share.overlapped(),
        backend=lambda share: share.backend,
        check=check_share,
        bytes=int(moved),
        peers=contenders(permutes=problem.grouped, overlaps=pays),
        flops=2 * m * n * k,
        captured=problem.captured,
        details={"decides_to_overlap": float(pays)} if pays is not None else {},
        derive=derive,
    )
