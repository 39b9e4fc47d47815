"""What a recipe does to calls of one layer, as sums on its device: nothing here waits for the host.

A layer's own casts make the operands and its own products multiply them; both are compared with the same in high
precision. Every sum comes by group, [E]: one for each expert, and one in all for a dense layer; block scales as
[E, exponents]. `layers.py` makes shares and decibels of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..autograd.linear_plan import dgrad, fprop, wgrad
from ..autograd.operands import Casts, Groups
from ..autograd.recipe import PRODUCTS
from ..casts import dequantize
from ..formats.decoding import decode_scale
from ..formats.layout import locate, padded_ends
from ..formats.tensor import BlockScaled
from .quality import is_clipped

# exponents of scales that have a bin; others are counted in the outermost
LOWEST, HIGHEST = -64, 63
BINS = HIGHEST - LOWEST + 1
# values of experts' weights that are decoded at a time
_AT_ONCE = 2**26

Sums = dict[str, Tensor]


@dataclass
class Seen:
    """Rows of one call that are looked at.  x: [M, K].  load: rows of each group in the whole call [E].  stands_for:
    how many rows of the call each of them counts as, by group [E].  offs: ends of experts among them.  dy: [M, N], of
    the same rows; None before the backward.  has_gradient: one may come back to this call."""

    x: Tensor
    load: Tensor
    stands_for: Tensor
    offs: Tensor | None = None
    dy: Tensor | None = None
    has_gradient: bool = False


def layer_sums(layer: Any, calls: Sequence[Seen]) -> Sums:
    """All sums of the calls of a `Linear` or `GroupedLinear`, by its recipe of the present step."""
    weight = _whole(layer.weight.detach())
    casts = Casts(layer.recipe_now, layer.given()[0])
    of_weight = casts.both(weight, "fprop_w", "dgrad_w")
    sums = _of_casts("w", weight, of_weight, None)
    for seen in calls:
        more = _of_call(casts.among(None if seen.offs is None else Groups(seen.offs)), seen, weight, of_weight)
        sums |= {key: sums[key] + value if key in sums else value for key, value in more.items()}
    if layer.recipe_now.fprop is None and any(seen.dy is not None for seen in calls):
        sums["damage"] = torch.zeros_like(sums["load"])
    if layer.weight.grad is not None:
        norm = torch.linalg.vector_norm(layer.weight.grad, dtype=torch.float32)
        sums["gradient"] = _whole(norm).double().reshape(1)
    return sums


def _whole(tensor: Tensor) -> Tensor:
    """Of a tensor whose shards are on several ranks, which all have to ask for it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _of_call(casts: Casts, seen: Seen, weight: Tensor, of_weight: tuple[Any, Any]) -> Sums:
    pairs = {"x": casts.both(seen.x, "fprop_x", "wgrad_x"), "w": of_weight}
    sums: Sums = {"load": seen.load.double()} | _of_casts("x", seen.x, pairs["x"], seen)
    if seen.dy is not None:
        pairs["dy"] = casts.both(seen.dy, "dgrad_dy", "wgrad_dy")
        sums |= _of_casts("dy", seen.dy, pairs["dy"], seen)
    return sums | _of_products(casts.recipe, seen, weight, pairs, casts.groups)


# ---- casts -----------------------------------------------------------------------------------------------------------

_PRODUCTS_OF = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}


def _of_casts(letter: str, source: Tensor, pair: tuple[Any, Any], seen: Seen | None) -> Sums:
    """Of both casts of a tensor.  seen: of rows, None of a weight."""
    sums: Sums = {}
    for product, q in zip(_PRODUCTS_OF[letter], pair, strict=True):
        if q is not None:
            parts = [_of_cast(*part, seen) for part in _parts(source, q)]
            whole = parts[0] if len(parts) == 1 else {key: torch.cat([each[key] for each in parts]) for key in parts[0]}
            sums |= {f"{product}_{letter}.{key}": value for key, value in whole.items()}
    return sums


