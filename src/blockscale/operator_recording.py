"""Recorded calls of single operators: replayed when every tensor has a layout that was recorded before.

`call_recording.py` records the calls of whole layers, in eager mode only. Operators are replayed from every caller: a
layer without a recording, compiled code, a profiler or a dispatch mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import call_recording
from .registry import nothing_is_forced


def with_recorded_calls(name: str, body: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """The body of an operator, replayed if a recording exists.

    places: indices of its tensor arguments; the first of them is never None.
    """

    @functools.wraps(body)
    def run(*args: Any, **named: Any) -> Any:
        # the recording of a layer needs every launch
        if named or call_recording.recorder() is not None or not _may_replay(args[places[0]]):
            return body(*args, **named)
        key = (name, *[_layout(each) if isinstance(each, Tensor) else each for each in args])
        inputs = [args[at] for at in places if args[at] is not None]
        recording = call_recording.find_recording(key)
        if recording is None:
            return call_recording.run_and_record(key, lambda: body(*args), inputs, _results)
        results = recording.replay(inputs)
        return tuple(results) if recording.note else results[0]

    return run


def _may_replay(tensor: Tensor) -> bool:
    """Whether the tensor is on the current GPU and no backend is forced."""
    return tensor.is_cuda and nothing_is_forced() and tensor.get_device() == torch.cuda.current_device()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return (*call_recording.layout(tensor), tensor.get_device())


def _results(returned: Any) -> tuple[list[Tensor | None], bool]:
    """The tensors that the body returned, and whether they were a tuple."""
    return (list(returned), True) if isinstance(returned, tuple) else ([returned], False)
