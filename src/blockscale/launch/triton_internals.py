"""All access to Triton's private parts: launches of compiled kernels without Triton's host path, and TMA descriptors.

`compiled[grid](...)` looks up device, stream and hooks at every call, queries the driver for the memory of each tensor,
and encodes every TMA descriptor again. A replayed launch does none of it. `bare_launcher` is the guard: where a version
of Triton differs from what this file expects it returns None, and replays pass through Triton's launcher.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .recording import Driver, Start

try:
    from triton.backends.nvidia import driver as _driver
except ImportError:  # other builds, other versions
    _driver = None

Grid = tuple[int, int, int]


class Ptxas(NamedTuple):
    """Triton's own ptxas for sm_90.  path: of the binary.  ptx_version: of the PTX that Triton emits for it.  options:
    that Triton passes unless a launch has its own."""

    path: str
    ptx_version: int
    options: str | None


def own_ptxas() -> Ptxas:
    """Raises ImportError or AttributeError with a Triton that does not tell."""
    from triton.backends.nvidia.compiler import CUDAOptions, get_ptxas

    found = get_ptxas(90)
    return Ptxas(found.path, ptx_version(found.version), CUDAOptions.ptx_options)


def ptx_version(cuda: str) -> int:
    """Version of PTX that the ptxas of a CUDA release takes, as Triton counts: 87 for "12.8"."""
    from triton.backends.nvidia.compiler import ptx_get_version

    return ptx_get_version(cuda)


_expand_descriptor: Any = getattr(_driver, "make_tensordesc_arg", None)
_MAX_TENSOR_MAPS = 256  # of one descriptor of a recorded launch


def launch_hooks_are_set() -> bool:
    """Whether launch hooks (profilers) are installed: a non-empty hook chain, or a callable in its place."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: int) -> int:
    """The stream that kernels of this thread start on."""
    return triton.runtime.driver.active.get_current_stream(device)


DRIVER = Driver(current_stream, launch_hooks_are_set)


def recorded_start(compiled: Any, grid: Grid, device: int, descriptors: Sequence[Any]) -> Start:
    """Start of a compiled kernel that has run on this device, which is current at every replay.

    Constexpr arguments are passed too, and no launch hook is called.  descriptors: its first arguments, of TMA.
    """
    bare = bare_launcher(compiled, grid, len(descriptors))
    if bare is None:
        run, head = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
        expand = lambda made, at: [made]  # noqa: E731
    else:
        run, head, metadata = bare
        expand = lambda made, at: _expand_descriptor(made, metadata[at])  # noqa: E731
    arguments = TmaArguments(device, descriptors, expand) if descriptors else None
    return Start(functools.partial(run, *grid), head, arguments)


class BareLauncher(NamedTuple):
    """Inner launcher of a kernel: launch(*grid, stream, *head, *arguments), with TMA descriptors expanded.

    tensor_maps: metadata of the kernel's descriptors, in their order.
    """

    launch: Callable[..., None]
    head: tuple[object, ...]
    tensor_maps: Sequence[Any]


def bare_launcher(compiled: Any, grid: Grid, descriptors: int) -> BareLauncher | None:
    """Inner launcher of a compiled kernel; None if Triton's internals are not those of a version that was tested."""
    run = compiled.run
    try:
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        launch, maps = run.launch, ()
        if descriptors:
            cells = zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True)
            closure = dict(cells)
            launch, maps = closure["launcher"], closure["tensordesc_meta"]
            known = tuple(inspect.signature(_expand_descriptor).parameters) == ("arg", "metadata")
            if not known or len(maps) != descriptors or any(each is None for each in maps):
                return None
        head = _head(compiled, grid)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return None if head is None else BareLauncher(launch, head, maps)


def _head(compiled: Any, grid: Grid) -> tuple[object, ...] | None:
    """What Triton's launcher passes on between the stream and the kernel's arguments, or None if these do not frame it.
    The launcher itself tells: it is called with another object in its own place, which takes what it passes on."""
    run, stream, argument, passed = compiled.run, object(), object(), []
    told = SimpleNamespace(**{**vars(run), "launch": lambda *args: passed.extend(args)})
    type(run).__call__(told, *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, argument)
    frames = passed[:4] == [*grid, stream] and passed[-1] is argument
    return tuple(passed[4:-1]) if frames else None


class _Address:
    """A bare address in the place of a tensor: Triton only calls data_ptr()."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def descriptor_fields(made: Any) -> dict[str, Any]:
    """All fields of a TensorDescriptor but its tensor: a recording must not keep a tensor alive, nor its graph."""
    return {name: value for name, value in vars(made).items() if name != "base"}


def descriptor_at(kind: type, fields: dict[str, Any], base: Tensor | _Address) -> Any:
    """TensorDescriptor with these fields, without the checks of its class. A new object each time: a backward launches
    from another thread."""
    made = object.__new__(kind)
    made.__dict__ = {**fields, "base": base}
    return made


_thread = threading.local()


class TmaArguments:
    """Arguments of a compiled kernel whose first ones are TMA descriptors, from addresses.

    expand: launch arguments of a descriptor and its place: the driver's tensor map, sizes, strides.
    """

    def __init__(self, device: int, descriptors: Sequence[Any], expand: Callable[[Any, int], Sequence[object]]) -> None:
        self._device, self._expand = device, expand
        self._descriptors = [(type(each), descriptor_fields(each)) for each in descriptors]
        # by address, since torch's allocator returns the same addresses again
        self._expanded: list[dict[int, Sequence[object]]] = [{} for _ in descriptors]

    def __call__(self, addresses: Sequence[Any]) -> list[object]:
        """addresses: of the tensors behind the descriptors, then of the other tensors."""
        if not getattr(_thread, "has_context", False):
            torch.cuda.set_device(self._device)  # cuTensorMapEncode needs a context on this thread
            _thread.has_context = True
        arguments: list[object] = []
        for at, known in enumerate(self._expanded):
            address = addresses[at]
            found = known.get(address)
            arguments += self._at(at, address) if found is None else found
        arguments += addresses[len(self._expanded) :]
        return arguments

    def _at(self, at: int, address: int) -> Sequence[object]:
        known, (kind, fields) = self._expanded[at], self._descriptors[at]
        if len(known) >= _MAX_TENSOR_MAPS:
            known.clear()
        made = known[address] = self._expand(descriptor_at(kind, fields, _Address(address)), at)
        return made
