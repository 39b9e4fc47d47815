"""The casts of a layer: the operands of its products, each tensor read once, and how operands are saved for backward.

Nothing here is differentiable; `linear.py`, `mlp.py` and `grouped.py` put products and gradients on top. A layer of
experts casts the same operands, with rows in groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..casts.fused import swiglu_backward_cast, swiglu_cast
from ..casts.ops import cast, cast_both
from ..casts.permuted import cast_permute, permute_cast_both, permute_cast_columns
from ..formats.cast_spec import Cast, as_cast
from ..formats.layout import locate
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled, flatten_operand, from_parts
from ..gemm.ops import wanted_layouts
from ..grouped import Routing
from ..grouped.ops import wanted_layouts as wanted_grouped_layouts
from .recipe import PLACES, Product, Recipe
from .transforms import QUANTIZED, Subject, are_transforms_active, check_transforms

Pair = tuple[BlockScaled | None, BlockScaled | None]


class NeedsGrad(NamedTuple):
    """Which gradients the backward computes; all False without a backward."""

    x: bool
    weight: bool
    bias: bool


NO_GRADS = NeedsGrad(False, False, False)


def needed_grads(x: Tensor, weight: Tensor, bias: Tensor | None, subject: Subject = QUANTIZED) -> NeedsGrad:
    """The gradients that a call made now has to provide. Raises for derivatives that layers do not have."""
    if are_transforms_active() or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        check_transforms(x, weight, bias, subject=subject)
    if not torch.is_grad_enabled():
        return NO_GRADS
    return NeedsGrad(x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)


def matrix(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    if x.dim() == 2:
        return x
    # without features, -1 cannot be inferred
    return x.reshape(-1 if x.shape[-1] else math.prod(x.shape[:-1]), x.shape[-1])


class QuantizedWeight(Tensor):
    """Base of weights [N, K] or [E, N, K] that come quantized: their operands take the place of casts. Codes and scales
    may be replaced between a forward and its backward, as FSDP does; so operands are made where they are used."""

    def row_operand(self, layout: str) -> BlockScaled:
        """The operand for fprop, with its scales in this layout."""
        raise NotImplementedError

    def column_operand(self, layout: str) -> BlockScaled:
        """The operand for dgrad (axis=-2)."""
        raise NotImplementedError


class GradScatter(NamedTuple):
    """Indices and factors that scatter the gradient of tokens [T, D] to rows: drow[i] = grad[tokens[i]] *
    gate_weights[i].  tokens: int32 [M].  gate_weights: fp32 [M], one for each row."""

    tokens: Tensor
    gate_weights: Tensor


class GradOperands(NamedTuple):
    """A gradient of rows [M, N] that arrives as operands, in place of being cast.  row, col: for dgrad and for wgrad.
    total: its column sums, fp32 [N] or [E, N]. None for those that are not needed."""

    row: BlockScaled | None
    col: BlockScaled | None
    total: Tensor | None


@dataclass(frozen=True, eq=False)
class Casts:
    """The casts of one layer's call.

    recipe: formats of the operands.  rounding: state and stream name of stochastic rounding.  routing: of a layer of
    experts.
    """

    recipe: Recipe
    rounding: Stochastic | None = None
    routing: Routing | None = None

    def routed(self, routing: Routing | None) -> Casts:
        """The same casts with this routing."""
        return self if routing is None else Casts(self.recipe, self.rounding, routing)

    def spec(self, role: str | None, like: Tensor) -> Cast | None:
        """The cast of a role, with the scale layout that the product on that tensor's device reads; None if the role
        is unquantized. A tensor of rank 3 is the weight of experts."""
        if role is None:
            return None
        name, side = PLACES[role]
        product: Product | None = getattr(self.recipe, name)
        if product is None:
            return None
        formats, grouped = (product.a.format, product.b.format), self.routing is not None or like.dim() == 3
        if grouped:
            layouts = wanted_grouped_layouts("k_grouped" if name == "wgrad" else "m_grouped", *formats, like.device)
        else:
            layouts = wanted_layouts(*formats, like.device)
        operand = product.b if side else product.a
        spec = operand.spec(role, self.rounding, layouts[side], grouped=grouped)
        return as_cast(spec)

    def quantized_spec(self, role: str, like: Tensor) -> Cast:
        """`spec` of a role that the recipe quantizes."""
        resolved = self.spec(role, like)
        assert resolved is not None, role
        return resolved

    @property
    def offs(self) -> Tensor | None:
        return None if self.routing is None else self.routing.offs

    def both(self, x: Tensor, row: str | None, col: str | None) -> Pair:
        """Row and column operand of a matrix (blocks along its last axis and along its first) from one read; None
        for a role that is None or unquantized."""
        offs = self.offs if x.dim() == 2 else None  # the weights of experts have no rows to group
        return _cast(x, self.spec(row, x), self.spec(col, x), offs, colsum=False)[:2]

    def input(self, x: Tensor, *, save: bool) -> Pair:
        """Row operand of an input [M, K] for fprop, and its column operand for wgrad if `save`. An input that is not
        permuted yet is read in the order of its rows."""
        roles = "fprop_x", "wgrad_x" if save and self.recipe.saves == "operand" else None
        routing = self.routing
        if routing is None or routing.tokens is None:
            return self.both(x, *roles)
        row, col = (self.spec(role, x) for role in roles)
        if row is not None and col is not None:
            return permute_cast_both(x, routing.tokens, None, row, col, routing.offs)
        # each token is cast once and its codes are copied, unless the amax is per group
        if row is not None and col is None and not row.plan.grouped_amax:
            return cast_permute(x, routing.tokens, row), None
        return self.both(routing.permuted(x), *roles)

    def weight(self, weight: Tensor, *, save: bool) -> Pair:
        """Row operand of a weight [N, K] or [E, N, K] for fprop, and its column operand for dgrad if `save`."""
        if isinstance(weight, QuantizedWeight):  # compilers follow functions, and take methods for operators
            return type(weight).row_operand(weight, self.quantized_spec("fprop_w", weight).plan.layout), None
        return self.both(weight, "fprop_w", "dgrad_w" if save else None)

    def gradient(self, grad: Tensor, needs: NeedsGrad) -> tuple[BlockScaled | None, BlockScaled | None, Tensor | None]:
        """dgrad's and wgrad's operands of an output gradient [M, N], and its column sums (the bias gradient)."""
        row = self.spec("dgrad_dy" if needs.x else None, grad)
        col = self.spec("wgrad_dy" if needs.weight else None, grad)
        return _cast(grad, row, col, self.offs, colsum=needs.bias)

    def scattered_gradient(self, grad: Tensor, scatter: GradScatter) -> tuple[BlockScaled, BlockScaled]:
        """dgrad's and wgrad's operands of the row gradients [M, N] that the gradient of tokens [T, N] is scattered to.
        The rows are written only as quantized operands."""
        row, col = self.quantized_spec("dgrad_dy", grad), self.quantized_spec("wgrad_dy", grad)
        assert self.offs is not None
        return permute_cast_both(grad, scatter.tokens, scatter.gate_weights, row, col, self.offs)

    def column(self, saved: SavedOperand, source: Tensor | None, role: str) -> BlockScaled | None:
        """The column operand saved for backward, or a cast of the source if none was saved; None if the role is
        unquantized."""
        if saved.meta is not None:
            return saved.operand
        assert source is not None, role
        if self.recipe.operand(role) is None:
            return None
        if isinstance(source, QuantizedWeight):
            return type(source).column_operand(source, self.quantized_spec(role, source).plan.layout)
        routing = self.routing
        if role == "wgrad_x" and routing is not None and routing.tokens is not None:
            return permute_cast_columns(source, routing.tokens, self.quantized_spec(role, source), routing.offs)
        return self.both(matrix(source) if routing is None else source, None, role)[1]

    def swiglu(self, gate_up: Tensor, role: str, axis: int = -1) -> BlockScaled:
        """Operand of silu(gate) * up for a role, from gate_up [M, 2H]; the activation itself is never written."""
        resolved = self.quantized_spec(role, gate_up)
        return swiglu_cast(gate_up, resolved, axis, _offs_for(self.offs, resolved, axis))

    def swiglu_gradient(
        self, grad: Tensor, gate_up: Tensor, hidden: Cast | None
    ) -> tuple[BlockScaled, BlockScaled, BlockScaled | None]:
        """dgrad's and wgrad's operands of the gradient of gate and up [M, 2H], from one read of grad [M, H] and
        gate_up. With a cast `hidden` of the next layer also the column operand of silu(gate) * up."""
        row, col = self.quantized_spec("dgrad_dy", grad), self.quantized_spec("wgrad_dy", grad)
        return swiglu_backward_cast(grad, gate_up, row, col, hidden, self.offs)


def _cast(
    x: Tensor, row: Cast | None, col: Cast | None, offs: Tensor | None, *, colsum: bool
) -> tuple[*Pair, Tensor | None]:
    if row is not None and col is not None:
        *pair, total = cast_both(x, row, col, offs, colsum)
        return pair[0], pair[1], total if colsum else None
    total = None
    if colsum:
        total = column_sums(x, offs)
    return _cast_one(x, row, -1, offs), _cast_one(x, col, -2, offs), total


def _cast_one(x: Tensor, resolved: Cast | None, axis: int, offs: Tensor | None) -> BlockScaled | None:
    return None if resolved is None else cast(x, resolved, axis, _offs_for(offs, resolved, axis))


def _offs_for(offs: Tensor | None, resolved: Cast, axis: int) -> Tensor | None:
    """`offs` if the cast depends on the groups, else None. Blocks inside rows do not, and a cast without groups is
    faster: it also casts rows of no group, which no product reads."""
    return offs if axis == -2 or resolved.plan.grouped_amax else None


def column_sums(x: Tensor, offs: Tensor | None) -> Tensor:
    """Sums over rows [N], or over the rows of each group [G, N], in fp32. Groups are accumulated in fp64, so that the
    order of the additions does not change the fp32 result."""
    if offs is None:
        return x.sum(0, dtype=torch.float32)
    group, _ = locate(torch.arange(x.shape[0], device=x.device), offs.to(torch.int64))
    total = torch.zeros(offs.shape[0] + 1, x.shape[1], dtype=torch.float64, device=x.device)
    return total.index_add(0, group, x.double())[:-1].to(torch.promote_types(x.dtype, torch.float32))


class OperandMeta(NamedTuple):
    """Everything about an operand but its tensors."""

    kind: str
    shape: tuple[int, ...]
    axis: int
    hadamard: int | None
    group_align: int
    groups: int


class SavedOperand(NamedTuple):
    """A column operand that is saved for backward; all None if none is. `save_for_backward` takes its tensors."""

    meta: OperandMeta | None = None
    data: Tensor | None = None
    scale: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self[1:]

    @property
    def operand(self) -> BlockScaled:
        """The operand with its scaled axis last, as a product takes it."""
        meta, data, scale, global_scale = self
        assert meta is not None
        assert data is not None
        assert scale is not None
        restored = from_parts(
            data,
            scale,
            global_scale,
            meta.kind,
            meta.shape,
            axis=meta.axis,
            group_align=meta.group_align,
            hadamard=meta.hadamard,
            groups=meta.groups,
        )
        return restored.operand


_NOT_SAVED = SavedOperand()


def save_operand(q: BlockScaled | None) -> SavedOperand:
    """An operand as `save_for_backward` takes it."""
    if q is None:
        return _NOT_SAVED
    data, scale, global_scale, kind, _ = flatten_operand(q)
    meta = OperandMeta(kind, q.shape, q.axis, q.hadamard, q.group_align, q.groups)
    return SavedOperand(meta, data, scale, global_scale)
