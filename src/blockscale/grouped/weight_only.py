"""Weight-only grouped GEMM: plain rows [M, K] times the block-scaled weight of their group, [E, N, K]. m-grouped only.

Kernels are registered under the operation `m_grouped`, with the dtype of the rows as their format: ("bf16", "mxfp4").
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.layout import check_group_ends
from ..formats.tensor import BlockScaled
from ..gemm.ops import cut_rows
from ..gemm.weight_only import PLAIN_NAME_OF, weight_only_flops, weight_only_options
from ..hardware import capability, current_cuda_device
from ..library import Sharding, define_op, empty
from ..registry import Request, select


class WeightOnlyInputs(NamedTuple):
    """`ops.Inputs` with plain rows: inputs of a kernel, as `scaled_grouped_mm` takes them."""

    a: Tensor
    b: BlockScaled
    offs: Tensor
    starts: Tensor | None = None
    bias: Tensor | None = None


def weight_only_grouped_request(
    x: Tensor, w: BlockScaled, groups: int, dtype: torch.dtype, *, bias: bool, starts: bool = False
) -> Request:
    """Registry request of a weight-only grouped GEMM."""
    formats, layouts = (PLAIN_NAME_OF[x.dtype], w.format), ("", w.scale_layout)
    shape = (x.shape[0], w.rows, w.length, groups)
    options = weight_only_options(w, bias=bias) | ({"starts"} if starts else set())
    return Request("m_grouped", capability(w.device), formats, shape, dtype, layouts, options)


def _shard(parts: int, x: Tensor, w: BlockScaled, *rest: object) -> Iterator[Sharding]:
    """The rows of w, with the columns of the bias."""
    if columns := cut_rows(parts, "w", w):
        yield Sharding(columns | {"bias": 1}, (1,))


def _allocate(
    x: Tensor, w: BlockScaled, offs: Tensor, starts: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return empty((x.shape[0], w.rows), out_dtype, w.device)


@define_op(fake=_allocate, flops=weight_only_flops, sharding=_shard)
def weight_only_grouped_mm(
    x: Tensor, w: BlockScaled, offs: Tensor, starts: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Rows of x [M, K] times the weight of their group.  starts: first row of each group, if not contiguous."""
    out = _allocate(x, w, offs, starts, bias, out_dtype)
    check_group_ends(offs, x.shape[0], starts)
    if out.numel() == 0:
        return out
    flags = {"bias": bias is not None, "starts": starts is not None}
    kernel = select(weight_only_grouped_request(x, w, offs.shape[0], out_dtype, **flags))
    w = w.with_layout(kernel.layouts.get(w.format, w.scale_layout))
    with current_cuda_device(out.device):  # kernels go to the current device
        kernel.launch(WeightOnlyInputs(x, w, offs, starts, bias), out, accumulate=False)
    return out
