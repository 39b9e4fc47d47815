"""Products beside the rows that they need or make: of all gathered rows, and summed over ranks.

Both run one product for the rows of each rank, or of a group of ranks. A row of a product does not depend on the other
rows, so results have the bits of one product of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...autograd.operands import matrix
from ...formats.layout import scale_buffer_shape, scale_view, shorten
from ...formats.tensor import BlockScaled, rows_of
from ...library import empty
from ..collectives import Tokens, padded_codes
from .chunks import Part
from .link import spans_of

# a product of an operand's rows, or of values without one, into rows that are given or new
RowsProduct = Callable[[BlockScaled | None, Tensor | None, Tensor | None], Tensor]


class GatherInProgress(Protocol):
    """What products need of a gather.  whole: rows of all ranks; those of a rank are there once it has arrived."""

    whole: list[Tensor]

    def spans(self, rank: int) -> list[slice]:
        """Rows of a rank in `whole`."""
        ...

    def arrivals(self) -> Iterator[int]:
        """Ranks whose rows are there."""
        ...


class SumInProgress(Protocol):
    """What products need of a sum: `push` for every rank in the order of `destinations`, then `finish`."""

    def destinations(self) -> list[int]:
        """Owners of rows in the order in which their parts are best made."""
        ...

    def push(self, rank: int, part: Tensor) -> None:
        """Send a part to the rank that owns its rows."""
        ...

    def finish(self) -> Tensor:
        """The sum of this rank's rows."""
        ...


class RowsLink(Protocol):
    """What products need of a link: that between ranks, or a virtual one of a benchmark."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        ...

    def chunks(self, part: Part) -> Sequence[int]:
        """Numbers of ranks whose rows share a product, in the order of arrival of a gather; after them one by one."""
        ...

    def gather(self, pieces: Sequence[Tensor], runs: int = 1) -> GatherInProgress:
        """Start to gather this rank's rows."""
        ...

    def sum(self, shape: tuple[int, int], dtype: torch.dtype) -> SumInProgress:
        """Start a sum over ranks of rows for each rank."""
        ...


class Times(NamedTuple):
    """A product of rows, and the number of its columns."""

    product: RowsProduct
    columns: int


class PendingRows(NamedTuple):
    """Rows [rows, K] of each rank on their way to all.  piece: operand of this rank, with plain scales; None if values
    travel."""

    link: RowsLink
    gathering: GatherInProgress
    piece: BlockScaled | None

    @classmethod
    def start(cls, q: BlockScaled | None, x: Tensor, dtype: torch.dtype, runs: int, link: RowsLink) -> PendingRows:
        """Start to gather a row operand, or without one the values of x in this dtype.  runs: of a rank's rows."""
        if q is None:
            return cls(link, link.gather([matrix(x).to(dtype)], runs), None)
        codes, scales = q.operand.data.view(torch.uint8), q.operand.scale.view(torch.uint8)
        return cls(link, link.gather([padded_codes(codes), scales], runs), q.operand)

    def wait(self, layout: str | None) -> tuple[BlockScaled | None, Tensor | None]:
        """The operand of all rows with its scales in this layout, or their values."""
        for _ in self.gathering.arrivals():
            pass
        return self._of(self.gathering.whole, layout)

    def multiply(
        self, products: Sequence[Times], layout: str | None, dtype: torch.dtype
    ) -> tuple[list[Tensor], BlockScaled | None, Tensor | None]:
        """Products of all rows, each [M, columns] in this dtype, of the rows of one rank or more when they are there;
        and the rows."""
        whole = self.gathering.whole
        results = [empty((whole[0].shape[0], each.columns), dtype, whole[0].device) for each in products]
        arrived = None if self.piece is None else ArrivedRows(self.piece, whole[0], whole[1], layout)
        rows = whole[0].shape[0] // self.link.ranks
        features = whole[0].shape[1] if self.piece is None else self.piece.shape[-1]
        sent = sum(each.nbytes for each in whole) // self.link.ranks
        columns = sum(each.columns for each in products)
        part = Part(rows, columns, features, sent, self.piece is not None)
        for ranks in in_groups(self.gathering.arrivals(), self.link.chunks(part)):
            for span in merged(span for rank in ranks for span in self.gathering.spans(rank)):
                operand, values = (None, whole[0][span]) if arrived is None else (arrived.take(span), None)
                for y, each in zip(results, products, strict=True):
                    each.product(operand, values, y[span])
        return (results, None, whole[0]) if arrived is None else (results, arrived.all(), None)

    def _of(self, parts: list[Tensor], layout: str | None) -> tuple[BlockScaled | None, Tensor | None]:
        """Gathered bytes as an operand, or as values."""
        if self.piece is None:
            return None, parts[0]
        assert layout is not None
        return with_rows(self.piece, *parts).with_layout(layout), None


