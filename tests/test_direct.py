"""The direct path of an operator: taken only if nothing intercepts the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import blockscale as bs
from blockscale import library
from blockscale.casts import ops as ops  # defines the operators
from blockscale.errors import DtypeError
from blockscale.formats.cast_spec import as_cast

OPERATOR = library.OPERATORS["quantize"]
REST = (as_cast("mxfp8_e4m3"), -1, None)


class Spy:
    """An operator that records which path a call takes."""

    def __init__(self, body: Callable[..., object] = lambda *args: None) -> None:
        self.paths: list[str] = []
        self._schema = OPERATOR._schema
        self._body = body
        flatten = library.PARAMETERS["quantize"].flatten
        self.function = library._direct(self, self.run, flatten)  # pyright: ignore[reportArgumentType]

    def __call__(self, x: Tensor, *rest: object) -> Tensor:
        self.paths.append("operator")
        return x

    def run(self, x: Tensor, *rest: object) -> object:
        self.paths.append("direct")
        return self._body(x)

    def path(self, x: Tensor) -> str:
        self.function(x, *REST)
        return self.paths.pop()


def source() -> Tensor:
    return torch.ones(4, 32)


@pytest.mark.parametrize(
    "make",
    [
        source,
        lambda: nn.Parameter(source()),
        lambda: source().bfloat16().mT,
        lambda: source().requires_grad_(),
        lambda: torch.inference_mode()(source)(),
    ],
    ids=["plain", "parameter", "transposed", "requires grad", "inference"],
)
def test_plain_tensors_take_the_direct_path(make: Callable[[], Tensor]) -> None:
    x = make()
    assert Spy().path(x) == "direct"
    with torch.no_grad():
        assert Spy().path(x) == "direct"
    with torch.inference_mode():
        assert Spy().path(x) == "direct"
    with torch.autocast("cpu", torch.bfloat16):
        assert Spy().path(x) == "direct"


class Sub(Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: source().as_subclass(Sub),
        lambda: FakeTensorMode().from_tensor(source()),
        lambda: source().to("meta"),
        lambda: torch.ones(4, 32, dtype=torch.complex64).conj().imag,
        lambda: torch._to_functional_tensor(source()),
    ],
    ids=["subclass", "fake", "meta", "lazy negation", "functional"],
)
def test_other_tensors_take_the_operator(make: Callable[[], Tensor]) -> None:
    assert Spy().path(make()) == "operator"


def test_tensors_without_strides_reach_no_kernel() -> None:
    """Neither the operator nor its body runs: the torch reference would accept a sparse tensor."""
    for make in (lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor([x])):
        with pytest.raises(DtypeError, match=r"casts and products take dense tensors\. Fix: pass "):
            Spy().path(make(source()))


@pytest.mark.parametrize("mode", [Functions, Dispatches, FakeTensorMode, lambda: FlopCounterMode(display=False)])
def test_modes_see_the_operator(mode: Callable[[], TorchFunctionMode]) -> None:
    x = source()
    with mode():
        assert Spy().path(x) == "operator"
    assert Spy().path(x) == "direct"


def test_a_default_device_is_a_mode() -> None:
    with torch.device("cpu"):
        assert Spy().path(source()) == "operator"


def test_a_profiler_sees_the_operator() -> None:
    x = source()
    with torch.profiler.profile() as profile:
        assert Spy().path(x) == "operator"
        bs.quantize(x, "mxfp8_e4m3")
    assert "blockscale::quantize" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    "transform",
    [
        make_fx,
        lambda f: make_fx(f, pre_dispatch=True),
        torch.func.vmap,
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        torch.func.functionalize,
        lambda f: lambda x: torch.jit.trace(f, x, check_trace=False),
    ],
    ids=["make_fx", "pre-dispatch", "vmap", "grad", "functionalize", "jit"],
)
def test_transforms_see_the_operator(transform: Callable[..., Callable[..., object]]) -> None:
    spy = Spy()
    transform(lambda x: spy.function(x, *REST))(source())
    assert set(spy.paths) == {"operator"}


def test_graphs_contain_the_operator() -> None:
    targets: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: bs.quantize(x, "mxfp8_e4m3").data, backend=backend, fullgraph=True)(source())
    assert OPERATOR in targets
    graph = make_fx(lambda x: bs.quantize(x, "mxfp8_e4m3").data)(source())
    assert OPERATOR in {node.target for node in graph.graph.nodes}


def test_the_body_is_shielded_from_autocast_and_autograd() -> None:
    def body(x: Tensor) -> None:
        seen.append((torch.mm(x, x.mT).dtype, (2 * x).requires_grad))

    seen: list[tuple[torch.dtype, bool]] = []
    x = source().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert Spy(body).path(x) == "direct"
        assert Spy(body).path(x.detach()) == "direct"
    assert Spy(body).path(x) == "direct"
    assert seen == [(torch.float32, False)] * 3
