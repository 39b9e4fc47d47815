"""`SwiGLU`: fused, or in parts if a sublayer is not plain; names, weights, shared casts, copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.autograd import swiglu_mlp
from blockscale.errors import OptionError, ShapeError
from blockscale.nn import Linear, SwiGLU
from support.helpers import first_of
from support.products import assert_same_bits, gaussian

DIM, HIDDEN, TOKENS = 72, 200, 37


def make(recipe: str | bs.Recipe = "fp8_blockwise", *, bias: bool = False, seed: int = 0) -> SwiGLU:
    torch.manual_seed(seed)
    return SwiGLU(DIM, HIDDEN, bias, dtype=torch.bfloat16, recipe=recipe, name="layers.0.mlp")


def trained(mlp: Callable[[Tensor], Tensor], *modules: torch.nn.Module) -> list[Tensor | None]:
    """y, dx and the gradients of all parameters, which are None again after."""
    x = gaussian(TOKENS, DIM, seed=1).requires_grad_()
    y = mlp(x)
    y.backward(gaussian(TOKENS, DIM, seed=2))
    grads = [param.grad for module in modules for param in module.parameters()]
    for module in modules:
        module.zero_grad()
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4", "mxfp8_wgrad_bf16", "bf16"])
def test_the_module_is_the_function(name: str):
    mlp = make(name, bias=True)
    state = bs.rng_state(0)

    def function(x: Tensor) -> Tensor:
        first, second = mlp.gate_up, mlp.down
        roundings = bs.Stochastic(state, "layers.0.mlp.gate_up"), bs.Stochastic(state, "layers.0.mlp.down")
        tensors = x, first.weight, second.weight, first.bias, second.bias
        return swiglu_mlp(*tensors, recipe=name, roundings=roundings)

    assert mlp.is_fused
    assert_same_bits(trained(mlp, mlp), trained(function, mlp))


def test_other_names_select_other_random_streams():
    mlp = make("nvfp4")
    want = trained(mlp, mlp)
    for layer, changed in ((mlp.down, [1, 2, 3]), (mlp.gate_up, [1, 2])):
        kept, layer.name = layer.name, "elsewhere"
        got = trained(mlp, mlp)
        layer.name = kept
        differ = [at for at in range(4) if not torch.equal(got[at], want[at])]  # pyright: ignore[reportArgumentType]
        assert differ == changed


def test_stochastic_rounding_needs_a_name():
    with pytest.raises(OptionError, match="without a name"):
        SwiGLU(DIM, HIDDEN, recipe="nvfp4")
    mlp = make("nvfp4")
    assert mlp.gate_up.rng is mlp.down.rng
    assert set(mlp.state_dict()) == {"gate_up.weight", "down.weight"}


# ---- sublayers that are not plain ------------------------------------------------------------------------------------


def in_parts(mlp: SwiGLU) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        gate, up = mlp.gate_up(x).chunk(2, -1)
        return mlp.down(silu(gate) * up)

    return run


def hooked(mlp: SwiGLU, kind: str, calls: list[str]) -> None:
    getattr(mlp.down, f"register_{kind}")(lambda *_: calls.append(kind))


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_sublayers_are_called(kind: str):
    mlp, calls = make(), []
    fused = trained(mlp, mlp)
    hooked(mlp, kind, calls)
    assert not mlp.is_fused
    got = trained(mlp, mlp)
    assert calls == [kind]
    assert_same_bits(got, trained(in_parts(mlp), mlp))
    # torch's silu rounds where the fused activation does not: close, and not the same
    assert not torch.equal(got[0], fused[0])  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(got[0], fused[0], atol=0.03, rtol=0.05)


def other_recipe(mlp: SwiGLU) -> None:
    mlp.down.apply_recipe("mxfp8")


def torchs_own(mlp: SwiGLU) -> None:
    mlp.down = torch.nn.Linear(HIDDEN, DIM, bias=False, dtype=torch.bfloat16)  # pyright: ignore[reportAttributeAccessIssue]


def own_forward(mlp: SwiGLU) -> None:
    forward = mlp.gate_up.forward
    mlp.gate_up.forward = lambda input: forward(input) * 2


def subclass(mlp: SwiGLU) -> None:
    class Doubled(Linear):
        def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(input) * 2

    mlp.gate_up.__class__ = Doubled


@pytest.mark.parametrize("change", [other_recipe, torchs_own, own_forward, subclass])
def test_a_replaced_sublayer_is_called(change: Callable[[SwiGLU], None]):
    mlp = make()
    change(mlp)
    assert not mlp.is_fused
    assert_same_bits(trained(mlp, mlp), trained(in_parts(mlp), mlp))


# ---- weights of other models -----------------------------------------------------------------------------------------


def projections(*, bias: bool = False, device: str = "cpu") -> list[torch.nn.Linear]:
    sizes = ((DIM, HIDDEN), (DIM, HIDDEN), (HIDDEN, DIM))
    return [torch.nn.Linear(*size, bias=bias, dtype=torch.bfloat16, device=device) for size in sizes]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_from_linears(bias: bool):
    gate, up, down = projections(bias=bias)
    mlp = SwiGLU.from_linears(gate, up, down, "bf16")
    want = trained(lambda x: down(silu(gate(x)) * up(x)), gate, up, down)
    got = trained(mlp, mlp)
    # dx is one product in place of two whose results were rounded and added
    torch.testing.assert_close(got[1], want[1], atol=0.02, rtol=0.02)
    parts = 2 if bias else 1
    joined = [torch.cat(pair) for pair in zip(want[2 : 2 + parts], want[2 + parts : 2 + 2 * parts], strict=True)]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert_same_bits([got[0], *got[2:]], [want[0], *joined, *want[2 + 2 * parts :]])
    assert mlp.down.weight is down.weight
    assert mlp.gate_up.weight.data_ptr() != gate.weight.data_ptr()
    assert_same_bits(list(mlp.gate_up.weight.chunk(2)), [gate.weight, up.weight])


def test_from_linears_on_the_meta_device():
    mlp = SwiGLU.from_linears(*projections(device="meta"), "nvfp4", name="mlp")
    assert {param.device.type for param in mlp.parameters()} == {"meta"}
    mlp.to_empty(device="cpu")
    assert mlp.gate_up.rng is not None
    assert mlp.gate_up.rng.tolist() == [0, 0]


def test_from_linears_refuses_what_does_not_fit():
    gate, up, down = projections()
    with pytest.raises(ShapeError, match="in this order"):
        SwiGLU.from_linears(gate, down, up)
    with pytest.raises(OptionError, match="differ in a bias"):
        SwiGLU.from_linears(gate, up, projections(bias=True)[2])
    with pytest.raises(OptionError, match="differ in a dtype"):
        SwiGLU.from_linears(gate, up.float(), down)


def test_copies_and_checkpoints():
    mlp = make("nvfp4", bias=True)
    want = trained(mlp, mlp)
    copied = copy.deepcopy(mlp)
    assert_same_bits(trained(copied, copied), want)
    file = io.BytesIO()
    torch.save(mlp.state_dict(), file)
    file.seek(0)
    other = make("nvfp4", bias=True, seed=1)
    assert not torch.equal(trained(other, other)[0], want[0])  # pyright: ignore[reportArgumentType]
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same_bits(trained(other, other), want)


# ---- in a training run -----------------------------------------------------------------------------------------------


def test_weights_are_cast_once_per_step():
    """Two microbatches, three steps: the numbers of casting in every forward, from one cast for each step."""
    recipe = bs.get_recipe("fp8_blockwise")
    plain, shared = make(recipe), make(recipe.replace(weight_cast="step"))
    optimizers = [torch.optim.AdamW(mlp.parameters(), lr=0.1) for mlp in (plain, shared)]
    bs.attach(optimizers[1], shared)
    for step in range(3):
        casts = [layer.shared_weight.casts for layer in (shared.gate_up, shared.down) if layer.shared_weight]
        assert casts == [step + 1] * 2
        for mlp, optimizer in zip((plain, shared), optimizers, strict=True):
            for micro in range(2):
                x = gaussian(TOKENS, DIM, seed=10 * step + micro)
                mlp(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(list(shared.parameters()), list(plain.parameters()))
    assert not torch.equal(plain.down.weight, make().down.weight)


# 50 and 64 tokens leave no padding after codes, which is another graph
@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "graphs"), first_of([([37, 70], 1), ([37, 50, 64], 2)], lambda each: each[1] == 1), ids=str
)
def test_compiled_module_with_any_number_of_tokens(numbers: list[int], graphs: int):
    torch._dynamo.reset()
    mlp = make("nvfp4")
    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlp, backend=frames, fullgraph=True, dynamic=True)
    for tokens in numbers:
        results = []
        for call in (compiled, mlp):
            x = gaussian(tokens, DIM, seed=tokens).requires_grad_()
            y = call(x)
            y.backward(gaussian(tokens, DIM, seed=3))
            results.append([y.detach(), x.grad, *(param.grad for param in mlp.parameters())])
            mlp.zero_grad()
        assert_same_bits(*results)
    assert frames.frame_count == graphs


def test_recomputation_gives_the_same_bytes():
    mlp = make("nvfp4")
    again = trained(lambda x: checkpoint(mlp, x, use_reentrant=False), mlp)  # pyright: ignore[reportArgumentType]
    assert_same_bits(again, trained(mlp, mlp))
