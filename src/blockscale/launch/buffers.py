"""Buffers of recorded calls: their layouts, and the functions that allocate them again."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

View = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class Buffer(NamedTuple):
    """A buffer of a recorded call.  lookup: of one that outlives the call, as a workspace does; else None."""

    tensor: Tensor
    zeroed: bool = False
    lookup: Callable[[], Tensor] | None = None


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def view_of(tensor: Tensor) -> View:
    """Dtype, sizes and strides."""
    return tensor.dtype, tensor.shape, tensor.stride()


def allocator(buffer: Buffer, returned: set[View | None]) -> tuple[Callable[[], Tensor], View]:
    """The function that allocates or finds a buffer, and the layout of its result: if it can, that of the only view of
    the buffer that the call returns."""
    tensor, zeroed, lookup = buffer
    view = view_of(tensor)
    if lookup is not None:
        return lookup, view
    if zeroed:
        return functools.partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device), view
    wanted = next(iter(returned)) if len(returned) == 1 else None
    if wanted is None or wanted[0] != tensor.dtype:
        return uninitialised(*view, tensor.device), view
    if extent(tensor) == extent(tensor.as_strided(*wanted[1:])):
        return uninitialised(*wanted, tensor.device), wanted
    whole, layout = uninitialised(*view, tensor.device), (tuple(wanted[1]), wanted[2], 0)
    return lambda: _part(whole(), *layout), wanted


# Allocation and `as_strided` without the dispatcher, in less than half of the time: what the code of torch.compile
# calls. Buffers are not filled under use_deterministic_algorithms.
_direct = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
# the result is no view to autograd, so nothing else may refer to the whole
_part = getattr(_direct, "_reinterpret_tensor", torch.as_strided)


def uninitialised(
    dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], device: torch.device
) -> Callable[[], Tensor]:
    """The function that allocates such a buffer, on a GPU that is current."""
    allocate = getattr(_direct, f"_empty_strided_{device.type}", None)
    if allocate is None:
        return functools.partial(torch.empty_strided, size, stride, dtype=dtype, device=device)
    return functools.partial(allocate, tuple(size), tuple(stride), dtype)
