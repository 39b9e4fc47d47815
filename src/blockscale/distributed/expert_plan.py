"""`ExpertParallelPlan`: the plan of an MLP whose tokens and gradients are cast at their rank and travel as codes.

A forward casts tokens to fprop's rows, sends codes with their scales, and multiplies what it received by its own
experts. Its results travel back in their dtype. A backward casts the gradients of rows, each times its gate weight, to
dgrad's rows and sends them the same way. Column operands, whose blocks of tokens exist only where rows of one expert
meet, are requantized from rows: an 8-bit element with power-of-two scales keeps its value, so weight gradients are
those of one process but for values far below the amax of their block (`casts/requantize.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.mlp_plan import Biases, CallState, Gradients, MLPForwardResult, MLPPlan, MLPSaved, Weights
from ..autograd.operands import Casts, GradOperands, GradScatter, NeedsGrad, Pair, column_sums
from ..autograd.recipe import Operand, Recipe
from ..casts.requantize import keeps_values, requantize_columns
from ..errors import refuse
from ..formats.cast_spec import Cast
from ..formats.stochastic import Stochastic
from ..grouped import Routing
from ..grouped.routing import combine_rows, permute_rows
from . import underflows
from .dispatch import Exchange, ExpertPlace
from .wire import cast_rows, unpack_rows


class ExpertParallelPlan(NamedTuple):
    """Casts, exchanges and products of one call of a rank's experts. The fields after `messages` are `MLPPlan`'s.

    messages: of tokens that were cast already (`wire.py`), else None: x is cast.
    Rows are counted twice: this rank's tokens have T * k rows, sorted by expert; its experts have R rows of all ranks.
    """

    exchange: Exchange
    place: ExpertPlace
    messages: Tensor | None
    recipe: Recipe
    roundings: tuple[Stochastic | None, Stochastic | None]
    needs: tuple[NeedsGrad, NeedsGrad]
    dtype: torch.dtype

    def forward(
        self, x: Tensor, weights: Weights, biases: Biases, call_state: CallState, routing: Routing | None
    ) -> MLPForwardResult:
        """Rows [T * k, D] of tokens x [T, K], and what the backward needs of the R rows."""
        assert routing is not None
        tokens, _ = routing.permutation
        cast = cast_rows(x, self._spec("fprop_x", x, routing)) if self.messages is None else self.messages
        x_pair = self._received(cast.index_select(0, tokens), x, "fprop_x", "wgrad_x" if self.needs[0].weight else None)
        result = self._local.forward(x, weights, biases, (x_pair, *call_state[1:]), Routing(self._offs))
        return result._replace(y=self._returned(result.y))

    def backward(
        self, grad: Tensor, saved: MLPSaved, main_grads: Biases, scatter: GradScatter | None = None
    ) -> Gradients:
        """Gradients from grad [T * k, D] of rows, or with `scatter` from grad [T, D] of tokens. That of x is [T * k, K]
        by rows of tokens, those of parameters are of this rank's experts."""
        routing, needs = saved.routing, self.needs[1]
        assert routing is not None
        rows = grad if scatter is None else permute_rows(grad, *routing.permutation, saved.gate_weights)
        row, col = self._received(
            cast_rows(rows, self._spec("dgrad_dy", rows, routing)),
            rows,
            "dgrad_dy",
            "wgrad_dy" if needs.weight else None,
        )
        total = None
        if needs.bias:  # sums of codes would have their rounding: partial sums travel in fp64
            total = self.place.sum_at_owners(column_sums(rows.double(), routing.offs)).float()
        given = GradOperands(row if needs.x else None, col, total)
        found = self._local.backward(rows, saved._replace(routing=Routing(self._offs)), main_grads, given=given)
        return found if found.x is None else found._replace(x=self._returned(found.x))

    @property
    def _local(self) -> MLPPlan:
        return MLPPlan(*self[3:])

    @property
    def _offs(self) -> Tensor:
        return self.exchange.routing.offs

    def _spec(self, role: str, like: Tensor, routing: Routing) -> Cast:
        return Casts(self.recipe, None, routing).quantized_spec(role, like)

    def _received(self, messages: Tensor, like: Tensor, row: str, col: str | None) -> Pair:
        """Operands of the R rows that this rank's experts get for messages [T * k, bytes], sorted by expert."""
        arrived = self.exchange.to_experts(messages)
        routing = self.exchange.routing  # a dispatcher may know it only now
        return operands_of_rows(arrived, routing, self.recipe, like, row, col)

    def _returned(self, y: Tensor) -> Tensor:
        """Rows [R, N] sorted by expert -> rows [T * k, N] at the ranks of their tokens."""
        _, rows = self.exchange.routing.permutation
        return self.exchange.to_tokens(combine_rows(y, rows, None))


def operands_of_rows(
    messages: Tensor, routing: Routing, recipe: Recipe, like: Tensor, row: str, col: str | None
) -> Pair:
    """Row operand, and for a role `col` column operand, of messages that a routing sorts by expert.  like: a tensor
    with the features of the rows."""
    casts = Casts(recipe, None, routing)
    tokens, _ = routing.permutation
    got = unpack_rows(messages, casts.quantized_spec(row, like).plan, like.shape[-1], tokens)
    if col is None:
        return got, None
    # above bf16's own range, it holds every value of the formats that `check_low` admits
    columns = requantize_columns(got, casts.quantized_spec(col, like), routing.offs, torch.bfloat16)
    underflows.record(got, columns, routing.offs)
    return got, columns


def check_low(recipe: Recipe) -> None:
    """Raise unless weight gradients of a recipe are those of one process when its rows travel as codes."""
    reason = reason_against_low(recipe)
    if reason is not None:
        refuse(
            f'payload="low" for recipe {recipe.name!r}',
            rule="columns of wgrad are made from the codes of rows, which keeps values only with 8-bit elements and "
            f"scales that are powers of two: {reason}",
            fix="use the recipe 'fp8_blockwise_pow2', 'mxfp8' or 'mxfp8_128x128', or payload=\"bf16\"",
        )


def reason_against_low(recipe: Recipe) -> str | None:
    """Why rows of a recipe cannot travel as codes; None if they can."""
    if recipe.since or recipe.until:
        return "this one leaves products unquantized at some steps"
    for row, col in (("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy")):
        pair = recipe.operand(row), recipe.operand(col)
        for role, operand in zip((row, col), pair, strict=True):
            if operand is None:
                return f"{role} is unquantized"
            if not _keeps_values(operand):
                return f"{role} is cast to {operand}"
        if len({each.format for each in pair if each is not None}) > 1:
            return f"{row} and {col} are cast to {pair[0]} and {pair[1]}"
    return None


def _keeps_values(operand: Operand) -> bool:
    rounds_to_nearest = operand.hadamard is False and not operand.stochastic
    return rounds_to_nearest and keeps_values(operand.format, operand.scale_rule)
