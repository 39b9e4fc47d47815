"""Casts fused with a row gather: tokens permuted into groups by expert, without a bf16 intermediate.

docs/numerics.md, section 16, defines the bytes. As with every cast, results do not require grad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError, refuse
from ..formats.cast_spec import Cast, CastPlan
from ..formats.checks import check_tensor
from ..formats.layout import check_group_ends
from ..formats.tensor import BlockScaled
from ..library import define_op
from ..registry import select
from .checks import check_offs, check_same_device, check_source, resolve_cast
from .fused import Spec
from .ops import Both, Buffers, Pair, allocate, allocate_both, cast_request, operand, pair


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
    casts = resolve_cast(x, row, offs), resolve_cast(x, col, offs)
    return permute_cast_both(x, indices, gate_weights, *casts, offs)


def _permuted_shape(x: Tensor, indices: Tensor) -> tuple[int, int]:
    return indices.shape[0], x.shape[1]


@define_op(
    "permute_quantize_both",
    fake=lambda x, indices, gate_weights, *rest: allocate_both(permuted_like(x, indices), *rest),
    wrap=lambda made, x, indices, gate_weights, *rest: pair(made, _permuted_shape(x, indices), *rest),
)
def permute_cast_both(
    x: Tensor, indices: Tensor, gate_weights: Tensor | None, row: Cast, col: Cast, offs: Tensor
) -> Both:
    """`permute_quantize_both` without checks."""
    check_group_ends(offs, indices.shape[0])
    check_indices(indices, x.shape[0])
    like = permuted_like(x, indices)
    out = allocate_both(like, row, col, offs)
    kernel = select(cast_request("permute_both", like, (row.plan, col.plan), offs))
    kernel.launch(x, indices, gate_weights, (row, col), (out[0:3], out[3:6]), offs)
    return out


def permute_quantize_columns(x: Tensor, indices: Tensor, offs: Tensor, spec: Spec) -> BlockScaled:
    """The column operand of x[indices] alone: the wgrad operand of tokens saved in their original order.

    >>> indices, offs = torch.tensor([2, 0, 2]), torch.tensor([1, 3], dtype=torch.int32)
    >>> permute_quantize_columns(torch.randn(4, 64), indices, offs, "mxfp8_e4m3").shape
    (3, 64)
    """
    check_permutation(x, indices)
    check_offs(offs, x.device, x.dim(), required=True)
    return permute_cast_columns(x, indices, resolve_cast(x, spec, offs), offs)


@define_op(
    "permute_quantize_columns",
    fake=lambda x, indices, cast, offs: allocate(permuted_like(x, indices), cast, -2, offs),
    wrap=lambda made, x, indices, cast, offs: operand(made, _permuted_shape(x, indices), cast, -2, offs),
)
def permute_cast_columns(x: Tensor, indices: Tensor, cast: Cast, offs: Tensor) -> Buffers:
    """`permute_quantize_columns` without checks."""
    like = permuted_like(x, indices)
    check_group_ends(offs, indices.shape[0])
    check_indices(indices, x.shape[0])
    out = allocate(like, cast, -2, offs)
    kernel = select(cast_request("permute_columns", like, (cast.plan,), offs))
    kernel.launch(x, indices, cast, out, offs)
    return out


def quantize_permute(x: Tensor, indices: Tensor, spec: Spec) -> BlockScaled:
    """Cast x [T, K] once, blocks along K, then gather rows of codes and scales: the fprop operand of experts.

    The bytes of `quantize(x[indices], spec)`, except for NVFP4 without a supplied amax: its amax is that of all of x,
    whether or not every row is used. An index of -1 makes a row of zeros.

    >>> quantize_permute(torch.randn(4, 64), torch.tensor([2, 0, 2, 1, -1]), "mxfp8_e4m3").shape
    (5, 64)
    """
    check_permutation(x, indices)
    cast = resolve_cast(x, spec, None)
    check_copied_rows(cast.plan)
    return cast_permute(x, indices, cast)


@define_op(
    "quantize_permute",
    fake=lambda x, indices, cast: allocate(permuted_like(x, indices), cast, -1, None),
    wrap=lambda made, x, indices, cast: operand(made, _permuted_shape(x, indices), cast, -1, None),
)
def cast_permute(x: Tensor, indices: Tensor, cast: Cast) -> Buffers:
    """`quantize_permute` without checks."""
    check_indices(indices, x.shape[0])
    out = allocate(permuted_like(x, indices), cast, -1, None)
    select(cast_request("permute", x, (cast.plan,))).launch(x, indices, cast, out)
    return out


def permuted_like(x: Tensor, indices: Tensor) -> Tensor:
    """Tensor with the shape, dtype and device of x[indices], without memory of its own."""
    return x.new_empty(()).expand(indices.shape[0], x.shape[1])


def check_indices(indices: Tensor, rows: int) -> None:
    """Raise unless every index is a row or -1. On the CPU only: on a GPU the check would synchronize."""
    if indices.device.type != "cpu" or indices.shape[0] == 0:
        return
    for index in (int(indices.min()), int(indices.max())):
        if not -1 <= index < rows:
            rule = "an index is a row of x, counted from 0, or -1 for a row of zeros"
            fix = "pass the source row of every permuted position"
            refuse(f"index {index} for {rows} rows", rule, fix, error=ShapeError)


def check_permutation(x: Tensor, indices: Tensor) -> None:
    """Raise unless x is a matrix of tokens and `indices` a vector of rows on its device."""
    check_source(x, "x")
    if x.dim() != 2:
        fix = "flatten the tokens to [T, K]"
        refuse(f"x has shape {tuple(x.shape)}", rule="tokens are rows of a matrix", fix=fix, error=ShapeError)
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"indices is {what}",
            rule="indices are int32 or int64 tensors",
            fix="pass indices.to(torch.int32)",
            error=DtypeError,
        )
    check_tensor(indices, "indices", "gathers")
    if indices.dim() != 1:
        rule, fix = "one source row for each permuted position, in a vector", "pass indices.flatten()"
        refuse(f"indices has shape {tuple(indices.shape)}", rule, fix, error=ShapeError)
    check_same_device(indices, "indices", x, "x")


def check_gate_weights(gate_weights: Tensor | None, indices: Tensor) -> None:
    """Raise unless gate_weights is None or fp32 [P], one factor per permuted row."""
    if gate_weights is None:
        return
    check_tensor(gate_weights, "gate_weights", "casts")
    if gate_weights.dtype != torch.float32 or gate_weights.shape != indices.shape:
        what = f"gate_weights {gate_weights.dtype} {tuple(gate_weights.shape)} for {indices.shape[0]} permuted rows"
        rule, fix = "each row has one factor, in float32", f"pass float32 gate_weights of shape ({indices.shape[0]},)"
        refuse(what, rule, fix, error=ShapeError)
    check_same_device(gate_weights, "gate_weights", indices, "indices")


def check_copied_rows(plan: CastPlan) -> None:
    """Raise unless rows of the cast can be gathered: 1-D blocks, round to nearest."""
    if plan.spec.is_2d:
        rule, fix = "rows are gathered one by one, and a 2-D block belongs to several", "use a format with 1-D blocks"
        refuse(f"quantize_permute to {plan.format}", rule, fix)
    if plan.stream is not None:
        rule = "a row is cast once, so its copies would share their random words"
        fix = "use permute_quantize_both, or quantize(x[indices], ...)"
        refuse("quantize_permute with stochastic rounding", rule, fix)
