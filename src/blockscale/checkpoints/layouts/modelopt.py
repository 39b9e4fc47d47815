"""The layout of NVIDIA's modelopt, described in hf_quant_config.json and, for newer readers, in config.json.

| `quant_algo` | tensors |
|---|---|
| `NVFP4`, `W4A16_NVFP4` | `weight` U8, `weight_scale` F8_E4M3, `weight_scale_2` F32, a factor |
| `MXFP8` | `weight` F8_E4M3, `weight_scale` U8 |
| `mxfp4` | `weight` U8, `weight_scale` U8 |
| `fp8_pb_wo`, read only | `weight` F8_E4M3, `weight_scale` F32 [N/128, 1, K/128, 1] |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats.storage import to_tensors
from ...formats.tensor import BlockScaled
from ..files import Stored, damaged
from .layout import E8M0, FP4, Entry, Layout, Suffix, Written, cannot_hold, entries_of, quantized_entry

_SUFFIXES = {
    ".weight_scale_2": Suffix("global_scale", (".weight",), ".weight"),
    ".weight_scale": Suffix("scale", (".weight",), ".weight"),
}
# name of a format, and elements of a block
_ALGORITHMS = {"nvfp4": ("W4A16_NVFP4", 16), "mxfp8_e4m3": ("MXFP8", 32), "mxfp4": ("mxfp4", 32)}
QUANT_CONFIG = "hf_quant_config.json"


class ModelOpt(Layout):
    """`quant_method: "modelopt"`, or hf_quant_config.json."""

    name = "modelopt"
    formats = tuple(_ALGORITHMS)

    def is_of(self, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> bool:
        about = config.get("quantization_config", {})
        method = about.get("quant_method")
        by_name = any(name.endswith(".weight_scale_2") for name in stored)
        return method == "modelopt" or (method is None and ("quant_algo" in about or by_name))

    def entries(self, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Entry]:
        def entry(name: str, parts: dict[str, str]) -> Entry:
            data, scale = stored[parts["data"]], stored[parts["scale"]]
            if data.dtype in FP4 and scale.dtype == "F8_E4M3":
                if "global_scale" not in parts:
                    damaged(f"{scale.file} has {parts['scale']!r} without {name}_scale_2", "NVFP4 has a tensor scale")
                return quantized_entry(name, "nvfp4", parts, stored, codes=FP4, scales=("F8_E4M3",))
            if scale.dtype in E8M0 and "global_scale" not in parts:
                format, codes = ("mxfp4", FP4) if data.dtype in FP4 else ("mxfp8_e4m3", ("F8_E4M3",))
                return quantized_entry(name, format, parts, stored, codes=codes, scales=E8M0)
            if scale.dtype == "F32" and len(scale.shape) == 4 and scale.shape[1::2] == (1, 1):
                flat = dict(stored) | {parts["scale"]: scale._replace(shape=scale.shape[::2])}
                return quantized_entry(name, "fp8_128x128", parts, flat, codes=("F8_E4M3",), scales=("F32",))
            what = f"{data.file}: {name!r} is {data.dtype} {data.shape} with scales {scale.dtype} {scale.shape}"
            rule = "block-scaled formats of this layout are NVFP4, MXFP8, MXFP4 and FP8 blocks"
            damaged(what, rule, "requantize the model")

        return entries_of(stored, _SUFFIXES, entry)

    def store(self, name: str, q: BlockScaled) -> dict[str, Tensor]:
        if q.format not in _ALGORITHMS or len(q.shape) != 2 or not name.endswith(".weight"):
            cannot_hold(self.name, name, q, self.formats, ", one [N, K] for each module")
        if q.shape[-1] % q.spec.block[1]:
            cannot_hold(self.name, name, q, self.formats, f" with K a multiple of {q.spec.block[1]}")
        tensors, _ = to_tensors(q)
        scale = tensors["scale"]
        if q.global_scale is None:
            return {name: tensors["data"], f"{name}_scale": scale.view(torch.uint8)}
        return {name: tensors["data"], f"{name}_scale": scale, f"{name}_scale_2": q.global_scale.reshape([])}

    def describe(self, written: Written) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        layers = {
            module: _algorithm(format, module, written) for format in written.held for module in written.modules(format)
        }
        kinds, kept = set(layers.values()), written.modules(None)
        if len(kinds) == 1:
            name, size = next(iter(kinds))
            quantization: dict[str, Any] = {"quant_algo": name, "group_size": size}
        else:
            each = {module: {"quant_algo": name, "group_size": size} for module, (name, size) in layers.items()}
            quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": each}
        quantization |= {"kv_cache_quant_algo": "FP8" if written.scales_cache else None, "exclude_modules": kept}
        producer = {"name": "blockscale", "version": "1"}
        about = {
            "quant_method": "modelopt",
            "quant_algo": quantization["quant_algo"],
            "ignore": kept,
            "producer": producer,
        }
        if "quantized_layers" in quantization:
            about["quantized_layers"] = quantization["quantized_layers"]
        if written.scales_cache:
            about["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        if quantization["quant_algo"] in ("NVFP4", "W4A16_NVFP4"):
            four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
            activations = {"input_activations": four} if quantization["quant_algo"] == "NVFP4" else {}
            about["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": four} | activations}
        return {"quantization_config": about}, {QUANT_CONFIG: {"producer": producer, "quantization": quantization}}


def _algorithm(format: str, module: str, written: Written) -> tuple[str, int]:
    """Name of a module's quantization, and elements of a block. NVFP4 of activations has a scale of them, too."""
    name, size = _ALGORITHMS[format]
    both = name == "W4A16_NVFP4" and f"{module}.input_scale" in written.formats
    return "NVFP4" if both else name, size
