"""`load`: logits of a trained model bit for bit from its exported bytes, and errors that name tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale import checkpoints
from blockscale.autograd import RECIPES
from blockscale.errors import BlockscaleError, CheckpointError, DeviceError
from blockscale.formats import BlockScaled
from blockscale.inference import FrozenReport, QuantizedLinear, QuantizedSwiGLU, SplitLinear, load
from blockscale.inference.stored_activations import stored_activations
from blockscale.models import ModelConfig, Transformer
from blockscale.models.hugging_face import hugging_face_config, hugging_face_tensors, read_config
from blockscale.nn import quantize_
from blockscale.train.export import export_run, exported_weights
from support.small_runs import DENSE, trained

pytest.importorskip("safetensors", reason="checkpoints are written by safetensors")

# q, k and v, and gate and up, begin at multiples of 128 rows
WIDE = ModelConfig(dim=256, layers=1, heads=2, kv_heads=1, hidden=128, vocabulary=64)
NARROW = replace(DENSE, hidden=64)
SYMBOLS = torch.arange(24).view(2, 12) * 7 % 64


def built(recipe: str, config: ModelConfig = NARROW) -> tuple[Transformer, dict[str, bs.CastSpec]]:
    """A model that follows a recipe, and the casts of its weights."""
    model = Transformer.build(config, 16)
    with torch.no_grad():
        for each in model.parameters():  # norms that are not all ones
            each.add_(0.02 * torch.randn_like(each))
    report = quantize_(model, recipe, keep_first=0, keep_last=0)
    fprop = RECIPES[recipe].fprop
    assert fprop is not None
    return model, {f"{layer.name}.weight": fprop.b.spec("fprop_w", None) for layer in report.converted}


def exported(recipe: str, folder: Path, layout: str = "blockscale", config: ModelConfig = NARROW) -> Transformer:
    torch.manual_seed(0)
    model, casts = built(recipe, config)
    about = hugging_face_config(model, torch.float32)
    checkpoints.write(folder, exported_weights(model, casts), layout, config=about)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(SYMBOLS)


KEPT = [
    ("fp8_blockwise", WIDE, "blockscale", "stored"),
    ("fp8_blockwise_pow2", WIDE, "blockscale", "stored"),
    ("fp8_blockwise", WIDE, "deepseek", "stored"),
    ("fp8_blockwise_pow2", WIDE, "deepseek", "stored"),
    ("fp8_blockwise", WIDE, "compressed_tensors", "fp8_1x128"),
    ("mxfp8", NARROW, "blockscale", "stored"),
    ("mxfp8", replace(NARROW, qk_norm=True, tied=True), "deepseek", "stored"),
    ("mxfp8", NARROW, "modelopt", "stored"),
    ("mxfp8", NARROW, "compressed_tensors", "mxfp8_e4m3"),
    ("mxfp8_128x128", WIDE, "blockscale", "stored"),
    ("mxfp6", NARROW, "blockscale", "mxfp6_e2m3"),
    ("mxfp4", NARROW, "blockscale", "mxfp4"),
    ("mxfp4", NARROW, "modelopt", "mxfp4"),
    ("mxfp4", NARROW, "compressed_tensors", "mxfp4"),
    ("nvfp4", NARROW, "blockscale", "nvfp4"),
]


@pytest.mark.parametrize(("recipe", "config", "layout", "activations"), KEPT, ids=lambda each: str(each)[:30])
def test_loaded_models_have_the_logits_of_the_exported(
    recipe: str, config: ModelConfig, layout: str, activations: str, tmp_path: Path
):
    model = exported(recipe, tmp_path, layout, config)
    loaded, report = load(tmp_path, device="cpu", activations=activations)
    assert torch.equal(logits(loaded), logits(model))
    assert not report.skipped or [each.name for each in report.skipped] == ["head"]
    assert [each.name for each in report.converted if "apart" in each.note] == []
    assert {type(each) for each in loaded.modules()} >= {QuantizedLinear, QuantizedSwiGLU}
    assert not any(each.requires_grad for each in loaded.parameters())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "bf16"])
def test_a_run_is_exported_and_loaded(recipe: str, tmp_path: Path):
    """Through training, its checkpoint and the export; nvfp4 multiplies by its activations if asked to."""
    run = trained(recipe, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    loaded, report = load(tmp_path / "out", device="cpu", activations="nvfp4" if recipe == "nvfp4" else "stored")
    assert torch.equal(logits(loaded), logits(run.model))
    assert bool(report.converted) == (recipe != "bf16")
    if recipe == "bf16":
        assert report.warnings == ("the checkpoint has no quantized weights of linear layers",)


@pytest.mark.parametrize(("layout", "exact"), [("modelopt", True), ("compressed_tensors", False)])
def test_nvfp4_of_others_keeps_values(layout: str, exact: bool, tmp_path: Path):
    """Square blocks become rows of the same values. compressed-tensors stores the divisor of the tensor scale, and one
    number in seven is no reciprocal: those move by a unit in the last place."""
    model = exported("nvfp4", tmp_path / "own")
    checkpoints.convert(tmp_path / "own", tmp_path / "other", layout, format="nvfp4", allow_rounding=not exact)
    loaded, _ = load(tmp_path / "other", device="cpu", activations="nvfp4")
    found, want = logits(loaded), logits(model)
    if exact:
        assert torch.equal(found, want)
    else:
        assert (found - want).abs().max() <= 0.02 * want.abs().max()


def test_weights_of_four_bits_are_weight_only_as_stored(tmp_path: Path):
    exported("mxfp4", tmp_path)
    loaded, report = load(tmp_path, device="cpu")
    layers = [each for each in loaded.modules() if isinstance(each, QuantizedLinear)]
    assert layers
    assert all(each.activations is None for each in layers)
    assert report.converted[0].note == "weights mxfp4, activations unquantized"
    assert torch.isfinite(logits(loaded)).all()


def test_weight_only_logits_are_those_of_decoded_weights(tmp_path: Path):
    exported("mxfp4", tmp_path / "four")
    checkpoints.convert(tmp_path / "four", tmp_path / "plain", "unquantized", format="fp32")
    packed, plain = (load(tmp_path / name, device="cpu").model for name in ("four", "plain"))
    a, b = logits(packed), logits(plain)
    assert (a - b).abs().max() < 0.05 * b.abs().max()
    assert packed.layers[0].attention.qkv.weight.dtype == torch.uint8  # pyright: ignore[reportAttributeAccessIssue]


def test_parts_with_other_tensor_scales_stay_apart(tmp_path: Path):
    """Each of q, k and v is multiplied as a layer of its own, by the bytes of the file."""
    model = Transformer.build(NARROW, 16)
    weights = [
        (name, bs.quantize(value, "nvfp4") if "_proj" in name else value.clone())
        for name, value in hugging_face_tensors(model)
    ]
    checkpoints.write(tmp_path, weights, "modelopt", config=hugging_face_config(model, torch.float32))
    loaded, report = load(tmp_path, device="cpu", activations="nvfp4")
    qkv, parts, x = loaded.layers[0].attention.qkv, dict(weights), torch.randn(2, 3, NARROW.dim)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(qkv, SplitLinear)
    assert list(qkv.parts) == ["q_proj", "k_proj", "v_proj"]
    row = bs.quantize(x.view(6, -1), "nvfp4")
    names = (f"model.layers.0.self_attn.{name}.weight" for name in qkv.parts)
    want = torch.cat([bs.scaled_mm(row, parts[name], torch.float32) for name in names], dim=-1)  # pyright: ignore[reportArgumentType]
    assert torch.equal(qkv(x).view(6, -1), want)
    assert report.converted[0].note.endswith("q_proj, k_proj, v_proj kept apart: their tensor scales differ")
    only, _ = load(tmp_path, device="cpu")
    assert torch.isfinite(logits(only)).all()


def test_parts_of_several_kinds_stay_apart(tmp_path: Path):
    """One of gate and up is plain; q, k and v end within blocks of 128 rows."""
    model, _ = built("mxfp8")
    weights: list[tuple[str, Tensor | BlockScaled]] = []
    for name, value in hugging_face_tensors(model):
        kind = "fp8_128x128" if "self_attn" in name else "mxfp8_e4m3" if "up_proj" in name else None
        weights.append((name, bs.quantize(value, kind) if kind and "norm" not in name else value.detach().clone()))
    checkpoints.write(tmp_path, weights, "blockscale", config=hugging_face_config(model, torch.float32))
    loaded, report = load(tmp_path, device="cpu")
    notes = {each.name: each.note for each in report.converted}
    assert "kept apart: rows 32, 16, 16 end within blocks of 128 rows" in notes["layers.0.attention.qkv"]
    assert "kept apart: they are float32, mxfp8_e4m3" in notes["layers.0.mlp.gate_up"]
    assert [each.name for each in report.skipped] == ["layers.0.mlp.down", "layers.1.mlp.down", "head"]
    assert torch.isfinite(logits(loaded)).all()


def test_a_quantized_head_reads_unrounded_inputs(tmp_path: Path):
    model = Transformer.build(NARROW, 16)
    weights = [
        (name, bs.quantize(v, "mxfp8_e4m3") if v.dim() == 2 and "embed" not in name else v.detach().clone())
        for name, v in hugging_face_tensors(model)
    ]
    checkpoints.write(tmp_path, weights, "blockscale", config=hugging_face_config(model, torch.float32))
    loaded, report = load(tmp_path, device="cpu")
    assert loaded.head.activations is None  # pyright: ignore[reportAttributeAccessIssue]
    assert report.converted[-1].note == "weights mxfp8_e4m3, activations unquantized"
    assert not report.skipped


def test_the_report_counts_bytes(tmp_path: Path):
    exported("mxfp4", tmp_path)
    report = load(tmp_path, device="cpu").report
    assert isinstance(report, FrozenReport)
    assert report.bytes_before == sum(each.nbytes for each in checkpoints.open(tmp_path).entries.values())
    table = 2 * 16 * NARROW.head_width // 2 * 4
    assert report.bytes_after == report.bytes_before + table
    assert "8 of 9 linear layers frozen" in str(report)
    assert "not linear: 1 Embedding" in str(report)


def resaved(folder: Path, change: Any) -> None:
    """Write a folder's tensors again after a change."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_damaged_checkpoints_name_file_and_tensor(tmp_path: Path):
    exported("mxfp4", tmp_path)
    original = (tmp_path / "model.safetensors").read_bytes()
    name = "model.layers.1.input_layernorm.weight"

    def fails(change: Any, wrong: str, **options: Any) -> None:
        resaved(tmp_path, change)
        with pytest.raises(CheckpointError, match=wrong):
            load(tmp_path, device="cpu", **options)
        (tmp_path / "model.safetensors").write_bytes(original)

    fails(lambda t: t.pop(name), f"has no {name}", strict=False)
    fails(lambda t: t.update({name: torch.ones(31)}), rf"model\.safetensors: {name} is \(31,\)\. Rule: .* \(32,\)")
    fails(lambda t: t.update({name: torch.ones(32, dtype=torch.int32)}), f"safetensors: {name} is torch.int32")
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    fails(lambda t: t.update(extra), r"model\.safetensors has model\.layers\.0\.self_attn\.q_proj\.bias\. Rule")
    resaved(tmp_path, lambda t: t.update(extra))
    loaded, report = load(tmp_path, device="cpu", strict=False)
    assert report.warnings == ("left out: model.layers.0.self_attn.q_proj.bias",)
    assert torch.isfinite(logits(loaded)).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt_oss"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), ("use_sliding_window", True),
        ("layer_types", ["sliding_attention", "full_attention"]), ("num_hidden_layers", 0), ("hidden_size", "32"),
        ("num_hidden_layers", 10**9), ("head_dim", 15), ("num_key_value_heads", 3), ("rms_norm_eps", None),
        ("rope_parameters", {"rope_type": "yarn"}), ("rope_theta", -1), ("vocab_size", True),
        ("max_position_embeddings", None), ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"factor": 8.0}), ("rope_scaling", {"rope_type": None, "type": "linear", "factor": 4}),
        ("rope_scaling", {"rope_type": ["x"]}), ("rope_scaling", []), ("rope_theta", [1e4]), ("rope_theta", 10**400),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}), ("rope_theta", float("nan")),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}), ("rms_norm_eps", float("inf")),
        ("tie_word_embeddings", "false"), ("tie_word_embeddings", None), ("layer_types", 7),
        ("layer_types", "full_attention"), ("hidden_size", 2**28 + 1), ("max_position_embeddings", 2**24 + 1),
        ("vocab_size", 2**70), ("head_dim", 2**28), ("hidden_size", 1.5),
    ],
)  # fmt: skip
def test_configs_that_the_transformer_does_not_compute(field: str, value: object, tmp_path: Path):
    exported("mxfp4", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json has {field} .* Rule: .* Fix: "):
        load(tmp_path, device="cpu")


def test_configs_of_other_versions_are_read():
    config = replace(NARROW, head_dim=16, rope_theta=5e5, norm_eps=1e-6)
    about = hugging_face_config(Transformer.build(config, 16, device="meta"), torch.float32)
    want = read_config(about, "config.json")
    assert want == (config, 16)
    newer = {key: value for key, value in about.items() if key not in ("rope_theta", "rope_scaling")}
    newer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "layer_types": ["full_attention"] * 2}
    assert read_config(newer, "config.json") == want
    newer["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    assert read_config(newer, "config.json") == want
    assert read_config(about | {"head_dim": None, "mlp_bias": None, "sliding_window": 4096}, "config.json") == want


def test_activations_that_make_no_product_are_refused(tmp_path: Path):
    exported("mxfp4", tmp_path)
    with pytest.raises(BlockscaleError, match="fp8_1x128"):
        load(tmp_path, device="cpu", activations="fp8_1x128")
    with pytest.raises(BlockscaleError, match="did you mean mxfp4"):
        load(tmp_path, device="cpu", activations="mxpf4")


# input_activations of compressed-tensors for FP8 blocks
GROUPS: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}


