"""SQNR of a layer's output, dX and dW against the exact layer in fp64.

Exact are some rows of y and dX, and some features of dW. A layer of experts is compared on some of its experts, each
as the dense layer that it is; a mixture as a whole, with the router's choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .gemms import ROWS, spread, sqnr_db
from .grouped import pick_groups
from .layers import Batch, Results

# compared experts of a grouped linear and of SwiGLU experts; compared rows and hidden features of a SwiGLU
LINEARS, UNITS, HIDDEN = 8, 4, 2048
Pairs = list[tuple[Tensor, Tensor]]


def judge_linear(batch: Batch, results: Results) -> tuple[float, ...]:
    """SQNR of y, dX and dW of a linear layer, dense or grouped; of y alone after a forward."""

    def pairs(expert: Any, start: int, end: int) -> Pairs:
        (weight,) = (each[expert].double() for each in batch.built.plain.parameters())
        x, dy = batch.x[start:end], batch.dy[start:end]
        rows, features = (spread(count, ROWS, x.device) for count in (end - start, weight.shape[0]))
        y = (x[rows].double() @ weight.mT, results.y[start + rows])
        if not results.dw:
            return [y]
        dx = (dy[rows].double() @ weight, results.dx[start + rows])
        return [y, dx, (dy[:, features].double().mT @ x.double(), results.dw[0][expert][features])]

    with torch.no_grad():
        return _decibels([pairs(*span) for span in _spans(batch, LINEARS)])


def judge_swiglu(batch: Batch, results: Results) -> tuple[float, float, float]:
    """SQNR of y, dX and the worst of dW of gate, up and down, of an MLP or of experts.

    Gate and up are one weight or two; their gradients are concatenated in this order.
    """

    def weights(tensors: Sequence[Tensor], expert: Any) -> tuple[Tensor, Tensor, Tensor]:
        *gate_up, down = (tensor[expert] for tensor in tensors)
        gate, up = torch.cat(gate_up).chunk(2)
        return gate, up, down

    def pairs(expert: Any, start: int, end: int) -> Pairs:
        gate, up, down = weights(list(batch.built.plain.parameters()), expert)
        x, dy = batch.x[start:end], batch.dy[start:end]
        rows, some = (spread(count, HIDDEN, x.device) for count in (end - start, gate.shape[0]))
        y, dx, *_ = _exact_swiglu(x[rows], dy[rows], gate, up, down)
        _, _, *dws = _exact_swiglu(x, dy, gate[some], up[some], down[:, some])
        dgate, dup, ddown = weights(results.dw, expert)
        found = results.y[start + rows], results.dx[start + rows], dgate[some], dup[some], ddown[:, some]
        return list(zip((y, dx, *dws), found, strict=True))

    y_db, dx_db, *dw_db = _decibels([pairs(*span) for span in _spans(batch, UNITS)])
    return y_db, dx_db, min(dw_db)


def judge_mixture(batch: Batch, results: Results) -> tuple[float, float, float]:
    """SQNR of y, dX and the worst dW of a mixture."""
    plain: Any = batch.built.plain
    with torch.no_grad():
        chosen = torch.topk(plain.router(batch.x), plain.top_k, dim=-1).indices
    x, router, gate_up, down = (_leaf(each) for each in (batch.x, *plain.parameters()))
    weights = functional.linear(x, router).softmax(-1).gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = gate_up[expert].chunk(2)
        rows = _swiglu(x[tokens], gate, up, down[expert])
        y = y.index_add(0, tokens, weights[tokens, slots, None] * rows)
    dx, *dws = torch.autograd.grad(y, (x, router, gate_up, down), batch.dy.double())
    worst = min(sqnr_db(dw, mine) for dw, mine in zip(dws, results.dw, strict=True))
    return sqnr_db(y.detach(), results.y), sqnr_db(dx, results.dx), worst


def _exact_swiglu(x: Tensor, dy: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """y, dX and the dWs of a SwiGLU in fp64."""
    leaves = [_leaf(tensor) for tensor in (x, gate, up, down)]
    y = _swiglu(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def _spans(batch: Batch, most: int) -> list[tuple[Any, int, int]]:
    """(index of its weights, first row, end row) of some experts that have rows; of a dense layer all rows."""
    sizes: tuple[int, ...] | None = getattr(batch.built.plain, "sizes", None)
    if sizes is None:
        return [(..., 0, batch.x.shape[0])]
    ends = list(itertools.accumulate(sizes))
    return [(group, ends[group] - sizes[group], ends[group]) for group in pick_groups(sizes, most)]


def _decibels(pairs: Sequence[Pairs]) -> tuple[float, ...]:
    """SQNR of each output over all spans.  pairs: (exact, found) of each output, span by span."""
    return tuple(
        sqnr_db(*(torch.cat([pair[side].flatten() for pair in output]) for side in (0, 1)))
        for output in zip(*pairs, strict=True)
    )
