"""Products beside the rows that they need or make: of all gathered rows, and summed over ranks.

Both run one product for the rows of each rank. A row of a product does not depend on the other rows, so results have
the bits of one product of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...autograd.operands import matrix
from ...formats.cast_spec import Cast
from ...formats.layout import CODE_ROW_BYTES, shorten
from ...formats.tensor import BlockScaled
from ...library import empty
from .link import Gathering, Link, Summation

# a product of an operand's rows, or of values without one, into rows that are given or new
RowsProduct = Callable[[BlockScaled | None, Tensor | None, Tensor | None], Tensor]


class PendingRows(NamedTuple):
    """Rows [rows, K] of each rank on their way to all.  piece: operand of this rank, with plain scales; None if values
    travel."""

    gathering: Gathering
    piece: BlockScaled | None

    @classmethod
    def start(cls, q: BlockScaled | None, x: Tensor, dtype: torch.dtype, link: Link) -> PendingRows:
        """Start to gather a row operand, or without one the values of x in this dtype."""
        if q is None:
            return cls(link.gather([matrix(x).to(dtype)]), None)
        codes, scales = q.operand.data.view(torch.uint8), q.operand.scale.view(torch.uint8)
        # rows of codes have a multiple of 16 bytes in memory
        return cls(link.gather([pad(codes, (0, -codes.shape[-1] % CODE_ROW_BYTES)), scales]), q.operand)

    def wait(self, cast: Cast | None) -> tuple[BlockScaled | None, Tensor | None]:
        """The operand of all rows in the layout of a cast, or their values."""
        for _ in self.gathering.arrivals():
            pass
        return self._whole(cast)

    def multiply(
        self, product: RowsProduct, cast: Cast | None, columns: int, dtype: torch.dtype
    ) -> tuple[Tensor, BlockScaled | None, Tensor | None]:
        """product(all rows) [M, columns] in this dtype, rows of a rank when they are there; and the rows."""
        rows, first = self.gathering.rows, self.gathering.whole[0]
        y = empty((first.shape[0], columns), dtype, first.device)
        for rank in self.gathering.arrivals():
            out = y[rank * rows : (rank + 1) * rows]
            operand, values = self._of(self.gathering.parts(rank), cast)
            product(operand, values, out)
        return y, *self._whole(cast)

    def _whole(self, cast: Cast | None) -> tuple[BlockScaled | None, Tensor | None]:
        return self._of(self.gathering.whole, cast)

    def _of(self, parts: list[Tensor], cast: Cast | None) -> tuple[BlockScaled | None, Tensor | None]:
        """Gathered bytes as an operand in the layout of a cast, or as values."""
        if self.piece is None:
            return None, parts[0]
        assert cast is not None
        return with_rows(self.piece, *parts).with_layout(cast.plan.layout), None


def with_rows(q: BlockScaled, data: Tensor, scale: Tensor) -> BlockScaled:
    """An operand like q, with other bytes of rows, which may be padded, and of their plain scales."""
    data, scale = shorten(data, q.data.shape[-1]).view(q.spec.data_dtype), scale.view(q.spec.scale_dtype)
    return replace(q, data=data, scale=scale, shape=(data.shape[0], q.shape[-1]))


def sum_of_products(
    link: Link, product: RowsProduct, q: BlockScaled | None, values: Tensor, columns: int, dtype: torch.dtype
) -> PendingSummation:
    """Start the sum over ranks of product(rows) [M, columns], the rows of the other ranks first."""
    rows, layout = values.shape[0] // link.ranks, None if q is None else q.scale_layout
    plain = None if q is None else q.with_layout("plain")
    summation = link.sum((rows, columns), dtype)
    for rank in summation.destinations():
        of_rank = slice(rank * rows, (rank + 1) * rows)
        part = None
        if plain is not None:
            assert layout is not None
            part = with_rows(plain, plain.data[of_rank], plain.scale[of_rank]).with_layout(layout)
        summation.push(rank, product(part, values[of_rank], None))
    return PendingSummation(summation)


class PendingSummation(NamedTuple):
    """Parts of a sum on their way to the ranks that own them."""

    summation: Summation

    def wait(self) -> Tensor:
        """The sum of this rank's rows."""
        return self.summation.finish()
