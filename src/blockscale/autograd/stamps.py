"""`stamp_of`: whether a tensor still has the values that it was cast from.

The count of in-place changes alone does not tell: `x.data = other` and `torch.utils.swap_tensors` count nothing. Both
change the address of the values, as long as the memory of the old ones is held.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import Parameter

from .transforms import are_transforms_active

Stamp = tuple[int, int]


def stamp_of(tensor: Tensor) -> Stamp | None:
    """Version counter and address of the values, 0 where there is none. None for a tensor made in inference mode,
    which counts no changes at all."""
    if tensor.is_inference():
        return None
    return tensor._version, tensor.data_ptr() if _has_address(tensor) else 0


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, to be held so that no later values are given its address."""
    return tensor.untyped_storage() if _has_address(tensor) else None


def _has_address(tensor: Tensor) -> bool:
    """False for DTensors and other subclasses, and for tensors that torch.vmap has wrapped."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return False
    return not (are_transforms_active() and _functorch.is_functorch_wrapped_tensor(tensor))
