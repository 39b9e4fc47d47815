"""Casts: bf16, fp16 and fp32 to block-scaled formats and back.

`quantize` makes one operand, `quantize_both` makes the two that a layer needs from one read, `dequantize` decodes.
`fused.py` has the casts fused with an activation or a norm, `permuted.py` those fused with a row gather.
Each works on any tensor of rank two or more; blocks run along one of the last two axes and a tail block counts as a
full one.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, OptionError, ShapeError, message
from ..formats.cast_spec import CastPlan, CastSpec, as_cast_spec, check_amax
from ..formats.checks import check_flag, check_tensor, in_words
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled, assemble, check_axis, check_block_scaled, check_is_block_scaled, to_parts
from ..library import needs_dispatcher
from . import _reference as _reference  # registers its kernels
from . import _reference_fused as _reference_fused
from . import fused_ops as fused_ops
from . import ops

with contextlib.suppress(ImportError):  # CPU builds of torch come without triton; nothing needs it
    from . import _triton as _triton
    from . import _triton_dequantize as _triton_dequantize
    from . import _triton_fused as _triton_fused

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    return cast(x, spec, plan_cast(x, spec, offs), axis, offs)


def cast(x: Tensor, spec: CastSpec, plan: CastPlan, axis: int = -1, offs: Tensor | None = None) -> BlockScaled:
    """`quantize` without checks; `plan` is the plan of `spec`."""
    buffers = ops.quantize(x, plan.text(), axis, spec.state, spec.amax_tensor, offs)
    return assemble(plan, buffers, x.shape, axis, groups=offs.shape[0] if offs is not None and axis == -2 else None)


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
    row_spec, col_spec = as_cast_spec(row), as_cast_spec(col)
    plans = (plan_cast(x, row_spec, offs), plan_cast(x, col_spec, offs))
    row_operand, col_operand, total = cast_both(x, (row_spec, col_spec), plans, offs, colsum=colsum)
    return (row_operand, col_operand, total) if colsum else (row_operand, col_operand)


def cast_both(
    x: Tensor,
    specs: tuple[CastSpec, CastSpec],
    plans: tuple[CastPlan, CastPlan],
    offs: Tensor | None = None,
    *,
    colsum: bool = False,
) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """`quantize_both` without checks; `plans` are the plans of `specs`. Sums are undefined unless `colsum`."""
    (row, col), (row_plan, col_plan) = specs, plans
    states, amaxes = (row.state, col.state), (row.amax_tensor, col.amax_tensor)
    results = ops.quantize_both(x, row_plan.text(), col_plan.text(), *states, *amaxes, offs, colsum)
    row_operand = assemble(row_plan, results[0:3], x.shape, -1)
    col_operand = assemble(col_plan, results[3:6], x.shape, -2, groups=None if offs is None else offs.shape[0])
    return row_operand, col_operand, results[6]


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
        raise DtypeError(
            message(
                f"dtype={in_words(dtype)}",
                rule="values come out as bfloat16, float16 or float32",
                fix="use one of them",
            )
        )
    per_group = q.global_scale is not None and q.global_scale.dim() == 1 and len(q.shape) == 2
    if offs is None and (per_group or q.group_align):
        raise OptionError(
            message(
                f"{q} without offs",
                rule="groups that were padded or have their own tensor scales need their ends",
                fix="pass the offs that it was cast with",
            )
        )
    check_offs(offs, q.device, len(q.shape))
    check_group_count(q, offs, "q")
    if rotated and q.group_align:
        raise OptionError(
            message("rotated=True for a k-grouped operand", rule="its groups are padded", fix="leave rotated out")
        )
    length, mask = q.shape[q.axis], q.hadamard
    if rotated:  # as an unrotated operand of the stored length
        length, mask = q.length, None
    return ops.dequantize(*to_parts(q), q.axis, length, q.group_align, mask, offs, dtype)


def check_group_count(q: BlockScaled, offs: Tensor | None, name: str) -> None:
    """Raise unless offs has as many ends as the operand has padded groups or tensor scales."""
    if offs is None:
        return
    scales = q.global_scale.shape[0] if q.global_scale is not None and q.global_scale.dim() else None
    for count in (q.groups if q.group_align else None, scales):
        if count is not None and count != offs.shape[0]:
            raise ShapeError(
                message(
                    f"{offs.shape[0]} group ends for {name}, which was cast with {count} groups",
                    rule="an operand is read with the offs that it was cast with",
                    fix="pass those",
                )
            )


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
    raise OptionError(
        message(
            f"{', '.join(name for name, on in given.items() if on)} beside a CastSpec",
            rule="a CastSpec holds all options of its cast",
            fix="put them into the CastSpec, or pass the format by name",
        )
    )


def check_source(x: Tensor, name: str) -> None:
    """Raise unless x is a dense floating-point matrix or a batch of them."""
    check_tensor(x, name, "casts")
    if x.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            message(
                f"{name} has dtype {x.dtype}",
                rule="casts take bfloat16, float16 or float32",
                fix=f"convert it first, for example {name}.float()",
            )
        )
    if x.dim() < 2:
        raise ShapeError(
            message(
                f"{name} has shape {tuple(x.shape)}",
                rule="casts take tensors of rank 2 or more",
                fix=f"add an axis, for example {name}[None]",
            )
        )


def plan_cast(x: Tensor, spec: CastSpec, offs: Tensor | None) -> CastPlan:
    """Resolve a spec to its plan and check it against the tensor to cast."""
    plan, state, amax = spec.plan(), spec.state, spec.amax_tensor
    if offs is None and state is None and amax is None and not plan.grouped_amax:
        return plan  # the checks below concern only these
    check_offs(offs, x.device, x.dim())
    check_amax(amax, x.device)
    if amax is not None and amax.device.type == "cpu" and not needs_dispatcher((amax,)):
        _check_signs(amax)
    if state is not None and state.device != x.device:
        raise DeviceError(
            message(
                f"the stochastic state is on {state.device}, x on {x.device}",
                rule="seed and tick are read where the cast runs",
                fix="make the state with rng_state(seed, tick, x.device)",
            )
        )
    if offs is not None and plan.spec.is_2d:
        raise OptionError(
            message(
                f"offs given for {plan.format}",
                rule="a 2-D block would span groups; groups of tokens take formats with 1-D blocks",
                fix="use mxfp8_e4m3, nvfp4 or fp8_1x128 for grouped activations",
            )
        )
    groups = 0 if amax is None else amax.dim()
    if (plan.grouped_amax or groups) and offs is None and x.dim() != 3:
        raise OptionError(
            message(
                f"an amax per group for shape {tuple(x.shape)}",
                rule="groups are the leading axis of a rank-3 tensor, or are given by offs",
                fix="pass offs, or amax='tensor'",
            )
        )
    if groups and amax is not None:
        want = x.shape[0] if offs is None else offs.shape[0]
        if amax.shape[0] != want:
            raise ShapeError(message(f"{amax.shape[0]} maxima for {want} groups", rule="one per group", fix="pass [G]"))
    return plan


def _check_signs(amax: Tensor) -> None:
    """Raise for a negative amax. On the CPU only: on a GPU the check would synchronize, and the cast gives NaN."""
    lowest = float(amax.min()) if amax.numel() else 0.0
    if lowest < 0:
        raise OptionError(
            message(
                f"amax has {lowest}",
                rule="a maximum of magnitudes is not negative (on a GPU, and while tracing, the cast gives NaN)",
                fix="pass x.abs().amax().float()",
            )
        )


def check_offs(offs: Tensor | None, device: torch.device, rank: int, *, required: bool = False) -> None:
    """Raise unless group ends are an int32 vector on the operand's device."""
    if offs is None and not required:
        return
    if not isinstance(offs, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = "pass torch.tensor(offs, dtype=torch.int32)"
        raise DtypeError(message(f"offs is a {type(offs).__name__}", rule="group ends are an int32 tensor", fix=fix))
    if rank != 2:
        raise ShapeError(
            message(f"offs given for a rank-{rank} tensor", rule="groups are rows of a matrix", fix="flatten to 2-D")
        )
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.device != device:
        raise ShapeError(
            message(
                f"offs is {in_words(offs)} on {offs.device}",
                rule=f"group ends are an int32 vector on {device}, inclusive ends as in torch's grouped_mm",
                fix="pass sizes.cumsum(0).to(torch.int32)",
            )
        )
