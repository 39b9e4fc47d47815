"""Casts: bf16, fp16 and fp32 to block-scaled formats and back.

`quantize` makes one operand, `quantize_both` makes the two that a layer needs from one read, `dequantize` decodes.
`fused.py` has the casts fused with an activation or a norm, `permuted.py` those fused with a row gather.
Each works on any tensor of rank two or more; blocks run along one of the last two axes and a tail block counts as a
full one.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..errors import DtypeError, refuse
from ..formats.cast_spec import CastSpec, as_cast_spec
from ..formats.checks import check_flag, in_words
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled, check_axis, check_block_scaled, check_is_block_scaled
from . import _reference as _reference  # registers its kernels
from . import fused as fused  # defines its operators
from . import ops
from . import permuted as permuted
from . import transpose as transpose
from .checks import FLOAT_DTYPES, check_group_count, check_offs, check_source, resolve_cast

with contextlib.suppress(ImportError):  # CPU builds of torch come without triton; nothing needs it
    from . import _triton as _triton
    from . import _triton_dequantize as _triton_dequantize
    from . import _triton_fused as _triton_fused
    from . import _triton_transpose as _triton_transpose


def quantize(
    x: Tensor,
    format: str | CastSpec,
    *,
    axis: int = -1,
    scale_rule: str | None = None,
    rounding: str | Stochastic = "nearest",
    hadamard: bool | int = False,
    role: str | None = None,
    amax: str | Tensor = "tensor",
    satfinite: bool = False,
    scale_layout: str | None = None,
    offs: Tensor | None = None,
) -> BlockScaled:
    """Cast to a block-scaled format, blocks along `axis`.

    `format` is a name, with the options beside it, or a `CastSpec` that holds them all. offs: inclusive ends of groups
    of rows (int32, on the device). With axis=-2 every group then starts a block of its own, at a multiple of 128.
    Casts and products are not differentiable by themselves: their results do not require grad.

    >>> q = quantize(torch.ones(2, 64, dtype=torch.bfloat16), "mxfp8_e4m3")
    >>> q
    BlockScaled(mxfp8_e4m3 (2, 64), axis=-1, scale float8_e8m0fnu plain, cpu)
    >>> dequantize(q).sum().item()
    128.0
    """
    plain = isinstance(rounding, str) and rounding == "nearest" and hadamard is False and satfinite is False
    plain = plain and isinstance(amax, str) and amax == "tensor"
    if plain and scale_rule is None and role is None and scale_layout is None:
        spec = as_cast_spec(format)
    else:
        spec = _with_options(format, (scale_rule, rounding, hadamard, role, amax, satfinite, scale_layout))
    check_axis(axis)
    check_source(x, "x")
    return ops.cast(x, resolve_cast(x, spec, offs), axis, offs)


@overload
def quantize_both(
    x: Tensor, row: str | CastSpec, col: str | CastSpec, *, offs: Tensor | None = None, colsum: Literal[False] = False
) -> tuple[BlockScaled, BlockScaled]: ...


@overload
def quantize_both(
    x: Tensor, row: str | CastSpec, col: str | CastSpec, *, offs: Tensor | None = None, colsum: Literal[True]
) -> tuple[BlockScaled, BlockScaled, Tensor]: ...


def quantize_both(
    x: Tensor, row: str | CastSpec, col: str | CastSpec, *, offs: Tensor | None = None, colsum: bool = False
) -> tuple[BlockScaled, BlockScaled] | tuple[BlockScaled, BlockScaled, Tensor]:
    """Both operands of a tensor from one read: `row` has blocks along the last axis, `col` along the one before.

    With `colsum` the fp32 sums over rows (a bias gradient) come as a third result, [G, K] when there are groups.

    >>> row, col = quantize_both(torch.randn(256, 128), "fp8_1x128", "fp8_1x128")
    >>> row.axis, col.axis, col.mT.shape
    (-1, -2, (128, 256))
    """
    check_source(x, "x")
    check_flag(colsum, "colsum")
    casts = resolve_cast(x, row, offs), resolve_cast(x, col, offs)
    row_operand, col_operand, total = ops.cast_both(x, *casts, offs, colsum)
    return (row_operand, col_operand, total) if colsum else (row_operand, col_operand)


def dequantize(
    q: BlockScaled, dtype: torch.dtype = torch.bfloat16, *, offs: Tensor | None = None, rotated: bool = False
) -> Tensor:
    """Values of an operand, rounded once to `dtype`, in the source's shape.

    offs: required if groups were padded or have their own tensor scales.  rotated: return the rotated values as stored
    (the scaled axis padded to the rotation's group) instead of rotating back.

    >>> q = quantize(torch.tensor([[0.5, 1.0, 7.0, -6.0]]), "mxfp4")
    >>> dequantize(q, torch.float32)
    tensor([[ 0.,  1.,  8., -6.]])
    """
    check_is_block_scaled(q, "q", "dequantize")
    check_block_scaled(q, "q")
    check_flag(rotated, "rotated")
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
        rule, fix = "values come out as bfloat16, float16 or float32", "use one of them"
        refuse(f"dtype={in_words(dtype)}", rule, fix, error=DtypeError)
    per_group = q.global_scale is not None and q.global_scale.dim() == 1 and len(q.shape) == 2
    if offs is None and (per_group or q.group_align):
        rule = "groups that were padded or have their own tensor scales need their ends"
        fix = "pass the offs that it was cast with"
        refuse(f"{q} without offs", rule, fix)
    check_offs(offs, q.device, len(q.shape))
    check_group_count(q, offs, "q")
    if rotated and q.group_align:
        refuse("rotated=True for a k-grouped operand", "its groups are padded", "leave rotated out")
    if rotated:  # as an unrotated operand of the stored length
        shape = (*q.shape[:-1], q.length) if q.axis == -1 else (*q.shape[:-2], q.length, q.shape[-1])
        q = replace(q, shape=shape, hadamard=None)
    return ops.dequantize(q, offs, dtype)


def _with_options(format: str | CastSpec, options: tuple[Any, ...]) -> CastSpec:
    """CastSpec of a format name with options. Spelled out, since tracing cannot list a dataclass's fields."""
    if not isinstance(format, CastSpec):
        return CastSpec(format, *options)
    spec = CastSpec("", *options)
    given = {
        "scale_rule": spec.scale_rule is not None,
        "rounding": not isinstance(spec.rounding, str) or spec.rounding != "nearest",
        "hadamard": spec.hadamard is not False,
        "role": spec.role is not None,
        "amax": not isinstance(spec.amax, str) or spec.amax != "tensor",
        "satfinite": spec.satfinite is not False,
        "scale_layout": spec.scale_layout is not None,
    }
    what = f"{', '.join(name for name, on in given.items() if on)} beside a CastSpec"
    rule, fix = "a CastSpec holds all options of its cast", "put them into the CastSpec, or pass the format by name"
    refuse(what, rule, fix)
