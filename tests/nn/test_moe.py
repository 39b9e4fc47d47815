"""`MoE` against a plain loop over tokens; load balancing; compiled; no host sync."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.errors import OptionError, UnknownNameError
from blockscale.nn import MoE
from support.helpers import first_of
from support.linear_reference import sqnr
from support.products import assert_same_bits, gaussian

DIM, HIDDEN, EXPERTS = 64, 48, 6


def make(recipe: str | bs.Recipe = "bf16", *, top_k: int = 2, seed: int = 0, **named: Any) -> MoE:
    torch.manual_seed(seed)
    named = {"dtype": torch.float32, "name": "layers.0.mlp"} | named
    return MoE(dim=DIM, hidden=HIDDEN, experts=EXPERTS, top_k=top_k, recipe=recipe, **named)


def trained(moe: Any, module: MoE, tokens: int = 37) -> list[Tensor | None]:
    dtype = module.router.weight.dtype
    x = gaussian(tokens, DIM, seed=1).to(dtype).requires_grad_()
    y = moe(x)
    y.backward(gaussian(tokens, DIM, seed=2).to(dtype))
    grads = [param.grad for param in module.parameters()]
    module.zero_grad()
    return [y.detach(), x.grad, *grads]


def by_loop(moe: MoE, *, scoring: str, normalize: bool, scale: float) -> Any:
    """Token by token, expert by expert, in fp64."""

    def run(x: Tensor) -> Tensor:
        out: list[Tensor] = []
        for token in x.double():
            logits = moe.router.weight.double() @ token
            scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
            biased = scores.detach() if moe.balance is None else scores.detach() + moe.balance
            chosen = biased.argsort(descending=True)[: moe.top_k].tolist()
            weights = scores[chosen]
            weights = (weights / weights.sum() if normalize else weights) * scale
            parts = [(moe.experts, e) for e in chosen]
            y = torch.zeros_like(token)
            for weight, (experts, e) in zip(weights, parts, strict=True):
                first, second = experts.gate_up, experts.down
                hidden = linear(token, first.weight[e].double(), None if first.bias is None else first.bias[e].double())
                gate, up = hidden.chunk(2)
                last = None if second.bias is None else second.bias[e].double()
                y = y + weight * linear(silu(gate) * up, second.weight[e].double(), last)
            if moe.shared is not None:
                gate, up = linear(token, moe.shared.gate_up.weight.double()).chunk(2)
                y = y + linear(silu(gate) * up, moe.shared.down.weight.double())
            out.append(y)
        return torch.stack(out).to(x.dtype)

    return run


OPTIONS = [
    {"scoring": "softmax", "normalize": True, "scale": 1.0},
    {"scoring": "softmax", "normalize": False, "scale": 1.0},
    {"scoring": "sigmoid", "normalize": True, "scale": 2.5},
]


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: " ".join(map(str, each.values())))
def test_it_is_a_loop_over_tokens(options: dict[str, Any], top_k: int):
    """Values and all gradients, the router's through its gate weights included."""
    moe = make(top_k=top_k, shared=32, balance=True, **options)
    assert moe.balance is not None
    moe.balance.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    got, want = trained(moe, moe), trained(by_loop(moe, **options), moe)
    for mine, theirs in zip(got, want, strict=True):
        # with one expert and normalized gate weights the router's gradient is rounding noise
        if top_k == 1 and options["normalize"] and mine is got[2]:
            assert float(mine.abs().max()) < 1e-5  # pyright: ignore[reportOptionalMemberAccess]
        else:
            assert sqnr(mine, theirs) > 100


def test_experts_with_biases():
    moe = make(bias=True)
    got, want = trained(moe, moe), trained(by_loop(moe, **OPTIONS[0]), moe)
    assert min(map(sqnr, got, want)) > 100


# lower bounds of SQNR of y, dx and the gradients of router and experts, in dB
LEAST = {"fp8_blockwise": 22.0, "mxfp8": 22.0, "nvfp4": 8.0}


