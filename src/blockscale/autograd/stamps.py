"""`stamp_of`: version and address of a tensor, to detect that its values have changed since a cast.

The version counter alone is not enough: `x.data = other` and `torch.utils.swap_tensors` do not increment it. Both
change the address, as long as the old memory is held.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import Parameter

from .transforms import are_transforms_active

Stamp = tuple[int, int]


def stamp_of(tensor: Tensor) -> Stamp | None:
    """Version counter and address (0 if it has none); None for a tensor made in inference mode, which has no version
    counter."""
    if tensor.is_inference():
        return None
    return tensor._version, tensor.data_ptr() if _has_address(tensor) else 0


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor. Holding it keeps its address from being reused."""
    return tensor.untyped_storage() if _has_address(tensor) else None


def _has_address(tensor: Tensor) -> bool:
    """Whether data_ptr() works: not for DTensors and other subclasses, nor for tensors wrapped by torch.vmap."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return False
    return not (are_transforms_active() and _functorch.is_functorch_wrapped_tensor(tensor))
