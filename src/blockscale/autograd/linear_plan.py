"""Casts and products of a linear layer's forward and backward, without autograd's bookkeeping.

A layer of experts runs the same plan with grouped products (`routing`).

On a GPU the second call with the same shapes is recorded, and later ones are replayed (`launch/recording.py`), unless a
profiler, a mode or a tracer is active.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import launch
from ..formats.layout import locate
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from ..gemm.ops import multiply
from ..grouped import Routing
from ..grouped.ops import multiply_grouped
from ..grouped.unquantized import grouped_mm
from ..hardware import for_products
from ..launch import Recording
from ..library import needs_dispatcher
from .operands import Casts, NeedsGrad, Pair, SavedOperand, matrix, save_operand
from .recipe import Recipe

# operands that exist before the call: of a shared activation, and of a weight whose cast a step shares
CallState = tuple[Pair | None, Pair | None]


class ForwardResult(NamedTuple):
    """Result of a forward.  y: [..., N].  x_col, w_col: operands saved for backward.  recording: of a replayed call,
    else None."""

    y: Tensor
    x_col: SavedOperand
    w_col: SavedOperand
    recording: Recording | None = None


class LinearSaved(NamedTuple):
    """What a forward saves for its backward.  x: the input, if its operand is not saved.  weight: always saved, so that
    a change before the backward is an error, as for torch's own layer.  recording: of a replayed forward."""

    x: Tensor | None
    weight: Tensor
    x_col: SavedOperand
    w_col: SavedOperand
    routing: Routing | None
    recording: Recording | None

    def save(self, ctx: Any) -> None:
        routing = self.routing
        tensors = (self.x, self.weight, *self.x_col.tensors, *self.w_col.tensors)
        ctx.save_for_backward(*tensors) if routing is None else ctx.save_for_backward(*tensors, *routing.tensors)
        ctx.saved_meta = self.x_col.meta, self.w_col.meta, self.recording

    @staticmethod
    def restore(ctx: Any) -> LinearSaved:
        x_meta, w_meta, recording = ctx.saved_meta
        x, weight, x_data, x_scale, x_global, w_data, w_scale, w_global, *routing = ctx.saved_tensors
        return LinearSaved(
            x,
            weight,
            SavedOperand(x_meta, x_data, x_scale, x_global),
            SavedOperand(w_meta, w_data, w_scale, w_global),
            Routing(*routing) if routing else None,
            recording,
        )


