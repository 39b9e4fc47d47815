"""Casts, collectives and products of a SwiGLU MLP whose hidden units are cut, with the interface of `MLPPlan`.

`SwiGLUFunction` runs it. The first layer is column-parallel, the second row-parallel, the activation between them is
fused with its casts: bytes and weight gradients are those of `MLPPlan` in one process.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.linear_plan import product, wgrad
from ..autograd.mlp_plan import (
    Biases,
    CallState,
    Gradients,
    MLPForwardResult,
    MLPSaved,
    Weights,
    swiglu_bias_gradient,
)
from ..autograd.operands import Casts, GradScatter, NeedsGrad, matrix, save_operand
from ..autograd.recipe import Recipe
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from ..grouped import Routing
from .collectives import all_reduce, wait
from .overlap.products import Times
from .overlap.sharing import Pending, Sharing
from .parallel_plans import layout_of, plain, requantized


class ParallelMLPPlan(NamedTuple):
    """An MLP with weights [2H/ranks, K] (its gates, then its ups) and [D, H/ranks] on every rank; x and y are of this
    rank's tokens. The recipe quantizes all three products. The other fields are those of `MLPPlan`."""

    recipe: Recipe
    roundings: tuple[Stochastic | None, Stochastic | None]
    needs: tuple[NeedsGrad, NeedsGrad]
    dtype: torch.dtype
    sharing: Sharing

    def forward(
        self, x: Tensor, weights: Weights, biases: Biases, call_state: CallState, routing: Routing | None
    ) -> MLPForwardResult:
        """y [M/ranks, D]: x is cast and gathered, partial results are summed, and the second bias is added."""
        assert routing is None
        (first_needs, needs), (first, second), sharing = self.needs, self._casts(), self.sharing
        saves_weights, x = self.recipe.weight_cast != "twice", matrix(x)
        row, col = plain(first).input(x, save=first_needs.weight and not sharing.requantizes)
        pending = sharing.gather(row, x, self.dtype)
        gate_up_row, gate_up_col = call_state[1] or first.weight(weights[0], save=first_needs.x and saves_weights)
        down_row, down_col = call_state[2] or second.weight(weights[1], save=needs.x and saves_weights)
        assert gate_up_row is not None
        assert down_row is not None
        times, layout = self._times(gate_up_row, self.dtype, biases[0]), layout_of(first.spec("fprop_x", x))
        (gate_up,), x_row, _ = pending.multiply([times], layout, self.dtype)
        times = self._times(down_row, self.dtype)
        y = sharing.product_sum(times, second.swiglu(gate_up, "fprop_x"), None, self.dtype).wait()
        y = y if biases[1] is None else y + biases[1].to(self.dtype)
        saved = None if not first_needs.weight else x_row if sharing.requantizes else col
        return MLPForwardResult(
            y,
            gate_up if needs.x or needs.weight else None,
            save_operand(saved),
            save_operand(gate_up_col if first_needs.x else None),
            save_operand(down_col if needs.x else None),
        )

    def backward(
        self, grad: Tensor, saved: MLPSaved, main_grads: Biases, scatter: GradScatter | None = None
    ) -> Gradients:
        """Gradients from grad [M/ranks, D]. Columns of x and of grad are gathered beside the first products."""
        assert scatter is None
        (first_needs, needs), (first, second), sharing = self.needs, self._casts(), self.sharing
        weights, gate_up = (saved.gate_up_weight, saved.down_weight), saved.gate_up
        requantizes = needs.weight and sharing.requantizes
        wanted = NeedsGrad(needs.x or requantizes, needs.weight and not requantizes, needs.bias)
        row, col, db_down = plain(second).gradient(grad, wanted)
        db_down = None if db_down is None else all_reduce(db_down, sharing.ranks)
        rows = sharing.gather(row, grad, grad.dtype) if wanted.x else None
        columns = sharing.gather(col, grad, grad.dtype, along=True) if wanted.weight else None
        x_columns = None
        if first_needs.weight and not sharing.requantizes:
            x_col = plain(first).column(saved.x_col, saved.x, "wgrad_x")
            x_columns = sharing.gather(x_col, grad, grad.dtype, along=True)
        dx = dw_gate_up = dw_down = db_gate_up = row = col = hidden = None
        dy_row, layout = None, layout_of(second.spec("dgrad_dy", grad))
        if needs.x:
            assert gate_up is not None
            assert rows is not None
            down_col = second.column(saved.down_col, weights[1], "dgrad_w")
            assert down_col is not None
            (dh,), dy_row, _ = rows.multiply([self._times(down_col.operand, gate_up.dtype)], layout, gate_up.dtype)
            if first_needs.x or first_needs.weight:
                cast = second.spec("wgrad_x", gate_up) if needs.weight else None
                row, col, hidden = first.swiglu_gradient(dh, gate_up, cast)
            if first_needs.bias:
                db_gate_up = swiglu_bias_gradient(dh, gate_up)
        elif rows is not None:
            dy_row, _ = rows.wait(layout)
        if first_needs.x:
            gate_up_col = first.column(saved.gate_up_col, weights[0], "dgrad_w")
            assert gate_up_col is not None
            dx = sharing.product_sum(self._times(gate_up_col.operand, self.dtype), row, None, self.dtype)
        if needs.weight:
            assert gate_up is not None
            hidden = second.swiglu(gate_up, "wgrad_x", axis=-2) if hidden is None else hidden
            dy_col = self._columns(second, "wgrad_dy", columns, dy_row, grad)
            dw_down = wgrad(grad, dy_col, None, hidden, weights[1].dtype, main_grads[1])
        if first_needs.weight:
            x_col = saved.x_col.operand if x_columns is None else None
            x_col = self._columns(first, "wgrad_x", x_columns, x_col, grad)
            dw_gate_up = wgrad(grad, col, None, x_col, weights[0].dtype, main_grads[0])
        dx, db_down = None if dx is None else dx.wait(), None if db_down is None else wait(db_down)
        return Gradients(dx, dw_gate_up, dw_down, db_gate_up, db_down)

    @staticmethod
    def _times(w: BlockScaled, dtype: torch.dtype, bias: Tensor | None = None) -> Times:
        """The product of rows with a weight's operand."""

        def multiply(rows: BlockScaled | None, values: Tensor | None, out: Tensor | None) -> Tensor:
            assert rows is not None
            return product(rows, w, dtype, bias=bias, out=out)

        return Times(multiply, w.shape[0])

    @staticmethod
    def _columns(
        casts: Casts, role: str, pending: Pending | None, rows: BlockScaled | None, like: Tensor
    ) -> BlockScaled | None:
        """Column operand of all tokens: gathered, or cast from gathered rows."""
        cast = casts.quantized_spec(role, like)
        if pending is not None:
            return pending.wait(layout_of(cast))[0]
        assert rows is not None
        return requantized(rows, cast)

    def _casts(self) -> tuple[Casts, Casts]:
        return Casts(self.recipe, self.roundings[0]), Casts(self.recipe, self.roundings[1])
