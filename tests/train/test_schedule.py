"""Learning rates at the points that define a schedule, clipping, and weight decay by parameter."""

from __future__ import annotations

import math

import pytest
import torch

from blockscale.models.transformer import Transformer
from blockscale.train import OptimizerConfig
from blockscale.train.schedule import divisor, make_optimizer, norm_of, rate_at
from support.small_runs import SPARSE


def rates(**options) -> list[float]:
    config = OptimizerConfig(rate=2.0, **options)
    return [rate_at(step, 100, config) for step in range(100)]


def test_warmup_is_linear_and_ends_at_the_top():
    found = rates(warmup=0.1)
    assert found[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(found) == 2.0


def test_cosine():
    found = rates(warmup=0.1, floor=0.1)
    assert found[10] == 2.0
    assert found[-1] == pytest.approx(0.2)
    quarter = 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 29 / 89)))
    assert found[39] == pytest.approx(quarter)
    assert found[10:] == sorted(found[10:], reverse=True)


def test_wsd_is_constant_then_linear():
    found = rates(schedule="wsd", warmup=0.1, decay=0.2, floor=0.0)
    assert set(found[10:80]) == {2.0}
    assert found[79:] == pytest.approx([2.0 * (20 - step) / 20 for step in range(21)])


def test_no_warmup_and_constant():
    assert set(rates(schedule="constant", warmup=0.0)) == {2.0}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_few_steps_have_rates(steps: int, schedule):
    config = OptimizerConfig(rate=1.0, schedule=schedule)
    assert all(0 <= rate_at(step, steps, config) <= 1 for step in range(steps))


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_torchs(limit: float):
    def weights() -> list[torch.nn.Parameter]:
        draw = torch.Generator().manual_seed(0)
        made = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((5, 5), (7,))]
        for each in made:
            each.grad = torch.randn(each.shape, generator=draw)
        return made

    ours, theirs = weights(), weights()
    mine, plain = (torch.optim.AdamW(each, lr=0.1, eps=1e-2, fused=True) for each in (ours, theirs))
    norm = norm_of([each.grad for each in ours if each.grad is not None])
    mine.grad_scale = divisor(norm, limit)
    assert torch.equal(torch.nn.utils.clip_grad_norm_(theirs, limit), norm)
    assert (mine.grad_scale == 1) == (norm < limit)
    for optimizer in (mine, plain):
        optimizer.step()
    # ours divides, torch multiplies by the inverse
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_no_limit_scales_nothing():
    norm = norm_of([torch.full((4,), 3.0)])
    scale = divisor(norm, 0.0)
    assert (norm, scale) == (6.0, None)


def test_norms_do_not_decay():
    model = Transformer.build(SPARSE, 16)
    decays, stays = make_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert (decays["weight_decay"], stays["weight_decay"]) == (0.3, 0.0)
    names = {id(each): name for name, each in model.named_parameters()}
    assert all("norm" in names[id(each)] for each in stays["params"])
    assert len(decays["params"]) + len(stays["params"]) == len(names)
