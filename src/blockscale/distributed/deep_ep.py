"""`DeepEP`: a dispatcher over the kernels of the package deep_ep (NVLink and RDMA), where it is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import DtypeError, MissingPackageError, ShardingError, refuse
from ..grouped import Routing
from .dispatch import (
    CallFacts,
    Exchange,
    ExpertPlace,
    Payload,
    check_agreement,
    check_payload,
    gather_rows,
    message_of,
    routing_of,
)

# kernels copy rows in units of 32 lanes times 16 bytes
_UNIT = 512


@dataclass(frozen=True)
class DeepEP:
    """Rows by `deep_ep.Buffer.dispatch` and `combine`.

    buffer: a `deep_ep.Buffer` of the group, with room for messages that have a row's bytes rounded up to 512.
    payload: see `Dispatcher`.

    Each row is a token of DeepEP with one expert. So a token that two experts of a rank share travels twice, and
    results are summed in the order of slots, as with the other dispatchers. Messages travel as bf16 without arithmetic.
    Experts divide evenly among ranks, and tokens are bf16.
    """

    buffer: Any
    payload: Payload = "bf16"

    def __post_init__(self) -> None:
        check_payload(self.payload)
        if importlib.util.find_spec("deep_ep") is None:
            refuse(
                "DeepEP without the package deep_ep",
                rule="the dispatcher calls its kernels",
                fix="install deep_ep, or use AllToAll or FixedCapacity",
                error=MissingPackageError,
            )

    def describe(self) -> str:
        return f"DeepEP(payload={self.payload!r})"

    def exchange(self, routing: Routing, place: ExpertPlace, facts: CallFacts) -> Exchange:
        if place.experts % place.ranks:
            refuse(
                f"{place.experts} experts on {place.ranks} ranks for DeepEP",
                rule="its kernels divide experts evenly",
                fix="use AllToAll or FixedCapacity, or another number of ranks",
                error=ShardingError,
            )
        if facts.dtype != "bfloat16":
            refuse(
                f"tokens in {facts.dtype} for DeepEP",
                rule="its combine adds bfloat16",
                fix="convert the tokens, or use AllToAll or FixedCapacity",
                error=DtypeError,
            )
        headers = gather_rows(message_of(routing, facts)[None], place.group)[:, place.experts :]
        check_agreement(headers.tolist())
        rows = torch.arange(routing.permutation[0].shape[0], device=routing.offs.device, dtype=torch.int32)
        expert = torch.searchsorted(routing.offs, rows, right=True)
        chosen = torch.where(expert < place.experts, expert, -1)[:, None]
        return _Handle(self.buffer, chosen, place.experts, len(place.span()))


@dataclass(eq=False)
class _Handle:
    """Exchange of DeepEP. The first dispatch makes the handle that later calls use.  chosen: expert of each row, -1 for
    none, int64 [T * k, 1].  experts, own: of all ranks, of this one."""

    buffer: Any
    chosen: Tensor
    experts: int
    own: int
    handle: Any = None
    found: Routing | None = field(default=None)

    @property
    def routing(self) -> Routing:
        assert self.found is not None, "received rows are known after the first dispatch"
        return self.found

    def to_experts(self, rows: Tensor) -> Tensor:
        raw = rows.contiguous().view(torch.uint8)
        x = pad(raw, (0, -raw.shape[1] % _UNIT)).view(torch.bfloat16)
        if self.handle is None:
            got = self._first(x)
        else:
            got = self.buffer.dispatch(x, handle=self.handle)[0]
        return got.view(torch.uint8)[:, : raw.shape[1]].contiguous().view(rows.dtype)

    def _first(self, x: Tensor) -> Tensor:
        ranks, rdma_ranks, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.chosen, self.experts)
        ones = torch.ones(self.chosen.shape, dtype=torch.float32, device=x.device)
        got, expert, _, _, self.handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=ranks,
            num_tokens_per_rdma_rank=rdma_ranks,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.chosen,
            topk_weights=ones,
        )
        self.found = routing_of(expert.flatten(), self.own)
        return got

    def to_tokens(self, rows: Tensor) -> Tensor:
        width = rows.shape[1]
        back = self.buffer.combine(pad(rows, (0, -width % (_UNIT // rows.element_size()))).contiguous(), self.handle)[0]
        return back[:, :width].contiguous()
