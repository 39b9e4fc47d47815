"""Timing of linear layers on a CPU with a fake layer: which calls, how often, and what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import blockscale
from blockscale.autograd import refresh_weights_
from blockscale.autograd.recipe import get_recipe
from blockscale.bench import layers, linears, rooflines
from blockscale.bench.ceilings import Ceilings, as_roof, measure_roof
from blockscale.bench.linears import Measured, time_layers
from blockscale.bench.timing import Timing
from blockscale.errors import DeviceError
from blockscale.roofline import INFERENCE, MEASURED, TRAINING, Use, nominal

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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


def timed(use: Use) -> list[Measured]:
    (rows,) = time_layers([LAYER], 8, ["fp8_blockwise"], CPU, use, rounds=2, seconds=1e-4)
    return rows


def test_bf16_and_recipe_are_timed() -> None:
    rows = timed(TRAINING)
    assert [row.recipe for row in rows] == ["bf16", "fp8_blockwise"]
    for row in rows:
        assert (row.layer, row.tokens, row.method) == (LAYER, 8, "cpu")
        assert 0 < row.spread_us[0] <= row.us <= row.spread_us[1]
    (layer,) = Recorded.made
    assert set(layer.calls) == {"train"}, "gradients are not added up between calls"
    assert (layer.recipe.name, layer.recipe.weight_cast) == ("fp8_blockwise", "forward")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8_wgrad_bf16"])
def test_stochastic_and_partly_bf16_recipes_are_timed(recipe: str) -> None:
    (rows,) = time_layers([LAYER], 8, [recipe], CPU, TRAINING, rounds=1, seconds=1e-4)
    assert [row.recipe for row in rows] == ["bf16", recipe]


def test_a_step_is_one_cast_and_all_microbatches() -> None:
    timed(Use(microbatches=3, weight_cast="step"))
    (layer,) = Recorded.made
    assert layer.recipe.weight_cast == "step"
    assert layer.calls[:8] == ["refresh", "train", "train on", "train on"] * 2
    assert len(layer.calls) == 4 * layer.calls.count("refresh") == 4 * layer.calls.count("train")


def test_a_time_is_that_of_one_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(30.0, 27.0, 33.0, "graph", 2)
    monkeypatch.setattr(linears, "measure", lambda slices, rounds: dict.fromkeys(slices, timing))
    assert [row.us for row in timed(Use(microbatches=3, weight_cast="step"))] == [10.0, 10.0]
    assert [row.us for row in timed(TRAINING)] == [30.0, 30.0]


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


def test_rows_survive_a_file(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", timed(TRAINING)
    linears.write(path, rows)
    linears.write(path, rows)
    assert linears.read(path) == rows
    assert rows[0].fits(8, TRAINING)
    assert not rows[0].fits(8, INFERENCE)
    assert not rows[0].fits(16, TRAINING)


def test_rows_of_the_suite_can_be_shown() -> None:
    """Stored rows of `bench linear` give marks of the picture: ours and bf16, without whole steps."""
    rows = linears.read(RESULTS / "linear-h200.jsonl")
    times = {(row.layer, row.tokens, row.recipe): row.us for row in rows}
    assert {row.recipe for row in rows} >= {"bf16", "fp8_blockwise"}
    large = (7168, 18432), 4096
    assert 1.2 < times[*large, "bf16"] / times[*large, "fp8_blockwise"] < 2
    assert all(row.fits(None, Use()) for row in rows)


def test_shares_of_both_roofs() -> None:
    seen = [
        Measured((7168, 18432), 4096, name, True, 1, "forward", us, (us, us), "graph")
        for name, us in (("bf16", 5000.0), ("fp8_blockwise", 3125.0))
    ]
    roofs = rooflines.Roofs(MEASURED["h200"], nominal("h200"))
    high, low = rooflines.rows_of([(7168, 18432)], 4096, [get_recipe("fp8_blockwise")], roofs, TRAINING, seen=seen)
    assert (high.measured, high.share, high.nominal_share) == (1.0, 1.0, 1.0)
    assert low.measured == 1.6
    assert low.share == pytest.approx(1.6 / low.roof)
    assert low.nominal is not None
    assert low.nominal_share == pytest.approx(1.6 / low.nominal)
    assert low.casting == pytest.approx(low.cost.of("cast x", "cast w", "cast dy") / low.cost.seconds)
    (_, unseen) = rooflines.rows_of([(7168, 18432)], 4096, [get_recipe("fp8_blockwise")], roofs, INFERENCE, seen=seen)
    assert unseen.us is None


def test_roofs_of_what_was_measured() -> None:
    found = as_roof(Ceilings(4000.0, {"bf16": 2000.0, "fp8": 4000.0}), "NVIDIA B200", "blackwell")
    assert (found.bandwidth, found.bf16, found.fp8, found.fp4) == (4e12, 2e15, 4e15, 8e15)
    assert "fp4 from fp8 by the specification" in found.source
    assert as_roof(Ceilings(1000.0, {"bf16": 100.0}), "NVIDIA A100-SXM4-80GB", "ampere").fp8 is None
    with pytest.raises(DeviceError, match="measured on a GPU"):
        measure_roof(CPU)
