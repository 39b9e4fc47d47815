"""`linear`: y = x @ weight.mT + bias with its three products in the formats of a recipe, and their gradients.

An input is cast once, from one read, to what fprop takes and what wgrad will take; the backward keeps the second, not
the input. A gradient is read once. What no backward will ask for is not made.

Memory that waits for the backward: 1.03 bytes for each element of an 8-bit input (bf16 has 2), and with
weight_cast="forward" as much for each element of the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import registry, replay
from ..casts import FLOAT_DTYPES
from ..errors import DeviceError, DtypeError, OptionError, ShapeError, message
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from ..gemm import check_bias, multiply
from ..library import is_watched
from ..replay import Recording
from .activation import Activation
from .once import once
from .operands import Casts, Kept, Needs, Pair, matrix, needs_of, set_aside
from .recipe import Recipe, get_recipe


def linear(
    x: Tensor | Activation,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "fp8_blockwise",
    *,
    rounding: Stochastic | None = None,
    weight_operands: Pair | None = None,
) -> Tensor:
    """x [..., K] @ weight [N, K].mT + bias [N], trained by a recipe.

    x: a tensor, or an `activation` that several layers share.  rounding: state and name of a layer whose recipe draws.
    weight_operands: casts of the weight that are known to be those of its present values (`weights.py`).

    The result has autocast's dtype where that is on, else x's. Where `weight.main_grad` is an fp32 tensor, wgrad is
    added into it and weight.grad stays None.

    >>> x = torch.randn(4, 128, requires_grad=True)
    >>> weight = torch.randn(256, 128, requires_grad=True)
    >>> linear(x, weight, recipe="mxfp8").sum().backward()
    >>> weight.grad.shape
    torch.Size([256, 128])
    """
    chosen = get_recipe(recipe)
    source = x.source if isinstance(x, Activation) else x
    check_linear(source, weight)
    dtype = output_dtype(source)
    if not chosen.is_low:
        return functional.linear(source.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    check_low(source, weight, bias)
    check_rounding(chosen, rounding)
    needs = needs_of(source, weight, bias)
    given = (x.operands(chosen) if isinstance(x, Activation) else None, weight_operands)
    work = work_of(chosen, rounding, needs, dtype)
    if not any(needs):
        return work.forward(source, weight, bias, given).y
    return LinearFunction.apply(source, weight, bias, main_grad_of(weight), given, work)  # pyright: ignore[reportReturnType]


_HIGH = "a product in high precision"
Given = tuple[Pair | None, Pair | None]


class Made(NamedTuple):
    """What a forward leaves: its result, and what waits of x and of the weight.  memory: of a replayed call, whose
    tensors are whole buffers."""

    y: Tensor
    x: Kept
    weight: Kept
    memory: Recording | None = None


class Work(NamedTuple):
    """All that a layer's call does besides autograd's bookkeeping, in a form that can be replayed."""

    casts: Casts
    needs: Needs
    dtype: torch.dtype

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, given: Given) -> Made:
        """given: operands that were made before; their layout follows from the shapes."""
        inputs = [x, weight] if bias is None else [x, weight, bias]
        if self.casts.rounding is not None or not _can_be_replayed(inputs):
            return self._forward(x, weight, bias, given)
        shares = (given[0] is None, given[1] is None)
        key = (*self[1:], self.casts.recipe, x.device, shares, *map(replay.layout, inputs))
        for pair in given:
            for operand in pair or ():
                if operand is not None:
                    inputs += (operand.data, operand.scale)
        known = replay.known(key)
        if known is None:
            return replay.learn(key, lambda: self._forward(x, weight, bias, given), inputs, _forward_results)
        y, *parts = known.replay(inputs)
        assert y is not None
        x_waits, w_waits = known.note
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
        return Made(y, (x_waits, (parts[0], parts[1], parts[2])), (w_waits, (parts[3], parts[4], parts[5])), known)

    def _forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, given: Given) -> Made:
        casts, needs = self.casts, self.needs
        x_row, x_col = given[0] or casts.input(matrix(x), waits=needs.weight)
        w_row, w_col = given[1] or casts.weight(weight, waits=needs.x and casts.recipe.weight_cast != "twice")
        y = _fprop(x, weight, bias, x_row, w_row, self.dtype)
        return Made(y, set_aside(x_col if needs.weight else None), set_aside(w_col if needs.x else None))

    def backward(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, main_grad: Tensor | None, made: Made
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dX [M, K], dW and the column sums of grad [M, N], those that are needed."""
        memory = made.memory
        if memory is None or not _can_be_replayed((grad,)):
            return self._backward(grad, x, weight, main_grad, made)
        read = weight if made.weight[0] is None else None  # a weight whose operand waits is not read
        optional = (x, read, main_grad, *made.x[1], *made.weight[1])
        inputs = [grad, *(each for each in optional if each is not None)]
        key = (memory, *(None if each is None else replay.layout(each) for each in (grad, *optional)))
        known = replay.known(key)
        if known is None:
            call = functools.partial(self._backward, grad, x, weight, main_grad, made)
            return replay.learn(key, call, inputs, lambda found: (found, None))
        dx, dw, total = known.replay(inputs)
        return dx, dw, total

    def _backward(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, main_grad: Tensor | None, made: Made
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        casts, needs, buffers = self.casts, self.needs, made.memory is not None
        row, col, total = casts.gradient(grad, needs)
        dx = dw = None
        if needs.x:
            w_col = casts.column(made.weight, weight, "dgrad_w", buffers=buffers)
            dx = dgrad(grad, row, weight, w_col, self.dtype)
        if needs.weight:
            x_col = casts.column(made.x, x, "wgrad_x", buffers=buffers)
            dw = wgrad(grad, col, x, x_col, weight.dtype, main_grad)
        return dx, dw, total


def _forward_results(made: Made) -> tuple[list[Tensor | None], object]:
    return [made.y, *made.x[1], *made.weight[1]], (made.x[0], made.weight[0])


def _can_be_replayed(tensors: Sequence[Tensor]) -> bool:
    """On a GPU, with kernels of the table's choice, where nobody watches."""
    first = tensors[0]
    return (
        not torch.compiler.is_compiling()
        and first.is_cuda
        and registry.demands_nothing()
        and first.get_device() == torch.cuda.current_device()
        and not is_watched(tensors)
    )


# one for each way to call a layer: making them takes as long as an allocation
_WORKS: dict[tuple[Recipe, Needs, torch.dtype], Work] = {}


def work_of(recipe: Recipe, rounding: Stochastic | None, needs: Needs, dtype: torch.dtype) -> Work:
    """The work of such a call."""
    if rounding is not None or torch.compiler.is_compiling():
        return Work(Casts(recipe, rounding), needs, dtype)
    found = _WORKS.get((recipe, needs, dtype))
    if found is None:
        found = _WORKS[recipe, needs, dtype] = Work(Casts(recipe), needs, dtype)
    return found


class LinearFunction(torch.autograd.Function):
    """fprop now, dgrad and wgrad later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        given: Given,
        work: Work,
    ) -> Tensor:
        y, (x_waits, x_parts), (w_waits, w_parts), memory = work.forward(x, weight, bias, given)
        keeps_x = work.needs.weight and x_waits is None
        # the weight itself is saved in any case: a change before the backward is an error, as for torch's own layer
        ctx.save_for_backward(x if keeps_x else None, weight, *x_parts, *w_parts)
        ctx.main_grad = main_grad  # not saved: other backward passes may add to it before this one
        ctx.work, ctx.waits, ctx.shape, ctx.dtype = work, (x_waits, w_waits, memory), x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 6
        x, weight, *parts = ctx.saved_tensors
        x_waits, w_waits, memory = ctx.waits
        made = Made(grad, (x_waits, tuple(parts[:3])), (w_waits, tuple(parts[3:])), memory)
        work = ctx.work
        if work.dtype != ctx.dtype:
            work = work._replace(dtype=ctx.dtype)
        dx, dw, total = work.backward(matrix(grad), x, weight, ctx.main_grad, made)
        if dx is not None and len(ctx.shape) != 2:
            dx = dx.view(ctx.shape)
        return dx, dw, None if total is None else total.to(ctx.bias_dtype), None, None, None


def _fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_row: BlockScaled | None, w_row: BlockScaled | None, dtype: Any
) -> Tensor:
    """y [..., N], in high precision where there are no operands."""
    if x_row is None or w_row is None:
        replay.refuse(_HIGH)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    y = multiply(x_row, w_row, dtype, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def dgrad(
    grad: Tensor, row: BlockScaled | None, weight: Tensor, w_col: BlockScaled | None, dtype: torch.dtype
) -> Tensor:
    """dX [M, K] of grad [M, N] and weight [N, K], in high precision where there are no operands."""
    if row is None or w_col is None:
        replay.refuse(_HIGH)
        return torch.mm(grad, weight.to(grad.dtype)).to(dtype)
    return multiply(row, w_col.operand, dtype)


def wgrad(
    grad: Tensor,
    col: BlockScaled | None,
    x: Tensor | None,
    x_col: BlockScaled | None,
    dtype: torch.dtype,
    main_grad: Tensor | None,
) -> Tensor | None:
    """dW [N, K] of grad [M, N] and x [..., K]; added into main_grad where there is one, and then None."""
    if col is None or x_col is None:
        assert x is not None, "an input that is not cast is kept"
        replay.refuse(_HIGH)
        dw = torch.mm(grad.mT, matrix(x).to(grad.dtype))
        if main_grad is None:
            return dw.to(dtype)
        main_grad.add_(dw)
        return None
    dw = multiply(col.operand, x_col.operand, dtype, accumulate=main_grad)
    return dw if main_grad is None else None


def output_dtype(x: Tensor) -> torch.dtype:
    """autocast's where it is on, else x's."""
    kind = x.device.type
    if kind == "meta":  # which autocast does not know
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The fp32 buffer that weight gradients are added into, if the weight has one."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    if torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None:  # pyright: ignore[reportPrivateUsage]
        raise OptionError(
            message(
                "weight.main_grad under DistributedDataParallel",
                rule="its hooks wait for weight.grad, which an added gradient never fills: ranks would not be averaged",
                fix="delete weight.main_grad, or reduce main_grad yourself without DistributedDataParallel",
            )
        )
    if not isinstance(main_grad, Tensor) or main_grad.dtype != torch.float32 or main_grad.shape != weight.shape:
        raise OptionError(
            message(
                f"weight.main_grad is {_in_words(main_grad)} for a weight {tuple(weight.shape)}",
                rule="weight gradients are added in fp32 into a tensor of the weight's shape",
                fix="allocate it with torch.zeros_like(weight, dtype=torch.float32)",
            )
        )
    if main_grad.device != weight.device:
        raise DeviceError(
            message(
                f"weight.main_grad is on {main_grad.device}, the weight on {weight.device}",
                rule="both are on one device",
                fix="move one",
            )
        )
    return main_grad


def _in_words(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_linear(x: Tensor, weight: Tensor) -> None:
    """Raise unless the shapes fit."""
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            message(
                f"x {tuple(x.shape)} for a weight {tuple(weight.shape)}",
                rule="a weight is [N, K], and K is the last axis of x",
                fix=f"pass x with {weight.shape[-1]} features",
            )
        )


def check_low(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise for what no cast or product takes: the layers call them past their own checks. Devices by their
    numbers: comparing them takes longer than all of this."""
    if x.dtype not in FLOAT_DTYPES or weight.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            message(
                f"x is {x.dtype}, the weight {weight.dtype}",
                rule="layers in low precision take bfloat16, float16 or float32",
                fix="convert them, or use the recipe 'bf16'",
            )
        )
    # without a number, on the CPU and the meta device, there is no time to win
    number = -1 if torch.compiler.is_compiling() else x.get_device()
    together = x.device == weight.device if number < 0 else number == weight.get_device()
    if not together:
        raise DeviceError(
            message(f"x is on {x.device}, the weight on {weight.device}", rule="both are on one device", fix="move one")
        )
    if bias is not None and (
        number < 0 or bias.get_device() != number or bias.dtype not in FLOAT_DTYPES or bias.shape != weight.shape[:1]
    ):
        check_bias(bias, tuple(weight.shape[:1]), x.device)


def check_rounding(recipe: Recipe, rounding: Stochastic | None) -> None:
    """Raise where a recipe draws and nobody says from what."""
    if rounding is None and recipe.draws:
        raise OptionError(
            message(
                f"recipe {recipe.name!r} without a state to draw from",
                rule="it rounds gradients stochastically, by a seed, a tick and the name of the layer",
                fix="use blockscale.quantize_, which names every layer, or pass "
                "rounding=Stochastic(rng_state(seed), name)",
            )
        )
