"""Column operands from row operands: codes that have travelled are decoded and cast along the other axis.

A rank that received the codes of rows has no source to cast. If scales are powers of two and clip nothing, an 8-bit
element keeps its value in a block with another scale, except far below the block's amax: an E4M3 value loses bits
below 2^-6 of the block's scale and is zero at 2^-10 of it or less. So the columns are those of casting the source, but
for the smallest values of a block (`keeps_values`). With other scales and elements, values are rounded a second time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.cast_spec import Cast
from ..formats.spec import get_format
from ..formats.tensor import BlockScaled
from . import ops

_RULES_WITHOUT_CLIPPING = ("pow2", "rceil", "ceil")


def keeps_values(format: str, rule: str | None) -> bool:
    """Whether values of row operands survive a cast to columns, both in this format by this rule (None: its default):
    8-bit elements, and power-of-two scales that clip nothing.

    >>> keeps_values("mxfp8_e4m3", None), keeps_values("fp8_1x128", "fp32"), keeps_values("fp8_1x128", "pow2")
    (True, False, True)
    """
    spec = get_format(format)
    return spec.element.bits == 8 and (rule or spec.default_rule()) in _RULES_WITHOUT_CLIPPING


def requantize_columns(q: BlockScaled, col: Cast, offs: Tensor | None, dtype: torch.dtype) -> BlockScaled:
    """Column operand (axis=-2) of the values that a row operand [..., M, K] holds.

    offs: inclusive ends of groups of rows (int32), each of which then starts a block of its own; or None.
    dtype: that values are decoded to before the cast. Above its own range (2^-133), bf16 holds every value of formats
    that keep theirs.
    """
    values = ops.dequantize(q, _offs_of_rows(q, offs), dtype)
    return ops.cast(values, col, -2, offs)


def count_underflows(q: BlockScaled, col: BlockScaled, offs: Tensor | None) -> Tensor:
    """Number of values that are not zero in the rows `q` and zero in the columns `col`: int64, on the device.

    offs: the ends of groups that `col` was cast with; rows past the last are not counted.
    """
    rows = ops.dequantize(q, _offs_of_rows(q, offs), torch.float32)
    columns = ops.dequantize(col, offs, torch.float32)
    lost = (rows != 0) & (columns == 0)
    if offs is not None:
        lost &= (torch.arange(q.shape[-2], device=q.device) < offs[-1:])[:, None]
    return lost.sum()


def _offs_of_rows(q: BlockScaled, offs: Tensor | None) -> Tensor | None:
    """`offs` if rows are decoded by the tensor scale of their group, else None."""
    return offs if q.global_scale is not None and q.global_scale.dim() == 1 else None
