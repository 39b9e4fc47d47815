"""`swiglu_mlp` is the composition of public operators, byte for byte; saved tensors, skipped casts and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.autograd import get_recipe, linear, linear_plan, swiglu_mlp
from blockscale.casts import activation as exact
from blockscale.errors import DtypeError, OptionError, ShapeError
from blockscale.gemm import ACCUMULATOR_DTYPES
from support.helpers import first_of
from support.linear_reference import Calls, saved_bytes
from support.products import assert_same_bits, gaussian

QUANTIZED = ["fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
NAMES = ("mlp.gate_up", "mlp.down")
# no multiples of a block: M, K, H, D
ODD = (37, 72, 200, 56)


def roundings_of(recipe: str | bs.Recipe, device: torch.device | str = "cpu") -> tuple[bs.Stochastic | None, ...]:
    """Stochastic rounding of both layers."""
    if not get_recipe(recipe).stochastic:
        return None, None
    return tuple(bs.Stochastic(bs.rng_state(5, 2, device), name) for name in NAMES)


class Problem:
    """Inputs of one call, made anew with the same values for every way to compute it."""

    def __init__(self, m: int, k: int, h: int, d: int, *, bias: bool = True, dtype: torch.dtype = torch.bfloat16):
        scale = 1 / math.sqrt(k)
        self.x = gaussian(m, k, seed=1).to(dtype).requires_grad_()
        self.gate_up = (gaussian(2 * h, k, seed=2) * scale).to(dtype).requires_grad_()
        self.down = (gaussian(d, h, seed=3) * scale).to(dtype).requires_grad_()
        self.biases: list[Tensor | None] = [None, None]
        if bias:
            self.biases = [gaussian(n, seed=n).to(dtype).requires_grad_() for n in (2 * h, d)]
        self.dy = gaussian(m, d, seed=4).to(dtype)

    def leaves(self) -> list[Tensor]:
        return [each for each in (self.x, self.gate_up, self.down, *self.biases) if each is not None]

    def grads(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves()]

    def run(self, recipe: str | bs.Recipe, **named: Any) -> Tensor:
        named = {"roundings": roundings_of(recipe)} | named
        y = swiglu_mlp(self.x, self.gate_up, self.down, *self.biases, recipe=recipe, **named)
        y.backward(self.dy)
        return y


def by_operators(p: Problem, recipe: bs.Recipe) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, dx, both weight gradients and the second bias's, of public operators alone."""

    def cast(layer: int, role: str) -> bs.CastSpec:
        operand = recipe.operand(role)
        assert operand is not None
        return operand.spec(role, roundings_of(recipe)[layer])

    x, gate_up_weight, down_weight, dy = (t.detach() for t in (p.x, p.gate_up, p.down, p.dy))
    dtype = x.dtype
    x_row, x_col = bs.quantize_both(x, cast(0, "fprop_x"), cast(0, "wgrad_x"))
    first_row, first_col = bs.quantize_both(gate_up_weight, cast(0, "fprop_w"), cast(0, "dgrad_w"))
    second_row, second_col = bs.quantize_both(down_weight, cast(1, "fprop_w"), cast(1, "dgrad_w"))
    gate_up = bs.scaled_mm(x_row, first_row, dtype, bias=p.biases[0])
    y = bs.scaled_mm(bs.swiglu_quantize(gate_up, cast(1, "fprop_x")), second_row, dtype, bias=p.biases[1])
    dy_row, dy_col, db = bs.quantize_both(dy, cast(1, "dgrad_dy"), cast(1, "wgrad_dy"), colsum=True)
    dh = bs.scaled_mm(dy_row, second_col.mT, dtype)
    row, col, hidden = bs.swiglu_backward_quantize_both(
        dh, gate_up, cast(0, "dgrad_dy"), cast(0, "wgrad_dy"), hidden=cast(1, "wgrad_x")
    )
    dx = bs.scaled_mm(row, first_col.mT, dtype)
    return y, dx, bs.scaled_mm(col.mT, x_col.mT, dtype), bs.scaled_mm(dy_col.mT, hidden.mT, dtype), db.to(dtype)


