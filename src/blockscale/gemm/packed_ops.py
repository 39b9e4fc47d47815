"""Weight-only GEMM of a packed weight, a plain left operand [M, K] times `PackedWeight` [N, K].mT: request, operator,
checks.

A kernel that reads packed weights has "packed" among its scale layouts; the others are given the unpacked weight, which
costs a copy of it in every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..casts.checks import FLOAT_DTYPES
from ..errors import DeviceError, DtypeError, LayoutError, ShapeError, refuse
from ..formats.checks import check_tensor, in_words, is_dense
from ..formats.tensor import BlockScaled
from ..hardware import capability, current_cuda_device
from ..library import EXPANSIONS, Expansion, define_op, empty
from ..registry import Request, select
from .packed import PACKED_LAYOUT, PackedWeight, packed_shapes
from .weight_only import PLAIN_NAME_OF

# before the operator below, whose parameters are expanded when it is defined
EXPANSIONS[PackedWeight] = Expansion(
    {"": Tensor, "_scale": Tensor, "_global": Tensor | None, "_format": str, "_rows": int, "_length": int, "_exp": int},
    lambda w: (w.data, w.scale, w.global_scale, w.format, *w.shape, w.exponent),
    lambda data, scale, factor, name, rows, length, exponent: PackedWeight(
        data, scale, factor, name, (rows, length), exponent
    ),
)


def packed_request(x: Tensor, w: PackedWeight, dtype: torch.dtype, *, bias: bool) -> Request:
    """Registry request of a weight-only GEMM of a packed weight."""
    formats, layouts = (PLAIN_NAME_OF[x.dtype], w.format), ("", PACKED_LAYOUT)
    options = frozenset({"bias"} if bias else ())
    return Request("gemm", capability(w.device), formats, (x.shape[0], *w.shape), dtype, layouts, options)


def _allocate(x: Tensor, w: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return empty((x.shape[0], w.rows), out_dtype, w.device)


def _flops(x: Tensor, w: PackedWeight, *rest: object) -> int:
    return 2 * x.shape[0] * w.rows * w.length


@define_op(fake=_allocate, flops=_flops)
def packed_weight_mm(x: Tensor, w: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [M, K] @ w [N, K].mT."""
    out = _allocate(x, w, bias, out_dtype)
    kernel = select(packed_request(x, w, out_dtype, bias=bias is not None))
    wanted = kernel.layouts.get(w.format, "plain")
    with current_cuda_device(out.device):  # kernels go to the current device
        operand = w if wanted == PACKED_LAYOUT else w.unpack().with_layout(wanted)
        kernel.launch(x, operand, out, bias=bias, accumulate=False)
    return out


def check_packed(x: Tensor | BlockScaled, w: PackedWeight) -> Tensor:
    """The left operand; raises unless a product takes these operands."""
    if isinstance(x, BlockScaled):
        rule = "a packed weight is multiplied by a plain tensor"
        refuse(f"a is {x}, and b is {w}", rule, "pass the tensor itself, or b.unpack()", error=DtypeError)
    check_tensor(x, "a", "products")
    if x.dtype not in FLOAT_DTYPES:
        rule = "a plain left operand is bfloat16, float16 or float32"
        refuse(f"a has dtype {x.dtype}", rule, "convert it first, for example a.bfloat16()", error=DtypeError)
    if x.dim() != 2 or x.shape[1] != w.length:
        rule, fix = f"a left operand is [M, {w.length}]", "pass a.flatten(0, -2), and unflatten the result"
        refuse(f"a has shape {tuple(x.shape)}, and b is {w}", rule, fix, error=ShapeError)
    if x.device != w.device:
        refuse(f"a is on {x.device}, b on {w.device}", "operands share a device", "move one", error=DeviceError)
    for name, tensor, shape in zip(("data", "scale"), (w.data, w.scale), packed_shapes(w.format, w.shape), strict=True):
        sound = is_dense(tensor) and tensor.is_contiguous() and tensor.dtype == torch.uint8
        if not sound or tensor.shape != shape or tensor.device != w.device:
            rule = f"a packed {w.format} weight {w.shape} keeps its {name} as contiguous uint8 {shape} on {w.device}"
            refuse(f"b.{name} is {in_words(tensor)}", rule, "make it with pack_weight", error=LayoutError)
    factor, wanted = w.global_scale, w.format == "nvfp4" or w.exponent != 0
    if wanted != (factor is not None) or (factor is not None and not _is_factor(factor, w.device)):
        rule = "NVFP4, and a weight that is stored smaller, has a tensor scale, fp32 [] on its device; others have none"
        refuse(f"b.global_scale is {in_words(factor)}", rule, "make it with pack_weight", error=LayoutError)
    return x


def _is_factor(factor: Tensor, device: torch.device) -> bool:
    return is_dense(factor) and factor.dtype == torch.float32 and not factor.dim() and factor.device == device
