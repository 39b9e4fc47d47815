"""`linear`: y = x @ weight.mT + bias with its three products in the formats of a recipe, and their gradients.

An input is read once and cast to fprop's operand and to wgrad's, which is saved for backward in place of the input. A
gradient is read once. Operands that no backward needs are not made.

Memory saved for backward: 1.03 bytes for each element of an 8-bit input (bf16 has 2), and with
weight_cast="forward" as much for each element of the weight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..casts import FLOAT_DTYPES
from ..errors import DeviceError, DtypeError, ShapeError, refuse
from ..formats.checks import PLAIN_TYPES, check_tensor, in_words, overlaps
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled
from ..gemm import ACCUMULATOR_DTYPES, check_bias
from ..grouped import Routing
from ..grouped.routing import combine_rows
from .activation import Activation
from .dtensor import DTensor, local_shards
from .linear_plan import CallState, LinearPlan, LinearSaved, linear_plan_of, unquantized_linear
from .operands import Pair, matrix, needed_grads
from .recipe import Recipe, get_recipe
from .transforms import no_double_backward


def linear(
    x: Tensor | Activation,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "fp8_blockwise",
    *,
    rounding: Stochastic | None = None,
    weight_operands: Pair | None = None,
) -> Tensor:
    """x [..., K] @ weight [N, K].mT + bias [N], trained by a recipe.

    x: a tensor, or an `activation` that several layers share.  rounding: state and stream name, for recipes with
    stochastic rounding.  weight_operands: casts of the weight's present values (`weights.py`).
    DTensors are multiplied shard by shard (`dtensor.py`).

    The result has autocast's dtype if autocast is on, else x's. If `weight.main_grad` is an fp32 or bf16 tensor, wgrad
    accumulates into it, in fp32 with one rounding to its dtype, and weight.grad stays None.

    >>> x = torch.randn(4, 128, requires_grad=True)
    >>> weight = torch.randn(256, 128, requires_grad=True)
    >>> linear(x, weight, recipe="mxfp8").sum().backward()
    >>> weight.grad.shape
    torch.Size([256, 128])
    """
    chosen = get_recipe(recipe)
    source = x.source if isinstance(x, Activation) else x
    check_linear(source, weight)
    dtype = output_dtype(source)
    if not chosen.is_quantized:
        check_unquantized(source, weight, bias)
        return unquantized_linear(source, weight, bias, dtype)
    # `type(...) is` in hot calls: `isinstance` of a tensor class takes 4 times as long
    if type(weight) is DTensor or type(source) is DTensor or type(bias) is DTensor:
        shards = local_shards(source, weight, bias, chosen, rounding)
        local_x = shards.x
        if isinstance(x, Activation):
            x.operands(chosen)  # raises if the DTensor has changed, which does not change its shard's version
            local_x = dataclasses.replace(x, source=shards.x, version=None)
        return shards.dtensor(linear(local_x, shards.weight, shards.bias, chosen, rounding=shards.rounding))
    check_quantized(source, weight, bias)
    check_rounding(chosen, rounding)
    if weight_operands is not None:
        check_weight_operands(weight_operands, weight)
    needs = needed_grads(source, weight, bias)
    call_state = (x.operands(chosen) if isinstance(x, Activation) else None, weight_operands)
    plan = linear_plan_of(chosen, rounding, needs, dtype)
    if not any(needs):
        return plan.forward(source, weight, bias, call_state).y
    return LinearFunction.apply(source, weight, bias, main_grad_of(weight), call_state, plan, None)  # pyright: ignore[reportReturnType]


class LinearFunction(torch.autograd.Function):
    """fprop in the forward, dgrad and wgrad in the backward, of one weight or of the weights of experts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        call_state: CallState,
        plan: LinearPlan,
        routing: Routing | None,
    ) -> Tensor:
        y, x_col, w_col, recording = plan.forward(x, weight, bias, call_state, routing)
        saves_x = plan.needs.weight and x_col.meta is None
        LinearSaved(x if saves_x else None, weight, x_col, w_col, routing, recording).save(ctx)
        ctx.main_grad = main_grad  # not saved: other backward passes may accumulate into it before this one
        ctx.plan, ctx.shape, ctx.dtype = plan, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 7
        saved, plan = LinearSaved.restore(ctx), ctx.plan
        if plan.dtype != ctx.dtype:
            plan = plan._replace(dtype=ctx.dtype)
        main_grad = ctx.main_grad if ctx.main_grad is None or accumulates_grad(ctx, 1) else None
        dx, dw, total = plan.backward(matrix(grad), saved, main_grad)
        dx = grad_of_input(dx, ctx.shape, saved.routing)
        return dx, dw, None if total is None else total.to(ctx.bias_dtype), None, None, None, None


