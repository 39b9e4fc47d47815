"""A layer's call remembered: what it allocates and what it launches, to be done again without asking anything.

Between two calls of a layer with tensors of the same shapes nothing changes but addresses. Choosing kernels, dressing
operands and checking them costs several times what launching costs, so the second call is recorded and later ones are
replayed: buffers are allocated, addresses are put where they belong, kernels start.

What may be replayed is found out, never assumed: every operator that runs must tell of its launches and that they were
all of its work (`launched`), and every address of a launch must be an input, a buffer that was allocated through
`library.empty`, or something that says how to find it again (`provided`). Anything else, and nothing is remembered.
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
    """A kernel's start: a function of the device, addresses and the rest.

    places: where in the list of addresses each is found, None for no address.
    """

    start: Callable[..., None]
    places: tuple[int | None, ...]
    rest: tuple[object, ...]


@dataclass(eq=False)
class Recorder:
    """What a call did so far. Tensors are numbered: inputs, then buffers in the order of their allocation."""

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
            self.refused = self.refused or "two tensors with one address, or one without any"
        self.numbers[address] = number

    def allocated(self, tensor: Tensor) -> None:
        # held until the end, so that no address is given out twice
        self.tensors.append(tensor)
        self.slots.append((tuple(tensor.shape), tensor.dtype))
        self._number(tensor, len(self.tensors) - 1)

    def provided(self, tensor: Tensor, again: Callable[[], Tensor]) -> None:
        self.tensors.append(tensor)
        self.slots.append(((), torch.uint8))
        self.providers.append((len(self.slots) - 1, again))
        # several operators may be given the same one, and each asks for it by itself
        self.numbers[tensor.data_ptr()] = len(self.tensors) - 1

    def place(self, address: int | None) -> int | None:
        """The number of the tensor at an address."""
        if address is None:
            return None
        number = self.numbers.get(address)
        if number is None:
            self.refused = self.refused or "an address that nobody knows"
        return number


_state = threading.local()  # a backward runs on another thread


def recorder() -> Recorder | None:
    """Whoever records on this thread."""
    return getattr(_state, "recorder", None)


def note_allocation(tensor: Tensor) -> None:
    """Tell that a buffer was allocated."""
    found = recorder()
    if found is not None:
        found.allocated(tensor)


def note_persistent_buffer(tensor: Tensor, again: Callable[[], Tensor]) -> None:
    """Tell of a buffer that outlives the call, and how to find the one that is right for a later call."""
    found = recorder()
    if found is not None:
        found.provided(tensor, again)


def note_operator_start() -> None:
    """Tell that an operator has begun its work."""
    found = recorder()
    if found is not None:
        found.operators += 1


def refuse(why: str) -> None:
    """Tell of work that no launch stands for."""
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
    """Tell of a launch: start(device, *pointers, *rest).  last: with it an operator has done all of its work."""
    found = recorder()
    if found is not None:
        found.launches.append(Launch(start, tuple(map(found.place, pointers)), rest))
        found.finished += last


FP4 = torch.float4_e2m1fn_x2


def empty_fp4(shape: Sequence[int], device: torch.device) -> Tensor:
    """An uninitialised buffer of FP4. torch fills buffers under use_deterministic_algorithms, and has no fill of FP4:
    there it fills bytes."""
    if torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=torch.uint8, device=device).view(FP4)
    return torch.empty(shape, dtype=FP4, device=device)


_ALIGNMENT = 512  # of torch's allocator, which kernels were compiled to expect a divisor of


@dataclass(frozen=True, eq=False)
class Recording:
    """A call that can be replayed. Addresses are those of its inputs, of the buffers that it returns, and of buffers
    that nobody sees, which share one allocation.

    buffers: shape and dtype of those that are returned, or who provides one.  hidden: places of the others in their
    allocation of `hidden_bytes`.  order: where the address of each numbered tensor is found.  results: the same for
    tensors that it returns.
    """

    device: int
    buffers: tuple[tuple[tuple[int, ...], torch.dtype] | Callable[[], Tensor], ...]
    hidden: tuple[int, ...]
    hidden_bytes: int
    launches: tuple[Launch, ...]
    results: tuple[int | None, ...]
    note: Any = None

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The call with other tensors of the same shapes, strides, dtypes and alignment; its results."""
        tensors, device, where = list(inputs), self.device, inputs[0].device
        for buffer in self.buffers:
            if isinstance(buffer, tuple):
                shape, dtype = buffer
                # sizes one by one are parsed faster than a tuple, but there must be one
                if dtype is FP4:
                    one = empty_fp4(shape, where)
                elif shape:
                    one = torch.empty(*shape, dtype=dtype, device=where)
                else:
                    one = torch.empty((), dtype=dtype, device=where)
                tensors.append(one)
            else:
                tensors.append(buffer())
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.hidden:
            pool = torch.empty(self.hidden_bytes, dtype=torch.uint8, device=where)
            start = pool.data_ptr()
            addresses += [start + offset for offset in self.hidden]
        for start_kernel, places, rest in self.launches:
            start_kernel(device, *[None if place is None else addresses[place] for place in places], *rest)
        return [None if number is None else tensors[number] for number in self.results]


