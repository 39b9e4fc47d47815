"""`grouped_linear` and `grouped_swiglu_mlp`: the composition of public operators byte for byte, close to fake
quantisation in fp64, over groups of all sizes; saved tensors, skipped casts and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.autograd import get_recipe, grouped_linear, grouped_swiglu_mlp, linear
from blockscale.autograd.weights import SharedWeight
from blockscale.errors import DtypeError, OptionError, ShapeError
from blockscale.gemm import ACCUMULATOR_DTYPES
from support.grouped_reference import (
    PATTERNS,
    ExactSwiGLU,
    Experts,
    drawn,
    linear_by_fake_casts,
    linear_by_operators,
    mlp_by_fake_casts,
    mlp_by_operators,
    spans,
)
from support.helpers import first_of
from support.linear_reference import Calls, saved_bytes, sqnr
from support.products import assert_same_bits, gaussian, offsets

QUANTIZED = ["fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
NEAREST = ["fp8_blockwise", "mxfp8", "mxfp6"]
# no multiples of a block
ODD = (72, 104, 56)


def gains(got: list[Tensor | None], want: list[Tensor | None]) -> list[float]:
    """Signal to noise of each result; infinite where both are empty or zero."""
    found = []
    for mine, theirs in zip(got, want, strict=True):
        assert mine is not None
        same = mine.numel() == 0 or not (mine.count_nonzero() or theirs.count_nonzero())  # pyright: ignore[reportOptionalMemberAccess]
        found.append(math.inf if same else sqnr(mine, theirs))
    return found


# ---- the same bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_are_those_of_the_operators(name: str, pattern: str):
    p = Experts(PATTERNS[pattern], *ODD)
    assert_same_bits(p.linear(name), linear_by_operators(p, get_recipe(name)))
    p = Experts(PATTERNS[pattern], *ODD)
    y, dx, dw_first, dw_second, _, db_second = p.run(name)
    assert_same_bits([y, dx, dw_first, dw_second, db_second], mlp_by_operators(p, get_recipe(name)))


# stochastic rounding depends on the number of the group
@pytest.mark.parametrize("name", [name for name in QUANTIZED if not get_recipe(name).stochastic])
def test_a_group_is_a_dense_layer(name: str):
    """Each expert computes what `linear` computes of its rows alone, whatever the other groups are."""
    p = Experts((31, 129, 0, 2), *ODD)
    y, dx, dw, db = p.linear(name)
    for e, (low, high) in enumerate(spans(p.sizes)):
        x, w, b = (t.detach().clone().requires_grad_() for t in (p.x[low:high], p.gate_up[e], p.biases[0][e]))  # pyright: ignore[reportOptionalSubscript]
        out = linear(x, w, b, name)
        out.backward(p.dh[low:high])
        if high > low:
            assert min(sqnr(y[low:high], out), sqnr(dx[low:high], x.grad), sqnr(dw[e], w.grad)) > 50  # pyright: ignore[reportOptionalSubscript]
            torch.testing.assert_close(db[e], b.grad)  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("name", [*QUANTIZED, "bf16", "mxfp8_wgrad_bf16"])
def test_permuting_in_the_cast_changes_no_byte(name: str):
    """A routing of tokens gives the bytes of permuted rows with their group ends."""
    scores = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    scores[:, 3] = -1  # an expert without rows
    routing, _ = bs.route(scores, 2)

    def layer(p: Experts, x: Tensor, where: bs.Routing | Tensor) -> Tensor:
        return grouped_linear(x, p.gate_up, where, p.biases[0], name, rounding=drawn(name, 0))

    def mlp(p: Experts, x: Tensor, where: bs.Routing | Tensor) -> Tensor:
        roundings = drawn(name, 0), drawn(name, 1)
        return grouped_swiglu_mlp(x, p.gate_up, p.down, where, *p.biases, recipe=name, roundings=roundings)

    for call in (layer, mlp):
        found: list[list[Tensor | None]] = []
        for routed in (True, False):
            p = Experts((80, 0, 0, 0, 0), *ODD)
            tokens = gaussian(40, ODD[0], seed=7).requires_grad_()
            x, where = (tokens, routing) if routed else (bs.permute(tokens, routing), routing.offs)
            y = call(p, x, where)
            y.backward(p.dh if call is layer else p.dy)
            with torch.no_grad():
                assert_same_bits(call(p, x, where), y.detach())
            found.append([y.detach(), tokens.grad, *p.grads()[1:]])
        assert_same_bits(*found)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_fused_mlp_is_two_layers_with_the_exact_activation(name: str):
    p, q = Experts((31, 129, 0, 2), *ODD), Experts((31, 129, 0, 2), *ODD)
    y, *grads = p.run(name)
    hidden = ExactSwiGLU.apply(grouped_linear(q.x, q.gate_up, q.offs, q.biases[0], name, rounding=drawn(name, 0)))
    z = grouped_linear(hidden, q.down, q.offs, q.biases[1], name, rounding=drawn(name, 1))  # pyright: ignore[reportArgumentType]
    z.backward(q.dy)
    want = q.grads()
    assert_same_bits([y, *grads[:3], grads[4]], [z.detach(), *want[:3], want[4]])
    assert sqnr(grads[3], want[3]) > 45  # summed in another order, of a gradient that is not rounded in between


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NEAREST)
def test_close_to_fake_quantisation_in_fp64(name: str, pattern: str):
    """fp32 in and out, so that nothing but the casts rounds: y, dX, dW and the bias's gradient."""
    p = Experts(PATTERNS[pattern], *ODD, dtype=torch.float32)
    found = gains(p.linear(name), linear_by_fake_casts(p, get_recipe(name)))
    assert min(found) > 110, found


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8"])
def test_the_mlp_is_close_to_fake_quantisation_in_fp64(name: str):
    """Codes of the hidden activation may differ by one where fp32 and fp64 round apart, so less than of one layer."""
    p = Experts((64, 200, 0, 56), 128, 128, 128, dtype=torch.float32)
    found = gains(p.run(name), mlp_by_fake_casts(p, get_recipe(name)))
    assert min(found) > 45, found


