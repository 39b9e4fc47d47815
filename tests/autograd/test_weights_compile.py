"""Shared weights in compiled code: read without compiling again, and never stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import AdamW

import blockscale as bs
from support.helpers import first_of
from support.shared_weights import FORMATS, OPTIMIZERS, STEPS, accumulate, assert_same_weights, build, shared


def casts_in(graph: torch.fx.GraphModule) -> int:
    """Casts of a compiled forward and its backward."""
    parts = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
    return sum("quantize" in str(node.target) for each in parts for node in each.graph.nodes)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    first_of(
        [*(("fused", each) for each in FORMATS), ("foreach", "mxfp8")],
        lambda each: each in (("fused", "nvfp4"), ("foreach", "mxfp8")),
    ),
)
def test_compiled_models_share_without_compiling_again(kind: str, recipe: str):
    torch._dynamo.reset()
    models = {cast: build(cast, recipe) for cast in ("forward", "step")}
    counter = CompileCounterWithBackend("aot_eager")
    for cast, model in models.items():
        optimizer = OPTIMIZERS[kind](model.parameters())
        call: Any = model
        if cast == "step":
            bs.attach(optimizer, model)
            call = torch.compile(model, backend=counter, fullgraph=True)
        for step in range(STEPS):
            accumulate(call, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(models["step"], models["forward"])
    assert counter.frame_count == 1
    assert shared(models["step"][0]).casts == 1 + STEPS
    assert casts_in(counter.graphs[0]) == 4, "of two inputs and two gradients"


def test_a_compiled_model_whose_optimizer_is_not_attached():
    torch._dynamo.reset()
    models = {cast: build(cast) for cast in ("forward", "step")}
    counter = CompileCounterWithBackend("aot_eager")
    for cast, model in models.items():
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        call: Any = model
        if cast == "step":
            bs.refresh_weights_(model)
            call = torch.compile(model, backend=counter, fullgraph=True)
        for step in range(4):
            accumulate(call, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(models["step"], models["forward"])
    assert [casts_in(graph) for graph in counter.graphs] == [4, 6], "one shares, one casts from the first step on"


def test_a_model_attached_after_it_was_compiled():
    torch._dynamo.reset()
    model, plain = build("step"), build("forward")
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    accumulate(call)
    model.zero_grad()
    optimizer, other = (AdamW(each.parameters(), lr=0.01, fused=True) for each in (model, plain))
    bs.attach(optimizer, call)  # pyright: ignore[reportArgumentType]
    for step in range(STEPS):
        for each, with_it in ((call, optimizer), (plain, other)):
            accumulate(each, step)
            with_it.step()
            with_it.zero_grad()
    assert_same_weights(model, plain)


def test_a_compiled_optimizer_step():
    torch._dynamo.reset()
    model, plain = build("step"), build("forward")
    for each in (model, plain):
        optimizer = AdamW(each.parameters(), lr=0.01, foreach=True)
        if each is model:
            bs.attach(optimizer, each)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for at in range(STEPS):
            accumulate(each, at)
            step()
            optimizer.zero_grad()
    assert_same_weights(model, plain)
    assert shared(model[0]).casts == 1 + STEPS
