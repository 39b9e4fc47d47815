"""How Triton kernels start: compiled only, where operands have no memory, and the shortest way to launch one again."""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from .. import call_recording

try:
    from triton.backends.nvidia import driver as _driver
except ImportError:  # other builds, other versions
    _driver = None


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

    def launch(device: int, *arguments: object) -> None:
        if launch_hooks_are_set():
            compiled[grid](*arguments)
        else:
            run(*grid, stream(device), function, metadata, None, None, None, *arguments)

    return launch


class CachedLaunch(NamedTuple):
    """A compiled kernel on its grid, and its arguments but for addresses."""

    launch: Callable[..., None]
    rest: tuple[object, ...]


_MOST_KNOWN = 4096


def launch_cached(
    known: dict[tuple[object, ...], CachedLaunch],
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    rest: tuple[object, ...],
    *,
    last: bool = True,
    **options: object,
) -> None:
    """Start a kernel whose arguments are tensors, the first of which is there, then numbers and constants: straight to
    the compiled one where all but addresses has been seen.  last: with it an operator has done all of its work."""
    first = tensors[0]
    assert first is not None
    device = first.get_device()  # -1 where there is no GPU: then nothing is known
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    marks = tuple(
        None if tensor is None or at is None else (tensor.dtype, at % 16)
        for tensor, at in zip(tensors, pointers, strict=True)
    )
    key = (id(kernel), grid, rest, device, marks)
    found = known.get(key)
    if found is not None:
        found.launch(device, *pointers, *rest)
        return call_recording.note_launch(found.launch, pointers, rest, last=last)
    call_recording.refuse("a kernel that is being compiled")
    compiled = start(kernel, grid, first)(*tensors, *rest, **options)
    if compiled is not None and device >= 0:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = CachedLaunch(launcher(compiled, grid), rest)


def launch_hooks_are_set() -> bool:
    """Whether somebody has hooks on launches: each is a chain of calls, or what somebody put in its place."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


_expand: Any = getattr(_driver, "make_tensordesc_arg", None)


class BareLauncher(NamedTuple):
    """What lies behind the launch of a kernel with descriptors, where these are made anew each time."""

    run: Any
    function: Any
    metadata: Any
    launch: Callable[..., None]
    tensor_maps: Sequence[Any]

    def expand(self, descriptor: object, at: int) -> list[object]:
        """A descriptor as the launch takes it: the driver's map, sizes and strides. It holds for its address."""
        return _expand(descriptor, self.tensor_maps[at])

    def start(self, device: int, grid: tuple[int, int, int], *arguments: object) -> None:
        """Launch with expanded descriptors."""
        run, stream = self.run, triton.runtime.driver.active.get_current_stream(device)
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self.launch(*grid, stream, self.function, *flags, self.metadata, None, None, None, *arguments)


def bare_launcher(compiled: Any) -> BareLauncher | None:
    """Of a compiled kernel, where this Triton has one of the form that is known; it is nothing that Triton promises."""
    run = compiled.run
    try:
        inner = run.launch
        cells = dict(zip(inner.__code__.co_freevars, (cell.cell_contents for cell in inner.__closure__), strict=True))
        launch, maps = cells["launcher"], cells["tensordesc_meta"]
        takes = tuple(inspect.signature(_expand).parameters)
        whole = not run.global_scratch_size and not run.profile_scratch_size
        known = takes == ("arg", "metadata") and all(each is not None for each in maps)
        flags = hasattr(run, "launch_cooperative_grid") and hasattr(run, "launch_pdl")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return (
        BareLauncher(run, compiled.function, compiled.packed_metadata, launch, maps)
        if whole and known and flags
        else None
    )
