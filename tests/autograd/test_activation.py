"""`activation`: one cast for all layers that take an input, the same bytes as a cast for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale import launch
from blockscale.autograd import activation, get_recipe, linear, linear_plan, mlp_plan, swiglu_mlp
from blockscale.errors import DtypeError, OptionError, ShapeError, StaleActivationError
from support.linear_reference import LOW, Calls, drawn
from support.products import assert_same_bits, gaussian

K, SIZES = 72, (200, 33, 64)


class Projections:
    """An input and three weights, as of q, k and v."""

    def __init__(self, *lead: int, dtype: torch.dtype = torch.bfloat16):
        self.x = gaussian(*(lead or (37,)), K, seed=1).to(dtype).requires_grad_()
        self.weights = [(gaussian(n, K, seed=n) / 8).to(dtype).requires_grad_() for n in SIZES]
        self.dys = [gaussian(*self.x.shape[:-1], n, seed=n + 1).to(dtype) for n in SIZES]

    def run(self, x: Any, recipe: str | bs.Recipe) -> list[Tensor]:
        ys = [linear(x, weight, recipe=recipe, rounding=drawn(recipe)) for weight in self.weights]
        torch.autograd.backward(ys, self.dys)
        return [y.detach() for y in ys]

    def grads(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in (self.x, *self.weights)]


@pytest.mark.parametrize("lead", [(), (2, 3), (0,)], ids=["2-D", "3-D", "empty"])
@pytest.mark.parametrize("name", [*LOW, "bf16"])
def test_a_shared_cast_gives_the_bytes_of_separate_casts(name: str, lead: tuple[int, ...]):
    p, q = Projections(*lead), Projections(*lead)
    got, want = p.run(activation(p.x, name), name), q.run(q.x, name)
    assert_same_bits([got, p.grads()], [want, q.grads()])


def test_the_gradient_is_the_sum_in_high_precision():
    p, q = Projections(dtype=torch.float32), Projections(dtype=torch.float32)
    p.run(activation(p.x, "mxfp8"), "mxfp8")
    alone = []
    for weight, dy in zip(q.weights, q.dys, strict=True):
        alone += torch.autograd.grad(linear(q.x, weight, recipe="mxfp8"), q.x, dy)
    torch.testing.assert_close(p.x.grad, sum(alone))


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=["2-D", "3-D"])
def test_an_input_is_cast_once(lead: tuple[int, ...]):
    p = Projections(*lead)
    with Calls() as calls:
        shared = activation(p.x, "fp8_blockwise")
    assert calls.found == {"quantize_both": 1}
    with Calls() as calls:
        ys = [linear(shared, weight) for weight in p.weights]
    assert calls.found == {"quantize_both": 3, "scaled_mm": 3}  # of the weights
    with Calls() as calls:
        torch.autograd.backward(ys, p.dys)
    assert calls.found == {"quantize_both": 3, "scaled_mm": 6}  # of the gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_backward_only_fprops_operand_is_cast(mode: Callable[[], Any]):
    p = Projections()
    want = p.run(p.x, "mxfp8")
    with mode(), Calls() as calls:
        shared = activation(p.x, "mxfp8")
        ys = [linear(shared, weight, recipe="mxfp8") for weight in p.weights]
    assert calls.found == {"quantize": 1 + 3, "scaled_mm": 3}
    assert_same_bits([y.clone() for y in ys], want)


def test_an_activation_made_without_grad_can_be_trained_with():
    """wgrad's operand is then cast in the backward."""
    p, q = Projections(), Projections()
    with torch.no_grad():
        shared = activation(p.x, "fp8_blockwise")
    got = p.run(shared, "fp8_blockwise")
    assert_same_bits([got, p.grads()], [q.run(q.x, "fp8_blockwise"), q.grads()])


def test_saved_sources_are_cast_in_the_backward():
    recipe = get_recipe("mxfp8").replace(saves="source")
    p, q = Projections(), Projections()
    with Calls() as calls:
        shared = activation(p.x, recipe)
    assert calls.found == {"quantize": 1}
    assert_same_bits([p.run(shared, recipe), p.grads()], [q.run(q.x, recipe), q.grads()])


def test_gradients_reach_the_leaves_behind_the_input():
    p, q = Projections(), Projections()
    p.run(activation(torch.relu(p.x), "mxfp8"), "mxfp8")
    q.run(torch.relu(q.x), "mxfp8")
    assert_same_bits(p.grads(), q.grads())


