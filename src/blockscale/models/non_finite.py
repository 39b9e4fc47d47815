"""The layer where a NaN or infinity first appeared, by a replay of a batch with hooks on every layer.

Inputs, outputs and gradients are checked. Layers are called one by one, not fused, so last bits may differ. Over ranks
the first rank with a layer that made such a value of finite ones is named.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.dtensor import local
from ..distributed.world import ALONE, World
from ..nn import GroupedLinear, advance_
from .transformer import Transformer

# places that took the value from another layer
_CAME = ("from the layer before it", "from the layer after it")
# attribute in which torch keeps the result of `Module.compile`
_CALL = "_compiled_call_impl"


@dataclass
class Place:
    """Origin of the first value that is not finite.  op: fprop, dgrad or wgrad of a linear layer, else in words.  rank:
    that found it, among several."""

    layer: str
    op: str
    rank: int | None = None


def locate(model: Transformer, pieces: list[Tensor], world: World = ALONE) -> Place | None:
    """The first layer and op with finite inputs and a result that is not finite; None if all is finite now."""
    weights = (name for name, parameter in model.named_parameters() if not _finite(local(parameter)))
    found = _first([Place(name, "the weight itself") for name in weights], world)
    if found is not None:
        return found
    with _uncompiled(model):
        for batch in pieces:
            found = _check_batch(model, batch, len(pieces), world)
            for _ in range(world.size):
                advance_(model)
            if found is not None:
                return found
    return None


def _first(places: list[Place], world: World) -> Place | None:
    """The first place of this process; over ranks the same on all, of the first rank whose layer made it."""
    if world.size == 1:
        return places[0] if places else None
    found = [replace(each, rank=rank) for rank, mine in enumerate(world.gather(places[:1])) for each in mine]
    return min(found, key=lambda each: each.op.endswith(_CAME), default=None)


def _check_batch(model: Transformer, batch: Tensor, batches: int, world: World) -> Place | None:
    """Forward and backward of one microbatch with hooks. Ranks agree in between, since both are collective."""
    found: list[Place] = []
    _drop_gradients(model)
    with ExitStack() as stack:
        _hook_layers(model, found, stack, over_ranks=world.size > 1)
        loss = model.loss(batch)
        if not found and not _finite(loss):
            found.append(Place("loss", "the cross entropy"))
        place = _first(found, world)
        if place is None:
            with warnings.catch_warnings(action="ignore"):  # torch warns about hooks on layers without input gradient
                (loss / batches).backward()
    if world.size == 1:
        found += _bad_weight_gradients(model)
    _drop_gradients(model)
    return place or _first(found, world)


def _drop_gradients(model: Transformer) -> None:
    """Drop gradients, also `main_grad`, which wgrad would accumulate into: the replay checks new ones."""
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _uncompiled(model: Transformer) -> Generator[None]:
    """Context without compiled code, so that hooks see every layer."""
    calls = [(module, getattr(module, _CALL)) for module in model.modules()]
    entropy = vars(model).pop("entropy", None)
    for module, _ in calls:
        setattr(module, _CALL, None)
    try:
        yield
    finally:
        for module, call in calls:
            setattr(module, _CALL, call)
        if entropy is not None:
            model.entropy = entropy


def _hook_layers(model: nn.Module, found: list[Place], stack: ExitStack, *, over_ranks: bool) -> None:
    """Add forward and backward checks to every leaf module and every linear layer."""
    wgrad = functools.partial(_hook_gradients, found, stack) if over_ranks else None
    for name, module in model.named_modules():
        if not _is_linear(module) and any(True for _ in module.children()):
            continue
        forward = module.register_forward_hook(functools.partial(_check_forward, name, found, wgrad))
        backward = module.register_full_backward_hook(functools.partial(_check_backward, name, found))
        stack.callback(forward.remove)
        stack.callback(backward.remove)


def _hook_gradients(found: list[Place], stack: ExitStack, name: str, module: nn.Module) -> None:
    """Check the gradients of a layer's parameters before they are summed over ranks. The parameters are whole now."""

    def check(gradient: Tensor) -> None:
        if not found and not _finite(gradient):
            found.append(Place(name, "wgrad" if gradient.dim() >= 2 else "the gradient of its parameter"))

    for parameter in module.parameters(recurse=False) if torch.is_grad_enabled() else ():
        if parameter.requires_grad:
            stack.callback(parameter.register_hook(check).remove)


def _check_forward(name: str, found: list[Place], wgrad: Any, module: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook of a layer: record it if it is the first with an output that is not finite."""
    if wgrad is not None:
        wgrad(name, module)
    if not found and not _finite(output):
        made = "fprop" if _is_linear(module) else "its forward"
        found.append(Place(name, made if _finite(inputs) else f"its input, {_CAME[0]}"))


def _check_backward(name: str, found: list[Place], module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    """Backward hook of a layer: record it if it is the first with a gradient that is not finite."""
    if found:
        return
    if not _finite(grad_output):
        found.append(Place(name, f"the gradient of its output, {_CAME[1]}"))
    elif not _finite(grad_input):
        found.append(Place(name, "dgrad" if _is_linear(module) else "its backward"))


def _bad_weight_gradients(model: nn.Module) -> list[Place]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            layer = name.removesuffix(".weight")
            return [Place(layer, "wgrad" if parameter.dim() >= 2 else "the gradient of its parameter")]
    return []


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | GroupedLinear)


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    return all(_finite(each) for each in value) if isinstance(value, tuple | list) else True
