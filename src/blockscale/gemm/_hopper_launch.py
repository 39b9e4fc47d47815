"""How Hopper's Gluon kernels start: through Triton's compiler the first time, then from a dictionary to the driver.

Triton looks at every argument of every launch, and a descriptor checks what it is made of. All that this finds depends
on sizes, strides, dtypes and whether addresses are multiples of 16, so it is found once; a later launch puts addresses
into what is known (docs/design/gemm.md has times).
"""

# pyright: basic, reportArgumentType=false

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import call_recording
from ..casts._launch_cache import bare_launcher, launch_hooks_are_set, launcher, start
from ..formats.layout import round_up
from . import _ptxas_hook
from ._gluon import TensorDescriptor

_MOST_KNOWN = 4096


class Described(NamedTuple):
    """A matrix that the copy engine reads or writes: block by block, in that layout of shared memory."""

    tensor: Tensor
    block: tuple[int, int]
    layout: object


class _At:
    """An address in the place of a matrix, for those who ask it for nothing else."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Known:
    """A compiled kernel on its grid, its descriptors but for their matrices, and its arguments but for addresses."""

    def __init__(
        self, compiled: Any, programs: int, descriptors: tuple[dict[str, Any], ...], rest: tuple[object, ...]
    ) -> None:
        self._grid = (programs, 1, 1)
        self._launch, self._bare = launcher(compiled, self._grid), bare_launcher(compiled)
        self._descriptors, self._rest = descriptors, rest
        self._maps: dict[tuple[int, int], list[object]] = {}

    def start(self, device: int, *addresses: int | None) -> None:
        """addresses: of the matrices that are described, then of the other pointers."""
        if not getattr(_thread, "has_context", False):
            torch.cuda.set_device(device)  # descriptors are made by the driver, which asks the thread for a context
            _thread.has_context = True
        count = len(self._descriptors)
        if self._bare is None or launch_hooks_are_set():
            made = [_filled(self._descriptors[at], _At(addresses[at] or 0)) for at in range(count)]
            return self._launch(device, *made, *addresses[count:], *self._rest)
        arguments: list[object] = []
        for at in range(count):
            # matrices come back to the same addresses: torch's allocator sees to that
            found = self._maps.get((at, addresses[at] or 0))
            arguments += found if found is not None else self._mapped(at, addresses[at] or 0)
        return self._bare.start(device, self._grid, *arguments, *addresses[count:], *self._rest)

    def _mapped(self, at: int, address: int) -> list[object]:
        assert self._bare is not None
        if len(self._maps) >= _MOST_KNOWN:
            self._maps.clear()
        made = self._bare.expand(_filled(self._descriptors[at], _At(address)), at)
        self._maps[at, address] = made
        return made


_thread = threading.local()
_KNOWN: dict[tuple[object, ...], _Known] = {}


def start_kernel(
    kernel: Any,
    programs: int,
    described: tuple[Described, ...],
    pointers: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[object, ...],
    *,
    cluster: int = 1,
) -> None:
    """A kernel whose arguments are descriptors, pointers, numbers and constants, in that order.

    numbers and constants: with the dtypes and strides of the operands they decide everything but addresses.  cluster:
    multiprocessors that work on a program together; the constants tell it.
    """
    addresses = [None if pointer is None else pointer.data_ptr() for pointer in pointers]
    matrices = [one.tensor for one in described]
    device = matrices[0].get_device()  # -1 where there is no GPU: then nothing is launched, and nothing known
    direct = device >= 0 and not any(matrix.data_ptr() % 16 for matrix in matrices)
    key = (
        id(kernel), programs, numbers, constants, _ptxas_hook.mark(), device,
        *((matrix.stride(), matrix.dtype) for matrix in matrices),
        *(None if address is None else address % 16 for address in addresses),
        *(None if pointer is None else pointer.dtype for pointer in pointers),
    )  # fmt: skip
    known = _KNOWN.get(key) if direct else None
    if known is not None:
        at = (*(matrix.data_ptr() for matrix in matrices), *addresses)
        known.start(device, *at)
        return call_recording.note_launch(known.start, at)
    descriptors = [descriptor(*one) for one in described]
    compiled = _ptxas_hook.launch(functools.partial(
        start(kernel, (programs,), matrices[0]), *descriptors, *pointers, *numbers, *constants, num_warps=4,
        num_ctas=cluster,
        enable_fp_fusion=True,  # of the scaled sums: the contract's fused multiply-add
    ))  # fmt: skip
    if direct and all(made.base is matrix for made, matrix in zip(descriptors, matrices, strict=True)):
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        fields = tuple(_fields(made) for made in descriptors)
        _KNOWN[key] = _Known(compiled, programs, fields, (*numbers, *constants))


def can_be_described(tensor: Tensor) -> bool:
    """Whether the copy engine can address it: rows dense, and starting at multiples of 16 bytes."""
    size = tensor.element_size()
    return tensor.stride(1) == 1 and tensor.stride(0) * size % 16 == 0 and tensor.data_ptr() % 16 == 0


def can_be_written(tensor: Tensor) -> bool:
    """Whether the copy engine writes it and nothing else: rows end at multiples of 16 bytes too, since that is what it
    writes. Seen on an H200: a row that ends before has its neighbours overwritten up to there."""
    return can_be_described(tensor) and tensor.shape[1] * tensor.element_size() % 16 == 0


def kernel_dtype(out: Tensor, *, accumulate: bool, direct: bool) -> torch.dtype:
    """Of what a kernel writes: the output's. But sums that a later pass adds to a buffer are not rounded before."""
    return torch.float32 if accumulate and not direct else out.dtype


def addressable(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a matrix of any size that the copy engine can address: rows are padded to multiples of 16 bytes."""
    rows, columns = shape
    step = round_up(columns, max(1, 16 // dtype.itemsize))
    # the pad of the last row is written too, so it is allocated
    return torch.empty(rows, step, dtype=dtype, device=device)[:, :columns]


def kind_of(size: int) -> int:
    """What Triton's compiler knows of a size: that it is 1, a multiple of 16, or neither."""
    return 1 if size == 1 else 0 if size % 16 else 16


def whole(codes: Tensor, length: int) -> Tensor:
    """Codes without the pad of their rows."""
    return codes if codes.shape[1] == length else codes[:, :length]


def descriptor(tensor: Tensor, block: tuple[int, int], layout: object) -> TensorDescriptor:
    """Of the tensor, or of a copy where the copy engine cannot address it."""
    if not can_be_described(tensor):
        tensor = addressable(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


def _fields(made: TensorDescriptor) -> dict[str, Any]:
    """All of a descriptor but its matrix: one that is remembered must keep no tensor alive, nor the graph behind it."""
    return {name: value for name, value in vars(made).items() if name != "base"}


def _filled(fields: dict[str, Any], matrix: Tensor | _At) -> TensorDescriptor:
    """A descriptor whose other fields have been checked: its class would check them again. Not changed in place, since
    a backward launches from another thread."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ = {**fields, "base": matrix}
    return made
