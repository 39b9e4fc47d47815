"""torch.compile(fullgraph=True) over every public function: the same bytes as eager, no graph break, no recompile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import blockscale as bs
from blockscale import CastSpec, Stochastic, rng_state
from blockscale.formats import FORMATS
from blockscale.tracing import constant_when_compiled
from support.helpers import first_of, has_cpp_compiler
from support.products import ONE_D, assert_same_bits, gaussian, offsets, partner

K, N = 96, 40
# both leave a tail in every block and padding in every row of codes; neither gives a size that K or N gives
ROWS = (100, 116)

needs_inductor = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler, found none")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Reset dynamo's guards and counters between tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same_compiled(
    function: Callable[..., object],
    *calls: tuple[object, ...],
    backend: str = "aot_eager",
    dynamic: bool | None = False,
) -> int:
    """Compile once, compare every call and what it writes to with eager bit for bit; returns the frames compiled."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    for args in calls:
        # buffers to accumulate into are arguments themselves, never inside an operand
        eager_args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        want = function(*eager_args)
        got = compiled(*args)
        assert_same_bits(got, want)
        assert_same_bits(list(args), eager_args)
    return counter.frame_count


# ---- every public function, every format ---------------------------------------------------------------------------


def sources(device: torch.device) -> list[torch.Tensor]:
    return [gaussian(rows, K, device=device, seed=rows) for rows in ROWS]


def problem(kind: str, name: str, device: torch.device) -> tuple[Callable[..., object], list[tuple[object, ...]]]:
    """A function of tensors and operands, and arguments for two sizes."""
    other = partner(name)
    spec = FORMATS[name]
    xs = sources(device)
    w = gaussian(N, K, device=device)
    if kind == "quantize":
        return partial(bs.quantize, format=name), [(x,) for x in xs]
    if kind == "quantize axis -2":
        return partial(bs.quantize, format=name, axis=-2), [(x,) for x in xs]
    if kind == "quantize_both":
        return partial(bs.quantize_both, row=name, col=name, colsum=True), [(x,) for x in xs]
    if kind == "dequantize":
        return bs.dequantize, [(bs.quantize(x, name, axis=-2),) for x in xs]
    if kind == "scaled_mm":
        bias, b = gaussian(N, device=device), bs.quantize(w, other)
        return (lambda a, b, bias: bs.scaled_mm(a, b, bias=bias)), [(bs.quantize(x, name), b, bias) for x in xs]
    if kind == "accumulate":
        b = bs.quantize(w, other)
        accs = [torch.ones(rows, N, device=device) for rows in ROWS]
        return (
            lambda acc, a, b: bs.scaled_mm(a, b, accumulate=acc) * 2,
            [(acc, bs.quantize(x, name), b) for acc, x in zip(accs, xs, strict=True)],
        )
    assert not spec.is_2d
    offs = [offsets([5, 0, rows - 8], device) for rows in ROWS]
    if kind == "m_grouped":
        experts = bs.quantize(gaussian(3, N, K, device=device), other)
        return bs.scaled_grouped_mm, [(bs.quantize(x, name), experts, o) for x, o in zip(xs, offs, strict=True)]
    assert kind == "k_grouped"

    def wgrad(acc, x, dy, offs):
        a = bs.quantize(dy, name, axis=-2, offs=offs).mT
        b = bs.quantize(x, name, axis=-2, offs=offs).mT
        return bs.scaled_grouped_mm(a, b, offs), bs.scaled_grouped_mm(a, b, offs, accumulate=acc)

    dys = [gaussian(rows, N, device=device, seed=rows + 1) for rows in ROWS]
    accs = [torch.ones(3, N, K, device=device) for _ in ROWS]
    return wgrad, list(zip(accs, xs, dys, offs, strict=True))


KINDS = ("quantize", "quantize axis -2", "quantize_both", "dequantize", "scaled_mm", "accumulate")
CASES = [(kind, name) for kind in KINDS for name in FORMATS]
CASES += [(kind, name) for kind in ("m_grouped", "k_grouped") for name in ONE_D]


