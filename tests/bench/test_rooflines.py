"""Ceilings, and linear layers timed on a CPU with a fake layer: which calls, how often, and how they are shown."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import blockscale
from blockscale.autograd import refresh_weights_
from blockscale.autograd.recipe import get_recipe
from blockscale.bench import layers, rooflines
from blockscale.bench.rooflines import Times, as_ceilings, find_roofs, time_layers
from blockscale.bench.timing import Timing
from blockscale.roofline import INFERENCE, MEASURED, TRAINING, Use, nominal

CPU = torch.device("cpu")
LAYER = (32, 16)


class Recorded(blockscale.nn.Linear):
    """A fake layer that records its calls."""

    made: ClassVar[list[Recorded]] = []

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.calls = list[str]()
        self.made.append(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.calls.append("train" if self.weight.grad is None else "train on")
        else:
            self.calls.append("infer")
        return super().forward(input)


@pytest.fixture(autouse=True)
def _layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refresh(layer: torch.nn.Module) -> None:
        if isinstance(layer, Recorded):
            layer.calls.append("refresh")
        refresh_weights_(layer)

    monkeypatch.setattr(layers, "Linear", Recorded)
    monkeypatch.setattr(layers, "refresh_weights_", refresh)
    monkeypatch.setattr(Recorded, "made", [])


def timed(use: Use, recipe: str = "fp8_blockwise") -> Times:
    (times,) = time_layers([LAYER], 8, [recipe], CPU, use, rounds=2, seconds=1e-4)
    return times


def test_bf16_and_recipe_are_timed() -> None:
    times = timed(TRAINING)
    assert list(times) == [(LAYER, 8, "bf16"), (LAYER, 8, "fp8_blockwise")]
    assert all(us > 0 for us in times.values())
    (layer,) = Recorded.made
    assert set(layer.calls) == {"train"}, "gradients are not added up between calls"
    assert (layer.recipe.name, layer.recipe.weight_cast) == ("fp8_blockwise", "forward")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8_wgrad_bf16"])
def test_stochastic_and_partly_bf16_recipes_are_timed(recipe: str) -> None:
    assert list(timed(TRAINING, recipe)) == [(LAYER, 8, "bf16"), (LAYER, 8, recipe)]


def test_a_step_is_one_cast_and_all_microbatches() -> None:
    timed(Use(microbatches=3, weight_cast="step"))
    (layer,) = Recorded.made
    assert layer.recipe.weight_cast == "step"
    assert layer.calls[:8] == ["refresh", "train", "train on", "train on"] * 2
    assert len(layer.calls) == 4 * layer.calls.count("refresh") == 4 * layer.calls.count("train")


def test_a_time_is_that_of_one_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(30.0, 27.0, 33.0, "graph", 2)
    monkeypatch.setattr(rooflines, "measure", lambda slices, rounds: dict.fromkeys(slices, timing))
    assert list(timed(Use(microbatches=3, weight_cast="step")).values()) == [10.0, 10.0]
    assert list(timed(TRAINING).values()) == [30.0, 30.0]


@pytest.mark.parametrize("training", [True, False])
def test_layers_with_a_bias(training: bool) -> None:
    timed(Use(training, bias=True))
    (layer,) = Recorded.made
    assert layer.bias is not None
    assert (layer.bias.grad is not None) == training


def test_serving_casts_the_weight_once_beforehand() -> None:
    timed(INFERENCE)
    (layer,) = Recorded.made
    assert layer.calls[0] == "refresh"
    assert set(layer.calls[1:]) == {"infer"}
    assert layer.recipe.weight_cast == "step"
    assert layer.weight.grad is None


def test_measured_speedups_beside_both_roofs() -> None:
    layer, recipes = (7168, 18432), [get_recipe("fp8_blockwise")]
    times = {(layer, 4096, "bf16"): 5000.0, (layer, 4096, "fp8_blockwise"): 3125.0}
    roofs = rooflines.Roofs(MEASURED["h200"], nominal("h200"))
    high, low = rooflines.rows_of([layer], 4096, recipes, roofs, TRAINING, times=times)
    assert (high.measured, high.roof, high.nominal) == (1.0, 1.0, 1.0)
    assert low.measured == 1.6
    assert low.nominal is not None
    assert low.roof > low.nominal > 1.6
    assert low.casting == pytest.approx(low.cost.of("cast x", "cast w", "cast dy") / low.cost.seconds)
    (_, unseen) = rooflines.rows_of([layer], 8192, recipes, roofs, TRAINING, times=times)
    assert unseen.us is None


def test_roofs_of_what_was_measured() -> None:
    found = as_ceilings("NVIDIA B200", "blackwell", 4e12, {"bf16": 2e15, "fp8": 4e15})
    assert (found.bandwidth, found.bf16, found.fp8, found.fp4) == (4e12, 2e15, 4e15, 8e15)
    assert "fp4 from fp8 by the specification" in found.source
    assert as_ceilings("NVIDIA A100-SXM4-80GB", "ampere", 1e12, {"bf16": 1e14}).fp8 is None
    assert find_roofs(CPU) is None, "only a GPU is measured"
