"""Unquantized (bf16, fp16, fp32) grouped GEMM for the GEMMs that a recipe does not quantize: `F.grouped_mm`, or a loop.

`F.grouped_mm` needs rows at multiples of 16 bytes; on CUDA it reads the group sizes on the host for any dtype but bf16.
The loop always reads them on the host. Layers whose features are multiples of 8 never take it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.layout import check_group_ends
from ..hardware import for_products
from ..library import define_op
from .routing import clear_rows

_ALIGN_BYTES = 16


def _result_shape(a: Tensor, b: Tensor, offs: Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1])


@define_op(
    fake=lambda a, b, offs: a.new_empty(_result_shape(a, b, offs)),
    flops=lambda a, b, offs: 2 * a.shape[0] * a.shape[1] * b.shape[-1],
)
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """m-grouped: a [M, K] @ b [E, K, N] -> [M, N]; k-grouped: a [N, M] @ b [M, K] -> [G, N, K].

    Rows of no group give zero (m-grouped) and are not summed (k-grouped)."""
    m_grouped = b.dim() == 3
    check_group_ends(offs, a.shape[0] if m_grouped else a.shape[1])
    dtype = a.dtype
    a, b = for_products(a, b)
    if not (_torch_supports(a) and _torch_supports(b)):
        return _loop(a, b, offs).to(dtype)
    product = functional.grouped_mm(a, b, offs=offs).to(dtype)
    if m_grouped:
        clear_rows(product, offs)  # `F.grouped_mm` leaves rows of no group undefined
    return product


def _torch_supports(x: Tensor) -> bool:
    """Whether `F.grouped_mm` takes this operand: dtype, row-major or column-major, 16-byte alignment."""
    if 0 in x.shape or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    rows = [step for step in x.stride()[-2:] if step != 1]
    aligned = len(rows) == 1 and all(step * x.element_size() % _ALIGN_BYTES == 0 for step in x.stride() if step != 1)
    return aligned and x.data_ptr() % _ALIGN_BYTES == 0


def _loop(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    out = a.new_zeros(_result_shape(a, b, offs))
    start = 0
    for group, end in enumerate(offs.tolist()):
        if b.dim() == 3:
            torch.mm(a[start:end], b[group], out=out[start:end])
        else:
            torch.mm(a[:, start:end], b[start:end], out=out[group])
        start = end
    return out
