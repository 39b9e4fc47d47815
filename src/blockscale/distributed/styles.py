"""Styles for `parallelize_module` whose layers cast before they gather, with activations sharded along the sequence.

Parameters become DTensors, as with torch's styles, so optimizers, FSDP2 and DCP know how they are cut. Activations are
local tensors: each rank has its part of the sequence before a column-parallel layer and after a row-parallel one. Norms
between them see a part of the tokens: torch's `SequenceParallel` style sums the gradients of their weights over ranks.

A model is converted first (`quantize_`), parallelised next, and wrapped by `fully_shard` last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import Parameter

from ..autograd.activation import Activation
from ..autograd.dtensor import unchanged_until_backward
from ..autograd.mlp import swiglu
from ..errors import ShardingError, check_name, refuse
from ..formats.checks import in_words
from ..nn.linear import Linear
from ..nn.mlp import SwiGLU, is_plain
from .gathered_activation import GatheredActivation
from .overlap.choice import OVERLAPS, Overlap
from .tensor_parallel import column_parallel, refuse_stochastic_mlp, row_parallel, swiglu_parallel
from .tokens import WGRADS, Wgrad


class Call(NamedTuple):
    """How a layer is called.  sequence_dim: axis of activations along which tokens are sharded.  wgrad: source of
    gathered columns.  overlap: whether communication runs beside products. See `column_parallel`."""

    sequence_dim: int
    wgrad: Wgrad
    overlap: Overlap = "auto"


class ColumnParallelLinear(Linear):
    """A `Linear` whose outputs are cut: tokens of this rank [.., K] -> all tokens [.., N/ranks]. Made by
    `ColwiseParallel`."""

    how: Call

    def forward(self, input: Tensor | Activation) -> Tensor:
        """y of all tokens."""
        rounding, operands = self.call_state()
        y = column_parallel(
            input if isinstance(input, GatheredActivation) else _plain(input),
            local_part(self.weight),
            _local_bias(self.bias),
            group=_mesh(self.weight),
            recipe=self.recipe_now,
            gather_dim=self.how.sequence_dim,
            wgrad=self.how.wgrad,
            overlap=self.how.overlap,
            rounding=rounding,
            weight_operands=operands,
        )
        return unchanged_until_backward(y, self.weight)


class PackedColumnParallelLinear(ColumnParallelLinear):
    """The first layer of a `SwiGLU` that is cut: weight [2, H, K] and bias [2, H], sharded along H. A rank has the
    gates and ups of its hidden units."""

    def forward(self, input: Tensor | Activation) -> Tensor:
        """Gates and ups [.., 2H/ranks] of all tokens."""
        y = column_parallel(
            _plain(input),
            *self.local_parameters(),
            group=_mesh(self.weight),
            recipe=self.recipe_now,
            gather_dim=self.how.sequence_dim,
            wgrad=self.how.wgrad,
            overlap=self.how.overlap,
        )
        return unchanged_until_backward(y, self.weight)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """This rank's weight [2H/ranks, K] and bias [2H/ranks]: its gates, then its ups."""
        weight, bias = local_part(self.weight), _local_bias(self.bias)
        return weight.flatten(0, 1), None if bias is None else bias.flatten()

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch's linear layer does."""
        bound = self.in_features**-0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None:  # pyright: ignore[reportUnnecessaryComparison]
                torch.nn.init.uniform_(parameter, -bound, bound)


class RowParallelLinear(Linear):
    """A `Linear` whose inputs are cut: all tokens [.., K/ranks] -> tokens of this rank [.., N]. Made by
    `RowwiseParallel`."""

    how: Call

    def forward(self, input: Tensor | Activation) -> Tensor:
        """y of this rank's tokens."""
        rounding, operands = self.call_state()
        y = row_parallel(
            _plain(input),
            local_part(self.weight),
            _local_bias(self.bias),
            group=_mesh(self.weight),
            recipe=self.recipe_now,
            scatter_dim=self.how.sequence_dim,
            wgrad=self.how.wgrad,
            overlap=self.how.overlap,
            rounding=rounding,
            weight_operands=operands,
        )
        return unchanged_until_backward(y, self.weight)


class ParallelSwiGLU(SwiGLU):
    """A `SwiGLU` whose hidden units are cut: tokens of this rank in, tokens of this rank out. Made by
    `SwiGLUParallel`."""

    how: Call

    def forward(self, x: Tensor | Activation) -> Tensor:
        """[.., dim] -> [.., dim]."""
        first, second = self.gate_up, self.down
        assert isinstance(first, PackedColumnParallelLinear)
        plain = is_plain(first, PackedColumnParallelLinear) and is_plain(second, RowParallelLinear)
        if not plain or first.recipe_now != second.recipe_now:
            return second(swiglu(first(x)))
        weight, bias = first.local_parameters()
        y = swiglu_parallel(
            _plain(x),
            weight,
            local_part(second.weight),
            bias,
            _local_bias(second.bias),
            group=_mesh(first.weight),
            recipe=first.recipe_now,
            token_dim=self.how.sequence_dim,
            wgrad=self.how.wgrad,
            overlap=self.how.overlap,
        )
        return unchanged_until_backward(y, first.weight, second.weight)


# ---- styles ----------------------------------------------------------------------------------------------------------


