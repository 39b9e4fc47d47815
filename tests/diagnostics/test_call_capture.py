"""Capture of layer calls: which calls of a layer count, and that a sample leaves the model as it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.diagnostics import layer_numerics, sample
from blockscale.diagnostics.call_capture import EXPERT_ROWS, ROWS, _sample_experts
from blockscale.errors import OptionError
from support.measured_layers import converted, experts

# ---- which calls count -----------------------------------------------------------------------------------------------


def test_rows_of_experts_are_sampled_evenly_and_rare_experts_completely():
    sizes = torch.tensor([40000, 3, 0, 20, 19932, EXPERT_ROWS + 1])
    offs = sizes.cumsum(0).to(torch.int32)
    x = torch.arange(int(offs[-1])).float()[:, None].expand(-1, 4)
    call, subsample = _sample_experts(x, offs)
    most = max(EXPERT_ROWS, ROWS // len(sizes))
    counts = torch.diff(call.offs, prepend=call.offs.new_zeros(1))
    assert counts.tolist() == [min(size, most) for size in sizes.tolist()]
    assert call.load.tolist() == sizes.tolist()
    assert torch.equal(call.row_weight * counts, sizes.double())
    starts = [0, *offs.tolist()]
    for expert, (start, end) in enumerate(itertools.pairwise([0, *call.offs.tolist()])):
        mine = call.x[start:end, 0]
        assert ((mine >= starts[expert]) & (mine < starts[expert + 1])).all()
        if len(mine) > 1:
            gaps = torch.diff(mine)
            assert gaps.min() >= 1
            assert gaps.max() - gaps.min() <= 1
    assert torch.equal(subsample(x), call.x)


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_is_measured_with_its_gradients(reentrant):
    """The first forward of a reentrant checkpoint has no gradients: the recomputed one counts."""
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


def test_a_layer_without_rows_is_not_measured():
    model = converted("mxfp8", 64, 64, 64)
    found = layer_numerics(model, lambda: model[0](torch.randn(32, 64)).mean() + model[1](torch.randn(0, 64)).sum())
    assert [each.layer for each in found] == ["0"]


def test_a_call_that_is_detached_later_is_not_the_one_that_counts():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())
    (found,) = layer_numerics(model, lambda: model(x + 1).detach().mean() * 0 + model(x).square().mean())
    assert found == plain


def test_damage_adds_up_over_three_calls_of_a_layer():
    torch.manual_seed(0)
    shared = converted("mxfp8", 64, 64)
    x = torch.randn(64, 64)
    (found,) = layer_numerics(shared, lambda: shared(shared(shared(x))).square().mean())
    apart = converted("mxfp8", 64, 64, 64, 64)
    for each in apart:
        each.load_state_dict(shared[0].state_dict())
    three = layer_numerics(apart, lambda: apart(x).square().mean())
    assert found.damage == pytest.approx(sum(each.damage for each in three), rel=1e-6)
    assert found.operands["fprop_w"] == three[0].operands["fprop_w"], "its weight is cast once"


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
    assert found.operands["wgrad_dy"].sqnr == pytest.approx(plain.operands["wgrad_dy"].sqnr, rel=1e-9)


def test_a_backward_inside_the_forward_does_not_count():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())

    def loss() -> torch.Tensor:
        inner = x.clone().requires_grad_()
        torch.autograd.grad(model(inner).square().sum(), inner)
        return model(x).square().mean()

    (found,) = layer_numerics(model, loss)
    assert found.damage == plain.damage
    assert found.wgrad == plain.wgrad


def test_writes_to_an_input_after_the_call_do_not_count():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())

    def loss() -> torch.Tensor:
        inner = x.clone()
        y = model(inner)
        inner += 100 * y.detach()
        return y.square().mean()

    assert layer_numerics(model, loss) == [plain]


def test_a_users_hook_runs_after_the_capture():
    model, x = converted("mxfp8", 64, 64), torch.randn(32, 64)
    model[0].register_forward_hook(lambda module, args, y: (1000 * y,))
    (found,) = layer_numerics(model, lambda: model(x)[0].square().mean() / 1e6)
    model[0]._forward_hooks.clear()
    (plain,) = layer_numerics(model, lambda: model(x).square().mean())
    assert found.damage == pytest.approx(plain.damage, rel=1e-5)


def test_experts_may_be_called_with_keywords_in_any_order():
    layer, offs, x = experts("mxfp8"), torch.tensor([4, 8, 9, 16], dtype=torch.int32), torch.randn(16, 64)
    assert layer_numerics(layer, lambda: layer(routing=offs, input=x).mean()) == layer_numerics(
        layer, lambda: layer(x, offs).mean()
    )


# ---- the model's state afterwards ------------------------------------------------------------------------------------


def test_a_sample_restores_the_model():
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


def test_a_failing_batch_leaves_no_hooks():
    model = converted("mxfp8", 64, 64)
    with pytest.raises(RuntimeError, match="no batch"):
        sample(model, lambda: (_ for _ in ()).throw(RuntimeError("no batch")))
    assert not model[0]._forward_hooks


def test_a_model_that_steps_in_its_backward_is_refused():
    model = converted("mxfp8", 64, 64)
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pytest.raises(OptionError, match=r"whose 0\.weight has a hook behind its gradient"):
        sample(model, lambda: model(torch.randn(8, 64)).mean())
    handle.remove()
    assert layer_numerics(model, lambda: model(torch.randn(8, 64)).mean())


def test_gradients_outside_of_the_model_are_restored():
    body, head = converted("mxfp8", 64, 64), torch.nn.Linear(64, 8)
    prompt = torch.randn(8, 64, requires_grad=True)
    prompt.grad = held = torch.ones(8, 64)
    sample(body, lambda: head(body(prompt)).mean())
    assert head.weight.grad is None
    assert prompt.grad is held
    assert torch.equal(held, torch.ones(8, 64))


def test_gradients_that_are_views_of_a_bucket_are_restored():
    model, x = converted("mxfp8", 64, 64), torch.randn(8, 64)
    bucket = torch.ones(64 * 64)
    model[0].weight.grad = bucket.view(64, 64)

    def loss() -> torch.Tensor:
        y = model(x).mean()
        y.register_hook(lambda _: [bucket.zero_()][1:] or None)  # as DDP's reducer does
        return y

    sample(model, loss)
    assert torch.equal(model[0].weight.grad, torch.ones(64, 64))


def test_replaced_buffers_are_restored_and_others_not_written():
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = converted("mxfp8", 64, 64)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("scale", torch.ones(64))
            self.register_buffer("cache", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.register_buffer("last", x)
            self.count = self.count + 1
            self.cache = self.inner(x) * self.scale
            return self.cache

    model, x = Counting(), torch.randn(8, 64)
    pending = model(x).square().mean()
    del model.last
    cache = model.cache = None
    sample(model, lambda: model(x).mean())
    assert model.count.item() == 1
    assert model.cache is cache
    assert not hasattr(model, "last")
    pending.backward()  # fails if a saved buffer was written
