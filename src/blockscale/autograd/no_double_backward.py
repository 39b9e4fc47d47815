"""`no_double_backward`: a backward whose gradients raise when they are differentiated again.

torch's `once_differentiable` notices only an incoming gradient that requires grad. It treats the other tensors that a
gradient depends on, such as the weight in dX, as constants: a gradient penalty would silently train on wrong numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import message
from .transforms import check_transforms

_TEXT = message(
    "a gradient of a gradient through a quantized layer or a layer of experts",
    rule="its backward pass can be differentiated no further",
    fix="use dense layers with the recipe 'bf16' where a gradient penalty or a Hessian goes through",
)
Grads = tuple[Tensor | None, ...]


def no_double_backward(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Decorator of an autograd function's backward: with create_graph=True its results raise when differentiated."""
    inner = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Grads:
        check_transforms(*grads)
        if torch.compiler.is_compiling():
            return inner(ctx, *grads)
        if not torch.is_grad_enabled():  # without create_graph nothing is recorded
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        # results require grad even if no leaf does, so that `backward()` always raises
        results = (None if each is None else each.detach().requires_grad_() for each in found)
        sources = (*grads, *_leaves(ctx))
        raises = torch._C._functions.DelayedError(_TEXT.encode(), len(found) + len(sources))  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        # the error node has edges to all sources: otherwise a pass for one of them alone would not reach it, and torch
        # would treat the gradient as a constant
        return raises(*results, *sources)[: len(found)]

    return run


def _leaves(ctx: Any) -> list[Tensor]:
    """Leaves of the graph below a backward node. Intermediate tensors are left out, since holding them would keep their
    memory; the incoming gradient leads to them if it depends on the layer's result."""
    found: list[Tensor] = []
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        above = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(above)
        nodes += above
    return found
