"""Dense GEMM of block-scaled operands: `scaled_mm(a, b)` is a [M, K] @ b [N, K].mT.

Every legal pair of formats works on every device; the registry selects the kernel (`explain` shows which).
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..casts import FLOAT_DTYPES
from ..errors import AxisError, DeviceError, DtypeError, OptionError, ShapeError, message
from ..formats.checks import in_words, is_dense, overlaps
from ..formats.spec import check_pair
from ..formats.tensor import BlockScaled, check_block_scaled, check_is_block_scaled, to_parts
from . import _reference as _reference  # registers its kernels
from . import _torch as _torch
from . import ops

with contextlib.suppress(ImportError):  # CPU builds of torch have no triton
    from . import _blackwell as _blackwell
    from . import _hopper as _hopper
    from . import _hopper_mx as _hopper_mx
    from . import _hopper_rows as _hopper_rows
    from . import _triton as _triton

# dtypes of `accumulate` buffers
ACCUMULATOR_DTYPES = (torch.float32, torch.bfloat16)


def scaled_mm(
    a: BlockScaled,
    b: BlockScaled,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
) -> Tensor:
    """a [M, K] @ b [N, K].mT, products exact, sums and scales in fp32, one rounding to `out_dtype` at the end.

    bias: [N], added in fp32 before the rounding.  accumulate: an fp32 or bf16 [M, N] buffer that the product is added
    into, in fp32 and with one rounding to the buffer's dtype, and that is returned; out_dtype is then not used.

    >>> import blockscale as bs
    >>> x = bs.quantize(torch.ones(2, 128), "fp8_1x128")
    >>> w = bs.quantize(torch.ones(3, 128), "fp8_128x128")
    >>> scaled_mm(x, w)
    tensor([[128., 128., 128.],
            [128., 128., 128.]], dtype=torch.bfloat16)
    """
    check_dense(a, b)
    if accumulate is not None:
        check_accumulator(accumulate, bias, (a.rows, b.rows), a.device)
    else:
        check_output(out_dtype)
        check_bias(bias, (b.rows,), a.device)
    return multiply(a, b, out_dtype, bias, accumulate)


def multiply(
    a: BlockScaled, b: BlockScaled, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None
) -> Tensor:
    """`scaled_mm` without argument checks."""
    if accumulate is None:
        return ops.scaled_mm(*to_parts(a), *to_parts(b), a.length, bias, out_dtype)
    ops.scaled_mm_add_(accumulate, *to_parts(a), *to_parts(b), a.length)
    return accumulate


def exact_mm(a: BlockScaled, b: BlockScaled) -> Tensor:
    """The same GEMM in fp64 from exactly decoded operands, for tests and self-checks.

    >>> import blockscale as bs
    >>> q = bs.quantize(torch.eye(32), "mxfp4")
    >>> bool((exact_mm(q, q) == torch.eye(32)).all())
    True
    """
    check_operands(a, b, ranks=(2, 2))
    check_contraction(a, b)
    return _reference.exact_product(a, b)


def check_dense(a: BlockScaled, b: BlockScaled) -> None:
    """Raise unless `scaled_mm` takes these operands."""
    check_operands(a, b, ranks=(2, 2))
    check_contraction(a, b)
    for name, q in (("a", a), ("b", b)):
        if q.group_align or (q.global_scale is not None and q.global_scale.dim()):
            raise OptionError(
                message(
                    f"{name} is {q}",
                    rule="scaled_mm takes operands without groups",
                    fix="use scaled_grouped_mm with offs",
                )
            )


def check_operands(a: BlockScaled, b: BlockScaled, *, ranks: tuple[int, int]) -> None:
    """Raise unless both are sound operands of these ranks, a legal pair, on one device, scaled axis last."""
    for name, q, rank, partner in (("a", a, ranks[0], b), ("b", b, ranks[1], a)):
        check_is_block_scaled(q, name, "a product", partner)
        check_block_scaled(q, name)
        if len(q.shape) != rank:
            raise ShapeError(
                message(
                    f"{name} has shape {tuple(q.shape)}",
                    rule=f"this operand has rank {rank}",
                    fix="reshape before the cast",
                )
            )
        if q.axis != -1:
            raise AxisError(
                message(
                    f"{name} {tuple(q.shape)} is scaled along axis {q.axis}",
                    rule="a product contracts the last axis of both operands, and blocks must run along it",
                    fix=f"pass {name}.mT, or cast with axis=-1",
                )
            )
    check_pair(a.format, b.format)
    if a.device != b.device:
        raise DeviceError(
            message(f"a is on {a.device}, b on {b.device}", rule="operands share a device", fix="move one of them")
        )


def check_contraction(a: BlockScaled, b: BlockScaled) -> None:
    """Raise unless K and the rotations agree."""
    if a.shape[-1] != b.shape[-1]:
        raise ShapeError(
            message(
                f"a {tuple(a.shape)} and b {tuple(b.shape)} have K = {a.shape[-1]} and {b.shape[-1]}",
                rule="both operands have K as their last axis: a [M, K], b [N, K]",
                fix="transpose before the cast, or pass .mT of an operand cast with axis=-2",
            )
        )
    if a.hadamard != b.hadamard:
        raise OptionError(
            message(
                f"a has Hadamard mask {a.hadamard}, b {b.hadamard}",
                rule="a rotation cancels only when both operands have the same one",
                fix="cast both with the same hadamard option",
            )
        )


def check_output(dtype: torch.dtype) -> None:
    """Raise unless this is a legal output dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DtypeError(
            message(
                f"out_dtype={in_words(dtype)}",
                rule="products come out as bfloat16, float16 or float32",
                fix="use one of them",
            )
        )


