"""Rows of experts by the rank whose tokens they are, and operands of which one rank's rows after the other arrive.

A routing of all ranks' tokens sorts rows by expert, and those of an expert by token. So the tokens of a rank have a
slice of each expert's rows, and a grouped product of these slices writes rows where one product of all rows would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...formats.cast_spec import CastPlan
from ...formats.layout import code_bytes, code_row_bytes, locate, scale_buffer_shape, scale_view
from ...formats.tensor import BlockScaled, assemble
from ...grouped import Routing
from ...grouped.ops import multiply_grouped
from ...grouped.routing import place_rows
from ...library import empty
from ..collectives import Tokens
from .chunks import Part


class RowsOfTokens(NamedTuple):
    """Rows of contiguous tokens.  tokens: among those of all ranks.  rows: int32 [t, k], sorted row of each slot.
    starts, ends: int32 [E], the slice of each expert's rows; starts is None if those are all rows.  nowhere: row
    before which the slots of no expert begin, int32 [1]."""

    tokens: slice
    rows: Tensor
    starts: Tensor | None
    ends: Tensor
    nowhere: Tensor | None = None

    def routing(self) -> tuple[Tensor, Tensor]:
        """Places of these rows among all, in the order of the experts, int64 [t * k], and the ends of the experts among
        them, int32 [E]. No sort: the rows of an expert follow one another."""
        assert self.starts is not None
        assert self.nowhere is not None
        ends = (self.ends - self.starts).cumsum(0, dtype=torch.int32)
        first = torch.cat((ends.new_zeros(1), ends))
        shift = torch.cat((self.starts, self.nowhere)) - first
        count = torch.arange(self.rows.numel(), device=ends.device, dtype=torch.int32)
        return (count + shift[torch.searchsorted(ends, count, right=True)]).to(torch.int64), ends


class ExpertRows(NamedTuple):
    """Rows of the experts of this rank for the tokens of all ranks.

    routing: of all tokens; those of other ranks' experts are sent to none.  tokens: of a rank, in `ranks * outer` runs.
    bounds: int32 [runs + 1, E + 1], row of each expert at which the tokens of a run begin; the last column is of slots
    without an expert.
    """

    routing: Routing
    tokens: Tokens
    ranks: int
    bounds: Tensor

    @classmethod
    def of(cls, routing: Routing, tokens: Tokens, ranks: int) -> ExpertRows:
        """The rows of a routing. No host sync."""
        (sorted_tokens, rows), offs, runs = routing.permutation, routing.offs, tokens.outer * ranks
        device, total = offs.device, rows.shape[0]
        expert, _ = locate(torch.arange(sorted_tokens.shape[0], device=device), offs.to(torch.int64))
        first = torch.arange(offs.shape[0] + 1, device=device) * total
        begins = torch.arange(runs + 1, device=device) * tokens.inner
        # (expert, token) ascends from row to row
        bounds = torch.searchsorted(expert * total + sorted_tokens, first + begins[:, None], out_int32=True)
        return cls(routing, tokens, ranks, bounds)

    def part(self, columns: int, features: int, width: int, low: bool) -> Part:
        """The product of the rows of one rank's tokens, as if this rank had all of their experts.  width: bytes of a
        token that travels.  low: whether operands are multiplied."""
        rows, tokens = self.routing.permutation[0].shape[0] // self.ranks, self.tokens.outer * self.tokens.inner
        return Part(rows, columns, features, tokens * width, low, self.routing.experts)

    def of_span(self, span: slice) -> RowsOfTokens:
        """Rows of the tokens of a span, which has whole runs."""
        _, rows = self.routing.permutation
        starts, ends = (self.bounds[token // self.tokens.inner] for token in (span.start, span.stop))
        return RowsOfTokens(span, rows[span], starts[:-1], ends[:-1], starts[-1:])

    def all(self) -> RowsOfTokens:
        """Rows of all tokens."""
        return RowsOfTokens(slice(None), self.routing.permutation[1], None, self.routing.offs)


class PlacedRows:
    """Operand [M, K] of experts' rows, or their values, which are placed as they arrive.  plan: of the operand's cast;
    without one rows have `dtype`."""

    def __init__(
        self, count: int, features: int, plan: CastPlan | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._plan = (count, features), plan
        if plan is None:
            self._split = features
            self._parts = [empty((count, features), dtype, device)]
            return
        spec, length = plan.spec, plan.stored_length(features)
        self._split = code_bytes(spec, length)
        codes = empty((count, code_row_bytes(spec, length)), torch.uint8, device)
        # tiles of the blocked layout have rows of many tokens
        self._stored = "plain" if plan.layout == "blocked" else plan.layout
        unit = torch.int32 if spec.scale_dtype.itemsize == 4 else torch.uint8
        self._scales = empty(scale_buffer_shape(spec, count, length, self._stored), unit, device)
        scales = scale_view(spec, self._scales, count, length, self._stored)
        if scales.numel() < self._scales.numel():
            self._scales.zero_()  # pads
        self._parts = [codes, scales]

    def place(self, at: RowsOfTokens, messages: Tensor) -> None:
        """Place rows of tokens.  messages: of `wire.py`, or values: [t, n] if all slots of a token have the same, else
        [t, k, n]."""
        pieces = messages.split([self._split, messages.shape[-1] - self._split], dim=-1)
        for part, piece in zip(self._parts, pieces, strict=False):
            found = piece if part.itemsize == piece.itemsize else _as_words(piece, part.dtype)
            missing = part.shape[1] - found.shape[-1]
            place_rows(pad(found, (0, missing)) if missing else found, at.rows, part)

    def operand(self) -> BlockScaled | Tensor:
        """The rows, in the scale layout of the plan."""
        if self._plan is None:
            return self._parts[0]
        (codes, _), spec = self._parts, self._plan.spec
        data = codes.view(spec.data_dtype), self._scales.view(spec.scale_dtype), None
        return assemble(replace(self._plan, layout=self._stored), data, self._shape, -1).with_layout(self._plan.layout)


def _as_words(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of rows as another dtype, a view if rows consist of it."""
    steps = piece.storage_offset(), *piece.stride()[:-1]
    return (piece.contiguous() if any(step % dtype.itemsize for step in steps) else piece).view(dtype)


