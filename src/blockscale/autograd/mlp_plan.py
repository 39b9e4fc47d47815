"""Casts, products and activation of a SwiGLU MLP's forward and backward, without autograd's bookkeeping.

Recorded and replayed as `linear_plan.py` does for one layer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import launch
from ..formats.stochastic import Stochastic
from ..launch import Recording
from .linear_plan import (
    can_be_replayed,
    dgrad,
    operand_tensors,
    present_operands,
    product,
    replay_or_record_backward,
    wgrad,
)
from .operands import Casts, GradScatter, Groups, NeedsGrad, Pair, SavedOperand, column_sums, matrix, save_operand
from .recipe import Recipe

Weights = tuple[Tensor, Tensor]
Biases = tuple[Tensor | None, Tensor | None]
# operands that exist before the call: of x and of both weights
CallState = tuple[Pair | None, Pair | None, Pair | None]


class MLPForwardResult(NamedTuple):
    """Result of a forward.  y: [M, D].  gate_up: [M, 2H] if the backward needs it.  saved: column operands of x and of
    both weights.  recording: of a replayed call, else None."""

    y: Tensor
    gate_up: Tensor | None
    saved: tuple[SavedOperand, SavedOperand, SavedOperand]
    recording: Recording | None = None


class Gradients(NamedTuple):
    """Gradients of rows [M, K], both weights and both biases; None for those that are not needed."""

    x: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class MLPPlan(NamedTuple):
    """Casts and products of one way to call an MLP.  needs: gradients of the first layer and of the second."""

    recipe: Recipe
    roundings: tuple[Stochastic | None, Stochastic | None]
    needs: tuple[NeedsGrad, NeedsGrad]
    dtype: torch.dtype

    def forward(
        self, x: Tensor, weights: Weights, biases: Biases, call_state: CallState, groups: Groups | None
    ) -> MLPForwardResult:
        """Both fprops, replayed if recorded. Layouts of the operands in call_state follow from the shapes."""
        optional = (*biases, *(groups or ()))
        inputs = [x, *weights, *(each for each in optional if each is not None)]
        if self.roundings != (None, None) or not can_be_replayed(inputs):
            return self._forward(x, weights, biases, call_state, groups)
        key = launch.call_key(self.recipe, *self[2:], *present_operands(call_state), x, *weights, *optional)
        inputs += operand_tensors(call_state)
        recording = launch.find_recording(key)
        if recording is None:
            return launch.run_and_record(
                key, lambda: self._forward(x, weights, biases, call_state, groups), inputs, _results
            )
        y, gate_up, *parts = recording.replay(inputs)
        assert y is not None
        first, second, third = ((meta, tuple(parts[3 * at : 3 * at + 3])) for at, meta in enumerate(recording.note))
        return MLPForwardResult(y, gate_up, (first, second, third), recording)  # pyright: ignore[reportArgumentType]

    def _forward(
        self, x: Tensor, weights: Weights, biases: Biases, call_state: CallState, groups: Groups | None
    ) -> MLPForwardResult:
        (gate_up_needs, down_needs), (first, second) = self.needs, self._casts(groups)
        saves_weights = self.recipe.weight_cast != "twice"
        x_row, x_col = call_state[0] or first.input(matrix(x), save=gate_up_needs.weight)
        gate_up_row, gate_up_col = call_state[1] or first.weight(weights[0], save=gate_up_needs.x and saves_weights)
        down_row, down_col = call_state[2] or second.weight(weights[1], save=down_needs.x and saves_weights)
        assert x_row is not None
        assert gate_up_row is not None
        assert down_row is not None
        gate_up = product(x_row, gate_up_row, self.dtype, groups, bias=biases[0])
        y = product(second.swiglu(gate_up, "fprop_x"), down_row, self.dtype, groups, bias=biases[1])
        saved = (
            save_operand(x_col if gate_up_needs.weight else None),
            save_operand(gate_up_col if gate_up_needs.x else None),
            save_operand(down_col if down_needs.x else None),
        )
        return MLPForwardResult(y, gate_up if down_needs.x or down_needs.weight else None, saved)

    def backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weights: Weights,
        main_grads: Biases,
        result: MLPForwardResult,
        groups: Groups | None,
        scatter: GradScatter | None = None,
    ) -> Gradients:
        """Gradients from grad [M, D] of rows, or with `scatter` from grad [T, D] of tokens.  x: the input, if its
        operand was not saved.  result.y is not read."""
        recording = result.recording
        if recording is None or not can_be_replayed((grad,)):
            return self._backward(grad, x, weights, main_grads, result, groups, scatter)
        # a weight whose operand was saved is not read
        read = (weight if meta is None else None for weight, (meta, _) in zip(weights, result.saved[1:], strict=True))
        parts = (part for _, three in result.saved for part in three)
        optional = (x, result.gate_up, *read, *main_grads, *parts, *(groups or ()), *(scatter or ()))
        call = functools.partial(self._backward, grad, x, weights, main_grads, result, groups, scatter)
        return Gradients(*replay_or_record_backward(recording, grad, optional, call))

    def _backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weights: Weights,
        main_grads: Biases,
        result: MLPForwardResult,
        groups: Groups | None,
        scatter: GradScatter | None,
    ) -> Gradients:
        (gate_up_needs, down_needs), (first, second), gate_up = self.needs, self._casts(groups), result.gate_up
        x_saved, gate_up_saved, down_saved = result.saved
        dx = dw_gate_up = dw_down = db_gate_up = db_down = row = col = hidden = None
        if scatter is None:
            dy_row, dy_col, db_down = second.gradient(grad, down_needs)
        else:
            dy_row, dy_col = second.scattered_gradient(grad, scatter)
        if down_needs.x:
            assert gate_up is not None
            down_col = second.column(down_saved, weights[1], "dgrad_w")
            dh = dgrad(grad, dy_row, weights[1], down_col, gate_up.dtype, groups)
            if gate_up_needs.x or gate_up_needs.weight:
                wanted = second.spec("wgrad_x", gate_up) if down_needs.weight else None
                row, col, hidden = first.swiglu_gradient(dh, gate_up, wanted)
            if gate_up_needs.bias:
                db_gate_up = swiglu_bias_gradient(dh, gate_up, first.offs)
        if down_needs.weight:
            assert gate_up is not None
            hidden = second.swiglu(gate_up, "wgrad_x", axis=-2) if hidden is None else hidden
            dw_down = wgrad(grad, dy_col, None, hidden, weights[1].dtype, main_grads[1], groups)
        if gate_up_needs.x:
            gate_up_col = first.column(gate_up_saved, weights[0], "dgrad_w")
            dx = dgrad(grad, row, weights[0], gate_up_col, self.dtype, groups)
        if gate_up_needs.weight:
            x_col = first.column(x_saved, x, "wgrad_x")
            dw_gate_up = wgrad(grad, col, None, x_col, weights[0].dtype, main_grads[0], groups)
        return Gradients(dx, dw_gate_up, dw_down, db_gate_up, db_down)

    def _casts(self, groups: Groups | None) -> tuple[Casts, Casts]:
        return Casts(self.recipe, self.roundings[0], groups), Casts(self.recipe, self.roundings[1], groups)


def _results(result: MLPForwardResult) -> tuple[list[Tensor | None], object]:
    parts = [part for _, three in result.saved for part in three]
    return [result.y, result.gate_up, *parts], tuple(meta for meta, _ in result.saved)


def swiglu_bias_gradient(grad: Tensor, gate_up: Tensor, offs: Tensor | None = None) -> Tensor:
    """Bias gradient of gate and up: fp32 sums [2H] over rows, or [E, 2H] over the rows of each group, by torch.

    The fused cast of that gradient returns no column sums, and a bias gradient is not summed from codes. So a bias
    before the activation costs another pass. The operands are the fused cast's in either case.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    dy, s = grad.float(), torch.sigmoid(gate)
    dgate, dup = dy * up * (s * (1 + gate * (1 - s))), dy * (gate * s)
    return torch.cat((column_sums(dgate, offs), column_sums(dup, offs)), dim=-1)
