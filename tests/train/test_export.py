"""Weights of a run as a checkpoint: the bytes that its layers multiply by, under Hugging Face's names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import checkpoints
from blockscale.errors import BlockscaleError, CheckpointError
from blockscale.formats import BlockScaled
from blockscale.formats.decoding import decode_operand
from blockscale.models.hugging_face import hugging_face_parts
from blockscale.train.export import export_run
from support.small_runs import DENSE, SPARSE, small, trained

pytest.importorskip("safetensors", reason="weights are exported by safetensors")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "bf16"])
def test_layers_have_the_bytes_of_training(recipe: str, tmp_path: Path):
    run = trained(recipe, tmp_path / "run")
    done = export_run(tmp_path / "run", tmp_path / "out")
    found = checkpoints.open(tmp_path / "out")
    assert found.layout == ("unquantized" if recipe == "bf16" else "blockscale")
    names = {f"{layer.name}.weight" for layer in run.report.converted if recipe != "bf16"}
    assert {name for name, kind, _ in done.weights} == set(found)
    for name, parameter, rows in hugging_face_parts(run.model):
        weight, got = run.model.get_parameter(parameter).detach(), found[name]
        if parameter not in names:
            assert isinstance(got, Tensor)
            assert torch.equal(got, weight if rows is None else weight[rows])
            continue
        assert isinstance(got, BlockScaled)
        fprop = run.recipe.fprop
        assert fprop is not None
        want = bs.quantize(weight, fprop.b.spec("fprop_w", None))
        values = decode_operand(want)
        assert torch.equal(decode_operand(got), values if rows is None else values[rows]), name
        if want.global_scale is not None:
            assert got.global_scale is not None
            assert torch.equal(got.global_scale, want.global_scale), "parts of a fused layer share its tensor scale"


def test_layers_that_the_run_kept_stay_unquantized(tmp_path: Path):
    config = small("mxfp8")
    model = replace(DENSE, hidden=64)  # whole blocks
    trained("mxfp8", tmp_path / "run", recipe=replace(config.recipe, keep_first=1), model=model)
    done = export_run(tmp_path / "run", tmp_path / "out", "compressed_tensors")
    kinds = {name: kind for name, kind, _ in done.weights}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "float32"
    assert kinds["model.layers.1.mlp.up_proj.weight"] == "mxfp8_e4m3"
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["model_type"] == "llama"
    assert "model.layers.0.mlp.up_proj" in about["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.up_proj" not in about["quantization_config"]["ignore"]


def test_another_format_and_bf16(tmp_path: Path):
    run = trained("mxfp8", tmp_path / "run")
    folder = tmp_path / "run" / "step-00000002"
    export_run(folder, tmp_path / "four", "modelopt", "nvfp4")
    q = checkpoints.open(tmp_path / "four")["model.layers.0.self_attn.o_proj.weight"]
    want = bs.quantize(run.model.get_parameter("layers.0.attention.out.weight").detach(), "nvfp4")
    assert torch.equal(decode_operand(q), decode_operand(want))  # pyright: ignore[reportArgumentType]
    for target, options in (("a", {"layout": "unquantized"}), ("b", {"format": "bf16"})):
        export_run(folder, tmp_path / target, **options)
        plain = checkpoints.open(tmp_path / target)
        assert all(entry.dtype == "BF16" for entry in plain.entries.values())
        assert plain.config["torch_dtype"] == "bfloat16"


def test_what_cannot_be_exported_says_why(tmp_path: Path):
    trained("mxfp8", tmp_path / "run", model=replace(DENSE, hidden=96))
    with pytest.raises(CheckpointError, match=r"has no checkpoint\. Rule: a run that saved"):
        export_run(tmp_path, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"rows \d+ to \d+ of a layer in fp8_128x128\. Rule: parts of a fused layer"
    ):
        export_run(tmp_path / "run", tmp_path / "out", "deepseek", "fp8_128x128")
    with pytest.raises(BlockscaleError, match="did you mean mxfp4"):
        export_run(tmp_path / "run", tmp_path / "out", format="mxpf4")
    with pytest.raises(BlockscaleError, match="did you mean deepseek"):
        export_run(tmp_path / "run", tmp_path / "out", "depseek")
    assert not (tmp_path / "out").exists()
    trained("mxfp8", tmp_path / "sparse", model=SPARSE)
    with pytest.raises(BlockscaleError, match="export of a model with experts"):
        export_run(tmp_path / "sparse", tmp_path / "out")


def test_a_damaged_checkpoint_is_named(tmp_path: Path):
    trained("mxfp8", tmp_path / "run")
    file = next((tmp_path / "run" / "step-00000002").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        export_run(tmp_path / "run", tmp_path / "out")
