"""Recorded calls of layers and operators: a call's allocations and kernel launches, replayed with other addresses.

Two calls of a layer with tensors of the same shapes differ only in addresses. Selecting kernels, building operands and
checking them takes several times as long as launching, so the second call is recorded and later ones are replayed:
allocate buffers, substitute addresses, launch kernels.

A call is recorded only if it is complete. Every operator reports its launches and which one is its last
(`note_launch`). Every address of a launch is an input, a buffer from `library.empty` (`note_allocation`) or a
persistent buffer with a function that finds it again (`note_persistent_buffer`). Otherwise there is no recording.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import env


class Launch(NamedTuple):
    """One kernel launch: start(device, *addresses, *rest).

    places: index of each address in the list of addresses; None for a null pointer.
    """

    start: Callable[..., None]
    places: tuple[int | None, ...]
    rest: tuple[object, ...]


@dataclass(eq=False)
class Recorder:
    """Recording in progress. Tensors are numbered: inputs first, then buffers in order of allocation.

    inputs: number of input tensors.  slots: shape and dtype of each buffer.  providers: (slot, function that returns
    the buffer) of persistent buffers.  operators, finished: operators started, and those whose last launch was noted.
    refused: the first reason why the call cannot be recorded.
    """

    tensors: list[Tensor]
    inputs: int
    slots: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    providers: list[tuple[int, Callable[[], Tensor]]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    operators: int = 0
    finished: int = 0
    refused: str = ""

    def __post_init__(self) -> None:
        self.numbers: dict[int, int] = {}
        for number, tensor in enumerate(self.tensors):
            self._number(tensor, number)

    def _number(self, tensor: Tensor, number: int) -> None:
        address = tensor.data_ptr()
        if address == 0 or address in self.numbers:
            self.refused = self.refused or "two tensors with one address, or a tensor without memory"
        self.numbers[address] = number

    def add_buffer(self, tensor: Tensor) -> None:
        # keeps the tensor alive, so that the allocator does not hand out its address twice
        self.tensors.append(tensor)
        self.slots.append((tuple(tensor.shape), tensor.dtype))
        self._number(tensor, len(self.tensors) - 1)

    def add_persistent_buffer(self, tensor: Tensor, lookup: Callable[[], Tensor]) -> None:
        self.tensors.append(tensor)
        self.slots.append(((), torch.uint8))
        self.providers.append((len(self.slots) - 1, lookup))
        # several operators may use one persistent buffer, and each notes it
        self.numbers[tensor.data_ptr()] = len(self.tensors) - 1

    def place(self, address: int | None) -> int | None:
        """Number of the tensor at an address; None for a null pointer or an unknown address, which refuses."""
        if address is None:
            return None
        number = self.numbers.get(address)
        if number is None:
            self.refused = self.refused or "an address of no recorded tensor"
        return number


_state = threading.local()  # a backward runs on another thread


def recorder() -> Recorder | None:
    """The recording in progress on this thread, or None."""
    return getattr(_state, "recorder", None)


def note_allocation(tensor: Tensor) -> None:
    """Record the allocation of a buffer."""
    found = recorder()
    if found is not None:
        found.add_buffer(tensor)


def note_persistent_buffer(tensor: Tensor, lookup: Callable[[], Tensor]) -> None:
    """Record the use of a buffer that outlives the call.  lookup: returns the buffer for a later call."""
    found = recorder()
    if found is not None:
        found.add_persistent_buffer(tensor, lookup)


def note_operator_start() -> None:
    """Record that an operator starts."""
    found = recorder()
    if found is not None:
        found.operators += 1


def refuse(why: str) -> None:
    """Refuse the recording in progress.  why: work that is not a recorded launch."""
    found = recorder()
    if found is not None:
        found.refused = found.refused or why


def note_launch(
    start: Callable[..., None],
    pointers: Sequence[int | None],
    rest: tuple[object, ...] = (),
    *,
    last: bool = True,
) -> None:
    """Record a launch: start(device, *pointers, *rest).  last: it completes its operator."""
    found = recorder()
    if found is not None:
        found.launches.append(Launch(start, tuple(map(found.place, pointers)), rest))
        found.finished += last


FP4 = torch.float4_e2m1fn_x2


def empty_fp4(shape: Sequence[int], device: torch.device) -> Tensor:
    """Uninitialised FP4 buffer. Under use_deterministic_algorithms torch fills buffers, which it cannot do for FP4: it
    fills bytes there."""
    if torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=torch.uint8, device=device).view(FP4)
    return torch.empty(shape, dtype=FP4, device=device)


View = tuple[torch.Size, tuple[int, ...]]  # sizes and strides
_ALIGNMENT = 512  # bytes, of torch's allocator; kernels are compiled for a divisor of it


@dataclass(frozen=True, eq=False)
class Recording:
    """A call that can be replayed. Its list of addresses holds inputs, returned and persistent buffers, and scratch
    buffers, which share one allocation.

    buffers: shape and dtype of a returned buffer, or the function that finds a persistent one.  scratch_offsets: byte
    offsets of scratch buffers in their allocation of `scratch_bytes`.  results: index of each returned tensor among
    inputs and buffers, and its sizes and strides if it is a view; None for a result that is None.  note: the caller's
    own data.
    """

    device: int
    buffers: tuple[tuple[tuple[int, ...], torch.dtype] | Callable[[], Tensor], ...]
    scratch_offsets: tuple[int, ...]
    scratch_bytes: int
    launches: tuple[Launch, ...]
    results: tuple[tuple[int, View | None] | None, ...]
    note: Any = None

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the call with other inputs of the same shapes, strides, dtypes and alignment; returns its results."""
        tensors, device, where = list(inputs), self.device, inputs[0].device
        for buffer in self.buffers:
            if isinstance(buffer, tuple):
                shape, dtype = buffer
                # torch parses separate sizes faster than a tuple, but needs at least one
                if dtype is FP4:
                    tensor = empty_fp4(shape, where)
                elif shape:
                    tensor = torch.empty(*shape, dtype=dtype, device=where)
                else:
                    tensor = torch.empty((), dtype=dtype, device=where)
                tensors.append(tensor)
            else:
                tensors.append(buffer())
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.scratch_offsets:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=where)
            start = scratch.data_ptr()
            addresses += [start + offset for offset in self.scratch_offsets]
        for start_kernel, places, rest in self.launches:
            start_kernel(device, *[None if place is None else addresses[place] for place in places], *rest)
        return [
            None if one is None else tensors[one[0]] if one[1] is None else tensors[one[0]].as_strided(*one[1])
            for one in self.results
        ]


