"""Routing against plain loops: the order of rows, permute and combine exactly, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import blockscale as bs
from blockscale.errors import DtypeError, OptionError, ShapeError
from blockscale.grouped import routing as moves
from support.products import assert_same_bits, gaussian

COUNTS = [(0, 4, 2), (1, 1, 1), (1, 8, 8), (5, 3, 1), (37, 4, 2), (37, 16, 3), (64, 5, 4), (33, 9, 5)]
COUNTS += [(29, 8, 6), (29, 8, 7), (40, 64, 8)]


def scores_of(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))


def by_loop(experts: list[list[int]], count: int) -> tuple[list[int], list[int], list[list[int]]]:
    """offs, tokens and rows: experts one after the other, each with its tokens in their order."""
    ends: list[int] = []
    tokens: list[int] = []
    rows = [[-1] * len(each) for each in experts]
    for expert in range(count + 1):  # the last number is no expert
        for token, chosen in enumerate(experts):
            for slot, each in enumerate(chosen):
                if each == expert:
                    rows[token][slot] = len(tokens)
                    tokens.append(token)
        if expert < count:
            ends.append(len(tokens))
    return ends, tokens, rows


@pytest.mark.parametrize(("tokens", "experts", "k"), COUNTS)
def test_routing_is_that_of_a_loop(tokens: int, experts: int, k: int):
    scores = scores_of(tokens, experts)
    routing, weights = bs.route(scores, k)
    best = scores.topk(k, dim=-1)
    ends, order, rows = by_loop(best.indices.tolist(), experts)
    assert routing.offs.tolist() == ends
    assert routing.tokens.tolist() == order
    assert routing.rows.tolist() == rows
    assert {each.dtype for each in (routing.offs, routing.tokens, routing.rows)} == {torch.int32}
    assert routing.load().sum() == tokens * k
    assert_same_bits(weights, best.values)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_patterns_of_experts(dtype: torch.dtype):
    """All tokens to one expert, none to every other, one row each, and slots without an expert."""
    patterns = ([[3]] * 9, [[0, 2], [4, 2], [0, 4]], [[e] for e in range(5)], [[5, 1], [5, 5], [0, 5]])
    for experts in patterns:
        routing = bs.sort_by_expert(torch.tensor(experts, dtype=dtype), 5)
        found = routing.offs.tolist(), routing.tokens.tolist(), routing.rows.tolist()
        assert found == by_loop(experts, 5)


def test_a_bias_changes_the_selection_and_no_gate_weight():
    scores = scores_of(50, 6)
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0, -5.0, 0.0])
    routing, weights = bs.route(scores, 2, bias=bias)
    load = routing.load().tolist()
    assert (load[1], load[4]) == (50, 0)
    assert_same_bits(weights[:, 0], scores[:, 1])
    _, normal = bs.route(scores, 2, normalize=True, scale=2.5)
    values = scores.topk(2).values
    assert_same_bits(normal, values / values.sum(-1, keepdim=True) * 2.5)


def loop_of_combine(y: Tensor, rows: list[list[int]], weights: Tensor | None) -> Tensor:
    """Token by token, slot by slot, in fp32, rounded once."""
    out = torch.empty(len(rows), y.shape[1], dtype=y.dtype)
    for token, places in enumerate(rows):
        total = None
        for slot, row in enumerate(places):
            term = y[row].float() if weights is None else y[row].float() * weights[token, slot]
            total = term if total is None else total + term
        assert total is not None
        out[token] = total.to(y.dtype)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "experts", "k"), COUNTS)
def test_permute_and_combine_are_those_of_a_loop(tokens: int, experts: int, k: int, dtype: torch.dtype):
    routing, weights = bs.route(scores_of(tokens, experts), k)
    x = gaussian(tokens, 24, seed=1).to(dtype).requires_grad_()
    permuted = bs.permute(x, routing)
    assert_same_bits(permuted, x[routing.tokens.long()])
    weights = weights.detach().requires_grad_()
    y = gaussian(tokens * k, 24, seed=2).to(dtype).requires_grad_()
    out = bs.combine(y, routing, weights)
    rows = routing.rows.tolist()
    assert_same_bits(out.detach(), loop_of_combine(y.detach(), rows, weights.detach()))

    # backwards
    grad = gaussian(tokens * k, 24, seed=3).to(dtype)
    permuted.backward(grad)
    assert_same_bits(x.grad, loop_of_combine(grad, rows, None))
    grad = gaussian(tokens, 24, seed=4).to(dtype)
    out.backward(grad)
    want = torch.empty_like(y)
    dots = torch.empty(tokens, k)
    for token, places in enumerate(rows):
        for slot, row in enumerate(places):
            want[row] = (grad[token].float() * weights[token, slot]).to(dtype)
            dots[token, slot] = (y[row].float() * grad[token].float()).sum()
    assert_same_bits(y.grad, want)
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32
    torch.testing.assert_close(weights.grad, dots, rtol=1e-5, atol=1e-5)


def test_gradients_and_their_gradients_in_fp64():
    scores = scores_of(7, 5).double().requires_grad_()
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)

    def through(x: Tensor, scores: Tensor) -> Tensor:
        routing, weights = bs.route(scores, 3, normalize=True)
        return bs.combine(bs.permute(x, routing).square(), routing, weights)

    assert gradcheck(through, (x, scores))
    assert gradgradcheck(through, (x, scores))


def test_combine_without_gate_weights_is_a_sum():
    routing, _ = bs.route(scores_of(6, 4), 2)
    y = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    out = bs.combine(y, routing)
    torch.testing.assert_close(out, y[routing.rows.long()].sum(1))
    assert gradcheck(lambda y: bs.combine(y, routing), (y,))


def test_permute_and_combine_undo_each_other():
    routing, _ = bs.route(scores_of(31, 6), 1)
    x = gaussian(31, 8)
    assert_same_bits(bs.combine(bs.permute(x, routing), routing), x)


@pytest.mark.slow
def test_compiled_bits_are_eager_ones_for_any_number_of_tokens():
    torch._dynamo.reset()

    def through(x: Tensor, scores: Tensor) -> Tensor:
        routing, weights = bs.route(scores, 2, normalize=True)
        return bs.combine(bs.permute(x, routing), routing, weights)

    compiled = torch.compile(through, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (9, 30, 64):
        found = []
        for call in (through, compiled):
            x, scores = gaussian(tokens, 16).requires_grad_(), scores_of(tokens, 5).requires_grad_()
            y = call(x, scores)
            y.backward(gaussian(tokens, 16, seed=1))
            found.append([y.detach(), x.grad, scores.grad])
        assert_same_bits(*found)


def test_the_operators_read_no_value():
    """Their bodies run on meta tensors: reading a value would raise."""
    sort, permute, combine, dots = (
        getattr(moves, name).__wrapped__ for name in ("_sort", "permute_rows", "combine_rows", "combine_dots")
    )
    with torch.device("meta"):
        offs, tokens, rows = sort(torch.empty(37, 3, dtype=torch.int64), 8)
        assert (offs.shape, tokens.shape, rows.shape) == ((8,), (111,), (37, 3))
        x, y = (torch.empty(count, 16, dtype=torch.bfloat16) for count in (37, 111))
        weights = torch.empty(37, 3)
        assert permute(x, tokens, rows, weights).shape == (111, 16)
        assert combine(y, rows, weights).shape == (37, 16)
        assert dots(y, x, rows).shape == (37, 3)
        with pytest.raises(RuntimeError, match="meta"):  # as it does of one
            weights.max().item()


@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-38, 1e-25])
def test_scores_that_sum_to_zero_give_finite_gate_weights_and_gradients(value: float):
    """They stay as they are, close to zero; other tokens are divided by their sum."""
    scores = torch.full((3, 4), value)
    scores[1] = torch.tensor([0.5, 0.25, 0.125, 0.125])
    scores.requires_grad_()
    _, weights = bs.route(scores, 2, normalize=True, scale=2.0)
    assert_same_bits(weights[1], torch.tensor([0.5, 0.25]) / 0.75 * 2)
    assert_same_bits(weights[[0, 2]], torch.full((2, 2), value) * 2)
    (grad,) = torch.autograd.grad(weights.square().sum() + weights.sum(), scores)
    assert grad.isfinite().all()
    assert grad.abs().max() <= 8


def test_normalized_gate_weights_are_the_quotient_to_the_bit():
    scores = torch.rand(64, 8) * torch.exp2(torch.randint(-40, 4, (64, 1)))
    for source in (scores, -scores, scores.double()):
        _, weights = bs.route(source, 3, normalize=True)
        top = source.gather(-1, torch.topk(source, 3).indices)
        assert_same_bits(weights, top / top.sum(-1, keepdim=True))


def test_nan_and_inf_scores_give_nan_gate_weights():
    _, weights = bs.route(torch.tensor([[torch.nan, 0.0], [torch.inf, 1.0]]), 2, normalize=True)
    assert weights.isnan().any(-1).all()


def test_mistakes():
    routing, weights = bs.route(scores_of(6, 4), 2)
    with pytest.raises(OptionError, match="k=5 of 4 experts"):
        bs.route(scores_of(6, 4), 5)
    with pytest.raises(ShapeError, match="one number for each token and expert"):
        bs.route(scores_of(6, 4)[0], 1)
    with pytest.raises(ShapeError, match="one number for each expert"):
        bs.route(scores_of(6, 4), 1, bias=torch.zeros(3))
    with pytest.raises(ShapeError, match="routing of 6 tokens"):
        bs.permute(torch.zeros(12, 3), routing)
    with pytest.raises(ShapeError, match="routing of 12 rows"):
        bs.combine(torch.zeros(6, 3), routing)
    with pytest.raises(ShapeError, match="each slot of each token has a gate weight"):
        bs.combine(torch.zeros(12, 3), routing, weights[:, :1])
    with pytest.raises(ShapeError, match="experts from 0 to 5 for 4"):
        bs.sort_by_expert(torch.tensor([[0], [5]]), 4)
    with pytest.raises(ShapeError, match="experts from -1"):
        bs.sort_by_expert(torch.tensor([[0], [-1]]), 4)
    with pytest.raises(DtypeError, match=r"float32"):
        bs.sort_by_expert(torch.zeros(2, 1), 4)
    with pytest.raises(ShapeError, match=r"\[T, k\]"):
        bs.sort_by_expert(torch.zeros(2, dtype=torch.int64), 4)
    with pytest.raises(OptionError, match="at least one expert"):
        bs.sort_by_expert(torch.zeros(2, 1, dtype=torch.int64), 0)
