"""Layouts there and back: every weight has its bytes, in one file or many, and configs say what other readers need."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale import checkpoints
from blockscale.errors import CheckpointError, UnknownNameError
from blockscale.formats import BlockScaled
from support.checkpoints import check_equal, random, weights_of, write_raw

pytest.importorskip("safetensors", reason="checkpoints are written by safetensors")

WRITTEN = [name for name in checkpoints.LAYOUTS if name != "unquantized"]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 4000])
@pytest.mark.parametrize("layout", checkpoints.LAYOUTS)
def test_weights_come_back(layout: str, shard_bytes: int, tmp_path: Path):
    weights = weights_of(layout)
    files = checkpoints.write(tmp_path, weights.items(), layout, config={"hidden_size": 7}, shard_bytes=shard_bytes)
    assert (len(files) > 1) == (shard_bytes == 4000 and layout != "unquantized")
    found = checkpoints.open(tmp_path)
    assert found.layout == layout
    assert found.config["hidden_size"] == 7
    assert set(found) == set(weights)
    for name, want in weights.items():
        check_equal(found[name], want)
        entry = found.entries[name]
        assert entry.shape == tuple(want.shape)
        assert entry.format == (want.format if isinstance(want, BlockScaled) else None)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("layout", WRITTEN)
def test_the_layout_is_found_without_a_config(layout: str, tmp_path: Path):
    checkpoints.write(tmp_path, weights_of(layout).items(), layout)
    (tmp_path / "config.json").write_text("{}")
    if layout == "blockscale":  # formats are in its config alone
        with pytest.raises(CheckpointError, match="without scales"):
            checkpoints.open(tmp_path)
        return
    assert checkpoints.open(tmp_path).layout == layout


def test_modelopt_is_found_by_its_own_file(tmp_path: Path):
    checkpoints.write(tmp_path, weights_of("modelopt").items(), "modelopt")
    (tmp_path / "config.json").write_text("{}")
    assert json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"] == ["lm_head"]
    assert checkpoints.open(tmp_path).config["quantization_config"]["quant_method"] == "modelopt"


def test_configs_name_what_is_not_quantized(tmp_path: Path):
    q = bs.quantize(random(64, 64), "mxfp4")
    weights = {"a.b.up_proj.weight": q, "lm_head.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)}
    for layout, key in (("compressed_tensors", "ignore"), ("deepseek", "modules_to_not_convert")):
        checkpoints.write(tmp_path / layout, weights.items(), layout)
        about = json.loads((tmp_path / layout / "config.json").read_text())["quantization_config"]
        assert about[key] == ["lm_head"]
    assert about["expert_dtype"] == "fp4"


def test_powers_of_two_are_said(tmp_path: Path):
    for rule in ("pow2", "fp32"):
        q = bs.quantize(random(256, 256), bs.CastSpec("fp8_128x128", scale_rule=rule))
        checkpoints.write(tmp_path / rule, {"x.weight": q}.items(), "deepseek")
        about = json.loads((tmp_path / rule / "config.json").read_text())["quantization_config"]
        assert about.get("scale_fmt") == ("ue8m0" if rule == "pow2" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_fp8_blocks_have_any_dtype(dtype: torch.dtype, tmp_path: Path):
    q = bs.quantize(random(192, 320), bs.CastSpec("fp8_128x128", scale_rule="pow2"))
    tensors = {"up.weight": q.data, "up.weight_scale_inv": q.plain_scale().to(dtype)}
    found = checkpoints.open(write_raw(tmp_path, tensors, {"quantization_config": {"quant_method": "fp8"}}))
    check_equal(found["up.weight"], q)


def test_openai_names_of_gpt_oss(tmp_path: Path):
    q = bs.quantize(random(2, 64, 96), "mxfp4")
    blocks = q.data.view(torch.uint8).unflatten(-1, (-1, 16))
    tensors = {"block.0.mlp.mlp1_weight.blocks": blocks, "block.0.mlp.mlp1_weight.scales": q.scale.view(torch.uint8)}
    tensors["block.0.norm.scale"] = torch.ones(8)
    found = checkpoints.open(write_raw(tmp_path, tensors))
    check_equal(found["block.0.mlp.mlp1_weight"], q)
    assert found.entries["block.0.norm.scale"].format is None


def test_fp8_blocks_of_modelopt_have_scales_of_four_axes(tmp_path: Path):
    q = bs.quantize(random(160, 320), "fp8_128x128")
    tensors = {"up.weight": q.data, "up.weight_scale": q.plain_scale()[:, None, :, None]}
    about = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}}
    check_equal(checkpoints.open(write_raw(tmp_path, tensors, about))["up.weight"], q)


def test_a_divisor_that_does_not_exist_is_refused(tmp_path: Path):
    """About one fp32 number in eight is no reciprocal of another."""
    from dataclasses import replace

    q = bs.quantize(random(64, 64), "nvfp4")
    refused, said = 0, set[str]()
    for at in range(200):
        factor = torch.tensor(1.5 + at * 2.0**-23)
        try:
            checkpoints.write(
                tmp_path / str(at), {"x.weight": replace(q, global_scale=factor)}.items(), "compressed_tensors"
            )
        except CheckpointError as error:
            said.add(re.sub(r"1\.5\d*", "1.5", str(error).partition(".weight")[0]))
            assert not (tmp_path / str(at)).exists(), "nothing is left of it"
            refused += 1
            continue
        found = checkpoints.open(tmp_path / str(at))["x.weight"]
        assert isinstance(found, BlockScaled)
        assert found.global_scale is not None
        assert torch.equal(found.global_scale, factor)
    assert 20 < refused < 100
    assert said == {"the tensor scale 1.5 of x"}


@pytest.mark.parametrize(
    ("layout", "name", "format", "shape", "said"),
    [
        (
            "deepseek",
            "x.weight",
            "nvfp4",
            (64, 64),
            r"x\.weight is nvfp4 \(64, 64\)\. Rule: deepseek holds fp8_128x128",
        ),
        ("gpt_oss", "x.weight", "mxfp4", (64, 64), "of experts"),
        ("modelopt", "x.weight", "mxfp4", (64, 80), "with K a multiple of 32"),
        ("compressed_tensors", "x.weight", "mxfp4", (2, 64, 64), r"one \[N, K\] for each module"),
        ("unquantized", "x.weight", "mxfp4", (64, 64), "unquantized holds plain tensors"),
    ],
)
def test_what_a_layout_does_not_hold_is_refused(
    layout: str, name: str, format: str, shape: tuple[int, ...], said: str, tmp_path: Path
):
    with pytest.raises(CheckpointError, match=said):
        checkpoints.write(tmp_path / "new", {name: bs.quantize(random(*shape), format)}.items(), layout)
    assert not (tmp_path / "new").exists()


def test_bad_arguments_are_refused(tmp_path: Path):
    with pytest.raises(UnknownNameError, match="did you mean deepseek"):
        checkpoints.write(tmp_path, {}.items(), "deepsek")
    with pytest.raises(CheckpointError, match=r"x is torch\.float8_e4m3fn"):
        checkpoints.write(tmp_path / "a", {"x": torch.ones(4).to(torch.float8_e4m3fn)}.items(), "unquantized")
    checkpoints.write(tmp_path / "b", {"x": torch.ones(4)}.items(), "unquantized")
    with pytest.raises(
        CheckpointError, match=r"b is not empty\. Rule: a checkpoint is written to a new or empty folder"
    ):
        checkpoints.write(tmp_path / "b", {"x": torch.ones(4)}.items(), "unquantized")
    assert torch.equal(checkpoints.open(tmp_path / "b")["x"], torch.ones(4)), "it is as it was"
    with pytest.raises(CheckpointError, match="'x' is written twice"):
        checkpoints.write(tmp_path / "c", [("x", torch.ones(4)), ("x", torch.ones(4))], "unquantized")
    with pytest.raises(UnknownNameError, match="unknown weight 'y'"):
        _ = checkpoints.open(tmp_path / "b")["y"]
    assert checkpoints.open(tmp_path / "b").get("y") is None
    (tmp_path / "d").write_text("")
    with pytest.raises(CheckpointError, match="d is a file"):
        checkpoints.write(tmp_path / "d", {"x": torch.ones(4)}.items(), "unquantized")


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("blockscale", {"logit": torch.ones(4, 4), "logit_scale": torch.ones(1)}),
        ("deepseek", {"norm.weight": torch.ones(4), "norm.scale": torch.ones(4)}),
        ("modelopt", {"mask.weight": torch.ones(4, 4, dtype=torch.uint8)}),
    ],
)
def test_names_that_would_be_read_as_something_else_are_refused(
    layout: str, weights: dict[str, torch.Tensor], tmp_path: Path
):
    weight = {"x.weight": bs.quantize(random(128, 128), "mxfp8_e4m3")}
    with pytest.raises(CheckpointError):
        checkpoints.write(tmp_path / "new", (weight | weights).items(), layout)
    assert not (tmp_path / "new").exists()


def test_formats_of_eight_bits_are_not_taken_for_each_other(tmp_path: Path):
    checkpoints.write(tmp_path, {"x": bs.quantize(random(64, 64), "mxfp8_e5m2")}.items(), "blockscale")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("mxfp8_e5m2", "mxfp8_e4m3"))
    with pytest.raises(CheckpointError, match="'x' is F8_E5M2"):
        checkpoints.open(tmp_path)


def test_a_tied_head_is_named_as_unquantized(tmp_path: Path):
    q = bs.quantize(random(64, 64), "mxfp4")
    checkpoints.write(tmp_path, {"x.weight": q}.items(), "compressed_tensors", config={"tie_word_embeddings": True})
    assert checkpoints.open(tmp_path).config["quantization_config"]["ignore"] == ["lm_head"]


def test_plain_tensors_of_any_dtype(tmp_path: Path):
    weights = {
        str(dtype): torch.ones(3, 5).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool)
    }
    checkpoints.write(tmp_path, weights.items(), "unquantized")
    for name, want in weights.items():
        check_equal(checkpoints.open(tmp_path)[name], want)


def test_two_sets_of_shards_are_both_read(tmp_path: Path):
    write_raw(tmp_path / "a", {"x": torch.ones(4)})
    write_raw(tmp_path / "b", {"y": torch.ones(4)})
    for name in ("a", "b"):
        (tmp_path / name / "model.safetensors").rename(tmp_path / f"{name}-00001-of-00001.safetensors")
    assert set(checkpoints.open(tmp_path)) == {"x", "y"}


def test_a_rename_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real, calls = os.replace, list[object]()

    def failing(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(*paths)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="Input/output"):
        checkpoints.write(tmp_path / "new", weights_of("deepseek").items(), "deepseek", shard_bytes=4000)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import safetensors.torch

    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write(tmp_path / "new", {"x": torch.ones(4)}.items(), "unquantized")
    assert not (tmp_path / "new").exists()
