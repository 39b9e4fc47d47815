"""Exported weights: names and shapes of Hugging Face Transformers, and the logits of an independent Llama."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from blockscale.errors import OptionError
from blockscale.inference import freeze_
from blockscale.models import ModelConfig, Transformer, export
from blockscale.train import train
from support.small_runs import DENSE, SPARSE, small

safetensors = pytest.importorskip("safetensors.torch")
SIZES = {"llama": DENSE, "qwen3": replace(DENSE, qk_norm=True), "tied": replace(DENSE, tied=True)}


def exported(model: ModelConfig, folder: Path) -> tuple[Transformer, dict[str, Tensor], dict]:
    made = Transformer.build(model, 16)
    with torch.no_grad():
        for each in made.parameters():  # norms that are not all ones
            each.add_(0.02 * torch.randn_like(each))
    export(made, folder, torch.float32)
    return made, safetensors.load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def plain_llama(weights: dict[str, Tensor], config: dict, text: Tensor) -> Tensor:
    """Llama's forward, written down from its definition, in fp64."""
    w = {name: value.double() for name, value in weights.items()}
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * w[name]

    def turn(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[0], dtype=torch.float64)
        angle = place[:, None] / config["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        both = torch.cat((angle, angle), dim=-1)[:, None]
        half = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
        return x * both.cos() + half * both.sin()

    x = w["model.embed_tokens.weight"][text]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (y @ w[f"{at}self_attn.{name}_proj.weight"].mT).unflatten(-1, (count, width))
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{at}self_attn.q_norm.weight" in w:
            q, k = norm(q, f"{at}self_attn.q_norm.weight"), norm(k, f"{at}self_attn.k_norm.weight")
        q, k = turn(q), turn(k)
        k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        x = x + torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1) @ w[at + "self_attn.o_proj.weight"].mT
        y = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (y @ w[f"{at}mlp.{name}_proj.weight"].mT for name in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].mT
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.mT


@pytest.mark.parametrize("name", SIZES)
def test_a_plain_loader_gets_our_logits(name: str, tmp_path: Path):
    model, weights, config = exported(SIZES[name], tmp_path)
    text = torch.randint(256, (16,))
    with torch.no_grad():
        ours = model(text[None])[0].double()
    theirs = plain_llama(weights, config, text)
    # the model's residual stream is bf16
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_names_are_those_of_transformers(tmp_path: Path):
    _, weights, config = exported(DENSE, tmp_path)
    layer = {
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
    }
    expected = {f"model.layers.{place}.{name}": shape for place in range(2) for name, shape in layer.items()}
    expected |= {"model.embed_tokens.weight": (256, 32), "lm_head.weight": (256, 32), "model.norm.weight": (32,)}
    assert {name: tuple(value.shape) for name, value in weights.items()} == expected
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_transformers_loads_it(tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, _, _ = exported(DENSE, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    text = torch.randint(256, (1, 16))
    with torch.no_grad():
        ours, other = model(text).float(), theirs(text).logits.float()
    assert float((ours - other).norm() / other.norm()) < 0.02


def test_a_run_exports_what_it_trained(tmp_path: Path):
    train(small(steps=1, export=tmp_path / "out"))
    weights = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert weights["lm_head.weight"].dtype == torch.bfloat16
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_experts_have_no_common_names(tmp_path: Path):
    with pytest.raises(OptionError, match="experts or latent attention"):
        export(Transformer.build(SPARSE, 16), tmp_path)


def test_frozen_models_are_not_exported(tmp_path: Path):
    model = Transformer.build(DENSE, 16)
    freeze_(model, "mxfp8_e4m3")
    with pytest.raises(OptionError, match=r"layers\.0\.attention\.qkv is a QuantizedLinear\. Rule: .* Fix: export"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
