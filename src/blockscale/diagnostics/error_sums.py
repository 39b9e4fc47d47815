"""Quantization error of the calls of one layer, as sums on its device; no host sync.

The layer's own casts and products run once more and are compared with unquantized ones. Every sum is per group, [E]:
one per expert, E = 1 for a dense layer. `layers.py` turns sums into shares and decibels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..autograd.linear_plan import dgrad, fprop, wgrad
from ..autograd.operands import Casts
from ..autograd.recipe import PRODUCTS
from ..casts import dequantize
from ..formats.layout import locate
from ..formats.tensor import BlockScaled
from ..grouped import Routing
from .quality import is_clipped

# values of expert weights that are decoded at a time
_AT_ONCE = 2**26

Sums = dict[str, Tensor]


@dataclass
class CapturedCall:
    """Sampled rows of one call of a layer.

    x: [M, K].  load: rows per group of the whole call, [E].  row_weight: rows of the call per sampled row, by group,
    [E].  offs: group ends among the sampled rows.  dy: [M, N] of the same rows; None before the backward.
    has_gradient: the output requires a gradient.
    """

    x: Tensor
    load: Tensor
    row_weight: Tensor
    offs: Tensor | None = None
    dy: Tensor | None = None
    has_gradient: bool = False


def layer_sums(layer: Any, calls: Sequence[CapturedCall]) -> Sums:
    """All sums of the calls of a `Linear` or `GroupedLinear`, with its recipe of the current step."""
    weight = _full_tensor(layer.weight.detach())
    casts = Casts(layer.recipe_now, layer.call_state()[0])
    weight_operands = casts.both(weight, "fprop_w", "dgrad_w")
    sums = _cast_sums("w", weight, weight_operands, None)
    for call in calls:
        groups = None if call.offs is None else Routing(call.offs)
        more = _call_sums(casts.routed(groups), call, weight, weight_operands)
        sums |= {key: sums[key] + value if key in sums else value for key, value in more.items()}
    if layer.recipe_now.fprop is None and any(call.dy is not None for call in calls):
        sums["damage"] = torch.zeros_like(sums["load"])
    if layer.weight.grad is not None:
        norm = torch.linalg.vector_norm(layer.weight.grad, dtype=torch.float32)
        sums["gradient"] = _full_tensor(norm).double().reshape(1)
    return sums


def _full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or a DTensor gathered from all ranks: a collective."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _call_sums(casts: Casts, call: CapturedCall, weight: Tensor, weight_operands: tuple[Any, Any]) -> Sums:
    pairs = {"x": casts.both(call.x, "fprop_x", "wgrad_x"), "w": weight_operands}
    sums: Sums = {"load": call.load.double()} | _cast_sums("x", call.x, pairs["x"], call)
    if call.dy is not None:
        pairs["dy"] = casts.both(call.dy, "dgrad_dy", "wgrad_dy")
        sums |= _cast_sums("dy", call.dy, pairs["dy"], call)
    return sums | _product_sums(casts.recipe, call, weight, pairs, casts.routing)


# ---- casts -----------------------------------------------------------------------------------------------------------

_PRODUCTS_OF = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}


def _cast_sums(letter: str, source: Tensor, pair: tuple[Any, Any], call: CapturedCall | None) -> Sums:
    """Sums of both casts of a tensor.  call: None for a weight."""
    sums: Sums = {}
    for product, q in zip(_PRODUCTS_OF[letter], pair, strict=True):
        if q is not None:
            parts = [_one_cast_sums(*part, call) for part in _parts(source, q)]
            whole = parts[0] if len(parts) == 1 else {key: torch.cat([each[key] for each in parts]) for key in parts[0]}
            sums |= {f"{product}_{letter}.{key}": value for key, value in whole.items()}
    return sums


def _parts(source: Tensor, q: BlockScaled) -> Iterator[tuple[Tensor, BlockScaled]]:
    """A tensor and its cast; expert weights a few experts at a time, to limit the memory of decoded weights."""
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


def _one_cast_sums(source: Tensor, q: BlockScaled, call: CapturedCall | None) -> Sums:
    """Sums of one cast.

    signal, noise: energies.  values, nonzero, clipped, underflow: counts; absent for rotated operands, whose values are
    not in their places. All are scaled up to the whole call.
    """
    ends = None if call is None else call.offs
    needs_ends = q.group_align or (q.global_scale is not None and q.global_scale.dim() == 1 and source.dim() == 2)
    offs = ends if needs_ends else None
    decoded = dequantize(q, torch.float32, offs=offs)
    wide = source.float()
    sums = {"signal": energy(wide, ends), "noise": energy(wide - decoded, ends)}
    if q.hadamard is None:
        nonzero = wide != 0
        sums |= {
            "values": _sizes(wide, ends),
            "nonzero": _summed(nonzero, ends),
            "clipped": _summed(is_clipped(wide, q, offs), ends),
            "underflow": _summed(nonzero & (decoded == 0), ends),
        }
    return sums if call is None else {key: value * call.row_weight for key, value in sums.items()}


# ---- products --------------------------------------------------------------------------------------------------------


def _product_sums(
    recipe: Any, call: CapturedCall, weight: Tensor, pairs: dict[str, tuple[Any, Any]], groups: Routing | None
) -> Sums:
    """Signal and noise of each quantized product, dgrad and wgrad only after a backward, and `damage`: the squared
    first-order effect of each row's noise on the loss."""
    x, dy = call.x, call.dy
    # torch's grouped product syncs with the host in anything but bf16, whose own rounding error is far smaller
    kind = torch.float32 if groups is None else torch.bfloat16 if x.is_cuda else x.dtype
    high_x, high_weight = x.to(kind), weight.to(kind)
    (x_row, x_col), (w_row, w_col) = pairs["x"], pairs["w"]
    quantized: dict[str, Any] = {"fprop": lambda: fprop(x, weight, None, x_row, w_row, x.dtype, groups)}
    exact: dict[str, Any] = {"fprop": lambda: fprop(high_x, high_weight, None, None, None, kind, groups)}
    if dy is not None:
        high_dy, (dy_row, dy_col) = dy.to(kind), pairs["dy"]
        quantized["dgrad"] = lambda: dgrad(dy, dy_row, weight, w_col, x.dtype, groups)
        quantized["wgrad"] = lambda: wgrad(dy, dy_col, x, x_col, weight.dtype, None, groups)
        exact["dgrad"] = lambda: dgrad(high_dy, None, high_weight, None, kind, groups)
        exact["wgrad"] = lambda: wgrad(high_dy, None, high_x, None, kind, None, groups)
    sums: Sums = {}
    for product in PRODUCTS:
        if getattr(recipe, product) is None or product not in quantized:
            continue
        value, reference = quantized[product](), exact[product]()
        noise, ends = value.float() - reference.float(), call.offs if product != "wgrad" else None
        sums[f"{product}.signal"] = energy(reference, ends) * call.row_weight
        sums[f"{product}.noise"] = energy(noise, ends) * call.row_weight
        if product == "fprop" and dy is not None:
            effect = (dy.double() * noise.double()).sum(-1, keepdim=True)
            sums["damage"] = energy(effect, ends) * call.row_weight
    return sums


