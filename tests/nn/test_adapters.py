"""Experts of Transformers, by stand-ins with the same parameters, shapes and signatures: converted ones compute the
same, others are not converted and have a reason; reports count the active experts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale.errors import OptionError
from blockscale.nn import Linear, MoE
from blockscale.nn.adapters import AdaptedExperts
from support.linear_reference import Calls, sqnr
from support.products import assert_same_bits, gaussian

EXPERTS, DIM, HIDDEN, TOKENS, TOP = 4, 64, 48, 37, 2


class MixtralExperts(nn.Module):
    """As Mixtral, Qwen3-MoE and DeepSeek-V3 keep them in Transformers 5.0."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, DIM) / 8)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / 8)
        self.act_fn: Any = nn.SiLU()

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def project(self, x: Tensor, name: str, expert: int) -> Tensor:
        return x @ getattr(self, name)[expert].mT

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            hidden = self.activate(self.project(hidden_states[token], "gate_up_proj", expert))
            y = self.project(hidden, "down_proj", expert) * top_k_weights[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out


class GptOssExperts(MixtralExperts):
    """As gpt-oss keeps them: transposed, with biases, gates and ups alternating, clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * HIDDEN) / 2)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / 8)
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.alpha, self.limit = 1.702, 7.0

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def project(self, x: Tensor, name: str, expert: int) -> Tensor:
        return x @ getattr(self, name)[expert] + getattr(self, f"{name}_bias")[expert]


class OldGptOssExperts(GptOssExperts):
    """Experts of 4.57: gate weights of all experts, most of them zero, and other argument names."""

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        flat = hidden_states.reshape(-1, DIM)
        weights = routing_weights.gather(1, router_indices)
        return super().forward(flat, router_indices, weights).view(hidden_states.shape)


OldGptOssExperts.__name__ = "GptOssExperts"


class Block(nn.Module):
    """A router and experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.top_k = TOP
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(self.top_k, -1)
        return self.experts(x, chosen, weights)


def make(kind: type[nn.Module], seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block(kind())


def trained(block: nn.Module) -> list[Tensor | None]:
    x = gaussian(TOKENS, DIM, seed=1).float().requires_grad_()
    y = block(x)
    y.backward(gaussian(TOKENS, DIM, seed=2).float())
    grads = [param.grad for param in block.parameters()]
    block.zero_grad()
    return [y.detach(), x.grad, *grads]


KINDS = [MixtralExperts, GptOssExperts]


@pytest.mark.parametrize("kind", KINDS)
def test_converted_experts_compute_the_same(kind: type[nn.Module]):
    plain, block = make(kind), make(kind)
    names, ids = list(block.state_dict()), [id(param) for param in block.parameters()]
    report = bs.quantize_(block, "bf16")
    assert isinstance(block.experts, AdaptedExperts)
    assert [each.name for each in report.converted] == ["experts.gate_up_proj", "experts.down_proj"]
    assert names == list(block.state_dict())
    assert ids == [id(param) for param in block.parameters()]
    assert min(map(sqnr, trained(block), trained(plain))) > 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "least"), [("fp8_blockwise", 20.0), ("mxfp8", 20.0), ("nvfp4", 7.0)])
def test_low_precision_is_close(kind: type[nn.Module], name: str, least: float):
    plain, block = make(kind), make(kind)
    bs.quantize_(block, name, lambda module, name: name != "gate")
    found = list(map(sqnr, trained(block), trained(plain)))
    # a clamp has no slope on one side, and rounding moves some values across
    assert min(found) > least - 2 * (kind is GptOssExperts), found
    assert found[0] < 60


def test_all_experts_weights_and_other_names():
    block, plain = make(OldGptOssExperts), make(OldGptOssExperts)
    bs.quantize_(block, "bf16")
    assert isinstance(block.experts, AdaptedExperts)
    x = gaussian(3, 5, DIM).float()
    scores = torch.rand(15, EXPERTS)
    chosen = scores.topk(TOP).indices
    sparse = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    got = block.experts(x, router_indices=chosen, routing_weights=sparse)
    assert got.shape == x.shape
    torch.testing.assert_close(got, plain.experts(x, chosen, sparse), rtol=1e-4, atol=1e-4)
    with pytest.raises(OptionError, match="experts of each token and their gate weights"):
        block.experts(x, chosen)


