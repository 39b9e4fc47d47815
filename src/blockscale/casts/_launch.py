"""How Triton kernels start: compiled only, where operands have no memory, and the shortest way to launch one again."""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor


def start(kernel: Any, grid: tuple[int, ...], operand: Tensor) -> Callable[..., Any]:
    """What to call with a kernel's arguments. With operands of the meta device it compiles and runs nothing: sizes,
    strides and dtypes are all that a compiler asks (`hardware.compiling_for` says for which GPU)."""
    return functools.partial(kernel.warmup, grid=grid) if operand.is_meta else kernel[grid]


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """A function of the device's index and all of a kernel's arguments, constants included, tensors as addresses.

    `compiled[grid]` looks up device, stream and hooks each time, calls even hooks that nobody set, and asks the driver
    whose memory a tensor is. Here that is known, or left out. The kernel must have run on that device, and it must be
    the current one.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream = triton.runtime.driver.active.get_current_stream
    hooks = triton.knobs.runtime

    def launch(device: int, *arguments: object) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # each is a chain of calls, or what somebody put in its place
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[grid](*arguments)
        else:
            run(*grid, stream(device), function, metadata, None, None, None, *arguments)

    return launch
