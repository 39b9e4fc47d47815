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


def export(model: Transformer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write config.json and model.safetensors to a folder, each atomically."""
    if model.config.experts is not None or model.config.latent is not None:
        rule = "dense models with grouped queries have names that every Llama loader knows"
        fix = "load a checkpoint by its own names"
        refuse("export of a model with experts or latent attention", rule, fix)
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
    yield "model.embed_tokens.weight", model.embedding.weight
    for place, block in enumerate(model.layers):
        assert isinstance(block, Block)
        yield from ((f"model.layers.{place}.{name}", value) for name, value in _block(block))
    yield "model.norm.weight", model.norm.weight
    if not model.config.tied:
        yield "lm_head.weight", model.head.weight


def _block(block: Block) -> Iterator[tuple[str, Tensor]]:
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, Attention)
    width = attention.width
    parts = attention.qkv.weight.split([attention.heads * width, *[attention.kv_heads * width] * 2])
    for name, part in zip("qkv", parts, strict=True):
        yield f"self_attn.{name}_proj.weight", part
    yield "self_attn.o_proj.weight", attention.out.weight
    if attention.q_norm is not None and attention.k_norm is not None:
        yield "self_attn.q_norm.weight", attention.q_norm.weight
        yield "self_attn.k_norm.weight", attention.k_norm.weight
    gate_up: Any = mlp.get_parameter("gate_up.weight")
    gate, up = gate_up.chunk(2)
    yield "mlp.gate_proj.weight", gate
    yield "mlp.up_proj.weight", up
    yield "mlp.down_proj.weight", mlp.get_parameter("down.weight")
    yield "input_layernorm.weight", block.attention_norm.weight
    yield "post_attention_layernorm.weight", block.mlp_norm.weight


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