class ExactSwiGLU(torch.autograd.Function):
    """The activation as section 16 of the contract has it, unfused."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return exact.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return exact.swiglu_backward(grad, *ctx.saved_tensors)


def by_layers(p: Problem, recipe: str | bs.Recipe) -> Tensor:
    """Two `linear`s with the exact activation between."""
    first, second = roundings_of(recipe)
    hidden = ExactSwiGLU.apply(linear(p.x, p.gate_up, p.biases[0], recipe, rounding=first))
    y = linear(hidden, p.down, p.biases[1], recipe, rounding=second)  # pyright: ignore[reportArgumentType]
    y.backward(p.dy)
    return y


# ---- the same bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("sizes", [(64, 128, 160, 96), ODD], ids=["even", "odd"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_are_those_of_the_operators(name: str, sizes: tuple[int, int, int, int], bias: bool):
    p = Problem(*sizes, bias=bias)
    y = p.run(name)
    want_y, dx, dw_gate_up, dw_down, db = by_operators(p, get_recipe(name))
    assert_same_bits(y, want_y)
    assert_same_bits([p.x.grad, p.gate_up.grad, p.down.grad], [dx, dw_gate_up, dw_down])
    if bias:
        assert_same_bits(p.biases[1].grad, db)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_are_those_of_the_layers(name: str, dtype: torch.dtype):
    """The hidden activation is rounded to the input's dtype before its cast, so a fusion changes no byte."""
    p, q = Problem(*ODD, dtype=dtype), Problem(*ODD, dtype=dtype)
    assert_same_bits(p.run(name), by_layers(q, name))
    (*got, got_bias, got_last), (*want, want_bias, want_last) = p.grads(), q.grads()
    assert_same_bits([*got, got_last], [*want, want_last])
    # summed in another order, of a gradient that is not rounded in between
    error = sqnr(got_bias, want_bias)
    assert error > (45 if dtype is torch.bfloat16 else 110)


@pytest.mark.parametrize("change", [{"weight_cast": "twice"}, {"saves": "source"}], ids=str)
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
def test_bytes_do_not_depend_on_what_is_saved(name: str, change: dict[str, Any]):
    p, q = Problem(*ODD), Problem(*ODD)
    assert_same_bits(p.run(name), q.run(get_recipe(name).replace(**change)))
    assert_same_bits(p.grads(), q.grads())


@pytest.mark.parametrize("name", ["mxfp8_wgrad_bf16", "bf16"])
def test_recipes_with_unquantized_products_are_two_layers(name: str):
    p, q = Problem(*ODD), Problem(*ODD)
    y = p.run(name)
    gate, up = linear(q.x, q.gate_up, q.biases[0], name).chunk(2, -1)
    want = linear(silu(gate) * up, q.down, q.biases[1], name)
    want.backward(q.dy)
    assert_same_bits([y, p.grads()], [want, q.grads()])


def test_leading_dimensions_and_no_tokens():
    p, q = Problem(*ODD), Problem(*ODD)
    y = p.run("mxfp8")
    x = q.x.detach()[None, :, None].requires_grad_()
    folded = swiglu_mlp(x, q.gate_up, q.down, *q.biases, recipe="mxfp8")
    assert folded.shape == (1, 37, 1, 56)
    folded.backward(q.dy[None, :, None])
    assert_same_bits(folded.flatten(0, -2), y)
    assert_same_bits([x.grad.flatten(0, -2), q.gate_up.grad, q.down.grad], p.grads()[:3])  # pyright: ignore[reportOptionalMemberAccess]
    for name in QUANTIZED:
        empty = Problem(0, *ODD[1:])
        assert empty.run(name).shape == (0, 56)
        assert all(not leaf.grad.any() for leaf in empty.leaves())  # pyright: ignore[reportOptionalMemberAccess]


def test_a_shared_activation_is_taken():
    p, q = Problem(*ODD), Problem(*ODD)
    want = p.run("fp8_blockwise")
    y = swiglu_mlp(bs.activation(q.x, "fp8_blockwise"), q.gate_up, q.down, *q.biases)
    y.backward(q.dy)
    assert_same_bits([y, q.grads()], [want, p.grads()])


# ---- accuracy ------------------------------------------------------------------------------------------------------


