"""The GEMM operators. An operand is passed as codes, scales, tensor scale and `format layout`, scaled axis last.

`scaled_mm` is functional; `scaled_mm_add_` accumulates into a buffer of the caller (gradient accumulation). Both select
a kernel, convert the scale layouts if it reads another one, and launch.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ..formats.tensor import BlockScaled, has_canonical_strides, operand_from_parts, stored_length
from ..hardware import capability, current_cuda_device
from ..library import define_op, empty
from ..registry import Request, select, would_serve
from . import sharding


def product_options(a: BlockScaled, b: BlockScaled, *, bias: bool, accumulate: bool) -> frozenset[str]:
    """Options of a request: bias, accumulate, strided (scales without the strides of their layout)."""
    strided = not (has_canonical_strides(a) and has_canonical_strides(b))
    return frozenset(name for name, on in (("bias", bias), ("accumulate", accumulate), ("strided", strided)) if on)


def gemm_request(a: BlockScaled, b: BlockScaled, dtype: torch.dtype, *, bias: bool, accumulate: bool) -> Request:
    """Registry request of a dense GEMM."""
    options = product_options(a, b, bias=bias, accumulate=accumulate)
    shape, layouts = (a.rows, b.rows, a.length), (a.scale_layout, b.scale_layout)
    return Request("gemm", capability(a.device), (a.format, b.format), shape, dtype, layouts, options)


@torch.compiler.assume_constant_result
def wanted_layouts(a: str, b: str, device: torch.device) -> tuple[str | None, str | None]:
    """Scale layouts that the kernel for large GEMMs of these formats reads on this device; None: any. A cast that
    writes them saves a conversion."""
    layouts = would_serve(_large_request(a, b, device)).layouts
    return layouts.get(a), layouts.get(b)


@functools.lru_cache(maxsize=1024)
def _large_request(a: str, b: str, device: torch.device) -> Request:
    return Request("gemm", capability(device), (a, b), (4096, 4096, 4096), torch.bfloat16)


def reject_fp8_of_hopper(request: Request) -> str | None:
    """Reason why neither the Gluon kernels nor F.scaled_mm take the request on sm_90, or None."""
    if 0 in request.shape:
        return "takes no empty operands"
    if "strided" in request.options:
        return "wants scales with the strides of their layout, and these have others"
    return None


def reject_fp8_of_vendor(request: Request) -> str | None:
    """Reason why F.scaled_mm does not take the request on sm_90, or None. Here because `hopper` defers to it."""
    refused = reject_fp8_of_hopper(request)
    if refused is not None:
        return refused
    _, n, k = request.shape
    if n % 16 or k % 16:
        return f"wants N and K in multiples of 16, these are {n} and {k}"
    for name, rows in zip(request.formats, request.shape[:2], strict=True):
        if name == "fp8_1x128" and rows % 4:
            return f"wants 1x128 scales without padding: rows in multiples of 4, not {rows}"
    return None


def _launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool) -> None:
    kernel = select(gemm_request(a, b, out.dtype, bias=bias is not None, accumulate=accumulate))
    a, b = (q.with_layout(kernel.layouts.get(q.format, q.scale_layout)) for q in (a, b))
    with current_cuda_device(out.device):  # kernels go to the current device
        kernel.launch(a, b, out, bias=bias, accumulate=accumulate)


def product_flops(
    a: list[int],
    a_scale: object,
    a_global: object,
    a_kind: str,
    b: list[int],
    b_scale: object,
    b_global: object,
    b_kind: str,
    length: int,
    *rest: object,
    **named: object,
) -> int:
    """FLOPs, 2 M N K, from the shapes of the codes."""
    return 2 * a[0] * b[-2] * stored_length(a, a_kind, length)


def accumulated_flops(acc: list[int], *rest: Any, **named: Any) -> int:
    """FLOPs of an operator whose first argument is the accumulation buffer."""
    return product_flops(*rest, **named)


def _allocate(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return empty((a.shape[0], b.shape[0]), dtype, a.device)


def _fake_scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return _allocate(a, b, out_dtype)


@define_op(fake=_fake_scaled_mm, flops=product_flops, sharding=sharding.scaled_mm)
def scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_kind: str,
    b: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_kind: str,
    length: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """a [M, length] @ b [N, length].mT."""
    out = _allocate(a, b, out_dtype)
    left = operand_from_parts(a, a_scale, a_global, a_kind, length)
    right = operand_from_parts(b, b_scale, b_global, b_kind, length)
    _launch(left, right, out, bias, accumulate=False)
    return out


def _fake_scaled_mm_add_(
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
) -> None:
    return None


@define_op(fake=_fake_scaled_mm_add_, flops=accumulated_flops, sharding=sharding.scaled_mm_add_, mutates=("acc",))
def scaled_mm_add_(
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
) -> None:
    """acc += a @ b.mT, in fp32, rounded once to acc's dtype."""
    left = operand_from_parts(a, a_scale, a_global, a_kind, length)
    right = operand_from_parts(b, b_scale, b_global, b_kind, length)
    _launch(left, right, acc, None, accumulate=True)
