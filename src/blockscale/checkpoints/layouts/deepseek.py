"""The layout of DeepSeek, Qwen3 and MiniMax: `weight` and `weight_scale_inv`, a factor despite its name.

| weight | scales | format |
|---|---|---|
| F8_E4M3 [N, K] | F32, BF16 or E8M0 [ceil(N/128), ceil(K/128)] | fp8_128x128 |
| F8_E4M3 [N, K] | E8M0 [N, K/32] | mxfp8_e4m3 |
| I8, U8 or F4 [N, K/2] | E8M0 [N, K/32] | mxfp4 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, refuse
from ...formats.storage import to_tensors
from ...formats.tensor import BlockScaled
from ..files import Stored, damaged
from .layout import E8M0, FP4, FP32, Entry, Layout, Suffix, Written, cannot_hold, entries_of, quantized_entry, tiles_of

_SUFFIXES = {
    "_scale_inv": Suffix("scale", ("",), ""),
    ".scale": Suffix("scale", (".weight",), ".weight", or_plain=True),
}


class DeepSeek(Layout):
    """`quant_method: "fp8"` with blocks of 128x128, or `"mxfp8"`."""

    name = "deepseek"
    formats = ("fp8_128x128", "mxfp8_e4m3", "mxfp4")

    def is_of(self, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> bool:
        method = config.get("quantization_config", {}).get("quant_method")
        return method in ("fp8", "mxfp8") or (method is None and any(name.endswith("_scale_inv") for name in stored))

    def entries(self, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Entry]:
        block = config.get("quantization_config", {}).get("weight_block_size", [128, 128])
        if block not in ([128, 128], [1, 32], None):
            damaged(f"config.json has weight_block_size {block}", "blocks are [128, 128]", "requantize the model")

        def entry(name: str, parts: dict[str, str]) -> Entry:
            data, scale = stored[parts["data"]], stored[parts["scale"]]
            if data.dtype in FP4:
                return quantized_entry(name, "mxfp4", parts, stored, codes=FP4, scales=E8M0)
            codes = ("F8_E4M3",)
            if scale.dtype in E8M0 and len(data.shape) >= 2 and scale.shape == tiles_of(data, (1, 32)):
                return quantized_entry(name, "mxfp8_e4m3", parts, stored, codes=codes, scales=E8M0)
            return quantized_entry(name, "fp8_128x128", parts, stored, codes=codes, scales=(*FP32, "F8_E8M0"))

        return entries_of(stored, _SUFFIXES, entry)

    def store(self, name: str, q: BlockScaled) -> dict[str, Tensor]:
        if q.format not in self.formats or len(q.shape) != 2 or not name.endswith(".weight"):
            cannot_hold(self.name, name, q, self.formats, ", one [N, K] for each module")
        if q.format == "mxfp4" and q.shape[-1] % 32:
            cannot_hold(self.name, name, q, self.formats, " with K a multiple of 32")
        tensors, _ = to_tensors(q)
        base = name.removesuffix(".weight")
        if q.format == "fp8_128x128":
            return {name: tensors["data"], f"{name}_scale_inv": tensors["scale"]}
        scale = tensors["scale"].view(torch.uint8)
        if q.format == "mxfp8_e4m3":
            return {name: tensors["data"], f"{name}_scale_inv": scale}
        return {name: tensors["data"].view(torch.int8), f"{base}.scale": scale.view(torch.float8_e8m0fnu)}

    def describe(self, written: Written) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        about: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        if "mxfp8_e4m3" in written.held and len(written.held) > 1:
            rule = "its config says one format of 8 bits for all weights, and MXFP8 stands alone"
            fix = "name one with format=..., or write another layout"
            refuse(f"{', '.join(written.held)} in layout {self.name}", rule, fix, error=CheckpointError)
        if written.held == ["mxfp8_e4m3"]:
            about = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
        else:
            about["weight_block_size"] = [128, 128]
            if written.rules == {"pow2"}:
                about["scale_fmt"] = "ue8m0"
            if "mxfp4" in written.held:
                about["expert_dtype"] = "fp4"
        about["modules_to_not_convert"] = written.modules(None)
        return {"quantization_config": about}, {}
