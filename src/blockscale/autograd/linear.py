"""`linear`: y = x @ weight.mT + bias with its three products in the formats of a recipe, and their gradients.

An input is cast once, from one read, to what fprop takes and what wgrad will take; the backward keeps the second, not
the input. A gradient is read once. What no backward will ask for is not made.

Memory that waits for the backward: 1.03 bytes for each element of an 8-bit input (bf16 has 2), and with
weight_cast="forward" as much for each element of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..casts import FLOAT_DTYPES
from ..errors import DtypeError, OptionError, ShapeError, message
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from ..gemm import check_bias, multiply
from .activation import Activation
from .operands import Casts, Needs, Pair, matrix, needs_of, set_aside
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
    casts, needs = Casts(chosen, rounding), needs_of(source, weight, bias)
    x_row, x_col = x.operands(chosen) if isinstance(x, Activation) else casts.input(matrix(x), waits=needs.weight)
    if weight_operands is None:
        weight_operands = casts.weight(weight, waits=needs.x and chosen.weight_cast != "twice")
    operands = (x_row, x_col, *weight_operands)
    if not any(needs):
        return _fprop(source, weight, bias, x_row, weight_operands[0], dtype)
    return LinearFunction.apply(source, weight, bias, main_grad_of(weight), operands, casts, needs, dtype)  # pyright: ignore[reportReturnType]


class LinearFunction(torch.autograd.Function):
    """fprop now, dgrad and wgrad later, from operands that are cast already."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        operands: tuple[BlockScaled | None, BlockScaled | None, BlockScaled | None, BlockScaled | None],
        casts: Casts,
        needs: Needs,
        dtype: torch.dtype,
    ) -> Tensor:
        x_row, x_col, w_row, w_col = operands
        ctx.x_waits, x_parts = set_aside(x_col)
        ctx.w_waits, w_parts = set_aside(w_col)
        keeps_x = needs.weight and x_col is None
        # the weight itself is saved in any case: a change before the backward is an error, as for torch's own layer
        ctx.save_for_backward(x if keeps_x else None, weight, main_grad, *x_parts, *w_parts)
        ctx.casts, ctx.needs, ctx.shape, ctx.dtype = casts, needs, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return _fprop(x, weight, bias, x_row, w_row, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 8
        x, weight, main_grad, *parts = ctx.saved_tensors
        casts, needs = ctx.casts, ctx.needs
        grad = matrix(grad)
        row, col, total = casts.gradient(grad, needs)
        dx = dw = None
        if needs.x:
            w_col = casts.column(ctx.w_waits, parts[3:6], weight, "dgrad_w")
            dx = dgrad(grad, row, weight, w_col, ctx.dtype).view(ctx.shape)
        if needs.weight:
            x_col = casts.column(ctx.x_waits, parts[0:3], x, "wgrad_x")
            dw = wgrad(grad, col, x, x_col, weight.dtype, main_grad)
        db = None if total is None else total.to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None, None


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
    x: Tensor,
    x_col: BlockScaled | None,
    dtype: torch.dtype,
    main_grad: Tensor | None,
) -> Tensor | None:
    """dW [N, K] of grad [M, N] and x [..., K]; added into main_grad where there is one, and then None."""
    if col is None or x_col is None:
        dw = torch.mm(grad.mT, matrix(x).to(grad.dtype))
        if main_grad is None:
            return dw.to(dtype)
        main_grad.add_(dw)
        return None
    return low_wgrad(col, x_col, dtype, main_grad)


def low_wgrad(col: BlockScaled, x_col: BlockScaled, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
    """`wgrad` of operands."""
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
