"""Selective recomputation: products and attention are kept, everything between them is computed again.

Products take most of a block's time and casts, norms, activations and rotations most of its memory traffic, so the
backward repeats what is cheap. Our products are operators like torch's, which is how they can be named here. Which
experts a token goes to is kept too: it is small, and rows that were kept must be those that it speaks of.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..library import OPERATORS

# of torch, by name: products in high precision, every attention, the choice of experts
_KEPT = (
    "mm",
    "topk",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_OURS = ("scaled_mm", "scaled_grouped_mm", "grouped_mm", "sort_by_expert")


@functools.cache
def kept_operators() -> frozenset[Any]:
    """Operators whose results wait for the backward."""
    theirs = (getattr(torch.ops.aten, name, None) for name in _KEPT)
    ours = (operator for name, operator in OPERATORS.items() if name in _OURS)
    return frozenset([*(each.default for each in theirs if each is not None), *ours])


def _policy(context: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    kept = operator in kept_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    """The pair of contexts that `torch.utils.checkpoint` asks for."""
    return create_selective_checkpoint_contexts(_policy)