# y, dX and the weight gradients of both layers against no quantisation, in dB
EXPECTED = {
    "fp8_blockwise": (23.9, 23.8, 23.9, 24.1),
    "mxfp8": (23.6, 23.5, 23.5, 23.6),
    "nvfp4": (12.0, 10.1, 10.4, 11.3),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_noise_is_that_of_the_formats(name: str):
    """Three chained products: as far from the unquantised experts as fake quantisation is, to half a dB."""
    recipe = get_recipe(name)
    p = Experts((64, 200, 0, 56), 256, 256, 256, bias=False)
    exact = mlp_by_fake_casts(p, None)
    got, want = gains(p.run(name), exact), gains(mlp_by_fake_casts(p, recipe), exact)
    # stochastic rounding is noisier than fake quantisation's rounding to nearest: only the forward has none
    for mine, theirs in list(zip(got, want, strict=True))[: 1 if recipe.stochastic else 4]:
        assert abs(mine - theirs) < 0.1, (got, want)
    for mine, expected in zip(got, EXPECTED[name], strict=True):
        assert abs(mine - expected) < 0.5, got


def test_gradients_in_fp64():
    """Unquantized products, at double precision."""
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5, 6), (3, 5)))
    offs = offsets([2, 0, 4])  # a row of no group
    assert gradcheck(lambda *leaves: grouped_linear(leaves[0], leaves[1], offs, leaves[2], "bf16"), (x, weight, bias))
    y = grouped_linear(x, weight, offs, bias, "bf16")
    assert not y[6].any()
    torch.testing.assert_close(y[:2], x[:2] @ weight[0].mT + bias[0])
    routing, _ = bs.route(torch.rand(7, 3), 2)
    down = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    gate_up = torch.randn(3, 10, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *leaves: grouped_swiglu_mlp(*leaves, routing, recipe="bf16"), (x, gate_up, down))


