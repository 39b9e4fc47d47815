"""Every golden cast through the public functions, along either axis, byte for byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale import BlockScaled, dequantize, quantize
from blockscale.formats import FORMATS
from blockscale.formats.layout import ceil_div
from support.helpers import bits, codes_of, expand, f32, golden, same_bits, scales_of, u8

CASES = [case for stem in ("mx", "fp8", "nvfp4") for case in golden(stem)]


def label(case: dict) -> str:
    return "-".join(str(case[key]) for key in ("format", "rule", "name") if key in case)


def padded(values: NDArray, shape: tuple[int, int]) -> NDArray:
    """The leading values of a golden case in row-major order, zeros after them."""
    out = np.zeros(math.prod(shape), values.dtype)
    out[: len(values)] = values
    return out.reshape(shape)


def shape_of(case: dict) -> tuple[int, int]:
    if "shape" in case:
        rows, columns = case["shape"]
        return rows, columns
    length = case.get("block", 0) or len(u8(case["codes"]))
    across = FORMATS[case["format"]].block[0]
    return (across, length // across) if length % across == 0 else (1, length)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("case", [case for case in CASES if case["op"] == "quantize"], ids=label)
def test_quantize(case: dict, axis: int, device: torch.device) -> None:
    shape, want = shape_of(case), case["expect"]
    x = torch.from_numpy(padded(f32(case["x"]), shape)).to(device)
    options = {"satfinite": case.get("satfinite", False)}
    if "amax_t" in case:
        options["amax"] = torch.from_numpy(f32(case["amax_t"])).to(device).reshape(())
    q = quantize(x if axis == -1 else x.mT, case["format"], axis=axis, scale_rule=case["rule"], **options)
    checked = 0
    if "scale" in want:
        assert scales_of(q).reshape(-1).tolist() == expand(want["scale"])
        checked += 1
    if "scale_byte" in want:
        assert (scales_of(q).reshape(-1) >> 23).tolist() == expand(want["scale_byte"])
        checked += 1
    if "tensor_scale" in want:
        assert [int(bits(q.global_scale))] == expand(want["tensor_scale"])
        checked += 1
    if "codes" in want:
        same_bits(codes_of(q), padded(u8(want["codes"]), shape))
        checked += 1
    if "all_codes" in want:
        assert sorted(set(codes_of(q).reshape(-1).tolist())) == expand(want["all_codes"])
        checked += 1
    if "packed" in want:
        pack = oracles.pack_fp6 if "fp6" in case["format"] else oracles.pack_fp4
        packed = pack(codes_of(q)).reshape(-1)
        expected = u8(want["packed"])
        same_bits(packed[: len(expected)], expected)
        if "fp4" in case["format"]:
            same_bits(bits(q.operand.data).reshape(-1)[: len(expected)], expected)
        checked += 1
    intermediate = {
        "enc",
        "S_enc",
        "c6",
        "t",
        "enc_b",
    }  # not returned by a cast; see tests/formats/test_scales.py
    assert checked == len(set(want) - intermediate) > 0


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("case", [case for case in CASES if case["op"] == "dequantize"], ids=label)
def test_dequantize(case: dict, axis: int, device: torch.device) -> None:
    spec, (rows, length) = FORMATS[case["format"]], shape_of(case)
    codes = u8(case["codes"]).reshape(rows, length)
    raw = oracles.pack_fp4(codes) if spec.codes_per_byte == 2 else codes
    grid = (ceil_div(rows, spec.block[0]), ceil_div(length, spec.block[1]))
    scale = f32(case["scale"]) if spec.family == "fp8" else u8(case["scale"])
    q = BlockScaled(
        torch.from_numpy(raw).to(device).view(spec.data_dtype),
        torch.from_numpy(scale.reshape(grid)).to(device).view(spec.scale_dtype),
        torch.from_numpy(f32(case["tensor_scale"])).to(device).reshape(()) if spec.family == "nvfp4" else None,
        case["format"],
        -1,
        "plain",
        (rows, length),
    )
    want = case["expect"]
    assert set(want) <= {"values", "bf16"}
    if axis == -2:
        q = q.mT
    values, short = (dequantize(q, dtype) for dtype in (torch.float32, torch.bfloat16))
    got, got_short = (bits(v if axis == -1 else v.mT).reshape(-1) for v in (values, short))
    same_bits(got, f32(want["values"]))
    if "bf16" in want:
        same_bits(got_short, np.array(expand(want["bf16"]), np.uint16))


def test_every_file_is_read() -> None:
    """Every operation in the golden files has a test."""
    stems = {"elements", "fp8", "hadamard", "layouts", "mx", "nvfp4", "stochastic"}
    done = {"encode", "decode", "quantize", "dequantize", "philox", "stream", "sr_bits", "encode_sr", "hadamard"}
    assert {case["op"] for stem in stems for case in golden(stem)} == done | {"pack", "offset"}
