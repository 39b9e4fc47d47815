"""`FixedCapacity`: a dispatcher whose sizes never depend on values, so that no host waits for a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..errors import CapacityError, check_name, message, refuse
from ..formats.checks import check_int
from ..grouped import Routing
from .dispatch import (
    CallFacts,
    Exchange,
    ExpertPlace,
    Payload,
    check_agreement,
    check_payload,
    exchange_rows,
    gather_rows,
    message_of,
    routing_of,
)

Transport = Literal["symmetric", "all_to_all"]


@dataclass(frozen=True)
class FixedCapacity:
    """Always `rows` rows from every rank to every other, the rest of them padding.

    payload: see `Dispatcher`.  rows: the most that a rank may send to another in a call, the same on all ranks. T
    tokens send T * min(top_k, experts of a rank) at worst, and never more.
    transport: "symmetric", peers' memory (`torch.distributed._symmetric_memory`), by default on CUDA; "all_to_all", a
    collective with equal splits, by default on the CPU.

    Numbers of rows stay on the device. More rows than fit are an error on all ranks: on the CPU `CapacityError`, in the
    call; on CUDA, and in compiled code, an assertion (`torch._assert_async`), which on CUDA the host sees at its next
    sync, and rows that did not fit are NaN until then. No token is dropped.
    """

    rows: int
    payload: Payload = "bf16"
    transport: Transport | None = None

    def __post_init__(self) -> None:
        check_int(self.rows, "rows", "rows is the most that a rank sends to another", least=1)
        check_payload(self.payload)
        if self.transport is not None:
            check_name(self.transport, ("symmetric", "all_to_all"), "transport")

    def describe(self) -> str:
        return f"FixedCapacity(rows={self.rows}, payload={self.payload!r}, transport={self.transport!r})"

    def exchange(self, routing: Routing, place: ExpertPlace, facts: CallFacts) -> Exchange:
        told = message_of(routing, facts)
        link = self._link(told.device, place)
        table = link.gather(told)
        counts, headers = table[:, : place.experts], table[:, place.experts :]
        sizes = place.sizes
        sent = torch.stack([part.sum(1) for part in counts.split(sizes, 1)], 1)  # [source, destination]
        self._check(sent, headers)
        span = place.span()
        own = counts[:, span.start : span.stop].cumsum(1)
        at = torch.arange(self.rows, device=told.device).expand(place.ranks, -1).contiguous()
        expert = torch.searchsorted(own.contiguous(), at, right=True).flatten()
        slots = self._slots(sent[place.rank], routing.permutation[0].shape[0])
        return _Slots(routing_of(expert, len(span)), slots, place.ranks * self.rows, link)

    def _link(self, device: torch.device, place: ExpertPlace) -> Link:
        if (self.transport or ("symmetric" if device.type == "cuda" else "all_to_all")) == "all_to_all":
            return CollectiveLink(place.group, place.ranks)
        from .symmetric import SymmetricLink

        return SymmetricLink.of(place.group, device)

    def _slots(self, sent: Tensor, rows: int) -> Tensor:
        """The slot of each of this rank's rows among `ranks * self.rows`; one more for rows of no expert, and another
        for those that do not fit."""
        ends = sent.cumsum(0)
        row = torch.arange(rows, device=sent.device)
        to = torch.searchsorted(ends, row, right=True)
        ranks = sent.shape[0]
        place = row - (ends - sent).index_select(0, to.clamp_max(ranks - 1))
        slot = torch.where(place < self.rows, to * self.rows + place, ranks * self.rows + 1)
        return torch.where(to < ranks, slot, ranks * self.rows)

    def _check(self, sent: Tensor, headers: Tensor) -> None:
        """Raise on all ranks, by what all of them know, if rows do not fit or calls differ."""
        rule = f"a rank sends another at most {self.rows} rows in a call, and no token is dropped"
        fix = f"make it with more rows: FixedCapacity({max(2 * self.rows, 1)}), or T * min(top_k, experts of a rank)"
        if sent.device.type != "cpu" or torch.compiler.is_compiling():
            found = message("more rows from a rank to another than FixedCapacity has", rule=rule, fix=fix)
            torch._assert_async((sent <= self.rows).all(), found)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            same = (headers == headers[:1]).all()
            torch._assert_async(same, "expert parallel ranks make different calls")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return
        check_agreement(headers.tolist())
        most = int(sent.max())
        if most > self.rows:
            source, target = divmod(int(sent.argmax()), sent.shape[1])
            refuse(f"{most} rows from rank {source} to rank {target}", rule, fix, error=CapacityError)


@dataclass(frozen=True, eq=False)
class _Slots:
    """Exchange with a slot for each row.  slots: int64 [T * k].  count: of all slots."""

    routing: Routing
    slots: Tensor
    count: int
    link: Link

    def to_experts(self, rows: Tensor) -> Tensor:
        sent = rows.new_zeros(self.count + 2, rows.shape[1]).index_copy_(0, self.slots, rows)
        return self.link.swap(sent[: self.count])

    def to_tokens(self, rows: Tensor) -> Tensor:
        back = pad(pad(self.link.swap(rows), (0, 0, 0, 1)), (0, 0, 0, 1), value=float("nan"))
        return back.index_select(0, self.slots)


class Link(Protocol):
    """Moves rows of a size that all ranks know."""

    def gather(self, values: Tensor) -> Tensor:
        """[n] of each rank -> [ranks, n]."""
        ...

    def swap(self, rows: Tensor) -> Tensor:
        """Rows [ranks * n, N] by destination -> rows [ranks * n, N] by source."""
        ...


@dataclass(frozen=True, eq=False)
class CollectiveLink:
    """Collectives with equal splits."""

    group: dist.ProcessGroup
    ranks: int

    def gather(self, values: Tensor) -> Tensor:
        return gather_rows(values[None], self.group)

    def swap(self, rows: Tensor) -> Tensor:
        each = [rows.shape[0] // self.ranks] * self.ranks
        return exchange_rows(rows, each, each, self.group)