@pytest.mark.parametrize("sizes", [ODD, (71, 103, 53)], ids=["torch", "loop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unquantized_experts_are_dense_layers_one_by_one(dtype: torch.dtype, sizes: tuple[int, int, int]):
    p = Experts((31, 129, 0, 2), *sizes, dtype=dtype, bias=True)
    found = gains(p.run("bf16"), mlp_by_fake_casts(p, None))
    assert min(found) > (45 if dtype is torch.bfloat16 else 110), found


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", [*QUANTIZED, "mxfp8_wgrad_bf16", "bf16"])
def test_a_gpu_computes_what_the_cpu_computes(name: str, pattern: str):
    """Casts agree to the byte. Products differ in summation order, so casts of their results differ in some codes."""
    sizes = PATTERNS[pattern]
    here, there = Experts(sizes, 256, 128, 256), Experts(sizes, 256, 128, 256, device="cuda")
    want, got = here.run(name), there.run(name)
    assert min(gains([None if each is None else each.cpu() for each in got], want)) > 30
    routing = bs.sort_by_expert(torch.arange(sum(sizes), device="cuda")[:, None] % len(sizes), len(sizes))
    found = []
    for routed in (True, False):
        p = Experts(sizes, 256, 128, 256, device="cuda")
        x, where = (p.x, routing) if routed else (bs.permute(p.x, routing), routing.offs)
        roundings = drawn(name, 0, "cuda"), drawn(name, 1, "cuda")
        y = grouped_swiglu_mlp(x, p.gate_up, p.down, where, *p.biases, recipe=name, roundings=roundings)
        y.backward(p.dy)
        found.append([y.detach(), *p.grads()])
    assert_same_bits(*found)


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "nvfp4", "bf16"])
def test_rows_of_no_group_give_zero_and_count_for_nothing(name: str):
    p, q = Experts((31, 0, 20), *ODD, loose=9), Experts((31, 0, 20), *ODD)
    with torch.no_grad():
        p.x[:51], p.dy[:51] = q.x, q.dy
    y, dx, *rest = p.run(name)
    want_y, want_dx, *want = q.run(name)
    assert not y[51:].any()  # pyright: ignore[reportOptionalSubscript]
    assert not dx[51:].any()  # pyright: ignore[reportOptionalSubscript]
    assert_same_bits([y[:51], dx[:51], rest], [want_y, want_dx, want])  # pyright: ignore[reportOptionalSubscript]


# ---- number of casts and products ------------------------------------------------------------------------------------

FORWARD = {"quantize_both": 3, "swiglu_quantize": 1, "scaled_grouped_mm": 2}
BACKWARD = {"quantize_both": 1, "swiglu_backward_quantize_both": 1, "scaled_grouped_mm": 4}


def test_everything_is_read_once():
    p = Experts((31, 129, 0, 2), *ODD, bias=False)
    with Calls() as calls:
        y = grouped_swiglu_mlp(p.x, p.gate_up, p.down, p.offs)
    assert calls.found == FORWARD
    with Calls() as calls:
        y.backward(p.dy)
    assert calls.found == BACKWARD
    routing, _ = bs.route(torch.rand(81, 4), 2)
    tokens = gaussian(81, ODD[0]).requires_grad_()
    with Calls() as calls:
        y = grouped_swiglu_mlp(tokens, p.gate_up, p.down, routing)
    assert calls.found == FORWARD | {"quantize_both": 2, "permute_quantize_both": 1}
    with Calls() as calls:
        y.backward(p.dy)
    assert calls.found == BACKWARD | {"combine_rows": 1}
    with torch.no_grad(), Calls() as calls:
        grouped_swiglu_mlp(tokens, p.gate_up, p.down, routing)
    assert calls.found == {"quantize": 2, "quantize_permute": 1, "swiglu_quantize": 1, "scaled_grouped_mm": 2}


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp8_wgrad_bf16", "bf16"])
@pytest.mark.parametrize("at", range(5))
def test_frozen_leaves(at: int, name: str):
    p, q = Experts((31, 0, 20), *ODD), Experts((31, 0, 20), *ODD)
    p.run(name)
    for other, leaf in enumerate(q.leaves()):
        leaf.requires_grad_(other == at)
    q.run(name)
    got = q.grads()
    assert [grad is not None for grad in got] == [other == at for other in range(5)]
    torch.testing.assert_close(got[at], p.grads()[at], rtol=0.01, atol=0.0)  # a bias alone is summed by torch
    if at < 3:
        assert_same_bits(got[at], p.grads()[at])


