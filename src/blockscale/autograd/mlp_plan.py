"""Casts, products and activation of a SwiGLU MLP's forward and backward, without autograd's bookkeeping.

Recorded and replayed as `linear_plan.py` does for one layer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from .. import launch
from ..formats.stochastic import Stochastic
from ..grouped import Routing
from ..launch import Recording
from .linear_plan import (
    can_be_replayed,
    dgrad,
    operand_keys,
    operand_tensors,
    product,
    replay_or_record_backward,
    wgrad,
)
from .operands import (
    Casts,
    GradOperands,
    GradScatter,
    NeedsGrad,
    Pair,
    SavedOperand,
    column_sums,
    matrix,
    save_operand,
)
from .recipe import Recipe

Weights = tuple[Tensor, Tensor]
Biases = tuple[Tensor | None, Tensor | None]
# operands that exist before the call: of x and of both weights
CallState = tuple[Pair | None, Pair | None, Pair | None]


class MLPForwardResult(NamedTuple):
    """Result of a forward.  y: [M, D].  gate_up: [M, 2H] if the backward needs it.  x_col, gate_up_col, down_col:
    operands of x and of both weights, saved for backward.  recording: of a replayed call, else None."""

    y: Tensor
    gate_up: Tensor | None
    x_col: SavedOperand
    gate_up_col: SavedOperand
    down_col: SavedOperand
    recording: Recording | None = None


class MLPSaved(NamedTuple):
    """What a forward saves for its backward.  x: the input, if its operand is not saved.  y, gate_weights: of rows that
    are summed by token, y if the gate weights need a gradient.  recording: of a replayed forward."""

    x: Tensor | None
    gate_up: Tensor | None
    gate_up_weight: Tensor
    down_weight: Tensor
    x_col: SavedOperand
    gate_up_col: SavedOperand
    down_col: SavedOperand
    y: Tensor | None
    gate_weights: Tensor | None
    routing: Routing | None
    recording: Recording | None

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """Tensors of the operands of x and of both weights."""
        return *self.x_col.tensors, *self.gate_up_col.tensors, *self.down_col.tensors

    def save(self, ctx: Any) -> None:
        routing = () if self.routing is None else self.routing.tensors
        ctx.save_for_backward(*self[:4], *self.columns, self.y, self.gate_weights, *routing)
        ctx.saved_meta = self.x_col.meta, self.gate_up_col.meta, self.down_col.meta, self.recording

    @staticmethod
    def restore(ctx: Any) -> MLPSaved:
        x, gate_up, gate_up_weight, down_weight, *parts = ctx.saved_tensors
        *metas, recording = ctx.saved_meta
        y, gate_weights, *routing = parts[9:]
        return MLPSaved(
            x,
            gate_up,
            gate_up_weight,
            down_weight,
            *_columns(metas, parts),
            y=y,
            gate_weights=gate_weights,
            routing=Routing(*routing) if routing else None,
            recording=recording,
        )


def _columns(metas: Any, parts: Any) -> tuple[SavedOperand, SavedOperand, SavedOperand]:
    """Operands of x and of both weights, from their metadata and three tensors each."""
    x, gate_up, down = metas
    return SavedOperand(x, *parts[:3]), SavedOperand(gate_up, *parts[3:6]), SavedOperand(down, *parts[6:9])


class Gradients(NamedTuple):
    """Gradients of rows [M, K], both weights and both biases; None for those that are not needed."""

    x: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class AnyMLPPlan(Protocol):
    """What `SwiGLUFunction` runs: `MLPPlan`, or one whose rows are multiplied on other ranks."""

    @property
    def needs(self) -> tuple[NeedsGrad, NeedsGrad]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(
        self, x: Tensor, weights: Weights, biases: Biases, call_state: CallState, routing: Routing | None
    ) -> MLPForwardResult: ...

    def backward(
        self, grad: Tensor, saved: MLPSaved, main_grads: Biases, scatter: GradScatter | None = None
    ) -> Gradients: ...

    def _replace(self, *, dtype: torch.dtype) -> Self: ...


class MLPPlan(NamedTuple):
    """Casts and products of one way to call an MLP.  needs: gradients of the first layer and of the second."""

    recipe: Recipe
    roundings: tuple[Stochastic | None, Stochastic | None]
    needs: tuple[NeedsGrad, NeedsGrad]
    dtype: torch.dtype

    def forward(
        self, x: Tensor, weights: Weights, biases: Biases, call_state: CallState, routing: Routing | None
    ) -> MLPForwardResult:
        """Both fprops, replayed if this call was recorded."""
        optional = (*biases, *(() if routing is None else routing.tensors))
        inputs = [x, *weights, *(each for each in optional if each is not None)]
        if self.roundings != (None, None) or not can_be_replayed(inputs):
            return self._forward(x, weights, biases, call_state, routing)
        key = launch.call_key(self.recipe, *self[2:], *operand_keys(call_state), x, *weights, *optional)
        inputs += operand_tensors(call_state)
        recording = launch.find_recording(key)
        if recording is None:
            return launch.run_and_record(
                key, lambda: self._forward(x, weights, biases, call_state, routing), inputs, _results
            )
        y, gate_up, *parts = recording.replay(inputs)
        assert y is not None
        return MLPForwardResult(y, gate_up, *_columns(recording.note, parts), recording=recording)

    def _forward(
        self, x: Tensor, weights: Weights, biases: Biases, call_state: CallState, routing: Routing | None
    ) -> MLPForwardResult:
        (gate_up_needs, down_needs), (first, second) = self.needs, self._casts(routing)
        saves_weights = self.recipe.weight_cast != "twice"
        x_row, x_col = call_state[0] or first.input(matrix(x), save=gate_up_needs.weight)
        gate_up_row, gate_up_col = call_state[1] or first.weight(weights[0], save=gate_up_needs.x and saves_weights)
        down_row, down_col = call_state[2] or second.weight(weights[1], save=down_needs.x and saves_weights)
        assert x_row is not None
        assert gate_up_row is not None
        assert down_row is not None
        gate_up = product(x_row, gate_up_row, self.dtype, routing, bias=biases[0])
        y = product(second.swiglu(gate_up, "fprop_x"), down_row, self.dtype, routing, bias=biases[1])
        return MLPForwardResult(
            y,
            gate_up if down_needs.x or down_needs.weight else None,
            save_operand(x_col if gate_up_needs.weight else None),
            save_operand(gate_up_col if gate_up_needs.x else None),
            save_operand(down_col if down_needs.x else None),
        )

    def backward(
        self,
        grad: Tensor,
        saved: MLPSaved,
        main_grads: Biases,
        scatter: GradScatter | None = None,
        given: GradOperands | None = None,
    ) -> Gradients:
        """Gradients from grad [M, D] of rows, or with `scatter` from grad [T, D] of tokens. With `given` no value of
        grad is read."""
        accumulated = [each for each in main_grads if each is not None]
        # given operands are another call's results: their recording would be of one shape of rows
        if saved.recording is None or given is not None or not can_be_replayed((grad, *accumulated)):
            return self._backward(grad, saved, main_grads, scatter, given)
        # a weight whose operand was saved is not read
        gate_up_weight = saved.gate_up_weight if saved.gate_up_col.meta is None else None
        down_weight = saved.down_weight if saved.down_col.meta is None else None
        routing = () if saved.routing is None else saved.routing.tensors
        read = (saved.x, saved.gate_up, gate_up_weight, down_weight)
        indices, factors = scatter or (None, None)
        # a recording has each input once
        indices = None if saved.routing is not None and indices is saved.routing.tokens else indices
        optional = (*read, *main_grads, *saved.columns, *routing, indices, factors)
        call = functools.partial(self._backward, grad, saved, main_grads, scatter, None)
        gradients = Gradients(*replay_or_record_backward(saved.recording, grad, optional, call))
        for each in accumulated:  # the operator bumps their versions, a replay of its launch does not
            torch.autograd.graph.increment_version(each)
        return gradients

    def _backward(
        self,
        grad: Tensor,
        saved: MLPSaved,
        main_grads: Biases,
        scatter: GradScatter | None,
        given: GradOperands | None,
    ) -> Gradients:
        (gate_up_needs, down_needs), (first, second) = self.needs, self._casts(saved.routing)
        weights, gate_up, routing = (saved.gate_up_weight, saved.down_weight), saved.gate_up, saved.routing
        dx = dw_gate_up = dw_down = db_gate_up = db_down = row = col = hidden = None
        if given is not None:
            dy_row, dy_col, db_down = given
        elif scatter is None:
            dy_row, dy_col, db_down = second.gradient(grad, down_needs)
        else:
            dy_row, dy_col = second.scattered_gradient(grad, scatter)
        if down_needs.x:
            assert gate_up is not None
            down_col = second.column(saved.down_col, weights[1], "dgrad_w")
            dh = dgrad(grad, dy_row, weights[1], down_col, gate_up.dtype, routing)
            if gate_up_needs.x or gate_up_needs.weight:
                wanted = second.spec("wgrad_x", gate_up) if down_needs.weight else None
                row, col, hidden = first.swiglu_gradient(dh, gate_up, wanted)
            if gate_up_needs.bias:
                db_gate_up = swiglu_bias_gradient(dh, gate_up, first.offs)
        if down_needs.weight:
            assert gate_up is not None
            hidden = second.swiglu(gate_up, "wgrad_x", axis=-2) if hidden is None else hidden
            dw_down = wgrad(grad, dy_col, None, hidden, weights[1].dtype, main_grads[1], routing)
        if gate_up_needs.x:
            gate_up_col = first.column(saved.gate_up_col, weights[0], "dgrad_w")
            dx = dgrad(grad, row, weights[0], gate_up_col, self.dtype, routing)
        if gate_up_needs.weight:
            x_col = first.column(saved.x_col, saved.x, "wgrad_x")
            dw_gate_up = wgrad(grad, col, None, x_col, weights[0].dtype, main_grads[0], routing)
        return Gradients(dx, dw_gate_up, dw_down, db_gate_up, db_down)

    def _casts(self, routing: Routing | None) -> tuple[Casts, Casts]:
        return Casts(self.recipe, self.roundings[0], routing), Casts(self.recipe, self.roundings[1], routing)


def _results(result: MLPForwardResult) -> tuple[list[Tensor | None], object]:
    columns = result.x_col, result.gate_up_col, result.down_col
    parts = (part for each in columns for part in each.tensors)
    return [result.y, result.gate_up, *parts], tuple(each.meta for each in columns)


def swiglu_bias_gradient(grad: Tensor, gate_up: Tensor, offs: Tensor | None = None) -> Tensor:
    """Bias gradient of gate and up: fp32 sums [2H] over rows, or [E, 2H] over the rows of each group, by torch.

    The fused cast of that gradient returns no column sums, and a bias gradient is not summed from codes. So a bias
    before the activation costs another pass. The operands are the fused cast's in either case.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    dy, s = grad.float(), torch.sigmoid(gate)
    dgate, dup = dy * up * (s * (1 + gate * (1 - s))), dy * (gate * s)
    return torch.cat((column_sums(dgate, offs), column_sums(dup, offs)), dim=-1)
