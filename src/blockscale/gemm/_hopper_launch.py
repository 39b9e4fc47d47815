"""TMA descriptors, and launches of the Gluon kernels for Hopper with the chosen ptxas."""

# pyright: basic, reportArgumentType=false

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..formats.layout import round_up
from ..launch import launch
from . import _ptxas
from ._gluon import TensorDescriptor, gl

LANGUAGE = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
Block = tuple[int, int]


def start_kernel(
    kernel: Any,
    ctas: int,
    tensors: tuple[tuple[Tensor, Block], ...],
    pointers: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
    constants: tuple[object, ...],
) -> None:
    """Launch a kernel whose arguments are descriptors, pointers, integers and constants, in that order.

    tensors: matrices that TMA reads or writes, and their blocks.  numbers and constants: they follow from the layouts
    of the tensors and from the operator's arguments.
    """
    launch(
        kernel, (ctas,), (*(descriptor(*one) for one in tensors), *pointers), (*numbers, *constants),
        through=_ptxas.launch, num_warps=4,
        enable_fp_fusion=True,  # the contract promotes by fused multiply-add
    )  # fmt: skip


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


def descriptor(tensor: Tensor, block: Block) -> TensorDescriptor:
    """TMA descriptor of the tensor, or of a copy if TMA cannot address it."""
    if not is_tma_addressable(tensor):
        tensor = empty_for_tma(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
    layout = _shared_layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


@functools.lru_cache(maxsize=256)
def _shared_layout(block: Block, dtype: torch.dtype) -> object:
    """Layout of a block in shared memory: with the widest swizzle, or without one if it is a row of scales."""
    return gl.NVMMASharedLayout.get_default_for(list(block), LANGUAGE[dtype])