def test_slots_without_an_expert():
    """Transformers marks a slot without an expert by the number after the last one."""
    block = make(MixtralExperts)
    plain = copy.deepcopy(block.experts)
    bs.quantize_(block, "bf16")
    x, weights = gaussian(6, DIM).float(), torch.rand(6, TOP)
    chosen = torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS], [1, 2], [3, EXPERTS], [2, 0], [EXPERTS, 1]])
    got = block.experts(x, chosen, weights)
    torch.testing.assert_close(got, plain(x, chosen, weights), rtol=1e-4, atol=1e-4)
    assert not got[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_unquantize_restores_the_class(kind: type[nn.Module]):
    block, plain = make(kind), make(kind)
    before = dict(vars(block.experts))
    bs.quantize_(block, "nvfp4", lambda module, name: True)
    assert bs.unquantize_(block) == 2
    assert type(block.experts) is kind
    assert vars(block.experts).keys() == before.keys()
    assert_same_bits(trained(block), trained(plain))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp8_blockwise", "nvfp4"])
def test_weights_are_cast_once_per_step(kind: type[nn.Module], name: str):
    recipe = bs.get_recipe(name)
    plain, shared = make(kind), make(kind)
    for block, each in ((plain, recipe), (shared, recipe.replace(weight_cast="step"))):
        bs.quantize_(block, each, lambda module, name: name == "experts")
    optimizers = [torch.optim.AdamW(block.parameters(), lr=0.05) for block in (plain, shared)]
    bs.attach(optimizers[1], shared)
    experts: Any = shared.experts
    for step in range(2):
        assert [cast.casts for cast in experts.shared_weights.values()] == [step + 1] * 2
        for block, optimizer in zip((plain, shared), optimizers, strict=True):
            for micro in range(2):
                block(gaussian(TOKENS, DIM, seed=10 * step + micro).float()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(list(shared.parameters()), list(plain.parameters()))
    with Calls() as calls:
        shared(gaussian(TOKENS, DIM).float())
    assert calls.found["quantize"] == calls.found["quantize_both"] - (kind is GptOssExperts) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_compute_the_same(kind: type[nn.Module], copied: Any):
    block = make(kind)
    bs.quantize_(block, bs.get_recipe("nvfp4").replace(weight_cast="step"), lambda module, name: name == "experts")
    bs.refresh_weights_(block)
    other = copied(block)
    assert_same_bits(trained(other), trained(block))
    other.load_state_dict(make(kind, seed=1).state_dict())
    assert not torch.equal(trained(other)[0], trained(block)[0])  # pyright: ignore[reportArgumentType]


def test_names_select_random_streams():
    block = make(MixtralExperts)
    bs.quantize_(block, "nvfp4", lambda module, name: name == "experts", seed=3)
    want = trained(block)
    experts: Any = block.experts
    assert experts.name == "experts"
    assert experts.rng.tolist() == [3, 0]
    bs.advance_(block)
    got = trained(block)
    assert torch.equal(got[0], want[0])  # pyright: ignore[reportArgumentType]
    assert not torch.equal(got[1], want[1])  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: type[nn.Module]):
    torch._dynamo.reset()
    block = make(kind)
    bs.quantize_(block, "fp8_blockwise")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = gaussian(TOKENS, DIM).float()
    assert_same_bits(compiled(x), block(x))


# ---- not converted ---------------------------------------------------------------------------------------------------


class Gelu(MixtralExperts):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.GELU()


class Clamped(MixtralExperts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.clamp(-7, 7).chunk(2, -1)
        return self.act_fn(gate) * up


class Steeper(GptOssExperts):
    """Its attributes do not show what it computes."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self.activate(2 * gate_up)


class Silent(GptOssExperts):
    pass


class Flagged(MixtralExperts):
    is_concatenated = False


class Biased(MixtralExperts):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * HIDDEN))


class Llama4Experts(MixtralExperts):
    def forward(self, hidden_states: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden_states


class Ungated(MixtralExperts):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM))


REASONS = {
    Gelu: "activation is not that of",
    Clamped: "activation is not that of",
    Steeper: "activation is not that of",
    Silent: "activation that cannot be called by itself",
    Flagged: "is_concatenated=False",
    Biased: "with biases",
    Llama4Experts: "called with (hidden_states)",
    Ungated: "make no MLP with gates",
}


@pytest.mark.parametrize("kind", REASONS)
def test_other_experts_are_kept_with_a_reason(kind: type[nn.Module]):
    block = make(kind)
    report = bs.quantize_(block, "fp8_blockwise", lambda module, name: name != "gate")
    assert type(block.experts) is kind
    assert report.converted == ()
    reasons = {each.name: each.reason for each in report.skipped}
    assert set(reasons) == {"gate", "experts.gate_up_proj", "experts.down_proj"}
    assert REASONS[kind] in reasons["experts.gate_up_proj"]


def test_a_dtype_that_casts_do_not_take():
    block = make(MixtralExperts).double()
    report = bs.quantize_(block, "fp8_blockwise")
    assert "float64" in report.skipped[-1].reason


# ---- the report ------------------------------------------------------------------------------------------------------


def test_the_report_counts_the_experts_that_see_a_token():
    block = make(MixtralExperts)
    report = bs.quantize_(block, "fp8_blockwise")
    assert [(each.experts, each.active) for each in report.converted] == [(EXPERTS, TOP)] * 2
    assert "4 experts, 2 for each token" in str(report)
    converted = TOP * (2 * HIDDEN * DIM + HIDDEN * DIM)
    assert report.flop_share == converted / (converted + DIM * EXPERTS)
    total = sum(param.numel() for param in block.parameters())
    assert report.parameters == total
    assert report.parameter_share == (total - DIM * EXPERTS) / total


def test_many_experts_with_few_tokens_have_a_smaller_speedup():
    """The same FLOPs, but each weight is cast for fewer tokens."""
    with torch.device("meta"):
        few, many = (MoE(dim=4096, hidden=2048, experts=experts, top_k=2, recipe="bf16") for experts in (2, 256))
    gains = [bs.quantize_(moe, "fp8_blockwise").predicted_speedup(4096).converted for moe in (few, many)]
    assert gains[0] > 1.3
    assert gains[1] < gains[0] - 0.3


def test_our_own_experts_are_layers():
    model = nn.Sequential(MoE(dim=64, hidden=64, experts=4, top_k=2, shared=64, recipe="bf16"), nn.Linear(64, 64))
    report = bs.quantize_(model, "mxfp8")
    found = {each.name: (each.experts, each.active) for each in report.converted}
    assert found == {
        "0.experts.gate_up": (4, 2),
        "0.experts.down": (4, 2),
        "0.shared.gate_up": (1, 1),
        "0.shared.down": (1, 1),
        "1": (1, 1),
    }
    assert [each.reason for each in report.skipped] == ["router: its scores are in fp32"]
    moe: Any = model[0]
    assert moe.experts.is_fused
    assert moe.experts.gate_up.recipe.name == "mxfp8"
    assert bs.unquantize_(model) == 1  # layers constructed as ours stay
    assert type(model[1]) is nn.Linear
    assert not isinstance(model[1], Linear)


def test_narrow_experts_stay():
    model = nn.Sequential(MoE(dim=64, hidden=8, experts=4, top_k=2, recipe="bf16"))
    report = bs.quantize_(model, "mxfp8")
    reasons = {each.name: each.reason for each in report.skipped}
    assert reasons["0.experts.down"] == "narrow: fewer than 16 features on a side; still has recipe bf16"