def record(
    call: Callable[[], Any], inputs: Sequence[Tensor], results: Callable[[Any], tuple[Sequence[Tensor | None], Any]]
) -> tuple[Any, Recording | None]:
    """Do a call, and say how to do it again; None where it cannot be remembered.

    inputs: every tensor that the call reads or writes and does not allocate.  results: of what the call returned, the
    tensors that a replay is to return, each at the start of its buffer, and a note to be kept with them.
    """
    if env.flag("BLOCKSCALE_CHECK"):
        return call(), None  # by whoever looks at the ends of groups, and is told of by no launch
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
    return returned, _arranged(found, inputs[0].get_device(), numbers, note)


def _arranged(found: Recorder, device: int, results: tuple[int | None, ...], note: Any) -> Recording:
    """Inputs first, then what is returned or provided, then what nobody sees."""
    providers = dict(found.providers)
    seen: list[tuple[tuple[int, ...], torch.dtype] | Callable[[], Tensor]] = []
    offsets: list[int] = []
    size, place = 0, {number: number for number in range(found.inputs)}
    hidden: list[int] = []
    for slot, (shape, dtype) in enumerate(found.slots):
        number = found.inputs + slot
        if slot in providers or number in results:
            place[number] = found.inputs + len(seen)
            seen.append(providers.get(slot) or (shape, dtype))
        else:
            hidden.append(number)
            offsets.append(size)
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    for at, number in enumerate(hidden):
        place[number] = found.inputs + len(seen) + at
    launches = tuple(
        launch._replace(places=tuple(None if number is None else place[number] for number in launch.places))
        for launch in found.launches
    )
    returned = tuple(None if number is None else place[number] for number in results)
    return Recording(device, tuple(seen), tuple(offsets), size, launches, returned, note)


_MOST_RECORDINGS = 16384  # a layer's call, and each of its operators'
_TRIES = 3
# a recording, or how often a call was made that could not be recorded: the first compiles its kernels
_RECORDINGS: dict[tuple[object, ...], Recording | int] = {}


def layout(tensor: Tensor) -> tuple[object, ...]:
    """All of a tensor that a launch depends on, but for its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


def find_recording(key: tuple[object, ...]) -> Recording | None:
    """The call of that key, if it was recorded."""
    found = _RECORDINGS.get(key)
    return found if type(found) is Recording else None


def run_and_record(
    key: tuple[object, ...],
    call: Callable[[], Any],
    inputs: Sequence[Tensor],
    results: Callable[[Any], tuple[Sequence[Tensor | None], Any]],
) -> Any:
    """Do a call that is not known, and record it if it may be: not the first time, and not after it failed to."""
    tries = _RECORDINGS.get(key, 0)
    if len(_RECORDINGS) >= _MOST_RECORDINGS and key not in _RECORDINGS:
        _RECORDINGS.clear()
    if type(tries) is not int or not 0 < tries <= _TRIES:
        _RECORDINGS.setdefault(key, 1)
        return call()
    returned, recording = record(call, inputs, results)
    _RECORDINGS[key] = tries + 1 if recording is None else recording
    return returned
