"""GPUs of several ranks in one process: streams as queues, executed in any order that events and flags allow.

The host programs of all ranks run first and only enqueue, as on GPUs that are far behind. Then a scheduler takes the
heads of the queues, and starves some of them for long times. Copies and additions of `link.py` are enqueued by a
dispatch mode; its other operators are views and allocations.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockscale.distributed.overlap.arena import ANY, SLOTS, wrapped
from blockscale.distributed.overlap.transport import BETWEEN_GRAPHS, IN_GRAPHS, add_parts

_aten = torch.ops.aten


class AllStreamsWaitError(Exception):
    """No queue can go on."""


class Step(NamedTuple):
    """The head of a queue.  ready: whether it can run."""

    ready: Callable[[], bool]
    act: Callable[[], object]


class Graph:
    """Steps of a captured graph by the stream of their capture, and the events among them."""

    def __init__(self) -> None:
        self.steps: list[tuple[Stream, Step]] = []
        self.events: list[Event] = []


class Stream:
    """A queue of one rank.  graph: captures what is added."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self.graph: Graph | None = None

    def add(self, act: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        if self.graph is None:
            self.steps.append(Step(ready, act))
        else:
            self.graph.steps.append((self, Step(ready, act)))


class Event:
    """Whether a stream has come to a point."""

    def __init__(self, stream: Stream) -> None:
        self.passed = False
        if stream.graph is not None:
            stream.graph.events.append(self)
        stream.add(self._pass)

    def _pass(self) -> None:
        self.passed = True

    def hold(self, stream: Stream) -> None:
        """Let what a stream has next wait for this event."""
        stream.add(lambda: None, lambda: self.passed)


class Node:
    """Memory and flags of all ranks.  failures: (rank, source, call) of digests that differ."""

    def __init__(self, ranks: int, size: int) -> None:
        self.ranks, self.size = ranks, size
        self.streams: list[Stream] = []
        self.failures: list[tuple[int, int, int]] = []
        self._memory: dict[str, list[Tensor]] = {}
        self._flags: dict[str, dict[tuple[int, int], int]] = {}
        self._digests: dict[str, dict[tuple[int, int, int], int]] = {}
        # of calls of graphs, by (kind, rank): numbers of meetings, and by (kind, waiter, writer): flags
        self.numbers: dict[tuple[str, int], int] = {}
        self.counted: dict[tuple[str, int, int], tuple[int, int]] = {}

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def of(self, kind: str, call: int) -> tuple[list[Tensor], dict[tuple[int, int], int], dict[Any, int]]:
        """Data, flags by (waiter, writer) and digests by (waiter, writer, slot) of a kind of arena."""
        if kind not in self._memory:
            self._memory[kind] = [torch.full((self.size,), 0xFF, dtype=torch.uint8) for _ in range(self.ranks)]
            every = range(self.ranks)
            self._flags[kind] = {(a, b): wrapped(call - 1) for a in every for b in every}
            self._digests[kind] = {}
        return self._memory[kind], self._flags[kind], self._digests[kind]

    def execute(self, rng: random.Random) -> None:
        """Run all queues to their ends."""
        weights: dict[int, float] = {}
        left = 0
        while True:
            ready = [each for each in self.streams if each.steps and each.steps[0].ready()]
            if not ready:
                if any(each.steps for each in self.streams):
                    raise AllStreamsWaitError
                return
            if not left:
                weights = {id(each): rng.random() for each in self.streams}
                left = rng.choice((1, 3, 20, 200))
            left -= 1
            max(ready, key=lambda each: weights[id(each)]).steps.popleft().act()


class Arena:
    """A rank's arena."""

    def __init__(self, gpu: Gpu, kind: str, call: int) -> None:
        self._gpu, self.size, self.kind = gpu, gpu.node.size, kind
        self.data, self._flags, self._digests = gpu.node.of(kind, call)

    def signal(self, ranks: Sequence[int], call: int, digest: int) -> None:
        gpu = self._gpu

        def act() -> None:
            for rank in ranks:
                self._digests[rank, gpu.rank, call % SLOTS] = digest
                self._flags[rank, gpu.rank] = wrapped(call)

        gpu.current.add(act)

    def wait(self, source: int, call: int, digest: int) -> None:
        gpu = self._gpu

        def act() -> None:
            if digest not in (ANY, self._digests.get((gpu.rank, source, call % SLOTS))):
                gpu.node.failures.append((gpu.rank, source, call))

        gpu.current.add(act, lambda: (self._flags[gpu.rank, source] - call) % 2**32 < 2**31)

    def meet(self) -> None:
        gpu, numbers = self._gpu, self._gpu.node.numbers

        def act() -> None:
            numbers[self.kind, gpu.rank] = numbers.get((self.kind, gpu.rank), 0) + 1

        gpu.current.add(act)
        gpu.current.add(lambda: None, self.have_met)

    def have_met(self) -> bool:
        """Whether all ranks have come to this rank's last meeting."""
        numbers, ranks = self._gpu.node.numbers, range(self._gpu.node.ranks)
        mine = numbers[self.kind, self._gpu.rank]
        return all(numbers.get((self.kind, rank), 0) >= mine for rank in ranks)


class CountedArena:
    """A rank's arena in a graph: flags hold the number of the last meeting."""

    def __init__(self, arena: Arena) -> None:
        self._gpu, self._kind, self.size, self.data = arena._gpu, arena.kind, arena.size, arena.data

    def signal(self, ranks: Sequence[int], call: int, digest: int) -> None:
        gpu, kind = self._gpu, self._kind

        def act() -> None:
            for rank in ranks:
                gpu.node.counted[kind, rank, gpu.rank] = gpu.node.numbers[kind, gpu.rank], digest

        gpu.current.add(act)

    def wait(self, source: int, call: int, digest: int) -> None:
        gpu, place = self._gpu, (self._kind, self._gpu.rank, source)

        def act() -> None:
            if digest not in (ANY, gpu.node.counted[place][1]):
                gpu.node.failures.append((gpu.rank, source, call))

        number = (self._kind, gpu.rank)
        gpu.current.add(act, lambda: gpu.node.counted.get(place, (0, 0))[0] >= gpu.node.numbers.get(number, 0))


class Gpu(TorchDispatchMode):
    """Transport and side stream of one rank; as a mode it enqueues what torch would launch."""

    def __init__(self, node: Node, rank: int) -> None:
        super().__init__()
        self.node, self.rank = node, rank
        self.mains, self.copies = [node.stream(), node.stream()], node.stream()
        self.current = self._last = self.mains[0]
        self.side = self
        self.capturing = self.meets = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_aten.copy_.default, _aten.add_.Tensor, _aten.fill_.Scalar):  # filled with poison
            self.current.add(lambda: func(*args))
            return args[0]
        if func is _aten.add.out:
            self.current.add(lambda: func(*args, **kwargs))
            return kwargs["out"]
        if func is _aten._to_copy.default:
            found = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            self.current.add(lambda: found.copy_(args[0]))
            return found
        assert func.is_view or "empty" in str(func), f"{func} would be launched"
        return func(*args, **(kwargs or {}))

    def arena(self, group: Any, size: int, call: int, kind: str = "") -> Arena:
        assert size <= self.node.size, "a simulated arena does not grow"
        return Arena(self, kind, call)

    def begin(self, group: Any) -> None:
        if self.capturing:  # on one stream
            return
        if self._last is not self.current:
            Event(self._last).hold(self.current)
        self._last = self.current

    def sum_parts(self, parts: Tensor, own: Tensor, rank: int) -> Tensor:
        return add_parts(parts, own, rank)

    def is_capturing(self) -> bool:
        return self.capturing

    def enter(self, arena: Arena) -> tuple[Any, int | None]:
        self.meets |= self.capturing
        if not self.meets:
            return arena, None
        arena.meet()
        return (CountedArena(arena), IN_GRAPHS) if self.capturing else (arena, BETWEEN_GRAPHS)

    def capture(self, host: Callable[[], None]) -> Graph:
        """The graph of what the host enqueues on the current stream."""
        graph, streams = Graph(), [*self.mains, self.copies]
        self.capturing = True
        for each in streams:
            each.graph = graph
        host()
        self.capturing = False
        for each in streams:
            each.graph = None
        return graph

    def replay(self, graph: Graph) -> None:
        """Enqueue a graph on the current stream. What was captured on the side stream has no order with that stream."""

        def reset() -> None:
            for each in graph.events:
                each.passed = False

        side = self.node.stream()
        self.current.add(reset)
        Event(self.current).hold(side)
        for stream, step in graph.steps:
            (side if stream is self.copies else self.current).steps.append(step)
        Event(side).hold(self.current)

    def check(self, group: Any) -> None:
        pass

    def run(self, copy: Callable[[], None], uses: Sequence[Tensor] = ()) -> Event:
        Event(self.current).hold(self.copies)
        main, self.current = self.current, self.copies
        copy()
        self.current = main
        return Event(self.copies)

    def join(self, copy: Event) -> None:
        copy.hold(self.current)