def record(
    call: Callable[[], Any], inputs: Sequence[Tensor], results: Callable[[Any], tuple[Sequence[Tensor | None], Any]]
) -> tuple[Any, Recording | None]:
    """Run a call and record it: (its result, the recording, or None if it cannot be replayed).

    inputs: every tensor that the call reads or writes and does not allocate.  results: maps the call's result to the
    tensors that a replay returns, each at the start of its buffer, and a note to store with them. A replay returns
    tensors of the same sizes and strides: activation checkpointing compares them with those of the recorded call.
    """
    if env.flag("BLOCKSCALE_CHECK"):
        return call(), None  # the check of group ends runs in torch, and is no recorded launch
    found = Recorder(list(inputs), len(inputs))
    _state.recorder = found
    try:
        returned = call()
    finally:
        _state.recorder = None
    wanted, note = results(returned)
    numbers = tuple(None if tensor is None else found.place(tensor.data_ptr()) for tensor in wanted)
    if found.refused or found.operators != found.finished or not found.launches:
        return returned, None
    views = tuple(
        None if tensor is None or number is None else _view_of(tensor, found.tensors[number])
        for tensor, number in zip(wanted, numbers, strict=True)
    )
    return returned, _finish(found, inputs[0].get_device(), numbers, views, note)


def _view_of(tensor: Tensor, buffer: Tensor) -> View | None:
    """Sizes and strides of a tensor, None if they are its buffer's."""
    view = tensor.shape, tensor.stride()
    return None if view == (buffer.shape, buffer.stride()) else view


def _finish(
    found: Recorder, device: int, results: tuple[int | None, ...], views: tuple[View | None, ...], note: Any
) -> Recording:
    """The recording, with addresses reordered: inputs, returned and persistent buffers, scratch buffers."""
    providers = dict(found.providers)
    buffers: list[tuple[tuple[int, ...], torch.dtype] | Callable[[], Tensor]] = []
    offsets: list[int] = []
    size, place = 0, {number: number for number in range(found.inputs)}
    scratch: list[int] = []
    for slot, (shape, dtype) in enumerate(found.slots):
        number = found.inputs + slot
        if slot in providers or number in results:
            place[number] = found.inputs + len(buffers)
            buffers.append(providers.get(slot) or (shape, dtype))
        else:
            scratch.append(number)
            offsets.append(size)
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    for at, number in enumerate(scratch):
        place[number] = found.inputs + len(buffers) + at
    launches = tuple(
        launch._replace(places=tuple(None if number is None else place[number] for number in launch.places))
        for launch in found.launches
    )
    returned = tuple(
        None if number is None else (place[number], view) for number, view in zip(results, views, strict=True)
    )
    return Recording(device, tuple(buffers), tuple(offsets), size, launches, returned, note)


_MOST_RECORDINGS = 16384  # calls of layers, and of their operators
_TRIES = 3
# a recording, or the number of calls so far that could not be recorded: the first call compiles its kernels
_RECORDINGS: dict[tuple[object, ...], Recording | int] = {}


def layout(tensor: Tensor) -> tuple[object, ...]:
    """Everything about a tensor that a launch depends on, except its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


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
    if len(_RECORDINGS) >= _MOST_RECORDINGS and key not in _RECORDINGS:
        _RECORDINGS.clear()
    if type(tries) is not int or not 0 < tries <= _TRIES:
        _RECORDINGS.setdefault(key, 1)
        return call()
    returned, recording = record(call, inputs, results)
    _RECORDINGS[key] = tries + 1 if recording is None else recording
    return returned
