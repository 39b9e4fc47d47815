"""Recorded calls of layers and operators: a call's allocations and kernel launches, replayed with other addresses.

Two calls with tensors of the same layouts differ only in addresses. Selecting kernels, building operands and checking
them takes several times as long as launching, so the second call is recorded and later ones are replayed: allocate
buffers, substitute addresses, launch kernels.

A recorded call is complete by construction. While it runs, a dispatch mode sees every operator of torch: allocations
and views are recorded or harmless, any other operator refuses the recording, since a replay would skip its work.
Kernels start through `launch` alone, which records them. Every address of a launch lies in an input, in a buffer of the
call or in a persistent buffer with a function that finds it again; an unknown address refuses.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..formats.checks import PLAIN_TYPES
from ..registry import nothing_is_forced

_aten = torch.ops.aten
_EMPTY = frozenset({_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default})
_ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default})
# bodies of our operators by overload, for operators that are called through the dispatcher during a recording
BODIES: dict[OpOverload, Callable[..., Any]] = {}


class Launch(NamedTuple):
    """One kernel launch: start(device, *addresses, *rest).

    places: index of each address in the list of addresses; None for a null pointer.
    """

    start: Callable[..., None]
    places: tuple[int | None, ...]
    rest: tuple[object, ...]


class Buffer(NamedTuple):
    """A buffer that a replay allocates, or with `lookup` finds: one that outlives the call, as a workspace does."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    zeroed: bool = False
    lookup: Callable[[], Tensor] | None = None


FP4 = torch.float4_e2m1fn_x2


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised buffer. Under use_deterministic_algorithms torch fills buffers, which it cannot do for FP4: it
    fills bytes there."""
    if dtype is FP4 and torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=torch.uint8, device=device).view(FP4)
    # torch parses separate sizes in two thirds of the time of a tuple, but needs at least one
    return torch.empty(*shape, dtype=dtype, device=device) if shape else torch.empty((), dtype=dtype, device=device)


class Recorder(TorchDispatchMode):
    """Recording in progress. Tensors are numbered: inputs first, then buffers in order of allocation.

    refused: the first reason why the call cannot be recorded.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = len(inputs)
        # kept alive, so that the allocator does not hand out an address twice
        self.tensors: list[Tensor] = []
        self.buffers: list[Buffer] = []
        self.launches: list[Launch] = []
        # (number, offset in bytes) of addresses inside a tensor; numbered after all tensors
        self.interior: list[tuple[int, int]] = []
        self.refused = ""
        self._numbers: dict[int, int] = {}
        for tensor in inputs:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body = BODIES.get(func)
        if body is not None:
            with self:  # off while this method runs
                return body(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY or func in _ZEROS:
            self.add_buffer(result, zeroed=func in _ZEROS)
        elif not (_is_view(func) and _shares_memory(result, args)):
            self.refuse(f"{func._schema.name} by torch")
        return result

    def refuse(self, why: str) -> None:
        self.refused = self.refused or why

    def _add(self, tensor: Tensor) -> None:
        address = tensor.data_ptr()
        if address in self._numbers:
            self.refuse("two tensors with one address")
        if address:  # a tensor without elements has none
            self._numbers[address] = len(self.tensors)
        self.tensors.append(tensor)

    def add_buffer(self, tensor: Tensor, *, zeroed: bool = False) -> None:
        if not tensor.is_contiguous():
            self.refuse("a buffer that is not contiguous")
        self.buffers.append(Buffer(tuple(tensor.shape), tensor.dtype, zeroed))
        self._add(tensor)

    def add_persistent_buffer(self, tensor: Tensor, lookup: Callable[[], Tensor]) -> None:
        # several operators may use one persistent buffer, and each adds it
        self.buffers.append(Buffer(lookup=lookup))
        self._numbers[tensor.data_ptr()] = len(self.tensors)
        self.tensors.append(tensor)

    def add_launch(self, start: Callable[..., None], pointers: Sequence[int | None], rest: tuple[object, ...]) -> None:
        self.launches.append(Launch(start, tuple(map(self._place, pointers)), rest))

    def number(self, address: int) -> int | None:
        """Number of the tensor that starts at an address, or None."""
        return self._numbers.get(address)

    def _place(self, address: int | None) -> int | None:
        """Number of the tensor at an address, or -1 - index of the address among `interior`; None for a null pointer
        or an unknown address, which refuses."""
        if not address:
            return None
        number = self._numbers.get(address)
        if number is not None:
            return number
        offsets = [(number, address - tensor.data_ptr()) for number, tensor in enumerate(self.tensors)]
        inside = [(number, offset) for number, offset in offsets if 0 < offset < _extent(self.tensors[number])]
        if len(inside) != 1:
            self.refuse("an address of no recorded tensor, or of several")
            return None
        self.interior += inside
        return -len(self.interior)


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def _shares_memory(result: Any, args: Any) -> bool:
    """Whether a result is a view of an argument. In inference mode composite operators come here whole, and the schema
    of `contiguous` or `to` is that of a view also where they copy."""
    given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
    results = result if isinstance(result, tuple | list) else (result,)
    return all(each.untyped_storage().data_ptr() in given for each in results)


@functools.cache
def _is_view(func: OpOverload) -> bool:
    """Whether an operator returns views of its arguments and writes nothing."""
    schema = func._schema
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments)
    return not writes and bool(schema.returns) and all(each.alias_info is not None for each in schema.returns)


