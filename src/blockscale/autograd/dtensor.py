"""Layers on DTensors: every rank casts and multiplies its own shards, and no operand is gathered.

Placements along one dimension of the mesh, of y [..., N] = x [..., K] @ weight [N, K].mT and of the gradients, as
torch's own linear layer has them:

    x            weight      y            dx           dW
    Replicate    Replicate   Replicate    Replicate    Replicate
    Shard(rows)  Replicate   Shard(rows)  Shard(rows)  Partial      sharded tokens
    Replicate    Shard(0)    Shard(-1)    Partial      Shard(0)     column-parallel
    Shard(-1)    Shard(1)    Partial      Shard(-1)    Shard(1)     row-parallel

Everything else raises. Partial results are rounded to the output's dtype before they are summed, as torch's are. A
shard holds whole blocks, so its bytes are those of casting the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import ShardingError, refuse
from ..formats.spec import get_format
from ..formats.stochastic import Stochastic
from .recipe import Recipe

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
else:  # a class for `isinstance`

    class DTensor:
        """Stand-in for `isinstance`: a torch built without distributed has no DTensors."""


_WEIGHT_ROLES = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w")


@dataclass(frozen=True)
class Shards:
    """The local tensors of one layer's call, and the placements of its result.

    watched: DTensors that must not change before the backward.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    rounding: Stochastic | None
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    watched: tuple[DTensor, ...]

    def dtensor(self, y: Tensor) -> DTensor:
        """This rank's result [..., N] as a shard or a partial sum of the whole."""
        y = unchanged_until_backward(y, *self.watched)
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return DTensor.from_local(
            y, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=tuple(strides)
        )


def local_shards(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, rounding: Stochastic | None) -> Shards:
    """This rank's shards of x [..., K], weight [N, K] and bias [N]; raises if the product needs other ranks' shards."""
    if not isinstance(x, DTensor) or not isinstance(weight, DTensor) or x.device_mesh != weight.device_mesh:
        refuse(
            f"the input is {_placed(x)}, the weight {_placed(weight)}",
            rule="both are DTensors of one mesh, or none is",
            fix="parallelise the layer with ColwiseParallel or RowwiseParallel, which place its input, or pass "
            "DTensor.from_local(x, mesh, [Replicate()])",
            error=ShardingError,
        )
    if getattr(weight, "main_grad", None) is not None:
        refuse(
            "weight.main_grad of a weight that is a DTensor",
            rule="gradients of sharded weights go to weight.grad, where torch reduces them",
            fix="delete weight.main_grad",
        )
    check_shards("the weight", tuple(weight.shape), shard_shape(weight), recipe)
    mesh, last = weight.device_mesh, x.dim() - 1
    plans = [_plan(*each, last) for each in zip(x.placements, weight.placements, strict=True)]
    if any(not each.is_replicate() and mesh.size(dim) > 1 for dim, each in enumerate(x.placements)):
        check_tensor_scales(f"an input placed {x.placements}", recipe)
    shape = (*x.shape[:-1], weight.shape[0])
    # only gradients are rounded stochastically
    if rounding is not None and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        rounding = _rounding_of_shard(rounding, shape, mesh, [plan.y for plan in plans])
    return Shards(
        x.to_local(grad_placements=[plan.dx for plan in plans]),
        weight.to_local(grad_placements=[plan.dw for plan in plans]),
        None if bias is None else _local_bias(bias, mesh, plans),
        rounding,
        mesh,
        tuple(plan.y for plan in plans),
        shape,
        # the input is saved for the backward only where wgrad's operand is not
        (weight, x) if weight.requires_grad and _saves_input(recipe) else (weight,),
    )


def _saves_input(recipe: Recipe) -> bool:
    return recipe.saves == "source" or recipe.operand("wgrad_x") is None


def unchanged_until_backward(y: Tensor, *watched: Tensor) -> Tensor:
    """The result of an eager layer, whose backward raises if one of these DTensors has changed since."""
    if not y.requires_grad or torch.compiler.is_compiling():
        return y
    return _Unchanged.apply(y, *watched)  # pyright: ignore[reportReturnType]


