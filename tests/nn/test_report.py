"""The report's sums, predictions and text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.nn import GroupedExperts
from blockscale.nn.report import Converted, Skipped, speed_note
from blockscale.roofline import BF16, Use, linear_cost, measured, nominal

FP8 = bs.get_recipe("fp8_blockwise")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256)
        self.wq, self.wk, self.wv = (nn.Linear(256, 256, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)


def model(blocks: int) -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "embed": nn.Embedding(512, 256),
                "layers": nn.ModuleList(Block() for _ in range(blocks)),
                "lm_head": nn.Linear(256, 512, bias=False),
            }
        )


def test_text():
    report = bs.quantize_(model(12), "nvfp4")
    *text, shares, roofline = str(report).splitlines()
    assert text == [
        "nvfp4: 40 of 61 linear layers converted",
        "converted",
        "  layers.2-9.wq    x8    256 ->  256",
        "  layers.2-9.wk    x8    256 ->  256",
        "  layers.2-9.wv    x8    256 ->  256",
        "  layers.2-9.up    x8    256 -> 1024",
        "  layers.2-9.down  x8   1024 ->  256",
        "kept in high precision",
        "  layers.0-1.*     x10                first 2 of 12 blocks",
        "  layers.10-11.*   x10                last 2 of 12 blocks",
        "  lm_head                256 ->  512  output head",
        "not linear: 1 Embedding (131.1k parameters), 12 RMSNorm (3.1k parameters)",
    ]
    assert shares.startswith("share: ")
    assert roofline.startswith("roofline: ")
    assert "no units for it" in roofline


def llama() -> nn.Module:
    """Names and sizes of Llama 3 8B."""

    def linears(**sizes: tuple[int, int]) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def block() -> nn.Module:
        width, kv, hidden = 4096, 1024, 14336
        attention = linears(q_proj=(width, width), k_proj=(width, kv), v_proj=(width, kv), o_proj=(width, width))
        mlp = linears(gate_proj=(width, hidden), up_proj=(width, hidden), down_proj=(hidden, width))
        norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        return nn.ModuleDict({"attention": attention, "mlp": mlp, "norms": norms})

    with torch.device("meta"):
        layers = nn.ModuleList(block() for _ in range(32))
        embed, head = nn.Embedding(128256, 4096), nn.Linear(4096, 128256, bias=False)
        return nn.ModuleDict({"embed": embed, "layers": layers, "norm": nn.RMSNorm(4096), "lm_head": head})


@pytest.mark.parametrize(
    ("page", "recipe"),
    [("docs/conversion.md", "fp8_blockwise"), ("docs/conversion.md", "nvfp4")],
)
def test_documented_reports_are_printed_ones(page, recipe):
    text = (Path(__file__).parents[2] / page).read_text()
    # the last line depends on ceilings, which may have been measured on this machine
    assert str(bs.quantize_(llama(), recipe)).rpartition("roofline")[0] in text


def test_few_layers_that_are_kept_have_a_line_each_with_their_sizes():
    report = bs.quantize_(model(3), "mxfp8", lambda module, name: not name.endswith(("wq", "wk", "wv")))
    assert "  layers.0-2.wq    x3   256 ->  256  filter_fn returned False" in str(report)


def test_converted_layers_with_a_note_keep_their_sizes():
    changed = model(3)
    bs.quantize_(changed, "mxfp8")
    assert str(bs.quantize_(changed, "fp8_blockwise")).count("had recipe mxfp8 before") == 5


def test_shares():
    whole = model(2)
    report = bs.quantize_(whole, FP8)
    assert report.parameters == sum(each.numel() for each in whole.parameters())
    inside = 2 * (3 * 256 * 256 + 2 * 256 * 1024)
    assert report.parameter_share == (inside + 2 * (1024 + 256)) / report.parameters
    assert report.flop_share == inside / (inside + 256 * 512)


@pytest.mark.parametrize(("machine", "ceilings"), [("h200", measured("h200")), ("b200", nominal("b200"))])
@pytest.mark.parametrize("weight_cast", ["forward", "twice"])
def test_predictions_are_the_rooflines(machine, ceilings, weight_cast):
    recipe = FP8.replace(weight_cast=weight_cast)
    report = bs.ConversionReport(
        recipe,
        (Converted("a", 4096, 14336, 1), Converted("b", 4096, 14336, 1), Converted("c", 14336, 4096, 1)),
        (Skipped("head", "output head", 4096, 128256, 1), Skipped("lazy", "lazy", 0, 64, 0)),
    )

    def seconds(low, high, formats):
        return linear_cost(8192, low, high, formats, ceilings, Use(weight_cast=weight_cast)).seconds

    low, high = (2 * seconds(4096, 14336, each) + seconds(14336, 4096, each) for each in (recipe.formats(), BF16))
    rest = seconds(4096, 128256, BF16)
    assert report.predicted_speedup(8192, machine) == pytest.approx((high / low, (high + rest) / (low + rest)))
    assert high / low > 1.3


def test_nothing_converted_is_as_fast_as_before():
    report = bs.quantize_(nn.Linear(64, 64), "mxfp8", lambda module, name: False)
    assert report.predicted_speedup(64) == (1.0, 1.0)
    assert report.warnings
    assert "share" not in str(report)
    assert bs.quantize_(nn.Linear(64, 64), "bf16").predicted_speedup(64) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("recipe", "sizes", "note"),
    [
        ("fp8_blockwise", (4096, 14336), ""),
        ("fp8_blockwise", (2048, 576), "costs a little speed: 576 features end"),
        ("mxfp8", (2048, 576), ""),
        ("mxfp8", (2048, 2064), "costs a little speed: 2064 features end in a partly filled block of 32"),
        ("nvfp4", (2048, 2064), ""),
        ("nvfp4", (1001, 1003), "costs speed: 1001 and 1003 are no multiples of 16"),
        ("bf16", (1001, 1003), ""),
    ],
)
def test_notes_on_speed(recipe, sizes, note):
    found = speed_note(bs.get_recipe(recipe), *sizes)
    assert found.startswith(note)
    assert bool(found) is bool(note)


# ---- active experts --------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)


class Mixture(nn.Module):
    """A typical block: experts in a list, or in one parameter, and a router."""

    def __init__(self, *, router: str = "gate", grouped: bool = False, **said: Any) -> None:
        super().__init__()
        listed = nn.ModuleList(MLP() for _ in range(8))
        self.experts = GroupedExperts(experts=8, dim=64, hidden=128, recipe="bf16") if grouped else listed
        self.add_module(router, nn.Linear(64, 8, bias=False))
        for name, value in said.items():
            setattr(self, name, value)


@dataclasses.dataclass
class Config:
    num_experts_per_tok: int = 3


class SamplingConfig:
    """A configuration of Transformers, whose top_k is for sampling."""

    model_type, top_k, num_experts_per_tok = "mixtral", 5, 3


class TopKRouter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 8, bias=False)
        self.k = 3


def in_the_router(**named: Any) -> Mixture:
    block = Mixture(**named)
    block.gate = TopKRouter()
    return block


SAID = {
    "top_k": lambda **named: Mixture(top_k=3, **named),
    "num_experts_per_tok": lambda **named: Mixture(num_experts_per_tok=3, **named),
    "num_selected": lambda **named: Mixture(num_selected=3, **named),
    "k": lambda **named: Mixture(k=3, **named),
    "config": lambda **named: Mixture(config=Config(), **named),
    "config as a dict": lambda **named: Mixture(config={"top_k": 3}, **named),
    "config with a top_k of sampling": lambda **named: Mixture(config=SamplingConfig(), **named),
    "router": in_the_router,
    "router of another name": lambda **named: Mixture(router="switch", top_k=3, **named),
    "an int of numpy": lambda **named: Mixture(top_k=numpy.int64(3), **named),
    "config of Megatron": lambda **named: Mixture(config={"moe_router_topk": 3}, **named),
    "class": lambda **named: type("OfThree", (Mixture,), {"top_k": 3})(**named),
}


@pytest.mark.parametrize("grouped", [False, True], ids=["list", "one parameter"])
@pytest.mark.parametrize("said", SAID)
def test_flops_are_those_of_the_active_experts(said: str, grouped: bool):
    """8 experts of which 3 are active count as 3, in a list and in one parameter."""
    model = nn.Sequential(SAID[said](grouped=grouped), nn.Linear(64, 64, bias=False))
    report = bs.quantize_(model, "mxfp8")
    assert report.warnings == ()
    per_token = sum(
        each.in_features * each.out_features * each.active / each.among for each in report.converted if each.name != "1"
    )
    up = 256 if grouped else 128  # with gates
    assert per_token == pytest.approx(3 * (64 * up + 128 * 64))
    assert "8 experts, 3 for each token" in str(report)
    assert ("one of 8 experts" in str(report)) == (not grouped)
    kept = sum(each.in_features * each.out_features for each in report.skipped)
    assert report.flop_share == pytest.approx((per_token + 64 * 64) / (per_token + 64 * 64 + kept))


def test_a_list_of_experts_costs_what_the_same_experts_cost_in_one_parameter():
    reports = []
    for grouped in (False, True):
        with torch.device("meta"):
            block = nn.Module()
            size = {"experts": 8, "dim": 2048, "hidden": 1024}
            experts = (
                GroupedExperts(**size, recipe="bf16")
                if grouped
                else nn.ModuleList(
                    nn.ModuleDict({"gate_up": nn.Linear(2048, 2048), "down": nn.Linear(1024, 2048)}) for _ in range(8)
                )
            )
            block.experts, block.top_k = experts, 2
        reports.append(bs.quantize_(block, "fp8_blockwise"))
    listed, one = (report.predicted_speedup(16384) for report in reports)
    assert listed == pytest.approx(one)
    saved = [sum(report.seconds_saved(16384).values()) for report in reports]
    assert saved[0] == pytest.approx(saved[1])


@pytest.mark.parametrize("grouped", [False, True], ids=["list", "one parameter"])
def test_an_unknown_number_of_active_experts_is_a_warning(grouped: bool):
    """Also if the attribute has an impossible value: more than there are experts, or none."""
    for said in ({}, {"top_k": 9}, {"top_k": 0}, {"top_k": True}):
        model = nn.ModuleList(nn.Sequential(Mixture(grouped=grouped, **said)) for _ in range(3))
        report = bs.quantize_(model, "mxfp8")
        (warning,) = report.warnings
        assert warning.startswith("unknown how many of the 8 experts of 0-2.0.experts")
        assert "FLOPs and the roofline count 1" in warning
        assert "block.top_k = 2" in warning
        assert f"warning: {warning}" in str(report)
        assert "8 experts, an unknown number (counted as 1) for each token" in str(report)
        assert {each.active for each in report.converted} == {1}


@pytest.mark.parametrize("listed", [nn.ModuleList, lambda all: nn.ModuleDict({f"e{i}": e for i, e in enumerate(all)})])
def test_a_router_found_by_its_width_makes_the_list_beside_it_experts(listed: Any):
    """For conversion and FLOPs alike: neither the router nor the list has a usual name."""
    for said, active in (({"top_k": 2}, 2), ({}, 1)):
        block = nn.Module()
        block.switch, block.ffns = nn.Linear(64, 8), listed(MLP() for _ in range(8))
        for name, value in said.items():
            setattr(block, name, value)
        report = bs.quantize_(block, "mxfp8")
        assert [each.name for each in report.skipped] == ["switch"]
        assert "router: as wide as the 8 experts beside it" in str(report)
        assert {(each.active, each.among) for each in report.converted} == {(active, 8)}
        assert bool(report.warnings) is not bool(said)


def test_other_lists_are_not_counted_as_experts():
    """Blocks next to a classifier as wide as their number; shared experts; a k that is a projection."""
    model = nn.Module()
    model.layers = nn.ModuleList(MLP() for _ in range(8))
    model.score = nn.Linear(64, 8)
    model.shared_experts = nn.ModuleList(MLP() for _ in range(2))
    model.k = nn.Linear(64, 64)
    report = bs.quantize_(model, "mxfp8")
    assert report.warnings == ()
    assert {(each.active, each.among) for each in (*report.converted, *report.skipped)} == {(1, 1)}