_PLAIN = frozenset(PLAIN_TYPES)
_state = threading.local()  # a backward runs on another thread


def recorder() -> Recorder | None:
    """The recording in progress on this thread, or None."""
    return getattr(_state, "recorder", None)


def refuse(why: str) -> None:
    """Refuse the recording in progress.  why: what a replay cannot know from layouts, which the mode does not see."""
    found = recorder()
    if found is not None:
        found.refuse(why)


def note_persistent_buffer(tensor: Tensor, lookup: Callable[[], Tensor]) -> None:
    """Record the use of a buffer that outlives the call.  lookup: returns the buffer for a later call."""
    found = recorder()
    if found is not None:
        found.add_persistent_buffer(tensor, lookup)


_ALIGNMENT = 512  # bytes, of torch's allocator; kernels are compiled for a divisor of it
View = tuple[torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Recording:
    """A call that can be replayed. Its list of addresses holds inputs, returned, zeroed and persistent buffers, then
    scratch buffers, which share one allocation, then addresses inside of those.

    scratch_offsets: byte offsets of scratch buffers in their allocation of `scratch_bytes`.  interior: (index, offset)
    of addresses inside a tensor.  results: index of each returned tensor among inputs and buffers, and its dtype, sizes
    and strides if it is a view; None for a result that is None.  note: the caller's own data.
    """

    device: int
    buffers: tuple[Buffer, ...]
    scratch_offsets: tuple[int, ...]
    scratch_bytes: int
    interior: tuple[tuple[int, int], ...]
    launches: tuple[Launch, ...]
    results: tuple[tuple[int, View | None] | None, ...]
    note: Any = None

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the call with other inputs of the same layouts; returns its results, with the layouts of the recorded
        call's: activation checkpointing compares both."""
        tensors, device, where = list(inputs), self.device, inputs[0].device
        for shape, dtype, zeroed, lookup in self.buffers:
            if lookup is not None:
                tensors.append(lookup())
            elif zeroed:
                tensors.append(torch.zeros(shape, dtype=dtype, device=where))
            else:
                tensors.append(empty(shape, dtype, where))
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.scratch_offsets:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=where)
            start = scratch.data_ptr()
            addresses += [start + offset for offset in self.scratch_offsets]
        if self.interior:
            addresses += [addresses[index] + offset for index, offset in self.interior]
        for start_kernel, places, rest in self.launches:
            start_kernel(device, *[None if place is None else addresses[place] for place in places], *rest)
        return [
            None if one is None else tensors[one[0]] if one[1] is None else _as_view(tensors[one[0]], one[1])
            for one in self.results
        ]


def _as_view(tensor: Tensor, view: View) -> Tensor:
    dtype, size, stride = view
    return (tensor if tensor.dtype is dtype else tensor.view(dtype)).as_strided(size, stride)


def record(
    call: Callable[[], Any], inputs: Sequence[Tensor], results: Callable[[Any], tuple[Sequence[Tensor | None], Any]]
) -> tuple[Any, Recording | None]:
    """Run a call and record it: (its result, the recording, or None if it cannot be replayed).

    inputs: every tensor that the call reads or writes and does not allocate.  results: maps the call's result to the
    tensors that a replay returns, each at the start of its buffer, and a note to store with them.
    """
    found = Recorder(inputs)
    _state.recorder = found
    try:
        with found:
            returned = call()
    finally:
        _state.recorder = None
    wanted, note = results(returned)
    numbers = [None if tensor is None else found.number(tensor.data_ptr()) for tensor in wanted]
    unknown = any(number is None and tensor is not None for number, tensor in zip(numbers, wanted, strict=True))
    if found.refused or unknown or not found.launches:
        return returned, None
    return returned, _finish(found, inputs[0].get_device(), numbers, wanted, note)


