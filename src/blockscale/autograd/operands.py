"""The casts of a layer: which operands its products need, made from one read each, and how they wait for a backward.

Nothing here is differentiable; `linear.py` and `mlp.py` put products and gradients on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import replay
from ..casts import cast, cast_both
from ..casts.fused import swiglu_backward_cast, swiglu_cast
from ..formats.cast_spec import CastPlan, CastSpec
from ..formats.stochastic import Stochastic
from ..formats.tensor import BlockScaled, from_parts, to_parts
from ..gemm.ops import wanted_layouts
from .recipe import Recipe

Pair = tuple[BlockScaled | None, BlockScaled | None]
Resolved = tuple[CastSpec, CastPlan]


class Needs(NamedTuple):
    """Which gradients will be asked for; all False where there will be no backward."""

    x: bool
    weight: bool
    bias: bool


NOTHING = Needs(False, False, False)


def needs_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Needs:
    """What a call made now will be asked for."""
    if not torch.is_grad_enabled():
        return NOTHING
    return Needs(x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)


def matrix(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, eq=False)
class Casts:
    """The casts of one layer's call: its recipe, and the state and the name that stochastic rounding draws by."""

    recipe: Recipe
    rounding: Stochastic | None = None

    def spec(self, role: str | None, device: torch.device) -> Resolved | None:
        """The cast of a role, its scales laid out as the product on that device reads them; None: high precision."""
        operand = None if role is None else self.recipe.operand(role)
        if role is None or operand is None:
            return None
        product = getattr(self.recipe, role[:5])
        layouts = wanted_layouts(product.a.format, product.b.format, device)
        spec = operand.spec(role, self.rounding, layouts[0] if operand is product.a else layouts[1])
        return spec, spec.plan()

    def low(self, role: str, device: torch.device) -> Resolved:
        """`spec` of a role that is known to be in low precision."""
        resolved = self.spec(role, device)
        assert resolved is not None, role
        return resolved

    def both(self, x: Tensor, row: str | None, col: str | None) -> Pair:
        """Operands of a matrix for two roles, blocks along its last axis and along its first; None where none is
        wanted or the role stays in high precision. One read makes both."""
        return _cast(x, self.spec(row, x.device), self.spec(col, x.device), colsum=False)[:2]

    def input(self, x: Tensor, *, waits: bool) -> Pair:
        """Of an input [M, K]: fprop's operand, and wgrad's, which waits for the backward."""
        return self.both(x, "fprop_x", "wgrad_x" if waits and self.recipe.keeps == "operand" else None)

    def weight(self, weight: Tensor, *, waits: bool) -> Pair:
        """Of a weight [N, K]: fprop's operand, and dgrad's, which waits for the backward."""
        return self.both(weight, "fprop_w", "dgrad_w" if waits else None)

    def gradient(self, grad: Tensor, needs: Needs) -> tuple[BlockScaled | None, BlockScaled | None, Tensor | None]:
        """Of an output's gradient [M, N]: dgrad's operand, wgrad's, and its column sums (the bias's gradient)."""
        row = self.spec("dgrad_dy" if needs.x else None, grad.device)
        col = self.spec("wgrad_dy" if needs.weight else None, grad.device)
        return _cast(grad, row, col, colsum=needs.bias)

    def column(self, kept: Kept, source: Tensor | None, role: str, *, buffers: bool = False) -> BlockScaled | None:
        """The column operand that waited for a backward, or, where none did, one made now of the source [..., K]; None
        in high precision.  buffers: what waited is whole buffers."""
        waits, parts = kept
        if waits is not None:
            return waits.operand(parts, buffers=buffers)
        assert source is not None, role
        return self.both(matrix(source), None, role)[1]

    def swiglu(self, gate_up: Tensor, role: str, axis: int = -1) -> BlockScaled:
        """Of silu(gate) * up, which is never written in high precision: the operand of a role, made from [M, 2H]."""
        return swiglu_cast(gate_up, *self.low(role, gate_up.device), axis)

    def swiglu_gradient(
        self, grad: Tensor, gate_up: Tensor, hidden: Resolved | None
    ) -> tuple[BlockScaled, BlockScaled, BlockScaled | None]:
        """Of the gradient of gate and up [M, 2H], from one read of grad [M, H] and gate_up: dgrad's operand and wgrad's
        of this layer, and with a cast `hidden` of the next layer the column operand of silu(gate) * up."""
        row, col = self.low("dgrad_dy", grad.device), self.low("wgrad_dy", grad.device)
        third = (None, None) if hidden is None else hidden
        return swiglu_backward_cast(grad, gate_up, (row[0], col[0]), (row[1], col[1]), *third)


def _cast(x: Tensor, row: Resolved | None, col: Resolved | None, *, colsum: bool) -> tuple[*Pair, Tensor | None]:
    if row is not None and col is not None:
        *pair, total = cast_both(x, (row[0], col[0]), (row[1], col[1]), colsum=colsum)
        return pair[0], pair[1], total if colsum else None
    total = None
    if colsum:
        replay.refuse("a sum by torch")
        total = x.sum(0, dtype=torch.float32)
    return None if row is None else cast(x, *row), None if col is None else cast(x, *col, axis=-2), total


Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


class Waiting(NamedTuple):
    """What an operand is besides its tensors, while these wait for the backward. Views that it is made of are kept as
    sizes and strides: a replayed call hands out whole buffers."""

    kind: str
    shape: tuple[int, ...]
    axis: int
    hadamard: int | None
    views: tuple[tuple[torch.Size, tuple[int, ...]], ...] = ()

    def operand(self, parts: Parts, *, buffers: bool) -> BlockScaled:
        """The operand again, scaled axis last, as a product takes it.  buffers: the tensors are whole buffers."""
        data, scale, factor = parts
        assert data is not None
        assert scale is not None
        if buffers:
            data, scale = (each.as_strided(*view) for each, view in zip((data, scale), self.views, strict=True))
        made = from_parts(data, scale, factor, self.kind, self.shape, axis=self.axis, hadamard=self.hadamard)
        return made.operand


Kept = tuple[Waiting | None, Parts]


def set_aside(q: BlockScaled | None) -> Kept:
    """An operand as three tensors for `save_for_backward`, and what it takes to make it again."""
    if q is None:
        return None, (None, None, None)
    data, scale, factor, kind = to_parts(q)
    views = () if torch.compiler.is_compiling() else ((data.shape, data.stride()), (scale.shape, scale.stride()))
    return Waiting(kind, q.shape, q.axis, q.hadamard, views), (data, scale, factor)
