"""Calls of experts that are divided among ranks: what `MoE`'s and Transformers' experts have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..autograd.dtensor import unchanged_until_backward
from ..autograd.mlp import fused_mlp
from ..autograd.mlp_plan import Biases, Weights
from ..autograd.operands import Pair
from ..autograd.recipe import Recipe
from ..autograd.routing import combine, permute
from ..errors import ShapeError, refuse
from ..formats.checks import check_tensor
from ..formats.stochastic import Stochastic
from ..grouped import Routing
from .agreement import check_same_call
from .collectives import ranks_of
from .dispatch import CallFacts, Dispatcher, Exchange, ExpertPlace
from .expert_plan import ExpertParallelPlan


class LowCall(NamedTuple):
    """What a call needs whose rows travel as codes: weights and biases of this rank's experts, and shared casts."""

    weights: Weights
    biases: Biases
    recipe: Recipe
    operands: tuple[Pair | None, Pair | None]


class DividedExperts(torch.nn.Module):
    """Experts of which every rank has its own, and to which rows come from all ranks."""

    place: ExpertPlace
    dispatcher: Dispatcher

    def over_ranks(
        self, x: Tensor, routing: Routing, gate_weights: Tensor | None, run: Callable[[Tensor, Routing], Tensor]
    ) -> Tensor:
        """Rows [T * k, N] by expert, or with gate weights [T, k] tokens [T, N], of tokens x that travel in their
        dtype.  run: received rows and their routing to this rank's experts -> rows by expert. Collective."""
        rows = self.rows_over_ranks(permute(x, routing), self.exchange(x, routing, gate_weights), run)
        return rows if gate_weights is None else combine(rows, routing, gate_weights)

    def rows_over_ranks(self, rows: Tensor, exchange: Exchange, run: Callable[[Tensor, Routing], Tensor]) -> Tensor:
        """Rows [T * k, N] by expert of rows [T * k, N] sorted by expert; run as for `over_ranks`. Collective."""
        arrived: Any = _ToExperts.apply(rows, exchange)
        found: Any = _ToTokens.apply(combine(run(arrived, exchange.routing), exchange.routing), exchange)
        return self._watch(found)

    def over_ranks_low(
        self, x: Tensor, routing: Routing, gate_weights: Tensor | None, call: LowCall, messages: Tensor | None = None
    ) -> Tensor:
        """As `over_ranks`, with codes: one function, since codes have no gradients of their own. Collective.  messages:
        of tokens that were cast already; no value of x is then read."""
        exchange = self.exchange(x, routing, gate_weights)
        plan = functools.partial(ExpertParallelPlan, exchange, self.place, messages)
        weights, biases, recipe, operands = call
        roundings: tuple[Stochastic | None, Stochastic | None] = (None, None)
        watched = self._watch(x)  # not the result: FSDP warns of layers that return views
        y = fused_mlp(watched, weights, biases, recipe, roundings, operands, routing, gate_weights, plan)
        return y if watched is not x else self._watch(y)

    def _watch(self, y: Tensor) -> Tensor:
        """y, whose backward raises if a parameter has changed since. A view, or y itself if it needs no gradient."""
        return unchanged_until_backward(y, *(each for each in self.parameters() if isinstance(each, DTensor)))

    def exchange(self, x: Tensor, routing: Routing, gate_weights: Tensor | None) -> Exchange:
        """The exchange of a call with tokens x. Collective."""
        check_same_call(ranks_of(self.place.group), x.device, "experts of several ranks", self.place.experts)
        return self.dispatcher.exchange(routing, self.place, self._facts(x, routing, gate_weights))

    def _facts(self, x: Tensor, routing: Routing, gate_weights: Tensor | None) -> CallFacts:
        _, rows = routing.permutation
        grads = torch.is_grad_enabled()
        needed = (
            grads and x.requires_grad,
            *(grads and each.requires_grad for each in self.parameters()),
            grads and gate_weights is not None and gate_weights.requires_grad,
        )
        return CallFacts(x.shape[1], rows.shape[1], str(x.dtype).removeprefix("torch."), needed)


def check_routed(x: Tensor, routing: Routing, features: int, experts: int) -> tuple[Tensor, Tensor]:
    """The permutation of a routing. Raises unless it sends tokens [T, features] to the experts of all ranks."""
    check_tensor(x, "x", "layers")
    if routing.tokens is None or routing.rows is None:
        refuse(
            "the ends of sorted rows for experts of several ranks",
            rule="rows travel by the experts of their tokens, and only a routing has them",
            fix="pass the routing that route or sort_by_expert returned, with tokens in place of rows",
        )
    if x.dim() != 2 or x.shape[1] != features or x.shape[0] != routing.rows.shape[0]:
        refuse(
            f"x {tuple(x.shape)} for a routing of {routing.rows.shape[0]} tokens to experts of {features} features",
            rule="x has a row for each token: [T, features]",
            fix="pass the tokens that were routed",
            error=ShapeError,
        )
    if routing.experts != experts:
        refuse(
            f"a routing to {routing.experts} experts for {experts} of all ranks",
            rule="tokens are routed to the experts of all ranks",
            fix="route with the scores of all experts",
            error=ShapeError,
        )
    return routing.permutation


def check_fused(*, fused: bool, option: str = 'payload="low"', instead: str = 'payload="bf16"') -> None:
    """Raise unless both layers of experts are one function.  option: needs it.  instead: does not."""
    if not fused:
        refuse(
            f"{option} for experts with hooks, with a forward or an activation of their own, or with two recipes",
            rule="rows that travel so go through both layers in one function",
            fix=f"remove hooks and set one recipe, or use {instead}",
        )


def rounding_of_own(rounding: Stochastic | None, place: ExpertPlace) -> Stochastic | None:
    """Stochastic rounding of a rank's experts. Random words are counted by expert of the whole."""
    if rounding is None:
        return None
    return Stochastic(rounding.state, rounding.name, rounding.origin, place.span().start)


def own(parameter: Tensor) -> Tensor:
    """This rank's experts of a parameter."""
    assert isinstance(parameter, DTensor)
    if getattr(parameter, "main_grad", None) is not None:
        refuse(
            "weight.main_grad of a weight that is a DTensor",
            rule="gradients of sharded weights go to weight.grad",
            fix="delete weight.main_grad",
        )
    return parameter.to_local()


class _ToExperts(torch.autograd.Function):
    """Rows to the ranks of their experts; the backward brings gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_experts(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.to_tokens(grad), None


class _ToTokens(torch.autograd.Function):
    """Rows back to the ranks of their tokens; the backward takes gradients to the experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.to_experts(grad), None
