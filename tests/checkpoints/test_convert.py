"""Conversions: every weight has the values that it had, or is said to be rounded, and rounding has to be allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import checkpoints
from blockscale.checkpoints import Checkpoint
from blockscale.errors import CheckpointError, UnknownNameError
from blockscale.formats import BlockScaled
from blockscale.formats.decoding import decode_operand
from support.checkpoints import check_equal, random, weights_of, write_raw

pytest.importorskip("safetensors", reason="checkpoints are written by safetensors")

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
P = "model.layers.0.mlp"


def converted(tmp_path: Path, weights: dict[str, Tensor | BlockScaled], source: str, target: str, **options: object):
    """Report and result of a conversion."""
    checkpoints.write(tmp_path / "source", weights.items(), source, config={"model_type": "llama"})
    report = checkpoints.convert(tmp_path / "source", tmp_path / "target", target, **options)  # pyright: ignore[reportArgumentType]
    found = checkpoints.open(tmp_path / "target")
    assert found.config["model_type"] == "llama"
    return report, found


def values(weight: Tensor | BlockScaled) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else decode_operand(weight)


def labels(report: checkpoints.ConvertReport) -> dict[str, int]:
    return {
        label: report.count(label) for label in ("kept", "re-expressed", "rounded", "left out") if report.count(label)
    }


@pytest.mark.parametrize(
    "layout", ["deepseek", "gpt_oss", "compressed_tensors", "modelopt", "blockscale", "unquantized"]
)
def test_the_same_layout_keeps_every_byte(layout: str, tmp_path: Path):
    report, found = converted(tmp_path, weights_of(layout), layout, layout)
    before = checkpoints.open(tmp_path / "source")
    assert labels(report) == {"kept": len(before)}
    assert found.stored.keys() == before.stored.keys()
    for name in before:
        for part, value in before.raw(name).items():
            got = found.raw(name)[part]
            assert got.dtype == value.dtype
            assert got.shape == value.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    assert found.config == before.config


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir()))
def test_goldens_are_copied_and_stored_as_our_own(case: str, tmp_path: Path):
    source = next((GOLDEN / case).glob("*.gguf"), GOLDEN / case)
    before = checkpoints.open(source)
    targets = ["blockscale"] if before.layout == "gguf" else ["blockscale", before.layout]
    for target in targets:
        report = checkpoints.convert(source, tmp_path / target, target)
        found = checkpoints.open(tmp_path / target)
        assert not report.count("left out")
        for row in report.rows:
            if row.why != "the nearest reciprocal":  # of a scale of activations, which divides there
                old = row.name.replace(".k_scale", ".k_proj.k_scale").replace(".v_scale", ".v_proj.v_scale")
                check_equal(found[row.name], before[old if row.name not in before else row.name])
                assert row.label != "rounded"
    if before.layout != "gguf":
        back = tmp_path / "back"
        checkpoints.convert(
            tmp_path / "blockscale", back, before.layout, allow_rounding=case == "compressed_tensors_nvfp4"
        )
        assert set(checkpoints.open(back)) == set(before)
        for name, want in before.items():
            got = checkpoints.open(back)[name]
            if isinstance(want, BlockScaled):
                assert torch.equal(values(got), values(want)), name


@pytest.mark.parametrize(
    ("before", "after", "layout", "rule"),
    [
        ("mxfp4", "fp8_128x128", "deepseek", None),
        ("mxfp4", "mxfp8_e4m3", "deepseek", None),
        ("mxfp8_e4m3_128x128", "fp8_128x128", "deepseek", None),
        ("mxfp8_e4m3_128x128", "mxfp8_e4m3", "modelopt", None),
        ("fp8_128x128", "mxfp8_e4m3", "compressed_tensors", "pow2"),
        ("fp8_128x128", "mxfp8_e4m3_128x128", "blockscale", "pow2"),
        ("nvfp4_16x16", "nvfp4", "modelopt", None),
        ("mxfp6_e2m3", "mxfp8_e4m3", "deepseek", None),
        ("mxfp4", "bf16", "unquantized", None),
        ("mxfp8_e4m3", "bf16", "unquantized", None),
        ("nvfp4", "fp32", "unquantized", None),
    ],
)
def test_exact_conversions(before: str, after: str, layout: str, rule: str | None, tmp_path: Path):
    x = torch.randn(192, 288, generator=torch.Generator().manual_seed(0)).mul(0.02)
    q = bs.quantize(x, bs.CastSpec(before, scale_rule=rule))
    report, found = converted(tmp_path, {"x.up_proj.weight": q}, "blockscale", layout, format=after)
    assert labels(report) == {"re-expressed": 1}
    got = found["x.up_proj.weight"]
    assert (got.format if isinstance(got, BlockScaled) else after) == after
    assert torch.equal(values(got), values(q))


def test_the_nearest_format_is_taken_without_one(tmp_path: Path):
    """Square blocks and others that the layout lacks, where one of its own holds them."""
    weights = {
        f"{at}.weight": bs.quantize(random(128, 128), name) for at, name in enumerate(("mxfp8_e4m3_128x128", "mxfp4"))
    }
    report, _ = converted(tmp_path, weights, "blockscale", "modelopt")
    assert {row.after for row in report.rows} == {"mxfp8_e4m3", "mxfp4"}
    assert not report.count("rounded")


def test_rounding_is_refused_and_leaves_nothing(tmp_path: Path):
    weights = {"x.weight": bs.quantize(random(128, 128), "nvfp4")}
    with pytest.raises(CheckpointError, match=r"x\.weight is nvfp4 \(128, 128\), which mxfp4 holds only rounded"):
        converted(tmp_path, weights, "blockscale", "deepseek", format="mxfp4")
    assert not (tmp_path / "target").exists()
    with pytest.raises(CheckpointError, match="no format of deepseek holds exactly"):
        checkpoints.convert(tmp_path / "source", tmp_path / "target", "deepseek")
    with pytest.raises(CheckpointError, match=r"'nvfp4' in layout 'deepseek'\. Rule: deepseek holds"):
        checkpoints.convert(tmp_path / "source", tmp_path / "target", "deepseek", format="nvfp4")
    with pytest.raises(UnknownNameError, match="mxfp4"):
        checkpoints.convert(tmp_path / "source", tmp_path / "target", "deepseek", format="mxpf4")
    report = checkpoints.convert(
        tmp_path / "source", tmp_path / "target", "deepseek", format="mxfp4", allow_rounding=True
    )
    assert labels(report) == {"rounded": 1}
    assert "nvfp4 -> mxfp4" in str(report)


def test_a_spread_of_scales_that_fp8_tiles_do_not_hold(tmp_path: Path):
    """MXFP4 is FP8 with powers of two if scales in a tile spread by at most 2^14."""
    for spread in (14, 15):
        x = torch.full((128, 128), 6.0)
        x[64] = 6.0 * 2.0**-spread
        x[64, 0] = 0.5 * 2.0**-spread
        weights = {"x.weight": bs.quantize(x, "mxfp4")}
        folder = tmp_path / str(spread)
        if spread == 14:
            report, found = converted(folder, weights, "blockscale", "deepseek", format="fp8_128x128")
            assert torch.equal(values(found["x.weight"]), values(weights["x.weight"]))
            assert labels(report) == {"re-expressed": 1}
        else:
            with pytest.raises(CheckpointError, match="holds only rounded"):
                converted(folder, weights, "blockscale", "deepseek", format="fp8_128x128")


def test_unquantized_layers_are_cast_on_demand(tmp_path: Path):
    weights: dict[str, Tensor | BlockScaled] = {
        name: random(64, 64).bfloat16()
        for name in ("model.embed_tokens.weight", f"{P}.up_proj.weight", f"{P}.gate.weight", "lm_head.weight")
    }
    weights["model.norm.weight"] = torch.ones(64).bfloat16()
    report, _ = converted(tmp_path / "a", weights, "unquantized", "deepseek", format="fp8_128x128")
    assert labels(report) == {"kept": 5}
    report, found = converted(
        tmp_path / "b", weights, "unquantized", "deepseek", format="fp8_128x128", allow_rounding=True
    )
    assert [row.name for row in report.rows if row.label == "rounded"] == [f"{P}.up_proj.weight"]
    check_equal(found[f"{P}.up_proj.weight"], bs.quantize(weights[f"{P}.up_proj.weight"], "fp8_128x128"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("target", ["compressed_tensors", "modelopt", "deepseek"])
def test_experts_of_gpt_oss_one_by_one_and_back(target: str, tmp_path: Path):
    """Rows of gate and up alternate in one tensor."""
    weights = weights_of("gpt_oss")
    report, found = converted(tmp_path, weights, "gpt_oss", target)
    name = "model.layers.0.mlp.experts"
    whole = values(weights[f"{name}.gate_up_proj"])
    for at in range(3):
        assert torch.equal(values(found[f"{name}.{at}.gate_proj.weight"]), whole[at, ::2])
        assert torch.equal(values(found[f"{name}.{at}.up_proj.weight"]), whole[at, 1::2])
        assert torch.equal(values(found[f"{name}.{at}.down_proj.weight"]), values(weights[f"{name}.down_proj"])[at])
        assert torch.equal(
            values(found[f"{name}.{at}.up_proj.bias"]), values(weights[f"{name}.gate_up_proj_bias"])[at, 1::2]
        )
    assert labels(report) == {"kept": 2, "re-expressed": 3 * 5}
    checkpoints.convert(tmp_path / "target", tmp_path / "back", "gpt_oss")
    back = checkpoints.open(tmp_path / "back")
    assert set(back) == set(weights)
    for each, want in weights.items():
        check_equal(back[each], want)


def test_unquantized_experts_of_gpt_oss_have_inputs_first(tmp_path: Path):
    weights, name = weights_of("gpt_oss"), "model.layers.0.mlp.experts.gate_up_proj"
    checkpoints.write(tmp_path / "source", weights.items(), "gpt_oss", config={"model_type": "gpt_oss"})
    checkpoints.convert(tmp_path / "source", tmp_path / "plain", "unquantized")
    plain = checkpoints.open(tmp_path / "plain")[name]
    assert isinstance(plain, Tensor)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(values(plain.mT), values(weights[name]))
    checkpoints.convert(tmp_path / "plain", tmp_path / "back", "gpt_oss", format="mxfp4", allow_rounding=True)
    assert torch.equal(values(checkpoints.open(tmp_path / "back")[name]), values(weights[name]))


def test_experts_that_are_not_all_there_are_named(tmp_path: Path):
    weights: dict[str, Tensor | BlockScaled] = {
        f"{P}.experts.{at}.{kind}_proj.weight": bs.quantize(random(32, 32), "mxfp4")
        for at, kind in ((0, "gate"), (0, "up"), (2, "gate"), (2, "up"))
    }
    with pytest.raises(CheckpointError, match=r"experts\.1\.gate_proj is missing"):
        converted(tmp_path, weights, "deepseek", "gpt_oss")


def with_activations(folder: Path) -> Checkpoint:
    """A W4A4 module of compressed-tensors."""
    weights = {
        "up_proj.weight": bs.quantize(random(64, 64), "nvfp4"),
        "up_proj.input_global_scale": torch.tensor([3.0]),
    }
    weights["up_proj.weight"] = replace(weights["up_proj.weight"], global_scale=torch.tensor(0.25))  # pyright: ignore[reportArgumentType]
    checkpoints.write(folder, weights.items(), "compressed_tensors")
    return checkpoints.open(folder)


def test_scales_of_activations_are_inverted_or_left_out(tmp_path: Path):
    before = with_activations(tmp_path / "source")
    report = checkpoints.convert(before.path, tmp_path / "modelopt", "modelopt")
    found = checkpoints.open(tmp_path / "modelopt")
    assert torch.equal(found["up_proj.input_scale"], torch.tensor(1 / 3))  # pyright: ignore[reportArgumentType]
    assert torch.equal(values(found["up_proj.weight"]), values(before["up_proj.weight"]))
    assert not report.count("left out")
    for target, format in (("unquantized", "fp32"), ("compressed_tensors", "mxfp4")):
        report = checkpoints.convert(before.path, tmp_path / target, target, format=format, allow_rounding=True)
        assert [row.name for row in report.rows if row.label == "left out"] == ["up_proj.input_global_scale"]
        assert set(checkpoints.open(tmp_path / target)) == {"up_proj.weight"}


def test_a_tensor_scale_moves_only_on_demand(tmp_path: Path):
    """1.5 + 2^-23 is no reciprocal of an fp32 number."""
    factors = [torch.tensor(1.5 + at * 2.0**-23) for at in range(64)]
    factor = next(each for each in factors if not torch.equal(1 / (1 / each), each))
    q = replace(bs.quantize(random(64, 64), "nvfp4"), global_scale=factor)
    with pytest.raises(CheckpointError, match="no reciprocal"):
        converted(tmp_path, {"x.weight": q}, "modelopt", "compressed_tensors")
    report = checkpoints.convert(tmp_path / "source", tmp_path / "new", "compressed_tensors", allow_rounding=True)
    assert [row.why for row in report.rows] == ["tensor scale moved by one unit in the last place"]
    found = checkpoints.open(tmp_path / "new")["x.weight"]
    assert isinstance(found, BlockScaled)
    assert found.global_scale is not None
    assert 0 < abs(found.global_scale.item() - factor.item()) <= 2.0**-22


def test_progress_and_report(tmp_path: Path):
    checkpoints.write(tmp_path / "source", weights_of("deepseek").items(), "deepseek")
    seen: list[tuple[int, int]] = []
    checkpoints.convert(tmp_path / "source", tmp_path / "new", "blockscale", progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) == 5
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert set(config["quantization_config"]["formats"]) == {"fp8_128x128", "mxfp4"}
    seen.clear()
    checkpoints.write(tmp_path / "experts", weights_of("gpt_oss").items(), "gpt_oss")
    checkpoints.convert(tmp_path / "experts", tmp_path / "split", "modelopt", progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1]


def test_unquantized_experts_one_by_one_are_merged(tmp_path: Path):
    """Rows are outputs there, and inputs come first in one unquantized tensor."""
    weights: dict[str, Tensor | BlockScaled] = {
        f"m.experts.{at}.{kind}_proj.weight": random(
            96 if kind == "down" else 128, 128 if kind == "down" else 96, seed=at
        )
        for at in range(2)
        for kind in ("gate", "up", "down")
    }
    _, found = converted(tmp_path / "a", weights, "unquantized", "gpt_oss", format="mxfp4", allow_rounding=True)
    for at in range(2):
        for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
            want = bs.quantize(weights[f"m.experts.{at}.{part}_proj.weight"], "mxfp4")  # pyright: ignore[reportArgumentType]
            assert torch.equal(values(found["m.experts.gate_up_proj"])[at, rows], values(want))
        want = bs.quantize(weights[f"m.experts.{at}.down_proj.weight"], "mxfp4")  # pyright: ignore[reportArgumentType]
        assert torch.equal(values(found["m.experts.down_proj"])[at], values(want))
    _, plain = converted(tmp_path / "b", weights, "unquantized", "gpt_oss")
    assert torch.equal(values(plain["m.experts.down_proj"])[1].mT, values(weights["m.experts.1.down_proj.weight"]))


def test_experts_by_two_routes_are_the_same(tmp_path: Path):
    weights, config = weights_of("gpt_oss"), {"model_type": "gpt_oss"}
    checkpoints.write(tmp_path / "source", weights.items(), "gpt_oss", config=config)
    checkpoints.convert(tmp_path / "source", tmp_path / "direct", "unquantized")
    checkpoints.convert(tmp_path / "source", tmp_path / "own", "blockscale")
    checkpoints.convert(tmp_path / "own", tmp_path / "by own", "unquantized")
    direct, other = checkpoints.open(tmp_path / "direct"), checkpoints.open(tmp_path / "by own")
    assert set(direct) == set(other)
    for name in direct:
        check_equal(other[name], direct[name])


def test_experts_of_several_formats_are_refused(tmp_path: Path):
    weights: dict[str, Tensor | BlockScaled] = {
        f"m.experts.{at}.down_proj.weight": bs.quantize(random(64, 64), format)
        for at, format in enumerate(("mxfp8_e4m3", "mxfp8_e5m2"))
    }
    with pytest.raises(CheckpointError, match=r"experts of mxfp8_e4m3 .* in one tensor"):
        converted(tmp_path, weights, "blockscale", "gpt_oss", format="mxfp4", allow_rounding=True)


@pytest.mark.parametrize("factor", [1e-40, 0.0])
def test_a_tensor_scale_without_a_divisor_is_refused(factor: float, tmp_path: Path):
    q = replace(bs.quantize(random(64, 64), "nvfp4"), global_scale=torch.tensor(factor))
    with pytest.raises(CheckpointError, match="no reciprocal"):
        converted(tmp_path, {"x.weight": q}, "modelopt", "compressed_tensors", allow_rounding=True)


def test_a_layer_that_a_layout_cannot_hold_stays_unquantized(tmp_path: Path):
    weights: dict[str, Tensor | BlockScaled] = {"a.weight": random(64, 80), "b.weight": random(64, 64)}
    weights["conv.weight"] = torch.ones(64, 1, 4)
    report, _ = converted(tmp_path, weights, "unquantized", "modelopt", format="mxfp4", allow_rounding=True)
    assert [row.name for row in report.rows if row.label == "rounded"] == ["b.weight"]


def test_what_a_config_says_of_quantization_is_replaced(tmp_path: Path):
    q = bs.quantize(random(64, 64), "mxfp4")
    nested = {"text_config": {"quantization_config": 1, "hidden_size": 7}, "compression_config": 2}
    checkpoints.write(tmp_path / "source", {"x.weight": q}.items(), "compressed_tensors", config=nested)
    assert checkpoints.open(tmp_path / "source").config["text_config"] == {"hidden_size": 7}
    weights = {f"{at}.weight": bs.quantize(random(64, 64), each) for at, each in enumerate(("mxfp4", "nvfp4"))}
    checkpoints.write(tmp_path / "mixed", weights.items(), "modelopt")
    about = checkpoints.open(tmp_path / "mixed").config["quantization_config"]
    assert set(about["quantized_layers"]) == {"0", "1"}


def test_fp8_blocks_of_modelopt_are_copied(tmp_path: Path):
    q = bs.quantize(random(160, 320), "fp8_128x128")
    tensors = {"up.weight": q.data, "up.weight_scale": q.plain_scale()[:, None, :, None]}
    about = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}}
    write_raw(tmp_path / "source", tensors, about)
    report = checkpoints.convert(tmp_path / "source", tmp_path / "new", "modelopt")
    assert labels(report) == {"kept": 1}
    check_equal(checkpoints.open(tmp_path / "new")["up.weight"], q)


def test_a_weight_of_one_row(tmp_path: Path):
    q = bs.quantize(torch.ones(1, 32), "mxfp8_e4m3")
    report, found = converted(tmp_path, {"x": q}, "blockscale", "blockscale", format="fp8_1x128")
    assert labels(report) == {"re-expressed": 1}
    assert torch.equal(values(found["x"]), torch.ones(1, 32))
