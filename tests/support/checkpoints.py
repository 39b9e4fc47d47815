"""Small checkpoints for tests: weights of every layout, and safetensors files with any header."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from blockscale.checkpoints import Checkpoint
from blockscale.formats import FORMATS, BlockScaled
from blockscale.formats.decoding import decode_codes, decode_operand, decode_scale, spread

Weights = dict[str, Tensor | BlockScaled]
# (format, N, K) of weights that a layout holds: edge tiles, and the smallest
HELD: dict[str, list[tuple[str, int, int]]] = {
    "deepseek": [("fp8_128x128", 576, 320), ("fp8_128x128", 64, 32), ("mxfp4", 96, 96)],
    "compressed_tensors": [
        ("fp8_128x128", 192, 320), ("mxfp8_e4m3", 96, 64), ("mxfp4", 96, 96), ("nvfp4", 96, 48), ("nvfp4", 64, 48),
    ],
    "modelopt": [("nvfp4", 96, 48), ("mxfp8_e4m3", 96, 64)],
    "blockscale": [
        *((format, 100, 96) for format in FORMATS), ("mxfp4", 7, 33), ("mxfp6_e2m3", 7, 35), ("nvfp4", 5, 7),
    ],
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    """Weights as models have them, with zeros, a tiny row and one that is large."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    values[..., 0, :] *= 2.0**-20
    values[..., -1, -1] = 3.0
    values[..., 1, ::2] = 0
    return values


def reciprocal(q: BlockScaled) -> BlockScaled:
    """The same operand with a tensor scale that is a power of two, which every layout stores."""
    return q if q.global_scale is None else replace(q, global_scale=torch.full_like(q.global_scale, 2.0**-9))


def weights_of(layout: str) -> Weights:
    """Weights in all formats of a layout, and plain ones."""
    found: Weights = {"model.norm.weight": torch.ones(8).bfloat16(), "lm_head.weight": random(8, 16).bfloat16()}
    if layout == "gpt_oss":
        prefix = "model.layers.0.mlp.experts"
        found[f"{prefix}.gate_up_proj"] = bs.quantize(random(3, 2 * 96, 64), "mxfp4")
        found[f"{prefix}.down_proj"] = bs.quantize(random(3, 64, 96), "mxfp4")
        found[f"{prefix}.gate_up_proj_bias"] = random(3, 2 * 96).bfloat16()
        return found
    for at, (format, rows, length) in enumerate(HELD.get(layout, ())):
        q = bs.quantize(random(rows, length, seed=at), format)
        found[f"model.layers.{at}.mlp.up_proj.weight"] = reciprocal(q) if layout == "compressed_tensors" else q
    return found


def check_equal(found: Tensor | BlockScaled, want: Tensor | BlockScaled) -> None:
    """Assert that two weights have the same fields and bytes, and memory that kernels take."""
    if isinstance(want, Tensor):
        assert isinstance(found, Tensor)
        assert found.dtype == want.dtype
        assert torch.equal(found, want)
        return
    assert isinstance(found, BlockScaled)
    for name in ("format", "shape", "axis", "scale_layout", "hadamard", "group_align"):
        assert getattr(found, name) == getattr(want, name)
    assert found.data.stride() == want.data.stride()
    assert found.scale.stride() == want.scale.stride()
    assert torch.equal(found.data.view(torch.uint8), want.data.view(torch.uint8))
    scales = (found.plain_scale(), want.plain_scale())
    assert torch.equal(*(each.view(torch.uint8) if each.element_size() == 1 else each for each in scales))
    assert (found.global_scale is None) == (want.global_scale is None)
    if found.global_scale is not None and want.global_scale is not None:
        assert torch.equal(found.global_scale, want.global_scale)


def decoded(found: Checkpoint, name: str) -> Tensor:
    """fp32 values of a weight in the order of operations of its package. For NVFP4 both scale the block scale first;
    this library multiplies a code by its block scale, and the product by the tensor scale."""
    q, parts = found[name], found.entries[name].parts
    assert isinstance(q, BlockScaled)
    if q.global_scale is None:
        return decode_operand(q)
    scale = decode_scale(q)
    if found.layout == "compressed_tensors":
        divisor = found.raw(name)[parts["global_scale"]]
        assert torch.equal(q.global_scale, (1 / divisor).reshape([]))
        scale = scale / divisor
    else:
        scale = scale * q.global_scale
    values = decode_codes(q) * spread(scale, q.spec, q.rows, q.length)
    assert torch.allclose(decode_operand(q), values, rtol=2.0**-22, atol=0)  # two roundings apart
    return values


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header (text as it is), whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def header_of(tensors: Iterable[tuple[str, str, list[int], int]]) -> dict[str, Any]:
    """A right header of (name, dtype, shape, bytes), one after the other."""
    found: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, size in tensors:
        found[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return found


def write_raw(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """A folder with these stored tensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder
