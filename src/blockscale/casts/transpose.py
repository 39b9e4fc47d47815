"""`transpose_codes`: the codes of a tensor's transpose, from its own. Bytes move, nothing is rounded.

With it one plane of codes serves both operands of a weight in square blocks. Cost: one read and one write of the codes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats.layout import CODE_ROW_BYTES, ceil_div, cuts_evenly, round_up
from ..hardware import capability
from ..library import Sharding, define_op, empty
from ..registry import Request, select


def _allocate(codes: Tensor, length: int, bits: int) -> Tensor:
    width = round_up(ceil_div(codes.shape[-2] * bits, 8), CODE_ROW_BYTES)
    return empty((*codes.shape[:-2], length, width), torch.uint8, codes.device)


def _batches(parts: int, codes: Tensor, length: int, bits: int) -> Iterator[Sharding]:
    """Shardings along the leading dimensions."""
    for dim in range(len(codes.shape) - 2):
        if cuts_evenly(codes.shape[dim], parts):
            yield Sharding({"codes": dim}, (dim,))


def transpose_request(codes: Tensor, length: int, bits: int) -> Request:
    """Registry request of a transpose: the shape is [rows, length] in codes."""
    flags = {
        "strided": codes.stride(-1) != 1,
        "four_bit": bits == 4,
    }
    options = frozenset(name for name, on in flags.items() if on)
    return Request(
        "transpose_codes", capability(codes.device), (), (codes.shape[:-1].numel(), length), torch.uint8, (), options
    )


@define_op(fake=_allocate, sharding=_batches)
def transpose_codes(codes: Tensor, length: int, bits: int) -> Tensor:
    """Code bytes [..., rows, row bytes], `length` codes of `bits` bits in each row -> [..., length, row bytes of `rows`
    codes]. Rows of the result are padded with zeros to 16 bytes.

    >>> transpose_codes(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8), 2, 8)[:, :2].tolist()
    [[1, 3], [2, 4]]
    """
    out = _allocate(codes, length, bits)
    select(transpose_request(codes, length, bits)).launch(codes, out, length, bits)
    return out
