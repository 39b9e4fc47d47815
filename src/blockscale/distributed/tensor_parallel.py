"""Tensor parallel layers with sharded tokens between them, which cast before they gather.

A rank has its tokens and its part of the weight. `column_parallel` gathers the tokens and cuts the outputs;
`row_parallel` cuts the inputs, sums partial results over the ranks and scatters the tokens:

    column_parallel   x [M/ranks, K], weight [N/ranks, K] -> y [M, N/ranks]
    row_parallel      x [M, K/ranks], weight [N, K/ranks] -> y [M/ranks, N]

The owner of a token casts it to both operands from one read, and 8-bit codes are gathered in place of 16-bit values. A
shard holds whole blocks, so gathered bytes are those of casting the whole: weight gradients, and results that are not
sums over ranks, have the bits of one process. Partial sums travel in the dtype of the result. A product that the recipe
leaves unquantized gathers its input or gradient in that dtype.

Wire of gathered x and dy, of what bf16 moves (2 bytes each): 1.03 with columns from their owners, 0.52 requantized.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..autograd.dtensor import check_shards
from ..autograd.linear import (
    LinearFunction,
    check_linear,
    check_quantized,
    check_rounding,
    check_weight_operands,
    main_grad_of,
    output_dtype,
)
from ..autograd.mlp import SwiGLUFunction, check_mlp, check_pairs, swiglu
from ..autograd.operands import Casts, NeedsGrad, Pair, needed_grads
from ..autograd.recipe import Recipe, get_recipe
from ..casts.requantize import keeps_values
from ..errors import AxisError, OptionError, ShapeError, ShardingError, check_name, refuse
from ..formats.checks import in_words
from ..formats.spec import get_format
from ..formats.stochastic import Stochastic
from .agreement import check_same_call
from .collectives import Ranks, Tokens, ranks_of
from .parallel_mlp_plan import ParallelMLPPlan
from .parallel_plans import ColumnParallelPlan, RowParallelPlan, Sharing

Wgrad = Literal["owner", "requantized"]
WGRADS: tuple[Wgrad, ...] = ("owner", "requantized")


def column_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    recipe: str | Recipe = "fp8_blockwise",
    gather_dim: int = 0,
    wgrad: Wgrad = "owner",
    rounding: Stochastic | None = None,
    weight_operands: Pair | None = None,
) -> Tensor:
    """y of all tokens [.., N/ranks] from this rank's tokens x [.., K], its rows of the weight [N/ranks, K] and of the
    bias [N/ranks].

    gather_dim: axis of x along which the tokens of the ranks lie one after the other.  wgrad: source of x's column
    operand: "owner" gathers those that the owners cast in the forward; "requantized" saves the gathered rows and casts
    their values again.  group: a process group, or a mesh of one dimension.  The others, dtypes and `main_grad` are as
    for `blockscale.autograd.linear`. All ranks pass equal shapes and options.

    The gradient of x is a sum over ranks: every rank rounds its part to the dtype of x before it is summed.
    """
    recipe, ranks = get_recipe(recipe), ranks_of(group)
    check_linear(x, weight)
    _check(x, weight, bias, recipe, rounding, weight_operands, wgrad)
    check_shards("the weight", (weight.shape[0] * ranks.size, weight.shape[1]), tuple(weight.shape), recipe)
    tokens = _tokens(x, "gather_dim", gather_dim, 1)
    needs = needed_grads(x, weight, bias)
    _check_columns(recipe, ("fprop_x", "wgrad_x"), tokens, wgrad, needs)
    if rounding is not None:
        rounding = replace(rounding, origin=(0, ranks.rank * weight.shape[0], ranks.size * weight.shape[0]))
    check_same_call(ranks, x.device, "column_parallel", *_call(x, weight, bias, recipe, gather_dim, wgrad, needs))
    sharing = Sharing(ranks, tokens, wgrad == "requantized" and recipe.is_quantized)
    plan = ColumnParallelPlan(Casts(recipe, rounding), needs, output_dtype(x), sharing)
    shape = _with_size(x, gather_dim, x.shape[gather_dim] * ranks.size)
    return _run(plan, x, weight, bias, weight_operands).view(*shape, weight.shape[0])


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    recipe: str | Recipe = "fp8_blockwise",
    scatter_dim: int = 0,
    wgrad: Wgrad = "owner",
    rounding: Stochastic | None = None,
    weight_operands: Pair | None = None,
) -> Tensor:
    """y of this rank's tokens [.., N] from all tokens x [.., K/ranks], its columns of the weight [N, K/ranks] and the
    whole bias [N].

    scatter_dim: axis of x along which the tokens of the ranks lie one after the other.  wgrad: source of the column
    operand of y's gradient: "owner" gathers those that the owners cast; "requantized" casts the values of the gathered
    rows.  The others are as for `column_parallel`.

    Every rank rounds its part of the sum over K to y's dtype before it is summed. The bias, equal on all ranks, is
    added after the sum, and its gradient is summed over ranks: it is that of all tokens, on every rank.
    """
    recipe, ranks = get_recipe(recipe), ranks_of(group)
    check_linear(x, weight)
    _check(x, weight, bias, recipe, rounding, weight_operands, wgrad)
    check_shards("the weight", (weight.shape[0], weight.shape[1] * ranks.size), tuple(weight.shape), recipe)
    tokens = _tokens(x, "scatter_dim", scatter_dim, ranks.size)
    needs = needed_grads(x, weight, bias)
    _check_columns(recipe, ("dgrad_dy", "wgrad_dy"), tokens, wgrad, needs)
    if rounding is not None and any(needs):
        rounding = _rounding_of_tokens(rounding, tokens, ranks, weight.shape[0])
    check_same_call(ranks, x.device, "row_parallel", *_call(x, weight, bias, recipe, scatter_dim, wgrad, needs))
    sharing = Sharing(ranks, tokens, wgrad == "requantized" and recipe.is_quantized)
    plan = RowParallelPlan(Casts(recipe, rounding), needs, output_dtype(x), sharing)
    shape = _with_size(x, scatter_dim, x.shape[scatter_dim] // ranks.size)
    return _run(plan, x, weight, bias, weight_operands).view(*shape, weight.shape[0])


def swiglu_parallel(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    recipe: str | Recipe = "fp8_blockwise",
    token_dim: int = 0,
    wgrad: Wgrad = "owner",
    weight_operands: tuple[Pair | None, Pair | None] = (None, None),
) -> Tensor:
    """y [.., D] of this rank's tokens x [.., K]: silu(gate) * up between a column-parallel and a row-parallel layer.

    gate_up_weight: [2H/ranks, K], the gates of this rank's hidden units, then their ups; its bias [2H/ranks] alike.
    down_weight: [D, H/ranks].  down_bias: [D], whole.  token_dim: axis of x along which the tokens of the ranks lie.
    The others are as for `column_parallel` and `swiglu_mlp`. With a product that the recipe leaves unquantized, the
    three parts run one after the other.
    """
    recipe, ranks = get_recipe(recipe), ranks_of(group)
    check_mlp(x, gate_up_weight, down_weight)
    check_pairs((None, None), weight_operands)
    refuse_stochastic_mlp(recipe)
    weights, biases = (gate_up_weight, down_weight), (gate_up_bias, down_bias)
    if recipe.fprop is None or recipe.dgrad is None or recipe.wgrad is None:
        pair, other = weight_operands
        h = column_parallel(
            x,
            gate_up_weight,
            gate_up_bias,
            group=group,
            recipe=recipe,
            gather_dim=token_dim,
            wgrad=wgrad,
            weight_operands=pair,
        )
        return row_parallel(
            swiglu(h),
            down_weight,
            down_bias,
            group=group,
            recipe=recipe,
            scatter_dim=token_dim,
            wgrad=wgrad,
            weight_operands=other,
        )
    hidden = down_weight.shape[1]
    for each, bias, pair in zip(weights, biases, weight_operands, strict=True):
        _check(x, each, bias, recipe, None, pair, wgrad)
    check_shards("down_weight", (down_weight.shape[0], hidden * ranks.size), tuple(down_weight.shape), recipe)
    tokens = _tokens(x, "token_dim", token_dim, 1)
    first = needed_grads(x, gate_up_weight, gate_up_bias)
    needs = first, needed_grads(x, down_weight, down_bias)._replace(x=any(first))
    _check_columns(recipe, ("fprop_x", "wgrad_x"), tokens, wgrad, needs[0])
    _check_columns(recipe, ("dgrad_dy", "wgrad_dy"), tokens, wgrad, needs[1])
    call = _call(x, gate_up_weight, gate_up_bias, recipe, token_dim, wgrad, needs[0])
    check_same_call(ranks, x.device, "swiglu_parallel", *call, tuple(down_weight.shape), down_bias is None, *needs[1])
    sharing = Sharing(ranks, tokens, wgrad == "requantized")
    plan = ParallelMLPPlan(recipe, (None, None), needs, output_dtype(x), sharing)
    call_state = (None, *weight_operands)
    if not any((*needs[0], *needs[1])):
        return plan.forward(x, weights, biases, call_state, None).y.view(*x.shape[:-1], down_weight.shape[0])
    main_grads = main_grad_of(gate_up_weight), main_grad_of(down_weight)
    return SwiGLUFunction.apply(x, *weights, *biases, *main_grads, None, call_state, plan, None)  # pyright: ignore[reportReturnType]


def _run(
    plan: ColumnParallelPlan | RowParallelPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_operands: Pair | None,
) -> Tensor:
    """The rows of y, with autograd where a gradient is needed."""
    call_state = (None, weight_operands)
    if not any(plan.needs):
        return plan.forward(x, weight, bias, call_state).y
    return LinearFunction.apply(x, weight, bias, main_grad_of(weight), call_state, plan, None)  # pyright: ignore[reportReturnType]


def _with_size(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """Leading axes of x [.., K], one of them with another size."""
    return (*x.shape[:dim], size, *x.shape[dim + 1 : -1])


def _call(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, dim: int, wgrad: Wgrad, needs: NeedsGrad
) -> tuple[object, ...]:
    """What the collectives of a call and of its backward depend on."""
    shapes = tuple(x.shape), tuple(weight.shape)
    return *shapes, x.dtype, weight.dtype, bias is None, recipe.name, dim, wgrad, *needs


# ---- checks: from what all ranks have alike, so that all of them raise -----------------------------------------------


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    rounding: Stochastic | None,
    weight_operands: Pair | None,
    wgrad: Wgrad,
) -> None:
    check_quantized(x, weight, bias)
    check_rounding(recipe, rounding)
    if weight_operands is not None:
        check_weight_operands(weight_operands, weight)
    check_name(wgrad, WGRADS, "source of columns")


def _tokens(x: Tensor, name: str, dim: int, parts: int) -> Tokens:
    """Tokens of a rank, of x [.., K] that has those of `parts` ranks."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < x.dim() - 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"{name}={in_words(dim)} for x {tuple(x.shape)}",
            rule="tokens lie along an axis before the last, counted from the front",
            fix=f"pass 0 to {x.dim() - 2}" if x.dim() > 1 else "pass x with rows",
            error=AxisError,
        )
    if x.shape[dim] % parts or not x.numel():
        refuse(
            f"x {tuple(x.shape)} with {x.shape[dim]} tokens along axis {dim} for {parts} ranks",
            rule="all ranks have as many tokens, and at least one",
            fix=f"pad the axis to a multiple of {parts}",
            error=ShapeError,
        )
    return Tokens(math.prod(x.shape[:dim]), math.prod(x.shape[dim:-1]) // parts)


def _check_columns(recipe: Recipe, roles: tuple[str, str], tokens: Tokens, wgrad: Wgrad, needs: NeedsGrad) -> None:
    """Raise unless column operands of tokens can be gathered in whole blocks, or cast from rows.  roles: of the rows
    that travel, and of the columns."""
    row, column = (recipe.operand(role) for role in roles)
    if wgrad == "requantized" and recipe.is_quantized:
        kept = row is not None and column is not None and (recipe.saves == "operand" or roles[0] != "fprop_x")
        for each in (row, column):
            kept = kept and each is not None and not each.stochastic and keeps_values(each.format, each.scale_rule)
        if not kept:
            refuse(
                f'wgrad="requantized" for recipe {recipe.name!r} with {roles[0]} {row}, {roles[1]} {column} and '
                f"saves={recipe.saves!r}",
                rule="rows keep their values as columns with 8-bit elements, power-of-two scales that clip nothing and "
                "rounding to nearest, and the rows of an input are saved as an operand",
                fix='use wgrad="owner", or a recipe such as mxfp8',
                error=OptionError,
            )
    elif needs.weight and column is not None:
        block = get_format(column.format).block[1]
        if tokens.inner % block:
            refuse(
                f"{tokens.inner} contiguous tokens a rank for recipe {recipe.name!r}",
                rule=f"{column.format} has a scale for every {block} tokens of a column, and a rank has whole blocks",
                fix=f"pad the sequence so that a rank has a multiple of {block} tokens, or use wgrad='requantized' "
                "with a recipe whose scales are powers of two",
                error=ShardingError,
            )


def _rounding_of_tokens(rounding: Stochastic, tokens: Tokens, ranks: Ranks, columns: int) -> Stochastic:
    """Stochastic rounding of the gradient of this rank's tokens, with its offset in the whole: the same bytes."""
    if tokens.outer > 1:
        refuse(
            f"stochastic rounding of a gradient whose tokens lie in {tokens.outer} runs",
            rule="random numbers are counted by row of the whole, and the rows of a rank are not contiguous",
            fix="put the sequence first: x [S, B, K] with scatter_dim=0, or use a recipe that rounds to nearest",
            error=ShardingError,
        )
    return replace(rounding, origin=(ranks.rank * tokens.inner, 0, columns))


def refuse_stochastic_mlp(recipe: Recipe) -> None:
    """Raise for recipes with stochastic rounding in a SwiGLU that is cut."""
    if recipe.stochastic:
        refuse(
            f"a SwiGLU that is cut along its hidden units, with recipe {recipe.name!r}",
            rule="random numbers are counted by row and column of the whole, and the gates and ups of a rank lie apart",
            fix="keep gate and up as two layers, each column-parallel, or use a recipe that rounds to nearest",
            error=ShardingError,
        )
