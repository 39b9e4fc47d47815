"""Ranks of one process on one GPU: the transport of GPUs with streams that run at the same time.

    OVERLAP_ON=cuda CUDA_DEVICE_MAX_CONNECTIONS=32 python -m support.virtual_ranks RANKS CALLS

Processes that share a GPU run in slices of time, so what one does while another copies is never seen. Here the host
enqueues each call of one rank after the other and waits for none. Only the memory differs from `cuda.py`: all ranks
have the same pointers. Streams are late at random by up to 0.3 ms. Prints the number of wrong values with
everything in place, and without one part of it.

A GPU loads a kernel at its first launch, after those that run: a wait that runs and the one host thread would wait for
each other. So calls that wait for nothing come first.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from blockscale.distributed.overlap import link as link_module
from blockscale.distributed.overlap.arena import ANY, HEADER, wrapped
from blockscale.distributed.overlap.cuda import CudaArena, CudaTransport
from blockscale.distributed.overlap.link import Gathering, Link, Summation
from blockscale.distributed.overlap.signals import Flags
from support.overlapped_link import device, gathered, pause, rows_of, summed

WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "join": (Gathering, "_wait", lambda self, rank: None),
    "staged": (Gathering, "_wait_staged", lambda self, rank: None),
    "part": (Summation, "_wait_arrived", lambda self, rank: None),
    "slot": (link_module, "slot_of", lambda call: 0),
}
_LIMIT = 60


class Node:
    """Memory of all ranks, in the order in which each makes arenas."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._made: list[list[Tensor]] = []
        self._count: Counter[int] = Counter()

    def next_of(self, rank: int, size: int, call: int) -> list[Tensor]:
        number = self._count[rank]
        self._count[rank] += 1
        if number == len(self._made):
            every = [torch.full((HEADER + size,), 0xFF, dtype=torch.uint8, device=device()) for _ in range(self.ranks)]
            for each in every:
                each[:HEADER].view(torch.int32).fill_(wrapped(call - 1))
            torch.cuda.synchronize()
            self._made.append(every)
        return self._made[number]


class Group:
    """What a link asks a process group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


class VirtualTransport(CudaTransport):
    """The transport of a GPU with another allocation."""

    node: Node

    def arena(self, group: Any, size: int, call: int) -> CudaArena:
        memory = self.node.next_of(group.rank(), size, call)
        found = CudaArena.__new__(CudaArena)
        found.size, found.data = size, [each[HEADER:] for each in memory]
        headers = [each[:HEADER].view(torch.int32) for each in memory]
        found._flags = Flags(headers, group.rank(), self._fault, _LIMIT)
        return found

    def check(self, group: Any) -> None:
        assert self._fault.failure() is None, self._fault.failure()


def jittered(method: str, kind: Any, rng: random.Random) -> Any:
    """Some of the calls of a method come late on their stream."""
    real = getattr(kind, method)

    def delayed(self: Any, *args: Any) -> Any:
        if rng.random() < 0.3:
            pause(rng.random() * 3e-4)
        return real(self, *args)

    return patch.object(kind, method, delayed)


def load_kernels(ranks: int) -> None:
    """Run calls of all shapes that wait for no other rank."""
    real, calls = CudaArena.wait, 60
    past = 2**31 - calls // 2

    def wait(self: CudaArena, source: int, call: int, digest: int) -> None:
        real(self, source, past, ANY)

    with patch.object(CudaArena, "wait", wait):
        run(ranks, calls)


def run(ranks: int, calls: int, without: str = "") -> int:
    """Wrong values of all ranks."""
    VirtualTransport.node = Node(ranks)
    groups = [Group(rank, ranks) for rank in range(ranks)]
    with patch.object(link_module, "transport_of", VirtualTransport):
        links = [Link(group, device()) for group in groups]  # pyright: ignore[reportArgumentType]
    for link in links:
        link.gathers = link.sums = 2**31 - calls // 2
        for kind in ("gather", "sum"):
            link.arena(kind, 1 << 21, 2**31 - calls // 2 + 1)
    for call in range(50):  # values come from the host
        for rank in range(ranks):
            for to in range(ranks):
                rows_of(call, rank, to)
    streams, rng = [torch.cuda.Stream() for _ in links], random.Random(0)
    wrong = [torch.zeros((), dtype=torch.int64, device=device()) for _ in links]
    torch.cuda.synchronize()
    places = (("_pull", Gathering), ("_store", Summation), ("finish", Summation), ("gather", Link))
    with patch.object(*WITHOUT[without]) if without else nullcontext():
        patches = [jittered(method, kind, rng) for method, kind in places]
        for each in patches:
            each.start()
        for call in range(calls):
            for rank in rng.sample(range(ranks), ranks):
                with torch.cuda.stream(streams[rank]):
                    # a call of the other kind between two of a kind is a meeting
                    for step, act in enumerate((gathered, gathered, summed, summed)):
                        wrong[rank] += act(links[rank], call + step)
        for each in patches:
            each.stop()
        torch.cuda.synchronize()
    if not without:  # else flags are ahead of slots
        for link in links:
            link.check()
    return sum(map(int, wrong))


if __name__ == "__main__":
    count = int(sys.argv[1])
    load_kernels(count)
    found = {"": run(count, int(sys.argv[2]))}
    print(json.dumps(found | {name: run(count, 100, name) for name in WITHOUT}))
