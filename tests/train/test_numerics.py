"""Quantization noise during training: samples are written, losses do not change, and advice is applied."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from blockscale.cli.main import main
from blockscale.diagnostics import advise
from blockscale.diagnostics.store import read
from blockscale.errors import OptionError
from blockscale.train import train
from blockscale.train.numerics import NumericsLog
from support.small_runs import DENSE, SPARSE, small

ONE_BLOCK = replace(DENSE, layers=1)


@pytest.mark.parametrize(("recipe", "model"), [("nvfp4", ONE_BLOCK), ("fp8_blockwise", SPARSE)])
def test_sampling_does_not_change_the_losses(tmp_path, recipe, model):
    config = small(recipe, steps=3, model=model)
    plain = train(config)
    watched = train(config, hooks=[NumericsLog(tmp_path, 2)])
    assert watched.history == plain.history
    assert watched.evaluations == plain.evaluations
    stored = read(tmp_path)
    assert list(stored.samples) == [0, 2, 3]  # before steps 0 and 2, and of the trained model
    first = stored.samples[0]
    assert [each.layer for each in first.layers] == [each.name for each in stored.report.converted]
    assert all(each.fprop is not None and each.wgrad is not None for each in first.layers)
    if model is SPARSE:
        routed = next(each for each in first.layers if each.layer.endswith("experts.gate_up"))
        assert sum(each.rows for each in routed.experts) == 2 * 16 * 2  # sequences, symbols, experts of each


def test_recomputed_blocks_are_measured_alike(tmp_path):
    found = {}
    for how in ("none", "full"):
        train(small("mxfp8", steps=1, recompute=how, model=ONE_BLOCK), hooks=[NumericsLog(tmp_path / how, 1)])
        found[how] = read(tmp_path / how).samples[0]
    assert found["none"] == found["full"]


def test_a_config_is_enough(tmp_path):
    train(small("mxfp8", steps=1, model=ONE_BLOCK, folder=tmp_path, numerics_every=1))
    assert list(read(tmp_path).samples) == [0, 1]


def test_a_run_without_a_folder_has_no_place_for_numerics():
    with pytest.raises(OptionError, match="numerics_every=5 without a folder"):
        train(small(numerics_every=5))


def test_advice_of_a_run_is_followed_by_the_next(tmp_path):
    config = small("mxfp8", steps=1)
    train(config, hooks=[NumericsLog(tmp_path, 1)])
    stored = read(tmp_path)
    advice = advise(stored.report, list(stored.samples.values()), budget=1e-9)
    assert advice.low == ()
    path = tmp_path / "advice.json"
    # keep the worst one alone
    row = advice.to_dict() | {"low": [each.layer for each in advice.ranked[1:]]}
    path.write_text(json.dumps(row))
    result = train(replace(config, recipe=replace(config.recipe, keep_file=path)))
    assert result.conversion.splitlines()[0] == "mxfp8: 7 of 9 linear layers converted"
    assert advice.ranked[0].layer in result.conversion.partition("kept in high precision")[2]


def test_the_commands(tmp_path, capsys):
    folder, out = tmp_path / "run", tmp_path / "advice.json"
    model = ["--device", "cpu", "--batch", "2", "--sequence", "16"]
    model += ["--layers", "1", "--model.dim", "32", "--model.hidden", "32", "--model.heads", "2"]
    options = [*model, "--steps", "1", "--eval-batches", "1"]
    assert main(["train", "tiny", "--recipe", "mxfp8", *options, "--folder", str(folder), "--numerics-every", "1"]) == 0
    assert len(read(folder).samples) == 2
    capsys.readouterr()
    assert main(["advise", str(folder), "--out", str(out), "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "layers.0.attention.qkv" in text
    assert "and 2 more layers" in text
    assert "predicted gap of the loss" in text
    assert main(["advise", str(folder), "--json", "--budget", "0.000001"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["keep"]) == 4
    assert found["low"] == []
    assert main(["train", "tiny", "--recipe", "mxfp8", *options, "--keep-file", str(out)]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([".", "--budget", "0"], "--budget 0. Rule: it is in percent"),
        ([".", "--top", "-1"], "--top -1"),
        ([".", "--tokens", "0"], "--tokens 0"),
        (["out/nowhere"], "no folder out/nowhere"),
    ],
)
def test_invalid_advise_calls_are_refused(words, said, capsys):
    assert main(["advise", *words]) == 2
    assert said in capsys.readouterr().err
