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
from ..formats.checks import all_ints, check_tensor, in_words, is_dense
from ..formats.tensor import BlockScaled
from ..hardware import capability, current_cuda_device
from ..library import EXPANSIONS, Expansion, define_op, empty
from ..registry import Request, select
from .packed import MOST_EXPONENT, PACKABLE, PACKED_LAYOUT, PackedWeight, packed_shapes
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
    _check_fields(w)
    check_tensor(x, "a", "products")
    if x.dtype not in FLOAT_DTYPES:
        rule = "a plain left operand is bfloat16, float16 or float32"
        refuse(f"a has dtype {x.dtype}", rule, "convert it first, for example a.bfloat16()", error=DtypeError)
    if x.dim() != 2 or x.shape[1] != w.length:
        rule, fix = f"a left operand is [M, {w.length}]", "pass a.flatten(0, -2), and unflatten the result"
        refuse(f"a has shape {tuple(x.shape)}, and b is {w}", rule, fix, error=ShapeError)
    if x.device != w.device:
        refuse(f"a is on {x.device}, b on {w.device}", "operands share a device", "move one", error=DeviceError)
    return x


def _check_fields(w: PackedWeight) -> None:
    """Raise unless the fields of a packed weight fit together."""
    fix = "make it with pack_weight"
    fields = w.format, w.shape, w.exponent
    sound = isinstance(w.format, str) and isinstance(w.shape, tuple)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not sound or w.format not in PACKABLE or len(w.shape) != 2 or not all_ints((*w.shape, w.exponent)):
        rule = f"a packed weight has one of {', '.join(PACKABLE)}, a shape (N, K) and an exponent"
        refuse(f"b has format, shape and exponent {in_words(fields)}", rule, fix, error=LayoutError)
    most = 0 if w.format == "nvfp4" else MOST_EXPONENT
    if min(w.shape) < 1 or abs(w.exponent) > most:
        rule = f"N and K are positive, and the exponent of {w.format} is at most {most}"
        refuse(f"b has shape {w.shape} and exponent {w.exponent}", rule, fix, error=LayoutError)
    for name, shape in zip(("data", "scale"), packed_shapes(w.format, w.shape), strict=True):
        tensor = getattr(w, name)
        if not _is_dense(tensor, torch.uint8, shape) or not tensor.is_contiguous() or tensor.device != w.device:
            rule = f"a packed {w.format} weight {w.shape} keeps its {name} as contiguous uint8 {shape} on one device"
            refuse(f"b.{name} is {in_words(tensor)}", rule, fix, error=LayoutError)
    factor, wanted = w.global_scale, w.format == "nvfp4" or w.exponent != 0
    if wanted != (factor is not None) or (wanted and not _is_factor(factor, w.device)):
        rule = "NVFP4, and a weight that is stored smaller, has a tensor scale, fp32 [] on its device; others have none"
        refuse(f"b.global_scale is {in_words(factor)}", rule, fix, error=LayoutError)


def _is_dense(tensor: object, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return isinstance(tensor, Tensor) and is_dense(tensor) and tensor.dtype == dtype and tuple(tensor.shape) == shape


def _is_factor(factor: Tensor | None, device: torch.device) -> bool:
    return factor is not None and _is_dense(factor, torch.float32, ()) and factor.device == device
