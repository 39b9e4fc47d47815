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

import weakref
from dataclasses import replace

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
from ..autograd.linear_plan import CallState, LinearPlan
from ..autograd.mlp import SwiGLUFunction, check_mlp, check_pairs, swiglu
from ..autograd.operands import Casts, NeedsGrad, Pair, needed_grads
from ..autograd.recipe import Recipe, get_recipe
from ..errors import ShardingError, check_name, refuse
from ..formats.stochastic import Stochastic
from .agreement import check_same_call
from .collectives import Ranks, Tokens, ranks_of
from .gathered_activation import GatheredActivation
from .overlap.choice import OVERLAPS, Overlap, link_for
from .overlap.decision import Work, payload_of
from .overlap.sharing import Sharing
from .parallel_mlp_plan import ParallelMLPPlan
from .parallel_plans import ColumnParallelPlan, RowParallelPlan
from .shared_tokens import SharedColumnPlan
from .tokens import WGRADS, Wgrad, check_columns, tokens_of, with_size


def column_parallel(
    x: Tensor | GatheredActivation,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    recipe: str | Recipe = "fp8_blockwise",
    gather_dim: int = 0,
    wgrad: Wgrad = "owner",
    overlap: Overlap = "auto",
    rounding: Stochastic | None = None,
    weight_operands: Pair | None = None,
) -> Tensor:
    """y of all tokens [.., N/ranks] from this rank's tokens x [.., K], its rows of the weight [N/ranks, K] and of the
    bias [N/ranks].

    x: a tensor, or a `gather_activation` that several layers share, which has its own options.
    gather_dim: axis of x along which the tokens of the ranks lie one after the other.  wgrad: source of x's column
    operand: "owner" gathers those that the owners cast in the forward; "requantized" saves the gathered rows and casts
    their values again.  group: a process group, or a mesh of one dimension.  The others, dtypes and `main_grad` are as
    for `blockscale.autograd.linear`. All ranks pass equal shapes and options.

    The gradient of x is a sum over ranks: every rank rounds its part to the dtype of x before it is summed.
    """
    recipe, ranks = get_recipe(recipe), ranks_of(group)
    check_name(overlap, OVERLAPS, "overlap")
    gathered = x if isinstance(x, GatheredActivation) else None
    if gathered is not None and gathered.arriving is None and overlap == "on":
        refuse(
            'overlap="on" for an activation that was gathered before',
            rule="a product overlaps with a gather that has begun with it",
            fix='pass overlap="on" to gather_activation, or the tensor itself to the layer',
            error=ShardingError,
        )
    x = x.source if isinstance(x, GatheredActivation) else x
    check_linear(x, weight)
    _check(x, weight, bias, recipe, rounding, weight_operands, wgrad)
    check_shards("the weight", (weight.shape[0] * ranks.size, weight.shape[1]), tuple(weight.shape), recipe)
    needs = needed_grads(x, weight, bias)
    if rounding is not None:
        rounding = replace(rounding, origin=(0, ranks.rank * weight.shape[0], ranks.size * weight.shape[0]))
    if gathered is not None:
        parts, pair = (Casts(recipe, rounding), needs, output_dtype(x)), gathered.operands_for(recipe, ranks)
        shared = gathered.arriving
        plan = LinearPlan(*parts) if shared is None else SharedColumnPlan(*parts, weakref.ref(shared), shared.values)
        y = _run(plan, x, weight, bias, (pair, weight_operands))
        return y.view(*x.shape[:-1], weight.shape[0])
    tokens = tokens_of(x, "gather_dim", gather_dim, 1)
    check_columns(recipe, ("fprop_x", "wgrad_x"), tokens, wgrad, needs)
    call = _call(x, weight, bias, recipe, gather_dim, wgrad, needs)
    check_same_call(ranks, x.device, "column_parallel", *call, overlap)
    link = link_for(overlap, x, ranks, lambda: (_column_work(x, weight, recipe, ranks),))
    sharing = Sharing(ranks, tokens, wgrad == "requantized" and recipe.is_quantized, link)
    plan = ColumnParallelPlan(Casts(recipe, rounding), needs, output_dtype(x), sharing)
    shape = with_size(x, gather_dim, x.shape[gather_dim] * ranks.size)
    return _run(plan, x, weight, bias, (None, weight_operands)).view(*shape, weight.shape[0])


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    recipe: str | Recipe = "fp8_blockwise",
    scatter_dim: int = 0,
    wgrad: Wgrad = "owner",
    overlap: Overlap = "auto",
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
    tokens = tokens_of(x, "scatter_dim", scatter_dim, ranks.size)
    needs = needed_grads(x, weight, bias)
    check_columns(recipe, ("dgrad_dy", "wgrad_dy"), tokens, wgrad, needs)
    if rounding is not None and any(needs):
        rounding = _rounding_of_tokens(rounding, tokens, ranks, weight.shape[0])
    call = _call(x, weight, bias, recipe, scatter_dim, wgrad, needs)
    check_same_call(ranks, x.device, "row_parallel", *call, overlap)
    link = link_for(overlap, x, ranks, lambda: (_row_work(x, 1, weight, recipe, ranks),))
    sharing = Sharing(ranks, tokens, wgrad == "requantized" and recipe.is_quantized, link)
    plan = RowParallelPlan(Casts(recipe, rounding), needs, output_dtype(x), sharing)
    shape = with_size(x, scatter_dim, x.shape[scatter_dim] // ranks.size)
    return _run(plan, x, weight, bias, (None, weight_operands)).view(*shape, weight.shape[0])


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
    overlap: Overlap = "auto",
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
            overlap=overlap,
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
            overlap=overlap,
            weight_operands=other,
        )
    hidden = down_weight.shape[1]
    for each, bias, pair in zip(weights, biases, weight_operands, strict=True):
        _check(x, each, bias, recipe, None, pair, wgrad)
    check_shards("down_weight", (down_weight.shape[0], hidden * ranks.size), tuple(down_weight.shape), recipe)
    tokens = tokens_of(x, "token_dim", token_dim, 1)
    first = needed_grads(x, gate_up_weight, gate_up_bias)
    needs = first, needed_grads(x, down_weight, down_bias)._replace(x=any(first))
    check_columns(recipe, ("fprop_x", "wgrad_x"), tokens, wgrad, needs[0])
    check_columns(recipe, ("dgrad_dy", "wgrad_dy"), tokens, wgrad, needs[1])
    call = _call(x, gate_up_weight, gate_up_bias, recipe, token_dim, wgrad, needs[0])
    call = *call, tuple(down_weight.shape), down_bias is None, *needs[1], overlap
    check_same_call(ranks, x.device, "swiglu_parallel", *call)

    def works() -> tuple[Work, ...]:
        row = _row_work(x, ranks.size, down_weight, recipe, ranks)
        return _column_work(x, gate_up_weight, recipe, ranks), row

    link = link_for(overlap, x, ranks, works)
    sharing = Sharing(ranks, tokens, wgrad == "requantized", link)
    plan = ParallelMLPPlan(recipe, (None, None), needs, output_dtype(x), sharing)
    call_state = (None, *weight_operands)
    if not any((*needs[0], *needs[1])):
        return plan.forward(x, weights, biases, call_state, None).y.view(*x.shape[:-1], down_weight.shape[0])
    main_grads = main_grad_of(gate_up_weight), main_grad_of(down_weight)
    return SwiGLUFunction.apply(x, *weights, *biases, *main_grads, None, call_state, plan, None)  # pyright: ignore[reportReturnType]


