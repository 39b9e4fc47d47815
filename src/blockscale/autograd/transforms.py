"""Derivatives that layers do not have: `check_transforms` refuses them where a layer is called, `no_double_backward`
where a gradient is differentiated again.

Layers have one backward, which `torch.autograd` runs. Transforms of `torch.func` hide `requires_grad` behind wrapped
tensors, and forward-mode AD does not use it: a layer that trusts `requires_grad` would return a result without a graph,
and gradients would be missing without an error. Calls without a derivative pass: `torch.vmap` under no_grad, or over
frozen weights and a frozen input. So does a batched backward, `torch.autograd.grad(is_grads_batched=True)`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..errors import TransformError, message, refuse

are_transforms_active = torch._C._are_functorch_transforms_active  # pyright: ignore[reportAttributeAccessIssue]


class Subject(NamedTuple):
    """Words of the error for one kind of function.  instead: alternative that takes every transform.  batched:
    alternative to vmap."""

    name: str
    rule: str
    instead: str
    batched: str


_BATCHES = (
    "pass the batch as leading axes of x, loop over the models of an ensemble, or call vmap under torch.no_grad()"
)
_DENSE = ", or for dense layers the recipe 'bf16'"
QUANTIZED = Subject("a quantized layer", "layers have", _DENSE, _BATCHES)
EXPERTS = Subject("a layer of experts", "layers have", _DENSE, _BATCHES)
ROUTING = Subject(
    "permute or combine",
    "permute and combine have",
    "",
    "pass the tokens of all samples as one tensor [T, D], or call vmap under torch.no_grad()",
)

# kind of derivative -> value, rule and fix of its error
_TEXTS = {
    "forward": (
        "a forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad) of {0.name}",
        "{0.rule} a backward pass, and no forward-mode derivative",
        "use torch.autograd.grad{0.instead}",
    ),
    "reverse": (
        "a derivative by torch.func (grad, vjp, jacrev) of {0.name}",
        "{0.rule} a backward pass that is run by torch.autograd alone",
        "use loss.backward() or torch.autograd.grad{0.instead}",
    ),
    "batched": (
        "torch.vmap over {0.name} whose gradient is wanted",
        "{0.rule} no backward pass of batched tensors",
        "{0.batched}",
    ),
    "compiled": (
        "a transform of torch.func in compiled code, over {0.name}",
        "{0.rule} a backward pass that is run by torch.autograd alone",
        "use loss.backward() or torch.autograd.grad, or call the transform under torch.no_grad()",
    ),
}


def check_transforms(*tensors: Tensor | None, subject: Subject = QUANTIZED) -> None:
    """Raise if a transform of torch.func or forward-mode AD wants a derivative by one of these tensors."""
    if are_transforms_active() or forward_ad._current_level >= 0:
        _check(tensors, subject)


def wants_gradient(*tensors: Tensor | None, subject: Subject) -> bool:
    """Whether a call with these tensors is recorded for a backward; raises as `check_transforms` does."""
    check_transforms(*tensors, subject=subject)
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _check(tensors: Iterable[Tensor | None], subject: Subject) -> None:
    if torch.compiler.is_compiling():  # wrapped tensors cannot be inspected
        found = "forward" if forward_ad._current_level >= 0 else "compiled" if torch.is_grad_enabled() else None
    else:
        found = next(filter(None, (_wanted(each) for each in tensors if each is not None)), None)
    if found is not None:
        what, rule, fix = (text.format(subject) for text in _TEXTS[found])
        refuse(what, rule, fix, error=TransformError)


# not traced: a traced tensor has no tangent, so a forward-mode derivative would not be found
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _wanted(tensor: Tensor) -> str | None:
    """Kind of derivative by this tensor that layers do not have, a key of `_TEXTS`; None for plain autograd alone."""
    kinds = {each.key() for each in _functorch.get_interpreter_stack() or ()}
    is_forward = _functorch.TransformType.Jvp in kinds
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor):
            if is_forward:  # refused even without a tangent, which is not visible here
                return "forward"
            if tensor.requires_grad and torch.is_grad_enabled():
                return "reverse"
        tensor = _functorch.get_unwrapped(tensor)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor, level=0).tangent is not None:
        return "forward"
    if not (kinds and tensor.requires_grad and torch.is_grad_enabled()):
        return None
    return "batched" if _functorch.TransformType.Vmap in kinds else "reverse"


_TWICE = message(
    "a gradient of a gradient through a quantized layer or a layer of experts",
    rule="its backward pass can be differentiated no further",
    fix="use dense layers with the recipe 'bf16' where a gradient penalty or a Hessian goes through",
)
Grads = tuple[Tensor | None, ...]


def no_double_backward(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Decorator of an autograd function's backward: with create_graph=True its results raise when differentiated.

    torch's `once_differentiable` notices only an incoming gradient that requires grad. It treats the other tensors that
    a gradient depends on, such as the weight in dX, as constants: a gradient penalty would silently train on wrong
    numbers.
    """
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
        raises = torch._C._functions.DelayedError(_TWICE.encode(), len(found) + len(sources))  # pyright: ignore[reportAttributeAccessIssue]
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
