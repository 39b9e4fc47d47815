"""Which versions of torch compile layers of experts that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.torch_version import TorchVersion

P = ParamSpec("P")
T = TypeVar("T")

# torch 2.11 traces exchanges whose gradients are all zero
COMPILES_EXPERTS = TorchVersion(torch.__version__) >= "2.13"


def eager_before_2_13(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which older versions of torch run eagerly inside compiled code: a graph break, and with
    fullgraph=True torch's error."""
    return function if COMPILES_EXPERTS else torch.compiler.disable(function)  # pyright: ignore[reportReturnType]
