"""Stand-in for the package deep_ep: `Buffer` with the documented arguments and results, over `all_to_all_single`.

It raises where the documentation says what is not taken.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Buffer:
    """`deep_ep.Buffer` of one node.  calls: names of the calls, and whether they had a handle."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.calls: list[str] = []

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
        assert topk_idx.dtype == torch.int64
        self.calls.append("layout")
        self.experts = num_experts
        rank = torch.where(topk_idx < 0, self.ranks, topk_idx // (num_experts // self.ranks))
        in_rank = (rank[:, :, None] == torch.arange(self.ranks)).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16, "the type must be torch.bfloat16"
        assert x.is_contiguous()
        assert x.shape[1] * 2 % 512 == 0, "rows are copied in units of 512 bytes"
        self.calls.append("dispatch" if handle is None else "dispatch again")
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            in_rank, sent, received = handle
            return self._move(x, in_rank, sent, received), None, None, None, None, None
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        sent = num_tokens_per_rank.tolist()
        told = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(told, num_tokens_per_rank, group=self.group)
        handle = is_token_in_rank, sent, told.tolist()
        own = self.experts // self.ranks
        first = own * dist.get_rank(self.group)
        expert = self._move(topk_idx, *handle) - first
        expert = torch.where((expert >= 0) & (expert < own), expert, -1)
        weights = self._move(topk_weights, *handle)
        counts = torch.bincount(expert[expert >= 0], minlength=own).tolist()
        return self._move(x, *handle), expert, weights, counts, handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, None, None]:
        assert x.dtype == torch.bfloat16
        assert x.shape[1] * 2 % 512 == 0
        self.calls.append("combine")
        in_rank, sent, received = handle
        back = x.new_empty(sum(sent), x.shape[1])
        dist.all_to_all_single(back, x, sent, received, group=self.group)
        total = x.new_zeros(in_rank.shape[0], x.shape[1])
        for rank, rows in enumerate(back.split(sent)):
            total[in_rank[:, rank]] += rows
        return total, None, None

    def _move(self, x: Tensor, in_rank: Tensor, sent: list[int], received: list[int]) -> Tensor:
        rows = torch.cat([x[in_rank[:, rank]] for rank in range(self.ranks)])
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, rows, received, sent, group=self.group)
        return out


def install() -> None:
    """Make `import deep_ep` find the stand-in."""
    module = types.ModuleType("deep_ep")
    module.__spec__ = types.SimpleNamespace(name="deep_ep")  # pyright: ignore[reportAttributeAccessIssue]
    setattr(module, "Buffer", Buffer)  # noqa: B010
    sys.modules["deep_ep"] = module
