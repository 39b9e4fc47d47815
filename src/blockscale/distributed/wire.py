"""Rows of an operand as bytes: one uint8 message for each row, its codes, then its scales."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..casts.ops import cast
from ..formats.cast_spec import Cast, CastPlan
from ..formats.layout import code_bytes, code_row_bytes, pack_scale
from ..formats.tensor import BlockScaled, assemble


def row_bytes(plan: CastPlan, length: int) -> int:
    """Bytes of the message of a row with `length` values."""
    spec = plan.spec
    return code_bytes(spec, length) + -(-length // spec.block[1]) * spec.scale_dtype.itemsize


def pack_rows(q: BlockScaled) -> Tensor:
    """uint8 [M, row_bytes] of a row operand [M, K] with 1-D blocks and no tensor scale."""
    assert q.axis == -1, "rows are scaled along their last axis"
    assert q.global_scale is None, "a tensor scale belongs to no row"
    return torch.cat((q.data.view(torch.uint8), q.plain_scale().contiguous().view(torch.uint8)), dim=-1)


def cast_rows(x: Tensor, row: Cast) -> Tensor:
    """uint8 [M, row_bytes]: rows x [M, K] cast, with their scales."""
    return pack_rows(cast(x, row._replace(plan=replace(row.plan, layout="plain")), -1, None))


def unpack_rows(messages: Tensor, plan: CastPlan, length: int, order: Tensor | None = None) -> BlockScaled:
    """Row operand [M, length] of messages [R, row_bytes], in the scale layout of the plan.  order: the message of each
    row, int [M]; by default they are in order."""
    spec, split = plan.spec, code_bytes(plan.spec, length)
    codes, scales = messages[:, :split], messages[:, split:]
    if order is not None:
        codes, scales = codes.index_select(0, order), scales.index_select(0, order)
    missing = code_row_bytes(spec, length) - split
    codes = pad(codes, (0, missing)) if missing else codes.contiguous()
    plain = scales.contiguous().view(spec.scale_dtype)
    buffer = pack_scale(spec, plain, codes.shape[0], length, plan.layout)
    return assemble(plan, (codes.view(spec.data_dtype), buffer, None), (codes.shape[0], length), -1)
