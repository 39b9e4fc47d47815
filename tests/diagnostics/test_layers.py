"""Numerics per layer against direct computation, for dense layers and for every expert."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import blockscale as bs
from blockscale.diagnostics import error_sums, layer_numerics, sample
from blockscale.diagnostics.error_sums import CapturedCall, layer_sums
from blockscale.diagnostics.quality import measure, sqnr_db
from blockscale.errors import OptionError
from support.measured_layers import all_layers, converted, experts


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_blockwise", "mxfp6"])
def test_numerics_of_a_layer_equal_those_of_its_tensors(recipe):
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


def test_damage_predicts_the_rise_of_the_loss_for_labels_sampled_from_the_model():
    """With labels sampled from the model itself the expected loss rises by KL(exact, low)."""
    model = converted("mxfp4", 64, 32)
    x = torch.randn(16384, 64) * 2
    with torch.no_grad():
        exact = functional.linear(x, model[0].weight, model[0].bias).log_softmax(-1)
        target = torch.multinomial(exact.exp(), 1, generator=torch.Generator().manual_seed(1)).flatten()
        rises = (exact.exp() * (exact - model(x).log_softmax(-1))).sum(-1).mean().item()
    (found,) = layer_numerics(model, lambda: functional.cross_entropy(model(x), target))
    assert found.damage == pytest.approx(rises, rel=0.25)  # 512 rows are sampled
    assert rises > 1e-4


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_blockwise", "nvfp4"])
def test_numerics_of_an_expert_depend_on_its_rows_alone(recipe):
    layer, offs = experts(recipe), torch.tensor([40, 40, 57, 100], dtype=torch.int32)
    x, dy = torch.randn(104, 64), torch.randn(104, 96)
    x[45, 0], x[102:] = 1e5, torch.nan  # rows of no expert
    sums = layer_sums(layer, [CapturedCall(x, torch.diff(offs, prepend=offs.new_zeros(1)), torch.ones(4), offs, dy)])
    found = bs.diagnostics.layers._layer("experts", {key: each.flatten().tolist() for key, each in sums.items()}, 1.0)
    assert [each.rows for each in found.experts] == [40, 0, 17, 43]
    assert found.experts[1].fprop is None
    assert found.experts[2].underflow > found.experts[0].underflow  # one value takes the whole range of its block
    for expert, (start, end) in enumerate([(0, 40), (40, 40), (40, 57), (57, 100)]):
        if start == end:
            continue
        alone = torch.nn.Linear(64, 96, bias=False)
        alone.weight.data = layer.weight.data[expert]
        model = torch.nn.Sequential(alone)
        bs.quantize_(model, recipe, all_layers)
        rows = CapturedCall(x[start:end], torch.tensor([end - start]), torch.ones(1), None, dy[start:end])
        single = layer_sums(model[0], [rows])
        for key in ("fprop_x.signal", "fprop_x.noise", "wgrad_x.noise", "fprop_w.noise", "fprop.signal", "fprop.noise"):
            assert sums[key][expert].item() == pytest.approx(single[key].item(), rel=1e-4), (expert, key)
        if recipe != "nvfp4":  # random words depend on the layer's name and on the position of a row
            for key in ("dgrad.noise", "wgrad.noise", "damage", "dgrad_dy.underflow", "wgrad_x.clipped"):
                assert sums[key][expert].item() == pytest.approx(single[key].item(), rel=1e-4), (expert, key)


def test_a_model_with_experts_is_measured_through_its_routing():
    torch.manual_seed(0)
    moe = bs.nn.MoE(dim=64, hidden=32, experts=4, top_k=2, shared=32, balance=True, recipe="mxfp8")
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


def test_every_expert_with_rows_has_numerics_and_the_layer_those_of_all_rows():
    layer = experts("mxfp8")
    offs = torch.tensor([4000, 4003, 4003, 4050], dtype=torch.int32)
    x = torch.randn(4050, 64)
    x[4000:4003] *= torch.exp2(torch.randint(-12, 12, (3, 64)).float())  # noisy, and rare
    (found,) = layer_numerics(layer, lambda: layer(x, offs).square().mean())
    rare, empty = found.experts[1], found.experts[2]
    assert rare.underflow > 0.01 > found.operands["fprop_x"].underflow, "three of 4050 rows do not count as many"
    assert rare.damage > 0
    assert empty.fprop is None
    assert sorted(empty.operands) == ["dgrad_w", "fprop_w"]


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_sample():
    torch.manual_seed(0)
    sizes = {"dim": 256, "hidden": 128, "experts": 8, "top_k": 2, "shared": 128}
    moe = bs.nn.MoE(**sizes, device="cuda", dtype=torch.bfloat16, balance=True)
    model = torch.nn.Sequential(moe)
    x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)

    def loss() -> torch.Tensor:
        return model(x).float().square().mean()

    sample(model, loss)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sample(model, loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.read().layers[0].layer == "0.experts.gate_up"


def test_unquantized_layers_and_layers_that_are_not_called_are_left_out():
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


def test_a_layer_that_no_gradient_reaches_has_a_forward_and_no_damage():
    model, x = converted("mxfp4", 64, 64, 64), torch.randn(32, 64)
    model[0].requires_grad_(False)
    first, second = layer_numerics(model, lambda: model(x).square().mean())
    assert 10 < first.fprop < 25
    assert first.damage is None
    bs.quantize_(model, "mxfp8_fprop_bf16", all_layers)
    assert [each.damage for each in layer_numerics(model, lambda: model(x).square().mean())] == [None, 0.0]
    assert first.dgrad is None
    assert second.damage > 0


def test_sums_of_products_are_scaled_to_all_rows_of_their_calls():
    """Rows with noise and rows without, in unequal numbers: sampled rows are weighted by their group."""
    layer = experts("mxfp8")
    layer.weight.data.fill_(0.5)
    for many, offs in ((0, [20000, 20040, 20040, 20040]), (1, [40, 20040, 20040, 20040])):
        ends = torch.tensor(offs, dtype=torch.int32)
        x = torch.ones(20040, 64)
        x[offs[0] :] = torch.randn(20040 - offs[0], 64)  # the second expert's
        (found,) = layer_numerics(layer, lambda x=x, ends=ends: layer(x, ends).sum())  # gradients of one: no noise
        for product in ("fprop", "wgrad"):
            noisy = getattr(found.experts[1], product)
            more = getattr(found, product) - noisy
            assert 25 < noisy < 40, (product, many, noisy)
            assert more > 40 if many == 0 else abs(more) < 1, (product, many, more)


def test_a_product_that_overflows_is_the_worst_there_is():
    model = converted("mxfp8", 64, 64).half()
    x = torch.full((32, 64), 6e4, dtype=torch.float16)
    model[0].weight.data.fill_(60.0)
    (found,) = layer_numerics(model, lambda: model(x).float().mean())
    assert found.fprop == -300.0


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda y: 3.0, "returned a float"),
        (lambda y: y, r"returned \(8, 64\)"),
        (lambda y: y.mean().detach(), "without a gradient"),
    ],
)
def test_a_value_that_is_no_loss_is_refused(loss, says):
    model, x = converted("mxfp8", 64, 64), torch.randn(8, 64)
    with pytest.raises(OptionError, match=says):
        sample(model, lambda: loss(model(x)))
    assert not model[0]._forward_hooks


def test_invalid_arguments_are_refused():
    model = converted("mxfp8", 64, 64)
    with pytest.raises(OptionError, match="tokens=0"):
        sample(model, lambda: model(torch.randn(8, 64)).mean(), tokens=0)
    with pytest.raises(OptionError, match="loss=Tensor"):
        sample(model, model(torch.randn(8, 64)).mean())
    with pytest.raises(OptionError, match="0 is on the meta device"):
        sample(model.to("meta"), lambda: model(torch.randn(8, 64, device="meta")).mean())


def test_values_are_counted_by_expert():
    """Rows beyond the last group end do not count."""
    assert error_sums._sizes(torch.zeros(7, 5), torch.tensor([2, 2, 6])).tolist() == [10, 0, 20]
    assert error_sums._sizes(torch.zeros(3, 4, 5), None).tolist() == [20, 20, 20]
    assert error_sums._sizes(torch.zeros(4, 5), None).tolist() == [20]