@pytest.mark.parametrize("name", LEAST)
def test_low_precision_is_close(name: str):
    high, low = make(shared=32), make(name, shared=32)
    assert_same_bits(dict(low.state_dict()), dict(high.state_dict()))
    found = list(map(sqnr, trained(low, low, 128), trained(high, high, 128)))
    assert min(found) > LEAST[name], found
    assert max(found) < 60  # the recipe is used


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4", "bf16"])
def test_few_tokens(name: str, tokens: int):
    moe = make(name, shared=32)
    y, dx, *grads = trained(moe, moe, tokens)
    assert y is not None
    assert dx is not None
    assert y.shape == dx.shape == (tokens, DIM)
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
    assert all(bool(grad.any()) == (tokens > 0) for grad in grads)  # pyright: ignore[reportOptionalMemberAccess]


def test_leading_axes():
    moe = make("mxfp8")
    x = gaussian(2, 3, 5, DIM).float()
    y = moe(x)
    assert y.shape == x.shape
    assert_same_bits(y.view(-1, DIM), moe(x.view(-1, DIM)))


def test_scores_are_in_fp32():
    moe = make(dtype=torch.bfloat16)
    x = gaussian(50, DIM)
    want = (x.double() @ moe.router.weight.double().mT).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        scores = moe.router(x)
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-7)


# ---- load balancing --------------------------------------------------------------------------------------------------


def test_balance_moves_against_the_load():
    moe = make(balance=True)
    assert moe.balance is not None
    assert moe.load is not None
    x = gaussian(60, DIM).float()
    routing, _ = moe.route(x)
    moe.route(x)
    assert moe.load.tolist() == [2 * each for each in routing.load().tolist()]
    load = routing.load().float()
    moe.update_balance_(0.25)
    assert moe.balance.tolist() == (0.25 * torch.sign(load.mean() - load)).tolist()
    assert moe.load.tolist() == [0] * EXPERTS


def test_balance_evens_out_a_biased_router():
    moe = make(balance=True, scoring="sigmoid")
    with torch.no_grad():
        moe.router.weight[0] += 1.0
    x = gaussian(600, DIM).float()
    x[:, :] += 0.5  # most tokens choose the first expert
    spread = []
    for _ in range(60):
        routing, _ = moe.route(x)
        spread.append(int(routing.load().max()))
        moe.update_balance_(0.02)
    assert spread[0] == 600
    assert max(spread[-5:]) < 300  # the mean is 200


def test_load_is_counted_while_training():
    moe = make(balance=True)
    assert moe.load is not None
    moe.eval()
    moe(gaussian(9, DIM).float())
    moe.train()
    with torch.no_grad():
        moe(gaussian(9, DIM).float())
    assert not moe.load.any()
    moe(gaussian(9, DIM).float())
    assert moe.load.sum() == 18


def test_balance_is_saved_and_stays_in_fp32():
    moe = make(balance=True, dtype=torch.float32)
    assert moe.balance is not None
    moe.balance += 0.001
    assert "balance" in moe.state_dict()
    assert "load" not in moe.state_dict()
    moe.bfloat16()
    assert moe.router.weight.dtype is torch.bfloat16
    assert moe.balance.dtype is torch.float32
    assert moe.balance[0] == torch.tensor(0.001)
    other = make(balance=True, seed=1, dtype=torch.bfloat16)
    other.load_state_dict(moe.state_dict())
    assert_same_bits(other.balance, moe.balance)
    with pytest.raises(OptionError, match="without a balance"):
        make().update_balance_()


# ---- in a training run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["fp8_blockwise", "nvfp4", "bf16"], lambda name: name == "fp8_blockwise"))
def test_compiled_bytes_are_eager_ones(name: str):
    torch._dynamo.reset()
    moe = make(name, shared=32, balance=True, scoring="sigmoid", dtype=torch.bfloat16)
    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, backend=frames)

    def call(x: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)  # dynamic=True traces twice, for a number of the module that it takes back
        return compiled(x)

    # all of them have padding after the codes: with and without padding are two graphs
    for tokens in (37, 71):
        assert_same_bits(trained(call, moe, tokens), trained(moe, moe, tokens))
    assert frames.frame_count == 1


