"""Backward passes with shared weights: the operands of their forward or an error, and no cast of their own."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from support.helpers import first_of
from support.products import assert_same_bits
from support.shared_weights import (
    FORMATS,
    MICROBATCHES,
    STEPS,
    Calls,
    accumulate,
    assert_same_weights,
    batch,
    build,
    shared,
)


@pytest.mark.parametrize(
    ("recipe", "is_compiled"),
    first_of(product(FORMATS, [False, True]), lambda each: not each[1] or each[0] == "fp8_blockwise"),
)
def test_a_refresh_before_the_backward_is_an_error(recipe: str, is_compiled: bool):
    torch._dynamo.reset()
    model = build("step", recipe)
    bs.refresh_weights_(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
    loss = call(batch(0, 0)).sum()
    bs.refresh_weights_(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_before_the_backward_is_an_error():
    """Also of a fused optimizer, which increments no version: the refresh after it does."""
    model = build("step")
    optimizer = AdamW(model.parameters(), fused=True)
    bs.attach(optimizer, model)
    accumulate(model)
    loss = model(batch(0, 0)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_several_backward_passes():
    model, plain = build("step"), build("forward")
    bs.refresh_weights_(model)
    for each in (model, plain):
        loss = each(batch(0, 0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_bits(model[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_casts_nothing(use_reentrant: bool):
    models = {cast: build(cast) for cast in ("forward", "step")}
    for cast, model in models.items():
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        if cast == "step":
            bs.attach(optimizer, model)
        for step in range(STEPS):
            with Calls() as calls:
                for each in range(MICROBATCHES):
                    x = batch(step, each).requires_grad_()
                    checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()
            assert (calls.casts == 0) == (cast == "step")
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(models["step"], models["forward"])
    assert shared(models["step"][0]).casts == 1 + STEPS
