"""`swiglu_mlp`: y = (silu(gate) * up) @ down.mT with gate and up from one product, trained by a recipe as one function.

The activation is fused with its casts: the forward casts silu(gate) * up as it computes it; the backward casts the
gradient of gate and up, and silu(gate) * up once more, from one read. Bytes are those of two `linear`s with the
activation between them (docs/numerics.md, section 16).

Memory saved for backward, per token: 1.03 bytes for each of K inputs in an 8-bit format and 2 for each of 2H gates and
ups in bf16. The same MLP in bf16 saves 2 K + 8 H bytes. The MLPs of experts (`grouped.py`) are this function with
groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ShapeError, refuse
from ..formats.checks import check_pair_of
from ..formats.stochastic import Stochastic
from ..grouped import Routing
from ..grouped.routing import combine_dots, combine_rows, permute_rows
from .activation import Activation
from .dtensor import DTensor, check_not_packed
from .linear import (
    accumulates_grad,
    check_linear,
    check_quantized,
    check_rounding,
    check_tensors,
    check_weight_operands,
    grad_of_input,
    linear,
    main_grad_of,
    output_dtype,
)
from .mlp_plan import AnyMLPPlan, CallState, MLPPlan, MLPSaved
from .operands import GradScatter, NeedsGrad, Pair, matrix, needed_grads
from .recipe import Recipe, get_recipe
from .routing import combine
from .transforms import check_transforms, no_double_backward


def swiglu_mlp(
    x: Tensor | Activation,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    recipe: str | Recipe = "fp8_blockwise",
    *,
    roundings: tuple[Stochastic | None, Stochastic | None] = (None, None),
    weight_operands: tuple[Pair | None, Pair | None] = (None, None),
) -> Tensor:
    """silu(gate) * up of x [..., K] @ gate_up_weight [2H, K].mT, gates first, times down_weight [D, H].mT.

    roundings, weight_operands: of the first and the second layer, as `linear` takes them. Dtypes and `main_grad` are as
    for `linear`. Recipes with an unquantized product, and DTensors, run two `linear`s with torch's silu between.

    >>> x = torch.randn(4, 128, requires_grad=True)
    >>> gate_up, down = torch.randn(512, 128, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    >>> swiglu_mlp(x, gate_up, down, recipe="mxfp8").sum().backward()
    >>> gate_up.grad.shape
    torch.Size([512, 128])
    """
    chosen = get_recipe(recipe)
    source = x.source if isinstance(x, Activation) else x
    check_mlp(source, gate_up_weight, down_weight)
    check_pairs(roundings, weight_operands)
    is_sharded = type(gate_up_weight) is DTensor or type(down_weight) is DTensor or type(source) is DTensor
    if is_sharded:
        check_not_packed("gate_up_weight", gate_up_weight)
    if is_sharded or chosen.fprop is None or chosen.dgrad is None or chosen.wgrad is None:
        (first, second), (pair, other) = roundings, weight_operands
        gate_up = linear(x, gate_up_weight, gate_up_bias, chosen, rounding=first, weight_operands=pair)
        return linear(swiglu(gate_up), down_weight, down_bias, chosen, rounding=second, weight_operands=other)
    weights, biases = (gate_up_weight, down_weight), (gate_up_bias, down_bias)
    return fused_mlp(x, weights, biases, chosen, roundings, weight_operands, None)


def fused_mlp(
    x: Tensor | Activation,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    recipe: Recipe,
    roundings: tuple[Stochastic | None, Stochastic | None],
    weight_operands: tuple[Pair | None, Pair | None],
    routing: Routing | None,
    gate_weights: Tensor | None = None,
    make_plan: Callable[..., AnyMLPPlan] = MLPPlan,
) -> Tensor:
    """`swiglu_mlp` or the MLP of experts, for a recipe that quantizes all three products; the caller checks shapes.
    gate_weights: [T, k] of a routing; each token is then the weighted sum of its rows.  make_plan: takes the arguments
    of `MLPPlan` and makes the plan of the call."""
    source = x.source if isinstance(x, Activation) else x
    for weight, bias, rounding, pair in zip(weights, biases, roundings, weight_operands, strict=True):
        check_quantized(source, weight, bias)
        check_rounding(recipe, rounding)
        if pair is not None:
            check_weight_operands(pair, weight)
    if gate_weights is not None:
        check_transforms(gate_weights)
    first = needed_grads(source, weights[0], biases[0])
    needs = first, needed_grads(source, weights[1], biases[1])._replace(x=any(first))
    call_state = (x.operands(recipe) if isinstance(x, Activation) else None, *weight_operands)
    plan = make_plan(recipe, roundings, needs, output_dtype(source))
    if not any((*needs[0], *needs[1])):
        y = plan.forward(source, weights, biases, call_state, routing).y
        return _shaped(y, source) if routing is None or gate_weights is None else combine(y, routing, gate_weights)
    main_grads = main_grad_of(weights[0]), main_grad_of(weights[1])
    return SwiGLUFunction.apply(source, *weights, *biases, *main_grads, gate_weights, call_state, plan, routing)  # pyright: ignore[reportReturnType]


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """A result [M, D] with the leading axes of the input."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., H] of [..., 2H], gates first, by torch, unquantized.

    >>> swiglu(torch.tensor([[0.0, 2.0, 3.0, -1.0]]))
    tensor([[ 0.0000, -1.7616]])
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class SwiGLUFunction(torch.autograd.Function):
    """Both fprops in the forward, both dgrads and wgrads in the backward.

    Gate and up are saved, the hidden activation is not: its gradient needs them anyway, and the backward casts wgrad's
    operand from them again. With gate_weights the rows of a token are summed, and the gradient of rows is cast from the
    gradient of tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gate_up_main: Tensor | None,
        down_main: Tensor | None,
        gate_weights: Tensor | None,
        call_state: CallState,
        plan: AnyMLPPlan,
        routing: Routing | None,
    ) -> Tensor:
        weights, biases = (gate_up_weight, down_weight), (gate_up_bias, down_bias)
        result = plan.forward(x, weights, biases, call_state, routing)
        y, saves_x = result.y, plan.needs[0].weight and result.x_col.meta is None
        MLPSaved(
            x=x if saves_x else None,
            gate_up=result.gate_up,
            gate_up_weight=gate_up_weight,  # always saved: a change before the backward is an error
            down_weight=down_weight,
            x_col=result.x_col,
            gate_up_col=result.gate_up_col,
            down_col=result.down_col,
            y=y if gate_weights is not None and ctx.needs_input_grad[7] else None,
            gate_weights=gate_weights,
            routing=routing,
            recording=result.recording,
        ).save(ctx)
        # not saved: other backward passes may accumulate into them before this one
        ctx.main_grads = gate_up_main, down_main
        ctx.plan, ctx.shape, ctx.dtype = plan, x.shape, x.dtype
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.set_materialize_grads(False)
        if routing is None or gate_weights is None:
            return _shaped(y, x)
        return combine_rows(y, routing.permutation[1], gate_weights)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 11
        saved, plan = MLPSaved.restore(ctx), ctx.plan
        if plan.dtype != ctx.dtype:
            plan = plan._replace(dtype=ctx.dtype)
        grad, dgate_weights, scatter, gate_weights = matrix(grad), None, None, saved.gate_weights
        if saved.routing is not None and gate_weights is not None:
            tokens, rows = saved.routing.permutation
            if saved.y is not None:
                dgate_weights = combine_dots(saved.y, grad, rows).to(gate_weights.dtype)
            grad, scatter = _scatter_grad(grad, tokens, rows, gate_weights, plan.needs[1])
        gate_up_main, down_main = (
            each if each is None or accumulates_grad(ctx, place) else None
            for place, each in enumerate(ctx.main_grads, 1)
        )
        found = plan.backward(grad, saved, (gate_up_main, down_main), scatter)
        biases = (found.gate_up_bias, found.down_bias)
        totals = [
            None if total is None else total.to(dtype) for total, dtype in zip(biases, ctx.bias_dtypes, strict=True)
        ]
        dx = grad_of_input(found.x, ctx.shape, saved.routing)
        return dx, found.gate_up, found.down, *totals, None, None, dgate_weights, *(None,) * 3


def _scatter_grad(
    grad: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor, needs: NeedsGrad
) -> tuple[Tensor, GradScatter | None]:
    """The gradient of tokens [T, D] with its scatter, if the cast of both operands gathers it; else the gradient of
    rows [M, D] and None."""
    if not (needs.x and needs.weight) or needs.bias:
        return permute_rows(grad, tokens, rows, gate_weights), None
    by_row = torch.empty(tokens.shape, dtype=torch.float32, device=grad.device)
    by_row = by_row.scatter(0, rows.reshape(-1).to(torch.int64), gate_weights.reshape(-1).to(torch.float32))
    return grad, GradScatter(tokens, by_row)


def check_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> None:
    """Raise unless the shapes fit."""
    check_linear(x, gate_up_weight)
    try:
        if down_weight.dim() == 2 and gate_up_weight.shape[0] == 2 * down_weight.shape[1]:
            return
    except (AttributeError, TypeError, RuntimeError):
        check_tensors(down_weight=down_weight)
        raise
    check_tensors(down_weight=down_weight)
    refuse(
        f"gate_up_weight {tuple(gate_up_weight.shape)} and down_weight {tuple(down_weight.shape)}",
        rule="they are [2H, K] and [D, H]: a gate and an up for each input of the second layer",
        fix="pass torch.cat((gate_weight, up_weight)) as the first",
        error=ShapeError,
    )


def check_pairs(roundings: object, weight_operands: object) -> None:
    """Raise unless roundings and weight_operands are pairs, one element for each layer of an MLP."""
    if type(roundings) is tuple and type(weight_operands) is tuple and len(roundings) == len(weight_operands) == 2:
        return
    for name, pair in (("roundings", roundings), ("weight_operands", weight_operands)):
        check_pair_of(pair, name, "an MLP has two layers, and each has its own or None")
