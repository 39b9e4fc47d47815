"""Tokens of all ranks around experts that are cut along their hidden units.

Every rank multiplies all tokens by its part of each expert. So tokens are gathered before, and partial results are
summed and scattered after: two functions, each the other's backward, around the layer as it is on one GPU. Ranks route
their own tokens; what travels of a routing is the expert and the gate weight of each slot, and every rank sorts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.operands import Casts, matrix
from ..autograd.recipe import Recipe
from ..grouped import Routing, sort_by_expert
from .agreement import check_same_call
from .collectives import Ranks, Tokens, gather_values, reduce_scatter, wait
from .overlap.expert_sharing import experts_of
from .wire import cast_rows


class ShardedTokens(NamedTuple):
    """Ranks whose tokens a layer multiplies together, and where this rank's tokens lie among all."""

    ranks: Ranks
    tokens: Tokens


# tokens [T, K] of all ranks, their messages or None, their routing and gate weights -> partial results [T, D]
Multiply = Callable[[Tensor, Tensor | None, Routing, Tensor], Tensor]


def over_hidden_units(
    x: Tensor, routing: Routing, gate_weights: Tensor, sharded: ShardedTokens, recipe: Recipe | None, run: Multiply
) -> Tensor:
    """y [.., D] of this rank's tokens x [.., K], their routing and gate weights [T / ranks, k]. Collective, and so is
    its backward.

    recipe: of the cast of tokens that travel as codes; None if they travel in their dtype.
    run: makes this rank's part of all tokens' results. With messages (`wire.py`) it reads no value of the tokens.
    """
    ranks, tokens = sharded
    _, rows = routing.permutation
    needs = (torch.is_grad_enabled() and each.requires_grad for each in (x, gate_weights))
    cast = "" if recipe is None else recipe.name
    facts = tuple(x.shape), tuple(rows.shape), routing.experts, x.dtype, gate_weights.dtype, cast, *needs
    check_same_call(ranks, x.device, "experts cut along their hidden units", *facts)
    slots = [each.detach().contiguous().view(torch.uint8) for each in (experts_of(routing), gate_weights)]
    routed, rows_of_x = gather_values(torch.cat(slots, dim=-1), tokens, ranks), matrix(x)
    if recipe is None:
        sent = rows_of_x.detach()
    else:
        sent = cast_rows(rows_of_x.detach(), Casts(recipe, None, routing).quantized_spec("fprop_x", x))
    travelling = gather_values(sent, tokens, ranks)
    ids, gates = (each.contiguous() for each in routed.wait().split([each.shape[1] for each in slots], dim=1))
    whole = sort_by_expert(ids.view(torch.int32), routing.experts)  # beside the gather of tokens
    arrived = travelling.wait()
    values, messages = (arrived, None) if recipe is None else (None, arrived)
    y = run(
        gathered(rows_of_x, values, sharded),
        messages,
        whole,
        gathered(gate_weights, gates.view(gate_weights.dtype), sharded),
    )
    summed: Any = _ScatteredSum.apply(y, sharded)
    return summed.view(*x.shape[:-1], y.shape[1])


def gathered(mine: Tensor, whole: Tensor | None, sharded: ShardedTokens) -> Tensor:
    """Rows of all ranks, of which this rank's `mine` get a gradient.  whole: their values; None if nothing reads any:
    the result is then NaN, and takes no memory."""
    return _Gathered.apply(mine, whole, sharded)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    """This rank's rows -> those of all ranks; the backward sums their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, whole: Tensor | None, sharded: ShardedTokens) -> Tensor:
        ctx.sharded = sharded
        if whole is not None:
            return whole.view_as(whole)
        rows = mine.shape[0] * sharded.ranks.size
        return mine.new_full((1, 1), float("nan")).expand(rows, mine.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, tokens = ctx.sharded
        return wait(reduce_scatter(grad, tokens, ranks)), None, None


class _ScatteredSum(torch.autograd.Function):
    """Partial results of all tokens -> this rank's tokens, summed; the backward gathers the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sharded: ShardedTokens) -> Tensor:
        ctx.sharded = sharded
        ranks, tokens = sharded
        return wait(reduce_scatter(y, tokens, ranks))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, tokens = ctx.sharded
        return gather_values(grad, tokens, ranks).wait(), None