class LinearPlan(NamedTuple):
    """Casts and products of a layer's calls.  needs: gradients that the backward computes.  dtype: of y, and in
    the backward of dX."""

    casts: Casts
    needs: NeedsGrad
    dtype: torch.dtype

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call_state: CallState, routing: Routing | None = None
    ) -> ForwardResult:
        """fprop, replayed if this call was recorded."""
        inputs = [x, weight] if bias is None else [x, weight, bias]
        if routing is not None:
            inputs += [each for each in routing.tensors if each is not None]
        if self.casts.rounding is not None or not can_be_replayed(inputs):
            return self._forward(x, weight, bias, call_state, routing)
        key = launch.call_key(*self[1:], self.casts.recipe, *operand_keys(call_state), *inputs)
        inputs += operand_tensors(call_state)
        recording = launch.find_recording(key)
        if recording is None:
            return launch.run_and_record(
                key, lambda: self._forward(x, weight, bias, call_state, routing), inputs, _forward_results
            )
        y, *parts = recording.replay(inputs)
        assert y is not None
        x_meta, w_meta = recording.note
        return ForwardResult(y, SavedOperand(x_meta, *parts[:3]), SavedOperand(w_meta, *parts[3:]), recording)

    def _forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call_state: CallState, routing: Routing | None
    ) -> ForwardResult:
        casts, needs = self.casts.routed(routing), self.needs
        x_row, x_col = call_state[0] or casts.input(matrix(x), save=needs.weight)
        w_row, w_col = call_state[1] or casts.weight(weight, save=needs.x and casts.recipe.weight_cast != "twice")
        y = fprop(x, weight, bias, x_row, w_row, self.dtype, routing)
        return ForwardResult(y, save_operand(x_col if needs.weight else None), save_operand(w_col if needs.x else None))

    def backward(
        self, grad: Tensor, saved: LinearSaved, main_grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dX [M, K], dW and the column sums of grad [M, N]; None for those that are not needed."""
        if saved.recording is None or not can_be_replayed((grad,) if main_grad is None else (grad, main_grad)):
            return self._backward(grad, saved, main_grad)
        weight = saved.weight if saved.w_col.meta is None else None  # not read if its operand was saved
        routing = () if saved.routing is None else saved.routing.tensors
        optional = (saved.x, weight, main_grad, *saved.x_col.tensors, *saved.w_col.tensors, *routing)
        call = functools.partial(self._backward, grad, saved, main_grad)
        dx, dw, total = replay_or_record_backward(saved.recording, grad, optional, call)
        if main_grad is not None:  # the operator bumps its version, a replay of its launch does not
            torch.autograd.graph.increment_version(main_grad)
        return dx, dw, total

    def _backward(
        self, grad: Tensor, saved: LinearSaved, main_grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight, *_), routing, needs = saved, saved.routing, self.needs
        casts = self.casts.routed(routing)
        row, col, total = casts.gradient(grad, needs)
        dx = dw = None
        if needs.x:
            w_col = casts.column(saved.w_col, weight, "dgrad_w")
            dx = dgrad(grad, row, weight, w_col, self.dtype, routing)
        if needs.weight:
            x_col = casts.column(saved.x_col, x, "wgrad_x")
            dw = wgrad(grad, col, x, x_col, weight.dtype, main_grad, routing)
        return dx, dw, total


def _forward_results(result: ForwardResult) -> tuple[list[Tensor | None], object]:
    return [result.y, *result.x_col.tensors, *result.w_col.tensors], (result.x_col.meta, result.w_col.meta)


def operand_keys(call_state: Iterable[Pair | None]) -> tuple[object, ...]:
    """The operands that exist before a call, as part of its recording's key: everything that launches and saved
    metadata depend on. An activation without a backward has no column operand."""
    return tuple([None if pair is None else tuple(map(_operand_key, pair)) for pair in call_state])


def _operand_key(q: BlockScaled | None) -> tuple[object, ...] | None:
    if q is None:
        return None
    layouts = launch.call_key(q.data, q.scale, q.global_scale)
    return (*layouts, q.format, q.axis, q.scale_layout, q.shape, q.group_align, q.hadamard, q.groups)


def operand_tensors(call_state: Iterable[Pair | None]) -> list[Tensor]:
    """Codes, scales and tensor scales of the operands that exist before the call."""
    operands = (operand for pair in call_state for operand in pair or () if operand is not None)
    parts = (part for each in operands for part in (each.data, each.scale, each.global_scale))
    return [part for part in parts if part is not None]


def replay_or_record_backward(
    recording: Recording, grad: Tensor, optional: Sequence[Tensor | None], call: Callable[[], Sequence[Tensor | None]]
) -> Sequence[Tensor | None]:
    """The backward of a replayed forward: replay its recording, or run and record it.  recording: the forward's.
    optional: tensors that it reads or accumulates into besides grad."""
    inputs = [grad, *(each for each in optional if each is not None)]
    key = launch.call_key(recording, grad, *optional)
    found = launch.find_recording(key)
    return (
        launch.run_and_record(key, call, inputs, lambda grads: (grads, None)) if found is None else found.replay(inputs)
    )


def can_be_replayed(tensors: Sequence[Tensor]) -> bool:
    """Whether a call may be replayed: eager, on the current GPU, no forced backend, no profiler, mode or tracer."""
    first = tensors[0]
    return not torch.compiler.is_compiling() and launch.may_replay(first) and not needs_dispatcher(tensors)


# reused, since constructing a plan takes as long as an allocation
_PLANS: dict[tuple[Recipe, NeedsGrad, torch.dtype], LinearPlan] = {}


def linear_plan_of(recipe: Recipe, rounding: Stochastic | None, needs: NeedsGrad, dtype: torch.dtype) -> LinearPlan:
    """The plan of a call; plans without stochastic rounding are cached."""
    if rounding is not None or torch.compiler.is_compiling():
        return LinearPlan(Casts(recipe, rounding), needs, dtype)
    found = _PLANS.get((recipe, needs, dtype))
    if found is None:
        found = _PLANS[recipe, needs, dtype] = LinearPlan(Casts(recipe), needs, dtype)
    return found


def product(
    a: BlockScaled,
    b: BlockScaled,
    dtype: torch.dtype,
    routing: Routing | None = None,
    *,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """a @ b.mT of two operands, dense or grouped.  out: rows that take a dense product, which does not accumulate."""
    if routing is None:
        return multiply(a, b, dtype, bias, accumulate, out)
    return multiply_grouped(a, b, routing.offs, dtype, bias, accumulate)


def fprop(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_row: BlockScaled | None,
    w_row: BlockScaled | None,
    dtype: Any,
    routing: Routing | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y [..., N], unquantized if an operand is None.  out: rows that take y, of x [M, K] without routing."""
    if x_row is not None and w_row is not None:
        y = product(x_row, w_row, dtype, routing, bias=bias, out=out)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
    bias = None if bias is None else bias.to(dtype)
    if routing is None:
        with torch.autocast(x.device.type, enabled=False):
            y = unquantized_linear(x, weight, bias, dtype)
        return y if out is None else out.copy_(y)
    y = grouped_mm(routing.permuted(x).to(dtype), weight.to(dtype).mT, routing.offs)
    return y if bias is None else y + _expert_rows(bias, y.shape[0], routing.offs)


def unquantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [..., N], with x, weight and bias converted to this dtype."""
    operands = for_products(*(each.to(dtype) for each in (x, weight, bias) if each is not None))
    if operands[0].dtype == dtype:
        return functional.linear(*operands)
    with torch.autocast(x.device.type, enabled=False):  # it would narrow the operands again
        return functional.linear(*operands).to(dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype."""
    return torch.mm(*for_products(a, b)).to(a.dtype)


def _expert_rows(values: Tensor, rows: int, offs: Tensor) -> Tensor:
    """[E, N] -> [M, N]: values of each row's expert; zeros for rows of no group."""
    group, _ = locate(torch.arange(rows, device=offs.device), offs.to(torch.int64))
    return torch.cat((values, values.new_zeros(1, values.shape[1]))).index_select(0, group)


def dgrad(
    grad: Tensor,
    row: BlockScaled | None,
    weight: Tensor,
    w_col: BlockScaled | None,
    dtype: torch.dtype,
    routing: Routing | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """dX [M, K] of grad [M, N] and weight [N, K] or [E, N, K], unquantized if an operand is None.  out: rows that take
    dX, without routing."""
    if row is not None and w_col is not None:
        return product(row, w_col.operand, dtype, routing, out=out)
    wide = weight.to(grad.dtype)
    dx = (_mm(grad, wide) if routing is None else grouped_mm(grad, wide, routing.offs)).to(dtype)
    return dx if out is None else out.copy_(dx)


def wgrad(
    grad: Tensor,
    col: BlockScaled | None,
    x: Tensor | None,
    x_col: BlockScaled | None,
    dtype: torch.dtype,
    main_grad: Tensor | None,
    routing: Routing | None = None,
) -> Tensor | None:
    """dW [N, K] or [E, N, K] of grad [M, N] and x [..., K]; None if it was accumulated into main_grad."""
    if col is not None and x_col is not None:
        dw = product(col.operand, x_col.operand, dtype, routing, accumulate=main_grad)
        return dw if main_grad is None else None
    assert x is not None, "an input without an operand is saved itself"
    if routing is None:
        dw = _mm(grad.mT, matrix(x).to(grad.dtype))
    else:
        dw = grouped_mm(grad.mT, routing.permuted(x).to(grad.dtype), routing.offs)
    if main_grad is None:
        return dw.to(dtype)
    main_grad.add_(dw)
    return None
