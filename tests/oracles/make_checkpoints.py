"""Write the golden checkpoints with the packages that own their layouts: python make_checkpoints.py OUT_FOLDER

Needs: torch 2.13.0 (CPU), transformers 5.22.2, accelerate 1.15.0, compressed-tensors 0.20.0, nvidia-modelopt 0.47.0,
gguf 0.19.0, safetensors 0.8.0. Their output is in tests/golden/checkpoints; made_by.json of each folder says which
function packed and decoded it, and what was done by hand. Weights are seeded: the same versions write the same bytes.

Beside each checkpoint lies `expected.safetensors`: the values of every quantized weight under its logical name, as the
package decodes them in float32. They are stored as bfloat16 where that loses nothing; made_by.json has `exact: false`
where it does, because the package itself decodes to bfloat16.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from check_checkpoints import DECODERS, EXPECTED, FP8_TILE, Tensors, layout
from safetensors.torch import load_file, save_file

PACKAGES = ("torch", "transformers", "compressed-tensors", "nvidia-modelopt", "gguf", "safetensors")
CT_PACKED = "compressed_tensors {}, by ModelCompressor.compress_model; model.save_pretrained; update_config"
CT_DECODED = "compressed_tensors: dequantize in float32, of what its unpack and decompress_mx_scale give"
CT_BY_HAND = "minima and maxima of blocks in float32, from which compressed_tensors' calculate_qparams makes the scales"
MODELOPT_PACKED = "modelopt.torch.quantization.quantize, modelopt.torch.export.export_hf_checkpoint"
FP8_PACKED = (
    "transformers Fp8Quantize, of weights padded with zeros to whole tiles; codes cut to the shape of the weight"
)
FP8_DECODED = "transformers Fp8Dequantize in float32, of codes padded with zeros to whole tiles; values cut"


# ---- inputs ----------------------------------------------------------------------------------------------------------


def random_weight(shape: list[int], seed: int) -> torch.Tensor:
    """Seeded bf16 weights with zeros, a block of zeros, an outlier and a tiny row; every seed has another range."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.02 * 1.37**seed
    rows = weight.flatten(0, -2)
    rows[0, :3] = 0
    rows[1, -32:] = 0
    rows[2, 5] = 30 * rows.std()
    rows[3] *= 2.0**-14
    return weight.bfloat16()


def tiny_llama(inner: int) -> torch.nn.Module:
    """A Llama of one layer in bf16; only its MLP grows with `inner`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    return fill(LlamaForCausalLM(config).bfloat16().eval())


def fill(model: torch.nn.Module) -> torch.nn.Module:
    """Set every matrix and every stack of matrices of a model to `random_weight`."""
    for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.ndim > 1 and parameter.shape[-2] > 3 and parameter.shape[-1] >= 32:
            parameter.data.copy_(random_weight(list(parameter.shape), seed))
    return model


# ---- outputs ---------------------------------------------------------------------------------------------------------


def finish(
    folder: Path, packed_by: str, decoded_by: str, by_hand: list[str], exact: bool = True, notes: str = ""
) -> None:
    """Decode a checkpoint; write the values as expected.safetensors, and made_by.json."""
    values = DECODERS[layout(folder)](folder)
    assert values, folder
    short = not exact or all(torch.equal(v.bfloat16().float(), v) for v in values.values())
    if short:
        values = {name: v.bfloat16() for name, v in values.items()}
    save_file(values, folder / EXPECTED)
    made_by = {
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "packed_by": packed_by,
        "decoded_by": decoded_by,
        "by_hand": by_hand,
        "expected": {"dtype": "bfloat16" if short else "float32", "exact": exact},
    }
    write_json(folder / "made_by.json", made_by | ({"notes": notes} if notes else {}))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with a line feed at its end."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_by_hand(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write a checkpoint of one file, and its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config)


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def compress(folder: Path, groups: dict[str, tuple[str, list[str]]], inner: int, shard: str = "5GB") -> None:
    """Quantize a tiny Llama; `groups` has a preset of compressed-tensors and the targets of each group."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = tiny_llama(inner)
    schemes = {name: preset_name_to_scheme(preset, targets) for name, (preset, targets) in groups.items()}
    apply_quantization_config(model, QuantizationConfig(config_groups=schemes, ignore=["lm_head"]))
    for module in model.modules():
        scheme: QuantizationScheme | None = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        low, high = block_extremes(module.weight.data.float(), scheme.weights)
        total = None
        if hasattr(module, "weight_global_scale"):
            total = generate_gparam(low.amin(), high.amax())
            module.weight_global_scale.data.copy_(total)
        scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=total)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.copy_(generate_gparam(torch.tensor(-3.3), torch.tensor(2.1)))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size=shard)
    compressor.update_config(str(folder))