def _run(
    plan: ColumnParallelPlan | RowParallelPlan | SharedColumnPlan | LinearPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call_state: CallState,
) -> Tensor:
    """The rows of y, with autograd where a gradient is needed."""
    if not any(plan.needs):
        return plan.forward(x, weight, bias, call_state).y
    return LinearFunction.apply(x, weight, bias, main_grad_of(weight), call_state, plan, None)  # pyright: ignore[reportReturnType]


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


def _column_work(x: Tensor, weight: Tensor, recipe: Recipe, ranks: Ranks) -> Work:
    """The forward of a column-parallel layer.  x: this rank's tokens."""
    m, n = x.shape[:-1].numel() * ranks.size, weight.shape[0] * ranks.size
    return Work("all_gather_mm", m, n, weight.shape[1], payload_of(recipe))


def _row_work(x: Tensor, parts: int, weight: Tensor, recipe: Recipe, ranks: Ranks) -> Work:
    """The forward of a row-parallel layer.  x: one of as many parts of all tokens."""
    return Work(
        "mm_reduce_scatter",
        x.shape[:-1].numel() * parts,
        weight.shape[0],
        weight.shape[1] * ranks.size,
        payload_of(recipe),
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


def refuse_stochastic_mlp(recipe: Recipe, what: str = "a SwiGLU that is") -> None:
    """Raise for recipes with stochastic rounding in a SwiGLU, or in experts, that are cut."""
    if recipe.stochastic:
        refuse(
            f"{what} cut along the hidden units, with recipe {recipe.name!r}",
            rule="random numbers are counted by row and column of the whole, and the gates and ups of a rank lie apart",
            fix="use a recipe that rounds to nearest, or keep gate and up as two layers, each column-parallel",
            error=ShardingError,
        )
