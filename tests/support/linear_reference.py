"""What `linear` is compared with: fake quantisation in fp64 and the public operators one by one; who counts them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.autograd import RECIPES, Operand, Product, Recipe, get_recipe, linear
from blockscale.formats.stochastic import ROLES
from support.products import gaussian

LOW = [name for name, recipe in RECIPES.items() if recipe.is_quantized]
# no two roles alike, so that none can be taken for another
MIXED = Recipe(
    "mixed",
    fprop=Product(Operand("mxfp8_e4m3"), Operand("mxfp6_e2m3")),
    dgrad=Product(Operand("mxfp8_e5m2"), Operand("mxfp6_e3m2")),
    wgrad=Product(Operand("mxfp4"), Operand("mxfp8_e4m3", "floor")),
)
VARIANTS: dict[str, bs.Recipe] = {name: get_recipe(name) for name in LOW} | {
    "mxfp8 by 128x128": get_recipe("mxfp8").with_weights("mxfp8_e4m3_128x128"),
    "fp8_blockwise keeps source": get_recipe("fp8_blockwise").replace(saves="source"),
    "fp8_blockwise twice": get_recipe("fp8_blockwise").replace(weight_cast="twice"),
    "mixed": MIXED,
    "mixed keeps source twice": MIXED.replace(saves="source", weight_cast="twice"),
    "nvfp4 keeps source twice": get_recipe("nvfp4").replace(saves="source", weight_cast="twice"),
}
NAME = "layers.0.proj"


def drawn(recipe: str | bs.Recipe, device: torch.device | str = "cpu") -> bs.Stochastic | None:
    """What a layer draws from, if it does."""
    return bs.Stochastic(bs.rng_state(5, 2, device), NAME) if get_recipe(recipe).stochastic else None


class Problem:
    """Inputs of one call, made anew with the same values for every way to compute it."""

    def __init__(
        self,
        m: int | tuple[int, ...],
        n: int,
        k: int,
        *,
        bias: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ):
        lead = (m,) if isinstance(m, int) else m
        self.x = gaussian(*lead, k, seed=1).to(device, dtype).requires_grad_()
        self.weight = (gaussian(n, k, seed=2) / math.sqrt(k)).to(device, dtype).requires_grad_()
        self.bias = gaussian(n, seed=3).to(device, dtype).requires_grad_() if bias else None
        self.dy = gaussian(*lead, n, seed=4).to(device, dtype)

    def leaves(self) -> list[Tensor]:
        return [each for each in (self.x, self.weight, self.bias) if each is not None]

    def grads(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves()]

    def forward(self, recipe: str | bs.Recipe, **named: Any) -> Tensor:
        named = {"rounding": drawn(recipe, self.x.device)} | named
        return linear(self.x, self.weight, self.bias, recipe, **named)

    def run(self, recipe: str | bs.Recipe, **named: Any) -> list[Tensor | None]:
        """y and the gradients of all leaves."""
        y = self.forward(recipe, **named)
        y.backward(self.dy)
        return [y.detach(), *self.grads()]


# ---- fake quantisation ---------------------------------------------------------------------------------------------

FakeCast = Callable[[Tensor, int], Tensor]


def identity(x: Tensor, axis: int) -> Tensor:
    return x


def fake_casts(recipe: bs.Recipe, dtype: torch.dtype) -> dict[str, FakeCast]:
    """fp64 -> fp64 for each role: cast from `dtype` and decoded; rotated operands stay so, as both sides of a product
    are."""

    def fake(x: Tensor, axis: int, *, operand: Any, role: str) -> Tensor:
        q = bs.quantize(x.to(dtype), operand.spec(role, drawn(recipe)), axis=axis)
        return bs.dequantize(q, torch.float32, rotated=True).double()

    found = {role: recipe.operand(role) for role in ROLES}
    return {
        role: identity if operand is None else functools.partial(fake, operand=operand, role=role)
        for role, operand in found.items()
    }


class FakeLinear(torch.autograd.Function):
    """x [M, K] @ weight [N, K].mT + bias in fp64, each operand of the three products replaced by what its role makes of
    it; gradients pass straight through the casts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, casts: Mapping[str, FakeCast]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.casts = casts
        y = casts["fprop_x"](x, -1) @ casts["fprop_w"](weight, -1).mT
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dx = ctx.casts["dgrad_dy"](dy, -1) @ ctx.casts["dgrad_w"](weight, -2)
        dw = ctx.casts["wgrad_dy"](dy, -2).mT @ ctx.casts["wgrad_x"](x, -2)
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None


