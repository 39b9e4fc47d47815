"""Configs and presets: sizes of real models, shares of FLOPs in low precision, and errors for invalid values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import blockscale as bs
from blockscale.errors import OptionError, UnknownNameError
from blockscale.models.transformer import Transformer, flops_per_token
from blockscale.train import PRESETS, OptimizerConfig, get_preset, with_layers
from blockscale.train.checks import check
from blockscale.train.config import to_dict
from support.small_runs import DENSE, SPARSE, small

# from papers and model cards; the first four presets have a vocabulary of bytes
PARAMETERS = {
    "tiny": 558_208,
    "tiny_moe": 787_520,
    "125m": 124_275_456,
    "moe-500m": 503_828_736,
    "llama3-8b": 8_030_261_248,
    "dsv3-16b": 15_706_484_224,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_and_share_of_flops(name: str):
    run = get_preset(name)
    check(run)
    model = Transformer.build(run.model, run.data.sequence, device="meta")
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS[name]
    report = bs.quantize_(model, "fp8_blockwise")
    assert report.flop_share >= 0.9
    assert {each.name for each in report.skipped} <= {"head", *(f"layers.{i}.mlp.router" for i in range(30))}


def test_flops_are_six_per_parameter_and_token_and_attention():
    run = get_preset("llama3-8b")
    # 2 * 3 for each weight of a GEMM, and 2 * 2 * 3 * heads * width for each position
    products = 6 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    attention = 12 * 4096 * run.data.sequence * 32
    assert flops_per_token(run.model, run.data.sequence) == pytest.approx(products + attention, rel=1e-6)


def test_flops_of_experts_are_those_that_see_a_token():
    run = get_preset("dsv3-16b")
    model = Transformer.build(run.model, 128, device="meta")
    idle = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name) * (64 - 6) // 64
    norms_and_table = sum(each.numel() for each in model.parameters() if each.dim() < 2) + 102400 * 2048
    products = 6 * (PARAMETERS["dsv3-16b"] - idle - norms_and_table)
    # scores by 192 features of queries and keys, and 128 of values, whatever an attention pads them to
    attention = 27 * 6 * 16 * (192 + 128) * 128
    assert flops_per_token(run.model, 128) == pytest.approx(products + attention, rel=1e-6)


def test_layers_can_be_cut():
    assert with_layers(get_preset("dsv3-16b"), 3).model.layers == 3
    with pytest.raises(UnknownNameError, match="llama3-8b"):
        get_preset("llama-8b")


def test_configs_are_json():
    assert to_dict(get_preset("dsv3-16b"))["model"]["experts"]["top_k"] == 6
    assert to_dict(small(folder=Path("out")))["folder"] == "out"


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (small(steps=0), "steps=0"),
        (small(batch=0), "batch=0"),
        (small(keep=0), "keep=0"),
        (small(save_every=5), "save_every=5 without a folder"),
        (small(resume=True), "resume=True without a folder"),
        (small(model=replace(DENSE, heads=3)), "heads=3"),
        (small(model=replace(DENSE, kv_heads=0)), "kv_heads=0"),
        (small(model=replace(DENSE, heads=32, kv_heads=32)), "1 rotated"),
        (small(model=replace(DENSE, vocabulary=0)), "vocabulary=0"),
        (small(model=replace(SPARSE, experts=replace(SPARSE.experts, top_k=5))), "top_k=5 of 4"),
        (small(model=SPARSE, export=Path("out")), "export"),
        (small(deterministic=True, attention="cudnn"), "deterministic with attention=cudnn"),
        (small(data=replace(small().data, held_out=1.0)), "held_out=1.0"),
        (small(optimizer=OptimizerConfig(rate=float("nan"))), "rate=nan"),
        (small(optimizer=OptimizerConfig(beta1=1.0)), "beta1=1.0"),
        (small(optimizer=OptimizerConfig(eps=0.0)), "eps=0.0"),
        (small(model=replace(DENSE, head_dim=-2)), "head_dim=-2"),
        (small(model=replace(DENSE, rope_theta=0.0)), "rope_theta=0.0"),
        (small(model=replace(DENSE, rope_theta=float("inf"))), "rope_theta=inf"),
        (small(model=replace(DENSE, norm_eps=float("nan"))), "norm_eps=nan"),
        (small(model=replace(SPARSE, latent=replace(SPARSE.latent, rope_dim=-2))), "rope_dim=-2"),
        (small(model=replace(SPARSE, experts=replace(SPARSE.experts, scale=float("nan")))), "scale=nan"),
        (small(model=replace(SPARSE, experts=replace(SPARSE.experts, balance_rate=-1.0))), "balance_rate=-1.0"),
        (small(model=replace(SPARSE, latent=replace(SPARSE.latent, q_rank=-4))), "q_rank=-4"),
        (small(optimizer=OptimizerConfig(schedule="wsd", warmup=0.6, decay=0.6)), "warmup=0.6"),
    ],
)
def test_invalid_configs_are_refused(run, what: str):
    with pytest.raises(OptionError, match=what) as raised:
        check(run)
    assert "Rule: " in str(raised.value)
    assert "Fix: " in str(raised.value)


def test_a_run_does_not_write_into_its_text(tmp_path: Path):
    run = small(data=replace(small().data, source=str(tmp_path)))
    check(run)
    check(replace(run, folder=tmp_path.parent / "out"))
    with pytest.raises(OptionError, match="on the text of"):
        check(replace(run, folder=tmp_path / "out"))


@pytest.mark.parametrize("place", ["folder", "export", "data.cache"])
def test_nothing_is_written_into_the_text(place: str, tmp_path: Path):
    (tmp_path / "text.txt").write_text("words\n" * 100)
    inside, data = tmp_path / "inside", replace(small().data, source=str(tmp_path), cache=tmp_path.parent / "cache")
    changes = {"data": replace(data, cache=inside)} if place == "data.cache" else {"data": data, place: inside}
    with pytest.raises(OptionError, match="would become training text of the next run"):
        check(small(**changes))
    check(small(data=data, folder=tmp_path.parent / "outside"))


def test_the_default_cache_is_not_inside_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(OptionError, match=r"would become training text of the next run.*data\.cache"):
        check(small(data=replace(small().data, source=str(tmp_path))))
