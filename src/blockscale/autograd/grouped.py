"""`grouped_linear` and `grouped_swiglu_mlp`: the layers of experts, trained by a recipe.

`linear` and `swiglu_mlp` with one weight per expert: the same functions, casts and saved operands, with rows in groups.
fprop and dgrad are m-grouped, and their rows are not padded. wgrad is k-grouped, and the cast of its operands starts
every expert at a multiple of 128. Group ends stay on the device.

Rows come sorted by expert with the group ends, or as tokens with a `Routing`. With a routing the cast gathers
rows as it reads, and their gradient is returned by token: permuted rows are written only as quantized operands.
"""

from __future__ import annotations

from torch import Tensor

from ..casts.checks import check_offs
from ..errors import ShapeError, refuse
from ..formats.stochastic import Stochastic
from ..grouped import Routing, as_routing
from .dtensor import DTensor, refuse_experts
from .linear import (
    LinearFunction,
    check_quantized,
    check_rounding,
    check_tensors,
    check_unquantized,
    check_weight_operands,
    main_grad_of,
    output_dtype,
)
from .linear_plan import linear_plan_of
from .mlp import check_pairs, fused_mlp, swiglu
from .operands import Pair, needed_grads
from .recipe import Recipe, get_recipe
from .routing import check_gate_weights, combine
from .transforms import EXPERTS


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    routing: Tensor | Routing,
    bias: Tensor | None = None,
    recipe: str | Recipe = "fp8_blockwise",
    *,
    rounding: Stochastic | None = None,
    weight_operands: Pair | None = None,
) -> Tensor:
    """Rows [M, N], each x @ weight[e].mT + bias[e] of its expert e; weight [E, N, K], bias [E, N].

    routing: of tokens x [T, K], whose rows the cast gathers; or for rows x [M, K] that are sorted already the ends of
    the experts (int32 [E], on the device). The result is sorted by expert. Rows after the last end give zero.
    rounding, weight_operands, dtypes and `main_grad` are as for `linear`.

    >>> import torch
    >>> x, weight = torch.randn(5, 128, requires_grad=True), torch.randn(3, 64, 128, requires_grad=True)
    >>> offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    >>> grouped_linear(x, weight, offs, recipe="mxfp8").sum().backward()
    >>> weight.grad.shape, weight.grad[1].abs().max().item()
    (torch.Size([3, 64, 128]), 0.0)
    """
    chosen, routed = get_recipe(recipe), as_routing(routing)
    if type(bias) is DTensor:
        refuse_experts("the bias of experts", bias)
    check_experts(x, weight, routed)
    if chosen.is_quantized:
        check_quantized(x, weight, bias)
        check_rounding(chosen, rounding)
        if weight_operands is not None:
            check_weight_operands(weight_operands, weight)
    else:
        check_unquantized(x, weight, bias)
    needs = needed_grads(x, weight, bias, EXPERTS)
    plan, call_state = linear_plan_of(chosen, rounding, needs, output_dtype(x)), (None, weight_operands)
    if not any(needs):
        return plan.forward(x, weight, bias, call_state, routed).y
    return LinearFunction.apply(x, weight, bias, main_grad_of(weight), call_state, plan, routed)  # pyright: ignore[reportReturnType]


