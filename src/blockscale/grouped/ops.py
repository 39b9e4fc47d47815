"""Operators of the grouped GEMMs. Group offsets stay on the device; output sizes never depend on their values.

FLOPs count every row and all padding, because the host does not know the group sizes.
"""

import functools

import torch
from torch import Tensor

from ..formats.layout import check_group_ends
from ..formats.tensor import BlockScaled, operand_from_parts
from ..gemm.ops import accumulated_flops, product_flops, product_options
from ..hardware import capability
from ..library import define_op, empty
from ..registry import Request, select, would_serve
from . import sharding


def grouped_request(
    a: BlockScaled,
    b: BlockScaled,
    groups: int,
    dtype: torch.dtype,
    *,
    bias: bool,
    accumulate: bool,
    starts: bool = False,
) -> Request:
    """Registry request of a grouped GEMM: m-grouped if b is 3-D, else k-grouped."""
    op = "m_grouped" if len(b.shape) == 3 else "k_grouped"
    options = product_options(a, b, bias=bias, accumulate=accumulate) | ({"starts"} if starts else set())
    # the contracted length comes third, as in a dense GEMM: K of the weights, or the padded tokens
    shape, layouts = (a.rows, b.rows, a.length, groups), (a.scale_layout, b.scale_layout)
    return Request(op, capability(a.device), (a.format, b.format), shape, dtype, layouts, options)


@torch.compiler.assume_constant_result
def wanted_layouts(op: str, a: str, b: str, device: torch.device) -> tuple[str | None, str | None]:
    """Scale layouts of a and b that the kernel for large grouped GEMMs of these formats reads on this device.

    As `gemm.ops.wanted_layouts` for dense GEMMs. op: "m_grouped" or "k_grouped"."""
    layouts = would_serve(_large_request(op, a, b, device)).layouts
    return layouts.get(a), layouts.get(b)


@functools.lru_cache(maxsize=1024)
def _large_request(op: str, a: str, b: str, device: torch.device) -> Request:
    return Request(op, capability(device), (a, b), (16384, 4096, 4096, 8), torch.bfloat16)


def _launch(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    starts: Tensor | None,
    out: Tensor,
    bias: Tensor | None,
    *,
    accumulate: bool,
) -> None:
    if out.numel() == 0:
        return  # no launch: some kernels would sync with the device only to find no work
    # a k-grouped operand was checked when it was cast
    check_group_ends(offs, a.rows if len(b.shape) == 3 else a.length, starts)
    flags = {"bias": bias is not None, "accumulate": accumulate, "starts": starts is not None}
    kernel = select(grouped_request(a, b, offs.shape[0], out.dtype, **flags))
    a, b = (q.with_layout(kernel.layouts.get(q.format, q.scale_layout)) for q in (a, b))
    options = {} if starts is None else {"starts": starts}  # kernels that reject `starts` have no such parameter
    kernel.launch(a, b, offs, out, bias=bias, accumulate=accumulate, **options)


def _allocate(a: Tensor, b: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (a.shape[0], b.shape[1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[0])
    return empty(shape, dtype, a.device)


def _fake_scaled_grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    offs: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return _allocate(a, b, offs, out_dtype)


@define_op(fake=_fake_scaled_grouped_mm, flops=product_flops, sharding=sharding.scaled_grouped_mm)
def scaled_grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    offs: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """m-grouped if b has rank 3, else k-grouped.  offs: unpadded end offsets in both cases.  starts: first row of each
    group, if groups are not contiguous."""
    out = _allocate(a, b, offs, out_dtype)
    left = operand_from_parts(a, a_scale, a_global, a_kind, length)
    right = operand_from_parts(b, b_scale, b_global, b_kind, length)
    _launch(left, right, offs, starts, out, bias, accumulate=False)
    return out


def _fake_scaled_grouped_mm_add_(
    acc: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    offs: Tensor,
    starts: Tensor | None,
) -> None:
    return None


@define_op(
    fake=_fake_scaled_grouped_mm_add_,
    flops=accumulated_flops,
    sharding=sharding.scaled_grouped_mm_add_,
    mutates=("acc",),
)
def scaled_grouped_mm_add_(
    acc: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    offs: Tensor,
    starts: Tensor | None,
) -> None:
    """acc += the grouped product, in fp32, rounded once to acc's dtype; rows of no group are unchanged."""
    left = operand_from_parts(a, a_scale, a_global, a_kind, length)
    right = operand_from_parts(b, b_scale, b_global, b_kind, length)
    _launch(left, right, offs, starts, acc, None, accumulate=True)
