"""The operators of the fused casts; conventions as in `ops.py`, with the inputs of the fused operation first.

Registry requests have the shape of the tensor that is cast, not of the tensor that is read.
"""

import torch
from torch import Tensor

from ..errors import ShapeError, message
from ..formats.cast_spec import CastPlan
from ..formats.layout import check_group_ends
from ..library import define_op, empty
from ..registry import select
from .ops import allocate, allocate_both, cast_request
from .sharding import replicated

Maybe = Tensor | None
Three = tuple[Tensor, Tensor, Maybe]
Four = tuple[Tensor, Tensor, Maybe, Tensor]
Six = tuple[Tensor, Tensor, Maybe, Tensor, Tensor, Maybe]
Seven = tuple[Tensor, Tensor, Maybe, Tensor, Tensor, Maybe, Tensor]
Nine = tuple[Tensor, Tensor, Maybe, Tensor, Tensor, Maybe, Maybe, Maybe, Maybe]


def _parse(row: str, col: str) -> tuple[CastPlan, CastPlan]:
    return CastPlan.parse(row), CastPlan.parse(col)


def hidden_like(gate_up: Tensor) -> Tensor:
    """View with the shape, dtype and device of SwiGLU's result: half of its input."""
    return gate_up[..., : gate_up.shape[-1] // 2]


def permuted_like(x: Tensor, indices: Tensor) -> Tensor:
    """Tensor with the shape, dtype and device of x[indices], without memory of its own."""
    return x.new_empty(()).expand(indices.shape[0], x.shape[1])


def check_indices(indices: Tensor, rows: int) -> None:
    """Raise unless every index is a row or -1. On the CPU only: on a GPU the check would synchronize."""
    if indices.device.type != "cpu" or indices.shape[0] == 0:
        return
    for index in (int(indices.min()), int(indices.max())):
        if not -1 <= index < rows:
            raise ShapeError(
                message(
                    f"index {index} for {rows} rows",
                    rule="an index is a row of x, counted from 0, or -1 for a row of zeros",
                    fix="pass the source row of every permuted position",
                )
            )


# SwiGLU


def _fake_swiglu(
    gate_up: Tensor, plan: str, axis: int, state: Tensor | None, amax: Tensor | None, offs: Tensor | None
) -> Three:
    return allocate(hidden_like(gate_up), CastPlan.parse(plan), axis, amax, offs)


@define_op(fake=_fake_swiglu, sharding=replicated)
def swiglu_quantize(
    gate_up: Tensor, plan: str, axis: int, state: Tensor | None, amax: Tensor | None, offs: Tensor | None
) -> Three:
    """One operand of silu(gate) * up, blocks along `axis`."""
    resolved, like = CastPlan.parse(plan), hidden_like(gate_up)
    check_group_ends(offs, gate_up.shape[-2])
    out = allocate(like, resolved, axis, amax, offs)
    chosen = select(cast_request("swiglu", like, (resolved,), offs))
    chosen.launch(gate_up, resolved, axis, out, state=state, amax=amax, offs=offs)
    return out


def _fake_swiglu_both(
    gate_up: Tensor,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor | None,
) -> Six:
    outs = allocate_both(hidden_like(gate_up), _parse(row, col), (row_amax, col_amax), offs)
    return *outs[0], *outs[1]


@define_op(fake=_fake_swiglu_both, sharding=replicated)
def swiglu_quantize_both(
    gate_up: Tensor,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor | None,
) -> Six:
    """Both operands of silu(gate) * up."""
    plans, amaxes, like = _parse(row, col), (row_amax, col_amax), hidden_like(gate_up)
    check_group_ends(offs, gate_up.shape[-2])
    outs = allocate_both(like, plans, amaxes, offs)
    chosen = select(cast_request("swiglu_both", like, plans, offs))
    chosen.launch(gate_up, plans, outs, states=(row_state, col_state), amaxes=amaxes, offs=offs)
    return *outs[0], *outs[1]


def _allocate_hidden(grad: Tensor, hidden: str, amax: Maybe, offs: Maybe) -> tuple[Maybe, Maybe, Maybe]:
    """Buffers of the recomputed activation's column operand; None without a `hidden` plan."""
    return allocate(grad, CastPlan.parse(hidden), -2, amax, offs) if hidden else (None, None, None)


def _fake_swiglu_backward(
    grad: Tensor,
    gate_up: Tensor,
    row: str,
    col: str,
    hidden: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    hidden_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    hidden_amax: Tensor | None,
    offs: Tensor | None,
) -> Nine:
    outs = allocate_both(gate_up, _parse(row, col), (row_amax, col_amax), offs)
    return *outs[0], *outs[1], *_allocate_hidden(grad, hidden, hidden_amax, offs)


@define_op(fake=_fake_swiglu_backward, sharding=replicated)
def swiglu_backward_quantize_both(
    grad: Tensor,
    gate_up: Tensor,
    row: str,
    col: str,
    hidden: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    hidden_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    hidden_amax: Tensor | None,
    offs: Tensor | None,
) -> Nine:
    """Both operands of the gradient of gate and up; with a `hidden` plan also the column operand of the activation."""
    plans, hidden_plan = _parse(row, col), CastPlan.parse(hidden) if hidden else None
    check_group_ends(offs, gate_up.shape[-2])
    outs = allocate_both(gate_up, plans, (row_amax, col_amax), offs)
    hidden_out = _allocate_hidden(grad, hidden, hidden_amax, offs)
    requested = plans if hidden_plan is None else (*plans, hidden_plan)
    chosen = select(cast_request("swiglu_backward_both", gate_up, requested, offs))
    states, amaxes = (row_state, col_state, hidden_state), (row_amax, col_amax, hidden_amax)
    buffers = None if hidden_plan is None else hidden_out
    chosen.launch(grad, gate_up, plans, outs, hidden_plan, buffers, states=states, amaxes=amaxes, offs=offs)
    return *outs[0], *outs[1], *hidden_out


# RMSNorm


def _allocate_rstd(x: Tensor) -> Tensor:
    return empty(x.shape[:-1], torch.float32, x.device)


def _fake_rmsnorm(x: Tensor, weight: Tensor, eps: float, plan: str, state: Tensor | None, amax: Tensor | None) -> Four:
    return *allocate(x, CastPlan.parse(plan), -1, amax, None), _allocate_rstd(x)


@define_op(fake=_fake_rmsnorm, sharding=replicated)
def rmsnorm_quantize(
    x: Tensor, weight: Tensor, eps: float, plan: str, state: Tensor | None, amax: Tensor | None
) -> Four:
    """The row operand of the normalised x, and rstd."""
    resolved = CastPlan.parse(plan)
    out, rstd = allocate(x, resolved, -1, amax, None), _allocate_rstd(x)
    chosen = select(cast_request("rmsnorm", x, (resolved,)))
    chosen.launch(x, weight, eps, resolved, out, rstd, state=state, amax=amax)
    return *out, rstd


def _fake_rmsnorm_both(
    x: Tensor,
    weight: Tensor,
    eps: float,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor | None,
) -> Seven:
    outs = allocate_both(x, _parse(row, col), (row_amax, col_amax), offs)
    return *outs[0], *outs[1], _allocate_rstd(x)


@define_op(fake=_fake_rmsnorm_both, sharding=replicated)
def rmsnorm_quantize_both(
    x: Tensor,
    weight: Tensor,
    eps: float,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor | None,
) -> Seven:
    """Both operands of the normalised x, and rstd."""
    plans, amaxes = _parse(row, col), (row_amax, col_amax)
    check_group_ends(offs, x.shape[-2])
    outs, rstd = allocate_both(x, plans, amaxes, offs), _allocate_rstd(x)
    chosen = select(cast_request("rmsnorm_both", x, plans, offs))
    chosen.launch(x, weight, eps, plans, outs, rstd, states=(row_state, col_state), amaxes=amaxes, offs=offs)
    return *outs[0], *outs[1], rstd


# permutation


def _fake_permute_both(
    x: Tensor,
    indices: Tensor,
    gate_weights: Tensor | None,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor,
) -> Six:
    outs = allocate_both(permuted_like(x, indices), _parse(row, col), (row_amax, col_amax), offs)
    return *outs[0], *outs[1]


@define_op(fake=_fake_permute_both, sharding=replicated)
def permute_quantize_both(
    x: Tensor,
    indices: Tensor,
    gate_weights: Tensor | None,
    row: str,
    col: str,
    row_state: Tensor | None,
    col_state: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    offs: Tensor,
) -> Six:
    """Both operands of x[indices]; with gate_weights (fp32 [P]) each row is multiplied by its weight."""
    plans, amaxes, like = _parse(row, col), (row_amax, col_amax), permuted_like(x, indices)
    check_group_ends(offs, indices.shape[0])
    check_indices(indices, x.shape[0])
    outs = allocate_both(like, plans, amaxes, offs)
    chosen = select(cast_request("permute_both", like, plans, offs))
    chosen.launch(x, indices, gate_weights, plans, outs, states=(row_state, col_state), amaxes=amaxes, offs=offs)
    return *outs[0], *outs[1]


def _fake_permute_columns(
    x: Tensor, indices: Tensor, plan: str, state: Tensor | None, amax: Tensor | None, offs: Tensor
) -> Three:
    return allocate(permuted_like(x, indices), CastPlan.parse(plan), -2, amax, offs)


@define_op(fake=_fake_permute_columns, sharding=replicated)
def permute_quantize_columns(
    x: Tensor, indices: Tensor, plan: str, state: Tensor | None, amax: Tensor | None, offs: Tensor
) -> Three:
    """The column operand of x[indices] alone."""
    resolved, like = CastPlan.parse(plan), permuted_like(x, indices)
    check_group_ends(offs, indices.shape[0])
    check_indices(indices, x.shape[0])
    out = allocate(like, resolved, -2, amax, offs)
    chosen = select(cast_request("permute_columns", like, (resolved,), offs))
    chosen.launch(x, indices, resolved, out, state=state, amax=amax, offs=offs)
    return out


def _fake_permute(x: Tensor, indices: Tensor, plan: str, amax: Tensor | None) -> Three:
    return allocate(permuted_like(x, indices), CastPlan.parse(plan), -1, amax, None)


@define_op(fake=_fake_permute, sharding=replicated)
def quantize_permute(x: Tensor, indices: Tensor, plan: str, amax: Tensor | None) -> Three:
    """The row operand of x, with its rows gathered by `indices` after the cast."""
    resolved = CastPlan.parse(plan)
    check_indices(indices, x.shape[0])
    out = allocate(permuted_like(x, indices), resolved, -1, amax, None)
    select(cast_request("permute", x, (resolved,))).launch(x, indices, resolved, out, amax=amax)
    return out