def grouped_swiglu_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    routing: Tensor | Routing,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    recipe: str | Recipe = "fp8_blockwise",
    *,
    roundings: tuple[Stochastic | None, Stochastic | None] = (None, None),
    weight_operands: tuple[Pair | None, Pair | None] = (None, None),
    gate_weights: Tensor | None = None,
) -> Tensor:
    """Rows [M, D], each silu(gate) * up of x @ gate_up_weight[e].mT, gates first, times down_weight[e].mT.

    gate_up_weight: [E, 2H, K].  down_weight: [E, D, H].  biases: [E, 2H] and [E, D].  routing: as for `grouped_linear`;
    the rest as for `swiglu_mlp`. A recipe with an unquantized product runs two `grouped_linear`s.

    gate_weights: [T, k] of a `Routing`. The result is then [T, D], bit-identical to `combine` of the rows. In the
    backward the gradient of rows is cast as it is gathered from the gradient of tokens, and never written itself.

    >>> import torch
    >>> x, offs = torch.randn(5, 128, requires_grad=True), torch.tensor([2, 2, 5], dtype=torch.int32)
    >>> gate_up, down = torch.randn(3, 256, 128, requires_grad=True), torch.randn(3, 128, 128, requires_grad=True)
    >>> grouped_swiglu_mlp(x, gate_up, down, offs, recipe="mxfp8").sum().backward()
    >>> x.grad.shape
    torch.Size([5, 128])
    """
    chosen, routed = get_recipe(recipe), as_routing(routing)
    check_experts(x, gate_up_weight, routed)
    check_expert_mlp(gate_up_weight, down_weight)
    check_combined(gate_weights, routed)
    check_pairs(roundings, weight_operands)
    if chosen.fprop is not None and chosen.dgrad is not None and chosen.wgrad is not None:
        layers, biases = (gate_up_weight, down_weight), (gate_up_bias, down_bias)
        return fused_mlp(x, layers, biases, chosen, roundings, weight_operands, routed, gate_weights)
    (first, second), (pair, other) = roundings, weight_operands
    gate_up = grouped_linear(x, gate_up_weight, routed, gate_up_bias, chosen, rounding=first, weight_operands=pair)
    rows = grouped_linear(
        swiglu(gate_up), down_weight, routed.offs, down_bias, chosen, rounding=second, weight_operands=other
    )
    return rows if gate_weights is None else combine(rows, routed, gate_weights)


def check_combined(gate_weights: Tensor | None, routing: Routing) -> None:
    """Raise unless gate weights come with a routing whose slots they fit."""
    if gate_weights is None:
        return
    if routing.tokens is None:
        refuse(
            "gate weights with the ends of groups",
            rule="rows are summed by token, and only a routing has the token of each row",
            fix="pass the routing in place of its offs, with tokens in place of rows",
        )
    check_gate_weights(gate_weights, routing)


def check_experts(x: Tensor, weight: Tensor, routing: Routing) -> None:
    """Raise unless rows, weights and groups fit."""
    if type(weight) is DTensor or type(x) is DTensor or type(routing.offs) is DTensor:
        refuse_experts("rows of experts", x, weight, routing.offs)
    try:
        fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2]
    except (AttributeError, TypeError, RuntimeError):  # no tensor; checking first would take longer
        check_tensors(x=x, weight=weight)
        raise
    if not fits:
        check_tensors(x=x, weight=weight)
        features = weight.shape[-1] if weight.dim() else "the weights'"
        refuse(
            f"x {tuple(x.shape)} for the weights of experts {tuple(weight.shape)}",
            rule="weights are [E, N, K], and x is a matrix with K columns",
            fix=f"pass x with {features} features, its leading axes flattened",
            error=ShapeError,
        )
    check_offs(routing.offs, x.device, 2, required=True)
    if routing.offs.shape[0] != weight.shape[0]:
        refuse(
            f"{routing.offs.shape[0]} group ends for {weight.shape[0]} experts",
            rule="one group for each expert, empty ones included",
            fix="repeat the previous end for an expert without rows",
            error=ShapeError,
        )
    if routing.rows is not None and routing.rows.shape[0] != x.shape[0]:
        refuse(
            f"x {tuple(x.shape)} for a routing of {routing.rows.shape[0]} tokens",
            rule="a routing takes tokens, not rows that were permuted",
            fix="pass the tokens [T, K], or routing.offs with permuted rows",
            error=ShapeError,
        )


def check_expert_mlp(gate_up_weight: Tensor, down_weight: Tensor) -> None:
    """Raise unless both weights make one MLP for each expert."""
    if type(down_weight) is DTensor:
        refuse_experts("down_weight of experts", down_weight)
    experts, twice, _ = gate_up_weight.shape
    try:
        fits = down_weight.dim() == 3 and down_weight.shape[0] == experts and twice == 2 * down_weight.shape[2]
    except (AttributeError, TypeError, RuntimeError):
        check_tensors(down_weight=down_weight)
        raise
    if not fits:
        check_tensors(down_weight=down_weight)
        refuse(
            f"gate_up_weight {tuple(gate_up_weight.shape)} and down_weight {tuple(down_weight.shape)}",
            rule="they are [E, 2H, K] and [E, D, H]: a gate and an up for each input of the second layer",
            fix="pass torch.cat((gate_weight, up_weight), dim=1) as the first",
            error=ShapeError,
        )
