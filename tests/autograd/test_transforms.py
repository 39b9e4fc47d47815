"""Transforms of torch.func and forward-mode AD: a derivative that layers do not have is an error, never missing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import blockscale as bs
from blockscale.autograd import (
    activation,
    combine,
    grouped_linear,
    grouped_swiglu_mlp,
    linear,
    permute,
    route,
    swiglu_mlp,
)
from blockscale.errors import BlockscaleError, TransformError
from support.helpers import first_of
from support.products import assert_same_bits, gaussian

K = 64
Call = Callable[[Tensor], Tensor]


class Offsets(torch.nn.Module):
    """A layer of experts with fixed ends of groups, as a function of its input alone."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.tensor([3, x.shape[0]], dtype=torch.int32))


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: bs.nn.Linear(K, K, recipe="mxfp8"),
    "Linear nvfp4": lambda: bs.nn.Linear(K, K, recipe="nvfp4", name="layer"),
    "Linear, one product in bf16": lambda: bs.nn.Linear(K, K, recipe="mxfp8_wgrad_bf16"),
    "SwiGLU": lambda: bs.nn.SwiGLU(K, K, recipe="mxfp8"),
    "GroupedLinear": lambda: Offsets(bs.nn.GroupedLinear(2, K, K, recipe="mxfp8")),
    "GroupedLinear bf16": lambda: Offsets(bs.nn.GroupedLinear(2, K, K, recipe="bf16")),
    "GroupedExperts": lambda: Offsets(bs.nn.GroupedExperts(experts=2, dim=K, hidden=K, recipe="mxfp8")),
    "MoE bf16": lambda: bs.nn.MoE(dim=K, hidden=K, experts=4, top_k=2, recipe="bf16"),
    "MoE": lambda: bs.nn.MoE(dim=K, hidden=K, experts=4, top_k=2, shared=K, recipe="mxfp8"),
}


def weight(*shape: int) -> Tensor:
    return gaussian(*shape, seed=sum(shape)) / 8


# made here: torch.vmap allows no random numbers within it
GATE_UP, DOWN, EXPERTS = weight(2 * K, K), weight(K, K), (weight(2, 2 * K, K), weight(2, K, K))
ENDS = torch.tensor([3, 6], dtype=torch.int32)
ROUTING, GATES = route(weight(3, 4).float().softmax(-1), 2)
SIX, _ = route(weight(6, 4).float().softmax(-1), 2)

FUNCTIONS: dict[str, Call] = {
    "linear": lambda x: linear(x, DOWN, recipe="mxfp8"),
    "swiglu_mlp": lambda x: swiglu_mlp(x, GATE_UP, DOWN, recipe="mxfp8"),
    "grouped_linear": lambda x: grouped_linear(x, EXPERTS[1], ENDS, recipe="mxfp8"),
    "grouped_swiglu_mlp": lambda x: grouped_swiglu_mlp(x, *EXPERTS, ENDS, recipe="mxfp8"),
    "activation": lambda x: linear(activation(x, "mxfp8"), DOWN, recipe="mxfp8"),
    "permute": lambda x: permute(x, SIX),
    "combine": lambda x: combine(x, ROUTING, GATES),
}
ROUTED = ("permute", "combine")
EXPERT_LAYERS = ("groupedlinear", "grouped_linear", "moe bf16")


def subject(name: str) -> str:
    """The words of an error for a call."""
    if name in ROUTED:
        return "permute or combine"
    return "a layer of experts" if name.lower().startswith(EXPERT_LAYERS) else "a quantized layer"


def frozen(name: str) -> Call:
    """A call of which only the input may need a derivative."""
    return FUNCTIONS[name] if name in FUNCTIONS else MODULES[name]().requires_grad_(False)


def tokens(*lead: int) -> Tensor:
    return gaussian(*lead, 6, K, seed=1)


@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
def test_vmap_over_a_frozen_layer_never_drops_the_gradient_of_its_input(name: str):
    call, x = frozen(name), tokens(3).requires_grad_()
    fix = "pass the tokens of all samples" if name in ROUTED else "pass the batch as leading axes"
    with pytest.raises(TransformError, match=rf"torch\.vmap over {subject(name)}.*Rule: .*Fix: {fix}"):
        vmap(call)(x)


@pytest.mark.parametrize("name", MODULES)
def test_vmap_over_a_trainable_layer_is_refused_with_our_error(name: str):
    with pytest.raises(TransformError, match=rf"torch\.vmap over {subject(name)}"):
        vmap(MODULES[name]())(tokens(3))


@pytest.mark.parametrize("name", ["Linear", "SwiGLU", "GroupedExperts", "MoE"])
def test_ensembles_never_drop_the_gradients_of_their_weights(name: str):
    models = [MODULES[name]() for _ in range(3)]
    params, buffers = stack_module_state(models)
    with pytest.raises(
        TransformError, match=r"torch\.vmap over a quantized layer.*loop over the models of an ensemble"
    ):
        vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)), in_dims=(0, 0, None))(params, buffers, tokens())


