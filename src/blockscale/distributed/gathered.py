"""Whole weights as FSDP2 gathered them: codes and scales in place of values, and two views of them that layers take.

FSDP frees the codes after a forward and gathers them again into the same tensors before the backward. So a view holds
the weights that it is made of, and never an operand.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.operands import QuantizedWeight
from ..casts import dequantize
from ..casts.shards import transpose_square
from ..errors import refuse
from ..formats.cast_spec import CastPlan
from ..formats.layout import is_plain
from ..formats.tensor import BlockScaled, assemble

_aten = torch.ops.aten
_SAME_WEIGHT = (_aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.view.default)


class CodedWeight(QuantizedWeight):
    """Weight whose operands exist. To everything but layers it is the tensor that the codes decode to."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        raise NotImplementedError

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> CodedWeight:
        raise NotImplementedError

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.device})"

    def same(self) -> Self:
        """The same weight as another tensor."""
        names, context = self.__tensor_flatten__()
        inner = {name: getattr(self, name) for name in names}
        return type(self).__tensor_unflatten__(inner, context, self.shape, self.stride())  # pyright: ignore[reportReturnType]

    def transposed(self) -> CodedWeight | None:
        """The weight with its last two axes swapped; None if it is taken from the values."""
        return None

    def flattened(self, shape: tuple[int, ...]) -> CodedWeight | None:
        """The weight as a matrix of this shape, all axes but the last in one; None if it is taken from the values."""
        return None

    def decoded(self) -> Tensor:
        """The values that the codes stand for."""
        return dequantize(self.row_operand("plain"), dtype=self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight, *rest = args or (None,)
        found = None
        if isinstance(weight, CodedWeight):
            if func in _SAME_WEIGHT and _is_whole(func, weight, rest):
                found = weight.same()
            elif func is _aten.view.default:
                found = weight.flattened(tuple(rest[0]))
            elif func is _aten.transpose.int and sorted(dim % weight.dim() for dim in rest) == _last_two(weight):
                found = weight.transposed()
            elif func._schema.is_mutable:
                refuse(
                    f"{func._schema.name} into a gathered weight {tuple(weight.shape)}",
                    "a weight that was gathered as codes has no values of its own to write",
                    "write the sharded parameter, outside of the forward",
                )
        elif func is _aten.cat.default and can_be_joined(weight, *rest):  # pyright: ignore[reportArgumentType]
            found = JoinedWeight(tuple(weight))  # pyright: ignore[reportArgumentType]
        if found is not None:
            return found
        args, kwargs = pytree.tree_map_only(CodedWeight, CodedWeight.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_whole(func: Any, weight: Tensor, rest: Sequence[Any]) -> bool:
    """Whether a view is of the weight's own size and strides."""
    if func in (_aten.alias.default, _aten.detach.default):
        return True
    size, *stride = rest
    return tuple(size) == tuple(weight.shape) and (not stride or tuple(stride[0]) == weight.stride())


def _last_two(weight: Tensor) -> list[int]:
    return [weight.dim() - 2, weight.dim() - 1]


class GatheredWeight(CodedWeight):
    """Whole weight as FSDP gathered it: codes and scales, from which a layer takes both operands."""

    codes: Tensor
    scales: Tensor
    factor: Tensor | None
    plan: CastPlan

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

    def row_operand(self, layout: str) -> BlockScaled:
        spec = self.plan.spec
        codes, scales = self.codes.view(spec.data_dtype), self.scales.view(spec.scale_dtype)
        return _assembled(self.plan, codes, scales, self.factor, self.shape, layout)

    def column_operand(self, layout: str) -> BlockScaled:
        return transpose_square(GatheredWeight.row_operand(self, "plain"), replace(self.plan, layout=layout))

    def transposed(self) -> TransposedWeight:
        return TransposedWeight(self)

    def flattened(self, shape: tuple[int, ...]) -> GatheredWeight | None:
        """With whole blocks in each matrix: gates and ups [2, H, K] as [2H, K]. Codes and scales are views."""
        rows, columns = self.shape[:-1].numel(), self.shape[-1]
        if shape != (rows, columns) or self.shape[-2] % self.plan.spec.block[0] or self.factor is not None:
            return None
        codes, scales = (each.flatten(0, -2) for each in (self.codes, self.scales))
        return GatheredWeight(codes, scales, None, self.plan, shape, self.dtype)


class TransposedWeight(CodedWeight):
    """Weight [.., N, K] of a parameter [.., K, N]: its operands are the parameter's, rows for columns."""

    source: GatheredWeight

    @staticmethod
    def __new__(cls: type[TransposedWeight], source: GatheredWeight) -> TransposedWeight:
        *lead, rows, columns = source.shape
        *steps, row_step, column_step = source.stride()
        return Tensor._make_wrapper_subclass(
            cls,
            (*lead, columns, rows),
            strides=(*steps, column_step, row_step),
            dtype=source.dtype,
            device=source.device,
        )

    def __init__(self, source: GatheredWeight) -> None:
        self.source = source

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["source"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: Any, stride: Any) -> TransposedWeight:
        return TransposedWeight(inner["source"])

    def row_operand(self, layout: str) -> BlockScaled:
        return GatheredWeight.column_operand(self.source, layout).mT

    def column_operand(self, layout: str) -> BlockScaled:
        return GatheredWeight.row_operand(self.source, layout).mT

    def transposed(self) -> GatheredWeight:
        return self.source.same()


class JoinedWeight(CodedWeight):
    """Weights [.., N_i, K] of whole blocks as one weight [.., N, K], such as gates and ups in two parameters."""

    first: GatheredWeight
    second: GatheredWeight

    @staticmethod
    def __new__(cls: type[JoinedWeight], parts: tuple[GatheredWeight, GatheredWeight]) -> JoinedWeight:
        first, second = parts
        *lead, rows, columns = first.shape
        shape = (*lead, rows + second.shape[-2], columns)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)

    def __init__(self, parts: tuple[GatheredWeight, GatheredWeight]) -> None:
        self.first, self.second = parts

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: Any, stride: Any) -> JoinedWeight:
        return JoinedWeight((inner["first"], inner["second"]))

    def row_operand(self, layout: str) -> BlockScaled:
        plan, parts = self.first.plan, (self.first, self.second)
        codes = torch.cat([part.codes for part in parts], dim=-2).view(plan.spec.data_dtype)
        scales = torch.cat([part.scales for part in parts], dim=-2).view(plan.spec.scale_dtype)
        return _assembled(plan, codes, scales, None, self.shape, layout)

    def column_operand(self, layout: str) -> BlockScaled:
        return transpose_square(JoinedWeight.row_operand(self, "plain"), replace(self.first.plan, layout=layout))


def _assembled(
    plan: CastPlan, codes: Tensor, scales: Tensor, factor: Tensor | None, shape: tuple[int, ...], layout: str
) -> BlockScaled:
    """Row operand of codes and plain scales, which are copied if the layout has other bytes."""
    if is_plain(layout, scales.shape[-1]):
        return assemble(replace(plan, layout=layout), (codes, scales, factor), shape, -1)
    return assemble(plan, (codes, scales, factor), shape, -1).with_layout(layout)


def can_be_joined(parts: Sequence[object], dim: int = 0) -> bool:
    """Whether codes of two weights along their rows are those of one weight: no block holds rows of both."""
    if len(parts) != 2:
        return False
    first, second = parts
    return (
        isinstance(first, GatheredWeight)
        and isinstance(second, GatheredWeight)
        and dim % first.dim() == first.dim() - 2
        and first.shape[-2] % first.plan.spec.block[0] == 0
        and first.factor is None
        and first.plan == second.plan
        and first.dtype == second.dtype
    )
