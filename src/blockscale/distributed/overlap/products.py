"""Products beside the rows that they need or make: of all gathered rows, and summed over ranks.

Both run one product for the rows of each rank. A row of a product does not depend on the other rows, so results have
the bits of one product of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...autograd.operands import matrix
from ...formats.layout import CODE_ROW_BYTES, shorten
from ...formats.tensor import BlockScaled
from ...library import empty
from ..collectives import Tokens
from .link import Gathering, Link, Summation, spans_of

# a product of an operand's rows, or of values without one, into rows that are given or new
RowsProduct = Callable[[BlockScaled | None, Tensor | None, Tensor | None], Tensor]


class Times(NamedTuple):
    """A product of rows, and the number of its columns."""

    product: RowsProduct
    columns: int


class PendingRows(NamedTuple):
    """Rows [rows, K] of each rank on their way to all.  piece: operand of this rank, with plain scales; None if values
    travel."""

    gathering: Gathering
    piece: BlockScaled | None

    @classmethod
    def start(cls, q: BlockScaled | None, x: Tensor, dtype: torch.dtype, runs: int, link: Link) -> PendingRows:
        """Start to gather a row operand, or without one the values of x in this dtype.  runs: of a rank's rows."""
        if q is None:
            return cls(link.gather([matrix(x).to(dtype)], runs), None)
        codes, scales = q.operand.data.view(torch.uint8), q.operand.scale.view(torch.uint8)
        # rows of codes have a multiple of 16 bytes in memory
        return cls(link.gather([pad(codes, (0, -codes.shape[-1] % CODE_ROW_BYTES)), scales], runs), q.operand)

    def wait(self, layout: str | None) -> tuple[BlockScaled | None, Tensor | None]:
        """The operand of all rows with its scales in this layout, or their values."""
        for _ in self.gathering.arrivals():
            pass
        return self._of(self.gathering.whole, layout)

    def multiply(
        self, products: Sequence[Times], layout: str | None, dtype: torch.dtype
    ) -> tuple[list[Tensor], BlockScaled | None, Tensor | None]:
        """Products of all rows, each [M, columns] in this dtype, of a rank's rows when they are there; and the rows."""
        whole = self.gathering.whole
        results = [empty((whole[0].shape[0], each.columns), dtype, whole[0].device) for each in products]
        for rank in self.gathering.arrivals():
            for span in self.gathering.spans(rank):
                operand, values = self._of([each[span] for each in whole], layout)
                for y, each in zip(results, products, strict=True):
                    each.product(operand, values, y[span])
        return results, *self._of(whole, layout)

    def _of(self, parts: list[Tensor], layout: str | None) -> tuple[BlockScaled | None, Tensor | None]:
        """Gathered bytes as an operand, or as values."""
        if self.piece is None:
            return None, parts[0]
        assert layout is not None
        return with_rows(self.piece, *parts).with_layout(layout), None


def with_rows(q: BlockScaled, data: Tensor, scale: Tensor) -> BlockScaled:
    """An operand like q, with other bytes of rows, which may be padded, and of their plain scales."""
    data, scale = shorten(data, q.data.shape[-1]).view(q.spec.data_dtype), scale.view(q.spec.scale_dtype)
    return replace(q, data=data, scale=scale, shape=(data.shape[0], q.shape[-1]))


def sum_of_products(
    link: Link, tokens: Tokens, times: Times, q: BlockScaled | None, values: Tensor | None, dtype: torch.dtype
) -> PendingSummation:
    """Start the sum over ranks of a product of all rows [M, columns], the rows of the other ranks first.  tokens: rows
    of a rank.  q: operand of the rows.  values: the rows, needed without one."""
    layout, plain = None if q is None else q.scale_layout, None if q is None else q.with_layout("plain")
    summation = link.sum((tokens.outer * tokens.inner, times.columns), dtype)
    for rank in summation.destinations():
        parts: list[Tensor] = []
        for span in spans_of(rank, link.ranks, *tokens):
            operand = None
            if plain is not None:
                assert layout is not None
                operand = with_rows(plain, plain.data[span], plain.scale[span]).with_layout(layout)
            parts.append(times.product(operand, None if values is None else values[span], None))
        summation.push(rank, parts[0] if len(parts) == 1 else torch.cat(parts))
    return PendingSummation(summation)


class PendingSummation(NamedTuple):
    """Parts of a sum on their way to the ranks that own them."""

    summation: Summation

    def wait(self) -> Tensor:
        """The sum of this rank's rows."""
        return self.summation.finish()
