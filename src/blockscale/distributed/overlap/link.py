"""Rows among the ranks of a group, moved beside the products of this rank: gathers that pull and sums that push.

**Gather.** A rank puts its rows into its own memory and tells the others, who copy them when they want them, in the
order rank + 1, rank + 2, ... A product of the rows of one rank needs these alone.

**Reduce-scatter.** Partial rows go into the memory of the rank that owns them as soon as a product has made them,
own rows last. The owner adds them in the order of ranks, in fp32, and rounds once: the bits do not depend on arrival.

No barrier between calls: two slots are enough. A rank stages call n + 2 after it has finished n + 1, so it has seen
every other rank stage n + 1, which that rank does after its last read of call n. Sums are the same through their
parts, if a call is finished before the next one starts: `Link` gives up a sum that an error has left unfinished, and
waits for the rows of such a gather.

On GPUs "after" is the order of streams, and the host waits for none of it. Staging and signals are on the stream of the
products (the main one), waits for rows and copies on the side stream; `join` orders the main stream after a copy. So
all copies of a gather are joined before the next one stages, by `arrivals` or by `Link.gather`: the signal of n + 1 is
then after this rank's reads of n, and the staging of n + 2 after its waits of n + 1. Waits for parts, and reads of
them, are on the main stream; a part is sent on the side stream, after what the main stream had before `push`. So a
part of n + 2 is sent after the waits of n + 1, and a part of n + 1 after the reads of n.

In a CUDA graph the number of a call is counted on the GPU, since a replay repeats what the host has enqueued. The host
sees no replay, so slots do not alternate: from the first capture on, graphs have one slot and calls between them the
other, and every call begins with a meeting of all ranks on their main streams. The main stream of a rank comes to a
meeting behind its copies and reads of all calls before in the same slot, so after it the slot is free. Copies of calls
between graphs may still run when a graph is replayed, since they are in the other slot.

No wait is for work that is enqueued after a wait of the same call, so ranks cannot wait for one another in a circle,
also if one stream holds up the other.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ShardingError, refuse
from ...library import empty
from ...roofline.ceilings import machine_of
from ..collectives import Ranks
from .arena import ANY, SLOTS, digest_of
from .chunks import Part, chunks
from .transport import Arena, transport_of

_SMALLEST = 1 << 16
_CPU = torch.device("cpu")


class Link:
    """Arenas, side stream and numbers of calls of a group on a device, which all of its layers share."""

    # neither a link nor what it has keeps its group alive
    _LINKS: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Link]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, group: dist.ProcessGroup, device: torch.device = _CPU) -> None:
        self._group, self.rank, self.ranks = weakref.ref(group), group.rank(), group.size()
        self._transport = transport_of(device)
        self._gpu = machine_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.side = self._transport.side
        self.layers = self.gathers = self.sums = 0
        self._untaken: set[int] = set()  # gathers whose copies the main stream does not wait for yet
        self._open: Summation | None = None
        self._machines: list[str | None] = []
        self._captured = False  # whether the last call is part of a CUDA graph
        self._arenas: dict[str, Arena] = {}

    @classmethod
    def of(cls, ranks: Ranks, device: torch.device = _CPU) -> Link:
        """The link of a group. Calls follow one another in the same order on all of its ranks."""
        links = cls.all_of(ranks)
        found = links.get(device)
        if found is None:
            found = links[device] = Link(_group_of(ranks), device)
        return found

    @classmethod
    def all_of(cls, ranks: Ranks) -> dict[torch.device, Link]:
        """Links of a group by device."""
        return cls._LINKS.setdefault(_group_of(ranks), {})

    def machine(self) -> str | None:
        """Short name of the machine of all ranks; None if the model has none, they have different ones, or cannot map
        each other's memory. Collective at first."""
        if not self._machines:
            if self._transport.is_capturing():
                return None
            group = self._alive()
            name, maps = self._transport.machine(group), [True]
            if name is not None:
                try:
                    self._arenas.setdefault("gather", self._transport.arena(group, _SMALLEST, self.gathers + 1))
                except ShardingError:
                    maps = [False]
                maps *= self.ranks
                dist.all_gather_object(maps, maps[0], group)
            self._machines.append(name if all(maps) else None)
        return self._machines[0]

    def sum_parts(self, parts: Tensor, own: Tensor) -> Tensor:
        """Sum over ranks of parts [ranks, rows, N], with this rank's own; see `Transport.sum_parts`."""
        return self._transport.sum_parts(parts, own, self.rank)

    def check(self) -> None:
        """Raise the error of a wait that failed on the GPU; later calls raise it by themselves. No sync."""
        self._transport.check(self._alive())

    def _alive(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "a call has its group"
        return group

    def others(self) -> list[int]:
        """The other ranks in the order in which this rank exchanges rows with them."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def chunks(self, part: Part) -> Sequence[int]:
        """Numbers of ranks whose rows share a product; none, so that each has its own, where the model has no machine.
        Ranks may differ: they send and get the same."""
        return () if self._gpu is None else chunks(self._gpu, None, self.ranks, part)

    def arena(self, kind: str, size: int, call: int) -> Arena:
        """The arena of a kind of call, with room for two slots of this size. It grows on all ranks in the same call."""
        found = self._arenas.get(kind)
        if found is None or found.size < SLOTS * size:
            room = max(_SMALLEST, 1 << (SLOTS * size - 1).bit_length())
            found = self._arenas[kind] = self._transport.arena(self._alive(), room, call)
        return found

    def enter(self, kind: str, size: int, call: int) -> tuple[Arena, int]:
        """The arena of a call that begins, and the first byte of its slot, which has room for `size` bytes."""
        arena, slot = self._transport.enter(self.arena(kind, size, call))
        return arena, arena.size // SLOTS * (slot_of(call) if slot is None else slot)

    def gather(self, pieces: Sequence[Tensor], runs: int = 1, layer: int = 0) -> Gathering:
        """Start to gather tensors [rows, N] of this rank, equal in shape on all ranks.  runs: of a rank's rows, between
        which those of the others lie.  layer: number of the layer's call, equal on all ranks."""
        self._check_capture()
        self._transport.begin(self._alive())
        if self._untaken:  # an error has left rows of the gather before, or they are taken later
            self.side.join(self.side.run(lambda: None))
        self.gathers += 1
        self._untaken = {self.gathers}
        return Gathering(self, [piece.contiguous() for piece in pieces], runs, self.gathers, layer)

    def sum(self, shape: tuple[int, int], dtype: torch.dtype, layer: int = 0) -> Summation:
        """Start a sum over ranks of rows [rows, N] for each rank."""
        self._check_capture()
        if self._transport.is_capturing():
            self._open = None  # of a capture that failed
        if self._open is not None:
            self._open.give_up()
        self._transport.begin(self._alive())
        self.sums += 1
        self._open = Summation(self, shape, dtype, self.sums, layer)
        return self._open

    def _check_capture(self) -> None:
        """Raise if a CUDA graph would wait for a call from before its capture. A capture that failed is forgotten."""
        capturing = self._transport.is_capturing()
        if capturing != self._captured and (self._open is not None or self._untaken):
            if capturing:
                refuse(
                    "a captured CUDA graph with an overlapped call that began before it",
                    rule="a graph waits for work of its own alone",
                    fix="run the layers that take a gathered activation, and after an error another overlapped call, "
                    "before the capture",
                    error=ShardingError,
                )
            self._open, self._untaken = None, set()
        self._captured = capturing

    def close(self, ended: Gathering | Summation) -> None:
        """All rows of a gather have been taken, or a sum has ended."""
        if isinstance(ended, Gathering):
            self._untaken.discard(ended.call)
        elif self._open is ended:
            self._open = None


class LayerLink:
    """A link for one call of a layer. Its number is part of what ranks compare: backward passes in another order raise,
    also of layers with equal shapes."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @functools.cached_property
    def number(self) -> int:
        """Number of the call, in the order of forward passes. It is counted when rows first move, after ranks have
        compared the call, so a call that all of them refused does not count."""
        self.link.layers += 1
        return self.link.layers

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.link.ranks

    def chunks(self, part: Part) -> Sequence[int]:
        """As `Link.chunks`."""
        return self.link.chunks(part)

    def gather(self, pieces: Sequence[Tensor], runs: int = 1) -> Gathering:
        """As `Link.gather`."""
        return self.link.gather(pieces, runs, self.number)

    def sum(self, shape: tuple[int, int], dtype: torch.dtype) -> Summation:
        """As `Link.sum`."""
        return self.link.sum(shape, dtype, self.number)


class Gathering:
    """A gather in progress.  whole: tensors [ranks * rows, N], whose rows of a rank are there once it has arrived."""

    def __init__(self, link: Link, pieces: list[Tensor], runs: int, call: int, layer: int) -> None:
        self.link, self.runs, self.call, self.rows = link, runs, call, pieces[0].shape[0]
        self._sizes = [piece.numel() * piece.element_size() for piece in pieces]
        self._arena, self._start = link.enter("gather", sum(self._sizes), call)
        self._digest = digest_of(("gather", call, layer, runs, *(tuple(piece.shape) for piece in pieces), *self._sizes))
        self.whole = [empty((link.ranks * self.rows, *piece.shape[1:]), piece.dtype, piece.device) for piece in pieces]
        for piece, staged in zip(pieces, self._slot(link.rank), strict=True):
            staged.copy_(piece.view(torch.uint8).flatten())
        self._take(link.rank)
        self._arena.signal(link.others(), call, self._digest)
        self._copies = {rank: link.side.run(functools.partial(self._pull, rank), self.whole) for rank in link.others()}

    def spans(self, rank: int) -> list[slice]:
        """Rows of a rank in `whole`, a span for each run."""
        return spans_of(rank, self.link.ranks, self.runs, self.rows // self.runs)

    def arrivals(self) -> Iterator[int]:
        """Ranks whose rows are there: this rank first, then rank + 1, rank + 2, ... All must be taken."""
        yield self.link.rank
        for rank in self.link.others():
            self._wait(rank)
            if rank == self.link.others()[-1]:
                self.link.close(self)
            yield rank

    def _wait(self, rank: int) -> None:
        """Wait for the copy of a rank's rows."""
        self.link.side.join(self._copies[rank])

    def _pull(self, rank: int) -> None:
        """Copy the rows of a rank, on the side stream."""
        self._wait_staged(rank)
        self._take(rank)

    def _wait_staged(self, rank: int) -> None:
        """Wait until a rank has staged its rows of this call."""
        self._arena.wait(rank, self.call, self._digest)

    def _take(self, rank: int) -> None:
        """Copy staged rows of a rank to where they belong."""
        for whole, staged in zip(self.whole, self._slot(rank), strict=True):
            runs = whole.view(torch.uint8).view(self.runs, self.link.ranks, -1)[:, rank]
            runs.copy_(staged.view(runs.shape))

    def _slot(self, rank: int) -> Sequence[Tensor]:
        """Bytes of each piece in the memory of a rank."""
        return self._arena.data[rank][self._start : self._start + sum(self._sizes)].split(self._sizes)


class Summation:
    """A sum over ranks in progress: `push` for every rank in the order of `destinations`, then `finish`."""

    def __init__(self, link: Link, shape: tuple[int, int], dtype: torch.dtype, call: int, layer: int) -> None:
        self.link, self.shape, self.dtype, self.call = link, shape, dtype, call
        self._size = shape[0] * shape[1] * dtype.itemsize
        self._arena, self._start = link.enter("sum", link.ranks * self._size, call)
        self._digest = digest_of(("sum", call, layer, shape, dtype))
        self._own: Tensor | None = None
        self._copies: list[Any] = []
        self._sent: set[int] = set()
        self._given_up = False

    def destinations(self) -> list[int]:
        """Owners of rows in the order in which their parts are best made: own rows last."""
        return [*self.link.others(), self.link.rank]

    def push(self, rank: int, part: Tensor) -> None:
        """Send this rank's part of the rows [rows, N] that a rank owns."""
        if rank == self.link.rank:
            self._own = part
        else:
            self._copies.append(self.link.side.run(functools.partial(self._store, rank, part), (part,)))

    def finish(self) -> Tensor:
        """The sum of this rank's rows [rows, N]: parts are added in the order of ranks in fp32, and rounded once."""
        assert self._own is not None
        assert not self._given_up, "a sum that another one has followed"
        for copy in self._copies:  # they wait for no rank, and an error of theirs is the first to tell
            self.link.side.join(copy)
        for rank in range(self.link.ranks):
            if rank != self.link.rank:
                self._wait_arrived(rank)
        total = self.link.sum_parts(self._slots(self.link.rank), self._own.contiguous())
        self.link.close(self)
        return total

    def give_up(self) -> None:
        """End a sum that an error has left unfinished: its parts are not read any more, but ranks wait for each other
        as in every sum. A rank that has not given up gets the error of another call."""
        self._given_up = True
        for copy in self._copies:
            with contextlib.suppress(Exception):  # the first error has been raised
                self.link.side.join(copy)
        for rank in self.link.others():
            if rank not in self._sent:
                self._arena.signal([rank], self.call, digest_of(("given up", self.call)))
        for rank in self.link.others():
            self._arena.wait(rank, self.call, ANY)

    def _store(self, rank: int, part: Tensor) -> None:
        """Copy a part into the memory of its owner and tell it, on the side stream."""
        self._slots(rank)[self.link.rank].copy_(part)
        self._arena.signal([rank], self.call, self._digest)
        self._sent.add(rank)

    def _wait_arrived(self, rank: int) -> None:
        """Wait until the part of a rank is here."""
        self._arena.wait(rank, self.call, self._digest)

    def _slots(self, owner: int) -> Tensor:
        """Where parts [ranks, rows, N] lie in the memory of their owner."""
        start, ranks = self._start, self.link.ranks
        return self._arena.data[owner][start : start + ranks * self._size].view(self.dtype).view(ranks, *self.shape)


def _group_of(ranks: Ranks) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(ranks.name)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType]


def slot_of(call: int) -> int:
    """Which of the two slots a call uses before the first capture of a CUDA graph. They are the halves of an arena,
    whatever the sizes of the calls are."""
    return call % SLOTS


def spans_of(rank: int, ranks: int, runs: int, rows: int) -> list[slice]:
    """Rows of a rank among those of all, of which it has `rows` in each run.

    >>> spans_of(1, 2, 2, 3)
    [slice(3, 6, None), slice(9, 12, None)]
    """
    starts = [(run * ranks + rank) * rows for run in range(runs)]
    return [slice(start, start + rows) for start in starts]