# a format of each family for what differs from other tests in how it is traced, not in what
FAMILIES = ["mxfp8_e4m3", "nvfp4", "fp8_1x128"]


@pytest.mark.parametrize(("kind", "name"), first_of(CASES, lambda case: case[1] in FAMILIES))
def test_eager_backend(device, kind, name):
    function, calls = problem(kind, name, device)
    assert same_compiled(function, calls[0], backend="eager") == 1


def round_trip(x, w, acc, bias, name):
    """Casts along both axes, decode, product, product into a buffer."""
    row, col, total = bs.quantize_both(x, name, name, colsum=True)
    other = bs.quantize(w, partner(name))
    y = bs.scaled_mm(row, other, torch.float32, bias=bias)
    return row, col, total, bs.dequantize(col), y, bs.scaled_mm(row, other, accumulate=acc)


def round_trip_args(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    x, w = gaussian(rows, K, device=device, seed=rows), gaussian(N, K, device=device)
    return x, w, torch.ones(rows, N, device=device), gaussian(N, device=device, seed=1)


@pytest.mark.parametrize("name", first_of(FORMATS, lambda name: name in FAMILIES))
def test_aot_eager_backend_with_dynamic_sizes(device, name):
    calls = [round_trip_args(rows, device) for rows in ROWS]
    assert same_compiled(partial(round_trip, name=name), *calls, dynamic=True) == 1


# NVFP4 has a scale of the tensor beside those of blocks: more to trace than any other family
@pytest.mark.parametrize("name", first_of(FAMILIES, lambda name: name == "nvfp4"))
def test_aot_eager_backend(device, name):
    assert same_compiled(partial(round_trip, name=name), round_trip_args(ROWS[0], device)) == 1


@pytest.mark.parametrize("name", first_of(FAMILIES, lambda name: name == "nvfp4"))
def test_eager_backend_with_dynamic_sizes(device, name):
    calls = [round_trip_args(rows, device) for rows in ROWS]
    assert same_compiled(partial(round_trip, name=name), *calls, backend="eager", dynamic=True) == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    first_of(
        itertools.product(["dequantize", "scaled_mm", "m_grouped", "k_grouped"], FAMILIES),
        lambda case: case[0] != "k_grouped" or case[1] == "nvfp4",
    ),
)
def test_operands_with_dynamic_sizes(device, kind, name):
    """Operands as arguments of a graph: their sizes are symbols too."""
    function, calls = problem(kind, name, device)
    assert same_compiled(function, *calls, dynamic=True) == 1


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3"])
def test_any_size_costs_two_graphs_at_most(device, name):
    """Rows of codes with a pad and without one have different strides; nothing else depends on a size."""
    calls = [(gaussian(rows, K, device=device),) for rows in (128, 100, 116, 160, 37)]
    assert same_compiled(partial(bs.quantize, format=name, axis=-2), *calls, dynamic=True) <= 2


# ---- a whole layer -------------------------------------------------------------------------------------------------


def layer(x, w, dy, acc, state, form, weight_form):
    """fprop, dgrad and wgrad of a linear layer, with stochastic rounding and rotation of the gradient if possible."""
    rotate = weight_form == "mxfp4"
    stochastic = Stochastic(state, "layers.0")
    row, col = bs.quantize_both(x, form, CastSpec(form, hadamard=rotate))
    w_row, w_col = bs.quantize(w, weight_form), bs.quantize(w, weight_form, axis=-2)
    dy_row = CastSpec(form, rounding=stochastic, role="dgrad_dy") if rotate else CastSpec(form)
    dy_col = CastSpec(form, rounding=stochastic, role="wgrad_dy", hadamard=True) if rotate else CastSpec(form)
    dy_row, dy_col, dbias = bs.quantize_both(dy, dy_row, dy_col, colsum=True)
    y = bs.scaled_mm(row, w_row)
    dx = bs.scaled_mm(dy_row, w_col.mT)
    return y, dx, bs.scaled_mm(dy_col.mT, col.mT, accumulate=acc), dbias


