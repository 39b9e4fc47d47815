"""Grouped products in high precision, for what a recipe leaves there: `F.grouped_mm` where it serves, else a loop.

torch wants rows at multiples of 16 bytes, and on CUDA anything but bf16 takes its sizes through the host. The loop
reads them on the host in any case: layers whose features are multiples of 8 never meet it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .. import call_recording
from ..casts.sharding import replicated
from ..formats.layout import check_group_ends
from ..hardware import for_products
from ..library import define_op
from .routing_ops import clear_rows

_ALIGNED = 16


def _result_shape(a: Tensor, b: Tensor, offs: Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1])


def _fake_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty(_result_shape(a, b, offs))


def _flops(a: list[int], b: list[int], offs: list[int], *rest: object, **named: object) -> int:
    return 2 * a[0] * a[1] * b[-1]


@define_op(fake=_fake_grouped_mm, flops=_flops, sharding=replicated)
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """m-grouped, a [M, K] @ b [E, K, N] -> [M, N], or k-grouped, a [N, M] @ b [M, K] -> [G, N, K]; rows of no group
    give zero and are not summed."""
    call_recording.refuse("a product in high precision")
    m_grouped = b.dim() == 3
    check_group_ends(offs, a.shape[0] if m_grouped else a.shape[1])
    dtype = a.dtype
    a, b = for_products(a, b)
    if not (_is_served(a) and _is_served(b)):
        return _loop(a, b, offs).to(dtype)
    product = functional.grouped_mm(a, b, offs=offs).to(dtype)
    if m_grouped:
        clear_rows(product, offs)  # rows of no group hold whatever the product left there
    return product


def _is_served(x: Tensor) -> bool:
    """Whether torch takes it, without a look at sizes on the host where that is a GPU's."""
    if 0 in x.shape or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    rows = [step for step in x.stride()[-2:] if step != 1]
    aligned = len(rows) == 1 and all(step * x.element_size() % _ALIGNED == 0 for step in x.stride() if step != 1)
    return aligned and x.data_ptr() % _ALIGNED == 0


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
