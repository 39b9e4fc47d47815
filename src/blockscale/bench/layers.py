"""A timed layer: its variants, which share parameters, the calls of one optimizer step, and bytes saved for backward.

A step clears gradients, casts the weights if microbatches share the casts, and runs forward and backward of every
microbatch; the optimizer is not part of it. Inputs rotate from call to call, parameters do not, so that compiled
variants compile once. A weight that fits in L2 stays there in both precisions.
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
class Variant:
    """A way to train a layer.

    build: makes a module from the bf16 one, with the same parameters.  refreshes: weights are cast at the start of a
    step.  main_grads: wgrad accumulates into fp32 buffers.  compile: compiles the module; None for eager.
    """

    build: Build
    refreshes: bool = False
    main_grads: bool = False
    compile: Callable[[Module], Module] | None = None


def plain_variant() -> Variant:
    """Variant of the bf16 layer itself."""
    return Variant(lambda plain: plain)


def our_variant(
    ours: Ours, recipe: Recipe, weight_cast: WeightCast = "forward", *, main_grads: bool = False
) -> Variant:
    """Variant of our layer by a recipe; weights that are cast once a step are cast at its start."""
    chosen = recipe.replace(name=recipe.name, weight_cast=weight_cast)
    return Variant(ours(chosen), refreshes=weight_cast == "step", main_grads=main_grads)


class BuiltLayer(NamedTuple):
    """A layer of one variant.  call: the module, compiled or not.  module: before compilation.  main_grads: fp32
    accumulators of the parameters' gradients, or None."""

    call: Callable[[Tensor], Tensor]
    module: Module
    parameters: list[Parameter]
    main_grads: list[Tensor | None]


class BuiltLayers:
    """A bf16 layer and its variants, each built at first use."""

    def __init__(self, plain: Module) -> None:
        self.plain = plain
        self._made: dict[Variant, BuiltLayer] = {}

    def of(self, variant: Variant) -> BuiltLayer:
        """The layer of a variant."""
        if variant not in self._made:
            module = variant.build(self.plain)
            call = module if variant.compile is None else variant.compile(module)
            parameters = list(module.parameters())
            buffers = [
                torch.zeros_like(each, dtype=torch.float32) if variant.main_grads else None for each in parameters
            ]
            self._made[variant] = BuiltLayer(call, module, parameters, buffers)
        return self._made[variant]


@dataclass(frozen=True, eq=False)
class Batch:
    """One input set: x [M, K], a leaf, and the gradient of the output dy [M, N]."""

    built: BuiltLayers
    x: Tensor
    dy: Tensor

    def another(self) -> Batch:
        """Another input set for the same layer."""
        x, dy = (normal(tuple(tensor.shape), tensor.device) for tensor in (self.x, self.dy))
        return replace(self, x=x.requires_grad_(), dy=dy)


class Results(NamedTuple):
    """Output, dX and gradients of the weights of one forward and backward."""

    y: Tensor
    dx: Tensor
    dw: list[Tensor]


def make_batch(plain: Module, tokens: int, features: tuple[int, int], device: torch.device) -> Batch:
    """A layer with its first input set of normal values."""
    x, dy = (normal((tokens, size), device) for size in features)
    return Batch(BuiltLayers(plain), x.requires_grad_(), dy)


def normal_linear(in_features: int, out_features: int, device: torch.device, *, bias: bool = False) -> torch.nn.Linear:
    """bf16 layer with normal weights, for which accuracy gates are stated."""
    layer = torch.nn.Linear(in_features, out_features, bias=bias, device="meta")
    layer.weight = Parameter(normal((out_features, in_features), device) * in_features**-0.5)
    if bias:
        layer.bias = Parameter(normal((out_features,), device))
    return layer


def our_linear(recipe: Recipe) -> Build:
    """Our layer with the parameters of the plain one."""

    def build(plain: Module) -> Module:
        assert isinstance(plain, torch.nn.Linear)
        # name and rng are for recipes with stochastic rounding
        layer = Linear(
            plain.in_features, plain.out_features, bias=False, device="meta", recipe=recipe, name="bench.linear",
            rng=rng_state(0, device=plain.weight.device),
        )  # fmt: skip
        layer.weight, layer.bias = plain.weight, plain.bias
        return layer

    return build


def normal(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Normal bf16 values; on a CPU held in fp32, since bf16 takes a hundred times longer on many CPUs."""
    values = random(shape, device)
    return values if values.is_cuda else values.float()


def step(variant: Variant, microbatches: int, batch: Batch) -> Results:
    """One timed step. Results are of the last microbatch, except gradients of weights, which are sums over all."""
    layer, x = batch.built.of(variant), batch.x
    _clear(layer)
    cast_weights(variant, batch)
    y = x
    for _ in range(microbatches):
        x.grad = None
        y = layer.call(x)
        y.backward(batch.dy)
    grads = [_grad(one) if main is None else main for one, main in zip(layer.parameters, layer.main_grads, strict=True)]
    return Results(y.detach(), _grad(x), grads)


def cast_weights(variant: Variant, batch: Batch) -> None:
    """Cast the weights if the variant casts them once a step."""
    if variant.refreshes:
        refresh_weights_(batch.built.of(variant).module)


def infer(variant: Variant, batch: Batch) -> Tensor:
    """Forward without gradients; call `cast_weights` before the first."""
    with torch.no_grad():
        return batch.built.of(variant).call(batch.x)


def infer_again(variant: Variant, batch: Batch) -> Results:
    """Cast the weights and run a forward without gradients; dX and dW of the result are empty."""
    cast_weights(variant, batch)
    y = infer(variant, batch)
    return Results(y, y.new_empty(0), [])


def _clear(layer: BuiltLayer) -> None:
    """Clear gradients; variants share parameters, but not fp32 accumulators."""
    for parameter, main_grad in zip(layer.parameters, layer.main_grads, strict=True):
        parameter.grad = None
        parameter.main_grad = None if main_grad is None else main_grad.zero_()  # pyright: ignore[reportAttributeAccessIssue]


def take(variant: Variant, batch: Batch) -> Results:
    """A step of one microbatch; its gradients are detached from the parameters."""
    found = step(variant, 1, batch)
    batch.x.grad = None
    for parameter in batch.built.of(variant).parameters:
        parameter.grad = None
    return found


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def saved_bytes(variant: Variant, batch: Batch) -> int:
    """Bytes saved for backward: each storage that the graph holds once, without parameters and weight casts that all
    microbatches share."""
    layer = batch.built.of(variant)
    cast_weights(variant, batch)
    shared = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters, *_shared_tensors(layer.module))}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer.call(batch.x)
    return sum(saved.values())


def _shared_tensors(module: Module) -> list[Tensor]:
    found: list[Tensor] = []
    for _, layer, name, shared in shared_weights(module):
        pair = shared.operands(getattr(layer, name), layer.recipe_now)  # pyright: ignore[reportArgumentType]
        for operand in pair or ():
            if operand is not None:
                found += [operand.data, operand.scale]
    return found