def accumulates_grad(ctx: Any, place: int) -> bool:
    """Whether this backward pass accumulates the gradient of a leaf.  place: of the leaf among the function's inputs.

    A pass for other leaves does not, nor does `torch.autograd.grad`, which returns gradients to its caller. Neither
    may accumulate into main_grad.
    """
    if torch.compiler.is_compiling():  # a compiled backward computes all gradients
        return True
    node = ctx.next_functions[place][0]
    try:
        return node is not None and torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    except RuntimeError:  # raised for a leaf under `torch.autograd.grad`
        return False


def grad_of_input(dx: Tensor | None, shape: torch.Size, routing: Routing | None) -> Tensor | None:
    """Gradient of the input from the gradient of rows [M, K]: in its shape, the rows of a token summed."""
    if dx is not None and routing is not None and routing.rows is not None:
        return combine_rows(dx, routing.rows, None)
    return dx if dx is None or len(shape) == 2 else dx.view(shape)


def output_dtype(x: Tensor) -> torch.dtype:
    """autocast's dtype if autocast is on, else x's."""
    kind = x.device.type
    if kind == "meta":  # unknown to autocast
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def main_grad_of(weight: Tensor) -> Tensor | None:
    """`weight.main_grad`, the buffer that wgrad accumulates into, or None. Raises unless it fits the weight."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    if torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None:  # pyright: ignore[reportPrivateUsage]
        refuse(
            "weight.main_grad under DistributedDataParallel",
            rule="its hooks wait for weight.grad, which stays None with main_grad: ranks would not be averaged",
            fix="delete weight.main_grad, or reduce main_grad yourself without DistributedDataParallel",
        )
    fits = isinstance(main_grad, Tensor) and main_grad.dtype in ACCUMULATOR_DTYPES and main_grad.shape == weight.shape
    if not fits:
        refuse(
            f"weight.main_grad is {in_words(main_grad)} for a weight {tuple(weight.shape)}",
            rule="weight gradients accumulate into a float32 or bfloat16 tensor of the weight's shape",
            fix="allocate it with torch.zeros_like(weight, dtype=torch.float32)",
        )
    if overlaps(main_grad):
        refuse(
            f"weight.main_grad has strides {main_grad.stride()} for a weight {tuple(weight.shape)}",
            rule="every element of a weight gradient has its own memory",
            fix="allocate it with torch.zeros_like(weight, dtype=torch.float32)",
        )
    if main_grad.device != weight.device:
        refuse(
            f"weight.main_grad is on {main_grad.device}, the weight on {weight.device}",
            rule="both are on one device",
            fix="move one",
            error=DeviceError,
        )
    return main_grad


def check_linear(x: Tensor, weight: Tensor) -> None:
    """Raise unless the shapes fit. Arguments that are no tensors are found by their missing shape, which costs nothing
    for tensors. Casts and torch's own products check layouts."""
    try:
        if x.dim() >= 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]:
            return
    except (AttributeError, TypeError, RuntimeError):
        check_tensors(x=x, weight=weight)
        raise
    check_tensors(x=x, weight=weight)
    features = weight.shape[-1] if weight.dim() else "the weight's"
    refuse(
        f"x {tuple(x.shape)} for a weight {tuple(weight.shape)}",
        rule="a weight is [N, K], and K is the last axis of x",
        fix=f"pass x with {features} features",
        error=ShapeError,
    )


def check_tensors(**tensors: Tensor) -> None:
    """Raise unless all of these arguments of a layer are dense tensors."""
    for name, tensor in tensors.items():
        check_tensor(tensor, name, "layers")


