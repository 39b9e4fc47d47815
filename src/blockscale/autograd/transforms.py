"""`check_transforms`: derivatives that layers do not have, refused where a layer is called.

Layers have one backward, which `torch.autograd` runs. Transforms of `torch.func` hide `requires_grad` behind wrapped
tensors, and forward-mode AD never asks for it: a layer that trusts `requires_grad` would give its result without a
graph, and gradients would be missing without an error. What wants no derivative passes: `torch.vmap` under no_grad, or
over frozen weights and a frozen input. So does a batched backward, `torch.autograd.grad(is_grads_batched=True)`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from ..errors import TransformError, message

are_transforms_active = torch._C._are_functorch_transforms_active  # pyright: ignore[reportAttributeAccessIssue]


class Subject(NamedTuple):
    """Words for what has no such derivative.  instead: what else takes every transform.  batched: in place of vmap."""

    name: str
    rule: str
    instead: str
    batched: str


_BATCHES = (
    "pass the batch as leading axes of x, loop over the models of an ensemble, or call vmap under torch.no_grad()"
)
_DENSE = ", or for dense layers the recipe 'bf16'"
LOW = Subject("a layer in low precision", "layers have", _DENSE, _BATCHES)
EXPERTS = Subject("a layer of experts", "layers have", _DENSE, _BATCHES)
ROUTING = Subject(
    "permute or combine",
    "permute and combine have",
    "",
    "pass the tokens of all samples as one tensor [T, D], or call vmap under torch.no_grad()",
)

# of each kind of derivative: what was called, the rule, the fix
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


def check_transforms(*tensors: Tensor | None, subject: Subject = LOW) -> None:
    """Raise if a transform of torch.func or forward-mode AD wants a derivative by one of these tensors."""
    if are_transforms_active() or forward_ad._current_level >= 0:
        _check(tensors, subject)


def wants_gradient(*tensors: Tensor | None, subject: Subject) -> bool:
    """Whether a call with these tensors is recorded for a backward; raises as `check_transforms` does."""
    check_transforms(*tensors, subject=subject)
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _check(tensors: Iterable[Tensor | None], subject: Subject) -> None:
    if torch.compiler.is_compiling():  # which cannot look behind wrapped tensors
        found = "forward" if forward_ad._current_level >= 0 else "compiled" if torch.is_grad_enabled() else None
    else:
        found = next(filter(None, (_wanted(each) for each in tensors if each is not None)), None)
    if found is not None:
        what, rule, fix = (text.format(subject) for text in _TEXTS[found])
        raise TransformError(message(what, rule=rule, fix=fix))


# a traced tensor has no tangent: code around a graph would find nothing to refuse
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _wanted(tensor: Tensor) -> str | None:
    """The kind of derivative by a tensor that no layer has. Plain autograd's is none, but below a transform."""
    kinds = {each.key() for each in _functorch.get_interpreter_stack() or ()}
    is_forward = _functorch.TransformType.Jvp in kinds
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor):
            if is_forward:  # tensors without a tangent are refused too: which have one cannot be seen from here
                return "forward"
            if tensor.requires_grad and torch.is_grad_enabled():
                return "reverse"
        tensor = _functorch.get_unwrapped(tensor)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor, level=0).tangent is not None:
        return "forward"
    if not (kinds and tensor.requires_grad and torch.is_grad_enabled()):
        return None
    return "batched" if _functorch.TransformType.Vmap in kinds else "reverse"
