"""Layers that are not converted, and the reasons: heads, routers, narrow layers, end blocks, other classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale.nn.policy import find_blocks
from support.toy_models import DIM, Block, everything, made, names


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
@pytest.mark.parametrize(
    ("router", "why"), [("gate", "router"), ("chooser", "router: as wide as the 24 experts beside it")]
)
def test_heads_routers_and_nothing_else_stay(recipe, router, why):
    model = made(router=router)
    report = bs.quantize_(model, recipe)
    reasons = {each.name: each.reason for each in report.skipped}
    assert reasons == {f"layers.{i}.mlp.{router}": why for i in range(2)} | {"lm_head": "output head"}
    assert "layers.0.attention.output" in names(report.converted)
    assert "layers.1.mlp.experts.23.gate_proj" in names(report.converted)
    assert {each.kind: each.modules for each in report.others} == {"Embedding": 1, "RMSNorm": 5}


@pytest.mark.parametrize(
    "head", ["lm_head", "output", "head", "classifier", "score", "qa_outputs", "proj_out", "words"]
)
def test_output_heads_are_found_by_name_or_by_the_vocabulary(head):
    (skipped,) = bs.quantize_(made(head=head), "mxfp8").skipped
    assert skipped.name == head
    assert skipped.reason.startswith("output head")
    assert ("vocabulary" in skipped.reason) is (head == "words")


def test_a_layer_as_wide_as_the_vocabulary_that_is_not_last_is_converted():
    model = nn.Sequential(nn.Embedding(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM))
    assert not bs.quantize_(model, "mxfp8").skipped


@pytest.mark.parametrize(
    "name", ["gate_proj", "gate_up", "w_gate", "router_norm_proj", "headroom", "outputs", "my_lm_head_norm"]
)
def test_names_count_by_whole_components(name):
    model = nn.Module()
    model.add_module(name, nn.Linear(DIM, DIM))
    assert names(bs.quantize_(model, "mxfp8").converted) == {name}


def test_narrow_layers_stay():
    model = nn.ModuleDict({"a": nn.Linear(DIM, 15), "b": nn.Linear(15, DIM), "c": nn.Linear(DIM, 16)})
    report = bs.quantize_(model, "fp8_blockwise")
    assert names(report.converted) == {"c"}
    assert all(each.reason == "narrow: fewer than 16 features on a side" for each in report.skipped)


def converted_blocks(model: nn.Module, *args, **named) -> list[int]:
    report = bs.quantize_(model, *args, **named)
    return sorted({int(each.name.split(".")[1]) for each in report.converted if each.name.startswith("layers")})


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("blocks", "last"), [(10, 2), (7, 2), (20, 3), (6, 1)])
def test_four_bit_recipes_keep_the_end_blocks(recipe, blocks, last):
    model = made(blocks=blocks, router="gate")  # experts are a longer list, but within a block
    assert converted_blocks(model, recipe) == list(range(2, blocks - last))


def test_end_blocks_can_be_chosen():
    assert converted_blocks(made(blocks=6), "nvfp4", keep_first=0, keep_last=0) == [0, 1, 2, 3, 4, 5]
    assert converted_blocks(made(blocks=6), "mxfp8", keep_first=1, keep_last=0.5) == [1, 2]
    assert converted_blocks(made(blocks=6), "mxfp8", everything, keep_last=2) == [0, 1, 2, 3]
    assert converted_blocks(made(blocks=6), "nvfp4", everything) == [0, 1, 2, 3, 4, 5]
    report = bs.quantize_(made(blocks=2), "nvfp4")
    assert not report.converted
    assert "no layer was converted: pass keep_first=0 and keep_last=0" in str(report)
    assert "see the reasons above" in str(bs.quantize_(made(blocks=2), "mxfp8", lambda module, name: False))
    assert "no linear layers" in str(bs.quantize_(nn.Embedding(4, 4), "mxfp8"))


def test_blocks_of_a_dict_and_none_at_all():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): Block(None) for i in range(5)})
    assert converted_blocks(model, "nvfp4") == [2, 3]
    report = bs.quantize_(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)), "nvfp4")
    assert len(report.converted) == 2
    assert "no blocks were found" in report.warnings[0]
    assert find_blocks(list(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).named_modules())) is None


def test_lists_within_blocks_of_different_kinds_are_no_blocks():
    """Experts of a block; with blocks of several classes no end blocks are found."""
    model = nn.Module()
    model.layers = nn.ModuleList([Block(None), *(Block("gate") for _ in range(3)), nn.Sequential(Block(None))])
    assert find_blocks(list(model.named_modules())) is None
    report = bs.quantize_(model, "nvfp4")
    assert "no blocks were found" in report.warnings[0]


def test_a_share_of_blocks_is_not_rounded_up_by_float_error():
    assert len(converted_blocks(made(blocks=50), "mxfp8", keep_last=0.14)) == 43


def test_layers_that_still_have_another_recipe_are_a_warning():
    model = made(blocks=3)
    bs.quantize_(model, "mxfp8")
    report = bs.quantize_(model, "fp8_blockwise", lambda module, name: False)
    assert any("still have another recipe: call unquantize_(model) first" in each for each in report.warnings)
    bs.unquantize_(model)
    assert not any("still have" in each for each in bs.quantize_(model, "mxfp8", lambda *_: False).warnings)


@pytest.mark.parametrize("odd", ["mlp", 3, lambda module: True, lambda: True], ids=["text", "number", "one", "none"])
def test_a_filter_that_cannot_be_called_is_an_error(odd):
    model = made(blocks=2)
    with pytest.raises(bs.errors.OptionError, match=r"filter_fn is .* called with a module and its name"):
        bs.quantize_(model, "mxfp8", odd)
    assert bs.quantize_(model, "mxfp8", takes_more).converted


def takes_more(module: nn.Module, name: str, *more: object) -> bool:
    return isinstance(module, nn.Linear)


def test_filter_fn_decides_alone_and_sees_plain_names():
    asked: list[str] = []

    def only_heads(module: nn.Module, name: str) -> bool:
        assert type(module) is nn.Linear
        asked.append(name)
        return name == "lm_head"

    model = torch.compile(made(router="gate"), backend="eager")
    report = bs.quantize_(model, "nvfp4", only_heads)
    assert names(report.converted) == {"lm_head"}
    assert "layers.0.mlp.gate" in asked
    assert {each.reason for each in report.skipped} == {"filter_fn returned False"}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Int8Linear(nn.Module):
    """Another library's quantised layer: no subclass of torch's."""

    in_features = out_features = DIM


def test_other_classes_than_linear_are_skipped_with_the_reason():
    patched = nn.Linear(DIM, DIM)
    patched.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "own": Doubled(DIM, DIM),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
            "lazy": nn.LazyLinear(DIM),
            "patched": patched,
            "fp64": nn.Linear(DIM, DIM, dtype=torch.float64),
            "quantised": Int8Linear(),
            "attention": nn.MultiheadAttention(DIM, 4),
        }
    )
    classes = {name: type(module) for name, module in model.named_modules()}
    report = bs.quantize_(model, "mxfp8", everything)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    reasons = {each.name: each.reason for each in report.skipped}
    wanted = {
        "own": "Doubled, which may compute something else",
        "normed": "parametrized",
        "lazy": "lazy",
        "patched": "forward was replaced",
        "fp64": "weight is float64",
        "quantised": "Int8Linear, which may",
        "attention.out_proj": "never calls it",
    }
    assert set(reasons) == set(wanted)
    for name, reason in wanted.items():
        assert reason in reasons[name]
    assert not report.converted
    assert report.warnings
    assert str(report)
