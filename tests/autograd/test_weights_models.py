"""Shared weights in copies, ties, wrappers and MLPs, and under recipes that change."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import blockscale as bs
from blockscale.autograd import weights
from blockscale.nn import Linear, SwiGLU
from support.products import assert_same_bits
from support.shared_weights import (
    STEPS,
    Calls,
    accumulate,
    assert_fresh,
    assert_same_weights,
    build,
    is_open,
    shared,
    train,
)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copies_share_nothing_until_attached(duplicate: Callable[[nn.Module], nn.Module]):
    model = build("step")
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    bs.attach(optimizer, model)
    other = duplicate(model)
    assert is_open(model)
    assert not is_open(other)
    train(model, optimizer)
    before = model[0].weight.detach().clone()
    train(other, AdamW(other.parameters(), lr=0.01, fused=True))  # as the first, on weights of its own
    assert_same_weights(other, model)
    assert_same_bits(model[0].weight, before)
    assert_fresh(model)
    assert "shared" not in "".join(model.state_dict())


def test_tied_weights():
    """One parameter in two layers: each has a cast of its own, and both are fresh."""
    results: list[nn.Sequential] = []
    for cast in ("forward", "step"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48))
        model[3].weight = model[1].weight
        bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast=cast), lambda module, name: True)
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        if cast == "step":
            bs.attach(optimizer, model)
        train(model, optimizer)
        results.append(model)
    assert results[1][3].weight is results[1][1].weight
    assert_same_weights(results[1], results[0])
    assert [shared(results[1][at]).casts for at in (0, 1, 3)] == [1 + STEPS] * 3


def test_a_layer_called_twice():
    torch.manual_seed(0)
    layer = Linear(48, 48, recipe=bs.get_recipe("mxfp8").replace(weight_cast="step"))
    optimizer = SGD(layer.parameters(), lr=0.1)
    bs.attach(optimizer, layer)
    with Calls() as calls:
        layer(layer(torch.randn(8, 48))).sum().backward()
    assert calls.casts == 0


def test_layers_within_wrappers_share():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch._dynamo.reset()
    for wrap in (torch.compile, checkpoint_wrapper):
        layer = Linear(64, 48, recipe=bs.get_recipe("mxfp8").replace(weight_cast="step"))
        wrapped = wrap(layer)
        assert bs.refresh_weights_(wrapped) == 1  # pyright: ignore[reportArgumentType]
        assert shared(layer).casts == 1
        bs.attach(SGD(layer.parameters(), lr=0.1), wrapped)  # pyright: ignore[reportArgumentType]
        assert shared(layer).casts == 2


def test_swiglu_shares():
    models = []
    for cast in ("forward", "twice", "step"):
        torch.manual_seed(0)
        model = nn.Sequential(SwiGLU(64, 96, recipe=bs.get_recipe("mxfp8").replace(weight_cast=cast)))
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        if cast == "step":
            bs.attach(optimizer, model)
        train(model, optimizer)
        models.append(model)
    assert_same_weights(models[1], models[0])
    assert_same_weights(models[2], models[0])
    assert [each.casts for *_, each in weights.shared_weights(models[2])] == [1 + STEPS] * 2


def test_frozen_weights():
    model = build("step")
    model[0].requires_grad_(False)
    optimizer = AdamW(model[2].parameters(), lr=0.01, fused=True)
    bs.attach(optimizer, model)
    train(model, optimizer)
    assert_fresh(model)


# ---- recipes that change -------------------------------------------------------------------------------------------


def test_another_recipe_drops_shared_casts():
    model = build("step")
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    bs.attach(optimizer, model)
    train(model, optimizer, steps=1)
    bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step"), lambda module, name: True)
    assert not is_open(model)
    assert_fresh(model)
    train(model, optimizer, steps=1)  # still attached: shared again from here on
    assert is_open(model)
    assert_fresh(model)
    model[0].apply_recipe("mxfp8")
    assert model[0].shared_weight is None
    assert_fresh(model)
    train(model, optimizer, steps=1)
    assert bs.unquantize_(model) == 2
    train(model, optimizer, steps=1)


ALL_END = {"fprop": 1, "dgrad": 2, "wgrad": 3}


@pytest.mark.parametrize(
    ("until", "is_compiled"),
    [({"fprop": 2}, False), ({"dgrad": 2}, False), ({"wgrad": 2}, False), (ALL_END, False), (ALL_END, True)],
)
def test_products_that_end_while_casts_are_shared(until: dict[str, int], is_compiled: bool):
    models = {cast: build(cast, until=until) for cast in ("forward", "step")}
    for cast, model in models.items():
        torch._dynamo.reset()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        if cast == "step":
            bs.attach(optimizer, model)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled and cast == "step" else model
        for step in range(5):
            bs.set_step_(model, step)
            accumulate(call, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(models["step"], models["forward"])
