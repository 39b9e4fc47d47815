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
import operator
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
from .buffers import Buffer, View, allocator, extent, uninitialised, view_of

_aten = torch.ops.aten
_EMPTY = frozenset({_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default})
_ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default})
# bodies of our operators by overload, for operators that are called through the dispatcher during a recording
BODIES: dict[OpOverload, Callable[..., Any]] = {}


class Driver(NamedTuple):
    """What a replay asks of the driver of its kernels.

    stream: the current stream of a device, by its index.  is_watched: whether hooks of launches are set (profilers).
    """

    stream: Callable[[int], Any] = lambda device: device
    is_watched: Callable[[], bool] = lambda: False


class Start(NamedTuple):
    """How a replay starts a kernel: run(stream, *head, *arguments), without hooks.

    expand: makes the first arguments from addresses, if those are not the addresses themselves.
    """

    run: Callable[..., None]
    head: tuple[object, ...] = ()
    expand: Callable[[Sequence[Any]], Sequence[object]] | None = None


class Launch(NamedTuple):
    """One kernel launch, with its addresses and then `rest`.

    places: index of each address in the list of addresses; None for a null pointer.
    """

    start: Start
    places: tuple[int | None, ...]
    rest: tuple[object, ...]


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
        self.driver = Driver()
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
        self.buffers.append(Buffer(tensor, zeroed))
        self._add(tensor)

    def add_persistent_buffer(self, tensor: Tensor, lookup: Callable[[], Tensor]) -> None:
        # several operators may use one persistent buffer, and each adds it
        self.buffers.append(Buffer(tensor, lookup=lookup))
        self._numbers[tensor.data_ptr()] = len(self.tensors)
        self.tensors.append(tensor)

    def add_launch(self, start: Start, pointers: Sequence[int | None], rest: tuple[object, ...]) -> None:
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
        inside = [(number, offset) for number, offset in offsets if 0 < offset < extent(self.tensors[number])]
        if len(inside) != 1:
            self.refuse("an address of no recorded tensor, or of several")
            return None
        self.interior += inside
        return -len(self.interior)


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


@dataclass(frozen=True, eq=False)
class Recording:
    """A call that can be replayed. Its list of addresses holds inputs, returned, zeroed and persistent buffers, then
    scratch buffers, which share one allocation, then addresses inside of those, and None for null pointers.

    buffers: functions that allocate or find buffers.  scratch: allocates all scratch buffers, at `scratch_offsets` in
    bytes.  interior: (index, offset) of addresses inside a tensor.  launches: (run, head, pick, rest), started as
    run(stream, *head, *pick(addresses), *rest).  results: index of each returned tensor among inputs and buffers, -1
    for None.  views: (place among the results, view) of results that have another layout than their buffer.  note: the
    caller's own data.
    """

    device: int
    driver: Driver
    buffers: tuple[Callable[[], Tensor], ...]
    scratch: Callable[[], Tensor]
    scratch_offsets: tuple[int, ...]
    interior: tuple[tuple[int, int], ...]
    launches: tuple[tuple[Callable[..., None], tuple[object, ...], Callable[..., Any], tuple[object, ...]], ...]
    results: tuple[int, ...]
    views: tuple[tuple[int, View], ...]
    note: Any = None

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the call with other inputs of the same layouts; returns its results, with the layouts of the recorded
        call's: activation checkpointing compares both."""
        tensors: list[Any] = [*inputs, *[allocate() for allocate in self.buffers]]
        addresses: list[int | None] = [tensor.data_ptr() for tensor in tensors]
        if self.scratch_offsets:
            scratch = self.scratch()
            start = scratch.data_ptr()
            addresses += [start + offset for offset in self.scratch_offsets]
        for index, offset in self.interior:
            addresses.append((addresses[index] or 0) + offset)
        addresses.append(None)
        stream = self.driver.stream(self.device)
        for run, head, pick, rest in self.launches:
            run(stream, *head, *pick(addresses), *rest)
        tensors.append(None)
        results = [tensors[at] for at in self.results]
        for at, (dtype, size, stride) in self.views:
            found = results[at]
            found = found if found.dtype == dtype else found.view(dtype)  # a view costs microseconds
            results[at] = found.as_strided(size, stride)
        return results


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
    return returned, _finish(found, inputs[0], numbers, wanted, note)


def _finish(
    found: Recorder, first: Tensor, numbers: Sequence[int | None], wanted: Sequence[Tensor | None], note: Any
) -> Recording:
    """The recording, with addresses reordered: inputs, allocated and persistent buffers, scratch buffers, interior."""
    views = [None if tensor is None else view_of(tensor) for tensor in wanted]
    made = {number: view_of(found.tensors[number]) for number in range(found.inputs)}
    place = {number: number for number in made}
    buffers: list[Callable[[], Tensor]] = []
    scratch: list[int] = []
    offsets, size = [], 0
    for number, buffer in enumerate(found.buffers, found.inputs):
        if buffer.lookup is not None or buffer.zeroed or number in numbers:
            place[number] = found.inputs + len(buffers)
            returned = {view for view, each in zip(views, numbers, strict=True) if each == number}
            allocate, made[number] = allocator(buffer, returned)
            buffers.append(allocate)
        else:
            scratch.append(number)
            offsets.append(size)
            size += -(-extent(buffer.tensor) // _ALIGNMENT) * _ALIGNMENT
    for at, number in enumerate([*scratch, *range(-1, -1 - len(found.interior), -1)]):
        place[number] = found.inputs + len(buffers) + at
    return Recording(
        first.get_device(),
        found.driver,
        tuple(buffers),
        uninitialised(torch.uint8, (size,), (1,), first.device),
        tuple(offsets),
        tuple((place[number], offset) for number, offset in found.interior),
        tuple(
            (run, head, _picker([-1 if at is None else place[at] for at in places], expand), rest)
            for (run, head, expand), places, rest in found.launches
        ),
        tuple(-1 if number is None else place[number] for number in numbers),
        tuple(
            (at, view)
            for at, (view, number) in enumerate(zip(views, numbers, strict=True))
            if view is not None and number is not None and made[number] != view
        ),
        note,
    )


def _picker(
    places: Sequence[int], expand: Callable[[Sequence[Any]], Sequence[object]] | None
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The function that picks the addresses of a launch, and expands them."""
    several = len(places) > 1
    pick = operator.itemgetter(*places) if several else operator.itemgetter(slice(places[0], places[0] + 1 or None))
    return pick if expand is None else lambda addresses: expand(pick(addresses))


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
    """The recording of that key, or None. None also while launches are watched: replays call no hooks."""
    found = _RECORDINGS.get(key)
    return found if type(found) is Recording and not found.driver.is_watched() else None


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
