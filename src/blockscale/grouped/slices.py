"""Operands of one group of a grouped GEMM, for backends that go group by group. They read `offs` on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from ..formats.tensor import BlockScaled


def group_spans(offs: Tensor, starts: Tensor | None = None) -> list[tuple[int, int]]:
    """(first, end) of each group; without starts, a group begins where the previous one ends."""
    ends: list[int] = offs.tolist()
    return list(pairwise([0, *ends])) if starts is None else list(zip(starts.tolist(), ends, strict=True))


def group_rows(q: Tensor | BlockScaled, group: int, start: int, end: int) -> Tensor | BlockScaled:
    """Rows of a group, as an operand with plain scales if they are block-scaled."""
    if isinstance(q, Tensor):
        return q[start:end]
    return _slice(q, group, q.data[start:end], q.plain_scale()[start:end])


def group_matrix(q: BlockScaled, group: int) -> BlockScaled:
    """Weight of a group, as an operand with plain scales."""
    return _slice(q, group, q.data[group], q.plain_scale()[group])


def group_tokens(q: BlockScaled, group: int, start: int, end: int) -> BlockScaled:
    """Tokens of a group of a k-grouped operand, as an operand with plain scales."""
    per_byte, block = q.spec.codes_per_byte, q.spec.block[1]
    data = q.data[:, start // per_byte : end // per_byte]
    return _slice(q, group, data, q.plain_scale()[:, start // block : end // block])


def _slice(q: BlockScaled, group: int, data: Tensor, scale: Tensor) -> BlockScaled:
    shape = (data.shape[0], min(q.length, data.shape[1] * q.spec.codes_per_byte))
    part = replace(q, data=data, scale=scale, global_scale=_group_scale(q.global_scale, group))
    return replace(part, scale_layout="plain", shape=shape, group_align=0, hadamard=None)


def _group_scale(global_scale: Tensor | None, group: int) -> Tensor | None:
    return global_scale[group] if global_scale is not None and global_scale.dim() else global_scale