def block_extremes(weight: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest value of each block of a weight, as `calculate_qparams` wants them."""
    if arguments.block_structure:
        rows, columns = arguments.block_structure
        padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        blocks = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    blocks = weight.unflatten(1, (-1, arguments.group_size))
    return blocks.amin(dim=-1), blocks.amax(dim=-1)


def compressed_tensors_nvfp4(folder: Path) -> None:
    """NVFP4, weights only; down_proj with activations too, and so with an input scale."""
    targets = ["re:.*self_attn.*_proj$", "re:.*(gate|up)_proj$"]
    compress(folder, {"group_0": ("NVFP4A16", targets), "group_1": ("NVFP4", ["re:.*down_proj$"])}, inner=64)
    finish(
        folder,
        CT_PACKED.format("nvfp4-pack-quantized"),
        CT_DECODED,
        [CT_BY_HAND, "the range of the inputs of down_proj"],
        notes="Every weight has a global scale of its own. The decompressor rounds these values to bfloat16.",
    )


def compressed_tensors_mxfp4(folder: Path) -> None:
    """MXFP4, weights only."""
    compress(folder, {"group_0": ("MXFP4A16", ["Linear"])}, inner=160)
    finish(folder, CT_PACKED.format("mxfp4-pack-quantized"), CT_DECODED, [CT_BY_HAND])


def compressed_tensors_mxfp4_sharded(folder: Path) -> None:
    """MXFP4 in two files with an index."""
    compress(folder, {"group_0": ("MXFP4A16", ["Linear"])}, inner=32, shard="4KB")
    assert len(list(folder.glob("model-*-of-00002.safetensors"))) == 2, sorted(folder.iterdir())
    finish(folder, CT_PACKED.format("mxfp4-pack-quantized"), CT_DECODED, [CT_BY_HAND])


def compressed_tensors_mxfp8(folder: Path) -> None:
    """MXFP8, weights and activations."""
    compress(folder, {"group_0": ("MXFP8", ["Linear"])}, inner=64)
    finish(folder, CT_PACKED.format("mxfp8-quantized"), CT_DECODED, [CT_BY_HAND])


def compressed_tensors_fp8_block(folder: Path) -> None:
    """FP8 by tiles of 128×128 with scales in bf16, and edge tiles of 32 rows or columns."""
    compress(folder, {"group_0": ("FP8_BLOCK", ["Linear"])}, inner=160)
    finish(
        folder,
        CT_PACKED.format("float-quantized"),
        CT_DECODED + "; the decompressor multiplies in bfloat16, which rounds the same values",
        [CT_BY_HAND],
        exact=False,
    )


# ---- modelopt --------------------------------------------------------------------------------------------------------


def export_modelopt(folder: Path, quantization: dict[str, Any], inner: int) -> None:
    """Quantize a tiny Llama by a configuration of modelopt, calibrated on a few tokens, and export it."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = tiny_llama(inner)
    tokens = torch.arange(16)[None]
    model = mtq.quantize(model, quantization, forward_loop=lambda m: m(tokens))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)


