"""All access to Triton's private parts: launches of compiled kernels without Triton's host path, and TMA descriptors.

`compiled[grid](...)` looks up device, stream and hooks at every call, queries the driver for the memory of each tensor,
and encodes every TMA descriptor again. A replayed launch does none of it. `bare_launcher` is the guard: where a version
of Triton differs from what this file expects it returns None, and launches take the public path.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

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
_MAX_TENSOR_MAPS = 256  # of one recorded launch


def launcher(compiled: Any, grid: Grid) -> Callable[..., None]:
    """Launch function of a compiled kernel: launch(device index, *all arguments), tensors as addresses.

    Constexpr arguments are passed too. The kernel must have run on that device before, and the device must be current.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream = triton.runtime.driver.active.get_current_stream

    def launch(device: int, *arguments: object) -> None:
        if launch_hooks_are_set():
            compiled[grid](*arguments)
        else:
            run(*grid, stream(device), function, metadata, None, None, None, *arguments)

    return launch


def launch_hooks_are_set() -> bool:
    """Whether launch hooks (profilers) are installed: a non-empty hook chain, or a callable in its place."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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

    def start(self, device: int, grid: Grid, *arguments: object) -> None:
        """Launch with expanded descriptors."""
        run, stream = self.run, triton.runtime.driver.active.get_current_stream(device)
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self.launch(*grid, stream, self.function, *flags, self.metadata, None, None, None, *arguments)


def bare_launcher(compiled: Any) -> BareLauncher | None:
    """Inner launcher of a compiled kernel; None if Triton's internals are not those of a version that was tested."""
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


class TmaLauncher:
    """Launch function of a compiled kernel whose first arguments are TMA descriptors."""

    def __init__(self, compiled: Any, grid: Grid, descriptors: Sequence[Any]) -> None:
        self._grid, self._launch, self._bare = grid, launcher(compiled, grid), bare_launcher(compiled)
        self._descriptors = [(type(each), descriptor_fields(each)) for each in descriptors]
        self._maps: dict[tuple[int, int], list[object]] = {}

    def __call__(self, device: int, *arguments: Any) -> None:
        """arguments: addresses of the tensors behind the descriptors, then the other arguments."""
        if not getattr(_thread, "has_context", False):
            torch.cuda.set_device(device)  # cuTensorMapEncode needs a context on this thread
            _thread.has_context = True
        count = len(self._descriptors)
        if self._bare is None or launch_hooks_are_set():
            made = [self._descriptor(at, arguments[at]) for at in range(count)]
            return self._launch(device, *made, *arguments[count:])
        expanded: list[object] = []
        for at in range(count):
            # tensor maps by address: torch's allocator returns the same addresses again
            found = self._maps.get((at, arguments[at]))
            expanded += found if found is not None else self._tensor_map(at, arguments[at])
        return self._bare.start(device, self._grid, *expanded, *arguments[count:])

    def _descriptor(self, at: int, address: int) -> Any:
        kind, fields = self._descriptors[at]
        return descriptor_at(kind, fields, _Address(address))

    def _tensor_map(self, at: int, address: int) -> list[object]:
        assert self._bare is not None
        if len(self._maps) >= _MAX_TENSOR_MAPS:
            self._maps.clear()
        made = self._maps[at, address] = self._bare.expand(self._descriptor(at, address), at)
        return made
