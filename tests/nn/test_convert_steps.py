"""Converted models over steps: ticks of stochastic rounding, and products that change at a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import blockscale as bs
from blockscale.errors import OptionError
from blockscale.nn import Linear
from support.toy_models import DIM, TOKENS, everything, gradients, made, small


def test_layer_names_select_random_streams_of_one_state():
    model = made()
    bs.quantize_(model, "nvfp4", everything, seed=3)
    states = {id(module.rng) for module in model.modules() if isinstance(module, Linear)}
    assert len(states) == 1
    up, gate = model.layers[0].mlp.up_proj, model.layers[0].mlp.gate_proj
    gate.weight.data.copy_(up.weight)
    x, grad = torch.randn(8, DIM, requires_grad=True), torch.randn(8, 2 * DIM)

    def dw(layer: nn.Linear) -> Tensor:
        return torch.autograd.grad(layer(x), layer.weight, grad)[0]

    assert torch.equal(dw(up), dw(up))
    assert not torch.equal(dw(up), dw(gate))


@pytest.mark.parametrize("tick", [1.5, 2.0, "3", True, 1 << 63])
def test_a_tick_is_a_whole_number(tick):
    model = small()
    bs.quantize_(model, "nvfp4", everything, seed=3)
    with pytest.raises(OptionError, match=r"tick=.*whole number"):
        bs.advance_(model, tick=tick)
    assert all(module.rng.tolist() == [3, 0] for module in model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize("compiled", [False, True])
def test_advance_changes_random_numbers_and_each_state_once(compiled):
    torch._dynamo.reset()
    model = small()
    bs.quantize_(model, "nvfp4", everything, seed=3)
    counter = CompileCounter()
    called = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
    first, again = gradients(called), gradients(called)
    bs.advance_(called)
    assert all(module.rng.tolist() == [3, 1] for module in model.modules() if isinstance(module, Linear))
    second = gradients(called)
    bs.advance_(called, tick=0)
    third = gradients(called)
    for name in first:
        assert torch.equal(first[name], again[name]), name
        assert torch.equal(first[name], third[name]), name
    assert counter.frame_count == int(compiled), "nothing compiles again"
    changed = [name for name in first if not torch.equal(first[name], second[name])]
    assert len(changed) == 4, changed


def test_separate_states_advance_alike():
    model = made()
    bs.quantize_(model, "nvfp4", everything)
    for module in list(model.modules())[::2]:
        if isinstance(module, Linear):
            module.rng = module.rng.clone()  # as a move to another device does
    bs.advance_(model)
    bs.advance_(model)
    assert all(module.rng.tolist() == [0, 2] for module in model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize("compiled", [False, True])
def test_products_change_at_their_step(compiled):
    torch._dynamo.reset()
    model, plain = small(), small()
    recipe = bs.get_recipe("mxfp8").replace(until={"fprop": 10})
    bs.quantize_(model, recipe)
    called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    before = called(TOKENS)
    bs.set_step_(called, 9)
    assert model[1].up_proj.recipe_now is recipe
    assert torch.equal(called(TOKENS), before)
    bs.set_step_(called, 10)
    now = model[1].up_proj.recipe_now
    assert torch.equal(called(TOKENS), plain(TOKENS))
    bs.set_step_(called, 11)
    assert model[1].gate_proj.recipe_now is now, "an equal recipe is not replaced, or callers compile again"
    bs.set_step_(called, 0)
    assert torch.equal(called(TOKENS), before)
