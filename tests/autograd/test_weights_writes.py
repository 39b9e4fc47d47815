"""Writes to shared weights outside of an optimizer: detected, or found by BLOCKSCALE_CHECK_WEIGHTS."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

import blockscale as bs
from blockscale.errors import OptionError, StaleWeightError
from support.helpers import first_of
from support.products import assert_same_bits
from support.shared_weights import FORMATS, Calls, accumulate, assert_fresh, batch, build, is_open


def write_data(model: nn.Sequential) -> None:
    model[0].weight.data.mul_(3)


@pytest.mark.parametrize("tell", [bs.invalidate, bs.refresh_weights_], ids=["invalidate", "refresh"])
def test_a_write_to_data_is_detected_after_invalidate_or_refresh(tell: Callable[[nn.Module], Any]):
    model = build("step")
    bs.refresh_weights_(model)
    accumulate(model)
    write_data(model)
    tell(model)
    assert_fresh(model)


def test_check_weights_finds_an_undetected_write_to_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOCKSCALE_CHECK_WEIGHTS", "1")
    for recipe in FORMATS:
        model = build("step", recipe)
        bs.refresh_weights_(model)
        model(batch(0, 0))
        write_data(model)
        with pytest.raises(StaleWeightError, match="refresh_weights_"):
            model(batch(0, 0))
        bs.refresh_weights_(model)
        model(batch(0, 0))


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 3)


def load(model: nn.Module, **options: Any) -> None:
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()}, **options)


@torch.no_grad()
def write_counted(model: nn.Sequential) -> None:
    model[0].weight.copy_(model[0].weight * 3)


def write_vector(model: nn.Sequential) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 3, model.parameters())


# ways to change weights, and whether compiled code detects them
WRITES: dict[str, tuple[Callable[[nn.Sequential], Any], bool]] = {
    "load_state_dict": (load, True),
    "load_state_dict assign": (lambda model: load(model, assign=True), True),
    "load one layer": (lambda model: load(model[0]), True),
    "replaced": (replace_parameter, True),
    "to bf16": (lambda model: model.to(torch.bfloat16), True),
    "to fp64 and back": (lambda model: model.double().float(), True),
    "copy_": (write_counted, False),
    "init": (lambda model: nn.init.orthogonal_(model[0].weight), False),
    "detached": (lambda model: model[0].weight.detach().mul_(3), False),
    "data assigned": (lambda model: setattr(model[0].weight, "data", model[0].weight.data * 3), False),
    "vector": (write_vector, False),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_that_are_detected(write: str):
    model = build("step")
    optimizer = SGD(model.parameters(), lr=0.1)
    bs.attach(optimizer, model)
    accumulate(model)
    model.zero_grad()
    WRITES[write][0](model)
    assert_fresh(model)
    assert_fresh(model)
    bs.refresh_weights_(model)
    with Calls() as calls:
        model(batch(0, 0).to(model[0].weight.dtype))
    assert calls.casts == 0


# one of each way in which compiled code could miss a write; all of them without a compiler above
@pytest.mark.parametrize(
    "write",
    first_of(WRITES, lambda write: write in ("load_state_dict", "replaced", "to bf16", "copy_", "data assigned")),
)
def test_writes_that_compiled_code_detects(write: str):
    torch._dynamo.reset()
    model = build("step")[:1]  # compiled up to three times
    bs.refresh_weights_(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_fresh(model, compiled)
    change, is_seen = WRITES[write]
    change(model)
    if not is_seen:
        bs.refresh_weights_(model)
    assert_fresh(model, compiled)
    bs.refresh_weights_(model)
    assert_fresh(model, compiled)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_weights_given_for_one_call(is_compiled: bool):
    torch._dynamo.reset()
    model = build("step")
    bs.refresh_weights_(model)
    given = {name: value.detach() * 3 for name, value in model.named_parameters()}

    def call(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,))

    function = torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call
    other = build("forward")
    other.load_state_dict(given)
    assert_same_bits(function(given, batch(0, 0)), other(batch(0, 0)))
    assert_fresh(model)


def test_an_evaluation_may_be_the_first_to_cast():
    model = build("step")
    with torch.inference_mode():
        bs.refresh_weights_(model)
    assert_fresh(model)
    bs.set_step_(model, 0)
    model[0].recipe_now = bs.get_recipe("mxfp8").replace(weight_cast="step")
    with torch.inference_mode():
        model(batch(0, 0))
    assert_fresh(model)


def test_weights_made_in_inference_mode_are_cast_by_every_forward():
    """They have no version counter, so a stale cast could not be detected."""
    with torch.inference_mode():
        model, other = build("step"), build("forward")
        with pytest.raises(OptionError, match=r"made in inference mode.*no version counter.*outside of torch"):
            bs.refresh_weights_(model)
        assert not is_open(model)
        for _ in range(3):
            assert_same_bits(model(batch(0, 0)), other(batch(0, 0)))
            for each in (model, other):
                each[0].weight.mul_(3)


@pytest.mark.parametrize("write", ["to bf16", "data assigned"])
def test_weights_replaced_in_inference_mode_are_cast_by_every_forward(write: str):
    model = build("step")
    bs.refresh_weights_(model)
    model(batch(0, 0))
    with torch.inference_mode():
        WRITES[write][0](model)
        assert model[0].weight.is_inference()
        for _ in range(3):
            want = build("forward").to(model[0].weight.dtype)
            want.load_state_dict(model.state_dict())
            x = batch(0, 0).to(model[0].weight.dtype)
            assert_same_bits(model(x), want(x))
            model[0].weight.mul_(3)


@pytest.mark.parametrize("write", ["copy_", "init", "detached"])
def test_writes_in_inference_mode_to_other_weights_are_detected(write: str):
    model = build("step")
    bs.refresh_weights_(model)
    model(batch(0, 0))
    with torch.inference_mode():
        WRITES[write][0](model)
    assert_fresh(model)


def test_data_that_is_assigned_twice_is_detected():
    """The second may get the address of the cast's values, and assignments increment no version."""
    model = build("step")
    bs.refresh_weights_(model)
    for scale in (3.0, 5.0):
        wanted = model[0].weight.data_ptr()
        values = model[0].weight.detach() * scale
        model[0].weight.data = torch.empty(0)
        taken = [torch.empty_like(values)]  # until the address is reused, if ever
        while taken[-1].data_ptr() != wanted and len(taken) < 64:
            taken.append(torch.empty_like(values))
        model[0].weight.data = taken[-1].copy_(values)
        assert_fresh(model)


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("write", [each for each in WRITES if each != "load_state_dict assign"])
def test_parameters_that_are_swapped_on_conversion(write: str):
    model = build("step")
    bs.attach(SGD(model.parameters(), lr=0.1), model)
    accumulate(model)
    model.zero_grad()
    WRITES[write][0](model)
    assert_fresh(model)


@pytest.mark.parametrize("shape", [(48, 64), (24, 64)])
def test_swapped_tensors_are_detected(shape: tuple[int, ...]):
    model = build("step")[:1]
    bs.refresh_weights_(model)
    model(batch(0, 0))
    model[0].bias = None
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.randn(shape)))
    want = bs.nn.Linear(64, shape[0], bias=False)
    want.load_state_dict(model[0].state_dict())
    assert_same_bits(model(batch(0, 0)), want(batch(0, 0)))


def test_a_weight_that_was_replaced_lives_no_longer_than_until_the_next_refresh():
    model = build("step")
    bs.refresh_weights_(model)
    gone = weakref.ref(model[0].weight)
    replace_parameter(model)
    bs.refresh_weights_(model)
    gc.collect()
    assert gone() is None