class _Unchanged(torch.autograd.Function):
    """The identity, whose backward raises if a DTensor has changed since the forward.

    In-place operations on a DTensor do not bump the version counter of its local tensor, which the layer saves.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, *watched: Tensor) -> Tensor:
        ctx.save_for_backward(*watched)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, *(None for _ in ctx.saved_tensors)


class _Plan(NamedTuple):
    """Placements along one dimension of the mesh: of the result, the bias and the gradients."""

    y: Placement
    dx: Placement
    dw: Placement
    bias: Placement
    dbias: Placement


def _plan(x: Placement, weight: Placement, last: int) -> _Plan:
    """Placements of y, bias and gradients for those of x and weight (table above).  last: contracted axis of x."""
    whole, partial = Replicate(), Partial()
    if weight.is_replicate() and x.is_replicate():
        return _Plan(whole, whole, whole, whole, whole)
    if weight.is_replicate() and getattr(x, "dim", last) != last:  # Shard, or _StridedShard of flattened tokens
        return _Plan(x, x, partial, whole, partial)
    if weight.is_shard(0) and x.is_replicate():
        return _Plan(Shard(last), partial, weight, Shard(0), Shard(0))
    if weight.is_shard(1) and x.is_shard(last):
        return _Plan(partial, x, weight, whole, whole)
    refuse(
        f"an input placed {x} for a weight placed {weight}",
        rule="tokens are sharded with a whole weight, rows of the weight with a whole input, or input features of "
        "both: anything else would gather",
        fix="redistribute the input first: x.redistribute(placements=[Replicate()]) for a weight that is whole or "
        f"Shard(0), [Shard({last})] for Shard(1)",
        error=ShardingError,
    )


def _local_bias(bias: Tensor, mesh: DeviceMesh, plans: Sequence[_Plan]) -> Tensor:
    """The bias that this rank's product adds; zeros on all ranks but the first where results are partial sums."""
    wanted = tuple(plan.bias for plan in plans)
    if not isinstance(bias, DTensor) or bias.device_mesh != mesh or bias.placements != wanted:
        refuse(
            f"a bias that is {_placed(bias)}",
            rule=f"beside this weight it is a DTensor of the same mesh, placed {wanted}",
            fix="parallelise the layer with ColwiseParallel or RowwiseParallel, which place both",
            error=ShardingError,
        )
    local = bias.to_local(grad_placements=[plan.dbias for plan in plans])
    is_first = all(mesh.get_local_rank(dim) == 0 for dim, plan in enumerate(plans) if plan.y.is_partial())
    return local if is_first else zeros_with_gradient(local)


def zeros_with_gradient(bias: Tensor) -> Tensor:
    """Zeros that give a bias the gradient of its sum: another rank's product adds the bias."""
    return _ZeroWithGradient.apply(bias)  # pyright: ignore[reportReturnType]


