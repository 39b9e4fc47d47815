"""Dispatchers: how rows travel between the ranks of their tokens and the ranks of their experts.

A token has a row for each expert that it was sent to. Sorted by expert (`Routing`), rows are sorted by rank, since
experts are divided among ranks in order. A rank receives rows sorted by source, then expert, then token; a second
`Routing` sorts them by expert, so an expert has its rows in the order of all ranks' tokens, as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ShardingError, check_name, refuse
from ..grouped import Routing, sort_by_expert

# the operators of functional collectives: their Python names differ between versions of torch
_OPS = torch.ops._c10d_functional
Payload = Literal["bf16", "low"]
PAYLOADS: tuple[Payload, ...] = ("bf16", "low")
# of tokens
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, eq=False)
class ExpertPlace:
    """Which experts a rank has.  experts: of all ranks.  rank, ranks: of the group.  The first ranks have
    ceil(experts / ranks) each, as shards of a DTensor; the last may have fewer, or none."""

    experts: int
    rank: int
    ranks: int
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertPlace:
        return self  # a copy of a layer talks to the same ranks

    def span(self, rank: int | None = None) -> range:
        """The experts of a rank, by default of this one."""
        chunk, rank = -(-self.experts // self.ranks), self.rank if rank is None else rank
        return range(min(rank * chunk, self.experts), min((rank + 1) * chunk, self.experts))

    @property
    def sizes(self) -> list[int]:
        """Number of experts of each rank."""
        return [len(self.span(rank)) for rank in range(self.ranks)]

    def sum_at_owners(self, values: Tensor) -> Tensor:
        """Sums over ranks of values [E, N], of this rank's experts alone: [experts of the rank, N], rank after rank."""
        mine = self.sizes[self.rank]
        parts = exchange_rows(values, self.sizes, [mine] * self.ranks, self.group)
        return parts.view(self.ranks, mine, values.shape[1]).sum(0)


class CallFacts(NamedTuple):
    """What every rank must agree on in a call, since the collectives of forward and backward depend on it.

    features: of a token.  slots: experts of a token.  dtype: of tokens, as text.  gradients: needed of tokens, of
    weights and biases, and of gate weights.
    """

    features: int
    slots: int
    dtype: str
    gradients: tuple[bool, ...]

    def header(self) -> list[int]:
        """The facts as numbers."""
        bits = sum(1 << place for place, needed in enumerate(self.gradients) if needed)
        return [self.features, self.slots, _DTYPES.index(self.dtype), bits]


class Exchange(Protocol):
    """The way of one call's rows to experts and back."""

    @property
    def routing(self) -> Routing:
        """Routing of received rows to this rank's experts, one slot each. Known after the first `to_experts`."""
        ...

    def to_experts(self, rows: Tensor) -> Tensor:
        """Rows [T * k, N] sorted by expert, at the ranks of their tokens -> received rows [R, N]."""
        ...

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The way back: rows [R, N] in the order they were received in -> rows [T * k, N] sorted by expert."""
        ...


class Dispatcher(Protocol):
    """Makes the exchange of a call.  payload: "bf16", rows travel in their dtype; "low", rows of tokens and the
    gradients of rows travel as codes with their scales."""

    @property
    def payload(self) -> Payload: ...

    def describe(self) -> str:
        """The dispatcher and its options as text, the same on every rank."""
        ...

    def exchange(self, routing: Routing, place: ExpertPlace, facts: CallFacts) -> Exchange:
        """The exchange of rows [T * k] that `routing` sends to experts of all ranks. Collective."""
        ...


def check_payload(payload: object) -> None:
    """Raise unless a payload is one of the two."""
    check_name(payload, PAYLOADS, "payload")


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows [sum(sent), ...] of this rank, in pieces by rank -> rows [sum(received), ...] of all ranks."""
    return _OPS.wait_tensor(_OPS.all_to_all_single(rows.contiguous(), list(received), list(sent), group.group_name))


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, rank after rank."""
    return _OPS.wait_tensor(_OPS.all_gather_into_tensor(rows.contiguous(), group.size(), group.group_name))


@dataclass(frozen=True)
class AllToAll:
    """Rows by `all_to_all_single` with split sizes, on gloo and NCCL.

    payload: see `Dispatcher`. Every call exchanges the number of rows of each expert first. Split sizes are Python
    ints, so that a GPU's host waits for them: one sync in a forward, none in a backward.
    """

    payload: Payload = "bf16"

    def __post_init__(self) -> None:
        check_payload(self.payload)

    def describe(self) -> str:
        return f"AllToAll(payload={self.payload!r})"

    def exchange(self, routing: Routing, place: ExpertPlace, facts: CallFacts) -> Exchange:
        message = message_of(routing, facts)
        table = gather_rows(message[None], place.group).tolist()
        check_agreement([row[place.experts :] for row in table])
        span = place.span()
        counts = [row[span.start : span.stop] for row in table]
        own = table[place.rank]
        sent = [sum(own[each.start : each.stop]) for each in map(place.span, range(place.ranks))]
        received = [sum(row) for row in counts]
        left = routing.permutation[0].shape[0] - sum(sent)
        return _Splits(sort_received(counts, len(span), message.device), sent, received, left, place.group)


@dataclass(frozen=True, eq=False)
class _Splits:
    """Exchange with split sizes.  sent, received: rows by rank.  left: rows of no expert, after all others; they come
    back as zeros."""

    routing: Routing
    sent: list[int]
    received: list[int]
    left: int
    group: dist.ProcessGroup

    def to_experts(self, rows: Tensor) -> Tensor:
        return exchange_rows(rows[: rows.shape[0] - self.left], self.sent, self.received, self.group)

    def to_tokens(self, rows: Tensor) -> Tensor:
        return pad(exchange_rows(rows, self.received, self.sent, self.group), (0, 0, 0, self.left))


def sort_received(counts: list[list[int]], experts: int, device: torch.device) -> Routing:
    """Routing of rows that lie by source and expert to the experts.  counts: rows by source and expert."""
    sizes = torch.tensor([count for row in counts for count in row], dtype=torch.int64).to(device)
    ids = torch.arange(experts, device=device).repeat(len(counts))
    return routing_of(ids.repeat_interleave(sizes, output_size=sum(map(sum, counts))), experts)


def routing_of(expert: Tensor, experts: int) -> Routing:
    """Routing of rows to the expert of each, int [R]; `experts` means none. A rank may have no experts."""
    if experts:
        return sort_by_expert(expert[:, None], experts)
    rows = torch.arange(expert.shape[0], dtype=torch.int32, device=expert.device)
    return Routing(rows.new_empty(0), rows, rows[:, None])


def message_of(routing: Routing, facts: CallFacts) -> Tensor:
    """int64 [E + 4]: rows of each expert, then the header of the call."""
    load = routing.load().to(torch.int64)
    return torch.cat((load, torch.tensor(facts.header(), dtype=torch.int64).to(load.device, non_blocking=True)))


def check_agreement(headers: Sequence[Sequence[int]]) -> None:
    """Raise on all ranks if their calls differ."""
    names = "features of a token", "experts of a token", "dtype", "needed gradients"
    for name, *values in zip(names, *headers, strict=True):
        if len({*values}) > 1:
            if name == "dtype":
                values = [_DTYPES[value] for value in values]
            refuse(
                f"expert parallel ranks that differ in {name}: {', '.join(map(str, values))}",
                rule="all ranks of a group make the same call, with their own tokens, or one would wait for another",
                fix="call the layer on all ranks with the same dtype, top_k and features, and train or evaluate on all",
                error=ShardingError,
            )
