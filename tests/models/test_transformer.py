"""Models: causal, relative positions, latent attention equals its definition, the same weights for every recipe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

import blockscale as bs
from blockscale.models.attention import Attention, LatentAttention, RMSNorm, attend, rotary_table, rotate
from blockscale.models.transformer import Transformer
from blockscale.train.presets import get_preset
from support.small_runs import DENSE, SPARSE

SIZES = {"dense": DENSE, "sparse": SPARSE, "normed": replace(DENSE, qk_norm=True), "tied": replace(DENSE, tied=True)}


@pytest.mark.parametrize("name", SIZES)
def test_attention_is_causal(name: str):
    model = Transformer.build(SIZES[name], 16)
    text = torch.randint(256, (2, 16))
    other = text.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 256
    with torch.no_grad():
        first, second = model(text), model(other)
    assert first.shape == (2, 16, 256)
    assert torch.equal(first[:, :9], second[:, :9])
    assert not torch.equal(first[:, 9:], second[:, 9:])


def test_the_loss_is_the_entropy_of_the_next_symbol():
    model = Transformer.build(DENSE, 16)
    pieces = torch.randint(256, (3, 17))
    with torch.no_grad():
        logits = model(pieces[:, :-1]).float()
        expected = functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        assert torch.allclose(model.loss(pieces), expected, rtol=1e-6)
    assert abs(float(expected) - math.log(256)) < 0.5
    whole = model.loss(pieces)
    whole.backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model.loss_chunks = 5
    cut = model.loss(pieces)
    cut.backward()
    assert torch.allclose(cut, whole, rtol=1e-6)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        # the residual stream is bf16, and each chunk of the loss rounds its gradient to bf16
        assert torch.dist(mine, parameter.grad) < 0.01 * mine.norm()


def test_the_first_gradient_is_small():
    """The embedding starts with a standard deviation of 1, as after a norm; a tied head needs smaller values."""
    torch.manual_seed(0)
    pieces = torch.randint(256, (4, 65))
    for tied, spread in ((False, 1.0), (True, 0.5 / math.sqrt(128))):
        model = Transformer.build(replace(get_preset("tiny").model, tied=tied), 64)
        assert model.embedding.weight.std().item() == pytest.approx(spread, rel=0.05)
        loss = model.loss(pieces)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.3)
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        assert tied or float(norm) < 1.5, "it was 4.6 with an embedding of 0.02"


def test_rotations_depend_on_distance():
    table = rotary_table(32, 8, 10000.0)
    q, k = torch.randn(8), torch.randn(8)
    spread = [rotate(each.expand(1, 32, 1, 8), table)[0, :, 0] for each in (q, k)]
    products = spread[0] @ spread[1].mT
    for offset in (0, 3, 11):
        along = products.diagonal(offset)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-4)
    assert torch.allclose(rotate(q.expand(1, 1, 1, 8), table[:, :1])[0, 0, 0], q)


def test_grouped_queries_are_repeated_keys():
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    repeated = attend(q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2))
    assert torch.allclose(attend(q, k, v), repeated, atol=1e-6)


@pytest.mark.parametrize("q_rank", [0, 24])
def test_latent_attention_is_its_definition(q_rank: int):
    """Head by head in fp32, from the weights of the fused layers."""
    assert SPARSE.latent is not None
    config = replace(SPARSE, latent=replace(SPARSE.latent, q_rank=q_rank))
    sizes = config.latent
    module = LatentAttention(config, sizes)
    x, table = torch.randn(1, 7, config.dim), rotary_table(7, sizes.rope_dim, 10000.0)
    q_all, c, k_rope = (x @ module.down.weight.mT).split(
        [module.down.out_features - sizes.kv_rank - sizes.rope_dim, sizes.kv_rank, sizes.rope_dim], dim=-1
    )
    if q_rank:
        q_all = functional.rms_norm(q_all, (q_rank,), eps=config.norm_eps) @ module.q_up.weight.mT
    kv = functional.rms_norm(c, (sizes.kv_rank,), eps=config.norm_eps) @ module.kv_up.weight.mT
    results = []
    for head in range(config.heads):
        width = sizes.nope_dim + sizes.rope_dim
        q = q_all[0, :, head * width : (head + 1) * width]
        mine = kv[0].view(7, config.heads, -1)[:, head]
        k_nope, v = mine[:, : sizes.nope_dim], mine[:, sizes.nope_dim :]
        turned = [rotate(each[None, :, None], table)[0, :, 0] for each in (q[:, sizes.nope_dim :], k_rope[0])]
        scores = (q[:, : sizes.nope_dim] @ k_nope.mT + turned[0] @ turned[1].mT) / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
        results.append(scores.softmax(-1) @ v)
    expected = torch.cat(results, dim=-1) @ module.out.weight.mT
    assert torch.allclose(module(x, table)[0], expected, atol=1e-5)


def test_norms_of_queries_and_keys_are_there():
    module = Attention(SIZES["normed"])
    assert isinstance(module.q_norm, RMSNorm)
    x = torch.randn(1, 4, 32)
    table = rotary_table(4, 16, 10000.0)
    before = module(x, table)
    with torch.no_grad():
        module.qkv.weight[:48] *= 7  # queries and keys, not values
    assert torch.allclose(module(x, table), before, atol=1e-4)


@pytest.mark.parametrize("name", SIZES)
def test_first_weights_depend_on_seed_and_name_alone(name: str):
    one, same, other = (Transformer.build(SIZES[name], 16, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    keys = set(one.state_dict())
    for recipe in ("fp8_blockwise", "bf16"):
        bs.quantize_(same, recipe)
        assert set(same.state_dict()) == keys
        assert all(torch.equal(*pair) for pair in zip(one.parameters(), same.parameters(), strict=True))
    assert (one.head.weight is one.embedding.weight) == SIZES[name].tied


def test_residual_outputs_begin_smaller():
    model = Transformer.build(replace(SPARSE, dim=128, layers=8), 16)
    block = model.layers[3].requires_grad_(False)
    assert float(block.attention.out.weight.std()) == pytest.approx(0.5 / math.sqrt(32) / 4, rel=0.1)
    assert float(block.mlp.experts.down.weight.std()) == pytest.approx(0.5 / math.sqrt(16) / 4, rel=0.1)
    assert float(block.attention.down.weight.std()) == pytest.approx(0.5 / math.sqrt(128), rel=0.1)


def test_experts_come_after_the_dense_layers():
    model = Transformer.build(SPARSE, 16)
    assert [type(block.mlp).__name__ for block in model.layers] == ["SwiGLU", "MoE"]
    assert model.layers[1].mlp.router.scoring == "sigmoid"
    assert torch.equal(model.layers[1].mlp.balance, torch.zeros(4))
    assert len(list(model.mixtures())) == 1


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_recomputation_changes_no_bit(name: str, recompute: str):
    pieces = torch.randint(256, (2, 17))
    gradients = []
    for how in ("none", recompute):
        model = Transformer.build(SIZES[name], 16)
        bs.quantize_(model, "fp8_blockwise")
        for block in model.layers:
            block.recompute = how
        model.loss(pieces).backward()
        gradients.append([each.grad for each in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_selective_recomputation_repeats_casts_and_no_gemm():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            self.seen[name] = self.seen.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    counts = {}
    for how in ("none", "selective", "full"):
        model = Transformer.build(replace(DENSE, layers=1), 16)
        bs.quantize_(model, "mxfp8")
        model.layers[0].recompute = how
        with Count() as count:
            model.loss(torch.randint(256, (2, 17))).backward()
        counts[how] = count.seen
    product = "blockscale::scaled_mm"
    assert counts["none"][product] == counts["selective"][product] == 12
    assert counts["full"][product] > 12
    assert counts["selective"]["blockscale::quantize_both"] > counts["none"]["blockscale::quantize_both"]


def operators_of_graphs(recipe: bs.Recipe) -> tuple[Counter[str], Counter[str]]:
    """Operators of ours in the compiled forward and backward of a block with experts, under selective recomputation."""
    found: list[Counter[str]] = []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found.append(Counter(name.split(".")[1] for name in names if name.startswith("blockscale.")))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    experts = replace(SPARSE.experts, dense_layers=0)
    model = Transformer.build(replace(SPARSE, layers=1, experts=experts), 16)
    bs.quantize_(model, recipe, keep_first=0, keep_last=0)
    block = model.layers[0]
    block.recompute = "selective"
    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    block.compile(backend=backend, fullgraph=True, dynamic=False)
    model.loss(torch.randint(256, (2, 17))).backward()
    forward, backward = found
    return forward, backward


@pytest.mark.slow
def test_compiled_recomputation_makes_each_operand_where_it_is_multiplied():
    forward, backward = operators_of_graphs(bs.get_recipe("fp8_blockwise").recomputed())
    products = forward["scaled_mm"] + forward["scaled_grouped_mm"]
    assert backward["scaled_mm"] + backward["scaled_grouped_mm"] == 2 * products
    # inputs and weights: one operand in the forward, the other in the backward; gradients: both
    assert forward["quantize_both"] == forward["permute_quantize_both"] == 0
    assert (forward["quantize_permute"], backward["permute_quantize_columns"]) == (1, 1)
    assert forward["quantize"] == backward["quantize"]
    assert backward["permute_quantize_both"] == 1
    # the routing is saved for backward, as are the rows that depend on it
    assert (forward["sort_by_expert"], backward["sort_by_expert"]) == (1, 0)


def test_conversions_keep_rotations_in_fp32():
    model = Transformer.build(DENSE, 16)
    table = model.table.clone()
    for converted in (model.bfloat16(), model.half(), model.to("cpu", torch.float64)):
        assert torch.equal(converted.table, table)
        assert converted.table.dtype == torch.float32
    assert model.to("meta", torch.bfloat16).table.is_meta
