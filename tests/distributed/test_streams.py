"""The schedule of overlapped calls on GPUs whose streams run in any order: values, and waits that cannot be left out.

No GPU: see support/simulated_streams.py. `link.py` is the one that runs on GPUs.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch.distributed")
if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from blockscale.distributed.overlap import link as link_module
from blockscale.distributed.overlap.link import Gathering, Link, Summation
from blockscale.distributed.overlap.transport import BETWEEN_GRAPHS, IN_GRAPHS
from support.simulated_streams import AllStreamsWaitError, Arena, CountedArena, Event, Gpu, Graph, Node

FIRST = 2**31 - 5


class Group:
    """What a link asks a process group."""

    def __init__(self, gpu: Gpu, ranks: int) -> None:
        self._rank, self._ranks = gpu.rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def rows_of(call: int, rank: int, to: int, shape: tuple[int, int]) -> Tensor:
    """Values that no other call, rank or destination has."""
    return torch.full(shape, float(call % 61 + 1) + rank * 64 + to * 512).add_(torch.arange(shape[1]) / 16)


class Program:
    """The host of one rank: calls of a list that all ranks share.  wrong: values, counted when streams run."""

    def __init__(self, node: Node, rank: int, calls: list[tuple[str, tuple[int, int]]]) -> None:
        self.gpu, self.wrong, self.graphs = Gpu(node, rank), 0, list[Graph]()
        self.salt = 0.0  # added to values of graphs: of each replay another one
        self.group = Group(self.gpu, node.ranks)
        with patch.object(link_module, "transport_of", lambda device: self.gpu):
            self.link = Link(self.group)  # pyright: ignore[reportArgumentType]
        self.link.gathers = self.link.sums = FIRST
        for kind in ("gather", "sum"):
            self.link._arenas[kind] = self.gpu.arena(None, 0, FIRST + 1, kind)
        for number, (kind, shape) in enumerate(calls):
            getattr(self, kind)(number, shape)

    def graph(self, number: int, shape: tuple[int, int]) -> None:
        """One to three calls of a graph that is captured here, and run once."""
        # a graph cannot wait for calls from before its capture
        if self.link._untaken:
            self.gather(number, shape)
        if self.link._open is not None:
            self.sum(number, shape)

        def host() -> None:
            for call in range(1 + number % 3):
                getattr(self, CAPTURED[(number + call * shape[0]) % len(CAPTURED)])(number + call, shape)

        self.graphs.append(self.gpu.capture(host))
        self.replay(number, shape)

    def replay(self, number: int, shape: tuple[int, int]) -> None:
        """Run a graph once more with other values."""
        if not self.graphs:
            return
        self.gpu.begin(None)  # a replay is in the order of streams

        def other_values() -> None:
            self.salt = 4096.0 * (1 + number % 20)

        self.gpu.current.add(other_values)
        self.gpu.replay(self.graphs[number % len(self.graphs)])

    def made(self, values: Tensor) -> Tensor:
        """A tensor that has these values when the current stream comes here."""
        found = torch.full_like(values, torch.nan)
        captured = self.gpu.capturing
        self.gpu.current.add(lambda: found.copy_(values).add_(self.salt if captured else 0))
        return found

    def check(self, found: Tensor, want: Tensor, parts: int = 1) -> None:
        """Compare when the current stream comes here.  parts: whose sum the values are."""
        captured = self.gpu.capturing

        def act() -> None:
            self.wrong += int((found != want + (parts * self.salt if captured else 0)).sum())

        self.gpu.current.add(act)

    def _start(self, number: int, shape: tuple[int, int], runs: int = 1) -> Gathering:
        mine = self.made(rows_of(number, self.gpu.rank, 0, shape))
        with self.gpu:
            return self.link.gather([mine, mine.to(torch.float64)], runs)

    def _take(self, found: Gathering, number: int, shape: tuple[int, int], most: int = 99) -> None:
        arrivals = found.arrivals()
        for _ in range(min(most, self.link.ranks)):
            with self.gpu:
                rank = next(arrivals)
            want = rows_of(number, rank, 0, shape)
            for whole in found.whole:
                self.check(
                    torch.cat([whole[span] for span in found.spans(rank)])
                    if found.runs > 1
                    else whole[found.spans(rank)[0]],
                    want,
                )
        if most >= self.link.ranks:
            assert next(arrivals, None) is None

    def gather(self, number: int, shape: tuple[int, int]) -> None:
        self._take(self._start(number, shape), number, shape)

    def abandoned_gather(self, number: int, shape: tuple[int, int]) -> None:
        self._take(self._start(number, shape), number, shape, most=1)

    def two_gathers(self, number: int, shape: tuple[int, int]) -> None:
        first, second = self._start(number, shape), self._start(number + 7, shape)
        self._take(first, number, shape)
        self._take(second, number + 7, shape)

    def taken_late(self, number: int, shape: tuple[int, int]) -> None:
        """A gather whose rows are taken after other calls, as those of a shared activation."""
        first = self._start(number, shape)
        self.gather(number + 7, shape)
        self.sum(number, shape)
        self._take(first, number, shape)

    def sum(self, number: int, shape: tuple[int, int], between: Callable[[], None] = lambda: None) -> None:
        with self.gpu:
            total = self.link.sum(shape, torch.float32)
        for owner in total.destinations():
            part = self.made(rows_of(number, self.gpu.rank, owner, shape))
            with self.gpu:
                total.push(owner, part)
        between()
        with self.gpu:
            found = total.finish()
        parts = (rows_of(number, source, self.gpu.rank, shape) for source in range(self.link.ranks))
        self.check(found, functools.reduce(torch.add, parts), self.link.ranks)

    def given_up(self, number: int, shape: tuple[int, int], parts: int = 99) -> None:
        """A sum that ends before it is finished, on all ranks."""
        with self.gpu:
            total = self.link.sum(shape, torch.float32)
        for owner in total.destinations()[:parts]:
            part = self.made(rows_of(number, self.gpu.rank, owner, shape))
            with self.gpu:
                total.push(owner, part)

    def given_up_early(self, number: int, shape: tuple[int, int]) -> None:
        self.given_up(number, shape, parts=1)

    def sum_around_a_gather(self, number: int, shape: tuple[int, int]) -> None:
        self.sum(number, shape, lambda: self.gather(number + 7, shape))

    def taken_after_a_replay(self, number: int, shape: tuple[int, int]) -> None:
        first = self._start(number, shape)
        self.replay(number, shape)
        self._take(first, number, shape)

    def sum_around_a_replay(self, number: int, shape: tuple[int, int]) -> None:
        self.sum(number, shape, lambda: self.replay(number, shape))

    def other_stream(self, number: int, shape: tuple[int, int]) -> None:
        """Later calls are on the other of two main streams."""
        self.gpu.current = self.gpu.mains[self.gpu.current is self.gpu.mains[0]]


CAPTURED = ("gather", "sum", "sum_around_a_gather", "two_gathers", "taken_late")
KINDS = (*CAPTURED, "abandoned_gather", "given_up", "given_up_early", "other_stream")
GRAPHS = ("graph", *("replay",) * 4)
LATE_ROWS = ("abandoned_gather", "taken_after_a_replay")
LATE_PARTS = ("given_up", "given_up_early", "sum_around_a_replay")
WITH_GRAPHS = (*CAPTURED, *LATE_ROWS, *LATE_PARTS, "other_stream", *GRAPHS)


def wrong_values(seed: int, kinds: Sequence[str] = KINDS) -> int:
    """Values that are wrong after 30 calls of two to four ranks, and digests that differ."""
    rng = random.Random(seed)
    node = Node(rng.choice((2, 2, 3, 4)), 1 << 14)
    calls = [(rng.choice(kinds), (rng.randint(1, 6), rng.randint(1, 8))) for _ in range(30)]
    programs = [Program(node, rank, calls) for rank in range(node.ranks)]
    node.execute(rng)
    return sum(program.wrong for program in programs) + len(node.failures)


@pytest.mark.slow
def test_values_do_not_depend_on_the_order_of_streams():
    seeds = range(1000 if "ALL_TESTS" in os.environ else 16)
    assert [seed for seed in seeds if wrong_values(seed)] == []


@pytest.mark.slow
def test_values_of_graphs_do_not_depend_on_the_order_of_streams():
    """Graphs of one call or several, replayed between other calls and while work of these still runs."""
    seeds = range(1000 if "ALL_TESTS" in os.environ else 8)
    assert [seed for seed in seeds if wrong_values(seed, WITH_GRAPHS)] == []


GATHER = Link.gather


def gather_at_once(self: Link, pieces: Any, runs: int = 1) -> Gathering:
    self._untaken = set()
    return GATHER(self, pieces, runs)


def enter_without_meeting(self: Gpu, arena: Any) -> Any:
    """Calls between replays do not meet."""
    self.meets |= self.capturing
    if self.capturing:
        arena.meet()
        return CountedArena(arena), IN_GRAPHS
    return arena, BETWEEN_GRAPHS if self.meets else None


ENTER = Gpu.enter


def enter_with_alternating_slots(self: Gpu, arena: Any) -> Any:
    """Calls of graphs and other calls share both slots."""
    return ENTER(self, arena)[0], None


def run_at_once(self: Gpu, copy: Callable[[], None], uses: Any = ()) -> Event:
    main, self.current = self.current, self.copies
    copy()
    self.current = main
    return Event(self.copies)


# what is replaced by what: values of some order must be wrong then, or streams wait forever
WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "the wait of a product for its rows": (Gathering, "_wait", lambda self, rank: None),
    "the wait for rows to be staged": (Gathering, "_wait_staged", lambda self, rank: None),
    "the wait for a part": (Summation, "_wait_arrived", lambda self, rank: None),
    "a second slot": (link_module, "slot_of", lambda call: 0),
    "the wait for a part to be made": (Gpu, "run", run_at_once),
    "the order of calls on two streams": (Gpu, "begin", lambda self, group: None),
    "the wait for rows that were not taken": (Link, "gather", gather_at_once),
    "the end of a sum that was given up": (Summation, "give_up", lambda self: None),
}


# of graphs
WITHOUT_IN_GRAPHS: dict[str, tuple[Any, str, Any]] = {
    "the meeting of ranks in a graph": (Arena, "have_met", lambda self: True),
    "the meeting of ranks after a graph": (Gpu, "enter", enter_without_meeting),
    "a number that the GPU counts": (Gpu, "enter", lambda self, arena: (arena, None)),
    "a slot of graphs beside rows that are pulled late": (Gpu, "enter", enter_with_alternating_slots),
    "a slot of graphs beside parts that are sent late": (Gpu, "enter", enter_with_alternating_slots),
    "the wait for rows to be staged in a graph": (Gathering, "_wait_staged", lambda self, rank: None),
    "the wait for a part in a graph": (Summation, "_wait_arrived", lambda self, rank: None),
}


# graphs, where a removal is to be seen beside one kind of late work alone
BESIDE = {
    "a slot of graphs beside rows that are pulled late": (*LATE_ROWS, *GRAPHS),
    "a slot of graphs beside parts that are sent late": (*LATE_PARTS, *GRAPHS),
}


@pytest.mark.parametrize("name", [*WITHOUT, *WITHOUT_IN_GRAPHS])
def test_what_cannot_be_left_out(name: str):
    kinds = KINDS if name in WITHOUT else BESIDE.get(name, WITH_GRAPHS)

    def is_wrong(seed: int) -> bool:
        try:
            with patch.object(*(WITHOUT | WITHOUT_IN_GRAPHS)[name]):
                return wrong_values(seed, kinds) > 0
        except AllStreamsWaitError:
            return True

    assert any(is_wrong(seed) for seed in range(100)), f"{name} is not needed"


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_one_process_on_a_gpu(ranks: int):
    """Streams that run at the same time, without a sync between calls; see support/virtual_ranks.py."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    # a queue of its own for every stream: a wait must not hold up another rank
    environment = {**os.environ, "PYTHONPATH": path, "OVERLAP_ON": "cuda", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    program = [sys.executable, "-m", "support.virtual_ranks", str(ranks), "1000"]
    done = subprocess.run(program, env=environment, check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.pop("") == 0
    assert len(found) == 4
    for name, wrong in found.items():
        assert wrong > 0, f"{name} is not needed"
