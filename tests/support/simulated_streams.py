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

_aten = torch.ops.aten


class AllStreamsWaitError(Exception):
    """No queue can go on."""


class Step(NamedTuple):
    """The head of a queue.  ready: whether it can run."""

    ready: Callable[[], bool]
    act: Callable[[], object]


class Stream:
    """A queue of one rank."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()

    def add(self, act: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.steps.append(Step(ready, act))


class Event:
    """Whether a stream has come to a point."""

    def __init__(self, stream: Stream) -> None:
        self.passed = False
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
        self._gpu, self.size = gpu, gpu.node.size
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


class Gpu(TorchDispatchMode):
    """Transport and side stream of one rank; as a mode it enqueues what torch would launch."""

    def __init__(self, node: Node, rank: int) -> None:
        super().__init__()
        self.node, self.rank = node, rank
        self.mains, self.copies = [node.stream(), node.stream()], node.stream()
        self.current = self._last = self.mains[0]
        self.side, self.poison = self, torch.tensor(-0.0)

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
        if self._last is not self.current:
            Event(self._last).hold(self.current)
        self._last = self.current

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
