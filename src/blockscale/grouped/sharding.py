"""Dimensions along which grouped GEMMs may be sharded. Only the shapes of the tensors are read.

Only the rows of the second operand: `starts` and `offs` count the tokens of the whole operand.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..gemm.sharding import cut_rows
from ..library import Sharding


def _columns(b: Tensor) -> int:
    """Dimension of the result, [M, N] or [G, N, K], that the rows of b become."""
    return 1 if len(b.shape) == 3 else 2


def scaled_grouped_mm(
    parts: int,
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    offs: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Iterator[Sharding]:
    """The rows of b, with the columns of the bias."""
    if columns := cut_rows(parts, "b", b, b_kind):
        yield Sharding(columns | {"bias": 1}, (_columns(b),))


def scaled_grouped_mm_add_(
    parts: int,
    acc: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    offs: Tensor,
    starts: Tensor | None,
) -> Iterator[Sharding]:
    """The rows of b, with the columns of the accumulator."""
    if columns := cut_rows(parts, "b", b, b_kind):
        yield Sharding(columns | {"acc": _columns(b)})
