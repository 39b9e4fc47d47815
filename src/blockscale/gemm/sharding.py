"""Sharding rules of the GEMM operators: the dimensions that may be sharded. Tensors stand for their shapes here."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats.layout import cuts_length, cuts_rows
from ..formats.tensor import parse_kind
from ..library import SUM, Sharding


def cut_rows(parts: int, name: str, codes: Tensor, kind: str) -> dict[str, int]:
    """Sharded dimension of each tensor of an operand cut along its rows; empty if its scales cannot be cut there."""
    (spec, layout), dim = parse_kind(kind), len(codes.shape) - 2
    # rows of scales are in the same dimension as rows of codes; flat scales start with the blocks of a row tile
    return {name: dim, f"{name}_scale": dim} if cuts_rows(spec, codes.shape[dim], layout, parts) else {}


def scaled_mm(
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
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Iterator[Sharding]:
    """M, N, and K. Partial sums over K are rounded to the output's dtype before the reduction, as in torch."""
    if rows := cut_rows(parts, "a", a, a_kind):
        yield Sharding(rows, (0,))
    if columns := cut_rows(parts, "b", b, b_kind):
        yield Sharding(columns | {"bias": 0}, (1,))
    kinds = (parse_kind(a_kind), parse_kind(b_kind))
    if bias is None and all(cuts_length(s, length, l, parts) for s, l in kinds):
        yield Sharding({"a": 1, "a_scale": 1, "b": 1, "b_scale": 1}, (SUM,))


def scaled_mm_add_(
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
) -> Iterator[Sharding]:
    """M and N. The buffer must be sharded likewise; it is never redistributed."""
    if rows := cut_rows(parts, "a", a, a_kind):
        yield Sharding(rows | {"acc": 0})
    if columns := cut_rows(parts, "b", b, b_kind):
        yield Sharding(columns | {"acc": 1})
