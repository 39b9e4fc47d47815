"""Operators of the grouped GEMMs. Group offsets stay on the device; output sizes never depend on their values.

FLOPs count every row and all padding, because the host does not know the group sizes. Only the rows of the second
operand may be sharded: `starts` and `offs` count the tokens of the whole operand.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.layout import check_group_ends
from ..formats.tensor import BlockScaled
from ..gemm.ops import cut_rows, product_flops, product_options
from ..hardware import Capability, capability
from ..library import Sharding, define_op, empty
from ..registry import Request, select
from ..tracing import constant_when_compiled


class Inputs(NamedTuple):
    """Inputs of a grouped GEMM's kernel, as `scaled_grouped_mm` takes them.  starts, bias: None if k-grouped."""

    a: BlockScaled
    b: BlockScaled
    offs: Tensor
    starts: Tensor | None = None
    bias: Tensor | None = None


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


@constant_when_compiled
def wanted_layouts(op: str, a: str, b: str, device: torch.device) -> tuple[str | None, str | None]:
    """Scale layouts of a and b that the kernel for large grouped GEMMs of these formats reads on this device.

    As `gemm.ops.wanted_layouts` for dense GEMMs. op: "m_grouped" or "k_grouped"."""
    layouts = select(_large_request(op, a, b, capability(device))).layouts
    return layouts.get(a), layouts.get(b)


@functools.lru_cache(maxsize=1024)
def _large_request(op: str, a: str, b: str, where: Capability) -> Request:
    return Request(op, where, (a, b), (16384, 4096, 4096, 8), torch.bfloat16)


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
    assert len(b.shape) == 3 or (starts is None and bias is None), "k-grouped products have neither"
    # a k-grouped operand was checked when it was cast
    check_group_ends(offs, a.rows if len(b.shape) == 3 else a.length, starts)
    flags = {"bias": bias is not None, "accumulate": accumulate, "starts": starts is not None}
    kernel = select(grouped_request(a, b, offs.shape[0], out.dtype, **flags))
    a, b = (q.with_layout(kernel.layouts.get(q.format, q.scale_layout)) for q in (a, b))
    kernel.launch(Inputs(a, b, offs, starts, bias), out, accumulate=accumulate)


def _allocate(
    a: BlockScaled, b: BlockScaled, offs: Tensor, starts: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    shape = (a.rows, b.rows) if len(b.shape) == 3 else (offs.shape[0], a.rows, b.rows)
    return empty(shape, out_dtype, a.device)


def _columns(b: BlockScaled) -> int:
    """Dimension of the result, [M, N] or [G, N, K], that the rows of b become."""
    return 1 if len(b.shape) == 3 else 2


def _shard_mm(parts: int, a: BlockScaled, b: BlockScaled, *rest: object) -> Iterator[Sharding]:
    """The rows of b, with the columns of the bias."""
    if columns := cut_rows(parts, "b", b):
        yield Sharding(columns | {"bias": 1}, (_columns(b),))


def _shard_mm_add(parts: int, acc: Tensor, a: BlockScaled, b: BlockScaled, *rest: object) -> Iterator[Sharding]:
    """The rows of b, with the columns of the accumulator."""
    if columns := cut_rows(parts, "b", b):
        yield Sharding(columns | {"acc": _columns(b)})


@define_op(fake=_allocate, flops=product_flops, sharding=_shard_mm)
def scaled_grouped_mm(
    a: BlockScaled, b: BlockScaled, offs: Tensor, starts: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """m-grouped if b has rank 3, else k-grouped.  offs: unpadded end offsets in both cases.  starts: first row of each
    group, if groups are not contiguous."""
    out = _allocate(a, b, offs, starts, bias, out_dtype)
    _launch(a, b, offs, starts, out, bias, accumulate=False)
    return out


@define_op(flops=lambda acc, *rest: product_flops(*rest), sharding=_shard_mm_add, mutates=("acc",))
def scaled_grouped_mm_add_(acc: Tensor, a: BlockScaled, b: BlockScaled, offs: Tensor, starts: Tensor | None) -> None:
    """acc += the grouped product, in fp32, rounded once to acc's dtype; rows of no group are unchanged."""
    _launch(a, b, offs, starts, acc, None, accumulate=True)


def multiply_grouped(
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
    starts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`scaled_grouped_mm` without its checks.  out: contiguous rows that take the result, in eager code alone; with
    starts those of no group are unchanged."""
    if out is not None:
        _launch(a, b, offs, starts, out, bias, accumulate=False)
        return out
    if accumulate is None:
        return scaled_grouped_mm(a, b, offs, starts, bias, out_dtype)
    scaled_grouped_mm_add_(accumulate, a, b, offs, starts)
    return accumulate
