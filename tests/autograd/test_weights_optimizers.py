"""Weights that are cast once per optimizer step: one cast per step, whatever the optimizer, and never a stale one."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import blockscale as bs
from blockscale.autograd import weights
from blockscale.errors import OptionError
from support.shared_weights import (
    FORMATS,
    MICROBATCHES,
    OPTIMIZERS,
    STEPS,
    Calls,
    accumulate,
    assert_fresh,
    assert_same_weights,
    batch,
    build,
    is_open,
    shared,
    train,
)


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_casting_in_every_forward(kind: str, recipe: str):
    models = {cast: build(cast, recipe) for cast in ("forward", "twice", "step")}
    for cast, model in models.items():
        optimizer = OPTIMIZERS[kind](model.parameters())
        if cast == "step":
            bs.attach(optimizer, model)
        train(model, optimizer, microbatches=3)
    assert_same_weights(models["twice"], models["forward"])
    assert_same_weights(models["step"], models["forward"])
    assert not torch.equal(models["step"][0].weight, build("step", recipe)[0].weight)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_cast_for_each_step_and_weight(microbatches: int):
    model = build("step")
    optimizer = AdamW(model.parameters(), fused=True)
    with Calls() as calls:
        bs.attach(optimizer, model)
    assert calls.found == {"quantize_both": 2}
    for step in range(STEPS):
        with Calls() as calls:
            accumulate(model, step, microbatches)
        assert calls.casts == 0
        with Calls() as calls:
            optimizer.step()
        assert calls.found == {"requantize_both_": 2}
    assert [shared(model[at]).casts for at in (0, 2)] == [1 + STEPS] * 2


@pytest.mark.parametrize(("cast", "expected"), [("forward", 2), ("twice", 3), ("step", 2)])
def test_nothing_is_shared_before_attach_or_refresh(cast: str, expected: int):
    """The first layer's input needs no gradient, so "twice" casts the first weight once."""
    model = build(cast)
    optimizer = AdamW(model.parameters(), fused=True)
    for step in range(2):
        with Calls() as calls:
            accumulate(model, step)
        assert calls.casts == expected * MICROBATCHES
        optimizer.step()
    assert not is_open(model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_of_an_unattached_optimizer_invalidates(kind: str):
    model, plain = build("step"), build("forward")
    bs.refresh_weights_(model)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer)
    train(plain, OPTIMIZERS[kind](plain.parameters()))
    assert_same_weights(model, plain)
    with Calls() as calls:
        accumulate(model, microbatches=3)
    assert calls.found["requantize_both_"] == calls.casts == 2, "cast again when needed, and then shared"


def test_other_models_stay_as_they_are():
    model, other = build("step"), build("step")
    optimizer, another = AdamW(model.parameters(), fused=True), AdamW(other.parameters(), fused=True)
    bs.attach(optimizer, model)
    bs.attach(another, other)
    train(model, optimizer)
    assert shared(other[0]).casts == 1
    assert shared(other[0]).is_valid


def test_two_optimizers_over_two_halves():
    model, plain = build("step"), build("forward")
    pairs = [[AdamW(each[at].parameters(), lr=0.01, fused=True) for at in (0, 2)] for each in (model, plain)]
    for optimizer in pairs[0]:
        bs.attach(optimizer, model)
    before = [shared(model[at]).casts for at in (0, 2)]
    train(model, *pairs[0])
    train(plain, *pairs[1])
    assert_same_weights(model, plain)
    assert [shared(model[at]).casts for at in (0, 2)] == [each + STEPS for each in before]
    pairs[0][0].step()  # one of them alone
    assert_fresh(model)


def test_one_of_two_optimizers_is_attached():
    model, plain = build("step"), build("forward")
    pairs = [[AdamW(each[at].parameters(), lr=0.01, fused=True) for at in (0, 2)] for each in (model, plain)]
    bs.attach(pairs[0][0], model)
    train(model, *pairs[0])
    train(plain, *pairs[1])
    assert_same_weights(model, plain)


def test_an_optimizer_with_parameters_of_its_own():
    """Master weights in fp32 are stepped and written back within the step."""

    class Master(SGD):
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.theirs = params
            super().__init__([each.detach().clone().requires_grad_() for each in params], lr=0.5)

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for mine, theirs in zip(group["params"], self.theirs, strict=True):
                    mine.grad = theirs.grad
                    theirs.data.sub_(mine.grad, alpha=group["lr"])

    model, plain = build("step"), build("forward")
    for each in (model, plain):
        optimizer = Master(list(each.parameters()))
        if each is model:
            with pytest.warns(UserWarning, match="ignore this warning if this one steps copies"):
                bs.attach(optimizer, model)
        for step in range(STEPS):
            accumulate(each, step)
            optimizer.step()
            each.zero_grad()
    assert_same_weights(model, plain)


