"""Reference of the grouped GEMMs, of permute and of combine.

A grouped GEMM is one reference GEMM per group. It reads `offs` on the host, so it does not work in CUDA graphs. No
other backend may do that.

Permute and combine are in torch, on any device, without atomics; several passes per slot. Sums are in fp32 (fp64 for
fp64), slot after slot, the weighted row rounded, then added, and the result rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.layout import padded_ends
from ..formats.tensor import BlockScaled
from ..gemm._reference import block_product, exact_product
from ..gemm.ops import finish
from ..registry import kernel
from .ops import Inputs
from .slices import group_matrix, group_rows, group_spans, group_tokens
from .weight_only import WeightOnlyInputs


@kernel("m_grouped", "reference", devices=(), priority=-100)
def m_grouped(inputs: Inputs | WeightOnlyInputs, out: Tensor, *, accumulate: bool) -> None:
    """exact torch reference, group by group"""
    a, b, offs, starts, bias = inputs
    end = 0
    for group, (start, end) in enumerate(group_spans(offs, starts)):
        product = block_product(group_rows(a, group, start, end), group_matrix(b, group))
        finish(product, out[start:end], None if bias is None else bias[group], accumulate=accumulate)
    if starts is None and not accumulate:
        out[end:] = 0


@kernel("k_grouped", "reference", devices=(), priority=-100)
def k_grouped(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """exact torch reference, group by group"""
    a, b, offs, _, _ = inputs
    for group, (start, end) in enumerate(group_spans(padded_ends(offs))):
        product = block_product(group_tokens(a, group, start, end), group_tokens(b, group, start, end))
        finish(product, out[group], None, accumulate=accumulate)


def exact_grouped(a: Tensor | BlockScaled, b: BlockScaled, offs: Tensor, starts: Tensor | None = None) -> Tensor:
    """Grouped GEMM in fp64, for tests: [M, N] (m-grouped; rows of no group are zero) or [G, N, K] (k-grouped)."""
    if len(b.shape) == 3:
        count = a.shape[0] if isinstance(a, Tensor) else a.rows
        out = torch.zeros(count, b.rows, dtype=torch.float64, device=a.device)
        for group, (start, end) in enumerate(group_spans(offs, starts)):
            out[start:end] = exact_product(group_rows(a, group, start, end), group_matrix(b, group))
        return out
    assert isinstance(a, BlockScaled), "k-grouped operands are both block-scaled"
    spans = enumerate(group_spans(padded_ends(offs)))
    return torch.stack([exact_product(group_tokens(a, g, lo, hi), group_tokens(b, g, lo, hi)) for g, (lo, hi) in spans])


# ---- permute and combine ---------------------------------------------------------------------------------------------


@kernel("permute_rows", "reference", devices=(), priority=-100)
def permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """exact torch reference, any device"""
    gathered = x.index_select(0, tokens)
    if gate_weights is not None:
        wide = _wide_dtype(x.dtype)
        factor = torch.empty(tokens.shape[0], dtype=wide, device=x.device)
        factor.scatter_(0, rows.reshape(-1).to(torch.int64), gate_weights.reshape(-1).to(wide))
        gathered = gathered.to(wide) * factor[:, None]
    out.copy_(gathered)


@kernel("combine_rows", "reference", devices=(), priority=-100)
def combine_rows(x: Tensor, rows: Tensor, gate_weights: Tensor | None, out: Tensor) -> None:
    """exact torch reference, any device"""
    wide = _wide_dtype(x.dtype)
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


@kernel("place_rows", "reference", devices=(), priority=-100)
def place_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """torch, any device: a pass for each slot"""
    for slot in range(rows.shape[1]):
        out.index_copy_(0, rows[:, slot].to(torch.int64), x if x.dim() == 2 else x[:, slot])


@kernel("clear_rows", "reference", devices=(), priority=-100)
def clear_rows(x: Tensor, offs: Tensor) -> None:
    """torch, any device: a pass over all rows"""
    x.masked_fill_((torch.arange(x.shape[0], device=x.device) >= offs[-1])[:, None], 0.0)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the sums: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