def checkpoint(layout: str, about: dict[str, Any]) -> checkpoints.Checkpoint:
    """A checkpoint of a config alone."""

    def read(name: str) -> Tensor:
        raise AssertionError(name)

    return checkpoints.Checkpoint(Path("folder"), layout, {"quantization_config": about}, {}, {}, read)


@pytest.mark.parametrize(
    ("layout", "about", "format", "want"),
    [
        ("deepseek", {"scale_fmt": "ue8m0"}, "fp8_128x128", ("fp8_1x128", "pow2")),
        ("deepseek", {"activation_scheme": "dynamic"}, "fp8_128x128", ("fp8_1x128", None)),
        ("deepseek", {}, "mxfp4", None),
        ("modelopt", {"quant_algo": "fp8_pb_wo"}, "fp8_128x128", None),
        ("modelopt", {"quant_algo": "NVFP4"}, "nvfp4", None),
        ("modelopt", {}, "mxfp8_e4m3", ("mxfp8_e4m3", None)),
        ("compressed_tensors", {"config_groups": {"a": {"input_activations": None}}}, "fp8_128x128", None),
        ("compressed_tensors", {"config_groups": {"a": {"input_activations": GROUPS}}}, "fp8_128x128",
         ("fp8_1x128", None)),
        ("compressed_tensors", {"config_groups": {"a": {"input_activations": GROUPS | {"group_size": 32}}}},
         "mxfp8_e4m3", ("mxfp8_e4m3", None)),
        ("compressed_tensors", {"config_groups": {"a": {"input_activations": GROUPS | {"dynamic": "local"}}, "b": {
            "weights": {"num_bits": 4}, "input_activations": {"num_bits": 4}}}}, "fp8_128x128", ("fp8_1x128", None)),
        ("gpt_oss", {}, "mxfp4", None),
        ("blockscale", {}, "mxfp8_e4m3_128x128", ("mxfp8_e4m3", None)),
    ],
)  # fmt: skip
def test_what_checkpoints_say_of_activations(layout: str, about: dict[str, Any], format: str, want: Any):
    found = stored_activations(checkpoint(layout, about), format)
    assert (None if found is None else (found.format, found.scale_rule)) == want


