"""The GEMM operators: argument checks, registry requests, bodies and sharding rules, and what several backends share.

`scaled_mm` is functional; `scaled_mm_add_` accumulates into a buffer of the caller (gradient accumulation). Both select
a kernel, convert the scale layouts if it reads another one, and launch.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..casts.checks import FLOAT_DTYPES
from ..casts.ops import dequantize_request
from ..errors import AxisError, DeviceError, DtypeError, ShapeError, refuse
from ..formats.checks import in_words, is_dense, overlaps
from ..formats.layout import cuts_length, cuts_rows
from ..formats.spec import check_pair, partners_of
from ..formats.tensor import (
    BlockScaled,
    check_block_scaled,
    check_is_block_scaled,
    has_canonical_strides,
    is_row_slice,
)
from ..hardware import Capability, capability, current_cuda_device
from ..library import SUM, Sharding, define_op, empty
from ..registry import Request, select
from ..tracing import constant_when_compiled

ACCUMULATOR_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of `accumulate` buffers."""


def product_options(a: BlockScaled, b: BlockScaled, *, bias: bool, accumulate: bool) -> frozenset[str]:
    """Options of a request: bias, accumulate, strided (scales without the strides of their layout), sliced (those of a
    are rows of larger scales, which TMA can address)."""
    odd = not (has_canonical_strides(a) and has_canonical_strides(b))
    sliced = odd and is_row_slice(a) and has_canonical_strides(b)
    options = ("bias", bias), ("accumulate", accumulate), ("sliced", sliced), ("strided", odd and not sliced)
    return frozenset(name for name, on in options if on)


def gemm_request(a: BlockScaled, b: BlockScaled, dtype: torch.dtype, *, bias: bool, accumulate: bool) -> Request:
    """Registry request of a dense GEMM."""
    options = product_options(a, b, bias=bias, accumulate=accumulate)
    shape, layouts = (a.rows, b.rows, a.length), (a.scale_layout, b.scale_layout)
    return Request("gemm", capability(a.device), (a.format, b.format), shape, dtype, layouts, options)


@constant_when_compiled
def wanted_layouts(a: str, b: str, device: torch.device) -> tuple[str | None, str | None]:
    """Scale layouts that the kernel for large GEMMs of these formats reads on this device; None: any. A cast that
    writes them saves a conversion."""
    layouts = select(_large_request(a, b, capability(device))).layouts
    return layouts.get(a), layouts.get(b)


@functools.lru_cache(maxsize=1024)
def _large_request(a: str, b: str, where: Capability) -> Request:
    return Request("gemm", where, (a, b), (4096, 4096, 4096), torch.bfloat16)


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
    if "sliced" in request.options:
        return "wants scales of its rows alone, and these are rows of larger ones"
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


def product_flops(a: BlockScaled, b: BlockScaled, *rest: object) -> int:
    """FLOPs, 2 M N K. A shard along K has fewer codes than the operand's length."""
    return 2 * a.rows * b.rows * min(a.length, a.data.shape[-1] * a.spec.codes_per_byte)


def cut_rows(parts: int, name: str, q: BlockScaled) -> dict[str, int]:
    """Sharded dimension of each tensor of an operand cut along its rows; empty if its scales cannot be cut there."""
    dim = len(q.shape) - 2
    # rows of scales are in the same dimension as rows of codes; flat scales start with the blocks of a row tile
    return {name: dim, f"{name}_scale": dim} if cuts_rows(q.spec, q.rows, q.scale_layout, parts) else {}


def _shard_mm(
    parts: int, a: BlockScaled, b: BlockScaled, bias: Tensor | None, out_dtype: torch.dtype
) -> Iterator[Sharding]:
    """M, N, and K. Partial sums over K are rounded to the output's dtype before the reduction, as in torch."""
    if rows := cut_rows(parts, "a", a):
        yield Sharding(rows, (0,))
    if columns := cut_rows(parts, "b", b):
        yield Sharding(columns | {"bias": 0}, (1,))
    if bias is None and all(cuts_length(q.spec, q.length, q.scale_layout, parts) for q in (a, b)):
        yield Sharding({"a": 1, "a_scale": 1, "b": 1, "b_scale": 1}, (SUM,))


def _shard_mm_add(parts: int, acc: Tensor, a: BlockScaled, b: BlockScaled) -> Iterator[Sharding]:
    """M and N. The buffer must be sharded likewise; it is never redistributed."""
    if rows := cut_rows(parts, "a", a):
        yield Sharding(rows | {"acc": 0})
    if columns := cut_rows(parts, "b", b):
        yield Sharding(columns | {"acc": 1})


