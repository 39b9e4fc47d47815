"""`linear`: y = x @ weight.mT + bias with its three products in the formats of a recipe, and their gradients.

An input is cast once, from one read, to what fprop takes and what wgrad will take; the backward keeps the second, not
the input. A gradient is read once. What no backward will ask for is not made.

Memory that waits for the backward: 1.03 bytes for each element of an 8-bit input (bf16 has 2), and with
weight_cast="forward" as much for each element of the weight.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import registry, replay
from ..casts import FLOAT_DTYPES
from ..errors import DtypeError, OptionError, ShapeError, message
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from ..gemm import check_bias, multiply
from ..library import is_watched
from .activation import Activation
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
    work = Work(Casts(chosen, rounding), needs, dtype)
    if not any(needs):
        return work.forward(source, weight, bias, given)[0]
    return LinearFunction.apply(source, weight, bias, main_grad_of(weight), given, work)  # pyright: ignore[reportReturnType]


Given = tuple[Pair | None, Pair | None]


class Work(NamedTuple):
    """All that a layer's call does besides autograd's bookkeeping, in a form that can be replayed."""

    casts: Casts
    needs: Needs
    dtype: torch.dtype

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, given: Given) -> tuple[Tensor, Kept, Kept, bool]:
        """y, what waits of x and of the weight, and whether that is whole buffers.  given: operands made before."""
        inputs = [x, weight] if bias is None else [x, weight, bias]
        for pair in given:
            for operand in pair or ():
                if operand is not None:
                    inputs += [operand.data, operand.scale]
        if not self._can_be_replayed(inputs):
            return *self._forward(x, weight, bias, given), False
        shares = (given[0] is None, given[1] is None)
        key = ("linear", self.casts.recipe, self.needs, self.dtype, x.device, shares, *map(replay.layout, inputs))
        known = replay.known(key)
        if known is None:
            made = replay.learn(key, lambda: self._forward(x, weight, bias, given), inputs, _forward_results)
            return *made, False
        y, *parts = known.replay(inputs)
        assert y is not None
        x_waits, w_waits = known.note
        kept = (x_waits, (parts[0], parts[1], parts[2])), (w_waits, (parts[3], parts[4], parts[5]))
        return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0]), *kept, True

    def _can_be_replayed(self, inputs: list[Tensor]) -> bool:
        """On a GPU, with kernels of the table's choice, where nobody watches."""
        return (
            not torch.compiler.is_compiling()
            and inputs[0].is_cuda
            and self.casts.rounding is None
            and registry.demands_nothing()
            and inputs[0].get_device() == torch.cuda.current_device()
            and not is_watched(inputs)
        )

    def _forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, given: Given) -> tuple[Tensor, Kept, Kept]:
        casts, needs = self.casts, self.needs
        x_row, x_col = given[0] or casts.input(matrix(x), waits=needs.weight)
        w_row, w_col = given[1] or casts.weight(weight, waits=needs.x and casts.recipe.weight_cast != "twice")
        y = _fprop(x, weight, bias, x_row, w_row, self.dtype)
        return y, set_aside(x_col if needs.weight else None), set_aside(w_col if needs.x else None)

    def backward(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, main_grad: Tensor | None, kept: tuple[Kept, Kept, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dX [M, K], dW and the column sums of grad [M, N], those that are needed."""
        (_, x_parts), (_, w_parts), buffers = kept
        given = (grad, weight, x, main_grad, *x_parts, *w_parts)
        inputs = [each for each in given if each is not None]
        if not self._can_be_replayed(inputs):
            return self._backward(grad, x, weight, main_grad, kept)
        absent = tuple(each is None for each in given)
        key = ("backward", self.casts.recipe, self.needs, self.dtype, grad.device, absent, buffers)
        key += tuple(map(replay.layout, inputs))
        known = replay.known(key)
        if known is None:
            call = functools.partial(self._backward, grad, x, weight, main_grad, kept)
            return replay.learn(key, call, inputs, lambda made: (made, None))
        dx, dw, total = known.replay(inputs)
        return dx, dw, total

    def _backward(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, main_grad: Tensor | None, kept: tuple[Kept, Kept, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        casts, needs = self.casts, self.needs
        x_kept, w_kept, buffers = kept
        row, col, total = casts.gradient(grad, needs)
        dx = dw = None
        if needs.x:
            w_col = casts.column(w_kept, weight, "dgrad_w", buffers=buffers)
            dx = dgrad(grad, row, weight, w_col, self.dtype)
        if needs.weight:
            x_col = casts.column(x_kept, x, "wgrad_x", buffers=buffers)
            dw = wgrad(grad, col, x, x_col, weight.dtype, main_grad)
        return dx, dw, total


def _forward_results(made: tuple[Tensor, Kept, Kept]) -> tuple[list[Tensor | None], object]:
    y, (x_waits, x_parts), (w_waits, w_parts) = made
    return [y, *x_parts, *w_parts], (x_waits, w_waits)


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
        y, (x_waits, x_parts), (w_waits, w_parts), buffers = work.forward(x, weight, bias, given)
        keeps_x = work.needs.weight and x_waits is None
        # the weight itself is saved in any case: a change before the backward is an error, as for torch's own layer
        ctx.save_for_backward(x if keeps_x else None, weight, main_grad, *x_parts, *w_parts)
        ctx.work, ctx.waits, ctx.shape, ctx.dtype = work, (x_waits, w_waits, buffers), x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 6
        x, weight, main_grad, *parts = ctx.saved_tensors
        x_waits, w_waits, buffers = ctx.waits
        kept = (x_waits, tuple(parts[:3])), (w_waits, tuple(parts[3:])), buffers
        work = ctx.work._replace(dtype=ctx.dtype)
        dx, dw, total = work.backward(matrix(grad), x, weight, main_grad, kept)
        return (
            None if dx is None else dx.view(ctx.shape),
            dw,
            None if total is None else total.to(ctx.bias_dtype),
            *(None,) * 3,
        )


def _fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_row: BlockScaled | None, w_row: BlockScaled | None, dtype: Any
) -> Tensor:
    """y [..., N], in high precision where there are no operands."""
    if x_row is None or w_row is None:
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return multiply(x_row, w_row, dtype, bias).view(*x.shape[:-1], weight.shape[0])


def dgrad(
    grad: Tensor, row: BlockScaled | None, weight: Tensor, w_col: BlockScaled | None, dtype: torch.dtype
) -> Tensor:
    """dX [M, K] of grad [M, N] and weight [N, K], in high precision where there are no operands."""
    if row is None or w_col is None:
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
    return main_grad


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
    """Raise for what no cast or product takes: the layers call them past their own checks. Devices are not compared,
    which takes longer than all of this; the kernels tell."""
    if x.dtype not in FLOAT_DTYPES or weight.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            message(
                f"x is {x.dtype}, the weight {weight.dtype}",
                rule="layers in low precision take bfloat16, float16 or float32",
                fix="convert them, or use the recipe 'bf16'",
            )
        )
    if bias is not None and bias.shape != weight.shape[:1]:
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