def test_several_models_and_one_optimizer():
    models, plain = [build("step"), build("step", "mxfp8")], [build("forward"), build("forward", "mxfp8")]
    for each in (models, plain):
        optimizer = AdamW([*each[0].parameters(), *each[1].parameters()], lr=0.01, fused=True)
        if each is models:
            for model in models:
                bs.attach(optimizer, model)
                bs.attach(optimizer, model)  # a second time changes nothing
        for step in range(STEPS):
            for model in each:
                accumulate(model, step)
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(models, plain, strict=True):
        assert_same_weights(got, want)
        assert shared(got[0]).casts == 2 + STEPS


def test_models_and_optimizers_are_not_kept_alive():
    model, other = build("step"), build("step")
    optimizer = AdamW([*model.parameters(), *other.parameters()], fused=True)
    bs.attach(optimizer, model)
    bs.attach(optimizer, other)
    gc.collect()  # objects of other tests
    gone = [weakref.ref(model), weakref.ref(shared(model[0]))]
    known = len(weights._SHARED)
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert len(weights._SHARED) == known - 2
    train(other, optimizer, steps=1)
    assert_fresh(other)
    gone = [weakref.ref(optimizer)]
    attached = len(weights._ATTACHED)
    del optimizer
    gc.collect()
    assert gone[0]() is None
    assert len(weights._ATTACHED) == attached - 1
    train(other, AdamW(other.parameters(), fused=True), steps=1)  # none is attached any more; the step invalidates
    assert_fresh(other)


def test_other_optimizers_than_torchs_are_refused():
    with pytest.raises(OptionError, match="refresh_weights_"):
        bs.attach(object(), build("step"))  # pyright: ignore[reportArgumentType]


def test_a_model_without_our_layers_is_refused():
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(
        OptionError, match=r"attach to a Sequential in which no layer.*Rule: .*Fix: call blockscale\.quantize_"
    ):
        bs.attach(AdamW(plain.parameters()), plain)
    bs.quantize_(plain, bs.get_recipe("mxfp8").replace(weight_cast="step"), lambda module, name: False)
    with pytest.raises(OptionError, match="it lists the layers that were not converted"):
        bs.attach(AdamW(plain.parameters()), plain)


@pytest.mark.parametrize("cast", ["forward", "twice"])
def test_layers_that_share_no_casts_are_a_warning(cast: str):
    model = build(cast)
    with pytest.warns(
        UserWarning, match=rf"attach has nothing to do: the 2 layers.*weight_cast='{cast}'.*Rule: .*Fix: "
    ):
        bs.attach(AdamW(model.parameters()), model)


def test_casts_once_per_step_are_no_warning():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bs.attach(AdamW(model.parameters()), model)
        bs.attach(AdamW([model[0].bias]), model)  # as one of two optimizers


def test_unquantized_layers_are_a_warning():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    bs.quantize_(model, bs.get_recipe("bf16").replace(weight_cast="step"))
    with pytest.warns(
        UserWarning, match=r"attach has nothing to do: .*unquantized .bf16..*Rule: .*Fix: .*leave attach out"
    ):
        bs.attach(AdamW(model.parameters()), model)


def test_an_optimizer_without_a_parameter_of_the_model_is_a_warning():
    model, other = build("step"), build("step")
    with pytest.warns(UserWarning, match=r"attach to an optimizer .AdamW. that holds none of .*Rule: .*Fix: "):
        bs.attach(AdamW(other.parameters()), model)


def test_a_skipped_step_casts_nothing():
    model, plain = build("step"), build("forward")
    counts: list[int] = []
    for each in (model, plain):
        optimizer = AdamW(each.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if each is model:
            bs.attach(optimizer, each)
        for step in range(3):
            factor = torch.inf if step == 1 else 1.0
            scaler.scale(each(batch(step, 0)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            counts += [shared(model[0]).casts] if each is model else []
    assert counts == [2, 2, 3]
    assert_same_weights(model, plain)
    assert model[0].weight.isfinite().all()
