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

    def both(self, x: Tensor, row: str | None, col: str | None) -> Pair:
        """Operands of a matrix for two roles, blocks along its last axis and along its first; None where none is
        wanted or the role stays in high precision. One read makes both."""
        return _cast(x, self.spec(row, x.device), self.spec(col, x.device), colsum=False)[:2]

    def input(self, x: Tensor, *, waits: bool) -> Pair:
        """Of an input [M, K]: fprop's operand, and wgrad's, which waits for the backward."""
        return self.both(x, "fprop_x", "wgrad_x" if waits and self.recipe.keeps == "operand" else None)

    def kept_source(self, x: Tensor | None) -> BlockScaled | None:
        """wgrad's operand of an input that was kept itself."""
        return None if x is None else self.both(x, None, "wgrad_x")[1]

    def weight(self, weight: Tensor, *, waits: bool) -> Pair:
        """Of a weight [N, K]: fprop's operand, and dgrad's, which waits for the backward."""
        return self.both(weight, "fprop_w", "dgrad_w" if waits else None)

    def gradient(self, grad: Tensor, needs: Needs) -> tuple[BlockScaled | None, BlockScaled | None, Tensor | None]:
        """Of an output's gradient [M, N]: dgrad's operand, wgrad's, and its column sums (the bias's gradient)."""
        row = self.spec("dgrad_dy" if needs.x else None, grad.device)
        col = self.spec("wgrad_dy" if needs.weight else None, grad.device)
        return _cast(grad, row, col, colsum=needs.bias)


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
