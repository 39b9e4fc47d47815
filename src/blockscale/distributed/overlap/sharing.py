"""How ranks share a product: rows are gathered for it, or its parts are summed, by collectives or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...autograd.operands import matrix
from ...formats.tensor import BlockScaled
from ..collectives import (
    PendingOperand,
    PendingValues,
    Ranks,
    Tokens,
    gather_operand,
    gather_values,
    reduce_scatter,
    wait,
)
from .products import PendingRows, RowsLink, Times, sum_of_products


class Sharing(NamedTuple):
    """How ranks share a layer.  tokens: of a rank, among those of all.  requantizes: whether column operands of tokens
    that were gathered are cast from the gathered rows; else their owners cast them.  link: moves rows beside products;
    without one a collective comes before a product or after it."""

    ranks: Ranks
    tokens: Tokens
    requantizes: bool
    link: RowsLink | None = None

    def gather(self, q: BlockScaled | None, x: Tensor, dtype: torch.dtype, *, along: bool = False) -> Pending:
        """Start to gather an operand, or without one the values of x in this dtype.  along: of columns."""
        if self.link is not None and not along:
            return PendingRows.start(q, x, dtype, self.tokens.outer, self.link)
        if q is None:
            return PendingCollective(None, gather_values(matrix(x).to(dtype), self.tokens, self.ranks))
        return PendingCollective(gather_operand(q.operand, self.tokens, self.ranks, along=along), None)

    def product_sum(self, times: Times, q: BlockScaled | None, values: Tensor | None, dtype: torch.dtype) -> PendingSum:
        """Start the sum over ranks of a product of all tokens' rows [M, columns]: of this rank's tokens.  q: operand of
        the rows.  values: the rows, needed without one."""
        if self.link is None:
            return PendingTotal(reduce_scatter(times.product(q, values, None), self.tokens, self.ranks))
        return sum_of_products(self.link, self.tokens, times, q, values, dtype)


class Pending(Protocol):
    """Tokens that are being gathered: an operand, or values of an unquantized product."""

    def wait(self, layout: str | None) -> tuple[BlockScaled | None, Tensor | None]:
        """The operand of all tokens with its scales in this layout, or their values."""
        ...

    def multiply(
        self, products: Sequence[Times], layout: str | None, dtype: torch.dtype
    ) -> tuple[list[Tensor], BlockScaled | None, Tensor | None]:
        """Products of all tokens, each [M, columns] in this dtype, and the tokens as `wait` returns them."""
        ...


class PendingSum(Protocol):
    """A sum over ranks that is in progress."""

    def wait(self) -> Tensor:
        """The sum of this rank's rows."""
        ...


class PendingTotal(NamedTuple):
    """A sum by a collective."""

    total: Tensor

    def wait(self) -> Tensor:
        return wait(self.total)


class PendingCollective(NamedTuple):
    """A gather by a collective, which ends before the product."""

    operand: PendingOperand | None
    values: PendingValues | None

    def wait(self, layout: str | None) -> tuple[BlockScaled | None, Tensor | None]:
        if self.operand is not None:
            assert layout is not None
            return self.operand.wait(layout), None
        assert self.values is not None
        return None, self.values.wait()

    def multiply(
        self, products: Sequence[Times], layout: str | None, dtype: torch.dtype
    ) -> tuple[list[Tensor], BlockScaled | None, Tensor | None]:
        rows, values = self.wait(layout)
        return [each.product(rows, values, None) for each in products], rows, values
