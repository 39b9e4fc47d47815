"""Casts fused with a row gather: tokens permuted into groups by expert, without a bf16 intermediate.

docs/numerics.md, section 16, defines the bytes. As with every cast, results do not require grad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DtypeError, OptionError, ShapeError, message
from ..formats.cast_spec import CastPlan, CastSpec, as_cast_spec
from ..formats.checks import check_tensor
from ..formats.tensor import BlockScaled, assemble
from . import check_offs, check_source, fused_ops, plan_cast
from .fused import Pair, Spec, check_same_device, count_groups, pair_arguments, pair_of


def permute_quantize_both(
    x: Tensor, indices: Tensor, offs: Tensor, row: Spec, col: Spec, *, gate_weights: Tensor | None = None
) -> Pair:
    """Both operands of x[indices], tokens grouped by expert: `quantize_both(x[indices], ..., offs)`.

    x: [T, K].  indices: [P] int32 or int64, the source row of each permuted position; -1 makes a row of zeros.  offs:
    inclusive ends of the experts among the P positions; `col` starts each at a multiple of 128.  gate_weights:
    fp32 [P], factor of each permuted row; the product is rounded to x's dtype, as the gradient of a weighted sum is.

    >>> indices, offs = torch.tensor([2, 0, 2]), torch.tensor([1, 3], dtype=torch.int32)
    >>> row, col = permute_quantize_both(torch.randn(4, 64), indices, offs, "mxfp8_e4m3", "mxfp8_e4m3")
    >>> row.shape, col.groups
    ((3, 64), 2)
    """
    check_permutation(x, indices)
    check_offs(offs, x.device, x.dim(), required=True)
    check_gate_weights(gate_weights, indices)
    specs = (as_cast_spec(row), as_cast_spec(col))
    plans = (plan_cast(x, specs[0], offs), plan_cast(x, specs[1], offs))
    return permute_cast_both(x, indices, specs, plans, offs, gate_weights)


def permute_cast_both(
    x: Tensor,
    indices: Tensor,
    specs: tuple[CastSpec, CastSpec],
    plans: tuple[CastPlan, CastPlan],
    offs: Tensor,
    gate_weights: Tensor | None = None,
) -> Pair:
    """`permute_quantize_both` without checks; `plans` are the plans of `specs`."""
    results = fused_ops.permute_quantize_both(x, indices, gate_weights, *pair_arguments(plans, specs), offs)
    return pair_of(plans, results, (indices.shape[0], x.shape[1]), offs)


def permute_quantize_columns(x: Tensor, indices: Tensor, offs: Tensor, spec: Spec) -> BlockScaled:
    """The column operand of x[indices] alone: the wgrad operand of tokens saved in their original order.

    >>> indices, offs = torch.tensor([2, 0, 2]), torch.tensor([1, 3], dtype=torch.int32)
    >>> permute_quantize_columns(torch.randn(4, 64), indices, offs, "mxfp8_e4m3").shape
    (3, 64)
    """
    check_permutation(x, indices)
    check_offs(offs, x.device, x.dim(), required=True)
    cast = as_cast_spec(spec)
    return permute_cast_columns(x, indices, cast, plan_cast(x, cast, offs), offs)


def permute_cast_columns(x: Tensor, indices: Tensor, spec: CastSpec, plan: CastPlan, offs: Tensor) -> BlockScaled:
    """`permute_quantize_columns` without checks; `plan` is the plan of `spec`."""
    buffers = fused_ops.permute_quantize_columns(x, indices, plan.text(), spec.state, spec.amax_tensor, offs)
    return assemble(plan, buffers, (indices.shape[0], x.shape[1]), -2, groups=count_groups(offs))


def quantize_permute(x: Tensor, indices: Tensor, spec: Spec) -> BlockScaled:
    """Cast x [T, K] once, blocks along K, then gather rows of codes and scales: the fprop operand of experts.

    The bytes of `quantize(x[indices], spec)`, except for NVFP4 without a supplied amax: its amax is that of all of x,
    whether or not every row is used. An index of -1 makes a row of zeros.

    >>> quantize_permute(torch.randn(4, 64), torch.tensor([2, 0, 2, 1, -1]), "mxfp8_e4m3").shape
    (5, 64)
    """
    check_permutation(x, indices)
    cast = as_cast_spec(spec)
    plan = plan_cast(x, cast, None)
    check_copied_rows(plan)
    return cast_permute(x, indices, cast, plan)


def cast_permute(x: Tensor, indices: Tensor, spec: CastSpec, plan: CastPlan) -> BlockScaled:
    """`quantize_permute` without checks; `plan` is the plan of `spec`."""
    buffers = fused_ops.quantize_permute(x, indices, plan.text(), spec.amax_tensor)
    return assemble(plan, buffers, (indices.shape[0], x.shape[1]), -1)


def check_permutation(x: Tensor, indices: Tensor) -> None:
    """Raise unless x is a matrix of tokens and `indices` a vector of rows on its device."""
    check_source(x, "x")
    if x.dim() != 2:
        fix = "flatten the tokens to [T, K]"
        raise ShapeError(message(f"x has shape {tuple(x.shape)}", rule="tokens are rows of a matrix", fix=fix))
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DtypeError(
            message(f"indices is {what}", rule="indices are int32 or int64 tensors", fix="pass indices.to(torch.int32)")
        )
    check_tensor(indices, "indices", "gathers")
    if indices.dim() != 1:
        raise ShapeError(
            message(
                f"indices has shape {tuple(indices.shape)}",
                rule="one source row for each permuted position, in a vector",
                fix="pass indices.flatten()",
            )
        )
    check_same_device(indices, "indices", x, "x")


def check_gate_weights(gate_weights: Tensor | None, indices: Tensor) -> None:
    """Raise unless gate_weights is None or fp32 [P], one factor per permuted row."""
    if gate_weights is None:
        return
    check_tensor(gate_weights, "gate_weights", "casts")
    if gate_weights.dtype != torch.float32 or gate_weights.shape != indices.shape:
        raise ShapeError(
            message(
                f"gate_weights {gate_weights.dtype} {tuple(gate_weights.shape)} for {indices.shape[0]} permuted rows",
                rule="each row has one factor, in float32",
                fix=f"pass float32 gate_weights of shape ({indices.shape[0]},)",
            )
        )
    check_same_device(gate_weights, "gate_weights", indices, "indices")


def check_copied_rows(plan: CastPlan) -> None:
    """Raise unless rows of the cast can be gathered: 1-D blocks, round to nearest."""
    if plan.spec.is_2d:
        raise OptionError(
            message(
                f"quantize_permute to {plan.format}",
                rule="rows are gathered one by one, and a 2-D block belongs to several",
                fix="use a format with 1-D blocks",
            )
        )
    if plan.stream is not None:
        raise OptionError(
            message(
                "quantize_permute with stochastic rounding",
                rule="a row is cast once, so its copies would share their random words",
                fix="use permute_quantize_both, or quantize(x[indices], ...)",
            )
        )
