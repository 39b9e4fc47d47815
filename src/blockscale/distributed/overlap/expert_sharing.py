"""How ranks share experts: tokens of all ranks are gathered, and sums of their rows travel back to their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...grouped import Routing, sort_by_expert
from ..collectives import PendingValues, Ranks, Tokens, gather_values, reduce_scatter
from .chunks import Part
from .expert_rows import ExpertRows, RowsOfTokens
from .products import GatherInProgress, RowsLink, in_groups, merged, sum_in_groups
from .sharing import PendingSum, PendingTotal


class ExpertSharing(NamedTuple):
    """How ranks share experts.  tokens: of a rank, among those of all.  experts: of this rank, among those of all.
    link: moves rows beside products; without one a collective comes before a product or after it."""

    ranks: Ranks
    tokens: Tokens
    experts: range
    link: RowsLink | None

    def route(self, experts: Tensor, gate_weights: Tensor) -> PendingSlots:
        """Start to gather the experts [t, k], numbered over all ranks, and the gate weights [t, k] of the tokens."""
        slots = [each.detach().contiguous().view(torch.uint8) for each in (experts, gate_weights)]
        widths = [each.shape[1] for each in slots]
        return PendingSlots(
            gather_values(torch.cat(slots, dim=-1), self.tokens, self.ranks), widths, gate_weights.dtype, self
        )

    def gather(self, x: Tensor) -> PendingTokens:
        """Start to gather rows [t, n] of this rank's tokens."""
        if self.link is None:
            return CollectedTokens(gather_values(x, self.tokens, self.ranks))
        return ArrivingTokens(self.link, self.link.gather([x], self.tokens.outer))

    def sum(self, rows: ExpertRows, of: Part, dtype: torch.dtype, part: Callable[[RowsOfTokens], Tensor]) -> PendingSum:
        """Start the sum over ranks of results of tokens [t, columns]: of this rank's tokens.  of: the product.  part:
        makes this rank's part of the results of tokens."""
        if self.link is None:
            return PendingTotal(reduce_scatter(part(rows.all()), self.tokens, self.ranks))
        return sum_in_groups(self.link, self.tokens, of.columns, dtype, lambda span: part(rows.of_span(span)), of)


class PendingSlots(NamedTuple):
    """Experts and gate weights of tokens that are being gathered.  widths: bytes of both."""

    gathered: PendingValues
    widths: list[int]
    dtype: torch.dtype
    sharing: ExpertSharing

    def wait(self) -> tuple[ExpertRows, Tensor]:
        """Rows of this rank's experts, and gate weights [T, k] of all tokens."""
        (ranks, tokens, mine, *_), parts = self.sharing, self.gathered.wait().split(self.widths, dim=1)
        experts, gates = (each.contiguous() for each in parts)
        experts = experts.view(torch.int32) - mine.start
        elsewhere = (experts < 0) | (experts >= len(mine))
        routing = sort_by_expert(experts.masked_fill(elsewhere, len(mine)), len(mine))
        return ExpertRows.of(routing, tokens, ranks.size), gates.view(self.dtype)


class PendingTokens(Protocol):
    """Tokens of all ranks on their way to this one."""

    def arrivals(self, rows: ExpertRows, of: Part) -> Iterator[RowsOfTokens]:
        """Rows of tokens that are there: at first of this rank's. All must be taken.  of: the product of a rank's."""
        ...

    def values(self) -> Tensor:
        """Tokens of all ranks [T, n], of which those that have arrived are there."""
        ...


class ArrivingTokens(NamedTuple):
    """Tokens that arrive rank by rank."""

    link: RowsLink
    gathering: GatherInProgress

    def arrivals(self, rows: ExpertRows, of: Part) -> Iterator[RowsOfTokens]:
        for ranks in in_groups(self.gathering.arrivals(), self.link.chunks(of)):
            for span in merged(span for rank in ranks for span in self.gathering.spans(rank)):
                yield rows.of_span(span)

    def values(self) -> Tensor:
        return self.gathering.whole[0]


class CollectedTokens:
    """Tokens that arrive together."""

    def __init__(self, pending: PendingValues) -> None:
        self._pending = pending
        self._whole: Tensor | None = None

    def arrivals(self, rows: ExpertRows, of: Part) -> Iterator[RowsOfTokens]:
        self._whole = self._pending.wait()
        yield rows.all()

    def values(self) -> Tensor:
        assert self._whole is not None, "arrivals come first"
        return self._whole


def experts_of(routing: Routing) -> Tensor:
    """The expert of each slot, int32 [T, k]; the number of experts means none."""
    _, rows = routing.permutation
    return torch.searchsorted(routing.offs, rows.contiguous(), right=True, out_int32=True)