@pytest.mark.parametrize("name", ["Linear", "SwiGLU", "GroupedExperts", "MoE"])
def test_vmap_of_grad_is_refused(name: str):
    model = MODULES[name]()
    params = {key: value.detach() for key, value in model.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x,)).square().sum()

    for transformed in (vmap(grad(loss), in_dims=(None, 0)), grad(lambda p, x: vmap(lambda e: loss(p, e))(x).sum())):
        with pytest.raises(TransformError, match=r"torch\.func|torch\.vmap"):
            transformed(params, tokens(3))


@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_vmap_without_autograd_is_the_loop(name: str, mode: Callable[[], torch.no_grad]):
    call = MODULES[name]() if name in MODULES else FUNCTIONS[name]
    with mode():
        x = tokens(3)
        assert_same_bits(vmap(call)(x), torch.stack([call(each) for each in x]))


def test_an_ensemble_without_autograd_is_the_loop():
    models = [MODULES["Linear"]() for _ in range(3)]
    params, _ = stack_module_state(models)
    with torch.no_grad():
        got = vmap(lambda p, x: functional_call(models[0], p, (x,)), in_dims=(0, None))(params, tokens())
        assert_same_bits(got, torch.stack([model(tokens()) for model in models]))


def test_vmap_without_a_gradient_is_the_loop():
    call = frozen("Linear")
    assert_same_bits(vmap(call)(tokens(3)), call(tokens(3)))


@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev"])
def test_derivatives_by_torch_func_are_refused(name: str, transform: str):
    call, x = frozen(name), tokens()
    transforms: dict[str, Callable[[], object]] = {
        "grad": lambda: grad(lambda x: call(x).sum())(x),
        "vjp": lambda: vjp(call, x)[1](call(x)),
        "jacrev": lambda: jacrev(call)(x),
    }
    with pytest.raises(
        TransformError, match=rf"a derivative by torch\.func \(grad.*\) of {subject(name)}.*Fix: use loss\.b"
    ):
        transforms[transform]()


@pytest.mark.parametrize("name", MODULES)
def test_a_functional_call_has_no_derivative_by_torch_func(name: str):
    model = MODULES[name]()
    params = {key: value.detach() for key, value in model.named_parameters()}
    with pytest.raises(TransformError, match=r"a derivative by torch\.func"):
        grad(lambda p: functional_call(model, p, (tokens(),)).sum())(params)


def _dual(call: Call, x: Tensor) -> object:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "forward_ad", "no_grad"])
def test_forward_mode_is_refused(name: str, transform: str, is_frozen: bool):
    call = frozen(name) if is_frozen or name in FUNCTIONS else MODULES[name]()
    x = tokens()
    transforms: dict[str, Callable[[], object]] = {
        "jvp": lambda: jvp(call, (x,), (torch.ones_like(x),)),
        "jacfwd": lambda: jacfwd(call)(x),
        "forward_ad": lambda: _dual(call, x),
        "no_grad": lambda: torch.no_grad()(_dual)(call, x),  # no_grad does not disable forward-mode AD
    }
    with pytest.raises(
        TransformError, match=rf"a forward-mode derivative.* of {subject(name)}.*Rule: .* have a backward pass"
    ):
        transforms[transform]()


def test_a_tangent_of_a_weight_is_refused():
    w = weight(K, K)
    with forward_ad.dual_level(), pytest.raises(TransformError, match="a forward-mode derivative"):
        linear(tokens(), forward_ad.make_dual(w, w), recipe="mxfp8")


def test_tangents_of_gate_weights_are_refused():
    x, gates = tokens(), weight(6, 4).float().softmax(-1)
    with forward_ad.dual_level():
        routing, weights = route(forward_ad.make_dual(gates, gates), 2)
        with pytest.raises(TransformError, match="a forward-mode derivative"):
            grouped_swiglu_mlp(x, weight(4, 2 * K, K), weight(4, K, K), routing, recipe="mxfp8", gate_weights=weights)


@pytest.mark.parametrize("name", ["Linear", "SwiGLU", "MoE"])
def test_a_tangent_of_the_gradient_is_refused(name: str):
    x = tokens().requires_grad_()
    y = MODULES[name]()(x)
    with forward_ad.dual_level(), pytest.raises(TransformError, match="a forward-mode derivative"):
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def test_a_dual_level_that_is_not_for_the_layer_changes_nothing():
    layer, x = MODULES["Linear"](), tokens().requires_grad_()
    want = torch.autograd.grad(layer(x).sum(), x)
    with forward_ad.dual_level():
        assert_same_bits(torch.autograd.grad(layer(x).sum(), x), want)