def _in_words(*rows: Tensor) -> Sequence[Tensor]:
    """Rows as int64 words, if all of them are whole words: indexed copies move an element at a time."""
    word = torch.int64.itemsize
    if any(each.stride(-1) != 1 for each in rows):
        return rows
    sizes = [
        size * each.element_size()
        for each in rows
        for size in (each.shape[-1], each.storage_offset(), *each.stride()[:-1])
    ]
    return rows if any(size % word for size in sizes) else [each.view(torch.int64) for each in rows]


# a grouped product of values, sorted by expert
ValuesProduct = Callable[[Tensor, Routing], Tensor]


def multiply_rows(
    a: BlockScaled | Tensor,
    weight: BlockScaled | ValuesProduct,
    at: RowsOfTokens,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Write rows of a grouped product to `out` [M, N].  a: [M, K], all rows, of which only these are read.  weight:
    operand [E, N, K] with its bias [E, N], or for values the product itself. Rows of no expert may stay as they are."""
    if isinstance(a, BlockScaled):
        assert isinstance(weight, BlockScaled)
        multiply_grouped(a, weight, at.ends, out.dtype, bias, starts=at.starts, out=out)
        return
    assert not isinstance(weight, BlockScaled)
    if at.starts is None:
        out.copy_(weight(a, Routing(at.ends)))
        return
    places, ends = at.routing()
    (words,) = _in_words(a)
    made = weight(words.index_select(0, places).view(a.dtype), Routing(ends))
    target, source = _in_words(out, made)
    target.index_copy_(0, places, source)
