"""`define_op`: how an operation becomes a PyTorch operator, in one call.

Schema from the type hints, one body for every device (it selects a kernel from the table), a fake that allocates and
does nothing else, and a FLOP formula. `Library.define` + `impl` costs about half of `torch.library.custom_op` per call
and is just as opaque to torch.compile. Autograd lives above the operators, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from . import env

NAMESPACE = "blockscale"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OPERATORS: dict[str, OpOverload] = {}


def define_op(
    *,
    fake: Callable[..., object],
    flops: Callable[..., int] | None = None,
    mutates: Sequence[str] = (),
) -> Callable[[Callable[..., object]], OpOverload]:
    """Decorator: turn a typed function of tensors, strings and numbers into an operator that PyTorch can trace.

    fake: the same signature, allocates the outputs and nothing else.  flops: the same signature with shapes in place of
    tensors.  mutates: names of arguments written in place.
    """

    def define(body: Callable[..., object]) -> OpOverload:
        name = body.__name__
        schema = torch.library.infer_schema(body, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _shielded(body), "CompositeExplicitAutograd")
        # results never require grad, so a backward through a bare operator raises; torch would only warn
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        if flops is not None:
            register_flop_formula(packet)(flops)
        OPERATORS[name] = packet.default
        return packet.default

    return define


def _shielded(body: Callable[..., object]) -> Callable[..., object]:
    """The body as kernels need it: no autocast (it would lower the precision of their matrix products) and no autograd
    (a bias or a column sum would record half a graph)."""

    @functools.wraps(body)
    def run(*args: object, **named: object) -> object:
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return body(*args, **named)

    return run


# read once: tests and debugging sessions set it before the import
_POISON = env.flag("BLOCKSCALE_POISON")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised output; with BLOCKSCALE_POISON every byte is FF, so what a kernel forgot to write is NaN."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if _POISON and not torch.compiler.is_compiling():
        out.view(-1).view(torch.uint8).fill_(0xFF)
    return out
