"""The casts of a layer: which operands its products need, made from one read each, and how they wait for a backward.

Nothing here is differentiable; `linear.py`, `mlp.py` and `grouped.py` put products and gradients on top. A layer of
experts makes the same operands of the rows of its groups: `Groups`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import call_recording
from ..casts import cast, cast_both
from ..casts.fused import swiglu_backward_cast, swiglu_cast
from ..casts.permuted import cast_permute, permute_cast_both, permute_cast_columns
from ..formats.cast_spec import CastPlan, CastSpec
from ..formats.layout import locate
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled, from_parts, to_parts
from ..gemm.ops import wanted_layouts
from ..grouped import Routing
from ..grouped.ops import wanted_layouts as wanted_grouped_layouts
from ..grouped.routing_ops import permute_rows
from .recipe import Recipe
from .transforms import LOW, Subject, are_transforms_active, check_transforms

Pair = tuple[BlockScaled | None, BlockScaled | None]
Resolved = tuple[CastSpec, CastPlan]


class Needs(NamedTuple):
    """Which gradients will be asked for; all False where there will be no backward."""

    x: bool
    weight: bool
    bias: bool


NOTHING = Needs(False, False, False)


def needs_of(x: Tensor, weight: Tensor, bias: Tensor | None, subject: Subject = LOW) -> Needs:
    """What a call made now will be asked for; raises for derivatives that layers do not have."""
    if are_transforms_active() or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        check_transforms(x, weight, bias, subject=subject)
    if not torch.is_grad_enabled():
        return NOTHING
    return Needs(x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)


def matrix(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    if x.dim() == 2:
        return x
    # without features nothing says how many rows there are
    return x.reshape(-1 if x.shape[-1] else math.prod(x.shape[:-1]), x.shape[-1])


class Groups(NamedTuple):
    """Which rows belong to which expert.  offs: their ends.  tokens, rows: of an input that has yet to be permuted (see
    `Routing`), whose rows are gathered by the cast itself."""

    offs: Tensor
    tokens: Tensor | None = None
    rows: Tensor | None = None

    def gathered(self, x: Tensor) -> Tensor:
        """The rows of the groups in high precision."""
        return x if self.tokens is None or self.rows is None else permute_rows(x, self.tokens, self.rows, None)


class Spread(NamedTuple):
    """How the gradient of tokens [T, D], each a weighted sum of its rows, becomes that of the rows: row i has that of
    tokens[i], times weights[i] (fp32)."""

    tokens: Tensor
    weights: Tensor


def groups_of(offs: Tensor | Routing) -> Groups:
    """What a caller says of its groups: ends of rows that lie in order, or where they are to go."""
    return Groups(offs.offs, offs.tokens, offs.rows) if isinstance(offs, Routing) else Groups(offs)


@dataclass(frozen=True, eq=False)
class Casts:
    """The casts of one layer's call: its recipe, the state and the name that stochastic rounding draws by, and the
    groups of a layer of experts."""

    recipe: Recipe
    rounding: Stochastic | None = None
    groups: Groups | None = None

    def among(self, groups: Groups | None) -> Casts:
        """The same casts of a call with these groups."""
        return self if groups is None else Casts(self.recipe, self.rounding, groups)

    def spec(self, role: str | None, like: Tensor) -> Resolved | None:
        """The cast of a role, its scales laid out as the product on that tensor's device reads them; None: high
        precision. A tensor of rank 3 is the weight of experts."""
        operand = None if role is None else self.recipe.operand(role)
        if role is None or operand is None:
            return None
        product = getattr(self.recipe, role[:5])
        formats, grouped = (product.a.format, product.b.format), self.groups is not None or like.dim() == 3
        if grouped:
            layouts = wanted_grouped_layouts("k_grouped" if role[:5] == "wgrad" else "m_grouped", *formats, like.device)
        else:
            layouts = wanted_layouts(*formats, like.device)
        layout = layouts[0] if operand is product.a else layouts[1]
        spec = operand.spec(role, self.rounding, layout, grouped=grouped)
        return spec, spec.plan()

    def low(self, role: str, like: Tensor) -> Resolved:
        """`spec` of a role that is known to be in low precision."""
        resolved = self.spec(role, like)
        assert resolved is not None, role
        return resolved

    @property
    def offs(self) -> Tensor | None:
        return None if self.groups is None else self.groups.offs

    def both(self, x: Tensor, row: str | None, col: str | None) -> Pair:
        """Operands of a matrix for two roles, blocks along its last axis and along its first; None where none is
        wanted or the role stays in high precision. One read makes both."""
        offs = self.offs if x.dim() == 2 else None  # the weights of experts have no rows to group
        return _cast(x, self.spec(row, x), self.spec(col, x), offs, colsum=False)[:2]

    def input(self, x: Tensor, *, waits: bool) -> Pair:
        """Of an input [M, K]: fprop's operand, and wgrad's, which waits for the backward. An input that has yet to be
        permuted is read in its new order."""
        roles = "fprop_x", "wgrad_x" if waits and self.recipe.saves == "operand" else None
        groups = self.groups
        if groups is None or groups.tokens is None:
            return self.both(x, *roles)
        row, col = (self.spec(role, x) for role in roles)
        if row is not None and col is not None:
            return permute_cast_both(x, groups.tokens, (row[0], col[0]), (row[1], col[1]), groups.offs)
        # a row that is cast once may be copied, unless its scale depends on whom it lies with
        if row is not None and col is None and not row[1].grouped_amax:
            return cast_permute(x, groups.tokens, *row), None
        return self.both(groups.gathered(x), *roles)

    def weight(self, weight: Tensor, *, waits: bool) -> Pair:
        """Of a weight [N, K] or [E, N, K]: fprop's operand, and dgrad's, which waits for the backward."""
        return self.both(weight, "fprop_w", "dgrad_w" if waits else None)

    def gradient(self, grad: Tensor, needs: Needs) -> tuple[BlockScaled | None, BlockScaled | None, Tensor | None]:
        """Of an output's gradient [M, N]: dgrad's operand, wgrad's, and its column sums (the bias's gradient)."""
        row = self.spec("dgrad_dy" if needs.x else None, grad)
        col = self.spec("wgrad_dy" if needs.weight else None, grad)
        return _cast(grad, row, col, self.offs, colsum=needs.bias)

    def spread_gradient(self, grad: Tensor, spread: Spread) -> tuple[BlockScaled, BlockScaled]:
        """Of the gradient of tokens [T, N]: dgrad's operand and wgrad's of the rows that it is spread to, which are
        never written in high precision."""
        (row, row_plan), (col, col_plan) = self.low("dgrad_dy", grad), self.low("wgrad_dy", grad)
        assert self.offs is not None
        return permute_cast_both(grad, spread.tokens, (row, col), (row_plan, col_plan), self.offs, spread.weights)

    def column(
        self, kept: SavedOperand, source: Tensor | None, role: str, *, buffers: bool = False
    ) -> BlockScaled | None:
        """The column operand that waited for a backward, or, where none did, one made now of the source; None in high
        precision.  buffers: what waited is whole buffers."""
        waits, parts = kept
        if waits is not None:
            return waits.operand(parts, buffers=buffers)
        assert source is not None, role
        if self.recipe.operand(role) is None:
            return None
        groups = self.groups
        if role == "wgrad_x" and groups is not None and groups.tokens is not None:
            return permute_cast_columns(source, groups.tokens, *self.low(role, source), groups.offs)
        return self.both(matrix(source) if groups is None else source, None, role)[1]

    def swiglu(self, gate_up: Tensor, role: str, axis: int = -1) -> BlockScaled:
        """Of silu(gate) * up, which is never written in high precision: the operand of a role, made from [M, 2H]."""
        resolved = self.low(role, gate_up)
        return swiglu_cast(gate_up, *resolved, axis, _ends(self.offs, resolved, axis))

    def swiglu_gradient(
        self, grad: Tensor, gate_up: Tensor, hidden: Resolved | None
    ) -> tuple[BlockScaled, BlockScaled, BlockScaled | None]:
        """Of the gradient of gate and up [M, 2H], from one read of grad [M, H] and gate_up: dgrad's operand and wgrad's
        of this layer, and with a cast `hidden` of the next layer the column operand of silu(gate) * up."""
        row, col = self.low("dgrad_dy", grad), self.low("wgrad_dy", grad)
        third = (None, None) if hidden is None else hidden
        return swiglu_backward_cast(grad, gate_up, (row[0], col[0]), (row[1], col[1]), *third, self.offs)


def _cast(
    x: Tensor, row: Resolved | None, col: Resolved | None, offs: Tensor | None, *, colsum: bool
) -> tuple[*Pair, Tensor | None]:
    if row is not None and col is not None:
        *pair, total = cast_both(x, (row[0], col[0]), (row[1], col[1]), offs, colsum=colsum)
        return pair[0], pair[1], total if colsum else None
    total = None
    if colsum:
        call_recording.refuse("a sum by torch")
        total = column_sums(x, offs)
    return _one(x, row, -1, offs), _one(x, col, -2, offs), total


def _one(x: Tensor, resolved: Resolved | None, axis: int, offs: Tensor | None) -> BlockScaled | None:
    return None if resolved is None else cast(x, *resolved, axis, _ends(offs, resolved, axis))


def _ends(offs: Tensor | None, resolved: Resolved, axis: int) -> Tensor | None:
    """Ends of groups for a cast that depends on them. Blocks inside rows do not, and their cast alone is quicker
    without: a row of no group is then cast too, and no product reads it."""
    return offs if axis == -2 or resolved[1].grouped_amax else None


def column_sums(x: Tensor, offs: Tensor | None) -> Tensor:
    """Sums over rows [N], or over those of each group [G, N], in fp32; fp64 in between where groups are summed, so that
    the order shows in no bit that is kept."""
    if offs is None:
        return x.sum(0, dtype=torch.float32)
    group, _ = locate(torch.arange(x.shape[0], device=x.device), offs.to(torch.int64))
    total = torch.zeros(offs.shape[0] + 1, x.shape[1], dtype=torch.float64, device=x.device)
    return total.index_add(0, group, x.double())[:-1].to(torch.promote_types(x.dtype, torch.float32))


Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


class Waiting(NamedTuple):
    """What an operand is besides its tensors, while these wait for the backward. Views that it is made of are kept as
    sizes and strides: a replayed call hands out whole buffers."""

    kind: str
    shape: tuple[int, ...]
    axis: int
    hadamard: int | None
    group_align: int
    groups: int
    views: tuple[tuple[torch.Size, tuple[int, ...]], ...] = ()

    def operand(self, parts: Parts, *, buffers: bool) -> BlockScaled:
        """The operand again, scaled axis last, as a product takes it.  buffers: the tensors are whole buffers."""
        data, scale, factor = parts
        assert data is not None
        assert scale is not None
        if buffers:
            data, scale = (each.as_strided(*view) for each, view in zip((data, scale), self.views, strict=True))
        made = from_parts(
            data,
            scale,
            factor,
            self.kind,
            self.shape,
            axis=self.axis,
            group_align=self.group_align,
            hadamard=self.hadamard,
            groups=self.groups,
        )
        return made.operand


SavedOperand = tuple[Waiting | None, Parts]


def set_aside(q: BlockScaled | None) -> SavedOperand:
    """An operand as three tensors for `save_for_backward`, and what it takes to make it again."""
    if q is None:
        return None, (None, None, None)
    data, scale, factor, kind = to_parts(q)
    views = () if torch.compiler.is_compiling() else ((data.shape, data.stride()), (scale.shape, scale.stride()))
    return Waiting(kind, q.shape, q.axis, q.hadamard, q.group_align, q.groups, views), (data, scale, factor)