def test_one_vector_is_an_input():
    weight = gaussian(64, K)
    x = gaussian(K)
    assert_same_bits(linear(activation(x, "mxfp8"), weight, recipe="mxfp8"), linear(x, weight, recipe="mxfp8"))
    assert activation(x, "mxfp8").shape == (K,)


def test_layers_that_cast_inputs_alike_may_differ_elsewhere():
    recipe = get_recipe("mxfp8")
    others = [
        recipe.replace(weight_cast="twice"),
        recipe.with_weights("mxfp8_e4m3_128x128"),
        recipe.replace(dgrad=None),
    ]
    for other in others:
        p, q = Projections(), Projections()
        assert_same_bits([p.run(activation(p.x, recipe), other), p.grads()], [q.run(q.x, other), q.grads()])


def test_an_unquantized_layer_takes_the_input_itself():
    p, q = Projections(), Projections()
    assert_same_bits([p.run(activation(p.x, "mxfp8"), "bf16"), p.grads()], [q.run(q.x, "bf16"), q.grads()])


@pytest.mark.parametrize(
    ("made", "used"), [("mxfp8", "fp8_blockwise"), ("bf16", "mxfp8"), ("mxfp8", "mxfp8_wgrad_bf16")]
)
def test_layers_with_other_input_formats_refuse_it(made: str, used: str):
    p = Projections()
    with pytest.raises(OptionError, match=rf"cast by '{made}' for a layer with '{used}'.*activation\(x, '{used}'\)"):
        linear(activation(p.x, made), p.weights[0], recipe=used)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.ones(4, K, dtype=torch.int64), DtypeError, "dtype torch.int64"),
        (torch.ones(4, K, dtype=torch.float64), DtypeError, "dtype torch.float64"),
        (torch.tensor(1.0), ShapeError, r"shape \(\)"),
    ],
    ids=["integers", "doubles", "scalar"],
)
def test_inputs_that_casts_do_not_take_are_refused(x: Tensor, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        activation(x, "mxfp8")


# ---- an input that changes -----------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.mul_(3),
    "by a view": lambda x: x[0].zero_(),
    "detached": lambda x: x.detach().mul_(3),
    "in inference mode": torch.inference_mode()(lambda x: x.mul_(3)),
    "other data": lambda x: setattr(x, "data", 3 * x.detach()),
    "other data, twice": lambda x: [setattr(x, "data", torch.empty_like(x).fill_(at)) for at in (2.0, 3.0)],
    "swapped": lambda x: torch.utils.swap_tensors(x, (3 * x.detach()).requires_grad_()),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("write", WRITES)
def test_an_input_that_changed_after_its_cast_is_refused(write: str, mode: Callable[[], Any]):
    p = Projections()
    with mode():
        shared = activation(p.x, "mxfp8")
        kept = linear(shared, p.weights[0], recipe="mxfp8")
    with torch.no_grad():
        WRITES[write](p.x)
    for call in (
        lambda: linear(shared, p.weights[1], recipe="mxfp8"),
        lambda: swiglu_mlp(shared, p.weights[0], gaussian(K, SIZES[0] // 2), recipe="mxfp8"),
        lambda: torch.no_grad()(linear)(shared, p.weights[1], recipe="mxfp8"),
    ):
        with pytest.raises(StaleActivationError, match=r"an activation \(37, 72\) whose input has changed.*Fix: call"):
            call()
    assert kept.shape == (37, SIZES[0])


def test_an_input_that_changed_before_a_backward_that_reads_it_is_refused():
    """An activation made without grad has no operand for wgrad: the backward casts the input, which must not change."""
    p = Projections()
    with torch.no_grad():
        shared = activation(p.x, "mxfp8")
    y = linear(shared, p.weights[0], recipe="mxfp8")
    with torch.no_grad():
        p.x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(p.dys[0])


def test_an_input_made_in_inference_mode_is_cast_by_every_layer():
    """It has no version counter, so a stale cast could not be detected."""
    with torch.inference_mode():
        p = Projections()
        shared = activation(p.x, "mxfp8")
        for _ in range(3):
            got, want = (linear(x, p.weights[0], recipe="mxfp8") for x in (shared, p.x))
            assert_same_bits(got, want)
            p.x.mul_(3)
        got = swiglu_mlp(shared, p.weights[0], gaussian(K, SIZES[0] // 2), recipe="mxfp8")
        assert_same_bits(got, swiglu_mlp(p.x, p.weights[0], gaussian(K, SIZES[0] // 2), recipe="mxfp8"))


def test_an_unquantized_layer_takes_an_input_that_changed():
    p = Projections()
    shared = activation(p.x, "mxfp8")
    with torch.no_grad():
        p.x.mul_(3)
    assert_same_bits(linear(shared, p.weights[0], recipe="bf16"), linear(p.x, p.weights[0], recipe="bf16"))


def test_features_that_do_not_fit_are_an_error():
    with pytest.raises(ShapeError, match=f"pass x with {K} features"):
        linear(activation(gaussian(4, K + 1), "mxfp8"), gaussian(64, K), recipe="mxfp8")


# ---- callers -------------------------------------------------------------------------------------------------------


def attention(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    shared = activation(x, "fp8_blockwise")
    return tuple(linear(shared, weight) for weight in weights)


def test_compiled_bytes_are_eager_ones():
    torch._dynamo.reset()
    p, q = Projections(), Projections()
    counter = AotEagerAndRecordGraphs()
    ys = torch.compile(attention, backend=counter, fullgraph=True)(p.x, *p.weights)
    casts = [node for node in counter.fw_graphs[0].graph.nodes if "quantize_both" in str(node.target)]
    assert len(casts) == 1 + 3
    torch.autograd.backward(ys, p.dys)
    want = q.run(q.x, "fp8_blockwise")
    assert_same_bits([[y.detach() for y in ys], p.grads()[1:]], [want, q.grads()[1:]])
    torch.testing.assert_close(p.x.grad, q.x.grad)  # three gradients are added in another order


def test_recomputation_casts_once_more():
    p, q = Projections(), Projections()
    ys = checkpoint(attention, p.x, *p.weights, use_reentrant=False)
    with Calls() as calls:
        torch.autograd.backward(ys, p.dys)  # pyright: ignore[reportArgumentType]
    assert calls.found["quantize_both"] == 1 + 3 + 3
    q.run(q.x, "fp8_blockwise")
    assert_same_bits(p.grads(), q.grads())


def test_modules_take_it():
    layers = [bs.nn.Linear(K, n, recipe="mxfp8", dtype=torch.bfloat16) for n in SIZES]
    x = gaussian(37, K)
    shared = activation(x, "mxfp8")
    assert_same_bits([layer(shared) for layer in layers], [layer(x) for layer in layers])


def test_a_recordings_key_has_the_operands_that_exist(monkeypatch):
    """A frozen layer whose input needs no gradient runs the same kernels in training and without autograd, but an
    activation has a column operand only in training: addresses would be off by two."""
    keys: list[tuple[object, int]] = []

    def run(key, call, inputs, results):
        keys.append((key, len(inputs)))
        return call()

    for module in (linear_plan, mlp_plan):
        monkeypatch.setattr(module, "can_be_replayed", lambda tensors: True)
    monkeypatch.setattr(launch, "run_and_record", run)
    monkeypatch.setattr(launch, "find_recording", lambda key: None)
    x, weight, down = torch.randn(8, 64), torch.randn(64, 64), torch.randn(32, 32)
    for call in (
        lambda: linear(activation(x, "mxfp8"), weight, recipe="mxfp8"),
        lambda: swiglu_mlp(activation(x, "mxfp8"), weight, down, recipe="mxfp8"),
    ):
        keys.clear()
        call()
        with torch.no_grad():
            call()
        (first, some), (second, fewer) = keys
        assert (first == second) == (some == fewer)
        assert some != fewer


def test_a_recordings_key_has_the_layouts_of_operands(monkeypatch):
    """Operands of a weight that were cast elsewhere may have other scale layouts, formats or alignments: a replay would
    read them as the recorded ones."""
    keys: list[object] = []
    monkeypatch.setattr(linear_plan, "can_be_replayed", lambda tensors: True)
    monkeypatch.setattr(launch, "run_and_record", lambda key, call, inputs, results: (keys.append(key), call())[1])
    monkeypatch.setattr(launch, "find_recording", lambda key: None)
    x, weight = torch.randn(8, 128), torch.randn(128, 128)
    row, col = bs.quantize_both(weight, "mxfp8_e4m3", "mxfp8_e4m3")
    pairs = [
        (row, col),
        (row.with_layout("blocked"), col.with_layout("blocked")),
        bs.quantize_both(weight, "mxfp8_e5m2", "mxfp8_e5m2"),
        (row, col),
    ]
    for pair in pairs:
        linear(x, weight, recipe="mxfp8", weight_operands=pair)
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
