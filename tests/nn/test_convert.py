"""Conversion changes what layers compute and nothing else, and can be undone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.errors import OptionError, UnknownNameError
from blockscale.nn import Linear
from support.toy_models import DIM, TOKENS, everything, gradients, loss_of, made, names


def test_a_converted_layer_is_the_same_object_and_computes_by_the_recipe():
    model = made()
    before = dict(model.named_modules())
    plain = model(TOKENS)
    report = bs.quantize_(model, "mxfp8")
    assert dict(model.named_modules()) == before
    layer = model.layers[0].mlp.down_proj
    assert type(layer) is Linear
    assert layer.name == "layers.0.mlp.down_proj"
    assert not torch.equal(model(TOKENS), plain)
    x = torch.randn(3, 2 * DIM)
    assert torch.equal(layer(x), bs.autograd.linear(x, layer.weight, recipe="mxfp8"))
    assert len(report.converted) == 10
    assert report.recipe is bs.get_recipe("mxfp8")


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "nvfp4"])
def test_state_dicts_are_those_of_the_plain_model_in_both_directions(recipe):
    model = made()
    before = model.state_dict()
    bs.quantize_(model, recipe, everything)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[key] is before[key] or after[key].data_ptr() == before[key].data_ptr() for key in before)
    other = made(seed=1)
    other.load_state_dict(after, strict=True)
    fresh = made(seed=2)
    bs.quantize_(fresh, recipe, everything)
    fresh.load_state_dict(before, strict=True)
    assert all(
        torch.equal(value, before[key]) for key, value in (*other.state_dict().items(), *fresh.state_dict().items())
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_unquantize_restores_exactly(recipe):
    model = made()
    mine = Linear(DIM, DIM, recipe="mxfp8")
    model.add_module("mine", mine)
    model.layers[0].mlp.up_proj.name = "a user's own"

    def contents() -> list:
        return [
            (name, type(module), list(vars(module)), list(module._buffers), set(module._non_persistent_buffers_set))
            for name, module in model.named_modules()
            if module is not mine
        ]

    before, plain = contents(), model(TOKENS)
    report = bs.quantize_(model, recipe, everything)
    assert contents() != before
    assert bs.unquantize_(model) == len(report.converted) - 1
    assert contents() == before
    assert model.layers[0].mlp.up_proj.name == "a user's own"
    assert torch.equal(model(TOKENS), plain)
    assert type(mine) is Linear, "it was made as one"
    assert bs.unquantize_(model) == 0


def test_unquantize_refuses_a_layer_whose_class_was_changed_since():
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    bs.quantize_(model, "mxfp8")
    nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(OptionError, match="Fix: call it before fully_shard"):
        bs.unquantize_(model)
    assert type(model[0]) is Linear, "nothing changes when something fails"


def test_double_conversion_takes_the_new_recipe_and_reports_it():
    model = made()
    bs.quantize_(model, "nvfp4", everything)
    report = bs.quantize_(model, "mxfp8")
    assert all("had recipe nvfp4 before" in each.note for each in report.converted)
    assert model.layers[0].mlp.down_proj.recipe.name == "mxfp8"
    assert model.layers[0].mlp.down_proj.rng is None
    (head,) = report.skipped
    assert head.reason == "output head; still has recipe nvfp4"
    assert bs.unquantize_(model) == 11
    assert type(model.lm_head) is nn.Linear


def test_tied_weights_stay_tied_and_count_once():
    model = made(tied=True, head="to_words")
    report = bs.quantize_(model, "mxfp8")
    assert {each.name: each.reason for each in report.skipped} == {
        "to_words": "output head: its weight is an embedding's"
    }
    assert report.parameters == sum(each.numel() for each in model.parameters())
    bs.quantize_(model, "mxfp8", everything)
    assert model.to_words.weight is model.embed.weight
    assert "embed.weight" in gradients(model)


def test_hooks_and_optimizers_survive():
    model = made()
    seen: list[str] = []
    layer = model.layers[1].attention.qkv
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    bs.quantize_(model, "mxfp8")
    loss_of(model).backward()
    optimizer.step()
    assert seen == ["forward", "backward"]
    assert not torch.equal(layer.weight, before)


def test_a_bare_layer_is_converted_also_with_stochastic_rounding():
    layer = nn.Linear(DIM, DIM)
    report = bs.quantize_(layer, "nvfp4")
    assert type(layer) is Linear
    assert names(report.converted) == {"root"}
    layer(torch.randn(4, DIM)).sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("recipe", ["nvfp4", "step"])
def test_copies_compute_the_same_and_can_be_restored(copied, recipe):
    model = made()
    bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step") if recipe == "step" else recipe, everything)
    bs.refresh_weights_(model)
    twin = copied(model)
    for (name, mine), other in zip(gradients(model).items(), gradients(twin).values(), strict=True):
        assert torch.equal(mine, other), name
    bs.advance_(twin)
    if recipe == "nvfp4":
        assert model.lm_head.rng[1] == 0
        assert twin.lm_head.rng[1] == twin.layers[0].mlp.up_proj.rng[1] == 1
    assert bs.unquantize_(twin) == 11
    assert type(twin.lm_head) is nn.Linear
    assert type(model.lm_head) is Linear


def test_weights_are_saved_and_loaded_safely():
    model, file = made(), io.BytesIO()
    bs.quantize_(model, "nvfp4", everything)
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = made(seed=1)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: bs.quantize_(made(), "mxpf8"), UnknownNameError, "unknown recipe 'mxpf8'"),
        (lambda: bs.quantize_(made(), None), UnknownNameError, "unknown recipe None"),
        (lambda: bs.quantize_({"a": made()}, "mxfp8"), OptionError, "a model that is a dict"),
        (lambda: bs.quantize_(made(), "mxfp8", lambda module, name: None), OptionError, "returned None for 'layers.0"),
        (lambda: bs.quantize_(made(), "mxfp8", keep_first=-1), OptionError, "keep_first=-1"),
        (lambda: bs.quantize_(made(), "mxfp8", keep_last=1.5), OptionError, r"keep_last=1\.5"),
        (lambda: bs.unquantize_(None), OptionError, "a model that is a NoneType"),
        (lambda: bs.advance_(None), OptionError, "a model that is a NoneType"),
        (lambda: bs.set_step_(None, 1), OptionError, "a model that is a NoneType"),
        (lambda: bs.set_step_(made(), -1), OptionError, "step=-1"),
    ],
)
def test_errors_have_value_rule_and_fix(call, error, text):
    with pytest.raises(error, match=rf"{text}.*Rule: .*Fix: "):
        call()


def test_a_filter_fn_that_fails_leaves_the_model_as_it_was():
    model = made()
    with pytest.raises(OptionError):
        bs.quantize_(model, "mxfp8", lambda module, name: True if name.startswith("layers.0") else "no")
    assert not any(isinstance(module, Linear) for module in model.modules())