def _allocate(a: BlockScaled, b: BlockScaled, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return empty((a.rows, b.rows), out_dtype, a.device)


@define_op(fake=_allocate, flops=product_flops, sharding=_shard_mm)
def scaled_mm(a: BlockScaled, b: BlockScaled, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K].mT."""
    out = _allocate(a, b, bias, out_dtype)
    _launch(a, b, out, bias, accumulate=False)
    return out


@define_op(flops=lambda acc, *rest: product_flops(*rest), sharding=_shard_mm_add, mutates=("acc",))
def scaled_mm_add_(acc: Tensor, a: BlockScaled, b: BlockScaled) -> None:
    """acc += a @ b.mT, in fp32, rounded once to acc's dtype."""
    _launch(a, b, acc, None, accumulate=True)


def multiply(
    a: BlockScaled,
    b: BlockScaled,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`scaled_mm` without argument checks.  out: contiguous rows that take the result, in eager code alone."""
    if out is not None:
        _launch(a, b, out, bias, accumulate=False)
        return out
    if accumulate is None:
        return scaled_mm(a, b, bias, out_dtype)
    scaled_mm_add_(accumulate, a, b)
    return accumulate


# ---- checks --------------------------------------------------------------------------------------------------------


def check_dense(a: BlockScaled, b: BlockScaled) -> None:
    """Raise unless `scaled_mm` takes these operands."""
    check_operands(a, b, ranks=(2, 2))
    check_contraction(a, b)
    for name, q in (("a", a), ("b", b)):
        check_ungrouped(q, name)


def check_ungrouped(q: BlockScaled, name: str) -> None:
    """Raise if an operand was cast with groups."""
    if q.group_align or (q.global_scale is not None and q.global_scale.dim()):
        rule, fix = "scaled_mm takes operands without groups", "use scaled_grouped_mm with offs"
        refuse(f"{name} is {q}", rule, fix)


def check_operands(a: BlockScaled, b: BlockScaled, *, ranks: tuple[int, int]) -> None:
    """Raise unless both are sound operands of these ranks, a legal pair, on one device, scaled axis last."""
    check_operand(a, "a", ranks[0], b)
    if isinstance(b, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "the left operand alone may be a plain tensor: x [M, K] and a weight [N, K] give [M, N]"
        fix = f"pass the weight second, or cast b: blockscale.quantize(b, {partners_of(a.format)[0]!r})"
        refuse(f"b is a Tensor, {in_words(b)}, and a is {a}", rule, fix, error=DtypeError)
    check_operand(b, "b", ranks[1], a)
    check_pair(a.format, b.format)
    check_devices(a, b)


def check_operand(q: BlockScaled, name: str, rank: int, partner: object = None) -> None:
    """Raise unless q is a sound operand of this rank, scaled axis last.  partner: the other operand."""
    check_is_block_scaled(q, name, "a product", partner)
    check_block_scaled(q, name)
    if len(q.shape) != rank:
        rule, fix = f"this operand has rank {rank}", "reshape before the cast"
        refuse(f"{name} has shape {tuple(q.shape)}", rule, fix, error=ShapeError)
    if q.axis != -1:
        rule = "a product contracts the last axis of both operands, and blocks must run along it"
        fix = f"pass {name}.mT, or cast with axis=-1"
        refuse(f"{name} {tuple(q.shape)} is scaled along axis {q.axis}", rule, fix, error=AxisError)


def check_devices(a: Tensor | BlockScaled, b: BlockScaled) -> None:
    """Raise unless both operands are on one device."""
    if a.device != b.device:
        refuse(
            f"a is on {a.device}, b on {b.device}",
            rule="operands share a device",
            fix="move one of them",
            error=DeviceError,
        )


def check_contraction(a: BlockScaled, b: BlockScaled) -> None:
    """Raise unless K and the rotations agree."""
    check_lengths(a, b)
    if a.hadamard != b.hadamard:
        rule = "a rotation cancels only when both operands have the same one"
        fix = "cast both with the same hadamard option"
        refuse(f"a has Hadamard mask {a.hadamard}, b {b.hadamard}", rule, fix)


def check_lengths(a: Tensor | BlockScaled, b: BlockScaled) -> None:
    """Raise unless both operands have the same K."""
    if a.shape[-1] != b.shape[-1]:
        what = f"a {tuple(a.shape)} and b {tuple(b.shape)} have K = {a.shape[-1]} and {b.shape[-1]}"
        rule = "both operands have K as their last axis: a [M, K], b [N, K]"
        fix = "transpose before the cast, or pass .mT of an operand cast with axis=-2"
        refuse(what, rule, fix, error=ShapeError)


def check_output(dtype: torch.dtype) -> None:
    """Raise unless this is a legal output dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
        rule, fix = "products come out as bfloat16, float16 or float32", "use one of them"
        refuse(f"out_dtype={in_words(dtype)}", rule, fix, error=DtypeError)


def check_accumulator(acc: Tensor, bias: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless `accumulate` is a legal buffer for a product of this shape, without a bias."""
    if not isinstance(acc, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = "pass accumulate=torch.zeros(shape)"
        refuse(f"accumulate is {in_words(acc)}", rule="it is an fp32 or bf16 buffer", fix=fix, error=DtypeError)
    if acc.requires_grad and torch.is_grad_enabled():
        rule = "a product is added to the buffer in place, and autograd does not see it"
        fix = "pass accumulate.detach(), or call under torch.no_grad()"
        refuse(f"accumulate requires grad: {acc.dtype} {tuple(acc.shape)}", rule, fix)
    if bias is not None:
        fix = "add the bias yourself"
        refuse("bias and accumulate together", "an accumulated product has no bias", fix)
    sound = is_dense(acc) and acc.dtype in ACCUMULATOR_DTYPES and tuple(acc.shape) == shape
    if not sound or acc.device != device:
        rule, fix = f"the buffer is float32 or bfloat16 {shape} on {device}", "allocate it with torch.zeros"
        refuse(f"accumulate is {in_words(acc)} on {acc.device}", rule, fix, error=ShapeError)
    if overlaps(acc):
        what = f"accumulate {tuple(acc.shape)} has strides {acc.stride()}: elements share memory"
        rule = "every element of a product is added to memory of its own"
        fix = "pass accumulate.contiguous(), or allocate it with torch.zeros"
        refuse(what, rule, fix)


def check_bias(bias: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless the bias fits."""
    if bias is None:
        return
    if not isinstance(bias, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(f"bias is {in_words(bias)}", rule="a bias is a tensor", fix="torch.tensor(bias)", error=DtypeError)
    sound = is_dense(bias) and bias.dtype in FLOAT_DTYPES and tuple(bias.shape) == shape
    if not sound or bias.device != device:
        rule = f"a bias is bfloat16, float16 or float32 of shape {shape} on {device}"
        fix = "pass one value per output column"
        refuse(f"bias is {in_words(bias)} on {bias.device}", rule, fix, error=ShapeError)


# ---- shared by backends --------------------------------------------------------------------------------------------


def apply_tensor_scales(product: Tensor, *operands: BlockScaled) -> Tensor:
    """Multiply by NVFP4's tensor scales, one after the other: the product of two underflows for small operands."""
    for operand in operands:
        if operand.global_scale is not None:
            product = product * operand.global_scale
    return product


def finish(product: Tensor, out: Tensor, bias: Tensor | None, *, accumulate: bool) -> None:
    """Epilogue of an fp32 product, for backends without a fused one: write product + bias to `out` with one rounding,
    or `out += product` in fp32, rounded once if `out` is bf16."""
    if bias is not None:
        product = product + bias.float()
    if accumulate:
        out.add_(product)  # torch promotes both to fp32
    else:
        out.copy_(product)


def exact_bf16(operand: BlockScaled) -> Tensor:
    """Decoded operand in bf16, which represents a code times its block scale for MX and NVFP4 (docs/numerics.md). For
    formats without tensor-core support on the device."""
    return decoded(operand, torch.bfloat16)


def decoded(operand: BlockScaled, dtype: torch.dtype) -> Tensor:
    """Decoded operand, [..., rows, length]: the values of `decode_blocks`, by the best `dequantize` kernel.

    Costs one read of the operand and one write of a value of `dtype` for each code.
    """
    # tensor scales are applied to the fp32 product, and the rotations of both operands cancel in it
    one = None if operand.global_scale is None else torch.ones((), device=operand.device)
    # rotation pads K, and grouping pads tokens: use the stored length
    shape = (*operand.shape[:-2], operand.rows, operand.length)
    bare = replace(operand, global_scale=one, hadamard=None, shape=shape, group_align=0, groups=0)
    out = empty(shape, dtype, operand.device)
    select(dequantize_request(bare, dtype)).launch(bare, out, offs=None)
    return out