class _ZeroWithGradient(torch.autograd.Function):
    """Zeros in the forward, the unchanged gradient in the backward: a bias that another rank's product adds."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def _rounding_of_shard(
    rounding: Stochastic, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> Stochastic:
    """Stochastic rounding of this rank's shard of dy [..., N], with its offsets in the whole: the same bytes."""
    starts, sizes, last = [0] * len(shape), list(shape), len(shape) - 1
    for dim, placement in enumerate(placements):
        if not placement.is_replicate() and not placement.is_partial():
            axis: int = getattr(placement, "dim")  # noqa: B009
            if not isinstance(placement, Shard) or (axis != last and math.prod(shape[:axis]) != 1):
                refuse(
                    f"stochastic rounding of a gradient {tuple(shape)} that is sharded along axis {axis}",
                    rule="random numbers are counted by row of the whole, and this shard's rows are not contiguous",
                    fix="shard the first axis, or use a recipe that rounds to nearest",
                    error=ShardingError,
                )
            chunk = -(-sizes[axis] // mesh.size(dim))
            first = min(mesh.get_local_rank(dim) * chunk, sizes[axis])
            starts[axis] += first
            sizes[axis] = min(chunk, sizes[axis] - first)
    row = sum(start * math.prod(shape[axis + 1 : -1]) for axis, start in enumerate(starts[:-1]))
    return replace(rounding, origin=(row, starts[-1], shape[-1]))


def local(tensor: Tensor) -> Tensor:
    """This rank's tensor of a DTensor; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed(tensor: object) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor {tuple(tensor.shape)} placed {tensor.placements}"
    return f"a plain tensor {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"


# ---- checks that need no input ---------------------------------------------------------------------------------------


def shard_shape(tensor: DTensor) -> tuple[int, ...]:
    """The largest shard of a DTensor, the same on every rank, so that all of them raise or none."""
    sizes = list(tensor.shape)
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // tensor.device_mesh.size(dim))
    return tuple(sizes)


def check_shards(name: str, whole: tuple[int, ...], shard: tuple[int, ...], recipe: Recipe) -> None:
    """Raise unless shards of a weight [..., N, K] hold whole blocks along both axes: dgrad contracts N, fprop K."""
    cut = [axis for axis in (-2, -1) if len(whole) > 1 and shard[axis] != whole[axis]]
    if not cut or not recipe.is_quantized:
        return
    check_tensor_scales(f"{name} {whole} in shards {shard}", recipe)
    formats = [recipe.formats()[role] for role in _WEIGHT_ROLES]
    block = max([1, *(max(get_format(each).block) for each in formats if each is not None)])
    for axis in cut:
        if shard[axis] % block:
            refuse(
                f"{name} {whole} in shards of {shard[axis]} along axis {axis % len(whole)}",
                rule=f"{recipe.name} has a scale for every {block} values, and a shard holds whole blocks",
                fix=f"use another tensor parallel degree, so that a shard is a multiple of {block}, a recipe with "
                "smaller blocks, or leave the layer out of the plan",
                error=ShardingError,
            )


def check_tensor_scales(what: str, recipe: Recipe) -> None:
    """Raise for recipes whose scales need the amax of the whole tensor, which a rank with a shard does not have."""
    nvfp4 = [each for each in recipe.formats().values() if each is not None and get_format(each).family == "nvfp4"]
    if nvfp4:
        refuse(
            f"{what} for recipe {recipe.name!r}",
            rule=f"{nvfp4[0]} has one scale for the whole tensor, and a rank with a shard does not have its amax",
            fix="leave the layer out of the plan, or use a recipe without NVFP4; FSDP2 and DDP take any recipe",
            error=ShardingError,
        )


def check_not_packed(name: str, weight: object) -> None:
    """Raise for gates and ups [2H, K] in one parameter that is sharded along its rows."""
    if not isinstance(weight, DTensor):
        return
    mesh = weight.device_mesh
    if any(placement.is_shard(0) and mesh.size(dim) > 1 for dim, placement in enumerate(weight.placements)):
        refuse(
            f"{name} {tuple(weight.shape)} placed {weight.placements}",
            rule="its rows are all gates, then all ups: a shard would hold gates or ups, and a gate needs its up",
            fix="use blockscale.distributed.SwiGLUParallel; or keep gate and up as two torch.nn.Linear, each "
            "ColwiseParallel, and convert the model with quantize_; or leave gate_up out of the plan",
            error=ShardingError,
        )


def refuse_experts(what: str, *tensors: Tensor) -> NoReturn:
    """Raise for experts whose parameters or tokens are DTensors."""
    refuse(
        f"{what}: {', '.join(map(_placed, tensors))}",
        rule="experts multiply whole plain tensors: their parameters are not sharded by DTensor",
        fix="leave experts out of the tensor parallel plan; FSDP2 and DDP shard or replicate them as they are, and "
        "torchtitan's expert parallelism gives every rank experts of its own (docs/torchtitan.md)",
        error=ShardingError,
    )