def test_recomputation_gives_the_same_bytes():
    moe = make("nvfp4", shared=32)
    again = trained(lambda x: checkpoint(moe, x, use_reentrant=False), moe)
    assert_same_bits(again, trained(moe, moe))


class Looks(TorchDispatchMode):
    """Records every operator of torch that copies a value to the host or has a data-dependent shape."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "aten" and any(name.startswith(word) for word in self.WAITS):
            self.found.append(name)
        if func.namespace == "aten" and name.startswith("index") and "index_" not in name:
            bools = [each for each in args[1] if each is not None and each.dtype is torch.bool]
            self.found += ["index by a mask"] * len(bools)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "nvfp4", "bf16"])
def test_no_operator_reads_a_value(name: str):
    """Meta tensors go through forward and backward: reading a value would raise."""
    moe = make(name, shared=32, balance=True, device="meta", dtype=torch.bfloat16)
    x = torch.empty(37, DIM, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Looks() as looks:
        moe(x).sum().backward()
        moe.update_balance_()
    assert looks.found == []
    assert x.grad is not None
    assert x.grad.shape == x.shape


ON_GPU = {"dtype": torch.bfloat16, "device": "cuda", "shared": 128, "balance": True, "scoring": "sigmoid"}


def large(name: str) -> MoE:
    torch.manual_seed(0)
    return MoE(dim=256, hidden=256, experts=16, top_k=4, recipe=name, name="layers.0.mlp", **ON_GPU)  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "bf16"])
def test_no_host_syncs_on_a_gpu(name: str):
    moe = large(name)
    x = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(4):  # kernels are compiled and chosen, calls are recorded and replayed
        moe(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            moe(x).sum().backward()
            moe.update_balance_()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "bf16"])
def test_a_captured_step_follows_the_router(name: str):
    """Groups of other sizes than those that were captured: the bits of eager steps, router's gradients included."""
    moe = large(name)
    inputs = [torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    inputs[1] += 0.5  # towards some experts
    held = inputs[0].clone().requires_grad_()

    def step() -> list[Tensor | None]:
        moe.zero_grad()
        held.grad = None
        y = moe(held)
        y.square().sum().backward()
        return [y.detach(), held.grad, *(param.grad for param in moe.parameters())]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    loads = set()
    for x in inputs:
        with torch.no_grad():
            held.copy_(x)
        graph.replay()
        got = [None if each is None else each.clone() for each in captured]
        assert_same_bits(got, step())
        loads.add(tuple(moe.route(x)[0].load().tolist()))
    assert len(loads) == 3


def test_two_runs_give_the_same_bits():
    moe = make("fp8_blockwise", shared=32)
    assert_same_bits(trained(moe, moe), trained(moe, moe))
    other = copy.deepcopy(moe)
    assert_same_bits(trained(other, other), trained(moe, moe))


def test_a_few_steps_lower_the_loss():
    """Weights cast once per step, router and balance training: the loss falls as it does unquantized."""
    losses: dict[str, float] = {}
    for name in ("bf16", "fp8_blockwise"):
        moe = make(bs.get_recipe(name).replace(weight_cast="step"), shared=32, balance=True)
        optimizer = torch.optim.AdamW(moe.parameters(), lr=0.01)
        bs.attach(optimizer, moe)
        x, target = gaussian(128, DIM, seed=3).float(), gaussian(128, DIM, seed=4).float()
        loss = torch.zeros(())
        for _ in range(30):
            loss = (moe(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moe.update_balance_()
        losses[name] = loss.item()
    assert losses["bf16"] < 0.7
    assert abs(losses["fp8_blockwise"] - losses["bf16"]) < 0.05


def test_mistakes():
    with pytest.raises(OptionError, match="top_k=7 of 6"):
        make(top_k=7)
    with pytest.raises(UnknownNameError, match="scoring"):
        make(scoring="tanh")
    with pytest.raises(OptionError, match="without a name"):
        make("nvfp4", name="")