def test_unclear_activations_are_asked_for():
    mixed = {"config_groups": {"a": {"input_activations": None}, "b": {"input_activations": GROUPS}}}
    for layout, about in (("compressed_tensors", mixed), ("deepseek", {"activation_scheme": "static"})):
        with pytest.raises(CheckpointError, match="pass activations=None, or a format"):
            stored_activations(checkpoint(layout, about), "fp8_128x128")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_bits": 4}, {"type": "int"}, {"strategy": "token"}, {"strategy": "tensor", "group_size": None},
        {"dynamic": False}, {"dynamic": 1}, {"group_size": 32}, {"type": ["float"]},
    ],
    ids=str,
)  # fmt: skip
def test_other_casts_of_inputs_are_refused(wrong: dict[str, Any]):
    about = {"config_groups": {"a": {"input_activations": GROUPS | wrong}}}
    with pytest.raises(CheckpointError, match=r"has input_activations \{.* Rule: .* group_size 128.* Fix: pass "):
        stored_activations(checkpoint("compressed_tensors", about), "fp8_128x128")


def test_online_rotations_are_refused(tmp_path: Path):
    exported("mxfp8", tmp_path, "compressed_tensors")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json has transform_config .*hadamard.* Rule: .* Fix: "):
        load(tmp_path, device="cpu", activations=None)


