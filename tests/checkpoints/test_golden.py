"""Checkpoints that other packages packed: their bytes are read, and decode to what the same packages decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blockscale.checkpoints import open as open_checkpoint
from blockscale.formats import BlockScaled
from support.checkpoints import decoded

safetensors = pytest.importorskip("safetensors.torch", reason="checkpoints are read by safetensors")

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
CASES = sorted(path.name for path in GOLDEN.iterdir())
LAYOUT = {"minimax_mxfp8": "deepseek", "gpt_oss": "gpt_oss", "gguf_mxfp4": "gguf"}


def layout_of(case: str) -> str:
    named = ("compressed_tensors", "deepseek", "modelopt")
    return LAYOUT.get(case) or next(layout for layout in named if case.startswith(layout))


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_package_that_packed_them(case: str):
    folder = GOLDEN / case
    about = json.loads((folder / "made_by.json").read_text())["expected"]
    expected = safetensors.load_file(folder / "expected.safetensors")
    file = next(folder.glob("*.gguf"), folder)
    found = open_checkpoint(file)
    assert found.layout == layout_of(case)
    quantized = {name for name, entry in found.entries.items() if entry.format is not None}
    assert quantized == expected.keys(), "every quantized weight, and no other"
    for name, want in expected.items():
        values = decoded(found, name)
        if not about["exact"]:
            values = values.to(want.dtype)
        assert torch.equal(values, want.to(values.dtype)), name  # code 8 may decode to either zero
    assert not any(isinstance(found[name], BlockScaled) for name in found.keys() - quantized)


def test_the_tensor_scales_of_gate_and_up_are_kept_apart():
    found = open_checkpoint(GOLDEN / "compressed_tensors_nvfp4")
    gate, up = (found[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert isinstance(gate, BlockScaled)
    assert isinstance(up, BlockScaled)
    assert gate.global_scale is not None
    assert up.global_scale is not None
    assert not torch.equal(gate.global_scale, up.global_scale)