# ---- sums ------------------------------------------------------------------------------------------------------------


def energy(x: Tensor, offs: Tensor | None = None) -> Tensor:
    """Sum of squares per group, [E] in fp64, without an fp64 copy of x."""
    if x.dim() == 3:
        return torch.linalg.vector_norm(x, dim=(-1, -2), dtype=torch.float64).square()
    if offs is None:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square().reshape(1)
    return _summed(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64).square(), offs)


def _summed(x: Tensor, offs: Tensor | None) -> Tensor:
    """Sum per group, [E] in fp64: of rows [M, K] by group, of weights [E, N, K], or of a whole matrix (E = 1)."""
    if x.dim() == 3:
        return x.sum((-1, -2), dtype=torch.float64)
    if offs is None:
        return x.sum(dtype=torch.float64).reshape(1)
    group, _ = locate(torch.arange(x.shape[0], device=x.device), offs.to(torch.int64))
    total = torch.zeros(offs.shape[0] + 1, dtype=torch.float64, device=x.device)
    return total.index_add(0, group, x.sum(-1, dtype=torch.float64))[:-1]


def _sizes(x: Tensor, offs: Tensor | None) -> Tensor:
    """Number of values of x per group, [E] in fp64."""
    if offs is not None:
        return torch.diff(offs, prepend=offs.new_zeros(1)).double() * x.shape[-1]
    groups = x.shape[0] if x.dim() == 3 else 1
    return torch.full((groups,), x.numel() / max(1, groups), dtype=torch.float64, device=x.device)
