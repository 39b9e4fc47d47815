"""What layers of experts are compared with: fake quantisation in fp64 expert by expert, and the public operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from blockscale.autograd import get_recipe, grouped_linear, grouped_swiglu_mlp
from blockscale.casts import activation as exact
from blockscale.formats.stochastic import ROLES
from support.products import gaussian, offsets

NAMES = ("mlp.experts.gate_up", "mlp.experts.down")
# sizes of groups: none but one, every other one empty, one row each, around blocks, everything in one, nothing at all
PATTERNS = {
    "all empty but one": (0, 0, 70, 0),
    "alternating": (33, 0, 1, 0, 40),
    "one row each": (1, 1, 1, 1),
    "around blocks": (31, 129, 0, 2),
    "descending": (64, 32, 16, 3),
    "nothing": (0, 0, 0),
    "one expert": (45,),
}


def drawn(recipe: str | bs.Recipe, layer: int = 0, device: torch.device | str = "cpu") -> bs.Stochastic | None:
    return bs.Stochastic(bs.rng_state(5, 2, device), NAMES[layer]) if get_recipe(recipe).stochastic else None


def spans(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return list(pairwise(ends))


class Experts:
    """Inputs of one call, made anew with the same values for every way to compute it. rows: more than the groups have,
    by `loose`."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        k: int,
        h: int,
        d: int,
        *,
        bias: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        loose: int = 0,
        device: torch.device | str = "cpu",
    ):
        experts, m = len(sizes), sum(sizes) + loose
        self.sizes, self.offs, self.device = sizes, offsets(sizes, device), device

        def leaf(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
            return (gaussian(*shape, seed=seed) * scale).to(device, dtype).requires_grad_()

        self.x = leaf(m, k, seed=1)
        self.gate_up = leaf(experts, 2 * h, k, seed=2, scale=1 / math.sqrt(k))
        self.down = leaf(experts, d, h, seed=3, scale=1 / math.sqrt(h))
        self.biases: list[Tensor | None] = [None, None]
        if bias:
            self.biases = [leaf(experts, n, seed=n, scale=0.25) for n in (2 * h, d)]
        self.dy, self.dh = (leaf(m, n, seed=seed).detach() for n, seed in ((d, 4), (2 * h, 5)))

    def leaves(self) -> list[Tensor]:
        return [each for each in (self.x, self.gate_up, self.down, *self.biases) if each is not None]

    def grads(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves()]

    def linear(self, recipe: str | bs.Recipe, **named: Any) -> list[Tensor | None]:
        """The first layer alone: y, dX, dW and the bias's gradient."""
        named = {"rounding": drawn(recipe, 0, self.device)} | named
        y = grouped_linear(self.x, self.gate_up, self.offs, self.biases[0], recipe, **named)
        y.backward(self.dh)
        bias = self.biases[0]
        return [y.detach(), self.x.grad, self.gate_up.grad, *([] if bias is None else [bias.grad])]

    def run(self, recipe: str | bs.Recipe, **named: Any) -> list[Tensor | None]:
        """y and the gradients of all leaves."""
        named = {"roundings": tuple(drawn(recipe, layer, self.device) for layer in (0, 1))} | named
        y = grouped_swiglu_mlp(self.x, self.gate_up, self.down, self.offs, *self.biases, recipe=recipe, **named)
        y.backward(self.dy)
        return [y.detach(), *self.grads()]


# ---- the public operators ------------------------------------------------------------------------------------------


def spec(recipe: bs.Recipe, role: str, layer: int = 0) -> bs.CastSpec:
    operand = recipe.operand(role)
    assert operand is not None
    return operand.spec(role, drawn(recipe, layer), grouped=True)


def linear_by_operators(p: Experts, recipe: bs.Recipe) -> list[Tensor]:
    """y, dX, dW and the bias's gradient of the first layer, of public operators alone."""
    x, weight, dy, offs = p.x.detach(), p.gate_up.detach(), p.dh, p.offs
    x_row, x_col = bs.quantize_both(x, spec(recipe, "fprop_x"), spec(recipe, "wgrad_x"), offs=offs)
    w_row, w_col = bs.quantize_both(weight, spec(recipe, "fprop_w"), spec(recipe, "dgrad_w"))
    roles = spec(recipe, "dgrad_dy"), spec(recipe, "wgrad_dy")
    dy_row, dy_col, db = bs.quantize_both(dy, *roles, offs=offs, colsum=True)
    bias = p.biases[0]
    y = bs.scaled_grouped_mm(x_row, w_row, offs, x.dtype, bias=None if bias is None else bias.detach())
    dx = bs.scaled_grouped_mm(dy_row, w_col.mT, offs, x.dtype)
    dw = bs.scaled_grouped_mm(dy_col.mT, x_col.mT, offs, x.dtype)
    return [y, dx, dw, *([] if bias is None else [db.to(bias.dtype)])]


def mlp_by_operators(p: Experts, recipe: bs.Recipe) -> list[Tensor]:
    """y, dX, both weight gradients and the second bias's, of public operators alone."""
    x, first, second, dy, offs = p.x.detach(), p.gate_up.detach(), p.down.detach(), p.dy, p.offs
    biases = [None if bias is None else bias.detach() for bias in p.biases]
    x_row, x_col = bs.quantize_both(x, spec(recipe, "fprop_x"), spec(recipe, "wgrad_x"), offs=offs)
    first_row, first_col = bs.quantize_both(first, spec(recipe, "fprop_w"), spec(recipe, "dgrad_w"))
    second_row, second_col = bs.quantize_both(second, spec(recipe, "fprop_w", 1), spec(recipe, "dgrad_w", 1))
    gate_up = bs.scaled_grouped_mm(x_row, first_row, offs, x.dtype, bias=biases[0])
    hidden = bs.swiglu_quantize(gate_up, spec(recipe, "fprop_x", 1), offs=offs)
    y = bs.scaled_grouped_mm(hidden, second_row, offs, x.dtype, bias=biases[1])
    roles = spec(recipe, "dgrad_dy", 1), spec(recipe, "wgrad_dy", 1)
    dy_row, dy_col, db = bs.quantize_both(dy, *roles, offs=offs, colsum=True)
    dh = bs.scaled_grouped_mm(dy_row, second_col.mT, offs, x.dtype)
    row, col, hidden_col = bs.swiglu_backward_quantize_both(
        dh, gate_up, spec(recipe, "dgrad_dy"), spec(recipe, "wgrad_dy"), hidden=spec(recipe, "wgrad_x", 1), offs=offs
    )
    dx = bs.scaled_grouped_mm(row, first_col.mT, offs, x.dtype)
    dw_first = bs.scaled_grouped_mm(col.mT, x_col.mT, offs, x.dtype)
    return [y, dx, dw_first, bs.scaled_grouped_mm(dy_col.mT, hidden_col.mT, offs, x.dtype), db.to(x.dtype)]


# ---- fake quantisation ---------------------------------------------------------------------------------------------

Fake = Callable[[Tensor, int], Tensor]


class FakeGrouped(torch.autograd.Function):
    """x [M, K] by the weights [E, N, K] of its groups in fp64, expert by expert, each operand of the three products
    replaced by what its role makes of it; gradients pass straight through the casts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], casts: dict[str, Fake]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.casts = sizes, casts
        y = [
            casts["fprop_x"](x[low:high], -1) @ casts["fprop_w"](weight[e], -1).mT + bias[e]
            for e, (low, high) in enumerate(spans(sizes))
        ]
        return torch.cat(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), casts, dx, dw, db = ctx.saved_tensors, ctx.casts, [], [], []
        for e, (low, high) in enumerate(spans(ctx.sizes)):
            grad = dy[low:high]
            dx.append(casts["dgrad_dy"](grad, -1) @ casts["dgrad_w"](weight[e], -2))
            dw.append(casts["wgrad_dy"](grad, -2).mT @ casts["wgrad_x"](x[low:high], -2))
            db.append(grad.sum(0))
        return torch.cat(dx), torch.stack(dw), torch.stack(db), None, None


def fake_casts(recipe: bs.Recipe | None, dtype: torch.dtype) -> dict[str, Fake]:
    """fp64 -> fp64 for each role, of one expert's rows; None: nothing is cast. Codes to nearest: none are drawn."""

    def make(role: str) -> Fake:
        operand = None if recipe is None else recipe.operand(role)
        if operand is None:
            return lambda x, axis: x

        def fake(x: Tensor, axis: int) -> Tensor:
            if x.shape[0] == 0:
                return x
            q = bs.quantize(x.to(dtype), operand.spec(role, None), axis=axis)
            return bs.dequantize(q, torch.float32, rotated=True).double()

        return fake

    return {role: make(role) for role in ROLES}


def mlp_by_fake_casts(p: Experts, recipe: bs.Recipe | None) -> list[Tensor | None]:
    """y and the gradients of all leaves in fp64; nothing is rounded in between but by the casts."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in p.leaves()]
    x, first, second, *biases = leaves
    if not biases:
        biases = [weight.new_zeros(weight.shape[:2]) for weight in (first, second)]
    casts = fake_casts(recipe, p.x.dtype)
    gate, up = FakeGrouped.apply(x, first, biases[0], p.sizes, casts).chunk(2, -1)  # pyright: ignore[reportOptionalMemberAccess]
    y = FakeGrouped.apply(torch.nn.functional.silu(gate) * up, second, biases[1], p.sizes, casts)
    y.backward(p.dy.double())  # pyright: ignore[reportOptionalMemberAccess]
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # pyright: ignore[reportOptionalMemberAccess]


def linear_by_fake_casts(p: Experts, recipe: bs.Recipe | None) -> list[Tensor | None]:
    x, weight, bias = (
        leaf.detach().double().requires_grad_() for leaf in (p.x, p.gate_up, p.biases[0]) if leaf is not None
    )
    y = FakeGrouped.apply(x, weight, bias, p.sizes, fake_casts(recipe, p.x.dtype))
    y.backward(p.dh.double())  # pyright: ignore[reportOptionalMemberAccess]
    return [y.detach(), x.grad, weight.grad, bias.grad]  # pyright: ignore[reportOptionalMemberAccess]


class ExactSwiGLU(torch.autograd.Function):
    """The activation as section 16 of the contract has it, unfused."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return exact.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return exact.swiglu_backward(grad, *ctx.saved_tensors)
