"""Layers 0 and 1 of a mixture to time with overlap: one rank's experts, or its features of them.

Routings are seeded: each token has `topk` different experts, the first ones of a random permutation of all. So loads
are balanced but for chance. The routing of all tokens is known before a call: its gather (8 bytes a slot) and sort are
not timed. `product` is the grouped GEMM alone; `permuted` also places rows or combines them by token, as all contenders
do but `copies`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.collectives import Ranks, Tokens
from ..distributed.overlap.chunks import Part
from ..distributed.overlap.expert_ops import (
    grouped_product,
    messages_of,
    multiply_arrivals,
    sum_combined,
)
from ..distributed.overlap.expert_rows import ExpertRows, RowsOfTokens, multiply_rows
from ..distributed.overlap.expert_sharing import ArrivingTokens, ExpertSharing, PendingTokens
from ..distributed.overlap.products import GatherInProgress, PendingSummation, RowsLink
from ..formats.tensor import BlockScaled
from ..grouped import Routing, sort_by_expert
from ..grouped._reference import exact_grouped
from ..grouped.ops import grouped_request, wanted_layouts
from ..grouped.routing import clear_rows, combine_rows
from ..library import empty
from ..registry import select
from .gemms import take_rows
from .harness import random
from .overlaps import (
    DTYPE,
    Gathered,
    GatherShare,
    Operand,
    Share,
    SumShare,
    links_of,
    piece_of,
    row_operand,
    sum_links,
    weight_operand,
)
from .virtual_link import on_host


class TogetherTokens(ArrivingTokens):
    """Tokens of all ranks that are taken when the last ones have arrived, as those of a collective."""

    __slots__ = ()

    def arrivals(self, rows: ExpertRows, of: Part) -> Iterator[RowsOfTokens]:
        for _ in self.gathering.arrivals():
            pass
        yield rows.all()


@dataclass(frozen=True, eq=False, kw_only=True)
class _ExpertShare(Share):
    """What shares of both layers have.  expert_rows: of this rank's experts, for the tokens of all ranks.  weight:
    [E, N, K] of this rank."""

    expert_rows: ExpertRows

    @property
    def rows(self) -> Operand:
        """Rows [T * k, K] of the grouped product, sorted by expert."""
        return self.x

    @property
    def backend(self) -> str:
        """Backend of the grouped product of a chunk."""
        if isinstance(self.rows, Tensor) or isinstance(self.weight, Tensor):
            return "torch"
        request = grouped_request(
            self.rows, self.weight, self.weight.shape[0], DTYPE, bias=False, accumulate=False, starts=True
        )
        return select(request).backend

    def product(self) -> Tensor:
        product, offs = grouped_product(self.weight, None, DTYPE), self.expert_rows.routing.offs
        if isinstance(self.rows, Tensor):
            assert not isinstance(product, BlockScaled)
            return product(self.rows, Routing(offs))
        out = empty((self.rows.shape[0], self.weight.shape[1]), DTYPE, self.rows.device)
        multiply_rows(self.rows, product, self.expert_rows.all(), out)
        return out

    def sharing(self, link: RowsLink | None) -> ExpertSharing:
        """How this rank shares the experts.  link: a virtual one."""
        rows = self.expert_rows
        ranks = Ranks("", self.link.rank, self.link.ranks)
        return ExpertSharing(ranks, rows.tokens, range(rows.routing.experts), link)


@dataclass(frozen=True, eq=False, kw_only=True)
class GatheredExpertsShare(_ExpertShare, GatherShare):
    """Layer 0: tokens x [M, K] that are gathered, placed by expert, and multiplied with this rank's features."""

    @functools.cached_property
    def placed(self) -> Operand:
        """The rows of all tokens by expert, with scales in the product's layout."""
        rows, weight = self._multiply(TogetherTokens(self.ready, self.gather(self.ready)))[1], self.weight
        if isinstance(rows, BlockScaled) and isinstance(weight, BlockScaled):
            layout, _ = wanted_layouts("m_grouped", rows.format, weight.format, rows.device)
            return rows.with_layout(layout or rows.scale_layout)
        return rows

    @property
    def rows(self) -> Operand:
        return self.placed

    def gather(self, link: RowsLink) -> GatherInProgress:
        return link.gather([messages_of(self.piece)])

    def multiply(self, link: RowsLink) -> Gathered:
        tokens = self.sharing(link).gather(messages_of(self.piece))
        result, rows = self._multiply(tokens)
        placed = [rows] if isinstance(rows, Tensor) else [rows.data, rows.scale]
        return Gathered(result, [tokens.values(), *placed])

    def permuted(self) -> Tensor:
        return self._multiply(TogetherTokens(self.ready, self.gather(self.ready)))[0]

    def serial(self) -> Tensor:
        return self._multiply(TogetherTokens(self.link, self.gather(self.link)))[0]

    def exact(self, some: Tensor) -> Tensor:
        return exact_expert_rows(self.rows, self.weight, self.expert_rows.routing.offs, some)

    def _multiply(self, tokens: PendingTokens) -> tuple[Tensor, Operand]:
        (result,), rows = multiply_arrivals(tokens, self.expert_rows, self.piece, [self.weight], [None], DTYPE)
        return result, rows