def sqnr(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None
    assert want is not None
    wide = want.detach().double()
    return float(10 * torch.log10(wide.square().sum() / (got.detach().double() - wide).square().sum()))


# of y, dx and both weight gradients: two or three products in a row, each of two cast operands
MEASURED = {
    "fp8_blockwise": (24.0, 23.7, 23.7, 24.0),
    "mxfp8": (23.7, 23.4, 23.3, 23.7),
    "mxfp4": (10.9, 8.9, 9.7, 10.6),
    "nvfp4": (12.0, 10.2, 10.3, 11.2),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_signal_to_noise(name: str):
    """Against the unquantised MLP in fp64: as much noise as the formats make, no more and no less."""
    p = Problem(256, 256, 384, 256, bias=False)  # an exact bias would hide noise
    y = p.run(name)
    leaves = [leaf.detach().double().requires_grad_() for leaf in p.leaves()]
    x, gate_up, down = leaves
    gate, up = torch_linear(x, gate_up).chunk(2, -1)
    want = torch_linear(silu(gate) * up, down)
    want.backward(p.dy.double())
    found = [sqnr(y, want), *(sqnr(leaf.grad, w.grad) for leaf, w in zip(p.leaves(), leaves, strict=True))]
    assert all(abs(got - expected) < 0.5 for got, expected in zip(found, MEASURED[name], strict=True)), found


# ---- which operands are cast and saved -----------------------------------------------------------------------------


FORWARD = {"quantize_both": 3, "swiglu_quantize": 1, "scaled_mm": 2}
BACKWARD = {"quantize_both": 1, "swiglu_backward_quantize_both": 1, "scaled_mm": 4}


def test_nothing_is_cast_twice():
    p = Problem(*ODD, bias=False)
    with Calls() as calls:
        y = swiglu_mlp(p.x, p.gate_up, p.down)
    assert calls.found == FORWARD
    with Calls() as calls:
        y.backward(p.dy)
    assert calls.found == BACKWARD


def test_without_a_backward_no_operand_is_cast_for_it():
    p = Problem(*ODD, bias=False)
    with torch.no_grad(), Calls() as calls:
        y = swiglu_mlp(p.x, p.gate_up, p.down)
    assert calls.found == {"quantize": 3, "swiglu_quantize": 1, "scaled_mm": 2}
    assert_same_bits(y, p.run("fp8_blockwise"))


# which leaf needs a gradient -> operators of the backward
FROZEN = {
    "x": {"quantize": 1, "swiglu_backward_quantize_both": 1, "scaled_mm": 2},
    "gate_up": {"quantize": 1, "swiglu_backward_quantize_both": 1, "scaled_mm": 2},
    "down": {"quantize": 1, "swiglu_quantize": 1, "scaled_mm": 1},
    "first bias": {"quantize": 1, "scaled_mm": 1},
    "last bias": {},
}


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_leaves(which: str, name: str):
    p, q = Problem(*ODD), Problem(*ODD)
    p.run(name)
    at = list(FROZEN).index(which)
    for other, leaf in enumerate(q.leaves()):
        leaf.requires_grad_(other == at)
    y = swiglu_mlp(q.x, q.gate_up, q.down, *q.biases, recipe=name, roundings=roundings_of(name))
    with Calls() as calls:
        y.backward(q.dy)
    assert calls.found == FROZEN[which]
    got = q.grads()
    assert [grad is not None for grad in got] == [other == at for other in range(5)]
    if which == "last bias":  # summed by torch where no cast reads the gradient
        torch.testing.assert_close(got[at], p.grads()[at])
    else:
        assert_same_bits(got[at], p.grads()[at])


def test_memory_saved_for_backward(monkeypatch: pytest.MonkeyPatch):
    m, k, h, d = 256, 128, 128, 128
    p = Problem(m, k, h, d, bias=False)
    weights = [p.gate_up, p.down]
    twice = get_recipe("fp8_blockwise").replace(weight_cast="twice")
    kept = saved_bytes(lambda: swiglu_mlp(p.x, *weights, recipe=twice), *weights)
    codes_and_scales = m * k + m // 128 * k * 4
    assert kept == codes_and_scales + 2 * m * 2 * h
    # with weight_cast="forward" one operand of each weight is saved too
    more = saved_bytes(lambda: swiglu_mlp(p.x, *weights), *weights)
    assert 2 * h * k + h * d < more - kept < 1.02 * (2 * h * k + h * d)
    monkeypatch.setattr(linear_plan, "for_products", lambda *tensors: tensors)  # as on a GPU
    high = saved_bytes(lambda: swiglu_mlp(p.x * 1, *weights, recipe="bf16"), *weights)
    assert high == 2 * m * k + 2 * m * 4 * h


def test_a_weight_that_changed_before_the_backward_is_an_error():
    for at in (1, 2):
        p = Problem(*ODD)
        y = swiglu_mlp(p.x, p.gate_up, p.down)
        with torch.no_grad():
            p.leaves()[at].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(p.dy)


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
def test_weight_gradients_accumulate_into_main_grads(dtype: torch.dtype):
    p, q = Problem(*ODD, dtype=torch.float32), Problem(*ODD, dtype=torch.float32)
    p.run("mxfp8")
    for weight in (q.gate_up, q.down):
        weight.main_grad = torch.ones_like(weight, dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue]
    q.run("mxfp8")
    for weight, other in ((q.gate_up, p.gate_up), (q.down, p.down)):
        assert weight.grad is None
        assert_same_bits(weight.main_grad, (other.grad + 1).to(dtype))  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_bits(q.x.grad, p.x.grad)


# ---- callers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["fp8_blockwise", "nvfp4"], lambda name: name == "nvfp4"))
def test_compiled_bytes_are_eager_ones(name: str):
    torch._dynamo.reset()
    p, q = Problem(*ODD), Problem(*ODD)
    state = roundings_of(name)

    def call(x: Tensor, gate_up: Tensor, down: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return swiglu_mlp(x, gate_up, down, first, last, recipe=name, roundings=state)  # pyright: ignore[reportArgumentType]

    y = torch.compile(call, backend="aot_eager", fullgraph=True)(*q.leaves())
    y.backward(q.dy)
    assert_same_bits(y, p.run(name))
    *got, got_bias, got_last = q.grads()
    *want, want_bias, want_last = p.grads()
    assert_same_bits([*got, got_last], [*want, want_last])
    torch.testing.assert_close(got_bias, want_bias)


def test_recomputation_gives_the_same_bytes():
    p, q = Problem(*ODD), Problem(*ODD)
    want = p.run("nvfp4")
    y = checkpoint(swiglu_mlp, *q.leaves(), recipe="nvfp4", roundings=roundings_of("nvfp4"), use_reentrant=False)
    y.backward(q.dy)  # pyright: ignore[reportOptionalMemberAccess]
    assert_same_bits([y, q.grads()], [want, p.grads()])


def test_autocast_chooses_the_dtype_between_and_after():
    p, q = Problem(*ODD, dtype=torch.float32), Problem(*ODD, dtype=torch.float32)
    p.dy, q.dy = p.dy.bfloat16(), q.dy.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, want = p.run("mxfp8"), by_layers(q, "mxfp8")
    assert y.dtype is torch.bfloat16
    assert p.x.grad is not None
    assert p.x.grad.dtype is torch.float32
    assert_same_bits([y, p.grads()[:3]], [want, q.grads()[:3]])


def test_mistakes():
    p = Problem(*ODD)
    with pytest.raises(ShapeError, match=r"\[2H, K\] and \[D, H\]"):
        swiglu_mlp(p.x, p.gate_up[:-2], p.down)
    with pytest.raises(ShapeError, match="K is the last axis"):
        swiglu_mlp(p.x[:, :-1], p.gate_up, p.down)
    with pytest.raises(ShapeError, match="one value per output column"):
        swiglu_mlp(p.x, p.gate_up, p.down, p.biases[1])
    with pytest.raises(DtypeError, match="float64"):
        swiglu_mlp(p.x.double(), p.gate_up, p.down)
    with pytest.raises(OptionError, match="without a state for stochastic rounding"):
        swiglu_mlp(p.x, p.gate_up, p.down, recipe="nvfp4", roundings=(roundings_of("nvfp4")[0], None))
