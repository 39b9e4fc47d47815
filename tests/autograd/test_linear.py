"""`linear` against fake quantisation in fp64, against the unquantised layer and against the public operators, for any
shape; which operands it casts, and its errors. Its callers are in test_linear_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.autograd import get_recipe, linear
from blockscale.errors import DeviceError, DtypeError, OptionError, ShapeError
from blockscale.formats.stochastic import ROLES
from support.linear_reference import (
    LOW,
    VARIANTS,
    Calls,
    FakeLinear,
    Problem,
    by_fake_casts,
    by_operators,
    drawn,
    fake_casts,
    identity,
    sqnr,
)
from support.products import assert_same_bits, gaussian

# M, N, K: no multiples of a block, and multiples of all blocks
ODD, EVEN = (37, 200, 72), (64, 128, 256)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
IDENTITY = dict.fromkeys(ROLES, identity)


# ---- accuracy ------------------------------------------------------------------------------------------------------

# a little below the rounding of the result: 55.5, 73.5 and, from fp32 sums and decodes, 145 dB
TIGHT = {torch.bfloat16: 54.0, torch.float16: 72.5, torch.float32: 140.0}


@pytest.mark.parametrize("sizes", [ODD, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_fake_quantisation_in_fp64_gives_the_same(name: str, dtype: torch.dtype, sizes: tuple[int, int, int]):
    p, recipe = Problem(*sizes, dtype=dtype), VARIANTS[name]
    want = by_fake_casts(p, fake_casts(recipe, dtype))
    found = [sqnr(got, wanted) for got, wanted in zip(p.run(recipe), want, strict=True)]
    assert min(found) > TIGHT[dtype], found


def test_the_reference_has_the_gradients_of_a_linear_layer():
    shapes = (5, 7), (3, 7), (3,)
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *tensors: FakeLinear.apply(*tensors, IDENTITY), leaves)


# lower gates of docs/numerics.md for y, dX and dW; the true values are half a dB above
GATES = {
    "fp8_blockwise": (28.2, 28.2, 28.3),
    "mxfp8": (28.0, 28.0, 28.0),
    "mxfp8 by 128x128": (28.0, 28.0, 28.0),
    "mxfp8_wgrad_bf16": (28.0, 28.0, 55.0),
    "mxfp6": (27.4, 27.4, 27.4),
    "mxfp4": (15.5, 13.5, 13.6),
    "nvfp4": (16.2, 14.1, 14.6),
}


@pytest.mark.parametrize("name", GATES)
def test_noise_is_that_of_the_formats_no_more_and_no_less(device: torch.device, name: str):
    p = Problem(256, 256, 512, bias=False, device=device)  # an exact bias would hide noise
    found = [sqnr(got, want) for got, want in zip(p.run(VARIANTS[name]), by_fake_casts(p, IDENTITY), strict=True)]
    assert all(gate < got < gate + 1 for got, gate in zip(found, GATES[name], strict=True)), found


# ---- the same bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [37, (2, 3)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_those_of_the_operators(name: str, dtype: torch.dtype, lead: int | tuple[int, int]):
    p = Problem(lead, *ODD[1:], dtype=dtype)
    want = by_operators(p, VARIANTS[name])
    assert_same_bits(p.run(VARIANTS[name]), want)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [ODD, (128, 256, 256)], ids=["odd", "even"])
@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_those_of_the_operators_on_a_gpu(name: str, sizes: tuple[int, int, int]):
    p = Problem(*sizes, device="cuda")
    assert_same_bits(p.run(VARIANTS[name]), by_operators(p, VARIANTS[name]))


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
def test_an_unquantized_product_is_torchs(name: str, product: str):
    recipe = get_recipe(name).replace(**{product: None})
    p, plain = Problem(*ODD), Problem(*ODD)
    want = by_operators(p, recipe)
    got = p.run(recipe)
    assert_same_bits(got, want)
    torch_y = torch.nn.functional.linear(plain.x, plain.weight, plain.bias)
    torch_y.backward(plain.dy)
    at = ["fprop", "dgrad", "wgrad"].index(product)
    assert_same_bits(got[at], [torch_y.detach(), plain.x.grad, plain.weight.grad][at])


def test_the_bf16_recipe_is_torchs_layer():
    p, plain = Problem((2, 5), 33, 17), Problem((2, 5), 33, 17)
    y = torch.nn.functional.linear(plain.x, plain.weight, plain.bias)
    y.backward(plain.dy)
    assert_same_bits(p.run("bf16"), [y.detach(), *plain.grads()])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_inputs_and_weights_of_different_dtypes(dtypes: tuple[torch.dtype, torch.dtype]):
    """Each is cast from its own dtype; the result has the dtype of x, a gradient that of its parameter."""
    p, q = Problem(*ODD, dtype=dtypes[0]), Problem(*ODD, dtype=dtypes[0])
    p.weight, p.bias = (t.detach().to(dtypes[1]).requires_grad_() for t in (q.weight, q.bias))  # pyright: ignore[reportOptionalMemberAccess]
    y, dx, dw, db = p.run("mxfp8")
    want = by_fake_casts(p, fake_casts(get_recipe("mxfp8"), torch.float32))  # bf16 values are fp32 values
    assert [t.dtype for t in (y, dx, dw, db)] == [dtypes[0]] * 2 + [dtypes[1]] * 2  # pyright: ignore[reportOptionalMemberAccess]
    assert all(sqnr(got, wanted) > TIGHT[got.dtype] for got, wanted in zip((y, dx, dw, db), want, strict=True))  # pyright: ignore[reportOptionalMemberAccess]


# ---- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [(200, 72), (17, 33), (1, 1)], ids=["72 -> 200", "33 -> 17", "1 -> 1"])
@pytest.mark.parametrize("lead", [0, 1, 37, (), (2, 3), (0, 3), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", LOW)
def test_any_shape_is_taken_as_torchs_layer_takes_it(name: str, lead: int | tuple[int, ...], features: tuple[int, int]):
    p = Problem(lead, *features)
    y, dx, dw, db = p.run(name)
    assert y is not None
    assert y.shape == torch.nn.functional.linear(p.x, p.weight, p.bias).shape
    assert dx is not None
    assert dx.shape == p.x.shape
    rows = Problem(p.x.numel() // features[1], *features)
    rows.x, rows.dy = (t.detach().reshape(-1, t.shape[-1]) for t in (p.x, p.dy))
    rows.x.requires_grad_()
    flat = rows.run(name)
    assert_same_bits([y.reshape(-1, features[0]), dx.reshape(-1, features[1]), dw, db], flat)
    if y.numel() == 0:
        assert not any(grad.any() for grad in (dw, db))  # pyright: ignore[reportOptionalMemberAccess]


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def sliced(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def shifted(x: Tensor) -> Tensor:
    """One element off a 16-byte boundary."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