class _SequenceStyle(ParallelStyle):
    """Options of the styles.  sequence_dim: axis of activations along which tokens are sharded, 1 for [B, S, K].
    wgrad: "owner" or "requantized".  overlap: "auto", "on" or "off". See `column_parallel`."""

    def __init__(self, *, sequence_dim: int = 1, wgrad: Wgrad = "owner", overlap: Overlap = "auto") -> None:
        super().__init__()
        check_name(wgrad, WGRADS, "source of columns")
        check_name(overlap, OVERLAPS, "overlap")
        self.how = Call(sequence_dim, wgrad, overlap)

    def _check(self, module: torch.nn.Module, kind: type[torch.nn.Module], mesh: DeviceMesh) -> None:
        if type(module) is not kind:
            refuse(
                f"{type(self).__name__} for {in_words(module)}",
                rule=f"it cuts layers of type blockscale.nn.{kind.__name__} that are not cut yet",
                fix="convert the model with quantize_ before, and use torch's styles for other layers",
                error=ShardingError,
            )
        check_one_dimension(type(self).__name__, mesh)

    def _become(
        self, module: torch.nn.Module, kind: type[ColumnParallelLinear | RowParallelLinear | ParallelSwiGLU]
    ) -> torch.nn.Module:
        """Change the class of a module, in place."""
        module.__class__ = kind
        assert isinstance(module, kind)
        module.how = self.how
        return module

    def _cut(
        self, layer: Linear, mesh: DeviceMesh, weight: Placement, bias: Placement, *, packed: bool = False
    ) -> None:
        """Replace the parameters of a layer by DTensors; the weight first, which raises if shards split blocks.
        packed: with gates and ups along an axis of their own."""
        for name, placement in (("weight", weight), ("bias", bias)):
            param = getattr(layer, name)
            if param is not None:
                whole = param.detach().unflatten(0, (2, -1)) if packed else param.detach()
                made = distribute_tensor(whole, mesh, [placement], src_data_rank=self.src_data_rank)
                setattr(layer, name, Parameter(made, requires_grad=param.requires_grad))


class ColwiseParallel(_SequenceStyle):
    """Cut the outputs of a `blockscale.nn.Linear`: x of this rank's tokens, y of all tokens [.., N/ranks]. Codes of x
    are gathered.

    sequence_dim: axis of x along which the tokens of the ranks lie, 1 for [B, S, K].  wgrad, overlap: as for
    `column_parallel`.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self._check(module, Linear, device_mesh)
        assert isinstance(module, Linear)
        if module.is_packed:
            refuse(
                "ColwiseParallel for the gate_up of a SwiGLU",
                rule="its rows are all gates, then all ups, and a rank needs gates and ups of the same hidden units",
                fix="use SwiGLUParallel for the SwiGLU",
                error=ShardingError,
            )
        self._cut(module, device_mesh, Shard(0), Shard(0))
        return self._become(module, ColumnParallelLinear)


class RowwiseParallel(_SequenceStyle):
    """Cut the inputs of a `blockscale.nn.Linear`: x of all tokens [.., K/ranks], y of this rank's tokens.

    Partial results are summed in the dtype of y; codes of its gradient are gathered. The options are as for
    `ColwiseParallel`.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self._check(module, Linear, device_mesh)
        assert isinstance(module, Linear)
        self._cut(module, device_mesh, Shard(1), Replicate())
        return self._become(module, RowParallelLinear)


class SwiGLUParallel(_SequenceStyle):
    """Cut the hidden units of a `blockscale.nn.SwiGLU`: tokens of this rank in and out.

    The packed weight [2H, K] becomes a DTensor [2, H, K] sharded along H (its bias [2, H]): gates and ups of one hidden
    unit stay together, and `weight.full_tensor().flatten(0, 1)` is the packed weight. So checkpoints have that shape.
    The options are as for `ColwiseParallel`.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self._check(module, SwiGLU, device_mesh)
        assert isinstance(module, SwiGLU)
        first, second = module.gate_up, module.down
        self._check(first, Linear, device_mesh)
        self._check(second, Linear, device_mesh)
        refuse_stochastic_mlp(first.recipe)
        self._cut(second, device_mesh, Shard(1), Replicate())
        self._cut(first, device_mesh, Shard(1), Shard(1), packed=True)
        self._become(first, PackedColumnParallelLinear)
        self._become(second, RowParallelLinear)
        return self._become(module, ParallelSwiGLU)


# ---- parts -----------------------------------------------------------------------------------------------------------


def check_one_dimension(style: str, mesh: DeviceMesh) -> None:
    """Raise for a style on a mesh of several dimensions."""
    if mesh.ndim != 1:
        refuse(
            f"{style} on a mesh of {mesh.ndim} dimensions",
            rule="a layer is cut along one dimension of a mesh",
            fix='pass that dimension to parallelize_module, such as mesh["tp"]',
            error=ShardingError,
        )


def _plain(x: Tensor | Activation) -> Tensor:
    if isinstance(x, Activation):
        refuse(
            "an activation that several layers share, for a layer that is cut",
            rule="its operands are those of this rank's tokens, and the layer multiplies all tokens",
            fix="pass the tensor itself; layers made by ColwiseParallel also take what gather_activation returns",
            error=ShardingError,
        )
    return x


def _mesh(weight: Tensor) -> DeviceMesh:
    assert isinstance(weight, DTensor)
    return weight.device_mesh


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter. A bias that all ranks have gets the gradient of all tokens."""
    if getattr(parameter, "main_grad", None) is not None:
        refuse(
            "main_grad of a parameter that is a DTensor",
            rule="gradients of sharded weights go to weight.grad, where torch reduces them",
            fix="delete main_grad, or call column_parallel and row_parallel on local tensors",
        )
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=parameter.placements)


def _local_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else local_part(bias)
