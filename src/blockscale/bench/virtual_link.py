"""A link for timing on one GPU: pinned host memory stands for the memory of the other ranks.

`VirtualLink` has the interface of `distributed.overlap.link.Link`, so products run through the code of the library.
Rows of rank + 1, rank + 2, ... come on a copy stream. Parts of a sum leave on one stream, while those of the other
ranks come on another: as ranks do the same at the same time, the part of rank - s comes when this rank has made the
part for rank + s. There are no flags, since no other process writes. `ReadyLink` has all rows there and sends nothing.

On a CPU a copy is made when it is waited for, so that a product that does not wait reads other bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..distributed.overlap.chunks import Part, chunks
from ..distributed.overlap.link import spans_of
from ..distributed.overlap.transport import add_parts
from ..library import empty
from ..roofline import machine_of

Wait = Callable[[], object]


class CopyStream:
    """Stream of copies, each after what its caller has launched before it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, copy: Callable[[], object]) -> Wait:
        """Start a copy. The result makes the current stream wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_event(done)


class LateCopies:
    """Copies of a CPU, which has no streams: each is made when it is waited for."""

    def run(self, copy: Callable[[], object]) -> Wait:
        """Remember a copy. The result makes it, once."""
        return functools.cache(copy)


class VirtualLink:
    """Link of one rank whose peers are host memory.

    shards: for each rank the pieces that it gathers.  parts: [ranks, rows, N], what each rank adds to this rank's rows.
    Both lie on the host, pinned for a GPU, and those of this rank are not read.  sent: parts that have left, as
    `parts`.  poisons: whether buffers are filled with NaN before rows arrive.  groups: numbers of ranks whose rows
    share a product, in the order of arrival; without them as ranks whose link is PCIe would choose.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        *,
        shards: Sequence[Sequence[Tensor]] = (),
        parts: Tensor | None = None,
        groups: Sequence[int] = (),
    ) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.shards, self.parts = shards, parts
        self.sent = None if parts is None else on_host(torch.empty_like(parts), device)
        self.poisons, self.groups = False, groups
        self._poison = torch.tensor(-0.0, device=device)
        make = functools.partial(CopyStream, device) if device.type == "cuda" else LateCopies
        self.incoming, self.outgoing = make(), make()

    def others(self) -> list[int]:
        """The other ranks in the order in which this rank exchanges rows with them."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def chunks(self, part: Part) -> Sequence[int]:
        """As `Link.chunks`."""
        return chosen(self, part, self.device)

    def gather(self, pieces: Sequence[Tensor], runs: int = 1) -> VirtualGathering:
        """Start to gather tensors [rows, N] of this rank."""
        return VirtualGathering(self, pieces, runs)

    def sum(self, shape: tuple[int, int], dtype: torch.dtype) -> VirtualSummation:
        """Start a sum over ranks of rows [rows, N] for each rank."""
        return VirtualSummation(self, shape, dtype)

    def total(self, parts: Tensor, own: Tensor) -> Tensor:
        """Sum over ranks of parts [ranks, rows, N]; see `Transport.sum_parts`."""
        if self.device.type != "cuda":
            return add_parts(parts, own, self.rank)
        from ..distributed.overlap.sums import sum_parts  # imports Triton

        return sum_parts(parts, own, self.rank, self._poison)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the device that rows arrive in."""
        made = empty(shape, dtype, self.device)
        if self.poisons:
            made.view(-1).view(torch.uint8).fill_(0xFF)
        return made


