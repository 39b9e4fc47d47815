"""Callers of `linear`: autocast, main gradients, FLOP counters, compilers, checkpointing; and saved tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import blockscale as bs
from blockscale.autograd import get_recipe, linear, swiglu_mlp
from blockscale.errors import DeviceError, OptionError
from blockscale.gemm import ACCUMULATOR_DTYPES
from support.helpers import first_of, has_cpp_compiler
from support.linear_reference import LOW, VARIANTS, Calls, Problem, by_fake_casts, drawn, fake_casts, saved_bytes, sqnr
from support.products import assert_same_bits, gaussian

ODD = (37, 200, 72)

# ---- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LOW, "bf16"])
def test_autocast_chooses_the_results_dtype_and_nothing_else(name: str):
    """Casts read the tensors in their own dtype; gradients have the dtypes of their leaves."""
    p = Problem(*ODD, dtype=torch.float32)
    p.dy = p.dy.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = p.forward(name)
    assert y.dtype is torch.bfloat16
    y.backward(p.dy)
    assert [grad.dtype for grad in p.grads()] == [torch.float32] * 3  # pyright: ignore[reportOptionalMemberAccess]
    if name == "bf16":
        return
    want = by_fake_casts(p, fake_casts(get_recipe(name), torch.float32))
    tight = [54, 140, 54 if name == "mxfp8_wgrad_bf16" else 140, 140]
    found = [sqnr(got, wanted) for got, wanted in zip([y, *p.grads()], want, strict=True)]
    assert all(got > gate for got, gate in zip(found, tight, strict=True)), found


def test_a_region_without_autocast_is_left_alone():
    p, q = Problem(*ODD, dtype=torch.float32), Problem(*ODD, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        got = p.run("mxfp8")
    assert_same_bits(got, q.run("mxfp8"))


# ---- main gradients ------------------------------------------------------------------------------------------------


def with_main_grad(value: Any = 1.0, main_dtype: torch.dtype = torch.float32, **named: Any) -> Problem:
    p = Problem(*ODD, **named)
    p.weight.main_grad = torch.full(p.weight.shape, value, dtype=main_dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return p


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4", "mxfp8_wgrad_bf16"])
def test_weight_gradients_accumulate_into_main_grad(name: str, dtype: torch.dtype):
    p, q = with_main_grad(main_dtype=dtype, dtype=torch.float32), Problem(*ODD, dtype=torch.float32)
    want, total = q.run(name), torch.ones(1, dtype=dtype)
    for _ in range(2):
        p.x.grad = None
        y = p.forward(name)
        y.backward(p.dy)
        assert p.weight.grad is None
        total = (total.float() + want[2]).to(dtype)  # pyright: ignore[reportOperatorIssue]
        assert_same_bits(p.weight.main_grad, total)  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_bits([y.detach(), p.x.grad], want[:2])


def test_a_main_grad_is_not_rounded_to_the_weights_dtype():
    p, q = with_main_grad(0.0), Problem(*ODD)
    q.weight = q.weight.detach().float().requires_grad_()
    assert q.run("fp8_blockwise")[2] is not None
    p.run("fp8_blockwise")
    assert_same_bits(p.weight.main_grad, q.weight.grad)  # pyright: ignore[reportAttributeAccessIssue]
    assert not torch.equal(q.weight.grad, q.weight.grad.bfloat16().float())  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("how", ["grad", "grad of the weight", "inputs", "inputs with the weight"])
@pytest.mark.parametrize("layers", ["linear", "mlp"])
def test_only_a_pass_for_the_weight_accumulates_into_main_grad(layers: str, how: str):
    """Neither `torch.autograd.grad`, which returns gradients to its caller, nor a backward for other leaves does."""
    x, first, second = (gaussian(*size).float().requires_grad_() for size in ((8, 64), (128, 64), (64, 64)))
    weights = [first] if layers == "linear" else [first, second]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)  # pyright: ignore[reportAttributeAccessIssue]
    y = linear(x, first, recipe="mxfp8") if layers == "linear" else swiglu_mlp(x, first, second, recipe="mxfp8")
    loss = y.square().sum()
    if how == "grad":
        assert torch.autograd.grad(loss, x)[0].any()
    elif how == "grad of the weight":
        assert all(each.any() for each in torch.autograd.grad(loss, weights))
    elif how == "inputs":
        loss.backward(inputs=[x])
    else:
        loss.backward(inputs=[x, *weights])
    added = how == "inputs with the weight"
    assert [bool(weight.main_grad.any()) for weight in weights] == [added] * len(weights)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(weight.grad is None for weight in weights)


def test_two_forwards_may_come_before_their_backwards():
    """As in a pipeline, or if a layer is used twice: the first backward changes main_grad before the second."""
    p, q = with_main_grad(0.0), Problem(*ODD)
    first, second = p.forward("mxfp8"), p.forward("mxfp8")
    first.backward(p.dy, retain_graph=True)
    second.backward(p.dy)
    first.backward(p.dy)
    q.weight = q.weight.detach().float().requires_grad_()
    torch.testing.assert_close(p.weight.main_grad, 3 * q.run("mxfp8")[2])  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue, reportOptionalOperand]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.zeros(200, 72, dtype=torch.float16), OptionError, r"float16 \(200, 72\).*into a float32 or bfloat16"),
        (torch.zeros(72, 200), OptionError, r"torch.float32 \(72, 200\) for a weight \(200, 72\)"),
        (3.0, OptionError, "main_grad is 3.0"),
        (torch.zeros(200, 72, device="meta"), DeviceError, "main_grad is on meta"),
        (torch.zeros(1, 72).expand(200, 72), OptionError, r"main_grad has strides \(0, 1\)"),
    ],
    ids=["dtype", "shape", "type", "device", "overlap"],
)
def test_a_main_grad_that_does_not_fit_is_refused(value: Any, error: type[Exception], text: str):
    p = Problem(*ODD)
    p.weight.main_grad = value  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(error, match=text):
        p.forward("mxfp8")


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_main_grads_and_data_parallel_hooks_do_not_go_together(process_group: None):
    layer = bs.nn.Linear(72, 200)
    parallel = torch.nn.parallel.DistributedDataParallel(layer)
    x = torch.randn(4, 72)
    parallel(x).sum().backward()
    want = layer.weight.grad
    assert want is not None
    layer.weight.main_grad = torch.zeros_like(layer.weight)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OptionError, match=r"under DistributedDataParallel.*ranks would not be averaged"):
        parallel(x)
    layer.weight.grad = None
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, want)  # pyright: ignore[reportAttributeAccessIssue]


# ---- FLOPs and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*VARIANTS, "bf16"])
def test_flops_are_counted_exactly(name: str):
    m, n, k = 64, 96, 128
    p = Problem(m, n, k)
    recipe = VARIANTS.get(name, name)
    with FlopCounterMode(display=False) as counter:
        y = p.forward(recipe)
    assert counter.get_total_flops() == 2 * m * n * k
    with FlopCounterMode(display=False) as counter:
        y.backward(p.dy)
    assert counter.get_total_flops() == 2 * 2 * m * n * k


def test_memory_saved_for_backward():
    m, n, k = 512, 256, 384
    p = Problem(m, n, k, bias=False)
    recipe = get_recipe("fp8_blockwise")
    kept = {
        cast: saved_bytes(lambda cast=cast: p.forward(recipe.replace(weight_cast=cast)), p.weight)
        for cast in ("twice", "forward")
    }
    # a scale of four bytes for 128 codes along tokens, or for 128 x 128, its blocks of K in fours
    codes = m * k + 4 * k * m // 128
    assert kept["twice"] == codes
    assert kept["forward"] == codes + n * k + 4 * math.ceil(k / 128) * max(4, n // 128)
    plain = saved_bytes(lambda: torch.nn.functional.linear(p.x * 1, p.weight), p.weight)
    assert plain == 2 * m * k
    assert kept["twice"] <= 0.54 * plain
    source = saved_bytes(lambda: p.forward(recipe.replace(saves="source", weight_cast="twice")), p.weight)
    assert source == plain


@pytest.mark.parametrize(("name", "most"), [("mxfp8", 0.54), ("mxfp6", 0.54), ("mxfp4", 0.28), ("nvfp4", 0.29)])
def test_memory_saved_for_backward_in_other_formats(name: str, most: float):
    p = Problem(512, 256, 384, bias=False)
    kept = saved_bytes(lambda: p.forward(get_recipe(name).replace(weight_cast="twice")), p.weight)
    assert kept <= most * 2 * 512 * 384


def test_saved_tensors_may_be_offloaded():
    """Saved tensor hooks, as for offloading to another device, return other tensors."""
    p, q = Problem(*ODD), Problem(*ODD)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.clone()):
        got = p.run("fp8_blockwise")
    assert_same_bits(got, q.run("fp8_blockwise"))


# ---- compilers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_frames(recipe: str | bs.Recipe, problems: list[tuple[Problem, Problem]], **named: Any) -> int:
    """Compile once, compare y and all gradients of every problem with eager bit for bit; frames that were compiled."""
    counter = CompileCounterWithBackend(named.pop("backend", "aot_eager"))
    state = drawn(recipe)

    @torch.compile(backend=counter, fullgraph=True, **named)
    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias, recipe, rounding=state)

    for p, q in problems:
        y = call(p.x, p.weight, p.bias)
        y.backward(p.dy)
        assert_same_bits([y.detach(), *p.grads()], q.run(recipe))
    return counter.frame_count


@pytest.mark.parametrize(
    "name", first_of(["fp8_blockwise", "mxfp8", "nvfp4", "fp8_blockwise keeps source"], lambda name: name != "mxfp8")
)
def test_compiled_bytes_are_eager_ones_for_any_number_of_tokens(fresh_dynamo: None, name: str):
    # all of them have padding after the codes: with and without padding are two graphs
    problems = [(Problem(m, *ODD[1:]), Problem(m, *ODD[1:])) for m in (37, 70, 101)]
    for p, _ in problems:
        torch._dynamo.mark_dynamic(p.x, 0)
    assert compiled_frames(VARIANTS[name], problems) == 1


def test_compiled_with_leading_dimensions_and_a_frozen_weight(fresh_dynamo: None):
    problems = [(Problem((b, 5), *ODD[1:]), Problem((b, 5), *ODD[1:])) for b in (3, 4)]
    for pair in problems:
        for p in pair:
            p.weight.requires_grad_(False)
    assert compiled_frames("mxfp8", problems, dynamic=True) == 1


@pytest.mark.parametrize("dtype", first_of(ACCUMULATOR_DTYPES, lambda dtype: dtype is torch.float32), ids=str)
def test_compiled_with_a_main_grad(fresh_dynamo: None, dtype: torch.dtype):
    p, q = with_main_grad(main_dtype=dtype), with_main_grad(main_dtype=dtype)
    y = torch.compile(linear, backend="aot_eager", fullgraph=True)(p.x, p.weight, p.bias, "mxfp8")
    y.backward(p.dy)
    q.run("mxfp8")
    assert_same_bits([p.weight.main_grad, p.grads()], [q.weight.main_grad, q.grads()])  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler, found none")
def test_inductor_gives_eager_bytes(fresh_dynamo: None):
    problems = [(Problem(m, *ODD[1:]), Problem(m, *ODD[1:])) for m in (37, 50)]
    assert compiled_frames("fp8_blockwise", problems, backend="inductor", dynamic=True) == 1


def test_mistakes_raise_while_tracing(fresh_dynamo: None):
    p = Problem(*ODD)
    call = torch.compile(linear, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="K is the last axis of x"):
        call(p.x[:, :-1], p.weight)
    with pytest.raises(Exception, match="one value per output column"):
        call(p.x, p.weight, p.bias[:-1])  # pyright: ignore[reportOptionalSubscript]


# ---- recomputation -------------------------------------------------------------------------------------------------


def save_products(ctx: Any, op: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    kept = op is torch.ops.blockscale.scaled_mm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CASTS, ONE = {"quantize_both": 3}, {"quantize_both": 1}
# ways to recompute -> operators of the backward
WAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "not at all": ({}, ONE | {"scaled_mm": 2}),
    "reentrant": ({"use_reentrant": True}, CASTS | {"scaled_mm": 3}),
    "non-reentrant": ({"use_reentrant": False}, CASTS | {"scaled_mm": 3}),
    "selective": (
        {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(save_products)},
        CASTS | {"scaled_mm": 2},
    ),
}


@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_gives_the_same_bytes(way: str, name: str):
    """A recomputed forward casts once more, and does nothing else again."""
    p, q = Problem(*ODD), Problem(*ODD)
    named, wanted = WAYS[way]

    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sin(linear(x, weight, bias, name, rounding=drawn(name)))  # sin's backward needs y again

    y = checkpoint(block, *p.leaves(), **named) if named else block(*p.leaves())
    assert y is not None
    with Calls() as calls:
        y.backward(p.dy)
    assert calls.found == wanted
    want = torch.sin(q.forward(name))
    want.backward(q.dy)
    assert_same_bits([y.detach(), *p.grads()], [want.detach(), *q.grads()])


def test_a_shared_cast_of_the_weight_is_not_recomputed():
    p = Problem(*ODD)
    pair = bs.quantize_both(p.weight.detach(), "fp8_128x128", "fp8_128x128")
    y = checkpoint(lambda x, w, b: p.forward("fp8_blockwise", weight_operands=pair), *p.leaves(), use_reentrant=False)
    with Calls() as calls:
        y.backward(p.dy)  # pyright: ignore[reportOptionalMemberAccess]
    assert calls.found["quantize_both"] == 2


def test_a_layer_can_be_used_twice():
    """Weight gradients of both uses add up, as autograd adds them."""
    p, q = Problem(16, 64, 64), Problem(16, 64, 64)
    h = linear(p.x, p.weight, p.bias, "mxfp8")
    linear(h, p.weight, p.bias, "mxfp8").backward(p.dy)
    inner = linear(q.x, q.weight, q.bias, "mxfp8")
    other = q.weight.detach().clone().requires_grad_()
    linear(inner, other, q.bias, "mxfp8").backward(q.dy)
    assert_same_bits(p.weight.grad, other.grad + q.weight.grad)  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
    assert_same_bits([p.x.grad, p.bias.grad], [q.x.grad, q.bias.grad])  # pyright: ignore[reportOptionalMemberAccess]


def test_batched_calls_are_single_ones():
    p = Problem(*ODD, bias=False)
    xs = gaussian(3, 37, 72)
    with torch.no_grad():
        got = torch.func.vmap(lambda x: linear(x, p.weight, recipe="mxfp8"))(xs)
        assert_same_bits(got, torch.stack([linear(x, p.weight, recipe="mxfp8") for x in xs]))


@pytest.mark.parametrize("shape", [(2, 4, 0), (0, 4, 0), (4, 0)])
def test_inputs_without_features(shape: tuple[int, ...]):
    x, weight = torch.zeros(shape, requires_grad=True), torch.zeros(64, 0, requires_grad=True)
    y = linear(x, weight, None, get_recipe("mxfp8"))
    assert y.shape == (*shape[:-1], 64)
    assert not y.any()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
