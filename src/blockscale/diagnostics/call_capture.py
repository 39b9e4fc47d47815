"""Capture of layer calls by forward hooks, and restoration of the model's state afterwards.

Hooks copy rows of every call, so later in-place writes do not matter. A layer that is used several times has several
calls. A call that activation checkpointing recomputes counts once: only one of the two gets a gradient, the first or,
with a reentrant checkpoint (whose first forward runs without autograd), the second.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import refuse
from ..formats.layout import locate
from ..grouped import Routing, as_routing
from ..nn import GroupedLinear
from .error_sums import CapturedCall

# sampled rows per call, evenly spread; at least EXPERT_ROWS per expert, or all that it has
ROWS, EXPERT_ROWS = 512, 32

Calls = dict[str, list[CapturedCall]]


@contextmanager
def capture_calls(layers: dict[str, torch.nn.Module]) -> Generator[tuple[Calls, list[int]]]:
    """Context that captures all calls of the layers: (calls by layer name, rows of each call in order)."""
    calls: Calls = {}
    rows: list[int] = []
    with ExitStack() as stack:
        for name, layer in layers.items():
            # before the user's own hooks, which may replace the output
            hook = _capture_hook(name, calls, rows)
            stack.callback(layer.register_forward_hook(hook, prepend=True, with_kwargs=True).remove)
        yield calls, rows


def clear_gradients(calls: Calls) -> None:
    """Drop gradients of backwards that ran inside the forward: they are not gradients of the loss."""
    for each in calls.values():
        for call in each:
            call.dy = None


def calls_with_gradient(calls: list[CapturedCall]) -> list[CapturedCall]:
    """Calls that got a gradient; the first call if none did."""
    return [each for each in calls if each.dy is not None] or calls[:1]


def _capture_hook(name: str, calls: Calls, rows: list[int]) -> Callable[..., None]:
    def capture(module: torch.nn.Module, args: Any, named: dict[str, Any], output: Tensor) -> None:
        captured = calls.setdefault(name, [])
        has_gradients = any(each.has_gradient for each in captured)
        if has_gradients and not output.requires_grad:
            return  # it will get no gradient
        x, *where = inspect.signature(module.forward).bind(*args, **named).args
        x = getattr(x, "source", x).detach()
        _check_not_sharded(name, x)
        x = x.reshape(-1, x.shape[-1])
        if not x.shape[0]:
            return
        rows.append(x.shape[0])
        call, subsample = _sample_experts(x, where[0]) if isinstance(module, GroupedLinear) else _sample_rows(x)
        if not has_gradients:  # earlier calls ran without autograd
            captured.clear()
        captured.append(call)
        call.has_gradient = output.requires_grad
        if output.requires_grad:
            output.register_hook(lambda dy: setattr(call, "dy", subsample(dy.detach().reshape(-1, dy.shape[-1]))))

    return capture


def _check_not_sharded(name: str, x: Tensor) -> None:
    if hasattr(x, "full_tensor"):
        refuse(
            f"{name}: its input is a {type(x).__name__}",
            "a rank measures rows that it has by itself; weights may be sharded, activations not",
            "take the sample without tensor parallelism",
        )


Subsample = Callable[[Tensor], Tensor]


def _sample_rows(x: Tensor) -> tuple[CapturedCall, Subsample]:
    """Every n-th row of a call, and the function that takes the same rows of dy."""
    step = max(1, -(-x.shape[0] // ROWS))

    def subsample(rows: Tensor) -> Tensor:
        return rows[::step].clone(memory_format=torch.contiguous_format)

    some = subsample(x)
    load = torch.full((1,), x.shape[0], device=x.device)
    weight = torch.full((1,), x.shape[0] / some.shape[0], dtype=torch.float64, device=x.device)
    return CapturedCall(some, load, weight), subsample


def _sample_experts(x: Tensor, given: Tensor | Routing) -> tuple[CapturedCall, Subsample]:
    """The same number of rows of each expert, evenly spread, or all that it has. Only the device knows the counts, so
    the sample has a fixed size; its unused rows come last and belong to no expert."""
    routing = as_routing(given)
    offs, tokens = routing.offs.to(torch.int64), routing.tokens
    load = torch.diff(offs, prepend=offs.new_zeros(1))
    total = (x if tokens is None else tokens).shape[0]
    experts = offs.shape[0]
    most = max(EXPERT_ROWS, ROWS // experts)
    count = load.clamp(max=most)
    ends = count.cumsum(0)
    group, place = locate(torch.arange(min(total, most * experts), device=x.device), ends)
    group_or_last = group.clamp(max=experts - 1)
    start = (offs - load)[group_or_last]
    row = start + place * load[group_or_last] // count[group_or_last].clamp(min=1)
    index = torch.where(group < experts, row, 0)
    source = index if tokens is None else tokens[index]
    row_weight = load.double() / count.clamp(min=1)
    return CapturedCall(x[source], load, row_weight, ends.to(torch.int32)), lambda rows: rows[index]


# ---- restoring the model's state -------------------------------------------------------------------------------------


@contextmanager
def restored_state(model: torch.nn.Module) -> Generator[Callable[[Tensor], None]]:
    """Context that restores what a forward and backward change: gradients, buffers and random generators.

    Yields a function to call with the loss before its backward. It sets aside gradients of tensors outside the model
    too, such as inputs, prompts or a separate head.
    """
    gradients: dict[int, tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]] = {}
    live = [module._buffers for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
    buffers = [(each, {**each}) for each in live]
    values = [(each, each.clone(), _version(each)) for each in model.buffers()]

    def set_aside(named: Iterable[tuple[str, Tensor]]) -> None:
        """Detach gradients of tensors. A gradient that is a view (of a DDP bucket) is copied: it may be overwritten."""
        fresh = {id(each): (name, each) for name, each in named if id(each) not in gradients}
        for name, each in fresh.values():
            if getattr(each, "_post_accumulate_grad_hooks", None):
                refuse(
                    f"a sample of a model whose {name} has a hook behind its gradient",
                    "a sample leaves the model as it was, and such a hook may be an optimizer's step",
                    "take the sample before hooks are registered, or remove them meanwhile",
                )
        for key, (_, each) in fresh.items():
            gradient, main = each.grad, getattr(each, "main_grad", None)
            copy = None if gradient is None or not gradient._is_view() else gradient.clone()
            gradients[key] = each, gradient, copy, main
            each.grad = None
            if main is not None:
                each.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]

    gpus = {each.device for each in model.parameters() if each.is_cuda}
    with torch.random.fork_rng(gpus):
        set_aside(model.named_parameters())
        try:
            yield lambda loss: set_aside((f"input {tuple(each.shape)}", each) for each in _leaves(loss))
        finally:
            with torch.no_grad():
                for each, gradient, copy, main in gradients.values():
                    each.grad = gradient if gradient is None or copy is None else gradient.copy_(copy)
                    if main is not None:
                        each.main_grad = main  # pyright: ignore[reportAttributeAccessIssue]
                for each, before in buffers:
                    each.clear()
                    each.update(before)
                for each, before, version in values:
                    if _version(each) != version:  # a write bumps the version, which would break a pending backward
                        each.copy_(before)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _leaves(loss: Tensor) -> list[Tensor]:
    """Leaf tensors that a backward accumulates gradients in."""
    pending, visited, leaves = [loss.grad_fn], set[Any](), list[Tensor]()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        pending += [each for each, _ in node.next_functions]
    return leaves