def layer_args(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return (
        gaussian(rows, K, device=device, seed=1),
        gaussian(N, K, device=device, seed=2),
        gaussian(rows, N, device=device, seed=3),
        torch.ones(N, K, device=device),
        rng_state(3, tick=4, device=device),
    )


LAYERS = {
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "mxfp8 by 128x128": ("mxfp8_e4m3", "mxfp8_e4m3_128x128"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4_16x16"),
    "fp8": ("fp8_1x128", "fp8_128x128"),
}


@pytest.mark.parametrize("recipe", first_of(LAYERS, lambda recipe: not recipe.startswith("mxfp8")))
def test_layer(device, recipe):
    form, weight_form = LAYERS[recipe]
    function = partial(layer, form=form, weight_form=weight_form)
    assert same_compiled(function, layer_args(ROWS[0], device)) == 1


def on_devices(values, kept):
    """All cases on a GPU; on a CPU, where a C++ compiler takes seconds for each, the kept ones, and all with --all."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    gpu = [pytest.param("cuda", *value, marks=pytest.mark.gpu) for value in several]
    return [*first_of([("cpu", *value) for value in several], lambda case: case[1] == kept), *gpu]


@needs_inductor
@pytest.mark.parametrize(("device", "recipe"), on_devices(LAYERS, "nvfp4"), indirect=["device"])
def test_layer_through_inductor(device, recipe):
    form, weight_form = LAYERS[recipe]
    function = partial(layer, form=form, weight_form=weight_form)
    assert same_compiled(function, layer_args(ROWS[0], device), backend="inductor") == 1


@needs_inductor
@pytest.mark.parametrize(
    ("device", "kind", "name"),
    on_devices(
        [("dequantize", "mxfp6_e2m3"), ("m_grouped", "nvfp4"), ("k_grouped", "fp8_1x128"), ("accumulate", "mxfp4")],
        None,  # the layer above casts, multiplies and accumulates
    ),
    indirect=["device"],
)
def test_inductor(device, kind, name):
    function, calls = problem(kind, name, device)
    assert same_compiled(function, calls[0], backend="inductor") == 1


@needs_inductor
def test_inductor_with_dynamic_sizes_and_fused_neighbours(device):
    """Pointwise work before and after a cast is inductor's; the bytes in between stay ours."""

    def function(x, w):
        q = bs.quantize(torch.relu(x) * 2, "mxfp8_e4m3")
        return torch.relu(bs.scaled_mm(q, bs.quantize(w, "mxfp8_e4m3"))) + 1, q

    calls = [(x, gaussian(N, K, device=device)) for x in sources(device)]
    assert same_compiled(function, *calls, backend="inductor", dynamic=True) == 1


# ---- operands as arguments and results -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_operands_pass_through_graphs(device, name):
    """In, transposed, converted and out, as an argument, in a list and in a dictionary."""

    def function(operand, pair):
        first, second = pair["both"]
        return {"mT": operand.mT, "plain": operand.with_layout("plain"), "decoded": bs.dequantize(first)}, second

    x = gaussian(48, K, device=device)
    row, col = bs.quantize_both(x, name, name)
    assert same_compiled(function, (row, {"both": [row, col]}), backend="eager") == 1


def test_operands_made_outside_and_inside_are_one_type(device):
    function = torch.compile(lambda x: bs.quantize(x, "nvfp4"), backend="aot_eager", fullgraph=True)
    x = gaussian(48, K, device=device)
    inside, outside = function(x), bs.quantize(x, "nvfp4")
    assert type(inside) is type(outside) is bs.BlockScaled
    assert_same_bits(bs.scaled_mm(inside, outside), bs.scaled_mm(outside, outside))


def test_bad_input_raises_while_tracing():
    """The message of an error survives torch.compile."""
    a, b = bs.quantize(torch.ones(4, 32), "mxfp4"), bs.quantize(torch.ones(4, 64), "mxfp4")
    with pytest.raises(Exception, match="K = 32 and 64") as caught:
        torch.compile(lambda a, b: bs.scaled_mm(a, b), backend="eager", fullgraph=True)(a, b)
    assert "transpose before the cast" in str(caught.value)


def test_a_new_tick_is_data_not_a_constant(device):
    """The state is a tensor: a new tick rounds differently without a recompile."""

    def function(x, state):
        return bs.quantize(x, CastSpec("mxfp4", rounding=Stochastic(state, "layer"), role="dgrad_dy"))

    x = gaussian(64, K, device=device)
    calls = [(x, rng_state(1, tick, device)) for tick in range(3)]
    assert same_compiled(function, *calls) == 1
    codes = [function(*call).data.view(torch.uint8) for call in calls]
    assert not torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[1], codes[2])


def test_group_sizes_are_data_not_constants(device):
    def function(x, w, offs):
        return bs.scaled_grouped_mm(bs.quantize(x, "mxfp8_e4m3"), bs.quantize(w, "mxfp8_e4m3"), offs)

    x, w = gaussian(64, K, device=device), gaussian(3, N, K, device=device)
    calls = [(x, w, offsets(sizes, device)) for sizes in ([64, 0, 0], [0, 31, 33], [1, 2, 3])]
    assert same_compiled(function, *calls) == 1


def test_counts_of_padded_experts_are_data_not_constants(device):
    def function(x, w, starts, counts, acc):
        a, b = bs.quantize(x.flatten(0, 1), "mxfp8_e4m3"), bs.quantize(w, "mxfp8_e4m3")
        y = bs.scaled_grouped_mm(a, b, starts + counts, starts=starts).unflatten(0, x.shape[:2])
        return y[:, :1], bs.scaled_grouped_mm(a, b, starts + counts, accumulate=acc, starts=starts)

    x, w = gaussian(3, 20, K, device=device), gaussian(3, N, K, device=device)
    starts = torch.arange(0, 60, 20, dtype=torch.int32, device=device)
    calls = [
        (x, w, starts, torch.tensor(counts, dtype=torch.int32, device=device), torch.ones(60, N, device=device))
        for counts in ([1, 2, 3], [20, 1, 20])
    ]
    assert same_compiled(function, *calls) == 1


def test_a_forced_backend_holds_inside_a_graph(device):
    """Selection happens when the graph runs, not when it is traced."""
    q = bs.quantize(gaussian(16, K, device=device), "fp8_1x128")
    function = torch.compile(lambda a, b: bs.scaled_mm(a, b, torch.float32), backend="aot_eager", fullgraph=True)
    want = bs.scaled_mm(q, q, torch.float32)
    assert_same_bits(function(q, q), want)
    m = bs.quantize(gaussian(16, K, device=device), "mxfp8_e4m3")
    chosen = function(m, m)
    with bs.use_backend(gemm="reference"):
        assert_same_bits(function(m, m), bs.scaled_mm(m, m, torch.float32))
    assert_same_bits(function(m, m), chosen)
    if device.type == "cpu":
        with bs.use_backend(gemm="torch"), pytest.raises(bs.errors.BackendError):
            function(q, q)


def test_export(device):
    """torch.export takes a module that casts and multiplies."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(gaussian(N, K, device=device), requires_grad=False)

        def forward(self, x):
            return bs.scaled_mm(bs.quantize(x, "mxfp8_e4m3"), bs.quantize(self.weight, "mxfp8_e4m3"))

    module, x = Module(), gaussian(24, K, device=device)
    program = torch.export.export(module, (x,))
    assert_same_bits(program.module()(x), module(x))


def test_constants_are_marked_as_torch_marks_them():
    """A copy of its decorator, which would import the compiler."""
    marked = vars(torch.compiler.assume_constant_result(lambda: 0))
    assert vars(constant_when_compiled(lambda: 0)) == marked != {}