@pytest.mark.parametrize("changes", [{"saves": "source"}, {"weight_cast": "twice"}])
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
def test_bytes_do_not_depend_on_when_operands_are_cast(name: str, changes: dict[str, Any]):
    routing, _ = bs.route(torch.rand(20, 3, generator=torch.Generator().manual_seed(1)), 2)
    found = []
    for recipe in (get_recipe(name), get_recipe(name).replace(**changes)):
        p = Experts((40, 0, 0), *ODD)
        tokens = gaussian(20, ODD[0], seed=7).requires_grad_()
        roundings = drawn(name, 0), drawn(name, 1)
        y = grouped_swiglu_mlp(tokens, p.gate_up, p.down, routing, *p.biases, recipe=recipe, roundings=roundings)
        y.backward(p.dy)
        found.append([y.detach(), tokens.grad, *p.grads()[1:]])
    assert_same_bits(*found)


def test_memory_saved_for_backward():
    """8-bit operands of tokens, one for each expert that they went to; gates and ups in bf16."""
    tokens, k, h, experts = 128, 128, 128, 2
    p = Experts((256, 0), k, h, k, bias=False)
    x = gaussian(tokens, k).requires_grad_()
    routing, _ = bs.route(torch.rand(tokens, experts), 2)
    twice = get_recipe("fp8_blockwise").replace(weight_cast="twice")
    known = [x, p.gate_up, p.down, routing.offs, routing.tokens, routing.rows]
    kept = saved_bytes(lambda: grouped_swiglu_mlp(x, p.gate_up, p.down, routing, recipe=twice), *known)
    rows = 256 + 127 * experts  # upper bound of the padding
    padded = rows + -rows % 128
    assert kept == padded * k + padded // 128 * k * 4 + 256 * 2 * h * 2


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "nvfp4", "mxfp8_wgrad_bf16", "bf16"])
@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
def test_weight_gradients_accumulate_into_main_grads(name: str, dtype: torch.dtype):
    p, q = (Experts((31, 0, 20), *ODD, dtype=torch.float32) for _ in range(2))
    p.run(name)
    for weight in (q.gate_up, q.down):
        weight.main_grad = torch.ones_like(weight, dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue]
    q.run(name)
    for weight, other in ((q.gate_up, p.gate_up), (q.down, p.down)):
        assert weight.grad is None
        assert_same_bits(weight.main_grad, (other.grad + 1).to(dtype))  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_bits(q.x.grad, p.x.grad)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_shared_casts_of_the_weights_of_experts(name: str, transposed: bool):
    """Also of weights stored as [E, K, N]."""
    recipe = get_recipe(name)
    p, q = Experts((31, 0, 20), *ODD), Experts((31, 0, 20), *ODD)
    shared = SharedWeight(transposed=transposed)
    held = q.gate_up.detach().mT.contiguous() if transposed else q.gate_up.detach().clone()
    weight = torch.nn.Parameter(held * 2)
    shared.refresh(weight, recipe)
    with torch.no_grad():
        weight.div_(2)
    assert_same_bits(q.linear(name, weight_operands=shared.operands(weight, recipe)), p.linear(name))
    assert shared.casts == 2