def modelopt_nvfp4(folder: Path) -> None:
    """NVFP4, weights and activations, with an FP8 cache."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

    cache = mtq.FP8_KV_CFG["quant_cfg"]
    export_modelopt(folder, update_quant_cfg_with_kv_cache_quant(mtq.NVFP4_DEFAULT_CFG, cache), inner=64)
    notes = "The export gives q, k, v one weight_scale_2, and gate and up another."
    finish(folder, MODELOPT_PACKED, "modelopt NVFP4QTensor.dequantize in float32", [], notes=notes)


def modelopt_mxfp8(folder: Path) -> None:
    """MXFP8, weights and activations."""
    import modelopt.torch.quantization as mtq

    export_modelopt(folder, mtq.MXFP8_DEFAULT_CFG, inner=64)
    finish(folder, MODELOPT_PACKED, "modelopt MXFP8QTensor.dequantize in float32", [])


# ---- DeepSeek, MiniMax -----------------------------------------------------------------------------------------------


def quantize_tiles(weight: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a weight by Transformers' `Fp8Quantize`, which takes only whole tiles of 128×128."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_TILE, 0, -rows % FP8_TILE))
    config = FineGrainedFP8Config(weight_block_size=(FP8_TILE, FP8_TILE), scale_fmt=scale_format)
    out = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"X.weight": padded})
    return out["X.weight"].view(torch.uint8)[:rows, :columns].contiguous().view(torch.float8_e4m3fn), out[
        "X.weight_scale_inv"
    ]


def deepseek_config(**quantization: Any) -> dict[str, Any]:
    """What readers look at in the config.json of DeepSeek-V3."""
    fixed = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "quantization_config": fixed | quantization,
    }


def deepseek_tensors(shapes: dict[str, list[int]], scale_format: str) -> Tensors:
    """FP8 weights of some shapes with their scales, and a norm and a router that stay bf16."""
    tensors = {
        "model.layers.0.input_layernorm.weight": torch.ones(shapes["self_attn.kv_a_proj_with_mqa"][1]).bfloat16(),
        "model.layers.0.mlp.gate.weight": random_weight([4, 64], 9),
    }
    for seed, (module, shape) in enumerate(shapes.items()):
        code, scale = quantize_tiles(random_weight(shape, seed), scale_format)
        tensors[f"model.layers.0.{module}.weight"] = code
        tensors[f"model.layers.0.{module}.weight_scale_inv"] = scale
    return tensors


def deepseek_fp8(folder: Path) -> None:
    """FP8 by tiles of 128×128, with tiles that are short at the bottom, at the right, and at both."""
    shapes = {"self_attn.kv_a_proj_with_mqa": [132, 160], "mlp.experts.0.down_proj": [4, 320]}
    write_by_hand(folder, deepseek_tensors(shapes, "float"), deepseek_config())
    finish(folder, FP8_PACKED, FP8_DECODED, ["names, config.json", "padding and cutting"])


def deepseek_ue8m0(folder: Path) -> None:
    """The same layout with scales that are powers of two, in F32."""
    shapes = {"self_attn.kv_a_proj_with_mqa": [192, 32], "mlp.experts.0.down_proj": [4, 320]}
    tensors = deepseek_tensors(shapes, "ue8m0")
    tensors |= {name: t.float() for name, t in tensors.items() if t.dtype == torch.float8_e8m0fnu}
    write_by_hand(folder, tensors, deepseek_config(scale_fmt="ue8m0"))
    by_hand = ["names, config.json", "padding and cutting", "scales from F8_E8M0, which Transformers writes, to F32"]
    finish(folder, FP8_PACKED, FP8_DECODED, by_hand)


def deepseek_v4(folder: Path) -> None:
    """DeepSeek-V4: scales F8_E8M0 named `scale`, experts in FP4."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    code, scale = quantize_tiles(random_weight([132, 32], 0), "ue8m0")
    expert = random_weight([16, 96], 1)
    packed, exponents = MXFP4QTensor.quantize(expert, 32)
    tensors = {
        "layers.0.attn.wq_a.weight": code,
        "layers.0.attn.wq_a.scale": scale,
        "layers.0.ffn.experts.0.w1.weight": packed._quantized_data.view(torch.int8),
        "layers.0.ffn.experts.0.w1.scale": exponents.view(16, 3).view(torch.float8_e8m0fnu),
    }
    config = deepseek_config(scale_fmt="ue8m0", expert_dtype="fp4")
    write_by_hand(folder, tensors, config | {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"})
    by_hand = ["names, dtypes, config.json", "padding and cutting"]
    finish(folder, FP8_PACKED + "; experts: modelopt MXFP4QTensor.quantize", FP8_DECODED, by_hand)


def minimax_mxfp8(folder: Path) -> None:
    """MXFP8 as MiniMax stores it, in a whole Llama, which Transformers loads."""
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    model = tiny_llama(inner=32)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        code, scale = MXFP8QTensor.quantize(tensors[name])
        tensors[name], tensors[f"{name}_scale_inv"] = code._quantized_data, scale
    quantization = {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [1, 32],
        "modules_to_not_convert": ["lm_head"],
    }
    config = json.loads((folder / "config.json").read_text())
    write_by_hand(folder, tensors, config | {"quantization_config": quantization})
    by_hand = ["names, config.json"]
    finish(folder, "modelopt MXFP8QTensor.quantize", "transformers Fp8Dequantize in float32", by_hand)


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------


def gpt_oss(folder: Path) -> None:
    """Experts in MXFP4 as OpenAI's gpt-oss stores them, in a whole model of one layer."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor
    from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

    config = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=16,
        pad_token_id=0,
        eos_token_id=1,
        max_position_embeddings=64,
        sliding_window=16,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)  # for what `fill` leaves alone
    model = fill(GptOssForCausalLM(config).bfloat16())
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for seed, name in enumerate(sorted(name for name in tensors if ".experts." in name)):
        shape = list(tensors[name].shape)
        if name.endswith("_bias"):
            tensors[name] = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
            continue
        del tensors[name]  # [E, inputs, outputs]
        weight = random_weight([shape[0], shape[2], shape[1]], seed)
        code, scale = MXFP4QTensor.quantize(weight, 32)
        blocks = [*weight.shape[:-1], weight.shape[-1] // 32]
        tensors[f"{name}_blocks"] = code._quantized_data.view(*blocks, 16)
        tensors[f"{name}_scales"] = scale.view(blocks)
    skip = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    written = json.loads((folder / "config.json").read_text())
    quantization = Mxfp4Config(modules_to_not_convert=skip).to_dict()
    write_by_hand(folder, tensors, written | {"quantization_config": quantization})
    finish(
        folder,
        "modelopt MXFP4QTensor.quantize",
        "transformers convert_moe_packed_tensors in float32, transposed to [E, outputs, inputs]",
        ["reshaping to blocks, names", "quantization_config, by Mxfp4Config"],
        notes="modelopt gives zeros the code of -0. Output rows of gate_up_proj alternate: gate 0, up 0, gate 1, ...",
    )


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_mxfp4(folder: Path) -> None:
    """One .gguf file with a matrix and experts in MXFP4, as llama.cpp names those of gpt-oss; and F32, BF16."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    folder.mkdir(parents=True)
    writer = GGUFWriter(folder / "model.gguf", "gpt-oss")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(32)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    shapes = {
        "blk.0.attn_output.weight": [8, 96],
        "blk.0.ffn_gate_exps.weight": [2, 32, 64],
        "blk.0.ffn_up_exps.weight": [2, 32, 64],
        "blk.0.ffn_down_exps.weight": [2, 64, 32],
    }
    for seed, (name, shape) in enumerate(shapes.items()):
        data = quantize(random_weight(shape, seed).float().numpy(), GGMLQuantizationType.MXFP4)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.MXFP4)
    writer.add_tensor("blk.0.attn_norm.weight", torch.linspace(0.5, 1.5, 64).numpy())
    embedding = quantize(random_weight([16, 64], 9).float().numpy(), GGMLQuantizationType.BF16)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    finish(folder, "gguf.quants.quantize, GGUFWriter", "gguf.quants.dequantize", [])


CASES: list[Callable[[Path], None]] = [
    compressed_tensors_nvfp4,
    compressed_tensors_mxfp4,
    compressed_tensors_mxfp4_sharded,
    compressed_tensors_mxfp8,
    compressed_tensors_fp8_block,
    modelopt_nvfp4,
    modelopt_mxfp8,
    deepseek_fp8,
    deepseek_ue8m0,
    deepseek_v4,
    minimax_mxfp8,
    gpt_oss,
    gguf_mxfp4,
]


def main(arguments: list[str]) -> int:
    """Write every case into the folder that the command line names; after it, names of cases select some."""
    if not arguments:
        print(__doc__)
        return 2
    for case in CASES:
        folder = Path(arguments[0]) / case.__name__
        if arguments[1:] and case.__name__ not in arguments[1:]:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        case(folder)
        files = sorted(folder.iterdir())
        for file in files:
            file.chmod(0o644)
        print(f"{case.__name__}: {sum(file.stat().st_size for file in files)} bytes in {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
