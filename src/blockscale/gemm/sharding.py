"""Along which dimensions products may be computed in pieces. Tensors stand for their shapes here."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats.layout import cuts_length, cuts_rows
from ..formats.tensor import parse_kind
from ..library import SUM, Cut


def cut_rows(parts: int, name: str, codes: Tensor, kind: str) -> dict[str, int]:
    """The parts of an operand cut along its rows, or nothing where pieces of its scales would not be scales."""
    (spec, layout), dim = parse_kind(kind), len(codes.shape) - 2
    # scales have their rows where codes have theirs; flat ones in front of the blocks of the row tile
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
) -> Iterator[Cut]:
    """M, N, and K, whose partial sums are rounded to the output's dtype before they are added, as torch's are."""
    if rows := cut_rows(parts, "a", a, a_kind):
        yield Cut(rows, (0,))
    if columns := cut_rows(parts, "b", b, b_kind):
        yield Cut(columns | {"bias": 0}, (1,))
    kinds = (parse_kind(a_kind), parse_kind(b_kind))
    if bias is None and all(cuts_length(s, length, l, parts) for s, l in kinds):
        yield Cut({"a": 1, "a_scale": 1, "b": 1, "b_scale": 1}, (SUM,))


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
) -> Iterator[Cut]:
    """M and N, the buffer being cut likewise; it is never moved."""
    if rows := cut_rows(parts, "a", a, a_kind):
        yield Cut(rows | {"acc": 0})
    if columns := cut_rows(parts, "b", b, b_kind):
        yield Cut(columns | {"acc": 1})
