"""Casts fused with SwiGLU, its backward, or RMSNorm: no bf16 intermediate is written.

Each gives exactly the bytes of the cast of a tensor that docs/numerics.md, section 16, defines: computed in fp32 and
rounded once to the input's dtype. As with every cast, results do not require grad. `permuted.py` has the casts fused
with a row gather. An operator has the name of the function that checks its arguments; its registry request has the
shape of the tensor that is cast, not of the tensor that is read.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError, refuse
from ..formats.cast_spec import Cast, CastSpec
from ..formats.checks import check_number, check_tensor
from ..formats.layout import check_group_ends
from ..formats.tensor import BlockScaled, check_axis
from ..library import define_op, empty
from ..registry import select
from .checks import FLOAT_DTYPES, check_same_device, check_source, resolve_cast
from .ops import (
    Both,
    BothAndMore,
    Buffers,
    Maybe,
    Pair,
    allocate,
    allocate_both,
    cast_request,
    operand,
    pair,
)

Spec = str | CastSpec

# ---- SwiGLU --------------------------------------------------------------------------------------------------------


def swiglu_quantize(gate_up: Tensor, spec: Spec, *, axis: int = -1, offs: Tensor | None = None) -> BlockScaled:
    """Cast silu(gate) * up, blocks along `axis`. gate_up: [..., M, 2H], gates in the first half of the last axis.

    >>> q = swiglu_quantize(torch.ones(4, 128, dtype=torch.bfloat16), "mxfp8_e4m3")
    >>> q.shape
    (4, 64)
    """
    check_gate_up(gate_up)
    check_axis(axis)
    return swiglu_cast(gate_up, resolve_cast(gate_up, spec, offs), axis, offs)


def hidden_like(gate_up: Tensor) -> Tensor:
    """View with the shape, dtype and device of SwiGLU's result: half of its input."""
    return gate_up[..., : gate_up.shape[-1] // 2]


def _hidden_shape(gate_up: Tensor) -> tuple[int, ...]:
    return (*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@define_op(
    "swiglu_quantize",
    fake=lambda gate_up, *rest: allocate(hidden_like(gate_up), *rest),
    wrap=lambda made, gate_up, *rest: operand(made, _hidden_shape(gate_up), *rest),
)
def swiglu_cast(gate_up: Tensor, cast: Cast, axis: int, offs: Tensor | None) -> Buffers:
    """`swiglu_quantize` without checks."""
    like = hidden_like(gate_up)
    check_group_ends(offs, gate_up.shape[-2])
    out = allocate(like, cast, axis, offs)
    kernel = select(cast_request("swiglu", like, (cast.plan,), offs))
    kernel.launch(gate_up, cast, axis, out, offs)
    return out


def swiglu_quantize_both(gate_up: Tensor, row: Spec, col: Spec, *, offs: Tensor | None = None) -> Pair:
    """Both operands of silu(gate) * up from one read: `row` with blocks along H, `col` along M.

    gate_up: [..., M, 2H], gates in the first half of the last axis.  offs: ends of groups of rows, as for `quantize`.

    >>> row, col = swiglu_quantize_both(torch.randn(256, 512), "fp8_1x128", "fp8_1x128")
    >>> row.shape, row.axis, col.axis
    ((256, 256), -1, -2)
    """
    check_gate_up(gate_up)
    return _swiglu_cast_both(gate_up, resolve_cast(gate_up, row, offs), resolve_cast(gate_up, col, offs), offs)


@define_op(
    "swiglu_quantize_both",
    fake=lambda gate_up, *rest: allocate_both(hidden_like(gate_up), *rest),
    wrap=lambda made, gate_up, *rest: pair(made, _hidden_shape(gate_up), *rest),
)
def _swiglu_cast_both(gate_up: Tensor, row: Cast, col: Cast, offs: Tensor | None) -> Both:
    check_group_ends(offs, gate_up.shape[-2])
    like = hidden_like(gate_up)
    out = allocate_both(like, row, col, offs)
    kernel = select(cast_request("swiglu_both", like, (row.plan, col.plan), offs))
    kernel.launch(gate_up, (row, col), (out[0:3], out[3:6]), offs)
    return out


@overload
def swiglu_backward_quantize_both(
    grad: Tensor, gate_up: Tensor, row: Spec, col: Spec, *, hidden: None = None, offs: Tensor | None = None
) -> Pair: ...


@overload
def swiglu_backward_quantize_both(
    grad: Tensor, gate_up: Tensor, row: Spec, col: Spec, *, hidden: Spec, offs: Tensor | None = None
) -> tuple[BlockScaled, BlockScaled, BlockScaled]: ...


def swiglu_backward_quantize_both(
    grad: Tensor, gate_up: Tensor, row: Spec, col: Spec, *, hidden: Spec | None = None, offs: Tensor | None = None
) -> Pair | tuple[BlockScaled, BlockScaled, BlockScaled]:
    """Both operands of SwiGLU's gradient [gradient of gate | gradient of up], [..., M, 2H], laid out as gate_up.

    grad: [..., M, H], the gradient of silu(gate) * up.  hidden: spec of a cast of silu(gate) * up with blocks along M,
    returned as a third result: the wgrad operand of the next linear layer, recomputed from the same read instead of
    saved for backward.

    >>> grad, gate_up = torch.randn(64, 32), torch.randn(64, 64)
    >>> row, col, h = swiglu_backward_quantize_both(grad, gate_up, "mxfp8_e4m3", "mxfp8_e4m3", hidden="mxfp8_e4m3")
    >>> row.shape, col.axis, h.shape, h.axis
    ((64, 64), -2, (64, 32), -2)
    """
    check_gate_up(gate_up)
    check_grad(grad, gate_up)
    casts = resolve_cast(gate_up, row, offs), resolve_cast(gate_up, col, offs)
    third = None if hidden is None else resolve_cast(grad, hidden, offs)
    made = swiglu_backward_cast(grad, gate_up, *casts, third, offs)
    return made[:2] if hidden is None else made


# both operands, and the column operand of the activation, if requested
_Three = tuple[Tensor, Tensor, Maybe, Tensor, Tensor, Maybe, Maybe, Maybe, Maybe]


def _allocate_swiglu_backward(
    grad: Tensor, gate_up: Tensor, row: Cast, col: Cast, hidden: Cast | None, offs: Tensor | None
) -> _Three:
    both = allocate_both(gate_up, row, col, offs)
    return (*both, None, None, None) if hidden is None else (*both, *allocate(grad, hidden, -2, offs))


def _wrap_swiglu_backward(
    made: _Three, grad: Tensor, gate_up: Tensor, row: Cast, col: Cast, hidden: Cast | None, offs: Tensor | None
) -> tuple[BlockScaled, BlockScaled, BlockScaled | None]:
    third = None if hidden is None else operand(made[6:], grad.shape, hidden, -2, offs)
    return *pair(made, gate_up.shape, row, col, offs), third


@define_op("swiglu_backward_quantize_both", fake=_allocate_swiglu_backward, wrap=_wrap_swiglu_backward)
def swiglu_backward_cast(
    grad: Tensor, gate_up: Tensor, row: Cast, col: Cast, hidden: Cast | None, offs: Tensor | None
) -> _Three:
    """`swiglu_backward_quantize_both` without checks; the third operand is None without a cast `hidden`."""
    check_group_ends(offs, gate_up.shape[-2])
    out = _allocate_swiglu_backward(grad, gate_up, row, col, hidden, offs)
    casts, outs = (row, col), (out[0:3], out[3:6])
    if hidden is not None:
        casts, outs = (*casts, hidden), (*outs, out[6:9])
    kernel = select(cast_request("swiglu_backward_both", gate_up, tuple(cast.plan for cast in casts), offs))
    kernel.launch(grad, gate_up, casts, outs, offs)
    return out


# ---- RMSNorm -------------------------------------------------------------------------------------------------------


def rmsnorm_quantize(x: Tensor, weight: Tensor, spec: Spec, *, eps: float = 1e-6) -> tuple[BlockScaled, Tensor]:
    """Cast x * rstd * weight, where rstd = 1 / sqrt(mean of squares of a row + eps); blocks along the last axis.

    Also returns rstd (fp32, [..., M]), which the backward needs.

    >>> q, rstd = rmsnorm_quantize(torch.full((2, 64), 3.0), torch.ones(64), "mxfp8_e4m3")
    >>> q.shape, rstd.shape
    ((2, 64), torch.Size([2]))
    """
    check_norm(x, weight, eps)
    return _rmsnorm_cast(x, weight, eps, resolve_cast(x, spec, None))


def _allocate_rmsnorm(x: Tensor, weight: Tensor, eps: float, cast: Cast) -> tuple[Tensor, Tensor, Maybe, Tensor]:
    return *allocate(x, cast, -1, None), empty(x.shape[:-1], torch.float32, x.device)


@define_op(
    "rmsnorm_quantize",
    fake=_allocate_rmsnorm,
    wrap=lambda made, x, weight, eps, cast: (operand(made, x.shape, cast, -1, None), made[3]),
)
def _rmsnorm_cast(x: Tensor, weight: Tensor, eps: float, cast: Cast) -> tuple[Tensor, Tensor, Maybe, Tensor]:
    out = _allocate_rmsnorm(x, weight, eps, cast)
    kernel = select(cast_request("rmsnorm", x, (cast.plan,)))
    kernel.launch(x, weight, eps, cast, out[0:3], out[3])
    return out


def rmsnorm_quantize_both(
    x: Tensor, weight: Tensor, row: Spec, col: Spec, *, eps: float = 1e-6, offs: Tensor | None = None
) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Both operands of x * rstd * weight, and rstd; see `rmsnorm_quantize`.

    >>> row, col, rstd = rmsnorm_quantize_both(torch.randn(64, 32), torch.ones(32), "mxfp4", "mxfp4")
    >>> row.axis, col.axis, rstd.shape
    (-1, -2, torch.Size([64]))
    """
    check_norm(x, weight, eps)
    return _rmsnorm_cast_both(x, weight, eps, resolve_cast(x, row, offs), resolve_cast(x, col, offs), offs)


def _allocate_rmsnorm_both(
    x: Tensor, weight: Tensor, eps: float, row: Cast, col: Cast, offs: Tensor | None
) -> BothAndMore:
    return *allocate_both(x, row, col, offs), empty(x.shape[:-1], torch.float32, x.device)


@define_op(
    "rmsnorm_quantize_both",
    fake=_allocate_rmsnorm_both,
    wrap=lambda made, x, weight, eps, *rest: (*pair(made, x.shape, *rest), made[6]),
)
def _rmsnorm_cast_both(x: Tensor, weight: Tensor, eps: float, row: Cast, col: Cast, offs: Tensor | None) -> BothAndMore:
    check_group_ends(offs, x.shape[-2])
    out = _allocate_rmsnorm_both(x, weight, eps, row, col, offs)
    kernel = select(cast_request("rmsnorm_both", x, (row.plan, col.plan), offs))
    kernel.launch(x, weight, eps, (row, col), (out[0:3], out[3:6]), out[6], offs)
    return out


# ---- checks --------------------------------------------------------------------------------------------------------


def check_gate_up(gate_up: Tensor) -> None:
    """Raise unless gate_up is a valid source with an even last axis."""
    check_source(gate_up, "gate_up")
    if gate_up.shape[-1] % 2:
        rule = "its last axis holds the gates and then as many ups, so it is even"
        fix = "pass torch.cat((gate, up), dim=-1)"
        refuse(f"gate_up has shape {tuple(gate_up.shape)}", rule, fix, error=ShapeError)


def check_grad(grad: Tensor, gate_up: Tensor) -> None:
    """Raise unless grad has the shape, dtype and device of the gradient of silu(gate) * up."""
    check_source(grad, "grad")
    want = _hidden_shape(gate_up)
    if tuple(grad.shape) != want:
        what = f"grad has shape {tuple(grad.shape)} for gate_up {tuple(gate_up.shape)}"
        rule = f"it is the gradient of silu(gate) * up, which has shape {want}"
        fix = "pass the gradient of the hidden activation"
        refuse(what, rule, fix, error=ShapeError)
    if grad.dtype != gate_up.dtype:
        rule, fix = "both have one dtype", "pass grad.to(gate_up.dtype)"
        refuse(f"grad is {grad.dtype}, gate_up {gate_up.dtype}", rule, fix, error=DtypeError)
    check_same_device(grad, "grad", gate_up, "gate_up")


def check_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Raise unless x can be normalised over its last axis with that weight."""
    check_source(x, "x")
    if x.shape[-1] == 0:
        rule, fix = "a norm is over the last axis, which must not be empty", "pass at least one column"
        refuse(f"x has shape {tuple(x.shape)}", rule, fix, error=ShapeError)
    check_tensor(weight, "weight", "norms")
    if weight.dtype not in FLOAT_DTYPES:
        rule = "the weight of a norm is bfloat16, float16 or float32"
        refuse(f"weight has dtype {weight.dtype}", rule, fix="pass weight.float()", error=DtypeError)
    if tuple(weight.shape) != (x.shape[-1],):
        rule, fix = "it has one value for each column of x", f"pass a weight of shape ({x.shape[-1]},)"
        refuse(f"weight has shape {tuple(weight.shape)} for x {tuple(x.shape)}", rule, fix, error=ShapeError)
    check_same_device(weight, "weight", x, "x")
    check_number(eps, "eps", "it is added to a mean of squares", "pass eps=1e-6")
    if eps < 0:
        refuse(f"eps={eps}", "it is added to a mean of squares", "pass eps=1e-6")
