"""A layer that is timed: its forms, which share their parameters, the calls of one optimizer step, and what they keep.

A step clears gradients, casts the weights where they are shared by microbatches, and runs forward and backward of every
microbatch; the optimizer itself is not part of it. Inputs rotate from call to call, parameters do not: what is compiled
is compiled once. Of a layer whose weight fits in L2 both precisions find it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..autograd.recipe import Recipe, WeightCast
from ..autograd.weights import refresh_weights_, shared_weights
from ..formats.stochastic import rng_state
from ..nn import Linear
from .harness import random

Build = Callable[[Module], Module]
Ours = Callable[[Recipe], Build]


@dataclass(frozen=True, eq=False)
class Way:
    """How to train a layer.

    build: makes a module from the one in bf16, with the same parameters.  refreshes: weights are cast at the start of a
    step.  main_grads: gradients of weights are added into fp32 buffers by the products themselves.  compile: what a
    compiled form is made with, None for eager.
    """

    build: Build
    refreshes: bool = False
    main_grads: bool = False
    compile: Callable[[Module], Module] | None = None


def plain_way() -> Way:
    """The layer in bf16 itself."""
    return Way(lambda plain: plain)


def our_way(ours: Ours, recipe: Recipe, weight_cast: WeightCast = "forward", *, main_grads: bool = False) -> Way:
    """Ours by a recipe; weights that are cast once a step are cast at its start."""
    chosen = recipe.replace(name=recipe.name, weight_cast=weight_cast)
    return Way(ours(chosen), refreshes=weight_cast == "step", main_grads=main_grads)


class Form(NamedTuple):
    """A module as it is called, the same before compilation, its parameters, and the fp32 buffers of their gradients
    where it has some."""

    call: Callable[[Tensor], Tensor]
    module: Module
    parameters: list[Parameter]
    main_grads: list[Tensor | None]


class Forms:
    """A layer in bf16 and what others make of it, each built when it is first asked for."""

    def __init__(self, plain: Module) -> None:
        self.plain = plain
        self._made: dict[Way, Form] = {}

    def of(self, way: Way) -> Form:
        """The layer as it is trained that way."""
        if way not in self._made:
            module = way.build(self.plain)
            call = module if way.compile is None else way.compile(module)
            parameters = list(module.parameters())
            buffers = [torch.zeros_like(each, dtype=torch.float32) if way.main_grads else None for each in parameters]
            self._made[way] = Form(call, module, parameters, buffers)
        return self._made[way]


@dataclass(frozen=True, eq=False)
class Batch:
    """One input set: x [M, K], a leaf, and the gradient of the output dy [M, N]."""

    forms: Forms
    x: Tensor
    dy: Tensor

    def another(self) -> Batch:
        """Other values for the same layer."""
        x, dy = (normal(tuple(tensor.shape), tensor.device) for tensor in (self.x, self.dy))
        return replace(self, x=x.requires_grad_(), dy=dy)


class Results(NamedTuple):
    """Of one forward and backward."""

    y: Tensor
    dx: Tensor
    dw: list[Tensor]


def make_batch(plain: Module, tokens: int, features: tuple[int, int], device: torch.device) -> Batch:
    """A layer with its first input set of normal values."""
    x, dy = (normal((tokens, size), device) for size in features)
    return Batch(Forms(plain), x.requires_grad_(), dy)


def normal_linear(in_features: int, out_features: int, device: torch.device, *, bias: bool = False) -> torch.nn.Linear:
    """A layer in bf16 with normal weights: accuracy is stated for those."""
    layer = torch.nn.Linear(in_features, out_features, bias=bias, device="meta")
    layer.weight = Parameter(normal((out_features, in_features), device) * in_features**-0.5)
    if bias:
        layer.bias = Parameter(normal((out_features,), device))
    return layer


def our_linear(recipe: Recipe) -> Build:
    """Our layer with the parameters of the plain one."""

    def build(plain: Module) -> Module:
        assert isinstance(plain, torch.nn.Linear)
        # some recipes draw, by the layer's name
        layer = Linear(
            plain.in_features, plain.out_features, bias=False, device="meta", recipe=recipe, name="bench.linear",
            rng=rng_state(0, device=plain.weight.device),
        )  # fmt: skip
        layer.weight, layer.bias = plain.weight, plain.bias
        return layer

    return build


def normal(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """bf16; on a CPU its values in fp32, since many have no units for bf16 and take a hundred times longer."""
    values = random(shape, device)
    return values if values.is_cuda else values.float()


def step(way: Way, microbatches: int, batch: Batch) -> Results:
    """What is timed; results are of the last microbatch, but for gradients of weights, which are sums."""
    form, x = batch.forms.of(way), batch.x
    _clear(form)
    cast_weights(way, batch)
    y = x
    for _ in range(microbatches):
        x.grad = None
        y = form.call(x)
        y.backward(batch.dy)
    grads = [_grad(one) if main is None else main for one, main in zip(form.parameters, form.main_grads, strict=True)]
    return Results(y.detach(), _grad(x), grads)


def cast_weights(way: Way, batch: Batch) -> None:
    """What a step begins with, where weights are cast once a step."""
    if way.refreshes:
        refresh_weights_(batch.forms.of(way).module)


def infer(way: Way, batch: Batch) -> Tensor:
    """A forward alone; `cast_weights` comes before the first."""
    with torch.no_grad():
        return batch.forms.of(way).call(batch.x)


def infer_again(way: Way, batch: Batch) -> Results:
    """A forward alone, with weights that are cast before; its gradients are empty."""
    cast_weights(way, batch)
    y = infer(way, batch)
    return Results(y, y.new_empty(0), [])


def _clear(form: Form) -> None:
    """No gradients yet; the forms of a layer share parameters, but not buffers."""
    for parameter, main_grad in zip(form.parameters, form.main_grads, strict=True):
        parameter.grad = None
        parameter.main_grad = None if main_grad is None else main_grad.zero_()  # pyright: ignore[reportAttributeAccessIssue]


def take(way: Way, batch: Batch) -> Results:
    """A step of one microbatch whose gradients nobody else holds."""
    found = step(way, 1, batch)
    batch.x.grad = None
    for parameter in batch.forms.of(way).parameters:
        parameter.grad = None
    return found


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def kept_bytes(way: Way, batch: Batch) -> int:
    """Bytes that wait for the backward: storages that the graph holds, each once; parameters, and casts of weights that
    all microbatches share, are there anyway."""
    form = batch.forms.of(way)
    cast_weights(way, batch)
    anyway = {tensor.untyped_storage().data_ptr() for tensor in (*form.parameters, *_shared_tensors(form.module))}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in anyway:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        form.call(batch.x)
    return sum(kept.values())


def _shared_tensors(module: Module) -> list[Tensor]:
    found: list[Tensor] = []
    for _, layer, name, shared in shared_weights(module):
        pair = shared.operands(getattr(layer, name), layer.recipe_now)  # pyright: ignore[reportArgumentType]
        for operand in pair or ():
            if operand is not None:
                found += [operand.data, operand.scale]
    return found
