"""Selective activation recomputation: outputs of GEMMs, attention and routing are saved, the rest is recomputed.

GEMMs take most of a block's time, and casts, norms, activations and rotations most of its memory traffic, so the
backward repeats what is cheap. Our GEMMs are operators like torch's, so the policy can name them. The routing is saved
too: it is small, and saved rows must match it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..library import OPERATORS

# torch's operators by name: unquantized GEMMs, every attention, the choice of experts
_SAVED = (
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
def saved_operators() -> frozenset[Any]:
    """Operators with outputs saved for backward."""
    theirs = (getattr(torch.ops.aten, name, None) for name in _SAVED)
    ours = (operator for name, operator in OPERATORS.items() if name in _OURS)
    return frozenset([*(each.default for each in theirs if each is not None), *ours])


def _policy(context: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    is_saved = operator in saved_operators()
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    """The pair of contexts for `torch.utils.checkpoint`."""
    return create_selective_checkpoint_contexts(_policy)
