"""What a recipe does to one layer's call, as sums on its device: nothing here waits for the host.

A layer's own casts make the operands and its own products multiply them; both are compared with the same in high
precision. Every sum comes by group, [E]: one for each expert, and one in all for a dense layer. `layers.py` makes
shares and decibels of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autograd.operands import Casts, Groups
from ..autograd.recipe import PRODUCTS
from ..autograd.work import dgrad, fprop, wgrad
from ..casts import dequantize
from ..formats.decoding import decode_scale
from ..formats.layout import locate
from ..formats.tensor import BlockScaled
from .quality import is_clipped

# exponents of scales that have a bin; others are counted in the outermost
LOWEST, HIGHEST = -64, 63

Sums = dict[str, Tensor]


@dataclass
class Seen:
    """Rows of one call that are looked at.  x: [M, K].  dy: [M, N], of the same rows; None before the backward.  offs:
    ends of experts among them.  load: rows of each expert in the whole call [E].  share: how much of it was taken.
    has_gradient: one will come back to this call."""

    x: Tensor
    load: Tensor
    share: float
    offs: Tensor | None = None
    dy: Tensor | None = None
    has_gradient: bool = False


def layer_sums(layer: Any, seen: Seen) -> Sums:
    """All sums of a call of a `Linear` or `GroupedLinear`, by its recipe of the present step."""
    weight: Tensor = layer.weight.detach()
    groups = None if seen.offs is None else Groups(seen.offs)
    casts = Casts(layer.recipe_now, layer.given()[0], groups)
    pairs = {"x": casts.both(seen.x, "fprop_x", "wgrad_x"), "w": casts.both(weight, "fprop_w", "dgrad_w")}
    if seen.dy is not None:
        pairs["dy"] = casts.both(seen.dy, "dgrad_dy", "wgrad_dy")
    sources = {"x": seen.x, "w": weight, "dy": seen.dy}
    sums: Sums = {"load": seen.load.double()}
    for letter, first, second in (("x", "fprop", "wgrad"), ("w", "fprop", "dgrad"), ("dy", "dgrad", "wgrad")):
        for product, q in zip((first, second), pairs.get(letter, ()), strict=False):
            if q is not None:
                source = sources[letter]
                assert source is not None
                sums |= {f"{product}_{letter}.{key}": value for key, value in _of_cast(source, q, seen.offs).items()}
    if seen.dy is not None:
        sums |= _of_products(layer.recipe_now, seen, weight, pairs, groups)
    if layer.weight.grad is not None:
        sums["gradient"] = torch.linalg.vector_norm(layer.weight.grad, dtype=torch.float32).double().reshape(1)
    return sums


# ---- casts -----------------------------------------------------------------------------------------------------------


def _of_cast(source: Tensor, q: BlockScaled, offs: Tensor | None) -> Sums:
    """signal, noise: energies.  values, nonzero, clipped, underflow: counts, the last two only where values stay in
    their places, which a rotation does not leave them in.  scales: counts by exponent."""
    ends = offs if source.dim() == 2 else None
    needs_ends = q.group_align or (q.global_scale is not None and q.global_scale.dim() == 1 and source.dim() == 2)
    told = ends if needs_ends else None
    decoded = dequantize(q, torch.float32, offs=told)
    wide = source.float()
    sums = {"signal": energy(wide, ends), "noise": energy(wide - decoded, ends), "scales": _exponents(q)}
    if q.hadamard is None:
        nonzero = wide != 0
        sums |= {
            "values": _summed(torch.ones_like(wide), ends),
            "nonzero": _summed(nonzero, ends),
            "clipped": _summed(is_clipped(wide, q, told), ends),
            "underflow": _summed(nonzero & (decoded == 0), ends),
        }
    return sums


def _exponents(q: BlockScaled) -> Tensor:
    """How many block scales have each exponent, from LOWEST to HIGHEST; NaN and zero have none."""
    scale = decode_scale(q).flatten()
    counts = scale.new_zeros(HIGHEST - LOWEST + 1, dtype=torch.int64)
    real = (scale > 0) & scale.isfinite()
    _, exponent = torch.frexp(torch.where(real, scale, 1.0))  # of a mantissa from a half to one
    place = (exponent - 1).clamp(LOWEST, HIGHEST) - LOWEST
    return counts.scatter_add(0, place.long(), real.long()).double()


# ---- products --------------------------------------------------------------------------------------------------------


def _of_products(
    recipe: Any, seen: Seen, weight: Tensor, pairs: dict[str, tuple[Any, Any]], groups: Groups | None
) -> Sums:
    """signal and noise of each product in low precision, and `damage`: the squared effect of each row's noise on the
    loss, to first order."""
    x, dy, offs = seen.x, seen.dy, seen.offs
    assert dy is not None
    (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = pairs["x"], pairs["w"], pairs["dy"]
    # torch's grouped product in anything but bf16 asks the host for sizes, and bf16's own rounding is far below
    kind = torch.float32 if groups is None else x.dtype
    high = x.to(kind), weight.to(kind), dy.to(kind)
    low = {
        "fprop": lambda: fprop(x, weight, None, x_row, w_row, x.dtype, groups),
        "dgrad": lambda: dgrad(dy, dy_row, weight, w_col, x.dtype, groups),
        "wgrad": lambda: wgrad(dy, dy_col, x, x_col, weight.dtype, None, groups),
    }
    exact = {
        "fprop": lambda: fprop(high[0], high[1], None, None, None, kind, groups),
        "dgrad": lambda: dgrad(high[2], None, high[1], None, kind, groups),
        "wgrad": lambda: wgrad(high[2], None, high[0], None, kind, None, groups),
    }
    sums: Sums = {}
    for product in PRODUCTS:
        if getattr(recipe, product) is None:
            continue
        value, reference = low[product](), exact[product]()
        assert value is not None
        assert reference is not None
        noise, ends = value.float() - reference.float(), offs if product != "wgrad" else None
        sums[f"{product}.signal"], sums[f"{product}.noise"] = energy(reference, ends), energy(noise, ends)
        if product == "fprop":
            effect = (dy.double() * noise.double()).sum(-1, keepdim=True)
            sums["damage"] = energy(effect, ends)
    return sums


# ---- sums ------------------------------------------------------------------------------------------------------------


def energy(x: Tensor, offs: Tensor | None = None) -> Tensor:
    """Squares summed by group."""
    return _summed(x.double().square(), offs)


def _summed(x: Tensor, offs: Tensor | None) -> Tensor:
    """[E] in fp64: of rows [M, K] by their groups, of weights [E, N, K], or of a matrix as a whole."""
    if x.dim() == 3:
        return x.double().sum((-1, -2))
    if offs is None:
        return x.double().sum().reshape(1)
    group, _ = locate(torch.arange(x.shape[0], device=x.device), offs.to(torch.int64))
    total = torch.zeros(offs.shape[0] + 1, dtype=torch.float64, device=x.device)
    return total.index_add(0, group, x.double().sum(-1))[:-1]
