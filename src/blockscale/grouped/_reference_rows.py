"""Reference of permute and combine: sums in fp32 (fp64 for fp64), slot after slot, the weighted row rounded, then
added, and the result rounded once. In torch, on any device, without atomics; several passes per slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry import kernel


@kernel("permute_rows", "reference", devices=(), priority=-100)
def permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """exact torch reference, any device"""
    gathered = x.index_select(0, tokens)
    if gate_weights is not None:
        wide = wide_dtype(x.dtype)
        factor = torch.empty(tokens.shape[0], dtype=wide, device=x.device)
        factor.scatter_(0, rows.reshape(-1).to(torch.int64), gate_weights.reshape(-1).to(wide))
        gathered = gathered.to(wide) * factor[:, None]
    out.copy_(gathered)


@kernel("combine_rows", "reference", devices=(), priority=-100)
def combine_rows(x: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """exact torch reference, any device"""
    wide = wide_dtype(x.dtype)
    total: Tensor | None = None
    for slot in range(rows.shape[1]):
        term = x.index_select(0, rows[:, slot]).to(wide)
        if gate_weights is not None:
            term = term * gate_weights[:, slot, None].to(wide)
        total = term if total is None else total + term
    assert total is not None, "a token has at least one slot"
    out.copy_(total)


@kernel("combine_dots", "reference", devices=(), priority=-100)
def combine_dots(x: Tensor, grad: Tensor, rows: Tensor, out: Tensor) -> None:
    """torch, any device; torch's order of summation"""
    grad_wide = grad.to(out.dtype)
    for slot in range(rows.shape[1]):
        out[:, slot] = (x.index_select(0, rows[:, slot]).to(out.dtype) * grad_wide).sum(-1)


@kernel("clear_rows", "reference", devices=(), priority=-100)
def clear_rows(x: Tensor, offs: Tensor) -> None:
    """torch, any device: a pass over all rows"""
    x.masked_fill_((torch.arange(x.shape[0], device=x.device) >= offs[-1])[:, None], 0.0)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the sums: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
