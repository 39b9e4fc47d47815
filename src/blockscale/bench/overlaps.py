"""Overlapped products of one rank to time: operands over a virtual link, contenders, the check, and figures.

A `Share` is what one rank has of an operation. Its contenders run the code of the library: `overlapped`, `serial`
(copies, then the product), `chunked` (the chunks of `overlapped` with all rows there), `product` (one launch) and
`copies` (no product). `beside_copies` times the product of one launch while the same copies run.

The check is exact. A copy changes no byte, and a chunk of `overlapped` is the launch of `chunked`, so both have the
same bytes, whatever arrives first. How many values differ from one launch is a figure of the row; both are compared
with the exact product on some rows. Shares of experts are in `expert_overlaps.py`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.operands import Casts
from ..autograd.recipe import get_recipe
from ..distributed.collectives import Tokens
from ..distributed.overlap.ops import _split, _times
from ..distributed.overlap.products import (
    GatherInProgress,
    PendingRows,
    PendingSummation,
    RowsLink,
    Times,
    sum_of_products,
    with_rows,
)
from ..formats.tensor import BlockScaled
from ..gemm import exact_mm
from ..gemm.ops import gemm_request
from ..grouped import Routing
from ..registry import select
from .gemms import ROWS, gate_db, spread, sqnr_db, take_rows
from .harness import Args, Budget, Case, Peer, Verdict, count_wrong, failure, random
from .timing import Slice, prepare
from .virtual_link import ReadyLink, ReadyParts, VirtualLink, VirtualSummation, on_host

Operand = BlockScaled | Tensor
Wait = Callable[[], object]
# names of the contenders of a row; "blockscale" is the overlapped operation
OURS, ONE, CHUNKED, COPIES, SERIAL = "blockscale", "one product", "chunks, rows there", "copies", "serial"
BESIDE, AUTO, PERMUTED = "one product beside copies", "auto", "one product, permuted"
DTYPE = torch.bfloat16
# turns through the input sets of a slice of `beside_copies`, and cycles (1 ms) that the host has to launch copies
_TURNS = 2
_CYCLES = 2_000_000


class Gathered(NamedTuple):
    """Result of a gather and its product.  rows: of all ranks, as they have arrived and been placed."""

    result: Tensor
    rows: list[Tensor]


@dataclass(frozen=True, eq=False)
class Share(ABC):
    """One rank's share of an operation.

    x: rows [M, K of this rank], bf16 or with scales in the product's layout.  weight: [N of this rank, K].
    """

    link: VirtualLink
    ready: ReadyLink
    x: Operand
    weight: Operand

    @functools.cached_property
    def times(self) -> Times:
        """The product of rows with the weight."""
        return _times(self.weight, None, DTYPE)

    @property
    def backend(self) -> str:
        """Backend of the product in one launch."""
        if isinstance(self.x, Tensor) or isinstance(self.weight, Tensor):
            return "torch"
        return select(gemm_request(self.x, self.weight, DTYPE, bias=False, accumulate=False)).backend

    def product(self) -> Tensor:
        """One product of all rows, which are there."""
        return self.times.product(*_split(self.x), None)

    def whole(self) -> Tensor:
        """What the chunks make together, by one product."""
        return self.product()

    def permuted(self) -> Tensor:
        """One product, with the rows of experts placed before it or combined after it."""
        return self.whole()

    def exact(self, some: Tensor) -> Tensor:
        """Some rows of `whole`, exact, fp64."""
        return exact_rows(self.x, self.weight, some)

    def copies(self) -> None:
        """All copies and no product."""
        self.start()()

    @abstractmethod
    def overlapped(self) -> Tensor:
        """The operation."""

    @abstractmethod
    def serial(self) -> Tensor:
        """Copies and one product, one after the other."""

    @abstractmethod
    def chunked(self) -> Tensor:
        """The chunks of `overlapped`, with all rows there and none sent."""

    @abstractmethod
    def start(self) -> Wait:
        """Start all copies; the result waits for them."""

    @abstractmethod
    def with_weight(self, weight: Operand) -> Share:
        """A share with another weight, and its own memory for the rows of this rank."""

    @abstractmethod
    def all_chunks(self) -> Tensor:
        """`whole`, made in chunks."""

    @abstractmethod
    def wrong_bytes(self) -> int:
        """Wrong bytes in a second run of `overlapped` and in what it moved; the link poisons its memory."""

    def check(self) -> Verdict:
        """Check the operation; an exception counts as a fault."""
        how = f"every byte against the same chunks with all rows there, {ROWS} rows at most against the exact product"
        self.link.poisons = True
        try:
            wrong = self.wrong_bytes()
            chunks, whole = self.all_chunks(), self.whole()
            some = spread(whole.shape[0], ROWS, self.link.device)
            exact = self.exact(some)
            db = min(sqnr_db(exact, each[some]) for each in (chunks, whole))
        except Exception as error:  # the rest of a long run continues
            return Verdict(0, how, failure(error))
        finally:
            self.link.poisons = False
        gate = gate_db("", DTYPE)
        problem = "" if db >= gate else f"the product is {db:.1f} dB from the exact one, less than {gate:.0f}"
        unlike = float((chunks != whole).sum())
        details = {"values_unlike_one_launch": unlike, "chunks": float(self.ready.products)}
        return Verdict(wrong, how, problem, db if db == db else None, details)


@dataclass(frozen=True, eq=False)
class GatherShare(Share):
    """Rows that are gathered for a product with this rank's columns."""

    @functools.cached_property
    def piece(self) -> Operand:
        """This rank's rows, with plain scales."""
        return piece_of(self.x, self.link.rank, self.link.ranks)

    def gather(self, link: RowsLink) -> GatherInProgress:
        """Start to gather."""
        return self._begin(link).gathering

    def multiply(self, link: RowsLink) -> Gathered:
        """Gather and multiply."""
        pending = self._begin(link)
        (result,), *_ = pending.multiply([self.times], self._layout, DTYPE)
        return Gathered(result, pending.gathering.whole)

    def overlapped(self) -> Tensor:
        return self.multiply(self.link).result

    def chunked(self) -> Tensor:
        return self.multiply(self.ready).result

    def all_chunks(self) -> Tensor:
        return self.chunked()

    def serial(self) -> Tensor:
        return self.times.product(*self._begin(self.link).wait(self._layout), None)

    def start(self) -> Wait:
        arrivals = self.gather(self.link).arrivals()
        return lambda: list(arrivals)

    def with_weight(self, weight: Operand) -> GatherShare:
        return replace(self, ready=self.ready.copy(), weight=weight)

    def wrong_bytes(self) -> int:
        poison(self.multiply(self.link))
        return count_wrong(self.multiply(self.link), self.multiply(self.ready))

    def _begin(self, link: RowsLink) -> PendingRows:
        return PendingRows.start(*_split(self.piece), DTYPE, 1, link)

    @property
    def _layout(self) -> str | None:
        return self.x.scale_layout if isinstance(self.x, BlockScaled) else None


