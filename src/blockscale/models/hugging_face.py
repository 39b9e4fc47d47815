"""Trained weights as any Llama loader reads them: safetensors with Hugging Face's names, and config.json.

Dense models with grouped queries are Llama's, or Qwen3's if queries and keys are normed. The fused layers `qkv` and
`gate_up` are split into their parts; nothing else changes, since positions rotate the same pairs of features.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, message, refuse
from .attention import Attention
from .transformer import Block, Transformer


def check_has_names(model: Transformer) -> None:
    """Raise unless Hugging Face Transformers has names for all weights of a model."""
    if model.config.experts is not None or model.config.latent is not None:
        rule = "dense models with grouped queries have names that every Llama loader knows"
        fix = "load a checkpoint by its own names"
        refuse("export of a model with experts or latent attention", rule, fix)


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
