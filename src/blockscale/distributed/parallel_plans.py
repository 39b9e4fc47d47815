"""Casts, collectives and products of tensor parallel layers, with the interface of `autograd.linear_plan.LinearPlan`.

`LinearFunction` runs them: autograd of linear layers exists once. Operands that travel have plain scales; they get the
layout of the product after the gather.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.linear_plan import CallState, ForwardResult, LinearSaved, dgrad, fprop, wgrad
from ..autograd.operands import Casts, NeedsGrad, matrix, save_operand
from ..casts.requantize import requantize_columns
from ..formats.cast_spec import Cast
from ..formats.tensor import BlockScaled
from ..grouped import Routing
from . import underflows
from .collectives import all_reduce, wait
from .overlap.products import Times
from .overlap.sharing import Pending, Sharing

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class PlainCasts(Casts):
    """The casts of a layer with plain scales: of operands that travel."""

    def spec(self, role: str | None, like: Tensor) -> Cast | None:
        """As `Casts.spec`, in plain layout."""
        found = super().spec(role, like)
        return None if found is None else found._replace(plan=replace(found.plan, layout="plain"))


class ColumnParallelPlan(NamedTuple):
    """A layer whose outputs are cut: x of this rank's tokens, weight [N/ranks, K], y of all tokens. needs and dtype are
    those of `LinearPlan`."""

    casts: Casts
    needs: NeedsGrad
    dtype: torch.dtype
    sharing: Sharing

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call_state: CallState, routing: Routing | None = None
    ) -> ForwardResult:
        """y [M, N/ranks]: x is cast and gathered, while the weight is cast."""
        assert routing is None
        casts, needs, requantizes = self.casts, self.needs, self.sharing.requantizes
        x = matrix(x)
        row, col = plain(casts).input(x, save=needs.weight and not requantizes)
        pending = self.sharing.gather(row, x, self.dtype)
        w_row, w_col = call_state[1] or casts.weight(weight, save=needs.x and casts.recipe.weight_cast != "twice")

        def product(rows: BlockScaled | None, values: Tensor | None, out: Tensor | None) -> Tensor:
            return fprop(x if values is None else values, weight, bias, rows, w_row, self.dtype, out=out)

        times = Times(product, weight.shape[0])
        (y,), x_row, _ = pending.multiply([times], layout_of(casts.spec("fprop_x", x)), self.dtype)
        saved = None if not needs.weight else x_row if requantizes else col
        return ForwardResult(y, save_operand(saved), save_operand(w_col if needs.x else None))

    def backward(self, grad: Tensor, saved: LinearSaved, main_grad: Tensor | None) -> Gradients:
        """dX of this rank's tokens, dW and the column sums of grad [M, N/ranks]. Column operands of x are gathered
        beside dgrad, and dX is summed beside wgrad."""
        casts, needs, sharing = self.casts, self.needs, self.sharing
        pending = self._gather_columns(saved, grad) if needs.weight and not sharing.requantizes else None
        row, col, total = casts.gradient(grad, needs)
        dx = dw = None
        if needs.x:
            w_col = casts.column(saved.w_col, saved.weight, "dgrad_w")

            def product(rows: BlockScaled | None, values: Tensor | None, out: Tensor | None) -> Tensor:
                assert values is not None
                return dgrad(values, rows, saved.weight, w_col, self.dtype, out=out)

            dx = sharing.product_sum(Times(product, saved.weight.shape[1]), row, grad, self.dtype)
        if needs.weight:
            if pending is None:
                x_col, values = requantized(saved.x_col.operand, casts.quantized_spec("wgrad_x", grad)), None
            else:
                x_col, values = pending.wait(layout_of(casts.spec("wgrad_x", grad)))
            dw = wgrad(grad, col, values, x_col, saved.weight.dtype, main_grad)
        return None if dx is None else dx.wait(), dw, total

    def _gather_columns(self, saved: LinearSaved, grad: Tensor) -> Pending:
        col = plain(self.casts).column(saved.x_col, saved.x, "wgrad_x")
        source = grad if saved.x is None else saved.x
        return self.sharing.gather(col, source, grad.dtype, along=True)


class RowParallelPlan(NamedTuple):
    """A layer whose inputs are cut: x [.., K/ranks] of all tokens, weight [N, K/ranks], y of this rank's tokens."""

    casts: Casts
    needs: NeedsGrad
    dtype: torch.dtype
    sharing: Sharing

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call_state: CallState, routing: Routing | None = None
    ) -> ForwardResult:
        """y [M/ranks, N]: partial results are rounded to its dtype and summed, then the bias is added."""
        assert routing is None
        casts, needs = self.casts, self.needs
        x = matrix(x)
        x_row, x_col = casts.input(x, save=needs.weight)
        w_row, w_col = call_state[1] or casts.weight(weight, save=needs.x and casts.recipe.weight_cast != "twice")

        def product(rows: BlockScaled | None, values: Tensor | None, out: Tensor | None) -> Tensor:
            assert values is not None
            return fprop(values, weight, None, rows, w_row, self.dtype, out=out)

        y = self.sharing.product_sum(Times(product, weight.shape[0]), x_row, x, self.dtype).wait()
        y = y if bias is None else y + bias.to(self.dtype)
        return ForwardResult(y, save_operand(x_col if needs.weight else None), save_operand(w_col if needs.x else None))

    def backward(self, grad: Tensor, saved: LinearSaved, main_grad: Tensor | None) -> Gradients:
        """dX [M, K/ranks] of all tokens, dW, and the column sums of grad [M/ranks, N] over all ranks. Column operands
        of grad are gathered beside dgrad."""
        casts, needs, sharing = self.casts, self.needs, self.sharing
        recipe, requantizes = casts.recipe, needs.weight and sharing.requantizes
        wanted = NeedsGrad(needs.x or requantizes, needs.weight and not requantizes, needs.bias)
        row, col, total = plain(casts).gradient(grad, wanted)
        total = None if total is None else all_reduce(total, sharing.ranks)
        rows = sharing.gather(row, grad, grad.dtype) if wanted.x else None
        # an unquantized wgrad takes the values that an unquantized dgrad has gathered
        shares = rows is not None and recipe.dgrad is None and recipe.wgrad is None
        columns = sharing.gather(col, grad, grad.dtype, along=True) if wanted.weight and not shares else None
        dx = dw = dy_row = values = None
        if needs.x:
            assert rows is not None
            w_col = casts.column(saved.w_col, saved.weight, "dgrad_w")

            def product(rows: BlockScaled | None, values: Tensor | None, out: Tensor | None) -> Tensor:
                return dgrad(grad if values is None else values, rows, saved.weight, w_col, self.dtype, out=out)

            times, layout = Times(product, saved.weight.shape[1]), layout_of(casts.spec("dgrad_dy", grad))
            (dx,), dy_row, values = rows.multiply([times], layout, self.dtype)
        elif rows is not None:
            dy_row, values = rows.wait(layout_of(casts.spec("dgrad_dy", grad)))
        if needs.weight:
            x_col = casts.column(saved.x_col, saved.x, "wgrad_x")
            if requantizes:
                assert dy_row is not None
                dy_col = requantized(dy_row, casts.quantized_spec("wgrad_dy", grad))
            else:
                dy_col, values = (
                    (None, values) if columns is None else columns.wait(layout_of(casts.spec("wgrad_dy", grad)))
                )
            dw = wgrad(grad if values is None else values, dy_col, saved.x, x_col, saved.weight.dtype, main_grad)
        return dx, dw, None if total is None else wait(total)


def layout_of(cast: Cast | None) -> str | None:
    """Layout of the scales of a cast; None without one."""
    return None if cast is None else cast.plan.layout


def plain(casts: Casts) -> PlainCasts:
    """The same casts with plain scales."""
    return PlainCasts(casts.recipe, casts.rounding)


def requantized(rows: BlockScaled, cast: Cast) -> BlockScaled:
    """Column operand, scaled axis last, of gathered rows. bf16 holds the values of formats that keep theirs."""
    columns = requantize_columns(rows, cast, None, torch.bfloat16)
    underflows.record(rows, columns, None)
    return columns.operand