class ArrivedRows:
    """Operand of gathered rows, whose scales are converted to the layout of the product as they arrive."""

    def __init__(self, piece: BlockScaled, data: Tensor, scale: Tensor, layout: str | None) -> None:
        assert layout is not None
        self._plain, self._layout = with_rows(piece, data, scale), layout
        self._made: BlockScaled | None = None
        rows, features = self._plain.shape
        if layout == "mn_major" and rows % 4 == 0:
            spec = piece.spec
            buffer = empty(scale_buffer_shape(spec, rows, features, layout), spec.scale_dtype, data.device)
            view = scale_view(spec, buffer, rows, features, layout)
            self._made = replace(self._plain, scale=view, scale_layout=layout)

    def take(self, span: slice) -> BlockScaled:
        """Rows that have arrived."""
        if self._made is None:
            return rows_of(self._plain, span).with_layout(self._layout)
        self._made.scale[span].copy_(self._plain.scale[span])
        return rows_of(self._made, span)

    def all(self) -> BlockScaled:
        """All rows, each of which has been taken."""
        return self._plain.with_layout(self._layout) if self._made is None else self._made


def with_rows(q: BlockScaled, data: Tensor, scale: Tensor) -> BlockScaled:
    """An operand like q, with other bytes of rows, which may be padded, and of their plain scales."""
    data, scale = shorten(data, q.data.shape[-1]).view(q.spec.data_dtype), scale.view(q.spec.scale_dtype)
    return replace(q, data=data, scale=scale, shape=(data.shape[0], q.shape[-1]))


def in_groups(ranks: Iterable[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Ranks in groups of these sizes, then one by one.

    >>> list(in_groups([2, 3, 0, 1], [1, 2]))
    [[2], [3, 0], [1]]
    """
    left = iter(ranks)
    for size in sizes:
        yield list(islice(left, size))
    for rank in left:
        yield [rank]


def merged(spans: Iterable[slice]) -> list[slice]:
    """Spans of rows in order, adjacent ones in one piece.

    >>> merged([slice(6, 8), slice(0, 2), slice(2, 4)])
    [slice(0, 4, None), slice(6, 8, None)]
    """
    found: list[slice] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and found[-1].stop == span.start:
            found[-1] = slice(found[-1].start, span.stop)
        else:
            found.append(span)
    return found


def sum_in_groups(
    link: RowsLink,
    tokens: Tokens,
    columns: int,
    dtype: torch.dtype,
    part: Callable[[slice], Tensor],
    of: Part,
) -> PendingSummation:
    """Start the sum over ranks of rows [M, columns], the rows of the other ranks first.  part: makes this rank's part
    of the rows of a span.  tokens: see `sum_of_products`.  of: the product of a rank's rows."""
    summation = link.sum((tokens.outer * tokens.inner, columns), dtype)
    for ranks in in_groups(summation.destinations(), link.chunks(of)[::-1]):
        spans = {rank: spans_of(rank, link.ranks, *tokens) for rank in ranks}
        made = [(span, part(span)) for span in merged(span for each in spans.values() for span in each)]
        for rank, theirs in spans.items():
            parts = [_cut(made, span) for span in theirs]
            summation.push(rank, parts[0] if len(parts) == 1 else torch.cat(parts))
    return PendingSummation(summation)


def sum_of_products(
    link: RowsLink,
    tokens: Tokens,
    times: Times,
    q: BlockScaled | None,
    values: Tensor | None,
    dtype: torch.dtype,
) -> PendingSummation:
    """Start the sum over ranks of a product of all rows [M, columns], the rows of the other ranks first.  tokens: rows
    of a rank.  q: operand of the rows.  values: the rows, needed without one."""

    def product(span: slice) -> Tensor:
        return times.product(None if q is None else rows_of(q, span), None if values is None else values[span], None)

    rows = values if q is None else q
    assert rows is not None
    count, features = tokens.outer * tokens.inner, rows.shape[-1]
    part = Part(count, times.columns, features, count * times.columns * dtype.itemsize, q is not None)
    return sum_in_groups(link, tokens, times.columns, dtype, product, part)


def _cut(made: Sequence[tuple[slice, Tensor]], span: slice) -> Tensor:
    """Rows of a span, from the product that has them."""
    start, rows = next((at.start, rows) for at, rows in made if at.start <= span.start < at.stop)
    return rows[span.start - start : span.stop - start]


class PendingSummation(NamedTuple):
    """Parts of a sum on their way to the ranks that own them."""

    summation: SumInProgress

    def wait(self) -> Tensor:
        """The sum of this rank's rows."""
        return self.summation.finish()
