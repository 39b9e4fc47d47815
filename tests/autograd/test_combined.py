"""Experts with gate weights (`grouped_swiglu_mlp(..., gate_weights=...)`): the bytes of a separate `combine`, forward
and backward, and no row gradients in high precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.autograd import get_recipe, grouped_swiglu_mlp
from blockscale.errors import OptionError, ShapeError
from support.grouped_reference import Experts, drawn
from support.helpers import first_of
from support.linear_reference import Calls
from support.products import assert_same_bits, gaussian

QUANTIZED = ["fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
TOKENS, SLOTS, COUNT = 50, 3, 5
ODD = (72, 104, 56)


class Mixture:
    """Tokens, scores and experts of one call, made anew with the same values for every way to compute it."""

    def __init__(self, sizes: tuple[int, int, int] = ODD, *, bias: bool = False, device: torch.device | str = "cpu"):
        self.experts = Experts((TOKENS * SLOTS, *(0,) * (COUNT - 1)), *sizes, bias=bias, device=device)
        self.x = gaussian(TOKENS, sizes[0], seed=7).to(device).requires_grad_()
        self.scores = torch.rand(TOKENS, COUNT, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        self.dy = gaussian(TOKENS, sizes[2], seed=8).to(device)

    def run(self, recipe: str | bs.Recipe, *, within: bool, backward: bool = True) -> list[Tensor | None]:
        """y and the gradients of all leaves."""
        p, device = self.experts, self.x.device
        spoiled = self.scores - torch.tensor([0, 0, 9.0, 0, 0], device=device)  # an expert without rows
        routing, weights = bs.route(spoiled, SLOTS, normalize=True)
        roundings = drawn(recipe, 0, device), drawn(recipe, 1, device)
        named = {"recipe": recipe, "roundings": roundings, "gate_weights": weights if within else None}
        y = grouped_swiglu_mlp(self.x, p.gate_up, p.down, routing, *p.biases, **named)
        y = y if within else bs.combine(y, routing, weights)
        if backward:
            y.backward(self.dy)
        return [y.detach(), self.x.grad, self.scores.grad, *p.grads()[1:]]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", [*QUANTIZED, "bf16", "mxfp8_wgrad_bf16"])
def test_bytes_are_those_of_combine(name: str, bias: bool):
    found = [Mixture(bias=bias).run(name, within=within) for within in (True, False)]
    assert found[0][2] is not None
    assert found[0][2].count_nonzero() > TOKENS
    assert_same_bits(*found)


@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_do_not_depend_on_when_operands_are_cast(name: str):
    recipe = get_recipe(name)
    assert_same_bits(Mixture().run(recipe.recomputed(), within=True), Mixture().run(recipe, within=True))


@pytest.mark.parametrize("frozen", ["x", "scores", "gate_up", "down", "experts", "all but scores"])
def test_frozen_leaves(frozen: str):
    found = []
    for within in (True, False):
        m = Mixture()
        leaves = {"x": m.x, "scores": m.scores, "gate_up": m.experts.gate_up, "down": m.experts.down}
        chosen = {"experts": ["gate_up", "down"], "all but scores": ["x", "gate_up", "down"]}.get(frozen, [frozen])
        for name in chosen:
            leaves[name].requires_grad_(False)
        found.append(m.run("fp8_blockwise", within=within))
    assert_same_bits(*found)


@pytest.mark.parametrize("name", ["fp8_blockwise", "bf16"])
def test_without_gradients(name: str):
    with torch.no_grad():
        found = [Mixture().run(name, within=within, backward=False)[0] for within in (True, False)]
    assert_same_bits(*found)


def test_rows_are_not_written_in_high_precision():
    m = Mixture()
    with Calls() as calls:
        m.run("fp8_blockwise", within=True)
    assert "permute_rows" not in calls.found
    # x, then the gradient
    assert calls.found["permute_quantize_both"] == 2
    # the result, and the gradient of tokens
    assert calls.found["combine_rows"] == 2
    assert calls.found["combine_dots"] == 1
    with Calls() as calls:
        Mixture().run(get_recipe("fp8_blockwise").recomputed(), within=True)
    assert "permute_rows" not in calls.found
    assert (calls.found["quantize_permute"], calls.found["permute_quantize_columns"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["fp8_blockwise", "nvfp4"], lambda name: name == "fp8_blockwise"))
def test_compiled_bytes_are_eager_ones(name: str):
    torch._dynamo.reset()
    m, other = Mixture(), Mixture()
    p, roundings = m.experts, (drawn(name, 0), drawn(name, 1))
    routing, _ = bs.route(m.scores, SLOTS)

    def call(x: Tensor, gate_up: Tensor, down: Tensor, scores: Tensor) -> Tensor:
        weights = scores[:, :SLOTS].sigmoid()
        return grouped_swiglu_mlp(x, gate_up, down, routing, recipe=name, roundings=roundings, gate_weights=weights)

    y = torch.compile(call, backend="aot_eager", fullgraph=True)(m.x, p.gate_up, p.down, m.scores)
    y.backward(m.dy)
    q = other.experts
    z = call(other.x, q.gate_up, q.down, other.scores)
    z.backward(other.dy)
    grads = [each.grad for each in (m.x, p.gate_up, p.down, m.scores)]
    assert_same_bits(
        [y.detach(), *grads], [z.detach(), *(each.grad for each in (other.x, q.gate_up, q.down, other.scores))]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*QUANTIZED, "bf16"])
def test_bytes_are_those_of_combine_on_a_gpu(name: str):
    """Several times: the third call of these shapes is replayed, without stochastic rounding."""
    sizes, known = (256, 128, 256), Mixture((256, 128, 256), device="cuda").run(name, within=False)
    for recipe in (get_recipe(name), get_recipe(name).recomputed()):
        for _ in range(4):
            assert_same_bits(Mixture(sizes, device="cuda").run(recipe, within=True), known)


def test_mistakes():
    m = Mixture()
    p = m.experts
    routing, weights = bs.route(m.scores, SLOTS)
    with pytest.raises(OptionError, match="only a routing has the token of each row"):
        grouped_swiglu_mlp(p.x, p.gate_up, p.down, routing.offs, gate_weights=weights)
    with pytest.raises(ShapeError, match="each slot of each token has a gate weight"):
        grouped_swiglu_mlp(m.x, p.gate_up, p.down, routing, gate_weights=weights[:, :1])
