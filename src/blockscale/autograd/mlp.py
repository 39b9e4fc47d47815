"""`swiglu_mlp`: y = (silu(gate) * up) @ down.mT with gate and up from one product, trained by a recipe as one function.

What two layers and an activation between them would read and write in high precision is fused: the forward casts
silu(gate) * up as it computes it, the backward makes the operands of gate's and up's gradient, and once more that of
silu(gate) * up, from one read. Bytes are those of the parts (docs/numerics.md, section 16).

Memory that waits for the backward, for each token: 1.03 bytes for each of K inputs in an 8-bit format and 2 for each of
2H gates and ups in bf16. The same MLP in bf16 keeps 2 K + 8 H. The MLPs of experts (`grouped.py`) are this function
with groups of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ShapeError, message
from ..formats.checks import check_pair_of
from ..formats.stochastic import Stochastic
from ..grouped import Routing
from ..grouped.routing_ops import combine_dots, combine_rows, permute_rows
from .activation import Activation
from .dtensor import DTensor, check_not_packed
from .linear import (
    check_linear,
    check_low,
    check_rounding,
    check_tensors,
    check_weight_operands,
    is_asked_for,
    linear,
    main_grad_of,
    output_dtype,
    to_source,
)
from .mlp_plan import CallState, MLPForwardResult, MLPPlan
from .no_double_backward import no_double_backward
from .operands import Groups, Needs, Pair, Spread, matrix, needs_of
from .recipe import Recipe, get_recipe
from .routing import combine
from .transforms import check_transforms


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
    for `linear`. A recipe with a product in high precision is served by two `linear`s with torch's silu between,
    and so are DTensors.

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
    groups: Groups | None,
    slots: Tensor | None = None,
) -> Tensor:
    """`swiglu_mlp` of a recipe that has all products in low precision, or that of experts; shapes are checked.  slots:
    weights [T, k] of the rows that groups were routed to, for the sum of each token's."""
    source = x.source if isinstance(x, Activation) else x
    for weight, bias, rounding, pair in zip(weights, biases, roundings, weight_operands, strict=True):
        check_low(source, weight, bias)
        check_rounding(recipe, rounding)
        if pair is not None:
            check_weight_operands(pair, weight)
    if slots is not None:
        check_transforms(slots)
    above = needs_of(source, weights[0], biases[0])
    needs = above, needs_of(source, weights[1], biases[1])._replace(x=any(above))
    given = (x.operands(recipe) if isinstance(x, Activation) else None, *weight_operands)
    work = MLPPlan(recipe, roundings, needs, output_dtype(source))
    if not any((*needs[0], *needs[1])):
        y = work.forward(source, weights, biases, given, groups).y
        return _shaped(y, source) if slots is None else combine(y, Routing(*_routed(groups)), slots)
    main_grads = main_grad_of(weights[0]), main_grad_of(weights[1])
    return SwiGLUFunction.apply(source, *weights, *biases, *main_grads, slots, given, work, groups)  # pyright: ignore[reportReturnType]