# ---- callers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["fp8_blockwise", "nvfp4"], lambda name: name == "nvfp4"))
def test_compiled_bytes_are_eager_ones(name: str):
    torch._dynamo.reset()
    p, q = Experts((31, 0, 20), *ODD), Experts((31, 0, 20), *ODD)
    state = drawn(name, 0), drawn(name, 1)

    def call(x: Tensor, gate_up: Tensor, down: Tensor, first: Tensor, last: Tensor, offs: Tensor) -> Tensor:
        return grouped_swiglu_mlp(x, gate_up, down, offs, first, last, recipe=name, roundings=state)

    y = torch.compile(call, backend="aot_eager", fullgraph=True)(*q.leaves(), q.offs)
    y.backward(q.dy)
    assert_same_bits([y.detach(), *q.grads()[:3]], p.run(name)[:4])


def test_recomputation_gives_the_same_bytes():
    p, q = Experts((31, 0, 20), *ODD), Experts((31, 0, 20), *ODD)
    y = checkpoint(
        lambda *leaves: grouped_swiglu_mlp(
            *leaves[:3], q.offs, *leaves[3:], recipe="nvfp4", roundings=(drawn("nvfp4", 0), drawn("nvfp4", 1))
        ),
        *q.leaves(),
        use_reentrant=False,
    )
    y.backward(q.dy)  # pyright: ignore[reportOptionalMemberAccess]
    assert_same_bits([y.detach(), *q.grads()], p.run("nvfp4"))  # pyright: ignore[reportOptionalMemberAccess]


def test_the_result_is_the_same_on_every_run():
    first, second = (Experts((31, 129, 0, 2), *ODD).run("fp8_blockwise") for _ in range(2))
    assert_same_bits(first, second)


def test_autocast_chooses_the_dtype():
    p = Experts((31, 0, 20), *ODD, dtype=torch.float32)
    for name in ("mxfp8", "bf16"):
        with torch.autocast("cpu", torch.bfloat16):
            y = grouped_swiglu_mlp(p.x, p.gate_up, p.down, p.offs, *p.biases, recipe=name)
        assert y.dtype is torch.bfloat16
        y.backward(p.dy.bfloat16())
        assert {grad.dtype for grad in p.grads() if grad is not None} == {torch.float32}


def test_a_weight_that_changed_before_the_backward_is_noticed():
    p = Experts((31, 0, 20), *ODD)
    y = grouped_swiglu_mlp(p.x, p.gate_up, p.down, p.offs)
    with torch.no_grad():
        p.gate_up.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(p.dy)


def test_mistakes():
    p = Experts((31, 0, 20), *ODD)
    routing, _ = bs.route(torch.rand(51, 3), 2)
    with pytest.raises(ShapeError, match=r"weights are \[E, N, K\]"):
        grouped_linear(p.x, p.gate_up[0], p.offs)
    with pytest.raises(ShapeError, match="2 group ends for 3 experts"):
        grouped_linear(p.x, p.gate_up, p.offs[:2])
    with pytest.raises(ShapeError, match="int32 vector"):
        grouped_linear(p.x, p.gate_up, p.offs.long())
    with pytest.raises(ShapeError, match="never descend"):
        grouped_linear(p.x, p.gate_up, p.offs.flip(0))
    with pytest.raises(ShapeError, match="never descend"):
        grouped_linear(p.x, p.gate_up, p.offs + 1, recipe="bf16")
    with pytest.raises(ShapeError, match="takes tokens, not rows"):
        grouped_linear(p.x[:20], p.gate_up, routing)
    with pytest.raises(ShapeError, match=r"\[E, 2H, K\] and \[E, D, H\]"):
        grouped_swiglu_mlp(p.x, p.gate_up[:, :-2], p.down, p.offs)
    with pytest.raises(ShapeError, match="one value per output column"):
        grouped_linear(p.x, p.gate_up, p.offs, p.biases[1])
    with pytest.raises(DtypeError, match="float64"):
        grouped_linear(p.x.double(), p.gate_up, p.offs)
    with pytest.raises(OptionError, match="without a state for stochastic rounding"):
        grouped_linear(p.x, p.gate_up, p.offs, recipe="nvfp4")
