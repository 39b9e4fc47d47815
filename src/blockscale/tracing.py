"""Marks for torch.compile that do not import the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_MARK = "_dynamo_marked_constant"


def constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.assume_constant_result` without the import of torch._dynamo.

    That is a third of the time in which this library is imported, and most programs compile nothing."""
    setattr(function, _MARK, True)
    return function