@pytest.mark.parametrize("name", ["Linear", "SwiGLU", "GroupedExperts", "MoE"])
def test_a_batched_backward_is_the_loop(name: str):
    model, x = MODULES[name](), tokens().requires_grad_()
    y, leaves = model(x), [x, *model.parameters()]
    dy = gaussian(3, *y.shape, seed=2)
    got = torch.autograd.grad(y, leaves, dy, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in dy]
    assert_same_bits(list(got), [torch.stack(same) for same in zip(*each, strict=True)])


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_compiled_transforms_are_refused_too(transform: str):
    torch._dynamo.reset()
    call, x = frozen("Linear"), tokens(3)
    transforms: dict[str, Call] = {
        "vmap": lambda x: vmap(call)(x),
        "grad": lambda x: grad(lambda x: call(x).sum())(x),
        "jvp": lambda x: jvp(call, (x,), (torch.ones_like(x),))[1],
    }
    with pytest.raises(
        (BlockscaleError, torch._dynamo.exc.Unsupported), match=r"over a quantized layer|of a quantized layer"
    ):
        torch.compile(transforms[transform], backend="aot_eager", fullgraph=True)(x.requires_grad_())


@pytest.mark.parametrize(
    ("name", "is_known", "backend"),
    first_of(
        product(["Linear", "SwiGLU", "MoE", "linear", "grouped_swiglu_mlp"], [False, True], ["eager", "aot_eager"]),
        # Linear and MoE call the functions
        lambda each: each[0] == "Linear" or (each[0] in ("SwiGLU", "MoE") and each[1:] == (True, "aot_eager")),
    ),
)
def test_forward_mode_around_compiled_code_never_drops_the_tangent(name: str, is_known: bool, backend: str):
    torch._dynamo.reset()
    call, x = frozen(name), tokens()
    compiled = torch.compile(call, backend=backend)
    if is_known:  # a graph from before the dual level is not taken within it
        compiled(x)
    with pytest.raises(TransformError, match="a forward-mode derivative"):
        _dual(compiled, x)


def test_layers_in_bf16_take_every_transform():
    layer, x = bs.nn.Linear(K, K, recipe="bf16").requires_grad_(False), tokens().float()
    want = torch.ones(6, K) @ layer.weight
    torch.testing.assert_close(grad(lambda x: layer(x).sum())(x), want)
    torch.testing.assert_close(vmap(grad(lambda x: layer(x).sum()))(x), want)
    torch.testing.assert_close(jvp(layer, (x,), (x,))[1], x @ layer.weight.mT)


# ---- derivatives of gradients --------------------------------------------------------------------------------------

AGAIN = r"a gradient of a gradient through a quantized layer or a layer of experts.*Fix: use dense layers"


def _quadratic(call: Call) -> Call:
    return lambda x: call(x).square().sum()


def _total(call: Call) -> Call:
    return lambda x: call(x).sum()


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("which", ["jvp", "hvp", "vhp", "hessian", "hvp of a sum", "hvp of an intermediate"])
def test_derivatives_of_gradients_are_never_zero_in_silence(name: str, which: str, is_frozen: bool):
    call = frozen(name) if is_frozen else MODULES[name]()
    x = tokens()
    calls: dict[str, Callable[[], object]] = {
        "jvp": lambda: functional.jvp(call, x, x),
        "hvp": lambda: functional.hvp(_quadratic(call), x, x),
        "vhp": lambda: functional.vhp(_quadratic(call), x, x),
        "hessian": lambda: functional.hessian(_quadratic(call), x),
        "hvp of a sum": lambda: functional.hvp(_total(call), x, x),
        "hvp of an intermediate": lambda: functional.hvp(_total(lambda x: call(x * 2)), x, x),
    }
    with pytest.raises(RuntimeError, match=AGAIN):
        calls[which]()


# but for MoE in bf16, whose router's gradient comes by `combine`, which has derivatives of any order
@pytest.mark.parametrize("name", [name for name in MODULES if name != "MoE bf16"])
def test_a_gradient_is_never_unused_by_what_it_depends_on(name: str):
    model, x = MODULES[name](), tokens().requires_grad_()
    y = model(x)
    dy = torch.ones_like(y).requires_grad_()
    params = list(model.parameters())
    for leaf in (x, *params):
        (found,) = torch.autograd.grad(y, leaf, dy, create_graph=True)
        for source in (x, dy):
            with pytest.raises(RuntimeError, match=AGAIN):
                torch.autograd.grad(found.sum(), source, allow_unused=True, retain_graph=True)


def test_a_gradient_penalty_raises_through_layers_between():
    model = torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.Tanh(), bs.nn.SwiGLU(K, K, recipe="mxfp8"))
    x = tokens().float().requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=AGAIN):
        torch.autograd.grad(dx.norm(), model[0].weight, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=AGAIN):
        dx.norm().backward()


def test_a_recorded_backward_has_the_bits_of_a_plain_one():
    model, x = MODULES["SwiGLU"](), tokens().requires_grad_()
    leaves = [x, *model.parameters()]
    want = torch.autograd.grad(model(x).sum(), leaves)
    got = torch.autograd.grad(model(x).sum(), leaves, create_graph=True)
    assert_same_bits([each.detach() for each in got], list(want))
