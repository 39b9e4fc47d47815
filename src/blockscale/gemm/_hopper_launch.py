"""Launches of the Gluon kernels for Hopper: through Triton the first time, then from a cache straight to the driver.

Triton inspects every argument of every launch, and a TMA descriptor validates its fields. The outcome depends only on
sizes, strides, dtypes and whether addresses are multiples of 16, so it is cached. A later launch only fills in the
addresses (docs/design/gemm.md has times).
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

_MAX_CACHED = 4096


class TmaTensor(NamedTuple):
    """A matrix that TMA reads or writes by blocks; layout: of a block in shared memory, with its swizzle."""

    tensor: Tensor
    block: tuple[int, int]
    layout: object


class _Address:
    """A bare address in the place of a tensor: Triton only calls data_ptr()."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _CachedLaunch:
    """A compiled kernel on its grid, with its descriptors and arguments except for addresses."""

    def __init__(
        self, compiled: Any, ctas: int, descriptors: tuple[dict[str, Any], ...], rest: tuple[object, ...]
    ) -> None:
        self._grid = (ctas, 1, 1)
        self._launch, self._bare = launcher(compiled, self._grid), bare_launcher(compiled)
        self._descriptors, self._rest = descriptors, rest
        self._maps: dict[tuple[int, int], list[object]] = {}

    def start(self, device: int, *addresses: int | None) -> None:
        """addresses: of the TMA tensors, then of the other pointers."""
        if not getattr(_thread, "has_context", False):
            torch.cuda.set_device(device)  # cuTensorMapEncode needs a context on this thread
            _thread.has_context = True
        count = len(self._descriptors)
        if self._bare is None or launch_hooks_are_set():
            made = [_with_base(self._descriptors[at], _Address(addresses[at] or 0)) for at in range(count)]
            return self._launch(device, *made, *addresses[count:], *self._rest)
        arguments: list[object] = []
        for at in range(count):
            # tensor maps by address: torch's allocator returns the same addresses again
            found = self._maps.get((at, addresses[at] or 0))
            arguments += found if found is not None else self._tensor_map(at, addresses[at] or 0)
        return self._bare.start(device, self._grid, *arguments, *addresses[count:], *self._rest)

    def _tensor_map(self, at: int, address: int) -> list[object]:
        assert self._bare is not None
        if len(self._maps) >= _MAX_CACHED:
            self._maps.clear()
        made = self._bare.expand(_with_base(self._descriptors[at], _Address(address)), at)
        self._maps[at, address] = made
        return made


_thread = threading.local()
_LAUNCH_CACHE: dict[tuple[object, ...], _CachedLaunch] = {}


def start_kernel(
    kernel: Any,
    ctas: int,
    tensors: tuple[TmaTensor, ...],
    pointers: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[object, ...],
) -> None:
    """Launch a kernel whose arguments are descriptors, pointers, integers and constants, in that order.

    numbers and constants: with the dtypes and strides of the operands they determine everything but addresses.
    """
    addresses = [None if pointer is None else pointer.data_ptr() for pointer in pointers]
    matrices = [one.tensor for one in tensors]
    device = matrices[0].get_device()  # -1 without a GPU: nothing is launched or cached
    direct = device >= 0 and not any(matrix.data_ptr() % 16 for matrix in matrices)
    key = (
        id(kernel), ctas, numbers, constants, _ptxas_hook.marker(), device,
        *((matrix.stride(), matrix.dtype) for matrix in matrices),
        *(None if address is None else address % 16 for address in addresses),
        *(None if pointer is None else pointer.dtype for pointer in pointers),
    )  # fmt: skip
    cached = _LAUNCH_CACHE.get(key) if direct else None
    if cached is not None:
        at = (*(matrix.data_ptr() for matrix in matrices), *addresses)
        cached.start(device, *at)
        return call_recording.note_launch(cached.start, at)
    descriptors = [descriptor(*one) for one in tensors]
    compiled = _ptxas_hook.launch(functools.partial(
        start(kernel, (ctas,), matrices[0]), *descriptors, *pointers, *numbers, *constants, num_warps=4,
        enable_fp_fusion=True,  # the contract promotes by fused multiply-add
    ))  # fmt: skip
    if direct and all(made.base is matrix for made, matrix in zip(descriptors, matrices, strict=True)):
        if len(_LAUNCH_CACHE) >= _MAX_CACHED:
            _LAUNCH_CACHE.clear()
        fields = tuple(_fields(made) for made in descriptors)
        _LAUNCH_CACHE[key] = _CachedLaunch(compiled, ctas, fields, (*numbers, *constants))


def is_tma_addressable(tensor: Tensor) -> bool:
    """Whether TMA can address the matrix: contiguous rows that start at multiples of 16 bytes."""
    size = tensor.element_size()
    return tensor.stride(1) == 1 and tensor.stride(0) * size % 16 == 0 and tensor.data_ptr() % 16 == 0


def is_tma_writable(tensor: Tensor) -> bool:
    """Whether TMA can store to the matrix and to nothing else: rows also end at multiples of 16 bytes. Seen on an H200:
    past the end of a shorter row TMA overwrites its neighbours up to the next multiple."""
    return is_tma_addressable(tensor) and tensor.shape[1] * tensor.element_size() % 16 == 0


def kernel_dtype(out: Tensor, *, accumulate: bool, direct: bool) -> torch.dtype:
    """Dtype the kernel writes: the output's, or fp32 if a second pass accumulates."""
    return torch.float32 if accumulate and not direct else out.dtype


def empty_for_tma(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized matrix that TMA can address: rows are padded to multiples of 16 bytes."""
    rows, columns = shape
    step = round_up(columns, max(1, 16 // dtype.itemsize))
    # TMA also writes the padding of the last row, so it is allocated
    return torch.empty(rows, step, dtype=dtype, device=device)[:, :columns]


def specialization_of(size: int) -> int:
    """Triton's specialization class of an integer: 1, 16 for multiples of 16, else 0."""
    return 1 if size == 1 else 0 if size % 16 else 16


def unpadded(codes: Tensor, length: int) -> Tensor:
    """Codes without the padding of their rows, [rows, length]."""
    return codes if codes.shape[1] == length else codes[:, :length]


def descriptor(tensor: Tensor, block: tuple[int, int], layout: object) -> TensorDescriptor:
    """TMA descriptor of the tensor, or of a copy if TMA cannot address it."""
    if not is_tma_addressable(tensor):
        tensor = empty_for_tma(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


def _fields(made: TensorDescriptor) -> dict[str, Any]:
    """All fields of a descriptor but its tensor: the cache must not keep a tensor alive, nor its autograd graph."""
    return {name: value for name, value in vars(made).items() if name != "base"}


def _with_base(fields: dict[str, Any], matrix: Tensor | _Address) -> TensorDescriptor:
    """Descriptor with these fields, without the checks of its class. A new object each time: backward launches from
    another thread."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ = {**fields, "base": matrix}
    return made