@pytest.mark.parametrize("change", [transposed, sliced, shifted])
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
@pytest.mark.parametrize("lead", [37, (4, 5)], ids=["2-D", "3-D"])
def test_strides_do_not_matter(device: torch.device, lead: Any, name: str, change: Callable[[Tensor], Tensor]):
    p, q = Problem(lead, *ODD[1:], device=device), Problem(lead, *ODD[1:], device=device)
    q.x, q.weight = (change(t.detach()).requires_grad_() for t in (p.x, p.weight))
    q.dy = change(p.dy)
    assert_same_bits(q.run(name), p.run(name))


def test_an_expanded_gradient_is_a_gradient():
    p, q = Problem(*ODD), Problem(*ODD)
    p.dy = torch.ones_like(p.dy)
    want = p.run("fp8_blockwise")
    q.forward("fp8_blockwise").sum().backward()  # all strides 0
    assert_same_bits(q.grads(), want[1:])
    row = gaussian(1, ODD[1], seed=9)
    p, q = Problem(*ODD), Problem(*ODD)
    p.dy, q.dy = row.repeat(37, 1), row.expand(37, -1)
    assert_same_bits(q.run("nvfp4"), p.run("nvfp4"))


def test_no_incoming_gradient_gives_no_gradients():
    p = Problem(*ODD)
    y = p.forward("mxfp8")

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.set_materialize_grads(False)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            return None

    Silent.apply(y).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    assert p.grads() == [None] * 3


# ---- which operands are cast ---------------------------------------------------------------------------------------


