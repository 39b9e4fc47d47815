"""`QuantizedExperts`: rows of each expert by its own weight, plain and clamped SwiGLU, biases, all routings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import blockscale as bs
from blockscale.errors import BlockscaleError, ShapeError
from blockscale.formats import BlockScaled
from blockscale.inference import ClampedSwiGLU, QuantizedExperts, QuantizedGroupedLinear
from blockscale.nn import GroupedExperts

E, H, INNER, TOKENS, TOP = 3, 72, 40, 7, 2
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
PAIRS = [("mxfp4", None), ("nvfp4", None), ("nvfp4_16x16", "nvfp4"), ("fp8_128x128", "fp8_1x128"), ("mxfp4", "mxfp4")]


def experts(bias: bool = True, **recipe: str) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(experts=E, dim=H, hidden=INNER, bias=bias, recipe="bf16", **recipe)  # pyright: ignore[reportArgumentType]


def routed() -> tuple[Tensor, bs.Routing, Tensor]:
    torch.manual_seed(1)
    routing = bs.sort_by_expert(torch.rand(TOKENS, E).topk(TOP).indices, E)
    return torch.randn(TOKENS, H), routing, torch.rand(TOKENS, TOP)


def decoded(weight: BlockScaled) -> Tensor:
    return bs.dequantize(weight, torch.float32)


def by_hand(layer: QuantizedExperts, x: Tensor, offs: Tensor, clamp: ClampedSwiGLU | None = None) -> Tensor:
    """Rows of experts in fp64, one expert after the other."""
    found, start = torch.zeros(x.shape[0], H, dtype=torch.float64), 0
    for e, end in enumerate(offs.tolist()):
        both = [(decoded(part.operand)[e].double(), part.bias) for part in (layer.gate_up, layer.down)]
        (gate_up, bias), (down, other) = both
        h = x[start:end].double() @ gate_up.mT + (0 if bias is None else bias[e].double())
        gate, up = h.chunk(2, dim=-1)
        if clamp is None:
            h = functional.silu(gate) * up
        else:
            gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
            h = (up + 1) * gate * torch.sigmoid(clamp.alpha * gate)
        found[start:end] = h @ down.mT + (0 if other is None else other[e].double())
        start = end
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_128x128", "mxfp6_e2m3"])
def test_weight_only_experts_are_exact(format: str, bias: bool):
    layer, x = QuantizedExperts.from_experts(experts(bias), format), torch.randn(6, H)
    want = by_hand(layer, x, ENDS)
    assert (layer(x, ENDS)[:5] - want[:5]).abs().max() < 1e-5
    assert not layer(x, ENDS)[5:].any(), "rows of no group"


@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_tokens_and_rows_agree(weights: str, activations: str | None):
    layer = QuantizedExperts.from_experts(experts(), weights, activations)
    x, routing, gates = routed()
    rows = layer(x, routing)
    assert torch.equal(rows, layer(x[routing.permutation[0].long()], routing.offs))
    assert torch.equal(layer(x, routing, gates), bs.combine(rows, routing, gates))
    assert layer(x[:0], bs.sort_by_expert(torch.zeros(0, TOP, dtype=torch.int32), E)).shape == (0, H)


@pytest.mark.parametrize("activations", ["mxfp8_e4m3", None])
def test_clamped_experts_of_gpt_oss(activations: str | None):
    """Rows of gate and up come in turn in its files, and the values are so large that the limit is reached."""
    torch.manual_seed(2)
    w, bias = torch.randn(E, 2 * INNER, H), torch.randn(E, 2 * INNER)
    down, other, clamp = bs.quantize(torch.randn(E, H, INNER), "mxfp4"), torch.randn(E, H), ClampedSwiGLU()
    layer = QuantizedExperts.from_operands(
        bs.quantize(w, "mxfp4"), down, bias, other, activations, clamp=clamp, interleaved=True
    )
    assert clamp == (1.702, 7.0)
    halves = torch.cat((w[:, 0::2], w[:, 1::2]), dim=1)
    assert torch.equal(decoded(layer.gate_up.operand), decoded(bs.quantize(halves, "mxfp4")))
    assert torch.equal(layer.gate_up.bias, torch.cat((bias[:, 0::2], bias[:, 1::2]), dim=1))  # pyright: ignore[reportArgumentType]
    x = torch.randn(5, H)
    if activations is None:
        want = by_hand(layer, x, ENDS, clamp)
        assert (layer(x, ENDS) - want).abs().max() < 1e-3
        assert (want - by_hand(layer, x, ENDS)).abs().max() > 1
    else:
        rows = layer.gate_up(x, ENDS)
        assert torch.equal(layer(x, ENDS), layer.down(clamp(*rows.chunk(2, dim=-1)), ENDS))


def test_state_dict_has_the_names_of_the_layers():
    layer = QuantizedExperts.from_experts(experts(), "nvfp4")
    names = [f"{layer}.{part}" for layer in ("gate_up", "down") for part in
             ("weight", "weight_scale", "weight_global_scale", "bias")]  # fmt: skip
    assert list(layer.state_dict()) == names
    assert layer.gate_up.weight_global_scale is not None
    assert layer.gate_up.weight_global_scale.shape == (E,)
    assert len(set(layer.gate_up.weight_global_scale.tolist())) == E, "an expert depends on no other"
    parts = (
        QuantizedGroupedLinear(E, inputs, outputs, device="meta", weights="nvfp4")
        for inputs, outputs in ((H, 2 * INNER), (INNER, H))
    )
    empty, (x, routing, gates) = QuantizedExperts(next(parts), next(parts)), routed()
    empty.load_state_dict(layer.half().state_dict(), assign=True)
    assert torch.equal(empty(x, routing, gates), layer(x, routing, gates))


@pytest.mark.parametrize("activations", ["mxfp4", None])
def test_compiled_experts_have_the_same_bits(activations: str | None):
    layer, (x, routing, gates) = QuantizedExperts.from_experts(experts(), "mxfp4", activations), routed()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(x, routing, gates), layer(x, routing, gates))


def test_what_they_cannot_multiply_says_why():
    layer, (x, routing, gates) = QuantizedExperts.from_experts(experts(), "mxfp4", "mxfp4"), routed()
    with pytest.raises(BlockscaleError, match="rows are summed by token"):
        layer(x, ENDS, gates)
    with pytest.raises(ShapeError, match="4 group ends for 3 experts"):
        layer(x, torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    with pytest.raises(ShapeError, match="rows of experts are a matrix"):
        layer(x[None], ENDS)
    with pytest.raises(ShapeError, match="for a routing of 7 tokens"):
        layer(x[:4], routing)
    with pytest.raises(BlockscaleError, match="input that requires a gradient"):
        layer(x.clone().requires_grad_(), routing)
    with pytest.raises(ShapeError, match=r"Rule: they are \[E, 2I, H\] and \[E, H, I\]"):
        QuantizedExperts(layer.down, layer.gate_up)
    square = bs.quantize(torch.randn(E, 2 * INNER, H), "nvfp4_16x16")
    with pytest.raises(BlockscaleError, match="a block of several rows holds both"):
        QuantizedExperts.from_operands(square, square, interleaved=True)