@dataclass(frozen=True, eq=False, kw_only=True)
class SummedExpertsShare(_ExpertShare, SumShare):
    """Layer 1: rows x [T * k, K of this rank], whose products are combined by token and summed over the ranks.
    gate_weights: [T, k]."""

    gate_weights: Tensor

    def whole(self) -> Tensor:
        made = self.product()
        clear_rows(made, self.expert_rows.routing.offs)
        return combine_rows(made, self.expert_rows.all().rows, self.gate_weights)

    def exact(self, some: Tensor) -> Tensor:
        """Some tokens of the sum of rounded exact rows: a part has the error of one more rounding."""
        picked, order = self.expert_rows.all().rows[some].flatten().long().sort()
        rows = exact_expert_rows(self.x, self.weight, self.expert_rows.routing.offs, picked)
        by_slot = torch.empty_like(rows).index_copy_(0, order, rows.to(DTYPE).double())
        gates = self.gate_weights[some].double()
        return (by_slot.unflatten(0, gates.shape) * gates[..., None]).sum(1)

    def begin(self, link: RowsLink) -> PendingSummation:
        pending = sum_combined(
            self.sharing(link), self.expert_rows, self.gate_weights, self.x, self.weight, None, DTYPE
        )
        assert isinstance(pending, PendingSummation)
        return pending


# ---- operands --------------------------------------------------------------------------------------------------------


def gathered_experts(
    m: int, n: int, k: int, experts: int, topk: int, ranks: tuple[int, int], rank: int, payload: str,
    groups: Sequence[int], device: torch.device,
) -> GatheredExpertsShare:  # fmt: skip
    """Share of layer 0: tokens [M, K] times [experts of this rank, n, K].  ranks: TP and EP."""
    rows, _ = route_tokens(m, experts, topk, ranks, rank, device)
    x = row_operand(payload, random((m, k), device))
    x = x if isinstance(x, Tensor) else x.with_layout("plain")
    count = rows.ranks
    link, ready = links_of([[messages_of(piece_of(x, each, count))] for each in range(count)], rank, groups, device)
    weight = weight_operand(payload, (rows.routing.experts, n, k), device)
    return GatheredExpertsShare(link, ready, x, weight, expert_rows=rows)


def summed_experts(
    m: int, n: int, k: int, experts: int, topk: int, ranks: tuple[int, int], rank: int, payload: str,
    groups: Sequence[int], device: torch.device,
) -> SummedExpertsShare:  # fmt: skip
    """Share of layer 1: rows [M * topk, k] times [experts of this rank, N, k], M / ranks tokens for each rank."""
    rows, gates = route_tokens(m, experts, topk, ranks, rank, device)
    x = row_operand(payload, random((m * topk, k), device), Routing(rows.routing.offs))
    parts = on_host(random((rows.ranks, m // rows.ranks, n), device), device)
    link, ready = sum_links(parts, rank, groups, device)
    weight = weight_operand(payload, (rows.routing.experts, n, k), device)
    return SummedExpertsShare(link, ready, x, weight, expert_rows=rows, gate_weights=gates)


def route_tokens(
    m: int, experts: int, topk: int, ranks: tuple[int, int], rank: int, device: torch.device
) -> tuple[ExpertRows, Tensor]:
    """Rows of a rank's experts for all tokens, and gate weights [M, k] that sum to 1 for each token.

    ranks: TP and EP; EP ranks divide the experts, TP ranks next to each other have the same ones.
    """
    (tp, ep), generator = ranks, torch.Generator().manual_seed(0)
    chosen = torch.rand(m, experts, generator=generator).argsort(dim=1)[:, :topk]
    gates = torch.rand(m, topk, generator=generator) + 0.5
    own = experts // ep
    mine = chosen - rank // tp * own
    elsewhere = (mine < 0) | (mine >= own)
    routing = sort_by_expert(mine.masked_fill(elsewhere, own).to(device, torch.int32), own)
    rows = ExpertRows.of(routing, Tokens(1, m // (tp * ep)), tp * ep)
    return rows, (gates / gates.sum(dim=1, keepdim=True)).to(device)


def exact_expert_rows(a: Operand, weight: Operand, offs: Tensor, some: Tensor) -> Tensor:
    """Some rows, ascending, of the exact grouped product of a [M, K] and weight [E, N, K], fp64; zeros for rows of no
    expert."""
    ends = torch.searchsorted(some, offs.to(some.dtype), out_int32=True)
    if isinstance(a, BlockScaled) and isinstance(weight, BlockScaled):
        return exact_grouped(take_rows(a, some), weight, ends)
    assert isinstance(a, Tensor)
    assert isinstance(weight, Tensor)
    out = torch.zeros(len(some), weight.shape[1], dtype=torch.float64, device=a.device)
    start = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        out[start:end] = a[some[start:end]].double() @ matrix.double().mT
        start = end
    return out
