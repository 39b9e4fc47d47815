"""The report adds up, predicts what the roofline says, and reads well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import blockscale as bs
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
    [("README.md", "fp8_blockwise"), ("docs/conversion.md", "fp8_blockwise"), ("docs/conversion.md", "nvfp4")],
)
def test_documented_reports_are_printed_ones(page, recipe):
    text = (Path(__file__).parents[2] / page).read_text()
    # ceilings may have been measured on this machine: the last line is theirs
    assert str(bs.quantize_(llama(), recipe)).rpartition("roofline")[0] in text


def test_few_layers_that_are_kept_have_a_line_each_with_their_sizes():
    report = bs.quantize_(model(3), "mxfp8", lambda module, name: not name.endswith(("wq", "wk", "wv")))
    assert "  layers.0-2.wq    x3   256 ->  256  filter_fn said no" in str(report)


def test_converted_layers_with_a_note_keep_their_sizes():
    changed = model(3)
    bs.quantize_(changed, "mxfp8")
    assert str(bs.quantize_(changed, "fp8_blockwise")).count("followed mxfp8 before") == 5


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
