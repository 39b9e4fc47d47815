"""An operator's call remembered: with tensors of layouts that were seen before it allocates and launches, and asks
nothing.

`replay.py` remembers the calls of whole layers, where nobody watches. This is the same for one operator, and holds for
every way to it: from a layer that is not remembered, from compiled code, below a profiler or a mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import replay
from .registry import demands_nothing


def remembered(name: str, body: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """The body of an operator, replayed where it can be.  places: of its tensors among the arguments, the first of
    which is always there."""

    @functools.wraps(body)
    def run(*args: Any, **named: Any) -> Any:
        # a layer that is being recorded wants to hear of every launch
        if named or replay.recorder() is not None or not _is_free(args[places[0]]):
            return body(*args, **named)
        key = (name, *[_layout(each) if isinstance(each, Tensor) else each for each in args])
        inputs = [args[at] for at in places if args[at] is not None]
        known = replay.known(key)
        if known is None:
            return replay.learn(key, lambda: body(*args), inputs, _results)
        return _dressed(known.replay(inputs), known.note)

    return run


def _is_free(tensor: Tensor) -> bool:
    """Whether kernels run on a GPU, the current one, and are of the table's choice."""
    return tensor.is_cuda and demands_nothing() and tensor.get_device() == torch.cuda.current_device()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return (*replay.layout(tensor), tensor.get_device())


_View = tuple[torch.Size, tuple[int, ...]] | None


def _results(returned: Any) -> tuple[list[Tensor | None], tuple[bool, tuple[_View, ...]]]:
    """All tensors that the body returned; whether they were a tuple, and their sizes and strides."""
    found: list[Tensor | None] = list(returned) if isinstance(returned, tuple) else [returned]
    views = tuple(None if each is None else (each.shape, each.stride()) for each in found)
    return found, (isinstance(returned, tuple), views)


def _dressed(buffers: Sequence[Tensor | None], note: tuple[bool, tuple[_View, ...]]) -> Any:
    """Buffers as what the body returned."""
    several, views = note
    made = tuple(
        buffer if buffer is None or view is None or buffer.shape == view[0] else buffer.as_strided(*view)
        for buffer, view in zip(buffers, views, strict=True)
    )
    return made if several else made[0]
