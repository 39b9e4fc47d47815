"""Selective recomputation: products and attention are kept, everything between them is computed again.

Products take most of a block's time and casts, norms, activations and rotations most of its memory traffic, so the
backward repeats what is cheap. Our products are operators like torch's, which is how they can be named here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..library import OPERATORS

# of torch, by name: products in high precision and every attention
_KEPT = (
    "mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_PRODUCTS = ("scaled_mm", "scaled_grouped_mm", "grouped_mm")


@functools.cache
def kept_operators() -> frozenset[Any]:
    """Operators whose results wait for the backward."""
    theirs = (getattr(torch.ops.aten, name, None) for name in _KEPT)
    ours = (operator for name, operator in OPERATORS.items() if name in _PRODUCTS)
    return frozenset([*(each.default for each in theirs if each is not None), *ours])


def _policy(context: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    kept = operator in kept_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    """The pair of contexts that `torch.utils.checkpoint` asks for."""
    return create_selective_checkpoint_contexts(_policy)
