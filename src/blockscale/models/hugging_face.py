"""Weights and sizes as any Llama loader reads and writes them: safetensors with Hugging Face's names, and config.json.

Dense models with grouped queries are Llama's, or Qwen3's if queries and keys are normed. The fused layers `qkv` and
`gate_up` are split into their parts; nothing else changes, since positions rotate the same pairs of features.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, OptionError, message, refuse
from .attention import Attention
from .config import ModelConfig
from .transformer import Block, Transformer


def check_has_names(model: Transformer) -> None:
    """Raise unless Hugging Face Transformers has names for all weights of a model."""
    if model.config.experts is not None or model.config.latent is not None:
        rule = "dense models with grouped queries have names that every Llama loader knows"
        fix = "load a checkpoint by its own names"
        refuse("export of a model with experts or latent attention", rule, fix)
    places = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    layers = {f"layers.{at}.{name}": b.get_submodule(name) for at, b in enumerate(model.layers) for name in places}
    for name, layer in (layers | {"head": model.head}).items():
        if not isinstance(layer, nn.Linear):
            rule = "weights in high precision are exported, and this one is frozen or replaced"
            fix = "export the model before freeze_, or convert its checkpoint with blockscale convert-checkpoint"
            refuse(f"{name} is a {type(layer).__name__}", rule, fix)


def export(model: Transformer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write config.json and model.safetensors to a folder, each atomically."""
    check_has_names(model)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise OptionError(
            message("export without safetensors", rule="that package writes the weights", fix="pip install safetensors")
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in hugging_face_tensors(model)}
    fresh = folder / ".model.safetensors.new"
    try:
        save_file(tensors, fresh, metadata={"format": "pt"})
    except SafetensorError as error:  # raised if the disk is full
        fresh.unlink(missing_ok=True)
        raise OSError(str(error)) from error
    os.replace(fresh, folder / "model.safetensors")
    about = json.dumps(hugging_face_config(model, dtype), indent=2) + "\n"
    (folder / ".config.json.new").write_text(about)
    os.replace(folder / ".config.json.new", folder / "config.json")
    return folder


def hugging_face_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """All parameters under the names of Hugging Face Transformers; parts of fused layers are views."""
    for name, parameter, rows in hugging_face_parts(model):
        value = model.get_parameter(parameter)
        yield name, value if rows is None else value[rows]


def hugging_face_parts(model: Transformer) -> Iterator[tuple[str, str, slice | None]]:
    """(name of Hugging Face Transformers, parameter of this model, rows of it) of all weights; None: all rows."""
    yield "model.embed_tokens.weight", "embedding.weight", None
    for place, block in enumerate(model.layers):
        assert isinstance(block, Block)
        for name, parameter, rows in _block(block):
            yield f"model.layers.{place}.{name}", f"layers.{place}.{parameter}", rows
    yield "model.norm.weight", "norm.weight", None
    if not model.config.tied:
        yield "lm_head.weight", "head.weight", None


def _block(block: Block) -> Iterator[tuple[str, str, slice | None]]:
    attention = block.attention
    assert isinstance(attention, Attention)
    start = 0
    for name, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
        rows = slice(start, start + heads * attention.width)
        yield f"self_attn.{name}_proj.weight", "attention.qkv.weight", rows
        start = rows.stop
    yield "self_attn.o_proj.weight", "attention.out.weight", None
    if attention.q_norm is not None and attention.k_norm is not None:
        yield "self_attn.q_norm.weight", "attention.q_norm.weight", None
        yield "self_attn.k_norm.weight", "attention.k_norm.weight", None
    half = block.mlp.get_parameter("gate_up.weight").shape[0] // 2
    yield "mlp.gate_proj.weight", "mlp.gate_up.weight", slice(0, half)
    yield "mlp.up_proj.weight", "mlp.gate_up.weight", slice(half, 2 * half)
    yield "mlp.down_proj.weight", "mlp.down.weight", None
    yield "input_layernorm.weight", "attention_norm.weight", None
    yield "post_attention_layernorm.weight", "mlp_norm.weight", None


