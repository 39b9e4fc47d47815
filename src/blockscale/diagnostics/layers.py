"""What a recipe does to each layer of a model, on one batch: noise of its operands and of its three products.

Layers are watched by hooks through one forward and backward; then what each saw is cast as its recipe casts it, the
casts are decoded, and products of decoded operands are compared with those of the tensors themselves. This is the
noise that formats make; what a kernel adds by the order of its sums is far below it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autograd.recipe import PRODUCTS, Recipe
from ..casts import dequantize, quantize
from ..formats.stochastic import Stochastic
from ..nn import GroupedLinear, Linear
from .quality import measure, sqnr_db

# rows of an activation and a gradient that are looked at, evenly spread; multiples of every block
ROWS = 512
_OPERANDS = {"x": "fprop_x", "w": "fprop_w", "dy": "dgrad_dy"}


@dataclass(frozen=True)
class LayerNumerics:
    """One layer.  x, w, dy: decibels of its operands in the forward and in dgrad.  fprop, dgrad, wgrad: of its
    products.  clipped, underflow: the largest share among its operands.  None: not in low precision, or not seen; of
    experts the weights alone are measured."""

    layer: str
    x: float | None = None
    w: float | None = None
    dy: float | None = None
    fprop: float | None = None
    dgrad: float | None = None
    wgrad: float | None = None
    clipped: float = 0.0
    underflow: float = 0.0


def layer_numerics(model: torch.nn.Module, loss: Callable[[], Tensor]) -> list[LayerNumerics]:
    """Measure every layer in low precision.  loss: runs the batch. Gradients of parameters are left as they were.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))
    >>> _ = bs.quantize_(model, "mxfp8", filter_fn=lambda module, name: True)
    >>> found = layer_numerics(model, lambda: model(torch.randn(64, 128)).square().mean())
    >>> [each.layer for each in found], 25 < found[0].fprop < 35
    (['0', '2'], True)
    """
    layers = {name: each for name, each in model.named_modules() if _is_low(each)}
    seen: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    with ExitStack() as stack, torch.enable_grad():
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(_watch(seen[name])).remove)
        loss().backward()
    for parameter, gradient in kept:
        parameter.grad = gradient
    with torch.no_grad():
        return [_measured(name, layer, seen[name]) for name, layer in layers.items()]


def _is_low(module: torch.nn.Module) -> bool:
    return isinstance(module, Linear | GroupedLinear) and module.recipe_now.is_low


def _watch(seen: dict[str, Tensor]) -> Callable[..., None]:
    def look(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        x = inputs[0]
        if isinstance(module, GroupedLinear):
            return
        seen["x"] = getattr(x, "source", x).detach()
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.__setitem__("dy", gradient.detach()))

    return look


def _measured(name: str, layer: Any, seen: dict[str, Tensor]) -> LayerNumerics:
    recipe: Recipe = layer.recipe_now
    rounding: Stochastic | None = layer.given()[0]
    # what a weight meets is bf16, whatever it is kept in
    weight = layer.weight.detach().flatten(0, -2).to(torch.bfloat16)
    tensors = {"w": weight} | {key: _sampled(value) for key, value in seen.items()}
    figures: dict[str, Any] = {"clipped": 0.0, "underflow": 0.0}
    for key, role in _OPERANDS.items():
        operand = recipe.operand(role)
        if operand is None or key not in tensors:
            continue
        q = quantize(tensors[key], operand.format, scale_rule=operand.scale_rule)
        found = measure(tensors[key], q)
        figures[key] = float(found.sqnr_db)
        for lost in ("clipped", "underflow"):
            figures[lost] = max(figures[lost], float(getattr(found, lost)))
    for product in PRODUCTS:
        figures[product] = _product_db(recipe, product, tensors, rounding)
    return LayerNumerics(name, **figures)


def _sampled(x: Tensor) -> Tensor:
    """[M, K] of at most ROWS rows; the same rows of an input and of its gradient."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[:: max(1, rows.shape[0] // ROWS)][:ROWS].contiguous()


def _product_db(recipe: Recipe, product: str, tensors: dict[str, Tensor], rounding: Stochastic | None) -> float | None:
    """Of one product: operands along its contraction, cast and decoded, against themselves."""
    if getattr(recipe, product) is None or not {"x", "dy"} <= tensors.keys():
        return None
    x, w, dy = tensors["x"], tensors["w"], tensors["dy"]
    pairs = {"fprop": (x, w), "dgrad": (dy, w.mT), "wgrad": (dy.mT, x.mT)}
    roles = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[product]
    exact: list[Tensor] = []
    decoded: list[Tensor] = []
    for tensor, letter in zip(pairs[product], roles, strict=True):
        role = f"{product}_{letter}"
        operand = recipe.operand(role)
        assert operand is not None
        spec = operand.spec(role, rounding)
        q = quantize(tensor.contiguous(), spec)
        exact.append(tensor.double())
        decoded.append(dequantize(q, torch.float32).double())
    return float(sqnr_db(exact[0] @ exact[1].mT, decoded[0] @ decoded[1].mT))