class VirtualGathering:
    """A gather in progress; see `distributed.overlap.link.Gathering`."""

    def __init__(self, link: VirtualLink, pieces: Sequence[Tensor], runs: int) -> None:
        self.link, self.runs, self.rows = link, runs, pieces[0].shape[0]
        self.whole = [link.buffer((link.ranks * self.rows, *piece.shape[1:]), piece.dtype) for piece in pieces]
        take = self._take
        self._waits = {
            rank: link.incoming.run(functools.partial(take, rank, link.shards[rank])) for rank in link.others()
        }
        take(link.rank, pieces)

    def spans(self, rank: int) -> list[slice]:
        """Rows of a rank in `whole`, a span for each run."""
        return spans_of(rank, self.link.ranks, self.runs, self.rows // self.runs)

    def arrivals(self) -> Iterator[int]:
        """Ranks whose rows are there: this rank first, then rank + 1, rank + 2, ... All must be taken."""
        yield self.link.rank
        for rank, wait in self._waits.items():
            wait()
            yield rank

    def _take(self, rank: int, pieces: Sequence[Tensor]) -> None:
        """Copy the pieces of a rank to where they belong."""
        for whole, piece in zip(self.whole, pieces, strict=True):
            for span, rows in zip(self.spans(rank), piece.chunk(self.runs), strict=True):
                whole[span].copy_(rows, non_blocking=True)


class VirtualSummation:
    """A sum over ranks in progress; see `distributed.overlap.link.Summation`."""

    def __init__(self, link: VirtualLink, shape: tuple[int, int], dtype: torch.dtype) -> None:
        assert link.parts is not None
        assert (link.ranks, *shape) == link.parts.shape
        self.link, self.dtype = link, dtype
        self._arrived = link.buffer(link.parts.shape, dtype)
        self._own: Tensor | None = None
        self._waits: list[Wait] = []
        self._leaving: list[Tensor] = []  # kept until their copies are made

    def destinations(self) -> list[int]:
        """Owners of rows in the order in which their parts are best made: own rows last."""
        return [*self.link.others(), self.link.rank]

    def push(self, rank: int, part: Tensor) -> None:
        """Send this rank's part of the rows that a rank owns; the part that comes at the same time sets out, too."""
        link = self.link
        if rank == link.rank:
            self._own = part
            return
        assert link.parts is not None
        assert link.sent is not None
        source = (2 * link.rank - rank) % link.ranks
        self._leaving.append(part)
        for stream, to, rows in (
            (link.outgoing, link.sent[rank], part),
            (link.incoming, self._arrived[source], link.parts[source]),
        ):
            self._waits.append(stream.run(functools.partial(to.copy_, rows, non_blocking=True)))

    def wait(self) -> None:
        """Wait for all copies."""
        for wait in self._waits:
            wait()

    def finish(self) -> Tensor:
        """The sum of this rank's rows: parts are added in the order of ranks in fp32, and rounded once."""
        self.wait()
        assert self._own is not None
        return self.link.total(self._arrived, self._own.contiguous())


class ReadyLink:
    """Link with all rows there.  whole: rows of all ranks, for gathers.  groups: as of `VirtualLink`.  products: number
    of them in the last call, for each weight."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        whole: Sequence[Tensor] = (),
        groups: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.ranks, self.whole, self.groups = rank, ranks, list(whole), groups
        self.device, self.products = device, 0

    def chunks(self, part: Part) -> Sequence[int]:
        """As `VirtualLink.chunks`."""
        found = chosen(self, part, self.device)
        self.products = len(found) + self.ranks - sum(found)
        return found

    def gather(self, pieces: Sequence[Tensor], runs: int = 1) -> ReadyRows:
        """A gather that is done."""
        return ReadyRows(self, runs)

    def copy(self) -> ReadyLink:
        """A link with memory of its own."""
        return ReadyLink(self.rank, self.ranks, [each.clone() for each in self.whole], self.groups, self.device)

    def sum(self, shape: tuple[int, int], dtype: torch.dtype) -> ReadyParts:
        """A sum of which this rank makes its parts alone."""
        return ReadyParts(self)


class ReadyRows:
    """A gather that is done."""

    def __init__(self, link: ReadyLink, runs: int) -> None:
        self.link, self.runs, self.whole = link, runs, link.whole

    def spans(self, rank: int) -> list[slice]:
        """Rows of a rank in `whole`, a span for each run."""
        return spans_of(rank, self.link.ranks, self.runs, self.whole[0].shape[0] // self.link.ranks // self.runs)

    def arrivals(self) -> Iterator[int]:
        """All ranks, in the order of arrival."""
        return iter((self.link.rank + step) % self.link.ranks for step in range(self.link.ranks))


class ReadyParts:
    """A sum of which the parts of this rank are made, and not sent.  parts: by the rank that owns their rows."""

    def __init__(self, link: ReadyLink) -> None:
        self.link, self.parts = link, dict[int, Tensor]()

    def destinations(self) -> list[int]:
        """Owners of rows, this rank last."""
        return [(self.link.rank + step) % self.link.ranks for step in range(1, self.link.ranks + 1)]

    def push(self, rank: int, part: Tensor) -> None:
        """Keep a part."""
        self.parts[rank] = part

    def finish(self) -> Tensor:
        """The part of this rank's own rows."""
        return self.parts[self.link.rank]


def chosen(link: VirtualLink | ReadyLink, part: Part, device: torch.device | None) -> Sequence[int]:
    """The groups of a link, or the best ones on this device over PCIe, if the model has it."""
    if link.groups or device is None or device.type != "cuda":
        return link.groups
    machine = machine_of(torch.cuda.get_device_name(device))
    return () if machine is None else chunks(machine, "pcie5", link.ranks, part)


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor in host memory, pinned for a GPU."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=device.type == "cuda")
    return made.copy_(tensor)