def needing(which: str) -> Problem:
    """Only these need a gradient."""
    p = Problem(*ODD)
    for name in ("x", "weight", "bias"):
        getattr(p, name).requires_grad_(name in which.split())
    return p


# which leaves need a gradient -> operators of the forward and of the backward, for weight_cast="forward"
CASTS = {
    "x weight bias": ({"quantize_both": 2, "scaled_mm": 1}, {"quantize_both": 1, "scaled_mm": 2}),
    "x weight": ({"quantize_both": 2, "scaled_mm": 1}, {"quantize_both": 1, "scaled_mm": 2}),
    "weight bias": ({"quantize_both": 1, "quantize": 1, "scaled_mm": 1}, {"quantize": 1, "scaled_mm": 1}),
    "x": ({"quantize_both": 1, "quantize": 1, "scaled_mm": 1}, {"quantize": 1, "scaled_mm": 1}),
    "x bias": ({"quantize_both": 1, "quantize": 1, "scaled_mm": 1}, {"quantize": 1, "scaled_mm": 1}),
    "weight": ({"quantize_both": 1, "quantize": 1, "scaled_mm": 1}, {"quantize": 1, "scaled_mm": 1}),
    "bias": ({"quantize": 2, "scaled_mm": 1}, {}),
}


@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
@pytest.mark.parametrize("which", CASTS)
def test_only_needed_operands_are_cast(which: str, name: str):
    whole, p = Problem(*ODD), needing(which)
    want = whole.run(name)
    with Calls() as forward:
        y = p.forward(name)
    with Calls() as backward:
        y.backward(p.dy)
    assert (forward.found, backward.found) == CASTS[which]
    assert_same_bits(y.detach(), want[0])
    for leaf, grad in zip(p.leaves(), want[1:], strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf is p.bias and "x weight" not in which and leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, grad)  # summed by torch where no cast makes both operands
        elif leaf.grad is not None:
            assert_same_bits(leaf.grad, grad)


NOT_SAVED = {
    "twice": ({"weight_cast": "twice"}, {"quantize_both": 1, "quantize": 1}, {"quantize_both": 1, "quantize": 1}),
    "source": ({"saves": "source"}, {"quantize_both": 1, "quantize": 1}, {"quantize_both": 1, "quantize": 1}),
    "neither": ({"saves": "source", "weight_cast": "twice"}, {"quantize": 2}, {"quantize_both": 1, "quantize": 2}),
}


@pytest.mark.parametrize("which", NOT_SAVED)
def test_operands_that_are_not_saved_are_cast_in_the_backward(which: str):
    change, forward, backward = NOT_SAVED[which]
    recipe = get_recipe("fp8_blockwise").replace(**change)
    p = Problem(*ODD)
    with Calls() as first:
        y = p.forward(recipe)
    with Calls() as second:
        y.backward(p.dy)
    assert first.found == forward | {"scaled_mm": 1}
    assert second.found == backward | {"scaled_mm": 2}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LOW)
def test_without_a_backward_no_operand_is_cast_for_it(name: str, mode: Callable[[], Any]):
    p = Problem(*ODD)
    with mode(), Calls() as calls:
        y = p.forward(name)
    assert calls.found == {"quantize": 2, "scaled_mm": 1}
    assert not y.requires_grad
    assert_same_bits(y.clone(), p.run(name)[0])


def test_weight_operands_are_used():
    p, q = Problem(*ODD), Problem(*ODD)
    pair = bs.quantize_both(p.weight.detach(), "fp8_128x128", "fp8_128x128")
    with Calls() as calls:
        y = p.forward("fp8_blockwise", weight_operands=pair)
    assert calls.found == {"quantize_both": 1, "scaled_mm": 1}
    y.backward(p.dy)
    assert_same_bits([y.detach(), *p.grads()], q.run("fp8_blockwise"))


# ---- more than one backward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_retained_graph_gives_the_same_again(name: str):
    p = Problem(*ODD)
    y = p.forward(VARIANTS[name])
    first = torch.autograd.grad(y, p.leaves(), p.dy, retain_graph=True)
    assert_same_bits(torch.autograd.grad(y, p.leaves(), p.dy), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, p.leaves(), p.dy)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_weight_that_changed_before_the_backward_is_an_error(name: str):
    p = Problem(*ODD)
    y = p.forward(VARIANTS[name])
    with torch.no_grad():
        p.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(p.dy)


