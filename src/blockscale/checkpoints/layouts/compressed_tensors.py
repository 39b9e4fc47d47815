"""The layout of compressed-tensors (llm-compressor, vLLM): FP8 blocks, MXFP8, MXFP4 and NVFP4.

| format | tensors |
|---|---|
| `nvfp4-pack-quantized` | `weight_packed` U8, `weight_scale` F8_E4M3, `weight_global_scale` F32 [1], a divisor |
| `mxfp4-pack-quantized` | `weight_packed` U8, `weight_scale` U8 |
| `mxfp8-quantized` | `weight` F8_E4M3, `weight_scale` U8 |
| `float-quantized`, block [128, 128] | `weight` F8_E4M3, `weight_scale` in the model's dtype |

A divisor g is read as the factor RN(1/g). About one factor in eight is no reciprocal of an fp32 number, and cannot be
stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, option, refuse
from ...formats.storage import to_tensors
from ...formats.tensor import BlockScaled
from ..files import Stored, damaged
from .layout import E8M0, FP4, FP32, Entry, Layout, Suffix, Written, cannot_hold, entries_of, quantized_entry, tiles_of

_CODES = (".weight_packed", ".weight")
_SUFFIXES = {
    ".weight_global_scale": Suffix("global_scale", _CODES, ".weight"),
    ".weight_zero_point": Suffix("zero_point", _CODES, ".weight"),
    ".weight_shape": Suffix("shape", _CODES, ".weight"),
    ".weight_g_idx": Suffix("order", _CODES, ".weight"),
    ".weight_scale": Suffix("scale", _CODES, ".weight"),
}
# end of the name of a scale of activations, in W4A4
_OF_ACTIVATIONS = ".input_global_scale"
_FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8_e4m3": "mxfp8-quantized",
    "fp8_128x128": "float-quantized",
}


class CompressedTensors(Layout):
    """`quant_method: "compressed-tensors"`."""

    name = "compressed_tensors"
    formats = tuple(_FORMATS)

    def is_of(self, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> bool:
        method = config.get("quantization_config", {}).get("quant_method")
        packed = any(name.endswith(".weight_packed") for name in stored)
        return method == "compressed-tensors" or (method is None and packed)

    def entries(self, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Entry]:
        def entry(name: str, parts: dict[str, str]) -> Entry:
            format = _format(name, parts, stored)
            scales = {"nvfp4": ("F8_E4M3",), "fp8_128x128": FP32}.get(format, E8M0)
            codes = ("F8_E4M3",) if format in ("mxfp8_e4m3", "fp8_128x128") else FP4
            return quantized_entry(name, format, parts, stored, codes=codes, scales=scales, divides=True)

        return entries_of(stored, _SUFFIXES, entry)

    def store(self, name: str, q: BlockScaled) -> dict[str, Tensor]:
        if q.format not in _FORMATS or len(q.shape) != 2 or not name.endswith(".weight"):
            cannot_hold(self.name, name, q, self.formats, ", one [N, K] for each module")
        if q.shape[-1] % q.spec.block[1] and not q.spec.is_2d:
            cannot_hold(self.name, name, q, self.formats, f" with K a multiple of {q.spec.block[1]}")
        tensors, _ = to_tensors(q)
        data, scale = tensors["data"], tensors["scale"]
        packed = f"{name}_packed" if q.spec.codes_per_byte == 2 else name
        found = {
            packed: data,
            f"{name}_scale": scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale,
        }
        if q.global_scale is not None:
            found[f"{name}_global_scale"] = divisor(name, q.global_scale).reshape(1)
        return found

    def describe(self, written: Written) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        kinds: dict[tuple[str, bool], list[str]] = {}
        for format in written.held:
            for module in written.modules(format):
                kinds.setdefault((format, f"{module}{_OF_ACTIVATIONS}" in written.formats), []).append(module)
        groups = {
            f"group_{at}": {
                "targets": ["Linear"] if len(kinds) == 1 else modules,
                "format": _FORMATS[format],
                "weights": _weights(format),
                "input_activations": _weights(format) | {"dynamic": "local"} if has_activations else None,
                "output_activations": None,
            }
            for at, ((format, has_activations), modules) in enumerate(kinds.items())
        }
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": _FORMATS[written.held[0]] if len(written.held) == 1 else "mixed-precision",
                "quantization_status": "compressed",
                "config_groups": groups,
                "kv_cache_scheme": _CACHE if written.scales_cache else None,
                "ignore": written.modules(None),
            }
        }, {}


def divisor(name: str, factor: Tensor) -> Tensor:
    """The fp32 number whose rounded reciprocal is a factor. CheckpointError if there is none."""
    near = 1 / factor.reshape([])
    for each in (near, near.nextafter(near.new_zeros([])), near.nextafter(near.new_full([], torch.inf))):
        if torch.equal(1 / each, factor.reshape([])) and bool(each.isfinite()) and bool(each != 0):
            return each
    refuse(
        f"the tensor scale {factor.item()!r} of {name} is no reciprocal of an fp32 number",
        rule="this layout stores the divisor of values",
        fix=f"write another layout, or convert with {option('allow_rounding', True)}, which moves it by 6e-8",
        error=CheckpointError,
    )


def _format(name: str, parts: Mapping[str, str], stored: Mapping[str, Stored]) -> str:
    """Format of a weight by its parts: those of integers and of other blocks are refused."""
    data, scale = stored[parts["data"]], stored[parts["scale"]]
    if parts.keys() <= {"data", "scale", "global_scale"} and len(data.shape) >= 2:
        if data.dtype in FP4 and parts["data"].endswith("_packed"):
            return "nvfp4" if "global_scale" in parts else "mxfp4"
        if data.dtype == "F8_E4M3" and scale.dtype in E8M0:
            return "mxfp8_e4m3"
        if data.dtype == "F8_E4M3" and scale.shape == tiles_of(data, (128, 128)):
            return "fp8_128x128"
    what = f"{data.file}: {name!r} is {data.dtype} {data.shape} with scales {scale.dtype} {scale.shape}"
    damaged(what, f"block-scaled formats of this layout are {', '.join(_FORMATS.values())}", "requantize the model")


def _weights(format: str) -> dict[str, Any]:
    """A config's description of weights in a format."""
    bits, strategy, size, dtype = _ARGUMENTS[format]
    about: dict[str, Any] = {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }
    about |= {"block_structure": [128, 128]} if size is None else {"group_size": size}
    return about | {"scale_dtype": f"torch.{dtype}"}


# of keys and values in FP8, with a factor for each layer
_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
# bits, strategy, elements of a group, dtype of scales
_ARGUMENTS: dict[str, tuple[int, str, int | None, str]] = {
    "nvfp4": (4, "tensor_group", 16, "float8_e4m3fn"),
    "mxfp4": (4, "group", 32, "uint8"),
    "mxfp8_e4m3": (8, "group", 32, "uint8"),
    "fp8_128x128": (8, "block", None, "float32"),
}
