"""Operands in bf16, exactly: a code times its block scale fits there for MX and NVFP4 (docs/numerics.md).

For products of formats that a device has no units for. Costs one read of the operand and one write of twice to four
times its bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..casts.ops import dequantize_request
from ..formats.tensor import BlockScaled
from ..library import empty
from ..registry import select


def exact_bf16(operand: BlockScaled) -> Tensor:
    """[..., rows, length]: the values that `decode_blocks` gives, by the best `dequantize` here."""
    # tensor scales wait for the fp32 product, and rotations of both operands cancel in it
    one = None if operand.global_scale is None else torch.ones((), device=operand.device)
    # a rotated tail is longer than its source, and so are groups of tokens that were padded
    shape = (*operand.shape[:-2], operand.rows, operand.length)
    bare = replace(operand, global_scale=one, hadamard=None, shape=shape, group_align=0, groups=0)
    out = empty(shape, torch.bfloat16, operand.device)
    select(dequantize_request(bare, torch.bfloat16)).launch(bare, out, offs=None)
    return out
