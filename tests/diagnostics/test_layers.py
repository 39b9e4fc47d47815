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
from blockscale.diagnostics.quality import measure, sqnr_db
from blockscale.diagnostics.watching import EXPERT_ROWS, ROWS, _rows_of_experts
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
    sums = layer_sums(layer, [Seen(x, torch.diff(offs, prepend=offs.new_zeros(1)), torch.ones(4), offs, dy)])
    found = bs.diagnostics.layers._layer("experts", {key: each.flatten().tolist() for key, each in sums.items()}, 1.0)
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
        rows = Seen(x[start:end], torch.tensor([end - start]), torch.ones(1), None, dy[start:end])
        single = layer_sums(model[0], [rows])
        for role in found.operands:
            if recipe != "nvfp4" or role.endswith("_x"):
                assert torch.equal(sums[f"{role}.scales"][expert], single[f"{role}.scales"][0]), (expert, role)
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


def test_rows_of_experts_are_thinned_out_evenly_and_rare_ones_are_all_there():
    sizes = torch.tensor([40000, 3, 0, 20, 19932, EXPERT_ROWS + 1])
    offs = sizes.cumsum(0).to(torch.int32)
    x = torch.arange(int(offs[-1])).float()[:, None].expand(-1, 4)
    seen, taken = _rows_of_experts(x, offs)
    most = max(EXPERT_ROWS, ROWS // len(sizes))
    counts = torch.diff(seen.offs, prepend=seen.offs.new_zeros(1))
    assert counts.tolist() == [min(size, most) for size in sizes.tolist()]
    assert seen.load.tolist() == sizes.tolist()
    assert torch.equal(seen.stands_for * counts, sizes.double())
    starts = [0, *offs.tolist()]
    for expert, (start, end) in enumerate(itertools.pairwise([0, *seen.offs.tolist()])):
        mine = seen.x[start:end, 0]
        assert ((mine >= starts[expert]) & (mine < starts[expert + 1])).all()
        if len(mine) > 1:
            gaps = torch.diff(mine)
            assert gaps.min() >= 1
            assert gaps.max() - gaps.min() <= 1
    assert torch.equal(taken(x), seen.x)


def test_every_expert_with_rows_has_its_own_figures_and_the_layer_those_of_all_rows():
    layer = experts("mxfp8")
    offs = torch.tensor([4000, 4003, 4003, 4050], dtype=torch.int32)
    x = torch.randn(4050, 64)
    x[4000:4003] *= torch.exp2(torch.randint(-12, 12, (3, 64)).float())  # noisy, and rare
    (found,) = layer_numerics(layer, lambda: layer(x, offs).square().mean())
    rare, empty = found.experts[1], found.experts[2]
    assert rare.underflow > 0.01 > found.operands["fprop_x"].underflow, "three of 4050 rows do not count as many"
    assert rare.operands["fprop_x"].scales
    assert rare.damage > 0
    assert empty.fprop is None
    assert sorted(empty.operands) == ["dgrad_w", "fprop_w"]
    assert sum(sum(each.operands["fprop_w"].scales.values()) for each in found.experts) == 4 * 96 * 2
    by_group = [sum(each.operands["wgrad_x"].scales.values()) for each in found.experts if each.rows]
    assert by_group == [64 * blocks for blocks in (4, 1, 2)], "blocks of 32 that hold rows, and no filling"


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


# ---- which calls count -----------------------------------------------------------------------------------------------


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


def test_a_call_that_is_detached_later_is_not_the_one_that_counts():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())
    (found,) = layer_numerics(model, lambda: model(x + 1).detach().mean() * 0 + model(x).square().mean())
    assert found == plain


def test_a_layer_that_is_used_three_times_has_the_damage_of_three():
    torch.manual_seed(0)
    shared = converted("mxfp8", 64, 64)
    x = torch.randn(64, 64)
    (found,) = layer_numerics(shared, lambda: shared(shared(shared(x))).square().mean())
    apart = converted("mxfp8", 64, 64, 64, 64)
    for each in apart:
        each.load_state_dict(shared[0].state_dict())
    three = layer_numerics(apart, lambda: apart(x).square().mean())
    assert found.damage == pytest.approx(sum(each.damage for each in three), rel=1e-6)
    assert found.operands["fprop_w"] == three[0].operands["fprop_w"], "its weight is one"
    assert sum(found.operands["fprop_x"].scales.values()) == 3 * 64 * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("regions", [1, 3])
