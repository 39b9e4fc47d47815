"""Exact upcast of operands to bf16: it represents a code times its block scale for MX and NVFP4 (docs/numerics.md).

For formats without tensor-core support on the device. Costs one read of the operand and one write of twice to four
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
    """Decoded operand, bf16 [..., rows, length]: the values of `decode_blocks`, by the best `dequantize` kernel."""
    # tensor scales are applied to the fp32 product, and the rotations of both operands cancel in it
    one = None if operand.global_scale is None else torch.ones((), device=operand.device)
    # rotation pads K, and grouping pads tokens: use the stored length
    shape = (*operand.shape[:-2], operand.rows, operand.length)
    bare = replace(operand, global_scale=one, hadamard=None, shape=shape, group_align=0, groups=0)
    out = empty(shape, torch.bfloat16, operand.device)
    select(dequantize_request(bare, torch.bfloat16)).launch(bare, out, offs=None)
    return out
