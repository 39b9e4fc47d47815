"""Weights that are cast once per optimizer step: never stale, to the bit, and counted."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.autograd import weights
from blockscale.errors import OptionError, StaleWeightError
from blockscale.nn import Linear, SwiGLU
from products import assert_same_bits

FORMATS = ["fp8_blockwise", "mxfp8", "nvfp4"]
STEPS, MICROBATCHES, TOKENS = 3, 2, 24
SIZES = frozenset({(48, 64), (32, 48), (48, 48)})  # of all weights here, and of nothing else


class Calls(TorchDispatchMode):
    """Counts our casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "blockscale" and "quantize" in name:
            source = args[{"requantize_": 3, "requantize_both_": 6}.get(name, 0)]
            self.found[name] += tuple(source.shape) in SIZES
        return func(*args, **(kwargs or {}))

    @property
    def casts(self) -> int:
        return sum(self.found.values())


def build(weight_cast: str, recipe: str = "fp8_blockwise", **changes: Any) -> nn.Sequential:
    """The same model every time: 64 -> 48 -> 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    chosen = bs.get_recipe(recipe).replace(weight_cast=weight_cast, **changes)
    bs.quantize_(model, chosen, lambda module, name: True)
    return model


def shared(layer: nn.Module) -> weights.SharedWeight:
    found = layer.shared_weight
    assert isinstance(found, weights.SharedWeight)
    return found


def is_open(model: nn.Module) -> bool:
    return any(each.is_open for *_, each in weights.shared_weights(model))


def batch(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    return torch.randn(TOKENS, 64, generator=generator)


def accumulate(model: Callable[[Tensor], Tensor], step: int = 0, microbatches: int = MICROBATCHES) -> None:
    for each in range(microbatches):
        model(batch(step, each)).square().mean().backward()


def train(model: nn.Module, *optimizers: Optimizer, steps: int = STEPS, microbatches: int = MICROBATCHES) -> None:
    for step in range(steps):
        accumulate(model, step, microbatches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_same_weights(got: nn.Module, want: nn.Module) -> None:
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, value in want.state_dict().items():
        assert_same_bits(got.state_dict()[name], value)


def assert_fresh(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> None:
    """A forward and its gradients are those of a model with these weights that shares nothing."""
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if isinstance(layer, Linear):
            layer.follow(layer.recipe_now.replace(weight_cast="forward"), name=layer.name, rng=layer.rng)
    results: list[list[Tensor]] = []
    for each in (call or model, plain):
        x = batch(9, 9).to(next(model.parameters()).dtype).requires_grad_()
        y = each(x)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        results.append([y, x.grad])
    model.zero_grad()
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)


# ---- optimizers ----------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
    "for-loop": lambda params: AdamW(params, lr=0.01, foreach=False),
    "sgd": lambda params: SGD(params, lr=0.5, momentum=0.9),
    "sgd fused": lambda params: SGD(params, lr=0.5, fused=True),
}


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
def test_nothing_is_shared_until_somebody_says_who_keeps_it_fresh(cast: str, expected: int):
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
def test_an_optimizer_that_is_not_attached_is_noticed(kind: str):
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
    """A copy in high precision is stepped and written back within the step, as master weights are."""

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


def test_models_and_optimizers_go_away():
    model, other = build("step"), build("step")
    optimizer = AdamW([*model.parameters(), *other.parameters()], fused=True)
    bs.attach(optimizer, model)
    bs.attach(optimizer, other)
    gc.collect()  # what other tests left
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
    train(other, AdamW(other.parameters(), fused=True), steps=1)  # nobody is attached any more, and it is noticed
    assert_fresh(other)


def test_what_is_no_torch_optimizer_is_refused():
    with pytest.raises(OptionError, match="refresh_weights_"):
        bs.attach(object(), build("step"))  # pyright: ignore[reportArgumentType]


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


# ---- other writes --------------------------------------------------------------------------------------------------


def write_data(model: nn.Sequential) -> None:
    model[0].weight.data.mul_(3)


@pytest.mark.parametrize("tell", [bs.invalidate, bs.refresh_weights_], ids=["invalidate", "refresh"])
def test_a_write_to_data_is_seen_when_somebody_says_so(tell: Callable[[nn.Module], Any]):
    model = build("step")
    bs.refresh_weights_(model)
    accumulate(model)
    write_data(model)
    tell(model)
    assert_fresh(model)


def test_a_write_to_data_that_nobody_told_of_is_found_when_asked_for(monkeypatch: pytest.MonkeyPatch):
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


def load(model: nn.Sequential, **options: Any) -> None:
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()}, **options)


@torch.no_grad()
def write_counted(model: nn.Sequential) -> None:
    model[0].weight.copy_(model[0].weight * 3)


def write_vector(model: nn.Sequential) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 3, model.parameters())


# what changes weights, and whether compiled code sees it without being told
WRITES: dict[str, tuple[Callable[[nn.Sequential], Any], bool]] = {
    "load_state_dict": (load, True),
    "load_state_dict assign": (lambda model: load(model, assign=True), True),
    "load one layer": (lambda model: model[0].load_state_dict(build("step")[0].state_dict()), True),
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
def test_writes_that_are_seen(write: str):
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


@pytest.mark.parametrize("write", WRITES)
def test_writes_that_compiled_code_sees(write: str):
    torch._dynamo.reset()
    model = build("step")
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


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = build("step")
        bs.refresh_weights_(model)
        with Calls() as calls:
            y = model(batch(0, 0))
        assert_same_bits(y, build("forward")(batch(0, 0)))
    assert calls.casts == 0


# ---- copies, ties, wrappers ----------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copies_start_closed(duplicate: Callable[[nn.Module], nn.Module]):
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


def test_wrappers_are_looked_through():
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


def test_another_recipe_closes():
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
    model[0].follow("mxfp8")
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
def test_products_that_end_while_open(until: dict[str, int], is_compiled: bool):
    models = {cast: build(cast, until=until) for cast in ("forward", "step")}
    for cast, model in models.items():
        torch._dynamo.reset()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        if cast == "step":
            bs.attach(optimizer, model)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        for step in range(5):
            bs.set_step_(model, step)
            accumulate(call, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(models["step"], models["forward"])


# ---- backward passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("recipe", FORMATS)
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
    """Also of a fused optimizer, whose writes nobody counts: the refresh after it is."""
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


# ---- torch.compile -------------------------------------------------------------------------------------------------


def casts_in(graph: torch.fx.GraphModule) -> int:
    """Casts of a compiled forward and its backward."""
    parts = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
    return sum("quantize" in str(node.target) for each in parts for node in each.graph.nodes)


@pytest.mark.parametrize(("kind", "recipe"), [*(("fused", each) for each in FORMATS), ("foreach", "mxfp8")])
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