def check_unquantized(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise for arguments that an unquantized product does not take, or would misread: weights in an int dtype."""
    if not (x.is_floating_point() and weight.is_floating_point()):
        odd = next((each for each in (x, weight) if not (each.is_floating_point() or each.is_complex())), None)
        if odd is not None:
            rule, fix = "layers take floating-point tensors", "convert it, for example with .float()"
            refuse(f"{'x' if odd is x else 'the weight'} is {odd.dtype}", rule, fix, error=DtypeError)
    # plain dense tensors first: `check_tensor` takes longer than the rest
    if bias is not None and (type(bias) not in PLAIN_TYPES or bias.layout is not torch.strided or bias.is_nested):
        check_tensor(bias, "bias", "layers")
    device = x.device
    if weight.device != device or (bias is not None and bias.device != device):
        name, odd = ("the weight", weight) if weight.device != device else ("bias", bias)
        rule = "both are on one device"
        refuse(f"x is on {device}, {name} on {odd.device}", rule, fix="move one", error=DeviceError)  # pyright: ignore[reportOptionalMemberAccess]
    if bias is not None and bias.shape != weight.shape[:-1]:
        refuse(
            f"bias {tuple(bias.shape)} for a weight {tuple(weight.shape)}",
            rule=f"a bias has one number for each output: {tuple(weight.shape[:-1])}",
            fix="pass a bias of this shape, or None",
            error=ShapeError,
        )


def check_quantized(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise for arguments that no cast or product takes: layers call these without their own checks. Devices are
    compared by index, since comparing `torch.device`s takes longer than the rest."""
    if type(x) not in PLAIN_TYPES:
        check_tensor(x, "x", "quantized layers")
    if x.dtype not in FLOAT_DTYPES or weight.dtype not in FLOAT_DTYPES:
        refuse(
            f"x is {x.dtype}, the weight {weight.dtype}",
            rule="quantized layers take bfloat16, float16 or float32",
            fix="convert them, or use the recipe 'bf16'",
            error=DtypeError,
        )
    # -1 on the CPU and the meta device, where time does not matter
    index = -1 if torch.compiler.is_compiling() else x.get_device()
    same_device = x.device == weight.device if index < 0 else index == weight.get_device()
    if not same_device:
        refuse(
            f"x is on {x.device}, the weight on {weight.device}",
            rule="both are on one device",
            fix="move one",
            error=DeviceError,
        )
    if bias is not None and (
        index < 0 or bias.get_device() != index or bias.dtype not in FLOAT_DTYPES or bias.shape != weight.shape[:-1]
    ):
        check_bias(bias, tuple(weight.shape[:-1]), x.device)


def check_rounding(recipe: Recipe, rounding: Stochastic | None) -> None:
    """Raise if a recipe has stochastic rounding and `rounding` is no `Stochastic`."""
    if rounding is not None and not isinstance(rounding, Stochastic):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"rounding is {in_words(rounding)}",
            rule="stochastic rounding takes a state and the name of the layer; other recipes take None",
            fix="pass rounding=Stochastic(rng_state(seed), name), or None",
        )
    if rounding is None and recipe.stochastic:
        refuse(
            f"recipe {recipe.name!r} without a state for stochastic rounding",
            rule="it rounds gradients stochastically, by a seed, a tick and the name of the layer",
            fix="use blockscale.quantize_, which names every layer, or pass rounding=Stochastic(rng_state(seed), name)",
        )


def check_weight_operands(pair: Pair, weight: Tensor) -> None:
    """Raise unless a pair of operands has the shape of this weight."""
    for each in pair if type(pair) is tuple and len(pair) == 2 else (pair,):
        if each is not None and (type(each) is not BlockScaled or each.shape != weight.shape):
            refuse(
                f"weight_operands with {each if isinstance(each, BlockScaled) else in_words(each)} "
                f"for a weight {tuple(weight.shape)}",
                rule="they are the row and column operand of this weight",
                fix="pass quantize_both(weight, row, col), or None: the layer then casts the weight",
            )
