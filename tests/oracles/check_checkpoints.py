"""Check quantized checkpoints with the packages that own their layouts: python check_checkpoints.py PARENT_FOLDER

Needs what make_checkpoints.py needs. A sub-folder of PARENT_FOLDER holds a checkpoint (safetensors and config.json, or
.gguf) and `expected.safetensors`, the values of every quantized weight under its logical name. Each is decoded

- tensor by tensor, by the package's own functions, in float32;
- if the folder is a whole model that Transformers loads, also by `from_pretrained`, which gives bfloat16.

Rule: equal in every bit but the sign of zero (modelopt and gguf decode -0 as 0). What `from_pretrained` gives is
compared with the expected values rounded to bfloat16, and so is float32 where made_by.json says that the expected
values are rounded already (`exact: false`). One line per folder; exit status 1 if a folder fails.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
EXPECTED = "expected.safetensors"
FP8_TILE = 128


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; empty if there is none."""
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def read_tensors(folder: Path) -> Tensors:
    """The tensors of every shard, without the expected values; an index must name the shard of each."""
    tensors: Tensors = {}
    shards: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != EXPECTED:
            read = load_file(path)
            tensors |= read
            shards |= dict.fromkeys(read, path.name)
    index = folder / "model.safetensors.index.json"
    if index.exists() and json.loads(index.read_text())["weight_map"] != shards:
        raise ValueError(f"{index.name} does not name the tensors of the shards")
    return tensors


def layout(folder: Path) -> str:
    """The `quant_method` of a folder, or `gguf`."""
    if any(folder.glob("*.gguf")):
        return "gguf"
    config = read_config(folder).get("quantization_config")
    if config is None:  # older modelopt writes only this file
        config = json.loads((folder / "hf_quant_config.json").read_text())
        return str(config["producer"]["name"])
    return str(config["quant_method"])


# ---- tensor by tensor ------------------------------------------------------------------------------------------------


def decode_compressed_tensors(folder: Path) -> Tensors:
    """Values in float32, by compressed-tensors' `dequantize`; its decompressor must give the same in bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.utils.match import is_match

    config = QuantizationConfig.model_validate(read_config(folder)["quantization_config"])
    tensors = read_tensors(folder)
    linear = torch.nn.Linear(1, 1, device="meta")
    values: Tensors = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind != "weight_scale":
            continue
        groups = config.config_groups.values()
        schemes = [s for s in groups if is_match(module, linear, s.targets, config.ignore or ())]
        if len(schemes) != 1:
            raise ValueError(f"{module} is quantized, and {len(schemes)} groups of config.json have it as a target")
        scheme, prefix = schemes[0], module + "."
        stored = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        code = stored.get("weight")
        if "weight_packed" in stored:
            packed = stored["weight_packed"]
            code = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        scale = stored["weight_scale"]
        scale = (decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale).float()
        value = dequantize(
            code, scale, args=scheme.weights, dtype=torch.float32, global_scale=stored.get("weight_global_scale")
        )
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        own = compressor.decompress(stored, scheme)["weight"]
        if not same(own.float(), value.to(own.dtype).float()):
            raise ValueError(f"{module}: the decompressor disagrees with dequantize")
        values[f"{module}.weight"] = value
    return values


def decode_modelopt(folder: Path) -> Tensors:
    """Values in float32, by `dequantize` of modelopt's tensor classes."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    tensors = read_tensors(folder)
    values: Tensors = {}
    for name, scale in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight_scale":
            continue
        code = tensors[f"{module}.weight"]
        if code.dtype == torch.uint8 and scale.dtype == torch.uint8:
            shape = torch.Size([*code.shape[:-1], 2 * code.shape[-1]])
            value = MXFP4QTensor(shape, torch.float32, code).dequantize(scale=scale, block_sizes={-1: 32})
        elif code.dtype == torch.uint8:
            shape = torch.Size([*code.shape[:-1], 2 * code.shape[-1]])
            second = tensors[f"{module}.weight_scale_2"]
            value = NVFP4QTensor(shape, torch.float32, code).dequantize(
                scale=scale, double_scale=second, block_sizes={-1: 16}
            )
        else:
            value = MXFP8QTensor(code.shape, torch.float32, code).dequantize(scale=scale)
        values[f"{module}.weight"] = value
    return values


