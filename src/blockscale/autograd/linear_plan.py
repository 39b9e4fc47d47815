"""The work of a linear layer's call besides autograd's bookkeeping: casts and products, in a form that can be replayed.

A layer of experts does the same work with grouped products: `groups` says which rows are whose.

A call on a GPU that nobody watches is recorded the second time that it comes with these shapes, and replayed from then
on (`call_recording.py`); what it leaves for the backward is then whole buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import call_recording, registry
from ..call_recording import Recording
from ..formats.layout import locate
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from ..gemm import multiply
from ..grouped import multiply_grouped
from ..grouped.unquantized import grouped_mm
from ..hardware import for_products
from ..library import needs_dispatcher
from .operands import Casts, Groups, Needs, Pair, SavedOperand, matrix, set_aside
from .recipe import Recipe

_HIGH = "a product in high precision"
CallState = tuple[Pair | None, Pair | None]


class ForwardResult(NamedTuple):
    """What a forward leaves: its result, and what waits of x and of the weight.  memory: of a replayed call, whose
    tensors are whole buffers."""

    y: Tensor
    x: SavedOperand
    weight: SavedOperand
    memory: Recording | None = None


class LinearPlan(NamedTuple):
    """All that a layer's call does besides autograd's bookkeeping, in a form that can be replayed."""

    casts: Casts
    needs: Needs
    dtype: torch.dtype

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, given: CallState, groups: Groups | None = None
    ) -> ForwardResult:
        """given: operands that were made before; their layout follows from the shapes."""
        inputs = [x, weight] if bias is None else [x, weight, bias]
        if groups is not None:
            inputs += _tensors(groups)
        if self.casts.rounding is not None or not can_be_replayed(inputs):
            return self._forward(x, weight, bias, given, groups)
        key = (*self[1:], self.casts.recipe, x.device, *which_of(given), *map(call_recording.layout, inputs))
        inputs += tensors_of(given)
        known = call_recording.find_recording(key)
        if known is None:
            return call_recording.run_and_record(
                key, lambda: self._forward(x, weight, bias, given, groups), inputs, _forward_results
            )
        y, *parts = known.replay(inputs)
        assert y is not None
        x_waits, w_waits = known.note
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
        return ForwardResult(
            y, (x_waits, (parts[0], parts[1], parts[2])), (w_waits, (parts[3], parts[4], parts[5])), known
        )

    def _forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, given: CallState, groups: Groups | None
    ) -> ForwardResult:
        casts, needs = self.casts.among(groups), self.needs
        x_row, x_col = given[0] or casts.input(matrix(x), waits=needs.weight)
        w_row, w_col = given[1] or casts.weight(weight, waits=needs.x and casts.recipe.weight_cast != "twice")
        y = fprop(x, weight, bias, x_row, w_row, self.dtype, groups)
        return ForwardResult(y, set_aside(x_col if needs.weight else None), set_aside(w_col if needs.x else None))

    def backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weight: Tensor,
        main_grad: Tensor | None,
        made: ForwardResult,
        groups: Groups | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dX [M, K], dW and the column sums of grad [M, N], those that are needed."""
        memory = made.memory
        if memory is None or not can_be_replayed((grad,)):
            return self._backward(grad, x, weight, main_grad, made, groups)
        read = weight if made.weight[0] is None else None  # a weight whose operand waits is not read
        optional = (x, read, main_grad, *made.x[1], *made.weight[1], *(groups or ()))
        call = functools.partial(self._backward, grad, x, weight, main_grad, made, groups)
        dx, dw, total = backward_again(memory, grad, optional, call)
        return dx, dw, total

    def _backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weight: Tensor,
        main_grad: Tensor | None,
        made: ForwardResult,
        groups: Groups | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        casts, needs, buffers = self.casts.among(groups), self.needs, made.memory is not None
        row, col, total = casts.gradient(grad, needs)
        dx = dw = None
        if needs.x:
            w_col = casts.column(made.weight, weight, "dgrad_w", buffers=buffers)
            dx = dgrad(grad, row, weight, w_col, self.dtype, groups)
        if needs.weight:
            x_col = casts.column(made.x, x, "wgrad_x", buffers=buffers)
            dw = wgrad(grad, col, x, x_col, weight.dtype, main_grad, groups)
        return dx, dw, total


def _tensors(groups: Groups) -> list[Tensor]:
    return [each for each in groups if each is not None]


def _forward_results(made: ForwardResult) -> tuple[list[Tensor | None], object]:
    return [made.y, *made.x[1], *made.weight[1]], (made.x[0], made.weight[0])


def which_of(given: Iterable[Pair | None]) -> tuple[tuple[bool, ...], ...]:
    """Which of `tensors_of` there are: an activation that nobody will take a weight's gradient of has no columns."""
    return tuple(tuple(operand is not None for operand in pair or ()) for pair in given)


def tensors_of(given: Iterable[Pair | None]) -> list[Tensor]:
    """Codes and scales of operands that were made before."""
    operands = (operand for pair in given for operand in pair or () if operand is not None)
    return [part for operand in operands for part in (operand.data, operand.scale)]


