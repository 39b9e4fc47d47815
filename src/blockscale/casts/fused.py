"""Casts fused with SwiGLU, its backward, or RMSNorm: no bf16 intermediate is written.

Each gives exactly the bytes of the cast of a tensor that docs/numerics.md, section 16, defines: computed in fp32 and
rounded once to the input's dtype. As with every cast, results do not require grad. `permuted.py` has the casts fused
with a row gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from ..errors import DeviceError, DtypeError, OptionError, ShapeError, message
from ..formats.cast_spec import CastPlan, CastSpec, as_cast_spec
from ..formats.checks import check_number, check_tensor
from ..formats.tensor import BlockScaled, assemble, check_axis
from . import FLOAT_DTYPES, check_source, fused_ops, plan_cast

Spec = str | CastSpec
Pair = tuple[BlockScaled, BlockScaled]


def swiglu_quantize(gate_up: Tensor, spec: Spec, *, axis: int = -1, offs: Tensor | None = None) -> BlockScaled:
    """Cast silu(gate) * up, blocks along `axis`. gate_up: [..., M, 2H], gates in the first half of the last axis.

    >>> import torch
    >>> q = swiglu_quantize(torch.ones(4, 128, dtype=torch.bfloat16), "mxfp8_e4m3")
    >>> q.shape
    (4, 64)
    """
    check_gate_up(gate_up)
    check_axis(axis)
    cast = as_cast_spec(spec)
    return swiglu_cast(gate_up, cast, plan_cast(gate_up, cast, offs), axis, offs)


def swiglu_cast(
    gate_up: Tensor, spec: CastSpec, plan: CastPlan, axis: int = -1, offs: Tensor | None = None
) -> BlockScaled:
    """`swiglu_quantize` without checks; `plan` is the plan of `spec`."""
    buffers = fused_ops.swiglu_quantize(gate_up, plan.text(), axis, spec.state, spec.amax_tensor, offs)
    return assemble(plan, buffers, _hidden_shape(gate_up), axis, groups=count_groups(offs) if axis == -2 else None)


def swiglu_quantize_both(gate_up: Tensor, row: Spec, col: Spec, *, offs: Tensor | None = None) -> Pair:
    """Both operands of silu(gate) * up from one read: `row` with blocks along H, `col` along M.

    gate_up: [..., M, 2H], gates in the first half of the last axis.  offs: ends of groups of rows, as for `quantize`.

    >>> import torch
    >>> row, col = swiglu_quantize_both(torch.randn(256, 512), "fp8_1x128", "fp8_1x128")
    >>> row.shape, row.axis, col.axis
    ((256, 256), -1, -2)
    """
    check_gate_up(gate_up)
    specs = (as_cast_spec(row), as_cast_spec(col))
    plans = (plan_cast(gate_up, specs[0], offs), plan_cast(gate_up, specs[1], offs))
    results = fused_ops.swiglu_quantize_both(gate_up, *pair_arguments(plans, specs), offs)
    return pair_of(plans, results, _hidden_shape(gate_up), offs)


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

    >>> import torch
    >>> grad, gate_up = torch.randn(64, 32), torch.randn(64, 64)
    >>> row, col, h = swiglu_backward_quantize_both(grad, gate_up, "mxfp8_e4m3", "mxfp8_e4m3", hidden="mxfp8_e4m3")
    >>> row.shape, col.axis, h.shape, h.axis
    ((64, 64), -2, (64, 32), -2)
    """
    check_gate_up(gate_up)
    check_grad(grad, gate_up)
    specs = (as_cast_spec(row), as_cast_spec(col))
    plans = (plan_cast(gate_up, specs[0], offs), plan_cast(gate_up, specs[1], offs))
    third = None if hidden is None else as_cast_spec(hidden)
    third_plan = None if third is None else plan_cast(grad, third, offs)
    row_operand, col_operand, hidden_operand = swiglu_backward_cast(
        grad, gate_up, specs, plans, third, third_plan, offs
    )
    pair = row_operand, col_operand
    return pair if hidden_operand is None else (*pair, hidden_operand)


def swiglu_backward_cast(
    grad: Tensor,
    gate_up: Tensor,
    specs: tuple[CastSpec, CastSpec],
    plans: tuple[CastPlan, CastPlan],
    hidden: CastSpec | None = None,
    hidden_plan: CastPlan | None = None,
    offs: Tensor | None = None,
) -> tuple[BlockScaled, BlockScaled, BlockScaled | None]:
    """`swiglu_backward_quantize_both` without checks; `plans` are the plans of `specs`."""
    row, col = specs
    results = fused_ops.swiglu_backward_quantize_both(
        grad,
        gate_up,
        plans[0].text(),
        plans[1].text(),
        "" if hidden_plan is None else hidden_plan.text(),
        row.state,
        col.state,
        None if hidden is None else hidden.state,
        row.amax_tensor,
        col.amax_tensor,
        None if hidden is None else hidden.amax_tensor,
        offs,
    )
    pair = pair_of(plans, results, gate_up.shape, offs)
    if hidden_plan is None:
        return *pair, None
    return *pair, assemble(hidden_plan, results[6:9], grad.shape, -2, groups=count_groups(offs))


