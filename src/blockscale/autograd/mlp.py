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
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from .activation import Activation
from .linear import check_linear, check_low, check_rounding, linear, main_grad_of, output_dtype, to_source
from .once import once
from .operands import Casts, Groups, Needs, Pair, column_sums, matrix, needs_of, set_aside
from .recipe import Recipe, get_recipe
from .work import dgrad, product, wgrad


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
    for `linear`. A recipe with a product in high precision is served by two `linear`s with torch's silu between.

    >>> x = torch.randn(4, 128, requires_grad=True)
    >>> gate_up, down = torch.randn(512, 128, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    >>> swiglu_mlp(x, gate_up, down, recipe="mxfp8").sum().backward()
    >>> gate_up.grad.shape
    torch.Size([512, 128])
    """
    chosen = get_recipe(recipe)
    source = x.source if isinstance(x, Activation) else x
    check_mlp(source, gate_up_weight, down_weight)
    if chosen.fprop is None or chosen.dgrad is None or chosen.wgrad is None:
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
) -> Tensor:
    """`swiglu_mlp` of a recipe that has all products in low precision, or that of experts; shapes are checked."""
    source = x.source if isinstance(x, Activation) else x
    for weight, bias, rounding in zip(weights, biases, roundings, strict=True):
        check_low(source, weight, bias)
        check_rounding(recipe, rounding)
    casts = Casts(recipe, roundings[0], groups), Casts(recipe, roundings[1], groups)
    above = needs_of(source, weights[0], biases[0])
    needs = above, needs_of(source, weights[1], biases[1])._replace(x=any(above))
    pair = x.operands(recipe) if isinstance(x, Activation) else casts[0].input(matrix(x), waits=above.weight)
    operands = [
        casts[at].weight(weight, waits=needs[at].x and recipe.weight_cast != "twice") if given is None else given
        for at, (weight, given) in enumerate(zip(weights, weight_operands, strict=True))
    ]
    dtype = output_dtype(source)
    if not any((*needs[0], *needs[1])):
        rows = pair[0], operands[0][0], operands[1][0]
        return _shaped(_fprop(rows, biases, casts[1], dtype)[1], source)
    return SwiGLUFunction.apply(  # pyright: ignore[reportReturnType]
        source,
        *weights,
        *biases,
        main_grad_of(weights[0]),
        main_grad_of(weights[1]),
        (*pair, *operands[0], *operands[1]),
        roundings,
        groups,
        recipe,
        needs,
        dtype,
    )


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
    its gradient needs anyway, and from which the backward makes wgrad's operand again."""

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
        operands: tuple[BlockScaled | None, ...],
        roundings: tuple[Stochastic | None, Stochastic | None],
        groups: Groups | None,
        recipe: Recipe,
        needs: tuple[Needs, Needs],
        dtype: torch.dtype,
    ) -> Tensor:
        x_row, x_col, gate_up_row, gate_up_col, down_row, down_col = operands
        casts = Casts(recipe, roundings[1], groups)
        gate_up, y = _fprop((x_row, gate_up_row, down_row), (gate_up_bias, down_bias), casts, dtype)
        wanted = (x_col, needs[0].weight), (gate_up_col, needs[0].x), (down_col, needs[1].x)
        kept = [set_aside(operand if is_needed else None) for operand, is_needed in wanted]
        ctx.waits = [waiting for waiting, _ in kept]
        ctx.save_for_backward(
            x if needs[0].weight and x_col is None else None,
            gate_up if needs[1].x or needs[1].weight else None,
            # in any case: a change before the backward is an error, as for torch's own layers
            gate_up_weight,
            down_weight,
            *(part for _, parts in kept for part in parts),
            *(groups or ()),
        )
        # not saved: other backward passes may add to them before this one
        ctx.main_grads = gate_up_main, down_main
        ctx.recipe, ctx.roundings, ctx.needs, ctx.shape, ctx.dtype = recipe, roundings, needs, x.shape, x.dtype
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (gate_up_bias, down_bias)]
        ctx.set_materialize_grads(False)
        return _shaped(y, x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 13
        x, gate_up, gate_up_weight, down_weight, *parts = ctx.saved_tensors
        gate_up_main, down_main = ctx.main_grads
        groups = Groups(*parts[9:]) if len(parts) > 9 else None
        first, second = (Casts(ctx.recipe, rounding, groups) for rounding in ctx.roundings)
        above, below = ctx.needs
        x_kept, gate_up_kept, down_kept = (
            (waits, tuple(parts[3 * at : 3 * at + 3])) for at, waits in enumerate(ctx.waits)
        )
        dx = dw_gate_up = dw_down = db_gate_up = None
        made: tuple[Any, Any, Any] = (None, None, None)
        dy_row, dy_col, db_down = second.gradient(matrix(grad), below)
        if below.x:
            down_col = second.column(down_kept, down_weight, "dgrad_w")
            dh = dgrad(grad, dy_row, down_weight, down_col, gate_up.dtype, groups)
            if above.x or above.weight:
                wanted = second.spec("wgrad_x", gate_up) if below.weight else None
                made = first.swiglu_gradient(dh, gate_up, wanted)
            if above.bias:
                db_gate_up = swiglu_bias_gradient(dh, gate_up, first.offs).to(ctx.bias_dtypes[0])
        row, col, hidden = made
        if below.weight:
            hidden = second.swiglu(gate_up, "wgrad_x", axis=-2) if hidden is None else hidden
            dw_down = wgrad(grad, dy_col, None, hidden, down_weight.dtype, down_main, groups)
        if above.x:
            gate_up_col = first.column(gate_up_kept, gate_up_weight, "dgrad_w")
            dx = to_source(dgrad(grad, row, gate_up_weight, gate_up_col, ctx.dtype, groups), ctx.shape, groups)
        if above.weight:
            x_col = first.column(x_kept, x, "wgrad_x")
            dw_gate_up = wgrad(grad, col, None, x_col, gate_up_weight.dtype, gate_up_main, groups)
        db_down = None if db_down is None else db_down.to(ctx.bias_dtypes[1])
        return dx, dw_gate_up, dw_down, db_gate_up, db_down, *(None,) * 8


def _fprop(
    rows: tuple[Any, Any, Any],
    biases: tuple[Tensor | None, Tensor | None],
    casts: Casts,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """gate_up [M, 2H] and y [M, D] of the row operands of x and both weights; casts: of the second layer."""
    x_row, gate_up_row, down_row = rows
    gate_up = product(x_row, gate_up_row, dtype, casts.groups, bias=biases[0])
    hidden = casts.swiglu(gate_up, "fprop_x")
    return gate_up, product(hidden, down_row, dtype, casts.groups, bias=biases[1])


def swiglu_bias_gradient(grad: Tensor, gate_up: Tensor, offs: Tensor | None = None) -> Tensor:
    """fp32 sums [2H] over rows of the gradient of gate and up, in high precision and by torch; [E, 2H] of groups.

    The fused cast of that gradient has no sums, and codes are not what a bias's gradient is made of. So a bias before
    the activation costs another pass; operands are the fused cast's with and without.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    dy, s = grad.float(), torch.sigmoid(gate)
    dgate, dup = dy * up * (s * (1 + gate * (1 - s))), dy * (gate * s)
    return torch.cat((column_sums(dgate, offs), column_sums(dup, offs)), dim=-1)


def check_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> None:
    """Raise unless the shapes fit."""
    check_linear(x, gate_up_weight)
    if down_weight.dim() != 2 or gate_up_weight.shape[0] != 2 * down_weight.shape[1]:
        raise ShapeError(
            message(
                f"gate_up_weight {tuple(gate_up_weight.shape)} and down_weight {tuple(down_weight.shape)}",
                rule="they are [2H, K] and [D, H]: a gate and an up for each input of the second layer",
                fix="pass torch.cat((gate_weight, up_weight)) as the first",
            )
        )
