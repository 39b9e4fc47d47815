"""`launch`: the only way in which kernels of this package start.

The call goes through Triton, which compiles where it has to. While a call of a layer or an operator is recorded
(`recording.py`), the compiled kernel, its grid and its arguments are recorded too; replays start it without Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .recording import recorder


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Any],
    rest: tuple[object, ...],
    *,
    through: Callable[[Callable[..., Any]], Any] | None = None,
    **options: object,
) -> None:
    """Launch a kernel on the device of its first tensor; for a meta tensor compile it only.

    tensors: leading arguments, each a tensor, None or a TMA descriptor; descriptors come first, the first is not None.
    rest: the other arguments, numbers and constexprs; they follow from the tensors' layouts and the operator's
    arguments.  through: calls the function it is given, which launches, with further options.  options: of Triton.
    """
    first = getattr(tensors[0], "base", tensors[0])
    device = first.get_device()  # -1 without a GPU
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            return launch(kernel, grid, tensors, rest, through=through, **options)

    def run(**more: object) -> Any:
        if first.is_meta:  # compiling takes sizes, strides and dtypes only; `hardware.compiling_for` selects the GPU
            return kernel.warmup(*tensors, *rest, grid=grid, **options, **more)
        return kernel[grid](*tensors, *rest, **options, **more)

    compiled = run() if through is None else through(run)
    found = recorder()
    if found is not None:
        _record(found, compiled, grid, tensors, rest)


def _record(found: Any, compiled: Any, grid: tuple[int, ...], tensors: Sequence[Any], rest: tuple[object, ...]) -> None:
    from .triton_internals import DRIVER, recorded_start

    if compiled is None:  # the interpreter
        return found.refuse("a kernel that was not compiled")
    whole = grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1
    descriptors = [each for each in tensors if each is not None and not isinstance(each, Tensor)]
    bases = [getattr(each, "base", each) for each in tensors]
    pointers = [None if each is None else each.data_ptr() for each in bases]
    found.driver = DRIVER
    found.add_launch(recorded_start(compiled, whole, bases[0].get_device(), descriptors), pointers, rest)
