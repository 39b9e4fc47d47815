"""A pass that is watched: which calls of each layer gradients come back to, and a model that is left as it was.

Hooks keep rows of every call, copied, so that what a model does with its tensors later does not matter. A layer that is
used several times has as many calls. Of a call that a checkpoint makes again one counts: gradients come back to one of
the two alone, the first or, where that was run without them (a reentrant checkpoint), the second.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, message
from ..formats.layout import locate
from ..grouped import Routing
from ..nn import GroupedLinear
from .figures import Seen

# rows of a call that are looked at, evenly spread; at least so many of each expert, or all that it has
ROWS, EXPERT_ROWS = 512, 32

Calls = dict[str, list[Seen]]


@contextmanager
def watched(layers: dict[str, torch.nn.Module]) -> Generator[tuple[Calls, list[int]]]:
    """Within it all calls of the layers are noted: what was seen, by name, and the rows of each call in their order."""
    calls: Calls = {}
    rows: list[int] = []
    with ExitStack() as stack:
        for name, layer in layers.items():
            # before the user's own hooks, who may return something else
            look = _watch(name, calls, rows)
            stack.callback(layer.register_forward_hook(look, prepend=True, with_kwargs=True).remove)
        yield calls, rows


def forget_gradients(calls: Calls) -> None:
    """Those of backwards within the forward, which are none of the loss."""
    for each in calls.values():
        for seen in each:
            seen.dy = None


def counted(calls: list[Seen]) -> list[Seen]:
    """The calls that gradients came back to; without any the first."""
    return [each for each in calls if each.dy is not None] or calls[:1]


def _watch(name: str, calls: Calls, rows: list[int]) -> Callable[..., None]:
    def look(module: torch.nn.Module, args: Any, named: dict[str, Any], output: Tensor) -> None:
        mine = calls.setdefault(name, [])
        has_gradients = any(each.has_gradient for each in mine)
        if has_gradients and not output.requires_grad:
            return  # no gradient will come back to it
        x, *where = inspect.signature(module.forward).bind(*args, **named).args
        x = getattr(x, "source", x).detach()
        _check_whole(name, x)
        x = x.reshape(-1, x.shape[-1])
        if not x.shape[0]:
            return
        rows.append(x.shape[0])
        seen, taken = _rows_of_experts(x, where[0]) if isinstance(module, GroupedLinear) else _rows(x)
        if not has_gradients:  # those before this one were run for nothing but their values
            mine.clear()
        mine.append(seen)
        seen.has_gradient = output.requires_grad
        if output.requires_grad:
            output.register_hook(lambda dy: setattr(seen, "dy", taken(dy.detach().reshape(-1, dy.shape[-1]))))

    return look


def _check_whole(name: str, x: Tensor) -> None:
    if hasattr(x, "full_tensor"):
        raise OptionError(
            message(
                f"{name}: its input is a {type(x).__name__}",
                rule="a rank measures rows that it has by itself; weights may be sharded, activations not",
                fix="take the sample without tensor parallelism",
            )
        )


Taken = Callable[[Tensor], Tensor]


def _rows(x: Tensor) -> tuple[Seen, Taken]:
    """Every n-th row."""
    step = max(1, -(-x.shape[0] // ROWS))

    def taken(rows: Tensor) -> Tensor:
        return rows[::step].clone(memory_format=torch.contiguous_format)

    some = taken(x)
    load = torch.full((1,), x.shape[0], device=x.device)
    return Seen(some, load, torch.full((1,), x.shape[0] / some.shape[0], dtype=torch.float64, device=x.device)), taken


def _rows_of_experts(x: Tensor, where: Tensor | Routing) -> tuple[Seen, Taken]:
    """The same number of each expert, evenly spread, or all that it has. How many that are the device knows alone: what
    is left of the room for them comes last and belongs to no expert."""
    offs = (where.offs if isinstance(where, Routing) else where).to(torch.int64)
    load = torch.diff(offs, prepend=offs.new_zeros(1))
    total = where.tokens.shape[0] if isinstance(where, Routing) else x.shape[0]
    experts = offs.shape[0]
    most = max(EXPERT_ROWS, ROWS // experts)
    count = load.clamp(max=most)
    ends = count.cumsum(0)
    group, place = locate(torch.arange(min(total, most * experts), device=x.device), ends)
    group_or_last = group.clamp(max=experts - 1)
    start = (offs - load)[group_or_last]
    row = start + place * load[group_or_last] // count[group_or_last].clamp(min=1)
    index = torch.where(group < experts, row, 0)
    source = where.tokens[index] if isinstance(where, Routing) else index
    stands_for = load.double() / count.clamp(min=1)
    return Seen(x[source], load, stands_for, ends.to(torch.int32)), lambda rows: rows[index]


# ---- a model that is left as it was ----------------------------------------------------------------------------------


class Untouched:
    """Whatever a forward and backward change is as before: gradients, buffers such as loads, and generators."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._gradients: dict[int, tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]] = {}
        self._buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._values: list[tuple[Tensor, Tensor, int]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Untouched:
        self._check_no_steps(self.model.named_parameters())
        gpus = {each.device for each in self.model.parameters() if each.is_cuda}
        for module in self.model.modules():
            live = module._buffers  # pyright: ignore[reportPrivateUsage]
            self._buffers.append((live, {**live}))
        self._values = [(each, each.clone(), _version(each)) for each in self.model.buffers()]
        self._stack.enter_context(torch.random.fork_rng(gpus))
        self.set_aside(self.model.parameters())  # last: what failed before it has changed nothing
        return self

    def before_backward(self, loss: Tensor) -> None:
        """Gradients of what lies outside of the model too: inputs, prompts, a head of its own."""
        leaves = _leaves(loss)
        self._check_no_steps((f"input {tuple(each.shape)}", each) for each in leaves)
        self.set_aside(leaves)

    def set_aside(self, tensors: Iterable[Tensor]) -> None:
        """Gradients, out of the way; a view's memory (buckets of DDP) is written by others, so it is copied."""
        for each in tensors:
            if id(each) in self._gradients:
                continue
            gradient, buffer = each.grad, getattr(each, "main_grad", None)
            copy = None if gradient is None or not gradient._is_view() else gradient.clone()
            self._gradients[id(each)] = each, gradient, copy, buffer
            each.grad = None
            if buffer is not None:
                each.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        with torch.no_grad():
            for each, gradient, copy, buffer in self._gradients.values():
                each.grad = gradient if gradient is None or copy is None else gradient.copy_(copy)
                if buffer is not None:
                    each.main_grad = buffer  # pyright: ignore[reportAttributeAccessIssue]
            for live, before in self._buffers:
                live.clear()
                live.update(before)
            for each, before, version in self._values:
                if _version(each) != version:  # an equal write would still count as one, and break a pending backward
                    each.copy_(before)

    def _check_no_steps(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise where a backward is more than that: hooks that step a parameter when its gradient is there."""
        for name, each in named:
            if id(each) not in self._gradients and getattr(each, "_post_accumulate_grad_hooks", None):
                raise OptionError(
                    message(
                        f"a sample of a model whose {name} has a hook behind its gradient",
                        rule="a sample leaves the model as it was, and such a hook may be an optimizer's step",
                        fix="take the sample before hooks are registered, or remove them meanwhile",
                    )
                )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _leaves(loss: Tensor) -> list[Tensor]:
    """All tensors that a backward would leave a gradient in."""
    waiting, known, leaves = [loss.grad_fn], set[Any](), list[Tensor]()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        waiting += [each for each, _ in node.next_functions]
    return leaves