@dataclass(frozen=True, eq=False)
class SumShare(Share):
    """A product of this rank's columns that is summed over the ranks, rows for each."""

    @functools.cached_property
    def parts(self) -> dict[int, Tensor]:
        """Products of the rows of each rank, made in chunks."""
        made = self.begin(self.ready).summation
        assert isinstance(made, ReadyParts)
        return made.parts

    def overlapped(self) -> Tensor:
        return self.begin(self.link).wait()

    def chunked(self) -> Tensor:
        return self.begin(self.ready).wait()

    def all_chunks(self) -> Tensor:
        return torch.cat([self.parts[rank] for rank in range(self.link.ranks)])

    def serial(self) -> Tensor:
        return self._push(dict(enumerate(self.whole().chunk(self.link.ranks)))).finish()

    def start(self) -> Wait:
        return self._push(self.parts).wait

    def with_weight(self, weight: Operand) -> SumShare:
        return replace(self, weight=weight)

    def wrong_bytes(self) -> int:
        sent, came, rank = self.link.sent, self.link.parts, self.link.rank
        assert sent is not None
        assert came is not None
        sent.view(torch.uint8).fill_(0xFF)
        self.overlapped().untyped_storage().fill_(0xFF)  # pyright: ignore[reportAttributeAccessIssue]
        total = self.overlapped()
        if total.is_cuda:
            torch.cuda.synchronize(total.device)
        added = (self.parts[rank] if source == rank else part.to(total.device) for source, part in enumerate(came))
        right = functools.reduce(torch.add, (part.float() for part in added)).to(total.dtype)
        left = [sent[owner] for owner in self.link.others()]
        return count_wrong([total, *left], [right, *(self.parts[owner].cpu() for owner in self.link.others())])

    def begin(self, link: RowsLink) -> PendingSummation:
        """Make the parts of all rows, and start to send them."""
        tokens = Tokens(1, self.x.shape[0] // self.link.ranks)
        return sum_of_products(link, tokens, self.times, *_split(self.x), DTYPE)

    def _push(self, parts: Mapping[int, Tensor]) -> VirtualSummation:
        rows, columns = parts[self.link.rank].shape
        summation = self.link.sum((rows, columns), DTYPE)
        for owner in summation.destinations():
            summation.push(owner, parts[owner])
        return summation


def poison(made: Gathered) -> None:
    """Fill the memory of a result with NaN; the next one takes it."""
    for each in (made.result, *made.rows):
        each.untyped_storage().fill_(0xFF)  # pyright: ignore[reportAttributeAccessIssue]


# ---- operands --------------------------------------------------------------------------------------------------------


def gather_share(
    m: int, n: int, k: int, ranks: int, rank: int, payload: str, groups: Sequence[int], device: torch.device
) -> GatherShare:
    """Share of rows [M / ranks, K] that are gathered and multiplied with [n, K].  payload: name of a recipe."""
    x = row_operand(payload, random((m, k), device))
    link, ready = links_of([pieces_of(piece_of(x, each, ranks)) for each in range(ranks)], rank, groups, device)
    return GatherShare(link, ready, x, weight_operand(payload, (n, k), device))


def sum_share(
    m: int, n: int, k: int, ranks: int, rank: int, payload: str, groups: Sequence[int], device: torch.device
) -> SumShare:
    """Share of [M, k] times [N, k] that is summed over the ranks, M / ranks rows for each."""
    x = row_operand(payload, random((m, k), device))
    parts = on_host(random((ranks, m // ranks, n), device), device)
    link, ready = sum_links(parts, rank, groups, device)
    return SumShare(link, ready, x, weight_operand(payload, (n, k), device))


def links_of(
    pieces: Sequence[Sequence[Tensor]], rank: int, groups: Sequence[int], device: torch.device
) -> tuple[VirtualLink, ReadyLink]:
    """Links for a gather of these pieces of each rank: over host memory, and with all rows there."""
    shards = [[on_host(piece, device) for piece in each] for each in pieces]
    whole = [torch.cat(of_ranks).to(device) for of_ranks in zip(*pieces, strict=True)]
    link = VirtualLink(rank, len(shards), device, shards=shards, groups=groups)
    return link, ReadyLink(rank, len(shards), whole, groups, device)


def sum_links(parts: Tensor, rank: int, groups: Sequence[int], device: torch.device) -> tuple[VirtualLink, ReadyLink]:
    """Links for a sum over ranks to which each adds its part on the host, [ranks, rows, N]."""
    ranks = len(parts)
    link = VirtualLink(rank, ranks, device, parts=parts, groups=groups)
    return link, ReadyLink(rank, ranks, groups=groups, device=device)


def row_operand(payload: str, x: Tensor, routing: Routing | None = None) -> Operand:
    """x as a product of that recipe takes it, a grouped one with routing: an operand, or the values."""
    row, _ = Casts(get_recipe(payload)).routed(routing).input(x, save=False)
    return x if row is None else row


def weight_operand(payload: str, shape: tuple[int, ...], device: torch.device) -> Operand:
    """A weight [N, K] or [E, N, K] of normal values, as a product of that recipe takes it."""
    weight = random(shape, device)
    row, _ = Casts(get_recipe(payload)).weight(weight, save=False)
    return weight if row is None else row


def piece_of(x: Operand, rank: int, ranks: int) -> Operand:
    """Rows of a rank, with plain scales."""
    rows = x.shape[0] // ranks
    span = slice(rank * rows, (rank + 1) * rows)
    if isinstance(x, Tensor):
        return x[span]
    x = x.with_layout("plain")
    return with_rows(x, x.data[span], x.scale[span])


def pieces_of(piece: Operand) -> Sequence[Tensor]:
    """What a rank passes to a gather of its rows."""
    taken = _Taken()
    PendingRows.start(*_split(piece), DTYPE, 1, taken)
    return taken.pieces


class _Taken(ReadyLink):
    """Link that keeps what is passed to a gather."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.pieces: Sequence[Tensor] = ()

    def gather(self, pieces: Sequence[Tensor], runs: int = 1):
        self.pieces = pieces
        return super().gather(pieces, runs)


def exact_rows(x: Operand, weight: Operand, some: Tensor) -> Tensor:
    """Some rows of the exact product, fp64."""
    if isinstance(x, BlockScaled) and isinstance(weight, BlockScaled):
        return exact_mm(take_rows(x, some), weight)
    assert isinstance(x, Tensor)
    assert isinstance(weight, Tensor)
    return x[some].double() @ weight.double().mT


# ---- contenders and figures ------------------------------------------------------------------------------------------


def check_share(case: Case, args: Args) -> Verdict:
    """Check of a case."""
    return args[0].check()


def contenders(*, permutes: bool = False, overlaps: bool | None = None) -> dict[str, Peer | str]:
    """Peers of an overlapped operation.  permutes: whether its rows are those of experts.  overlaps: what
    `overlap="auto"` decides for it; None leaves that out."""
    calls: dict[str, Callable[[Share], object]] = {
        ONE: lambda share: share.product(),
        CHUNKED: lambda share: share.chunked(),
        COPIES: lambda share: share.copies(),
        SERIAL: lambda share: share.serial(),
    }
    if permutes:
        calls[PERMUTED] = lambda share: share.permuted()
    if overlaps is not None:
        calls[AUTO] = (lambda share: share.overlapped()) if overlaps else (lambda share: share.serial())
    found: dict[str, Peer | str] = {name: Peer(call, compared=False) for name, call in calls.items()}
    found[BESIDE] = Peer(lambda share: share.product(), compared=False, ready=beside_copies)
    return found


def beside_copies(sets: Sequence[Args], device: torch.device, budget: Budget) -> Slice:
    """Slice of the product of one launch, while the copies of the operation run. A CPU has no copies beside it."""
    shares: list[Share] = [share for (share,) in sets]
    if device.type != "cuda":
        return prepare([share.product for share in shares], device, seconds=budget.seconds)
    for share in shares:  # what they keep is made before
        share.product()
        share.start()()

    def start() -> Callable[[], float]:
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        alive: list[object] = []
        turns = shares * _TURNS
        for share, before in zip(turns, [turns[-1], *turns], strict=False):
            # the host launches copies and product meanwhile, so both begin together, on a GPU that is not idle; the
            # product of another set leaves nothing of this one in L2
            torch.cuda._sleep(_CYCLES)
            alive.append(before.product())
            wait = share.start()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            alive.append(share.product())
            end.record()
            wait()
            events.append((begin, end))

        def finish() -> float:
            torch.cuda.synchronize(device)
            alive.clear()
            return sum(begin.elapsed_time(end) for begin, end in events) * 1e3 / len(events)

        return finish

    return Slice(start, "events")


def figures(us: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Figures of a row from the microseconds of its contenders; empty if one was not timed.

    attainment: least time over ours, max(G', C + (G + C) / ranks) / T, with G of one product, G' of one beside copies,
    C of the copies; attainment_alone: with G in place of G'.  attainment_strict: max(G', C + G / ranks) / T, of which a
    schedule without gaps attains 1.

    >>> us = dict(zip((OURS, ONE, BESIDE, COPIES, SERIAL, CHUNKED), (80.0, 60.0, 66.0, 40.0, 100.0, 63.0)))
    >>> figures(us, 4)
    {'attainment': 0.825, 'attainment_alone': 0.812, 'attainment_strict': 0.825, 'over_serial': 0.8,\
 'chunked_over_one': 1.05, 'exposed_us': 20.0, 'hidden': 0.5, 'copies_over_product': 0.667}
    """
    names = (OURS, ONE, BESIDE, COPIES, SERIAL, CHUNKED)
    if not all(name in us for name in names):
        return {}
    ours, one, beside, copies, serial, chunked = (us[name] for name in names)
    last = copies + (one + copies) / ranks
    found = {
        "attainment": max(beside, last) / ours,
        "attainment_alone": max(one, last) / ours,
        "attainment_strict": max(beside, copies + one / ranks) / ours,
        "over_serial": ours / serial,
        "chunked_over_one": chunked / one,
        "exposed_us": ours - one,
        "hidden": 1 - (ours - one) / copies,
        "copies_over_product": copies / one,
    }
    return {name: round(value, 3) for name, value in found.items()}