def decode_fp8(folder: Path) -> Tensors:
    """Values in float32, by Transformers' `Fp8Dequantize`: `fp8` with any scales, `mxfp8`, and DeepSeek-V4's FP4.

    It takes only whole tiles, so codes are padded with zeros to whole tiles first and the values cut after.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = read_tensors(folder)
    values: Tensors = {}
    for name, scale in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("weight_scale_inv", "scale"):
            continue
        code = tensors[f"{module}.weight"]
        rows, columns = code.shape
        if code.dtype == torch.int8:
            columns *= 2
        elif scale.dtype != torch.uint8:
            code = pad_to_tiles(code, scale.shape)
        value = Fp8Dequantize(None)._dequantize_one(code, scale, torch.float32)
        values[f"{module}.weight"] = value[:rows, :columns].contiguous()
    return values


def pad_to_tiles(code: torch.Tensor, tiles: torch.Size) -> torch.Tensor:
    """FP8 codes, with zeros where tiles of 128×128 are short; an error if there are not as many tiles as scales."""
    rows, columns = (FP8_TILE * count for count in tiles)
    short = rows - code.shape[0], columns - code.shape[1]
    if not all(0 <= missing < FP8_TILE for missing in short):
        raise ValueError(f"codes {list(code.shape)} with scales {list(tiles)}")
    padded = torch.nn.functional.pad(code.view(torch.uint8), (0, short[1], 0, short[0]))
    return padded.view(code.dtype)


def decode_gpt_oss(folder: Path) -> Tensors:
    """Values in float32 as [E, outputs, inputs], by Transformers' `convert_moe_packed_tensors`, transposed back."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = read_tensors(folder)
    values: Tensors = {}
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            module = name.removesuffix("_blocks")
            value = convert_moe_packed_tensors(blocks, tensors[f"{module}_scales"], dtype=torch.float32)
            values[module] = value.transpose(1, 2).contiguous()
    return values


def decode_gguf(folder: Path) -> Tensors:
    """Values in float32, by gguf's `dequantize`, under the names of the file."""
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import dequantize

    values: Tensors = {}
    for path in sorted(folder.glob("*.gguf")):
        for tensor in GGUFReader(path).tensors:
            if tensor.tensor_type == GGMLQuantizationType.MXFP4:
                values[tensor.name] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    return values


DECODERS: dict[str, Callable[[Path], Tensors]] = {
    "compressed-tensors": decode_compressed_tensors,
    "modelopt": decode_modelopt,
    "fp8": decode_fp8,
    "mxfp8": decode_fp8,
    "mxfp4": decode_gpt_oss,
    "gguf": decode_gguf,
}


# ---- whole models ----------------------------------------------------------------------------------------------------


def load_model(folder: Path, names: list[str]) -> Tensors | None:
    """The weights that Transformers makes of a checkpoint, in bfloat16; None if it is no whole model, or not for it."""
    method, config = layout(folder), read_config(folder)
    if method in ("gguf", "modelopt") or "architectures" not in config:
        return None
    if "model.embed_tokens.weight" not in read_tensors(folder) or "only_tensors" in made_by(folder):
        return None
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    # The other layouts are dequantized by default where there is no GPU.
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "compressed" in method else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True, **options
    )
    if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"from_pretrained: {info}")
    weights = dict(model.named_parameters())
    loaded = {name: weights[name].detach() for name in names}
    return {name: w.transpose(1, 2) for name, w in loaded.items()} if method == "mxfp4" else loaded


# ---- comparing -------------------------------------------------------------------------------------------------------


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shapes and values are equal, zeros of either sign and NaNs included."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def compare(found: Tensors, expected: Tensors, dtype: torch.dtype) -> tuple[bool, float]:
    """Whether two sets of tensors are equal once both are rounded to a dtype; the largest difference."""
    equal, largest = found.keys() == expected.keys(), 0.0
    for name in found.keys() & expected.keys():
        a, b = found[name].to(dtype).float(), expected[name].to(dtype).float()
        equal &= same(a, b)
        largest = max(largest, (a - b).abs().max().item()) if a.shape == b.shape else float("inf")
    return equal, largest


def made_by(folder: Path) -> dict[str, Any]:
    """The content of made_by.json: `expected.exact` is false if expected values are rounded to bfloat16, `only_tensors`
    says why a whole model is not loaded."""
    path = folder / "made_by.json"
    return json.loads(path.read_text()) if path.exists() else {}


def check(folder: Path) -> bool:
    """Print one line about a folder; returns whether every oracle gives what is expected."""
    try:
        expected = load_file(folder / EXPECTED)
        is_exact = made_by(folder).get("expected", {}).get("exact", True)
        exact = torch.float32 if is_exact else torch.bfloat16
        results = {"tensor by tensor": compare(DECODERS[layout(folder)](folder), expected, exact)}
        model = load_model(folder, list(expected))
        if model is not None:
            results["from_pretrained"] = compare(model, expected, torch.bfloat16)
    except Exception as error:  # another folder may be right
        print(f"{folder.name}: FAILED  {type(error).__name__}: {error}")
        return False
    passed = bool(expected) and all(equal for equal, _ in results.values())
    largest = max(difference for _, difference in results.values())
    names = [way if equal else f"{way} (differs)" for way, (equal, _) in results.items()]
    print(
        f"{folder.name}: {len(expected)} tensors, largest difference {largest:g}, {' and '.join(names)}: "
        + ("ok" if passed else "FAILED")
    )
    return passed


def main(arguments: list[str]) -> int:
    """Check the sub-folders of the folder that the command line names."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    folders = sorted(path for path in Path(arguments[0]).iterdir() if (path / EXPECTED).exists())
    results = [check(folder) for folder in folders]
    if not folders:
        print(f"no folder with {EXPECTED} in {arguments[0]}")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