def _finish(
    found: Recorder, device: int, numbers: Sequence[int | None], wanted: Sequence[Tensor | None], note: Any
) -> Recording:
    """The recording, with addresses reordered: inputs, allocated and persistent buffers, scratch buffers, interior."""
    buffers: list[Buffer] = []
    offsets: list[int] = []
    scratch: list[int] = []
    size, place = 0, {number: number for number in range(found.inputs)}
    for number, buffer in enumerate(found.buffers, found.inputs):
        if buffer.lookup is not None or buffer.zeroed or number in numbers:
            place[number] = found.inputs + len(buffers)
            buffers.append(buffer)
        else:
            scratch.append(number)
            offsets.append(size)
            size += -(-math.prod(buffer.shape) * buffer.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    for at, number in enumerate(scratch):
        place[number] = found.inputs + len(buffers) + at
    interior = tuple((place[number], offset) for number, offset in found.interior)
    for at in range(len(interior)):
        place[-1 - at] = len(found.tensors) + at
    launches = tuple(
        launch._replace(places=tuple(None if number is None else place[number] for number in launch.places))
        for launch in found.launches
    )
    results = tuple(
        None if number is None or tensor is None else (place[number], _view_of(tensor, found.tensors[number]))
        for number, tensor in zip(numbers, wanted, strict=True)
    )
    return Recording(device, tuple(buffers), tuple(offsets), size, interior, launches, results, note)


def _view_of(tensor: Tensor, buffer: Tensor) -> View | None:
    """Dtype, sizes and strides of a tensor; None if they are its buffer's."""
    view = tensor.dtype, tensor.shape, tensor.stride()
    return None if view == (buffer.dtype, buffer.shape, buffer.stride()) else view


# ---- the store of recordings -----------------------------------------------------------------------------------------

_MAX_RECORDINGS = 16384  # calls of layers, and of their operators
_TRIES = 3
# a recording, or the number of calls so far that could not be recorded: the first call compiles its kernels
_RECORDINGS: dict[tuple[object, ...], Recording | int] = {}


def call_key(*parts: Any) -> tuple[object, ...]:
    """Key of a call: its arguments, with everything about a tensor that a launch depends on in place of the tensor.
    Tensors are plain ones: a subclass would be kept alive."""
    return tuple(
        [
            (part.shape, part.stride(), part.dtype, part.data_ptr() % 16, part.get_device())
            if type(part) in _PLAIN
            else part
            for part in parts
        ]
    )


def find_recording(key: tuple[object, ...]) -> Recording | None:
    """The recording of that key, or None."""
    found = _RECORDINGS.get(key)
    return found if type(found) is Recording else None


def run_and_record(
    key: tuple[object, ...],
    call: Callable[[], Any],
    inputs: Sequence[Tensor],
    results: Callable[[Any], tuple[Sequence[Tensor | None], Any]],
) -> Any:
    """Run a call without a recording, and record it from the second time on, at most `_TRIES` times."""
    tries = _RECORDINGS.get(key, 0)
    if len(_RECORDINGS) >= _MAX_RECORDINGS and key not in _RECORDINGS:
        _RECORDINGS.clear()
    if type(tries) is not int or not 0 < tries <= _TRIES:
        _RECORDINGS.setdefault(key, 1)
        return call()
    returned, recording = record(call, inputs, results)
    _RECORDINGS[key] = tries + 1 if recording is None else recording
    return returned


def may_replay(tensor: Tensor) -> bool:
    """Whether the tensor is on the current GPU and no backend is forced."""
    return tensor.is_cuda and nothing_is_forced() and tensor.get_device() == torch.cuda.current_device()


def run_recorded(
    name: str, places: Sequence[int], flat: Sequence[Any], body: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """body(*args) of an operator, replayed if a recording exists.

    Layers are replayed in eager mode only. Operators are replayed from every caller: a layer without a recording,
    compiled code, a profiler or a dispatch mode.  flat: arguments of the operator's schema.  places: indices of the
    tensors among them; the first is never None.
    """
    # the recording of a layer needs every launch
    if recorder() is not None or not may_replay(flat[places[0]]):
        return body(*args)
    inputs = [flat[at] for at in places if flat[at] is not None]
    if not _PLAIN.issuperset(map(type, inputs)):
        return body(*args)
    key = call_key(name, *flat)
    recording = find_recording(key)
    if recording is None:
        return run_and_record(key, lambda: body(*args), inputs, _operator_results)
    results = recording.replay(inputs)
    return tuple(results) if recording.note else results[0]


def _operator_results(returned: Any) -> tuple[list[Tensor | None], bool]:
    """The tensors that the body returned, and whether they were a tuple."""
    return (list(returned), True) if isinstance(returned, tuple) else ([returned], False)
