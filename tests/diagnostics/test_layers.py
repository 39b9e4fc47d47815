"""Numerics by layer: figures against direct computation, and a model that does not notice that it was measured."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.diagnostics import layer_numerics, sample
from blockscale.diagnostics.figures import Seen, layer_sums
from blockscale.diagnostics.layers import EXPERT_ROWS, ROWS, _rows_of
from blockscale.diagnostics.quality import measure, sqnr_db
from blockscale.errors import OptionError


def all_layers(module: torch.nn.Module, name: str) -> bool:
    return True


def converted(recipe: str, *widths: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    bs.quantize_(model, recipe, all_layers)
    return model


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_blockwise", "mxfp6"])
def test_figures_of_a_layer_are_those_of_its_tensors(recipe):
    model = converted(recipe, 128, 256)
    x, target = torch.randn(96, 128), torch.randn(96, 256)
    x[3, 5] = 1e4
    (found,) = layer_numerics(model, lambda: (model(x) * target).mean())
    weight, dy, chosen = model[0].weight.detach(), target / target.numel(), bs.get_recipe(recipe)
    for role, tensor, axis in [
        ("fprop_x", x, -1),
        ("fprop_w", weight, -1),
        ("dgrad_dy", dy, -1),
        ("dgrad_w", weight, -2),
        ("wgrad_dy", dy, -2),
        ("wgrad_x", x, -2),
    ]:
        q = bs.quantize(tensor, chosen.operand(role).format, axis=axis)
        expected, operand = measure(tensor, q), found.operands[role]
        assert operand.sqnr == pytest.approx(expected.sqnr_db.item(), abs=1e-5), role
        assert operand.clipped == expected.clipped.item()
        assert operand.underflow == expected.underflow.item()
        exponents = torch.log2(q.plain_scale().float()).floor().flatten().int().tolist()
        assert operand.scales == {each: exponents.count(each) for each in sorted(set(exponents))}
    assert found.x == found.operands["fprop_x"].sqnr
    assert found.underflow == max(each.underflow for each in found.operands.values()) > 0
    values = {
        role: bs.dequantize(bs.quantize(t, chosen.operand(role).format), torch.float32)
        for role, t in [("fprop_x", x), ("fprop_w", weight)]
    }
    exact, low = x.double() @ weight.double().mT, values["fprop_x"].double() @ values["fprop_w"].double().mT
    assert found.fprop == pytest.approx(sqnr_db(exact, low).item(), abs=1e-3)
    # half the mean over tokens of the squared first-order effect on the summed loss
    effect = (dy * 96 * (low - exact)).sum(-1)
    assert found.damage == pytest.approx(0.5 * effect.square().mean().item(), rel=1e-3)


def test_damage_is_the_loss_that_noise_costs_where_labels_are_the_models_own():
    """With labels that are drawn from the model itself the expected loss rises by KL(exact, low)."""
    model = converted("mxfp4", 64, 32)
    x = torch.randn(16384, 64) * 2
    with torch.no_grad():
        exact = functional.linear(x, model[0].weight, model[0].bias).log_softmax(-1)
        target = torch.multinomial(exact.exp(), 1, generator=torch.Generator().manual_seed(1)).flatten()
        rises = (exact.exp() * (exact - model(x).log_softmax(-1))).sum(-1).mean().item()
    (found,) = layer_numerics(model, lambda: functional.cross_entropy(model(x), target))
    assert found.damage == pytest.approx(rises, rel=0.25)  # 512 of the rows are looked at
    assert rises > 1e-4


def experts(recipe: str) -> bs.nn.GroupedLinear:
    torch.manual_seed(0)
    return bs.nn.GroupedLinear(4, 64, 96, bias=False, recipe=recipe, name="experts")


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_blockwise", "nvfp4"])
def test_figures_of_each_expert_are_those_of_its_rows_alone(recipe):
    layer, offs = experts(recipe), torch.tensor([40, 40, 57, 100], dtype=torch.int32)
    x, dy = torch.randn(104, 64), torch.randn(104, 96)
    x[45, 0], x[102:] = 1e5, torch.nan  # rows of no expert
    sums = layer_sums(layer, Seen(x, torch.diff(offs, prepend=offs.new_zeros(1)), 1.0, offs, dy))
    found = bs.diagnostics.layers._layer("experts", {key: each.tolist() for key, each in sums.items()}, 1.0)
    assert [each.rows for each in found.experts] == [40, 0, 17, 43]
    assert found.experts[1].fprop is None
    assert found.experts[2].underflow > found.experts[0].underflow  # one value takes all of its block's range
    for expert, (start, end) in enumerate([(0, 40), (40, 40), (40, 57), (57, 100)]):
        if start == end:
            continue
        alone = torch.nn.Linear(64, 96, bias=False)
        alone.weight.data = layer.weight.data[expert]
        model = torch.nn.Sequential(alone)
        bs.quantize_(model, recipe, all_layers)
        rows = Seen(x[start:end], torch.tensor([end - start]), 1.0, None, dy[start:end])
        single = layer_sums(model[0], rows)
        for key in ("fprop_x.signal", "fprop_x.noise", "wgrad_x.noise", "fprop_w.noise", "fprop.signal", "fprop.noise"):
            assert sums[key][expert].item() == pytest.approx(single[key].item(), rel=1e-4), (expert, key)
        if recipe != "nvfp4":  # draws depend on the layer's name and on where a row is
            for key in ("dgrad.noise", "wgrad.noise", "damage", "dgrad_dy.underflow", "wgrad_x.clipped"):
                assert sums[key][expert].item() == pytest.approx(single[key].item(), rel=1e-4), (expert, key)


def test_a_model_with_experts_is_measured_through_its_routing():
    torch.manual_seed(0)
    moe = bs.nn.MoE(64, 32, experts=4, top_k=2, shared=32, balance=True, recipe="mxfp8")
    model = torch.nn.Sequential(moe)
    x = torch.randn(50, 64)
    load = moe.load.clone()
    found = {each.layer: each for each in layer_numerics(model, lambda: model(x).square().mean())}
    assert list(found) == ["0.experts.gate_up", "0.experts.down", "0.shared.gate_up", "0.shared.down"]
    for name in ("0.experts.gate_up", "0.experts.down"):
        assert sum(each.rows for each in found[name].experts) == 100
        assert all(20 < each.fprop < 40 and 20 < each.wgrad < 50 for each in found[name].experts if each.rows)
    assert found["0.shared.down"].experts == ()
    assert torch.equal(moe.load, load)


def test_rows_of_experts_are_thinned_out_evenly():
    total = 3 * max(ROWS, 2 * EXPERT_ROWS) + 7
    offs = torch.tensor([1000, total], dtype=torch.int32)
    x = torch.arange(total).float()[:, None].expand(-1, 4)
    seen, step = _rows_of(x, offs)
    assert seen.x.shape[0] <= ROWS
    assert step > 1
    first = seen.x[: int(seen.offs[0]), 0]
    assert first.max() < 1000 <= seen.x[int(seen.offs[0]), 0]
    assert seen.x[-1, 0] > total - 1 - step
    assert seen.offs[1] == seen.x.shape[0]


def test_nothing_is_left_behind():
    torch.manual_seed(0)
    model = torch.nn.Sequential(bs.nn.SwiGLU(64, 32, recipe="nvfp4", name="mlp"), torch.nn.Dropout(0.5))
    x = torch.randn(8, 64)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    held = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    model[0].down.weight.main_grad = torch.zeros_like(model[0].down.weight)
    buffer, state, ticks = model[0].down.weight.main_grad, torch.get_rng_state(), model[0].down.rng.clone()
    found = sample(model, lambda: model(x).square().mean()).read()
    assert [each.layer for each in found.layers] == ["0.gate_up", "0.down"]
    for parameter, (gradient, before) in zip(model.parameters(), held, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, before)
    assert model[0].down.weight.main_grad is buffer
    assert not buffer.any()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].down.rng, ticks)
    assert model[0].is_fused
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_sample():
    torch.manual_seed(0)
    moe = bs.nn.MoE(256, 128, 8, 2, shared=128, device="cuda", dtype=torch.bfloat16, balance=True)
    model = torch.nn.Sequential(moe)
    x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)

    def loss() -> torch.Tensor:
        return model(x).float().square().mean()

    sample(model, loss)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sample(model, loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.read().layers[0].layer == "0.experts.gate_up"


def test_a_failing_batch_leaves_no_hooks():
    model = converted("mxfp8", 64, 64)
    with pytest.raises(RuntimeError, match="no batch"):
        sample(model, lambda: (_ for _ in ()).throw(RuntimeError("no batch")))
    assert not model[0]._forward_hooks


def test_a_compiled_model_is_measured_and_not_compiled_again():
    model, graphs = converted("mxfp8", 64, 64), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=backend)
    x = torch.randn(8, 64)
    before = model(x)
    count = len(graphs)
    assert count
    (found,) = layer_numerics(model, lambda: model(x).square().mean())
    assert 25 < found.fprop < 40
    assert torch.equal(model(x), before)
    assert len(graphs) == count
    torch._dynamo.reset()


def test_layers_in_high_precision_and_layers_that_are_not_called_are_left_out():
    model = converted("mxfp8_wgrad_bf16", 64, 64, 64)
    bs.quantize_(model, "bf16", lambda module, name: name == "0")
    x = torch.randn(8, 64)
    assert [each.layer for each in layer_numerics(model, lambda: model(x).mean())] == ["1"]
    (found,) = layer_numerics(model, lambda: model[1](x).mean())
    assert found.wgrad is None
    assert found.dgrad is not None
    assert "wgrad_x" not in found.operands
    assert math.isfinite(found.gradient)
    assert found.gradient > 0


def test_an_exact_layer_has_a_finite_figure():
    model = converted("mxfp8", 64, 64)
    model[0].weight.data.fill_(1.0)
    x = torch.ones(8, 64)
    (found,) = layer_numerics(model, lambda: model(x).mean())
    assert found.x == found.fprop == 300.0
    assert found.damage == 0.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_is_measured_with_its_gradients(reentrant):
    """The first forward of a reentrant checkpoint has none: what is computed again counts."""
    torch.manual_seed(0)
    model, x = converted("mxfp8", 64, 128, 64), torch.randn(64, 64, requires_grad=True)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            model(x)
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    found, plain = (layer_numerics(model, each) for each in (loss, lambda: model(x).square().mean()))
    assert [(each.layer, each.fprop, each.dgrad, each.wgrad) for each in found] == [
        (each.layer, each.fprop, each.dgrad, each.wgrad) for each in plain
    ]
    assert all(each.wgrad is not None for each in found)


def test_a_layer_without_rows_is_not_seen():
    model = converted("mxfp8", 64, 64, 64)
    found = layer_numerics(model, lambda: model[0](torch.randn(32, 64)).mean() + model[1](torch.randn(0, 64)).sum())
    assert [each.layer for each in found] == ["0"]


def test_a_model_that_steps_in_its_backward_is_refused():
    model = converted("mxfp8", 64, 64)
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pytest.raises(OptionError, match=r"whose 0\.weight has a hook behind its gradient"):
        sample(model, lambda: model(torch.randn(8, 64)).mean())
    handle.remove()
    assert layer_numerics(model, lambda: model(torch.randn(8, 64)).mean())
