"""`Linear` behaves as torch's layer (state, copies, moves, hooks) and trains by its recipe."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

import blockscale as bs
from blockscale.autograd import RECIPES, linear
from blockscale.errors import OptionError, UnknownNameError
from blockscale.nn import Linear
from support.helpers import first_of
from support.linear_reference import Calls
from support.products import assert_same_bits, gaussian

IN, OUT, TOKENS = 72, 200, 37
NAMED = {"name": "layers.0.proj", "dtype": torch.bfloat16}


def make(recipe: str | bs.Recipe = "fp8_blockwise", *, bias: bool = True, seed: int = 0) -> Linear:
    torch.manual_seed(seed)
    return Linear(IN, OUT, bias, recipe=recipe, **NAMED)  # pyright: ignore[reportArgumentType]


def plain(*, bias: bool = True, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(IN, OUT, bias, dtype=torch.bfloat16)


def trained(layer: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[Tensor | None]:
    """y, dx and the gradients of all parameters, which are None again after."""
    x = gaussian(TOKENS, IN, seed=1).to(dtype).requires_grad_()
    y = layer(x)
    y.backward(gaussian(TOKENS, OUT, seed=2).to(dtype))
    grads = [param.grad for param in layer.parameters()]
    layer.zero_grad()
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("name", RECIPES)
def test_the_module_is_the_function(name: str):
    layer = make(name)
    x = gaussian(TOKENS, IN, seed=1).requires_grad_()
    rounding = bs.Stochastic(bs.rng_state(0), "layers.0.proj") if layer.recipe.stochastic else None
    y = linear(x, layer.weight, layer.bias, name, rounding=rounding)
    y.backward(gaussian(TOKENS, OUT, seed=2))
    want = [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]
    layer.zero_grad()
    assert_same_bits(trained(layer), want)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_initialisation_is_that_of_torchs_layer(bias: bool):
    mine, theirs = make(bias=bias), plain(bias=bias)
    assert isinstance(mine, torch.nn.Linear)
    assert_same_bits(dict(mine.state_dict()), dict(theirs.state_dict()))
    assert_same_bits(trained(make("bf16", bias=bias)), trained(theirs))
    mine.weight.data.zero_()
    torch.manual_seed(0)
    mine.reset_parameters()
    assert_same_bits(mine.weight, theirs.weight)


# ---- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4", "bf16"])
def test_state_dicts_are_torchs_in_both_directions(name: str, bias: bool):
    mine, theirs = make(name, bias=bias, seed=1), plain(bias=bias, seed=2)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in mine.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    mine.load_state_dict(theirs.state_dict(), strict=True)
    assert_same_bits(dict(mine.state_dict()), dict(theirs.state_dict()))
    mine, theirs = make(name, bias=bias, seed=1), plain(bias=bias, seed=2)
    theirs.load_state_dict(mine.state_dict(), strict=True)
    assert_same_bits(dict(theirs.state_dict()), dict(mine.state_dict()))


@pytest.mark.parametrize("assign", [False, True])
def test_weights_are_saved_and_loaded_safely(assign: bool):
    step = bs.get_recipe("fp8_blockwise").replace(weight_cast="step")
    mine, other = make(step), make(step, seed=1)
    want = trained(mine)
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    bs.refresh_weights_(other)
    assert not torch.equal(trained(other)[0], want[0])  # pyright: ignore[reportArgumentType]
    other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert_same_bits(trained(other), want)


def test_a_refresh_survives_a_changed_parameter():
    """Weights that were loaded, replaced or moved are cast again automatically."""
    layer = make(bs.get_recipe("mxfp8").replace(weight_cast="step"))
    bs.refresh_weights_(layer)
    with Calls() as calls:
        layer(gaussian(4, IN))
    assert calls.found == {"quantize_both": 1, "scaled_mm": 1}  # of the input alone
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)
    other = make("mxfp8")
    other.weight, other.bias = layer.weight, layer.bias
    assert_same_bits(trained(layer), trained(other))


# ---- copies --------------------------------------------------------------------------------------------------------


def pickled(layer: Linear) -> Linear:
    return pickle.loads(pickle.dumps(layer))


def saved(layer: Linear) -> Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4", "step"])
def test_copies_compute_the_same_and_are_apart(name: str, copied: Callable[[Linear], Linear]):
    recipe = bs.get_recipe("mxfp8").replace(weight_cast="step") if name == "step" else bs.get_recipe(name)
    layer = make(recipe)
    bs.refresh_weights_(layer)
    want = trained(layer)
    other = copied(layer)
    assert type(other) is Linear
    assert other.recipe == layer.recipe
    assert_same_bits(trained(other), want)
    with torch.no_grad():
        other.weight.mul_(2)
    assert_same_bits(trained(layer), want)
    assert not torch.equal(trained(other)[0], want[0])  # pyright: ignore[reportArgumentType]


def double(layer: torch.nn.Module) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)  # pyright: ignore[reportCallIssue]


def test_shared_memory_is_shared_with_other_processes():
    layer = make().share_memory()
    assert layer.weight.is_shared()
    want = trained(layer)
    process = multiprocessing.get_context("fork").Process(target=double, args=(layer,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    got = trained(layer)
    double(other := make())
    assert_same_bits(got, trained(other))
    assert not torch.equal(got[0], want[0])  # pyright: ignore[reportArgumentType]


# ---- moves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("move", "dtype"),
    [
        (lambda layer: layer.to(torch.float32), torch.float32),
        (lambda layer: layer.float(), torch.float32),
        (lambda layer: layer.half(), torch.float16),
        (lambda layer: layer.bfloat16(), torch.bfloat16),
        (lambda layer: layer.to("cpu", torch.float16), torch.float16),
    ],
    ids=["to", "float", "half", "bfloat16", "to both"],
)
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
def test_dtypes_change_as_they_do_in_torchs_layer(
    name: str, move: Callable[[torch.nn.Linear], torch.nn.Linear], dtype: torch.dtype
):
    mine, theirs = move(make(name)), move(plain())
    assert_same_bits(dict(mine.state_dict()), dict(theirs.state_dict()))
    assert {found.dtype for found in trained(mine, dtype) if found is not None} == {dtype}
    if name == "nvfp4":
        assert mine.rng.dtype is torch.int64  # pyright: ignore[reportAttributeAccessIssue]


def test_a_meta_layer_is_materialised_later():
    layer = Linear(IN, OUT, device="meta", recipe="nvfp4", name="a", dtype=torch.bfloat16)
    assert layer(torch.empty(2, 3, IN, device="meta", dtype=torch.bfloat16)).shape == (2, 3, OUT)
    layer.to_empty(device="cpu")
    layer.load_state_dict(make().state_dict())
    want = make("nvfp4")
    want.name = "a"
    assert_same_bits(trained(layer), trained(want))


# ---- usage ---------------------------------------------------------------------------------------------------------


def test_repr():
    assert repr(make("nvfp4", bias=False)) == "Linear(in_features=72, out_features=200, bias=False, recipe=nvfp4)"
    mine = bs.get_recipe("mxfp8").replace(name="mine")
    assert make(mine).extra_repr() == "in_features=72, out_features=200, bias=True, recipe=mine"


def test_no_bias_is_none():
    layer = make(bias=False)
    assert layer.bias is None
    assert list(layer.state_dict()) == ["weight"]


def test_recipes_and_names_are_checked():
    with pytest.raises(OptionError, match=r"recipe 'nvfp4' for a layer without a name.*quantize_"):
        Linear(IN, OUT, recipe="nvfp4")
    with pytest.raises(UnknownNameError, match="unknown recipe 'fp8'"):
        Linear(IN, OUT, recipe="fp8")


def test_another_recipe_can_be_applied():
    layer = make("nvfp4")
    layer.apply_recipe("mxfp8")
    assert_same_bits(trained(layer), trained(make("mxfp8")))
    assert layer.rng is None
    layer.apply_recipe("nvfp4", name="layers.0.proj")
    assert_same_bits(trained(layer), trained(make("nvfp4")))


def test_frozen_layers_cast_less():
    layer = make().requires_grad_(False)
    with Calls() as calls:
        y = layer(gaussian(4, IN).requires_grad_())
        y.sum().backward()
    assert calls.found == {"quantize": 2, "quantize_both": 1, "scaled_mm": 2}
    assert layer.weight.grad is None
    with Calls() as calls:
        assert not layer.eval()(gaussian(4, IN)).requires_grad
    assert calls.found == {"quantize": 2, "scaled_mm": 1}


def test_hooks_are_called():
    layer, calls = make(), []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("weight"))
    trained(layer)
    assert sorted(calls) == ["backward", "before", "forward", "weight"]


def test_calls_with_other_weights():
    layer, other = make(), make(seed=1)
    x = gaussian(TOKENS, IN)
    got = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
    assert_same_bits(got, other(x))


class Doubled(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_parametrised_weight_is_trained():
    layer = make()
    parametrize.register_parametrization(layer, "weight", Doubled())
    x = gaussian(TOKENS, IN)
    other = make()
    double(other)
    assert_same_bits(layer(x), other(x))
    layer(x).sum().backward()
    other(x).sum().backward()
    (original,) = layer.parametrizations.weight.parameters()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    torch.testing.assert_close(original.grad, 2 * other.weight.grad)  # pyright: ignore[reportOperatorIssue]


def test_tied_layers_add_their_gradients():
    first, second = make(), make(seed=1)
    second.weight = first.weight
    x = gaussian(TOKENS, IN)
    (first(x) + second(x)).sum().backward()
    alone = make()
    alone(x).sum().backward()
    torch.testing.assert_close(first.weight.grad, 2 * alone.weight.grad)  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]


@pytest.mark.parametrize(
    ("name", "noise_db"),
    first_of([("fp8_blockwise", 28.7), ("mxfp8", 28.5), ("nvfp4", 16.7)], lambda case: case[0] != "mxfp8"),
)
def test_a_regression_is_learned(name: str, noise_db: float):
    """Twenty steps reach the loss of the unquantized layer, up to the noise of a forward."""
    x = gaussian(256, IN, seed=1).float()
    target = x @ gaussian(IN, OUT, seed=2).float() / 8
    losses: dict[str, float] = {}
    for recipe in ("bf16", name):
        layer = make(recipe).float()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02)
        for _ in range(20):
            loss = (layer(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[recipe] = loss.item()
    first = target.square().mean().item()
    assert losses["bf16"] < 0.1 * first
    assert 0.95 * losses["bf16"] < losses[name] < losses["bf16"] + 1.5 * 10 ** (-noise_db / 10) * first
