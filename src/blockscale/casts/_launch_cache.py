"""Launches of Triton kernels: compile only for meta tensors, and a launch cache that skips Triton's host path."""

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
    """Callable that takes a kernel's arguments and launches it on `grid`; for meta operands it only compiles.

    Compiling needs sizes, strides and dtypes only. `hardware.compiling_for` selects the GPU."""
    return functools.partial(kernel.warmup, grid=grid) if operand.is_meta else kernel[grid]


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Launch function of a compiled kernel: launch(device index, *all arguments), tensors as addresses.

    Constexpr arguments are passed too. `compiled[grid]` looks up device, stream and hooks each time, calls unset hooks,
    and queries the driver for the memory of each tensor; this function skips all of it. The kernel must have run on
    that device before, and the device must be current.
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
    """Launch function of a compiled kernel on its grid, and its arguments other than tensor addresses."""

    launch: Callable[..., None]
    static_args: tuple[object, ...]


_MAX_CACHED = 4096


def launch_cached(
    cache: dict[tuple[object, ...], CachedLaunch],
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    static_args: tuple[object, ...],
    *,
    last: bool = True,
    **options: object,
) -> None:
    """Launch a kernel through the cache; compile it at the first call with these shapes and constants.

    tensors: leading arguments; the first is not None.  static_args: remaining arguments, scalars and constexprs.
    last: the last launch of its operator."""
    first = tensors[0]
    assert first is not None
    device = first.get_device()  # -1 without a GPU: nothing is cached
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    alignments = tuple(
        None if tensor is None or at is None else (tensor.dtype, at % 16)
        for tensor, at in zip(tensors, pointers, strict=True)
    )
    key = (id(kernel), grid, static_args, device, alignments)
    cached = cache.get(key)
    if cached is not None:
        cached.launch(device, *pointers, *static_args)
        return call_recording.note_launch(cached.launch, pointers, static_args, last=last)
    call_recording.refuse("a kernel that is being compiled")
    compiled = start(kernel, grid, first)(*tensors, *static_args, **options)
    if compiled is not None and device >= 0:
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        cache[key] = CachedLaunch(launcher(compiled, grid), static_args)


def launch_hooks_are_set() -> bool:
    """Whether launch hooks (profilers) are installed: a non-empty hook chain, or a callable in its place."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


_expand_descriptor: Any = getattr(_driver, "make_tensordesc_arg", None)


class BareLauncher(NamedTuple):
    """Inner launcher of a kernel with TMA descriptors, which takes descriptors that are already expanded.

    Triton's own launch expands every descriptor at every call."""

    run: Any
    function: Any
    metadata: Any
    launch: Callable[..., None]
    tensor_maps: Sequence[Any]

    def expand(self, descriptor: object, at: int) -> list[object]:
        """Launch arguments of a descriptor: the driver's tensor map, sizes, strides. Valid for its address only."""
        return _expand_descriptor(descriptor, self.tensor_maps[at])

    def start(self, device: int, grid: tuple[int, int, int], *arguments: object) -> None:
        """Launch with expanded descriptors."""
        run, stream = self.run, triton.runtime.driver.active.get_current_stream(device)
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self.launch(*grid, stream, self.function, *flags, self.metadata, None, None, None, *arguments)


def bare_launcher(compiled: Any) -> BareLauncher | None:
    """Inner launcher of a compiled kernel. Uses private Triton internals; returns None if they changed."""
    run = compiled.run
    try:
        inner = run.launch
        closure = dict(zip(inner.__code__.co_freevars, (cell.cell_contents for cell in inner.__closure__), strict=True))
        launch, maps = closure["launcher"], closure["tensordesc_meta"]
        parameters = tuple(inspect.signature(_expand_descriptor).parameters)
        no_scratch = not run.global_scratch_size and not run.profile_scratch_size
        expected = parameters == ("arg", "metadata") and all(each is not None for each in maps)
        flags = hasattr(run, "launch_cooperative_grid") and hasattr(run, "launch_pdl")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return (
        BareLauncher(run, compiled.function, compiled.packed_metadata, launch, maps)
        if no_scratch and expected and flags
        else None
    )