def rmsnorm_quantize(x: Tensor, weight: Tensor, spec: Spec, *, eps: float = 1e-6) -> tuple[BlockScaled, Tensor]:
    """Cast x * rstd * weight, where rstd = 1 / sqrt(mean of squares of a row + eps); blocks along the last axis.

    Also returns rstd (fp32, [..., M]), which the backward needs.

    >>> import torch
    >>> q, rstd = rmsnorm_quantize(torch.full((2, 64), 3.0), torch.ones(64), "mxfp8_e4m3")
    >>> q.shape, rstd.shape
    ((2, 64), torch.Size([2]))
    """
    check_norm(x, weight, eps)
    cast = as_cast_spec(spec)
    plan = plan_cast(x, cast, None)
    *buffers, rstd = fused_ops.rmsnorm_quantize(x, weight, eps, plan.text(), cast.state, cast.amax_tensor)
    return assemble(plan, (buffers[0], buffers[1], buffers[2]), x.shape, -1), rstd


def rmsnorm_quantize_both(
    x: Tensor, weight: Tensor, row: Spec, col: Spec, *, eps: float = 1e-6, offs: Tensor | None = None
) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Both operands of x * rstd * weight, and rstd; see `rmsnorm_quantize`.

    >>> import torch
    >>> row, col, rstd = rmsnorm_quantize_both(torch.randn(64, 32), torch.ones(32), "mxfp4", "mxfp4")
    >>> row.axis, col.axis, rstd.shape
    (-1, -2, torch.Size([64]))
    """
    check_norm(x, weight, eps)
    specs = (as_cast_spec(row), as_cast_spec(col))
    plans = (plan_cast(x, specs[0], offs), plan_cast(x, specs[1], offs))
    results = fused_ops.rmsnorm_quantize_both(x, weight, eps, *pair_arguments(plans, specs), offs)
    return *pair_of(plans, results, x.shape, offs), results[6]


# shared by the functions above


def pair_arguments(
    plans: tuple[CastPlan, CastPlan], specs: tuple[CastSpec, CastSpec]
) -> tuple[str, str, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Operator arguments of two casts: plans as text, random states, supplied amaxes."""
    row, col = specs
    return plans[0].text(), plans[1].text(), row.state, col.state, row.amax_tensor, col.amax_tensor


def pair_of(
    plans: tuple[CastPlan, CastPlan], results: Sequence[Tensor], shape: Sequence[int], offs: Tensor | None
) -> Pair:
    """Both operands from the buffers that an operator returned."""
    row = assemble(plans[0], (results[0], results[1], results[2]), shape, -1)
    return row, assemble(plans[1], (results[3], results[4], results[5]), shape, -2, groups=count_groups(offs))


def count_groups(offs: Tensor | None) -> int | None:
    """Number of groups of a column operand; None without groups."""
    return None if offs is None else offs.shape[0]


def _hidden_shape(gate_up: Tensor) -> tuple[int, ...]:
    return (*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def check_gate_up(gate_up: Tensor) -> None:
    """Raise unless gate_up is a valid source with an even last axis."""
    check_source(gate_up, "gate_up")
    if gate_up.shape[-1] % 2:
        raise ShapeError(
            message(
                f"gate_up has shape {tuple(gate_up.shape)}",
                rule="its last axis holds the gates and then as many ups, so it is even",
                fix="pass torch.cat((gate, up), dim=-1)",
            )
        )


def check_grad(grad: Tensor, gate_up: Tensor) -> None:
    """Raise unless grad has the shape, dtype and device of the gradient of silu(gate) * up."""
    check_source(grad, "grad")
    want = _hidden_shape(gate_up)
    if tuple(grad.shape) != want:
        raise ShapeError(
            message(
                f"grad has shape {tuple(grad.shape)} for gate_up {tuple(gate_up.shape)}",
                rule=f"it is the gradient of silu(gate) * up, which has shape {want}",
                fix="pass the gradient of the hidden activation",
            )
        )
    if grad.dtype != gate_up.dtype:
        raise DtypeError(
            message(
                f"grad is {grad.dtype}, gate_up {gate_up.dtype}",
                rule="both have one dtype",
                fix="pass grad.to(gate_up.dtype)",
            )
        )
    check_same_device(grad, "grad", gate_up, "gate_up")


def check_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Raise unless x can be normalised over its last axis with that weight."""
    check_source(x, "x")
    if x.shape[-1] == 0:
        rule, fix = "a norm is over the last axis, which must not be empty", "pass at least one column"
        raise ShapeError(message(f"x has shape {tuple(x.shape)}", rule=rule, fix=fix))
    check_tensor(weight, "weight", "norms")
    if weight.dtype not in FLOAT_DTYPES:
        rule = "the weight of a norm is bfloat16, float16 or float32"
        raise DtypeError(message(f"weight has dtype {weight.dtype}", rule=rule, fix="pass weight.float()"))
    if tuple(weight.shape) != (x.shape[-1],):
        raise ShapeError(
            message(
                f"weight has shape {tuple(weight.shape)} for x {tuple(x.shape)}",
                rule="it has one value for each column of x",
                fix=f"pass a weight of shape ({x.shape[-1]},)",
            )
        )
    check_same_device(weight, "weight", x, "x")
    check_number(eps, "eps", "it is added to a mean of squares", "pass eps=1e-6")
    if eps < 0:
        raise OptionError(message(f"eps={eps}", rule="it is added to a mean of squares", fix="pass eps=1e-6"))


def check_same_device(first: Tensor, first_name: str, second: Tensor, second_name: str) -> None:
    """Raise unless two tensors are on one device."""
    if first.device != second.device:
        raise DeviceError(
            message(
                f"{first_name} is on {first.device}, {second_name} on {second.device}",
                rule="all inputs of a cast are on one device",
                fix=f"pass {first_name}.to({second_name}.device)",
            )
        )
