"""The work of a SwiGLU MLP's call besides autograd's bookkeeping, as `work.py` has it for a layer: casts, products and
the activation between them, in a form that can be replayed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import call_recording
from ..call_recording import Recording
from ..formats.stochastic import Stochastic
from .linear_plan import backward_again, can_be_replayed, dgrad, product, tensors_of, wgrad, which_of
from .operands import Casts, Groups, Needs, Pair, SavedOperand, Spread, column_sums, matrix, set_aside
from .recipe import Recipe

Weights = tuple[Tensor, Tensor]
Biases = tuple[Tensor | None, Tensor | None]
# of x, and of both weights
CallState = tuple[Pair | None, Pair | None, Pair | None]


class MLPForwardResult(NamedTuple):
    """What a forward leaves: y [M, D], gate_up [M, 2H] if a backward will ask for it, and what waits of x and of both
    weights.  memory: of a replayed call, whose tensors are whole buffers."""

    y: Tensor
    gate_up: Tensor | None
    kept: tuple[SavedOperand, SavedOperand, SavedOperand]
    memory: Recording | None = None


class Gradients(NamedTuple):
    """Of rows [M, K], both weights, and both biases, those that are needed."""

    x: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class MLPPlan(NamedTuple):
    """All that an MLP's call does besides autograd's bookkeeping.  needs: of the first layer and of the second."""

    recipe: Recipe
    roundings: tuple[Stochastic | None, Stochastic | None]
    needs: tuple[Needs, Needs]
    dtype: torch.dtype

    def forward(
        self, x: Tensor, weights: Weights, biases: Biases, given: CallState, groups: Groups | None
    ) -> MLPForwardResult:
        """given: operands that were made before; their layout follows from the shapes."""
        optional = (*biases, *(groups or ()))
        inputs = [x, *weights, *(each for each in optional if each is not None)]
        if self.roundings != (None, None) or not can_be_replayed(inputs):
            return self._forward(x, weights, biases, given, groups)
        layouts = (None if each is None else call_recording.layout(each) for each in optional)
        key = (self.recipe, *self[2:], x.device, *which_of(given), *map(call_recording.layout, (x, *weights)), *layouts)
        inputs += tensors_of(given)
        known = call_recording.find_recording(key)
        if known is None:
            return call_recording.run_and_record(
                key, lambda: self._forward(x, weights, biases, given, groups), inputs, _results
            )
        y, gate_up, *parts = known.replay(inputs)
        assert y is not None
        first, second, third = ((waits, tuple(parts[3 * at : 3 * at + 3])) for at, waits in enumerate(known.note))
        return MLPForwardResult(y, gate_up, (first, second, third), known)  # pyright: ignore[reportArgumentType]

    def _forward(
        self, x: Tensor, weights: Weights, biases: Biases, given: CallState, groups: Groups | None
    ) -> MLPForwardResult:
        (above, below), (first, second) = self.needs, self._casts(groups)
        keeps_weights = self.recipe.weight_cast != "twice"
        x_row, x_col = given[0] or first.input(matrix(x), waits=above.weight)
        gate_up_row, gate_up_col = given[1] or first.weight(weights[0], waits=above.x and keeps_weights)
        down_row, down_col = given[2] or second.weight(weights[1], waits=below.x and keeps_weights)
        assert x_row is not None
        assert gate_up_row is not None
        assert down_row is not None
        gate_up = product(x_row, gate_up_row, self.dtype, groups, bias=biases[0])
        y = product(second.swiglu(gate_up, "fprop_x"), down_row, self.dtype, groups, bias=biases[1])
        kept = (
            set_aside(x_col if above.weight else None),
            set_aside(gate_up_col if above.x else None),
            set_aside(down_col if below.x else None),
        )
        return MLPForwardResult(y, gate_up if below.x or below.weight else None, kept)

    def backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weights: Weights,
        main_grads: Biases,
        made: MLPForwardResult,
        groups: Groups | None,
        spread: Spread | None = None,
    ) -> Gradients:
        """Of grad [M, D], or of tokens that it is spread from.  x: the input, where no operand of it waits; made.y is
        not looked at."""
        memory = made.memory
        if memory is None or not can_be_replayed((grad,)):
            return self._backward(grad, x, weights, main_grads, made, groups, spread)
        # a weight whose operand waits is not read
        read = (weight if waits is None else None for weight, (waits, _) in zip(weights, made.kept[1:], strict=True))
        parts = (part for _, three in made.kept for part in three)
        optional = (x, made.gate_up, *read, *main_grads, *parts, *(groups or ()), *(spread or ()))
        call = functools.partial(self._backward, grad, x, weights, main_grads, made, groups, spread)
        return Gradients(*backward_again(memory, grad, optional, call))

    def _backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weights: Weights,
        main_grads: Biases,
        made: MLPForwardResult,
        groups: Groups | None,
        spread: Spread | None,
    ) -> Gradients:
        (above, below), (first, second), gate_up = self.needs, self._casts(groups), made.gate_up
        (x_kept, gate_up_kept, down_kept), buffers = made.kept, made.memory is not None
        dx = dw_gate_up = dw_down = db_gate_up = db_down = row = col = hidden = None
        if spread is None:
            dy_row, dy_col, db_down = second.gradient(grad, below)
        else:
            dy_row, dy_col = second.spread_gradient(grad, spread)
        if below.x:
            assert gate_up is not None
            down_col = second.column(down_kept, weights[1], "dgrad_w", buffers=buffers)
            dh = dgrad(grad, dy_row, weights[1], down_col, gate_up.dtype, groups)
            if above.x or above.weight:
                wanted = second.spec("wgrad_x", gate_up) if below.weight else None
                row, col, hidden = first.swiglu_gradient(dh, gate_up, wanted)
            if above.bias:
                call_recording.refuse("a sum by torch")
                db_gate_up = swiglu_bias_gradient(dh, gate_up, first.offs)
        if below.weight:
            assert gate_up is not None
            hidden = second.swiglu(gate_up, "wgrad_x", axis=-2) if hidden is None else hidden
            dw_down = wgrad(grad, dy_col, None, hidden, weights[1].dtype, main_grads[1], groups)
        if above.x:
            gate_up_col = first.column(gate_up_kept, weights[0], "dgrad_w", buffers=buffers)
            dx = dgrad(grad, row, weights[0], gate_up_col, self.dtype, groups)
        if above.weight:
            x_col = first.column(x_kept, x, "wgrad_x", buffers=buffers)
            dw_gate_up = wgrad(grad, col, None, x_col, weights[0].dtype, main_grads[0], groups)
        return Gradients(dx, dw_gate_up, dw_down, db_gate_up, db_down)

    def _casts(self, groups: Groups | None) -> tuple[Casts, Casts]:
        return Casts(self.recipe, self.roundings[0], groups), Casts(self.recipe, self.roundings[1], groups)


def _results(made: MLPForwardResult) -> tuple[list[Tensor | None], object]:
    parts = [part for _, three in made.kept for part in three]
    return [made.y, made.gate_up, *parts], tuple(waits for waits, _ in made.kept)


def swiglu_bias_gradient(grad: Tensor, gate_up: Tensor, offs: Tensor | None = None) -> Tensor:
    """fp32 sums [2H] over rows of the gradient of gate and up, in high precision and by torch; [E, 2H] of groups.

    The fused cast of that gradient has no sums, and codes are not what a bias's gradient is made of. So a bias before
    the activation costs another pass; operands are the fused cast's with and without.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    dy, s = grad.float(), torch.sigmoid(gate)
    dgate, dup = dy * up * (s * (1 + gate * (1 - s))), dy * (gate * s)
    return torch.cat((column_sums(dgate, offs), column_sums(dup, offs)), dim=-1)