def hugging_face_config(model: Transformer, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of Hugging Face Transformers for this model."""
    config = model.config
    kind = "Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"
    return {
        "architectures": [kind],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": model.sequence,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# fields of config.json with the values that this transformer computes; those of fields that are missing come first
_COMPUTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
}
# features, symbols or layers at most: numbers of elements fit in 64 bits
_LARGEST = 2**28
_POSITIONS = 2**24
_INFINITE = 1e300


def _is_plain_rotary(field: object, value: object) -> bool:
    """Whether a field of rope_scaling or rope_parameters asks for rotations by rope_theta, and nothing else."""
    if field in ("rope_type", "type"):
        return value == "default"
    return field == "rope_theta" or (field == "partial_rotary_factor" and value in (1.0, None))


def read_config(config: Mapping[str, Any], where: object) -> tuple[ModelConfig, int]:
    """Sizes and number of positions from a config.json of Hugging Face Transformers; the inverse of
    `hugging_face_config`. Raises for models that this transformer does not compute.  where: the file, for errors.

    >>> made = hugging_face_config(Transformer.build(ModelConfig(), 64, device="meta"), torch.bfloat16)
    >>> read_config(made, "config.json") == (ModelConfig(head_dim=32), 64)
    True
    """

    def wrong(field: str, value: object, rule: str) -> None:
        fix = "load it with Hugging Face Transformers"
        refuse(f"{where} has {field} {str(value)[:200]!r}", rule, fix, error=CheckpointError)

    def size(field: str, default: object = None, most: int = _LARGEST) -> int:
        value = config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            wrong(field, value, f"it is an int from 1 to {most:,}")
        assert isinstance(value, int)
        return value

    def number(field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _INFINITE:
            wrong(field, value, f"it is a positive number below {_INFINITE:g}")
        assert isinstance(value, int | float)
        return float(value)

    kind = config.get("model_type")
    if kind not in ("llama", "qwen3"):
        wrong("model_type", kind, "the transformer of this library computes llama and qwen3, dense")
    for field, values in _COMPUTED.items():
        if config.get(field, values[0]) not in values:
            wrong(field, config[field], f"the transformer of this library computes {values[0]!r}")
    layers = config.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(each != "full_attention" for each in layers)):
        wrong("layer_types", layers, "it is a list of 'full_attention': each layer attends to all positions")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        wrong("tie_word_embeddings", tied, "it is true or false")
    theta = config.get("rope_theta")
    for field in ("rope_scaling", "rope_parameters"):
        rotary = config.get(field)
        if rotary is None:
            continue
        if not isinstance(rotary, dict) or not all(_is_plain_rotary(*each) for each in rotary.items()):
            wrong(field, rotary, "positions rotate all features by rope_theta alone: rope_type is 'default'")
        theta = theta if rotary.get("rope_theta") is None else rotary["rope_theta"]
    heads, dim = size("num_attention_heads"), size("hidden_size")
    found = ModelConfig(
        dim=dim,
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        hidden=size("intermediate_size"),
        vocabulary=size("vocab_size"),
        head_dim=size("head_dim", dim // heads),
        rope_theta=number("rope_theta", 10000.0 if theta is None else theta),
        norm_eps=number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        qk_norm=kind == "qwen3",
        tied=tied,
    )
    if found.heads % found.kv_heads:
        wrong("num_key_value_heads", found.kv_heads, f"it divides the {found.heads} heads")
    if found.heads * found.head_width > _LARGEST:
        wrong("head_dim", found.head_dim, f"{found.heads:,} heads have {_LARGEST:,} features or less")
    if found.head_width % 2:
        wrong("head_dim", found.head_dim, "positions rotate pairs of features")
    return found, size("max_position_embeddings", most=_POSITIONS)