def by_fake_casts(p: Problem, casts: Mapping[str, FakeCast]) -> list[Tensor | None]:
    """y, dX, dW and the bias's gradient in fp64."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in p.leaves()]
    x, weight, bias = (*leaves, None)[:3]
    y = FakeLinear.apply(x, weight, bias, casts)
    y.backward(p.dy.double())  # pyright: ignore[reportOptionalMemberAccess]
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # pyright: ignore[reportOptionalMemberAccess]


# ---- the public operators ------------------------------------------------------------------------------------------


def by_operators(p: Problem, recipe: bs.Recipe) -> list[Tensor]:
    """y, dX, dW and the bias's gradient of public operators alone, products of no format by torch."""
    device, dtype = p.x.device, p.x.dtype
    x_MK, w_NK, dy_MN = (t.detach().reshape(-1, t.shape[-1]) for t in (p.x, p.weight, p.dy))
    bias = None if p.bias is None else p.bias.detach()

    def spec(role: str) -> bs.CastSpec | None:
        operand = recipe.operand(role)
        return None if operand is None else operand.spec(role, drawn(recipe, device))

    def both(x: Tensor, row: str, col: str) -> list[bs.BlockScaled | None]:
        specs = spec(row), spec(col)
        if specs[0] is not None and specs[1] is not None:
            return list(bs.quantize_both(x, specs[0], specs[1]))
        axes = zip(specs, (-1, -2), strict=True)
        return [None if each is None else bs.quantize(x, each, axis=axis) for each, axis in axes]

    (x_row, x_col), (w_row, w_col) = both(x_MK, "fprop_x", "wgrad_x"), both(w_NK, "fprop_w", "dgrad_w")
    dy_row, dy_col = both(dy_MN, "dgrad_dy", "wgrad_dy")
    if recipe.dgrad is None or recipe.wgrad is None:
        db = dy_MN.sum(0, dtype=torch.float32)
    else:
        db = bs.quantize_both(dy_MN, spec("dgrad_dy"), spec("wgrad_dy"), colsum=True)[2]  # pyright: ignore[reportArgumentType]
    if x_row is None or w_row is None:
        y = torch.nn.functional.linear(x_MK, w_NK, bias)
    else:
        y = bs.scaled_mm(x_row, w_row, dtype, bias=bias)
    dx = dy_MN @ w_NK if dy_row is None or w_col is None else bs.scaled_mm(dy_row, w_col.mT, dtype)
    dw = dy_MN.mT @ x_MK if dy_col is None or x_col is None else bs.scaled_mm(dy_col.mT, x_col.mT, dtype)
    found = [y.view(*p.x.shape[:-1], y.shape[-1]), dx.view(p.x.shape), dw]
    return found if bias is None else [*found, db.to(bias.dtype)]


# ---- how good, and how much ----------------------------------------------------------------------------------------


def sqnr(got: Tensor | None, want: Tensor | None) -> float:
    """Signal to noise in dB."""
    assert got is not None
    assert want is not None
    wide = want.detach().double()
    noise = (got.detach().double() - wide).square().sum()
    return math.inf if noise == 0 else float(10 * torch.log10(wide.square().sum() / noise))


class Calls(TorchDispatchMode):
    """Counts our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "blockscale":
            self.found[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def saved_bytes(function: Callable[[], Tensor], *known: Tensor) -> int:
    """Bytes that wait for the backward, without these tensors and without counting storage twice."""
    apart = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function()
    assert y.requires_grad
    return sum(kept.values())