def check_accumulator(acc: Tensor, bias: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless `accumulate` is a legal buffer for a product of this shape, without a bias."""
    if not isinstance(acc, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = "pass accumulate=torch.zeros(shape)"
        raise DtypeError(message(f"accumulate is {in_words(acc)}", rule="it is an fp32 or bf16 buffer", fix=fix))
    if acc.requires_grad and torch.is_grad_enabled():
        raise OptionError(
            message(
                f"accumulate requires grad: {acc.dtype} {tuple(acc.shape)}",
                rule="a product is added to the buffer in place, and autograd does not see it",
                fix="pass accumulate.detach(), or call under torch.no_grad()",
            )
        )
    if bias is not None:
        fix = "add the bias yourself"
        raise OptionError(message("bias and accumulate together", rule="an accumulated product has no bias", fix=fix))
    sound = is_dense(acc) and acc.dtype in ACCUMULATOR_DTYPES and tuple(acc.shape) == shape
    if not sound or acc.device != device:
        raise ShapeError(
            message(
                f"accumulate is {in_words(acc)} on {acc.device}",
                rule=f"the buffer is float32 or bfloat16 {shape} on {device}",
                fix="allocate it with torch.zeros",
            )
        )
    if overlaps(acc):
        raise OptionError(
            message(
                f"accumulate {tuple(acc.shape)} has strides {acc.stride()}: elements share memory",
                rule="every element of a product is added to memory of its own",
                fix="pass accumulate.contiguous(), or allocate it with torch.zeros",
            )
        )


def check_bias(bias: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless the bias fits."""
    if bias is None:
        return
    if not isinstance(bias, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DtypeError(message(f"bias is {in_words(bias)}", rule="a bias is a tensor", fix="torch.tensor(bias)"))
    sound = is_dense(bias) and bias.dtype in FLOAT_DTYPES and tuple(bias.shape) == shape
    if not sound or bias.device != device:
        raise ShapeError(
            message(
                f"bias is {in_words(bias)} on {bias.device}",
                rule=f"a bias is bfloat16, float16 or float32 of shape {shape} on {device}",
                fix="pass one value per output column",
            )
        )
