"""Tokens of all ranks that several column-parallel layers share, and that arrive beside the first one's product."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.linear_plan import CallState, ForwardResult, LinearPlan, LinearSaved, fprop
from ..autograd.operands import Casts, NeedsGrad, Pair, matrix, save_operand
from ..formats.cast_spec import Cast
from ..formats.tensor import BlockScaled
from ..grouped import Routing
from .overlap.products import Times
from .overlap.sharing import Pending
from .parallel_plans import Gradients, requantized


class SharedTokens:
    """Operands of tokens of all ranks, or their values, taken by one layer after the other.

    pending, columns: rows, and columns for wgrad or None.  casts: of both operands; None for unquantized values.
    requantizes: columns are cast from the rows.  values: unquantized ones, all of which are there once a layer has run.
    """

    def __init__(
        self,
        pending: Pending,
        columns: Pending | None,
        casts: tuple[Cast, Cast] | None,
        *,
        requantizes: bool,
        values: Tensor | None = None,
    ) -> None:
        self.values = values
        self._pending, self._columns, self._casts, self._requantizes = pending, columns, casts, requantizes
        self._arrived: tuple[Pair, Tensor | None] | None = None

    def multiply(self, times: Times, dtype: torch.dtype) -> tuple[Tensor, Pair]:
        """A product [M, columns] of all tokens in this dtype, and their operands."""
        if self._arrived is None:
            (y,), row, values = self._pending.multiply([times], self._layout, dtype)
            return y, self._arrive(row, values)
        pair, values = self._arrived
        return times.product(pair[0], values, None), pair

    def wait(self) -> Pair:
        """The operands of all tokens."""
        return self._arrive(*self._pending.wait(self._layout)) if self._arrived is None else self._arrived[0]

    @property
    def lacks_columns(self) -> bool:
        """Whether tokens were gathered for a forward alone."""
        return self._casts is not None and self._columns is None and not self._requantizes

    @property
    def _layout(self) -> str | None:
        return None if self._casts is None else self._casts[0].plan.layout

    def _arrive(self, row: BlockScaled | None, values: Tensor | None) -> Pair:
        col = None
        if self._casts is not None and row is not None:
            if self._columns is not None:
                col, _ = self._columns.wait(self._casts[1].plan.layout)
            elif self._requantizes:
                col = requantized(row, self._casts[1])
        self._arrived = (row, col), values
        return row, col


class SharedColumnPlan(NamedTuple):
    """A column-parallel layer of tokens that several layers share and that may be arriving: x is of all tokens.

    values: as of its tokens. Its backward is `LinearPlan`'s: gradients of all layers add up before they are summed over
    ranks.
    """

    casts: Casts
    needs: NeedsGrad
    dtype: torch.dtype
    tokens: weakref.ref[SharedTokens]  # their operands live no longer than the activation
    values: Tensor | None

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call_state: CallState, routing: Routing | None = None
    ) -> ForwardResult:
        """y [M, N/ranks]."""
        assert routing is None
        tokens, casts, needs = self.tokens(), self.casts, self.needs
        assert tokens is not None, "the caller has the activation"
        w_row, w_col = call_state[1] or casts.weight(weight, save=needs.x and casts.recipe.weight_cast != "twice")

        def product(rows: BlockScaled | None, values: Tensor | None, out: Tensor | None) -> Tensor:
            like = matrix(x) if values is None else values
            return fprop(like, weight, bias, rows, w_row, self.dtype, out=out)

        y, (_, x_col) = tokens.multiply(Times(product, weight.shape[0]), self.dtype)
        return ForwardResult(y, save_operand(x_col if needs.weight else None), save_operand(w_col if needs.x else None))

    def backward(self, grad: Tensor, saved: LinearSaved, main_grad: Tensor | None) -> Gradients:
        """dX of all tokens, dW and the column sums of grad [M, N/ranks]."""
        saved = saved if self.values is None else saved._replace(x=self.values)
        return LinearPlan(self.casts, self.needs, self.dtype).backward(grad, saved, main_grad)
