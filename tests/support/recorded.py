"""What tests of recorded calls share: a device of our own, whose kernels read and write memory by address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockscale import launch, library
from blockscale.launch import record
from blockscale.launch.recording import Start

N = 33  # floats: no multiple of any alignment


SEEN: list[tuple[int, ...]] = []


def add(stream: int, a: int, b: int | None, out: int, plus: float) -> None:
    """out = a + b + plus, of N floats each."""
    SEEN.append((a, b or 0, out))
    x, y, z = (None if at is None else (ctypes.c_float * N).from_address(at) for at in (a, b, out))
    for i in range(N):
        z[i] = x[i] + (0 if y is None else y[i]) + plus  # pyright: ignore[reportOptionalSubscript]


def allocate(*shape: int) -> Tensor:
    return library.empty(shape or (N,), torch.float32, torch.device("cpu"))


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def run_add(a: Tensor, b: Tensor | None, plus: float = 0.0, out: Tensor | None = None) -> Tensor:
    """An operator: one launch is all of its work."""
    out = allocate() if out is None else out
    pointers = a.data_ptr(), address(b), out.data_ptr()
    start(add, pointers, (plus,))
    return out


def start(kernel: Callable[..., None], pointers: Sequence[int | None], rest: tuple[object, ...] = ()) -> None:
    """Launch a kernel of this device, as `launch.launch` does with those of Triton."""
    kernel(-1, *pointers, *rest)
    found = launch.recorder()
    if found is not None:
        found.add_launch(Start(kernel), pointers, rest)


def floats(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def one(found: Tensor) -> tuple[list[Tensor | None], object]:
    return [found], None


def refusal(call: Callable[[], Tensor], *inputs: Tensor) -> bool:
    """Whether a call is not recorded; it is done in any case."""
    returned, recording = record(call, inputs, one)
    assert isinstance(returned, Tensor)
    assert launch.recorder() is None
    return recording is None
