"""Advice: a bad layer is found, budgets are met, and the filter does what it says."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

import blockscale as bs
from blockscale.diagnostics import LayerNumerics, Numerics, advise, load_filter, sample
from blockscale.diagnostics.filters import ByName
from blockscale.diagnostics.layer_selection import select_unquantized
from blockscale.diagnostics.store import model_line, read, sample_line
from blockscale.errors import OptionError


class Net(torch.nn.Module):
    """Four layers in residual branches.  spoil: the layer whose weights get outliers."""

    def __init__(self, spoil: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128, bias=False) for _ in range(4))
        self.head = torch.nn.Linear(128, 16)
        if spoil is not None:
            with torch.no_grad():
                # every block of 32 has a value that takes its range; inputs there are zero, so results do not change
                self.layers[spoil].weight[:, ::32] = 3e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inner = functional.relu(x).clone()
            inner[:, ::32] = 0
            x = x + layer(inner)
        return self.head(x)


def measured(model: torch.nn.Module, recipe: str = "mxfp8") -> tuple[bs.ConversionReport, Numerics]:
    report = bs.quantize_(model, recipe)
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(256, 128, generator=generator), torch.randint(16, (256,), generator=generator)
    return report, sample(model, lambda: functional.cross_entropy(model(x), target)).read()


@pytest.mark.parametrize("bad", [0, 2])
def test_a_layer_with_outliers_is_the_worst(bad):
    report, found = measured(Net(bad))
    advice = advise(report, [found])
    assert advice.ranked[0].layer == f"layers.{bad}"
    assert advice.keep[0] == f"layers.{bad}"
    others = [each.gap for each in advice.ranked[1:]]
    assert advice.ranked[0].gap > 10 * max(others)
    assert "underflow" in advice.ranked[0].says


def test_leaving_it_unquantized_brings_the_loss_back():
    """With the layer unquantized the loss is nearer to that of bf16."""
    torch.manual_seed(1)
    x, target = torch.randn(256, 128), torch.randint(16, (256,))
    report, found = measured(Net(1))
    advice = advise(report, [found])
    losses = {}
    for name, filter_fn in {"high": lambda *_: False, "all": lambda *_: True, "advised": advice.filter_fn}.items():
        model = Net(1)
        bs.quantize_(model, "mxfp8", filter_fn)
        losses[name] = functional.cross_entropy(model(x), target).item()
    gaps = {name: abs(losses[name] - losses["high"]) for name in ("all", "advised")}
    assert gaps["advised"] < 0.2 * gaps["all"]


def layer(name: str, damage: float = 0.0, gradient: float = 1.0, wgrad: float | None = None) -> LayerNumerics:
    return LayerNumerics(name, damage=damage, gradient=gradient, wgrad=wgrad)


def converted(count: int) -> bs.ConversionReport:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(count)))
    return bs.quantize_(model, "fp8_blockwise", lambda module, name: True)


def test_layers_are_kept_until_both_sums_are_within_their_budgets():
    layers = (layer("0", 0.04, 1.0, 10.0), layer("1", 0.02), layer("2", 0.005), layer("3", 0.003, 0.0, 0.0))
    found = Numerics(2.0, layers)
    advice = advise(converted(4), [found], budget=0.005, gradient_budget=0.5)
    # gaps 0.02, 0.01, 0.0025, 0.0015; gradients a third of a tenth, and zero
    assert advice.keep == ("0", "1")
    assert advice.low == ("2", "3")
    assert advice.gaps == pytest.approx((0.034, 0.004))
    assert advice.gradients == pytest.approx((0.1 / 3, 0.0))
    assert advice.speedups[0] > advice.speedups[1] > 1
    assert advise(converted(4), [found], budget=0.1).keep == ()
    # only the gradient is over its budget: its noisiest layer stays unquantized, whatever the gaps of the others
    only = advise(converted(4), [found], budget=0.1, gradient_budget=0.01)
    assert only.keep == ("0",)
    every = advise(converted(4), [found], budget=1e-9)
    assert every.low == ()
    assert every.speedups[1] == 1.0


def test_the_mean_of_samples_counts_and_non_finite_figures_are_worst():
    samples = [Numerics(1.0, (layer("0", damage), layer("1", 0.0))) for damage in (0.9, 0.8, 0.002, 0.004)]
    assert advise(converted(2), samples).gaps[0] == pytest.approx(0.003), "the mean of the later half"
    broken = Numerics(1.0, (layer("0", 0.002), layer("1", float("nan"))))
    assert advise(converted(2), [broken]).ranked[0].layer == "1"
    torn = Numerics(1.0, (layer("0", 0.001), layer("1", 0.0, gradient=float("nan"), wgrad=20.0), layer("2", 0.001)))
    advice = advise(converted(3), [torn])
    assert advice.keep == ("1",), "a layer that is not finite does not affect the others"
    assert advice.low == ("0", "2")


def test_a_filter_survives_its_file(tmp_path):
    report, found = measured(Net(2))
    advice = advise(report, [found])
    path = tmp_path / "deep" / "advice.json"
    advice.save(path)
    advice.save(str(path))
    for filter_fn in (advice.filter_fn, load_filter(path), load_filter(str(path))):
        done = bs.quantize_(Net(2), "mxfp8", filter_fn)
        assert [each.name for each in done.converted] == list(advice.low) == ["layers.0", "layers.1", "layers.3"]
        # what the defaults of quantize_ keep is not converted either
        assert "head" in [each.name for each in done.skipped]


def test_experts_of_several_weights_are_converted_by_the_name_of_their_module():
    filter_fn = ByName(("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "root"))
    module = torch.nn.Identity()
    assert filter_fn(module, "mlp.experts")
    assert filter_fn(module, "")
    assert not filter_fn(module, "mlp.exp")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"kind": "other", "low": []}',
        '{"kind": "blockscale advice", "low": "layers.0"}',
        '{"kind": "blockscale advice", "low": [1]}',
        '{"kind": "blockscale advice", "low": [], "keep": 3}',
    ],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "advice.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="blockscale advise wrote"):
        load_filter(path)
    with pytest.raises(OptionError, match="blockscale advise wrote"):
        load_filter(tmp_path / "missing.json")


@pytest.mark.parametrize("name", ["budget", "gradient_budget"])
def test_impossible_budgets_are_refused(name):
    with pytest.raises(OptionError, match=f"{name}=0"):
        advise(converted(1), [Numerics(1.0, (layer("0"),))], **{name: 0})


@pytest.mark.parametrize("loss", [0.0, -1.5, float("nan"), float("inf")])
def test_a_loss_that_is_not_above_zero_has_no_budget(loss):
    with pytest.raises(OptionError, match="a budget is a share of the loss"):
        advise(converted(1), [Numerics(loss, (layer("0", 0.1),))])


def test_an_unquantized_model_gets_no_advice():
    with pytest.raises(OptionError, match="no measured layer"):
        advise(converted(1), [Numerics(1.0, ())])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_stored_numerics_are_read_back(tmp_path, recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(bs.nn.MoE(dim=64, hidden=32, experts=4, top_k=2, recipe=recipe, name="moe"))
    report = bs.quantize_(model, recipe, lambda module, name: True)
    x = torch.randn(20, 64)
    found = sample(model, lambda: model(x).square().mean()).read()
    path = tmp_path / "numerics.jsonl"
    lines = [model_line(report), sample_line(3, found), sample_line(9, found)]
    path.write_text("\n".join([*lines, lines[1][:40]]))  # killed during a write
    stored = read(tmp_path)
    assert list(stored.samples) == [3, 9]
    assert stored.samples[9] == found
    assert stored.report.recipe == report.recipe
    assert stored.report.converted == report.converted
    assert stored.report.skipped == report.skipped
    assert json.loads(lines[1])["layers"][0]["experts"][0]["rows"] == found.layers[0].experts[0].rows
    assert advise(stored.report, list(stored.samples.values())) == advise(report, [found, found])


def test_samples_of_another_conversion_do_not_count(tmp_path):
    """A run that resumed with other quantized layers, as advised, and then took a sample."""
    first, later = converted(3), converted(2)
    old, new = Numerics(1.0, (layer("0", 0.5), layer("2", 0.5))), Numerics(1.0, (layer("0", 0.001), layer("1", 0.0)))
    lines = [model_line(first), sample_line(0, old), model_line(first), sample_line(5, old)]
    path = tmp_path / "numerics.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert list(read(tmp_path).samples) == [0, 5], "the same model line continues"
    path.write_text("\n".join([*lines, model_line(later), sample_line(9, new)]) + "\n")
    stored = read(tmp_path)
    assert list(stored.samples) == [9]
    assert advise(stored.report, list(stored.samples.values())).gaps[0] == pytest.approx(0.001)
    # with samples of both conversions, only layers of the last sample are ranked
    assert {each.layer for each in advise(later, [old, new]).ranked} == {"0", "1"}


def test_a_filter_of_another_model_is_refused(tmp_path):
    report, found = measured(Net(2))
    advise(report, [found]).save(tmp_path / "advice.json")
    assert load_filter(tmp_path / "advice.json", Net(2))
    assert load_filter(tmp_path / "advice.json", torch.compile(Net(2), backend="eager")), "wrappers do not count"
    with pytest.raises(OptionError, match=r"names layers\.0.*advice is for the model that was measured"):
        load_filter(tmp_path / "advice.json", torch.nn.Sequential(torch.nn.Linear(8, 8)))
    larger = Net(2)
    larger.layers.append(torch.nn.Linear(128, 128, bias=False))
    with pytest.raises(OptionError, match=r"does not list layers\.4.*advice is for the model that was measured"):
        load_filter(tmp_path / "advice.json", larger)
    larger = Net(2)
    larger.experts = bs.nn.GroupedExperts(experts=4, dim=128, hidden=64, recipe="bf16")
    with pytest.raises(OptionError, match=r"does not list experts\.down"):
        load_filter(tmp_path / "advice.json", larger)
    with pytest.warns(UserWarning, match="is for mxfp8, this is nvfp4"):
        load_filter(tmp_path / "advice.json", Net(2), bs.get_recipe("nvfp4"))
    assert load_filter(tmp_path / "advice.json", Net(2), bs.get_recipe("bf16")), "the baseline of a comparison"


def test_a_folder_without_samples_is_refused(tmp_path):
    with pytest.raises(OptionError, match="numerics-every"):
        read(tmp_path)
    (tmp_path / "numerics.jsonl").write_text(model_line(converted(1)) + "\n")
    with pytest.raises(OptionError, match="0 samples"):
        read(tmp_path)


def test_unmeasured_layers_are_listed_and_stay_unquantized_with_keep_unmeasured():
    report = converted(4)
    found = Numerics(1.0, (layer("0", 0.001), LayerNumerics("1", fprop=20.0), layer("2", 0.0)))
    advice = advise(report, [found])
    assert advice.unmeasured == ("1", "3")
    assert advice.unmeasured_share == pytest.approx(0.5)
    assert advice.low == ("0", "1", "2", "3")
    careful = advise(report, [found], keep_unmeasured=True)
    assert careful.low == ("0", "2")
    assert careful.gaps == advice.gaps
    assert careful.speedups[1] < advice.speedups[1]


def test_samples_of_another_model_are_refused():
    with pytest.raises(OptionError, match=r"a sample of a\.b, which the report does not have"):
        advise(converted(2), [Numerics(1.0, (layer("a.b", 5.0),))])


def test_the_layer_that_loses_least_time_stays_unquantized():
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Linear(8192, 28672), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)
        )
    report = bs.quantize_(model, "fp8_blockwise", lambda module, name: True)
    found = Numerics(1.0, (layer("0", 0.0011), layer("1", 0.001), layer("2", 0.001)))
    advice = advise(report, [found], budget=0.0012)
    assert advice.low == ("0",)
    assert advice.gaps[1] <= 0.0012
    assert advice.speedups[1] > 0.95 * advice.speedups[0]
    wins = {each.layer: each.wins for each in advice.ranked}
    assert wins["0"] > 10 * max(wins["1"], wins["2"])


def test_a_selection_meets_its_budgets_and_is_minimal():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = torch.rand(12, 3, generator=generator).pow(4).tolist()
        figures = {str(at): (gap, gradient) for at, (gap, gradient, _) in enumerate(rows)}
        won = {str(at): seconds for at, (_, _, seconds) in enumerate(rows)}
        kept = select_unquantized(figures, (0.3, 0.4), won)
        sums = [sum(figures[name][at] for name in figures if name not in kept) for at in (0, 1)]
        assert sums[0] <= 0.3
        assert sums[1] <= 0.4
        for name in kept:
            assert sums[0] + figures[name][0] > 0.3 or sums[1] + figures[name][1] > 0.4


def test_advice_for_many_layers_takes_no_time():
    count = 20_000
    figures = {str(at): (1e-3, 1e-3) for at in range(count)}
    assert len(select_unquantized(figures, (1e-9, 1e-9), dict.fromkeys(figures, 1.0))) == count


def test_invalid_lines_of_a_file(tmp_path):
    good, path = converted(1), tmp_path / "numerics.jsonl"
    nowhere = Numerics(float("nan"), (layer("0", gradient=float("inf")),))
    line = sample_line(3, nowhere)
    assert "NaN" not in line
    assert "Infinity" not in line
    path.write_text(model_line(good) + "\n" + line + "\n")
    with pytest.raises(OptionError, match="a loss of nan"):
        advise(read(path).report, list(read(path).samples.values()))
    text = '{"kind": "numerics", "step": 1, "loss": "x", "layers": []}'
    for broken in ('{"kind": "numerics", "step": 1}', '{"kind": "model"}', text):
        path.write_text(model_line(good) + "\n" + broken + "\n")
        with pytest.raises(OptionError, match="blockscale train of this version wrote its lines"):
            read(path)
    path.write_bytes(model_line(good).encode() + b"\n\xff\xfe\n")
    with pytest.raises(OptionError, match="0 samples"):
        read(path)