def test_devices_and_folders_are_checked_first(tmp_path: Path):
    exported("mxfp4", tmp_path)
    for device in ("meta", "cuda:99", "tpu", None):
        with pytest.raises(DeviceError, match=rf"device '{device}'\. Rule: .* Fix: "):
            load(tmp_path, device=device)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BlockscaleError, match=r"folder is None\. Rule: .* Fix: "):
        load(None, device="cpu")  # pyright: ignore[reportArgumentType]


def test_stored_frequencies_are_those_of_rope_theta(tmp_path: Path):
    model = exported("mxfp4", tmp_path)
    original, width = (tmp_path / "model.safetensors").read_bytes(), NARROW.head_width
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    right = 1 / NARROW.rope_theta ** (torch.arange(0, width, 2) / width)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        resaved(tmp_path, lambda t, kind=kind: t.update({name: right.to(kind)}))
        loaded, report = load(tmp_path, device="cpu", activations="mxfp4")
        assert torch.equal(logits(loaded), logits(model))
        assert not report.warnings
    (tmp_path / "model.safetensors").write_bytes(original)
    for wrong in (right / 8, right[1:].clone(), right.to(torch.int32)):
        resaved(tmp_path, lambda t, wrong=wrong: t.update({name: wrong}))
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} has others\. Rule: .* Fix: "):
            load(tmp_path, device="cpu", strict=False)
