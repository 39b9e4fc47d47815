"""Whole weights as FSDP2 gathered them: codes and scales in place of values."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.operands import QuantizedWeight
from ..casts import dequantize
from ..casts.shards import transpose_square
from ..errors import refuse
from ..formats.cast_spec import CastPlan
from ..formats.tensor import BlockScaled, assemble

_aten = torch.ops.aten


class GatheredWeight(QuantizedWeight):
    """Whole weight as FSDP gathered it: codes and scales, from which a layer takes both operands. To everything else it
    is the tensor that they decode to."""

    codes: Tensor
    scales: Tensor
    factor: Tensor | None
    plan: CastPlan
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls: type[GatheredWeight],
        codes: Tensor,
        scales: Tensor,
        factor: Tensor | None,
        plan: CastPlan,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> GatheredWeight:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        factor: Tensor | None,
        plan: CastPlan,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.codes, self.scales, self.factor, self.plan = codes, scales, factor, plan

    def __tensor_flatten__(self) -> tuple[list[str], tuple[CastPlan, torch.dtype]]:
        names = ["codes", "scales"] if self.factor is None else ["codes", "scales", "factor"]
        return names, (self.plan, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[CastPlan, torch.dtype], size: Any, stride: Any
    ) -> GatheredWeight:
        plan, dtype = context
        return GatheredWeight(inner["codes"], inner["scales"], inner.get("factor"), plan, tuple(size), dtype)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"GatheredWeight({tuple(self.shape)}, {self.plan.format}, {self.dtype}, {self.device})"

    def row_operand(self) -> BlockScaled:
        spec = self.plan.spec
        parts = self.codes.view(spec.data_dtype), self.scales.view(spec.scale_dtype), self.factor
        return assemble(self.plan, parts, self.shape, -1)

    def column_operand(self) -> BlockScaled:
        return transpose_square(self.row_operand(), self.plan)

    def decoded(self) -> Tensor:
        """The values that the codes stand for."""
        return dequantize(self.row_operand(), dtype=self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[0] if args else None
        if func in _SAME_WEIGHT and isinstance(weight, GatheredWeight) and _is_whole(func, weight, args[1:]):
            return GatheredWeight(
                weight.codes, weight.scales, weight.factor, weight.plan, tuple(weight.shape), weight.dtype
            )
        if func._schema.is_mutable and isinstance(weight, GatheredWeight):
            refuse(
                f"{func._schema.name} into a gathered weight {tuple(weight.shape)}",
                "a weight that was gathered as codes has no values of its own to write",
                "write the sharded parameter, outside of the forward",
            )
        args, kwargs = pytree.tree_map_only(GatheredWeight, GatheredWeight.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


_SAME_WEIGHT = (_aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.view.default)


def _is_whole(func: Any, weight: GatheredWeight, rest: Any) -> bool:
    """Whether a view is of the weight's own size and strides."""
    if func in (_aten.alias.default, _aten.detach.default):
        return True
    size, *stride = rest
    return tuple(size) == tuple(weight.shape) and (not stride or tuple(stride[0]) == weight.stride())