def _routed(groups: Groups | None) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of tokens that were routed."""
    assert groups is not None
    assert groups.tokens is not None
    assert groups.rows is not None
    return groups.offs, groups.tokens, groups.rows


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """A result [M, D] with the leading axes of the input."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., H] of [..., 2H], gates first, by torch: for what stays in high precision.

    >>> swiglu(torch.tensor([[0.0, 2.0, 3.0, -1.0]]))
    tensor([[ 0.0000, -1.7616]])
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class SwiGLUFunction(torch.autograd.Function):
    """Both fprops now, both dgrads and wgrads later. Of the hidden activation nothing is kept: gate and up are, which
    its gradient needs anyway, and from which the backward makes wgrad's operand again. With weights of slots the rows
    of experts are added up by token, and their gradient is read from that of the tokens."""

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
        slots: Tensor | None,
        given: CallState,
        work: MLPPlan,
        groups: Groups | None,
    ) -> Tensor:
        weights, biases = (gate_up_weight, down_weight), (gate_up_bias, down_bias)
        y, gate_up, kept, memory = work.forward(x, weights, biases, given, groups)
        ctx.save_for_backward(
            x if work.needs[0].weight and kept[0][0] is None else None,
            gate_up,
            # in any case: a change before the backward is an error, as for torch's own layers
            *weights,
            *(part for _, parts in kept for part in parts),
            y if slots is not None and ctx.needs_input_grad[7] else None,
            slots,
            *(groups or ()),
        )
        # not saved: other backward passes may add to them before this one
        ctx.main_grads = gate_up_main, down_main
        ctx.work, ctx.waits, ctx.shape, ctx.dtype = work, (*(waits for waits, _ in kept), memory), x.shape, x.dtype
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.set_materialize_grads(False)
        return _shaped(y, x) if slots is None else combine_rows(y, _routed(groups)[2], slots)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 11
        x, gate_up, gate_up_weight, down_weight, *parts = ctx.saved_tensors
        y, slots = parts[9:11]
        groups = Groups(*parts[11:]) if len(parts) > 11 else None
        *waits, memory = ctx.waits
        first, second, third = ((waiting, tuple(parts[3 * at : 3 * at + 3])) for at, waiting in enumerate(waits))
        made = MLPForwardResult(grad, gate_up, (first, second, third), memory)
        work = ctx.work
        if work.dtype != ctx.dtype:
            work = work._replace(dtype=ctx.dtype)
        grad, dslots, spread = matrix(grad), None, None
        if slots is not None:
            _, tokens, rows = _routed(groups)
            dslots = None if y is None else combine_dots(y, grad, rows).to(slots.dtype)
            grad, spread = _spread(grad, tokens, rows, slots, work.needs[1])
        above, below = (
            each if each is None or is_asked_for(ctx, place) else None for place, each in enumerate(ctx.main_grads, 1)
        )
        found = work.backward(grad, x, (gate_up_weight, down_weight), (above, below), made, groups, spread)
        biases = (found.gate_up_bias, found.down_bias)
        totals = [
            None if total is None else total.to(dtype) for total, dtype in zip(biases, ctx.bias_dtypes, strict=True)
        ]
        dx = to_source(found.x, ctx.shape, groups)
        return dx, found.gate_up, found.down, *totals, None, None, dslots, *(None,) * 3


def _spread(grad: Tensor, tokens: Tensor, rows: Tensor, slots: Tensor, needs: Needs) -> tuple[Tensor, Spread | None]:
    """The gradient of tokens [T, D] with how it is spread to rows, where a cast of both operands will do that; else
    that of the rows."""
    if not (needs.x and needs.weight) or needs.bias:
        return permute_rows(grad, tokens, rows, slots), None
    weights = torch.empty(tokens.shape, dtype=torch.float32, device=grad.device)
    weights = weights.scatter(0, rows.reshape(-1).to(torch.int64), slots.reshape(-1).to(torch.float32))
    return grad, Spread(tokens, weights)


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
    raise ShapeError(
        message(
            f"gate_up_weight {tuple(gate_up_weight.shape)} and down_weight {tuple(down_weight.shape)}",
            rule="they are [2H, K] and [D, H]: a gate and an up for each input of the second layer",
            fix="pass torch.cat((gate_weight, up_weight)) as the first",
        )
    )


def check_pairs(roundings: object, weight_operands: object) -> None:
    """Raise unless both layers of an MLP have what they draw by and their casts, or None."""
    if type(roundings) is tuple and type(weight_operands) is tuple and len(roundings) == len(weight_operands) == 2:
        return
    for name, pair in (("roundings", roundings), ("weight_operands", weight_operands)):
        check_pair_of(pair, name, "an MLP has two layers, and each has its own or None")