def _parts(source: Tensor, q: BlockScaled) -> Iterator[tuple[Tensor, BlockScaled]]:
    """A tensor and its cast; of experts' weights a few experts at a time, since decoded they are many bytes each."""
    if source.dim() < 3:
        yield source, q
        return
    step = max(1, _AT_ONCE // max(1, source[0].numel()))
    for at in range(0, source.shape[0], step):
        some = slice(at, at + step)
        part = source[some]
        tensor_scale = q.global_scale
        if tensor_scale is not None and tensor_scale.dim():
            tensor_scale = tensor_scale[some]
        shape = (part.shape[0], *q.shape[1:])
        yield part, replace(q, data=q.data[some], scale=q.scale[some], global_scale=tensor_scale, shape=shape)


def _of_cast(source: Tensor, q: BlockScaled, seen: Seen | None) -> Sums:
    """signal, noise: energies.  values, nonzero, clipped, underflow: counts, the last two only where values stay in
    their places, which a rotation does not leave them in.  scales: counts by exponent. All but the last stand for the
    whole call."""
    ends = None if seen is None else seen.offs
    needs_ends = q.group_align or (q.global_scale is not None and q.global_scale.dim() == 1 and source.dim() == 2)
    told = ends if needs_ends else None
    decoded = dequantize(q, torch.float32, offs=told)
    wide = source.float()
    sums = {"signal": energy(wide, ends), "noise": energy(wide - decoded, ends)}
    if q.hadamard is None:
        nonzero = wide != 0
        sums |= {
            "values": _sizes(wide, ends),
            "nonzero": _summed(nonzero, ends),
            "clipped": _summed(is_clipped(wide, q, told), ends),
            "underflow": _summed(nonzero & (decoded == 0), ends),
        }
    if seen is not None:
        sums = dict(zip(sums, torch.stack([*sums.values()]) * seen.stands_for, strict=True))
    return sums | {"scales": _exponents(q, ends)}


def _exponents(q: BlockScaled, ends: Tensor | None) -> Tensor:
    """[E, BINS]: how many block scales of each group have each exponent; NaN and zero have none, and blocks that only
    fill up a group's room are none."""
    scale = decode_scale(q)
    real = (scale > 0) & (scale < torch.inf)
    _, exponent = torch.frexp(torch.where(real, scale, 1.0))  # of a mantissa from a half to one
    group, groups = _groups_of(q, scale, ends)
    place = group * BINS + (exponent - (LOWEST + 1)).clamp(0, BINS - 1)
    counts = torch.zeros((groups + 1) * BINS, dtype=torch.int64, device=scale.device)
    counts.scatter_add_(0, place.long().flatten(), real.long().flatten())
    return counts.view(groups + 1, BINS)[:groups].double()


def _groups_of(q: BlockScaled, scale: Tensor, ends: Tensor | None) -> tuple[Tensor | int, int]:
    """The group of each scale [..., row tiles, blocks], one more than there are where it has none; and how many."""
    if scale.dim() == 3:
        return torch.arange(scale.shape[0], device=scale.device)[:, None, None].expand_as(scale), scale.shape[0]
    if ends is None:
        return 0, 1
    offs, groups = ends.to(torch.int64), ends.shape[0]
    if not q.group_align:
        group, _ = locate(torch.arange(scale.shape[0], device=scale.device) * q.spec.block[0], offs)
        return group[:, None].expand_as(scale), groups
    group, inside = locate(torch.arange(scale.shape[1], device=scale.device) * q.spec.block[1], padded_ends(offs))
    sizes = torch.cat((torch.diff(offs, prepend=offs.new_zeros(1)), offs.new_zeros(1)))
    return torch.where(inside < sizes[group], group, groups)[None, :].expand_as(scale), groups


# ---- products --------------------------------------------------------------------------------------------------------


def _of_products(
    recipe: Any, seen: Seen, weight: Tensor, pairs: dict[str, tuple[Any, Any]], groups: Groups | None
) -> Sums:
    """signal and noise of each product in low precision, those of the backward where there was one, and `damage`: the
    squared effect of each row's noise on the loss, to first order."""
    x, dy = seen.x, seen.dy
    # torch's grouped product in anything but bf16 asks the host for sizes, and bf16's own rounding is far below
    kind = torch.float32 if groups is None else torch.bfloat16 if x.is_cuda else x.dtype
    high_x, high_weight = x.to(kind), weight.to(kind)
    (x_row, x_col), (w_row, w_col) = pairs["x"], pairs["w"]
    low: dict[str, Any] = {"fprop": lambda: fprop(x, weight, None, x_row, w_row, x.dtype, groups)}
    exact: dict[str, Any] = {"fprop": lambda: fprop(high_x, high_weight, None, None, None, kind, groups)}
    if dy is not None:
        high_dy, (dy_row, dy_col) = dy.to(kind), pairs["dy"]
        low["dgrad"] = lambda: dgrad(dy, dy_row, weight, w_col, x.dtype, groups)
        low["wgrad"] = lambda: wgrad(dy, dy_col, x, x_col, weight.dtype, None, groups)
        exact["dgrad"] = lambda: dgrad(high_dy, None, high_weight, None, kind, groups)
        exact["wgrad"] = lambda: wgrad(high_dy, None, high_x, None, kind, None, groups)
    sums: Sums = {}
    for product in PRODUCTS:
        if getattr(recipe, product) is None or product not in low:
            continue
        value, reference = low[product](), exact[product]()
        noise, ends = value.float() - reference.float(), seen.offs if product != "wgrad" else None
        sums[f"{product}.signal"] = energy(reference, ends) * seen.stands_for
        sums[f"{product}.noise"] = energy(noise, ends) * seen.stands_for
        if product == "fprop" and dy is not None:
            effect = (dy.double() * noise.double()).sum(-1, keepdim=True)
            sums["damage"] = energy(effect, ends) * seen.stands_for
    return sums


# ---- sums ------------------------------------------------------------------------------------------------------------


def energy(x: Tensor, offs: Tensor | None = None) -> Tensor:
    """Squares summed by group, [E] in fp64; nothing of that width is kept for each value."""
    if x.dim() == 3:
        return torch.linalg.vector_norm(x, dim=(-1, -2), dtype=torch.float64).square()
    if offs is None:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square().reshape(1)
    return _summed(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64).square(), offs)


def _summed(x: Tensor, offs: Tensor | None) -> Tensor:
    """[E] in fp64: of rows [M, K] by their groups, of weights [E, N, K], or of a matrix as a whole."""
    if x.dim() == 3:
        return x.sum((-1, -2), dtype=torch.float64)
    if offs is None:
        return x.sum(dtype=torch.float64).reshape(1)
    group, _ = locate(torch.arange(x.shape[0], device=x.device), offs.to(torch.int64))
    total = torch.zeros(offs.shape[0] + 1, dtype=torch.float64, device=x.device)
    return total.index_add(0, group, x.sum(-1, dtype=torch.float64))[:-1]


def _sizes(x: Tensor, offs: Tensor | None) -> Tensor:
    """[E] in fp64: how many values of x are of each group."""
    if offs is not None:
        return torch.diff(offs, prepend=offs.new_zeros(1)).double() * x.shape[-1]
    groups = x.shape[0] if x.dim() == 3 else 1
    return torch.full((groups,), x.numel() / max(1, groups), dtype=torch.float64, device=x.device)
