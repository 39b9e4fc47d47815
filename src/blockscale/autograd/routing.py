"""Routing with gradients: from scores to experts, tokens to the rows of experts, and rows back to tokens.

    routing, gate_weights = route(scores, k)
    y = combine(experts(permute(x, routing), routing.offs), routing, gate_weights)

Everything is summed in a fixed order, so forward and backward give the same bits on every run. There is no host sync.
Selection has no gradient: a router learns through the gate weights of the experts that were chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError, refuse
from ..formats.checks import check_flag, check_int, check_number, check_tensor, in_words
from ..grouped import Routing, sort_by_expert
from ..grouped.routing import combine_dots, combine_rows, permute_rows
from .transforms import ROUTING, wants_gradient

_NO_SUM = 1e-20  # above it 1 / total**2, a factor of gradients, is finite


def route(
    scores: Tensor, k: int, *, bias: Tensor | None = None, normalize: bool = False, scale: float = 1.0
) -> tuple[Routing, Tensor]:
    """Send each token to the k experts with the highest scores [T, E]: the routing, and fp32 gate weights [T, k].

    bias: [E], added to the scores for the selection only, not to the gate weights.
    normalize: gate weights of a token are divided by their sum. A sum below 1e-20 leaves them as they are, so scores of
    zero give gate weights of zero and finite gradients.  scale: factor of all gate weights, applied last.

    >>> scores = torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1]])
    >>> routing, gate_weights = route(scores, 2)
    >>> routing.offs.tolist(), [[round(w, 2) for w in row] for row in gate_weights.tolist()]
    ([1, 3, 4], [[0.7, 0.2], [0.6, 0.3]])
    """
    _check_scores(scores, k, bias)
    check_flag(normalize, "normalize")
    check_number(scale, "scale", "it is a factor of all gate_weights", "pass scale=1.0")
    biased = scores.detach() if bias is None else scores.detach() + bias
    experts = torch.topk(biased, k, dim=-1).indices
    gate_weights = scores.gather(-1, experts).to(torch.promote_types(scores.dtype, torch.float32))
    if normalize:
        total = gate_weights.sum(-1, keepdim=True)
        # the divisor is 1 where the sum vanishes
        gate_weights = gate_weights / (total + (total.abs() < _NO_SUM))
    return sort_by_expert(experts, scores.shape[-1]), gate_weights if scale == 1.0 else gate_weights * float(scale)


def permute(x: Tensor, routing: Routing) -> Tensor:
    """Rows [T * k, D] of tokens [T, D], sorted by expert.

    >>> routing, _ = route(torch.tensor([[0.1, 0.7], [0.6, 0.3]]), 1)
    >>> permute(torch.tensor([[1.0], [2.0]]), routing).flatten().tolist()
    [2.0, 1.0]
    """
    tokens, rows = _permutation(routing)
    _check_rows(x, rows.shape[0], "tokens")
    if not wants_gradient(x, subject=ROUTING):
        return permute_rows(x, tokens, rows, None)
    return _Permute.apply(x, None, tokens, rows)  # pyright: ignore[reportReturnType]


def combine(y: Tensor, routing: Routing, gate_weights: Tensor | None = None) -> Tensor:
    """Tokens [T, D] from the rows [T * k, D] of experts: the sum of a token's rows, each times its gate weight [T, k].

    Products and sums are in fp32, slot after slot; the result is rounded once to y's dtype.

    >>> routing, gate_weights = route(torch.tensor([[0.25, 0.75], [0.5, 0.25]]), 2)
    >>> combine(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), routing, gate_weights).flatten().tolist()
    [2.5, 2.0]
    """
    tokens, rows = _permutation(routing)
    _check_rows(y, tokens.shape[0], "rows")
    check_gate_weights(gate_weights, routing)
    if not wants_gradient(y, gate_weights, subject=ROUTING):
        return combine_rows(y, rows, gate_weights)
    return _Combine.apply(y, gate_weights, tokens, rows)  # pyright: ignore[reportReturnType]


# The backward of each of these three functions uses the other two, so they can be differentiated any number of times.


class _Permute(torch.autograd.Function):
    """Gather of rows, times their gate weights; the backward sums the rows of a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weights: Tensor | None, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x if _requires_grad(gate_weights) else None, gate_weights, tokens, rows)
        return permute_rows(x, tokens, rows, gate_weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate_weights, tokens, rows = ctx.saved_tensors
        dx = _Combine.apply(grad, gate_weights, tokens, rows) if ctx.needs_input_grad[0] else None
        dw = _Dots.apply(grad, x, tokens, rows).to(gate_weights.dtype) if ctx.needs_input_grad[1] else None  # pyright: ignore[reportOptionalMemberAccess]
        return dx, dw, None, None


class _Combine(torch.autograd.Function):
    """Weighted sum of a token's rows. In the backward a row gets its token's gradient times its gate weight, and a gate
    weight the dot product of the row and that gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate_weights: Tensor | None, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(y if _requires_grad(gate_weights) else None, gate_weights, tokens, rows)
        return combine_rows(y, rows, gate_weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, gate_weights, tokens, rows = ctx.saved_tensors
        dy = _Permute.apply(grad, gate_weights, tokens, rows) if ctx.needs_input_grad[0] else None
        dw = _Dots.apply(y, grad, tokens, rows).to(gate_weights.dtype) if ctx.needs_input_grad[1] else None  # pyright: ignore[reportOptionalMemberAccess]
        return dy, dw, None, None


class _Dots(torch.autograd.Function):
    """Dot product of each row [T * k, D] with the vector of its token [T, D]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(y, x, tokens, rows)
        return combine_dots(y, x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, x, tokens, rows = ctx.saved_tensors
        dy = _Permute.apply(x, grad, tokens, rows) if ctx.needs_input_grad[0] else None
        dx = _Combine.apply(y, grad, tokens, rows) if ctx.needs_input_grad[1] else None
        return dy, dx, None, None


def _requires_grad(gate_weights: Tensor | None) -> bool:
    return gate_weights is not None and gate_weights.requires_grad


def _permutation(routing: object) -> tuple[Tensor, Tensor]:
    """tokens and rows of a routing. Raises for anything else, and for a routing of rows that are sorted already."""
    if isinstance(routing, Routing) and routing.tokens is not None:
        return routing.permutation
    refuse(
        "a routing without tokens" if isinstance(routing, Routing) else f"routing is {in_words(routing)}",
        rule="a Routing maps tokens to the rows of experts",
        fix="pass what route or sort_by_expert returned",
        error=DtypeError,
    )


def _check_scores(scores: Tensor, k: int, bias: Tensor | None) -> None:
    check_tensor(scores, "scores", "routers")
    if scores.dim() != 2 or not scores.is_floating_point():
        refuse(
            f"scores are {scores.dtype} {tuple(scores.shape)}",
            rule="a router gives one number for each token and expert: [T, E]",
            fix="flatten the tokens first",
            error=ShapeError,
        )
    check_int(k, "k", "it is a number of experts", least=-(2**63))
    if not 1 <= k <= scores.shape[1]:
        rule = "a token goes to at least one expert, and to each no more than once"
        refuse(f"k={k} of {scores.shape[1]} experts", rule, fix="pass k between the two")
    if bias is not None:
        check_tensor(bias, "bias", "routers")
    if bias is not None and bias.shape != scores.shape[1:]:
        rule = "the selection bias has one number for each expert"
        refuse(f"bias {tuple(bias.shape)} for {scores.shape[1]} experts", rule, fix="pass [E]", error=ShapeError)


def check_gate_weights(gate_weights: Tensor | None, routing: Routing) -> None:
    """Raise unless there is a gate weight for each slot of each token."""
    if gate_weights is None:
        return
    try:
        fits = gate_weights.shape == routing.permutation[1].shape
    except (AttributeError, TypeError, RuntimeError):
        fits = False
    if not fits:
        check_tensor(gate_weights, "gate_weights", "routings")
        refuse(
            f"gate_weights {tuple(gate_weights.shape)} for {tuple(routing.permutation[1].shape)} slots",
            rule="each slot of each token has a gate weight: [T, k]",
            fix="pass the gate_weights that route returned",
            error=ShapeError,
        )


def _check_rows(x: Tensor, count: int, what: str) -> None:
    check_tensor(x, "x" if what == "tokens" else "y", "routings")
    if x.dim() != 2 or x.shape[0] != count:
        refuse(
            f"a tensor {tuple(x.shape)} for a routing of {count} {what}",
            rule=f"it has a row for each of the {what}",
            fix="permute takes tokens [T, D], combine the rows [T * k, D] of experts",
            error=ShapeError,
        )