def test_a_saved_input_that_changed_before_the_backward_is_an_error():
    recipe = get_recipe("mxfp8")
    want = Problem(*ODD).run(recipe)
    p = Problem(*ODD)
    y = p.forward(recipe)
    with torch.no_grad():
        p.x.zero_()
    y.backward(p.dy)  # its operand was saved, and the gradient uses only that
    assert_same_bits(p.grads(), want[1:])
    p = Problem(*ODD)
    y = p.forward(recipe.replace(saves="source"))
    with torch.no_grad():
        p.x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(p.dy)


def gradient_penalty(p: Problem) -> None:
    """It depends on a leaf through the weight only: the incoming gradient is a constant."""
    y = linear(torch.sin(p.x), p.weight, recipe="mxfp8")
    (dx,) = torch.autograd.grad(y.sum(), p.x, create_graph=True)
    dx.square().sum().backward()


def hessian(p: Problem) -> None:
    y = p.forward("mxfp8").square().sum()
    (dx,) = torch.autograd.grad(y, p.x, create_graph=True)
    dx.sum().backward()


@pytest.mark.parametrize("twice", [gradient_penalty, hessian])
def test_a_gradient_of_a_gradient_is_refused(twice: Callable[[Problem], None]):
    with pytest.raises(RuntimeError, match=r"differentiate(d no further| twice)"):
        twice(Problem(*ODD, dtype=torch.float32))


def test_an_unused_graph_of_the_backward_changes_no_byte():
    p, q = Problem(*ODD), Problem(*ODD)
    got = torch.autograd.grad(p.forward("nvfp4"), p.leaves(), p.dy, create_graph=True)
    assert_same_bits(list(got), q.run("nvfp4")[1:])


# ---- mistakes ------------------------------------------------------------------------------------------------------

P = Problem(4, 8, 32)
X, W, B = (t.detach() for t in P.leaves())
MISTAKES = {
    "features": (lambda: linear(X[:, :-1], W), ShapeError, r"x \(4, 31\) for a weight \(8, 32\).*with 32 features"),
    "scalar": (lambda: linear(X[0, 0], W), ShapeError, r"x \(\) for a weight"),
    "rank": (lambda: linear(X, W[None]), ShapeError, r"a weight is \[N, K\]"),
    "dtype": (lambda: linear(X.double(), W), DtypeError, "x is torch.float64.*or use the recipe 'bf16'"),
    "integers": (lambda: linear(X, W.int()), DtypeError, "the weight torch.int32"),
    "bias size": (lambda: linear(X, W, B[:-1]), ShapeError, "one value per output column"),
    "bias rank": (lambda: linear(X, W, B[None]), ShapeError, "one value per output column"),
    "bias dtype": (lambda: linear(X, W, B.double()), ShapeError, "bias is torch.float64"),
    "bias device": (lambda: linear(X, W, B.to("meta")), ShapeError, "on meta"),
    "weight device": (lambda: linear(X, W.to("meta")), DeviceError, "x is on cpu, the weight on meta"),
    "input device": (lambda: linear(X.to("meta"), W), DeviceError, "x is on meta, the weight on cpu"),
    "no state": (lambda: linear(X, W, recipe="nvfp4"), OptionError, "a state for stochastic rounding.*rng_state"),
    "no name": (
        lambda: (
            linear(X, W.clone().requires_grad_(), recipe="nvfp4", rounding=bs.Stochastic(bs.rng_state(0), ""))
            .sum()
            .backward()
        ),
        OptionError,
        "without a name",
    ),
    "recipe": (lambda: linear(X, W, recipe="mxpf8"), bs.errors.UnknownNameError, "unknown recipe 'mxpf8'"),
}


@pytest.mark.parametrize("which", MISTAKES)
def test_mistakes_raise(which: str):
    call, error, text = MISTAKES[which]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", LOW)
def test_on_the_meta_device_shapes_are_computed(name: str):
    p = Problem((2, 3), *ODD[1:], device="meta")
    y, *grads = p.run(name, rounding=drawn(name, "meta"))
    assert y is not None
    assert y.shape == (2, 3, 200)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in p.leaves()]  # pyright: ignore[reportOptionalMemberAccess]