def test_a_layer_that_is_used_three_times_within_checkpoints(reentrant, regions):
    model, x = converted("mxfp4", 64, 64), torch.randn(64, 64, requires_grad=True)

    def thrice(x: torch.Tensor) -> torch.Tensor:
        return model(model(model(x)))

    def loss() -> torch.Tensor:
        y = x
        for _ in range(regions):
            y = checkpoint(thrice if regions == 1 else model, y, use_reentrant=reentrant)
        return y.square().mean()

    (found,), (plain,) = (layer_numerics(model, each) for each in (loss, lambda: thrice(x).square().mean()))
    for name in ("fprop", "dgrad", "wgrad", "damage"):
        assert getattr(found, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    assert found.operands["wgrad_dy"].scales == plain.operands["wgrad_dy"].scales


def test_a_backward_within_the_forward_is_none_of_the_loss():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())

    def loss() -> torch.Tensor:
        inner = x.clone().requires_grad_()
        torch.autograd.grad(model(inner).square().sum(), inner)
        return model(x).square().mean()

    (found,) = layer_numerics(model, loss)
    assert found.damage == plain.damage
    assert found.wgrad == plain.wgrad


def test_products_stand_for_all_rows_of_their_calls():
    """Many rows without noise and few with it: what was taken of both is no mean of them."""
    layer = experts("mxfp8")
    offs = torch.tensor([20000, 20040, 20040, 20040], dtype=torch.int32)
    layer.weight.data.fill_(0.5)
    x = torch.ones(20040, 64)
    x[20000:] = torch.randn(40, 64)
    (found,) = layer_numerics(layer, lambda: layer(x, offs).sum())  # gradients of one have no noise
    for product in ("fprop", "wgrad"):
        assert getattr(found, product) > getattr(found.experts[1], product) + 40, product


def test_what_happens_to_an_input_after_the_call_does_not_count():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())

    def loss() -> torch.Tensor:
        inner = x.clone()
        y = model(inner)
        inner += 100 * y.detach()
        return y.square().mean()

    assert layer_numerics(model, loss) == [plain]


def test_a_users_hook_is_behind_what_is_measured():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    model[0].register_forward_hook(lambda module, args, y: (1000 * y,))
    (found,) = layer_numerics(model, lambda: model(x)[0].square().mean() / 1e6)
    model[0]._forward_hooks.clear()
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())
    assert found.damage == pytest.approx(plain.damage, rel=1e-5)


def test_experts_may_be_called_by_names_in_any_order():
    layer, offs, x = experts("mxfp8"), torch.tensor([4, 8, 9, 16], dtype=torch.int32), torch.randn(16, 64)
    assert layer_numerics(layer, lambda: layer(offs=offs, input=x).mean()) == layer_numerics(
        layer, lambda: layer(x, offs).mean()
    )


# ---- what is left behind ---------------------------------------------------------------------------------------------


def test_gradients_outside_of_the_model_are_left_as_they_were():
    body, head = converted("mxfp8", 64, 64), torch.nn.Linear(64, 8)
    prompt = torch.randn(8, 64, requires_grad=True)
    prompt.grad = held = torch.ones(8, 64)
    sample(body, lambda: head(body(prompt)).mean())
    assert head.weight.grad is None
    assert prompt.grad is held
    assert torch.equal(held, torch.ones(8, 64))


def test_gradients_that_share_memory_with_a_bucket_are_put_back():
    model, x = converted("mxfp8", 64, 64), torch.randn(8, 64)
    bucket = torch.ones(64 * 64)
    model[0].weight.grad = bucket.view(64, 64)

    def loss() -> torch.Tensor:
        y = model(x).mean()
        y.register_hook(lambda _: [bucket.zero_()][1:] or None)  # as a reducer does
        return y

    sample(model, loss)
    assert torch.equal(model[0].weight.grad, torch.ones(64, 64))


def test_buffers_that_are_replaced_are_put_back_and_others_not_written():
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = converted("mxfp8", 64, 64)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("scale", torch.ones(64))
            self.register_buffer("cache", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            self.cache = self.inner(x) * self.scale
            return self.cache

    model, x = Counting(), torch.randn(8, 64)
    pending = model(x).square().mean()
    cache = model.cache = None
    sample(model, lambda: model(x).mean())
    assert model.count.item() == 1
    assert model.cache is cache
    pending.backward()  # fails where a buffer that it kept was written


# ---- numbers that are none, and questions that are none --------------------------------------------------------------


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
def test_a_loss_that_is_none_is_refused(loss, says):
    model, x = converted("mxfp8", 64, 64), torch.randn(8, 64)
    with pytest.raises(OptionError, match=says):
        sample(model, lambda: loss(model(x)))
    assert not model[0]._forward_hooks


def test_questions_that_are_none_are_refused():
    model = converted("mxfp8", 64, 64)
    with pytest.raises(OptionError, match="tokens=0"):
        sample(model, lambda: model(torch.randn(8, 64)).mean(), tokens=0)
    with pytest.raises(OptionError, match="loss=Tensor"):
        sample(model, model(torch.randn(8, 64)).mean())
    with pytest.raises(OptionError, match="0 is on the meta device"):
        sample(model.to("meta"), lambda: model(torch.randn(8, 64, device="meta")).mean())