def backward_again(
    memory: Recording, grad: Tensor, optional: Sequence[Tensor | None], call: Callable[[], Sequence[Tensor | None]]
) -> Sequence[Tensor | None]:
    """The backward of a replayed forward: replayed too, or done, and learnt if it may be.  optional: what it reads or
    adds to besides grad."""
    inputs = [grad, *(each for each in optional if each is not None)]
    key = (memory, *(None if each is None else call_recording.layout(each) for each in (grad, *optional)))
    known = call_recording.find_recording(key)
    return (
        call_recording.run_and_record(key, call, inputs, lambda found: (found, None))
        if known is None
        else known.replay(inputs)
    )


def can_be_replayed(tensors: Sequence[Tensor]) -> bool:
    """On a GPU, with kernels of the table's choice, where nobody watches."""
    first = tensors[0]
    return (
        not torch.compiler.is_compiling()
        and first.is_cuda
        and registry.nothing_is_forced()
        and first.get_device() == torch.cuda.current_device()
        and not needs_dispatcher(tensors)
    )


# one for each way to call a layer: making them takes as long as an allocation
_WORKS: dict[tuple[Recipe, Needs, torch.dtype], LinearPlan] = {}


def linear_plan_of(recipe: Recipe, rounding: Stochastic | None, needs: Needs, dtype: torch.dtype) -> LinearPlan:
    """The work of such a call."""
    if rounding is not None or torch.compiler.is_compiling():
        return LinearPlan(Casts(recipe, rounding), needs, dtype)
    found = _WORKS.get((recipe, needs, dtype))
    if found is None:
        found = _WORKS[recipe, needs, dtype] = LinearPlan(Casts(recipe), needs, dtype)
    return found


def product(
    a: BlockScaled,
    b: BlockScaled,
    dtype: torch.dtype,
    groups: Groups | None = None,
    *,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
) -> Tensor:
    """Of operands, dense or grouped."""
    if groups is None:
        return multiply(a, b, dtype, bias, accumulate)
    return multiply_grouped(a, b, groups.offs, dtype, bias, accumulate)


def fprop(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_row: BlockScaled | None,
    w_row: BlockScaled | None,
    dtype: Any,
    groups: Groups | None = None,
) -> Tensor:
    """y [..., N], in high precision where there are no operands."""
    if x_row is not None and w_row is not None:
        y = product(x_row, w_row, dtype, groups, bias=bias)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
    call_recording.refuse(_HIGH)
    bias = None if bias is None else bias.to(dtype)
    if groups is None:
        with torch.autocast(x.device.type, enabled=False):
            return unquantized_linear(x, weight, bias, dtype)
    y = grouped_mm(groups.gathered(x).to(dtype), weight.to(dtype).mT, groups.offs)
    return y if bias is None else y + _of_rows(bias, y.shape[0], groups.offs)


def unquantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [..., N] of operands in this dtype."""
    operands = for_products(*(each.to(dtype) for each in (x, weight, bias) if each is not None))
    if operands[0].dtype == dtype:
        return functional.linear(*operands)
    with torch.autocast(x.device.type, enabled=False):  # which would narrow them again
        return functional.linear(*operands).to(dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype."""
    return torch.mm(*for_products(a, b)).to(a.dtype)


def _of_rows(values: Tensor, rows: int, offs: Tensor) -> Tensor:
    """[E, N] -> [M, N]: those of each row's expert; zeros for rows of no group."""
    group, _ = locate(torch.arange(rows, device=offs.device), offs.to(torch.int64))
    return torch.cat((values, values.new_zeros(1, values.shape[1]))).index_select(0, group)


def dgrad(
    grad: Tensor,
    row: BlockScaled | None,
    weight: Tensor,
    w_col: BlockScaled | None,
    dtype: torch.dtype,
    groups: Groups | None = None,
) -> Tensor:
    """dX [M, K] of grad [M, N] and weight [N, K] or [E, N, K], in high precision where there are no operands."""
    if row is not None and w_col is not None:
        return product(row, w_col.operand, dtype, groups)
    call_recording.refuse(_HIGH)
    wide = weight.to(grad.dtype)
    return (_mm(grad, wide) if groups is None else grouped_mm(grad, wide, groups.offs)).to(dtype)


def wgrad(
    grad: Tensor,
    col: BlockScaled | None,
    x: Tensor | None,
    x_col: BlockScaled | None,
    dtype: torch.dtype,
    main_grad: Tensor | None,
    groups: Groups | None = None,
) -> Tensor | None:
    """dW [N, K] or [E, N, K] of grad [M, N] and x [..., K]; added into main_grad where there is one, and then None."""
    if col is not None and x_col is not None:
        dw = product(col.operand, x_col.operand, dtype, groups, accumulate=main_grad)
        return dw if main_grad is None else None
    assert x is not None, "an input that is not cast is kept"
    call_recording.refuse(_HIGH)
    if groups is None:
        dw = _mm(grad.mT, matrix(x).to(grad.dtype))
    else:
        dw = grouped_mm(grad.mT, groups.gathered(x).to(grad.dtype), groups.offs)
    if main_grad is None:
        return dw.to(dtype)
    main_grad.add_(dw)
    return None
