"""Triton casts and `dequantize` without a GPU: every format, rule, layout and axis in the interpreter, byte for byte.

On a GPU the conformance tests use the same kernels, since the registry prefers them there.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import blockscale as bs
from blockscale.formats import FORMATS
from blockscale.hardware import Capability
from support import helpers

pytest.importorskip("triton", reason="needs triton, which is not installed")


def interpreted(script: str, *arguments: str) -> tuple[int, int, int]:
    """(cases, values, mismatches) printed by a script beside this file."""
    return helpers.interpreted(Path(__file__).parent / script, *arguments)


# one format of each kind of scale, with 1-D and 2-D blocks; the others differ only in constants or combine these
KINDS = ("mxfp8_e4m3", "nvfp4", "fp8_128x128")


def together(names: Iterable[str], *kept: str) -> list[Any]:
    """Kept names in one process, which takes seconds to import torch; each of the others in its own, with --all."""
    return [kept, *(pytest.param((name,), marks=pytest.mark.sweep) for name in names if name not in kept)]


@pytest.mark.slow
@pytest.mark.parametrize("names", together(FORMATS, *KINDS), ids=" ".join)
def test_interpreted_casts_equal_the_reference(names: tuple[str, ...], compared: Counter[str]) -> None:
    cases, values, wrong = interpreted("interpreted.py", *names)
    assert (cases >= 30 * len(names), wrong) == (True, 0)
    compared["the reference, Triton casts in the interpreter"] += values


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    together(["mxfp8_e4m3", "mxfp8_e4m3_128x128", "nvfp4", "fp8_1x128", "fp8_128x128"], "nvfp4", "fp8_1x128"),
    ids=" ".join,
)
def test_interpreted_fused_casts_equal_the_reference(names: tuple[str, ...], compared: Counter[str]) -> None:
    """Formats with block scales alone and with a tensor scale; all fusions share their stores."""
    cases, values, wrong = interpreted("interpreted_kernels_fused.py", *names)
    assert (cases >= sum(8 if FORMATS[name].is_2d else 20 for name in names), wrong) == (True, 0)
    compared["the reference, Triton fused casts in the interpreter"] += values


@pytest.mark.slow
@pytest.mark.parametrize("names", together(FORMATS, "fp8_128x128", "mxfp6_e2m3"), ids=" ".join)
def test_interpreted_dequantize_equals_the_reference(names: tuple[str, ...], compared: Counter[str]) -> None:
    cases, values, wrong = interpreted("interpreted_dequantize.py", *names)
    assert (cases >= 18 * len(names), wrong) == (True, 0)
    compared["the reference, Triton dequantize in the interpreter"] += values


def test_the_sanitizer_script_runs() -> None:
    """A few of its cases in the interpreter; the script checks by itself that all cases exist."""
    script = Path(__file__).parents[2] / "tools" / "sanitize.py"
    command = [sys.executable, "-W", "ignore", str(helpers.QUICK_INTERPRETER), str(script), "--only", "mxfp4 permute_"]
    result = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok    mxfp4 permute_both weighted" in result.stdout
    assert "3 cases, 0 wrong" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_on_the_gpu(name: str, axis: int, compared: Counter[str]) -> None:
    """Large enough for many CTAs; every run gives the bytes of the reference."""
    x = torch.randn(1000, 1504, device="cuda") * torch.exp2(torch.randint(-40, 40, (1000, 1), device="cuda"))
    x[7, 9], x[500, 1000] = torch.nan, torch.inf
    for source in (x, x.bfloat16(), x.half(), x.t(), x.view(4, 250, 1504)):
        with bs.use_backend(cast="reference"):
            want = bs.quantize(source, name, axis=axis)
        for _ in range(3):
            with bs.use_backend(cast="triton"):
                got = bs.quantize(source, name, axis=axis)
            assert torch.equal(raw(got.data), raw(want.data))
            assert torch.equal(raw(got.scale), raw(want.scale))
            compared["the reference, Triton casts on the GPU"] += source.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_decoded_bytes_on_the_gpu(name: str, axis: int, compared: Counter[str]) -> None:
    """cvt instructions decode and round here; random bytes hold every code under every kind of scale."""
    spec = FORMATS[name]
    ends = torch.tensor([100, 100, 613, 900], dtype=torch.int32, device="cuda")
    sources: list[tuple[bs.BlockScaled, torch.Tensor | None]] = []
    for shape, layout in itertools.product([(1024, 2048), (1000, 1501), (3, 250, 1504)], spec.layouts):
        q = bs.quantize(torch.randn(shape, device="cuda"), name, axis=axis, scale_layout=layout)
        q.data.view(torch.uint8).random_(0, 256)
        if q.scale.element_size() == 1:
            q.scale.view(torch.uint8).random_(0, 256)
        else:
            q.scale.masked_fill_(torch.rand(q.scale.shape, device="cuda") < 0.1, torch.nan)
        sources += [(q, None), (q.mT, None)]
    x = torch.randn(1000, 1504, device="cuda")
    if not spec.is_2d:
        options: list[dict[str, Any]] = [{}] + [{"hadamard": True}] * bool(spec.hadamard)
        options += [{"amax": "group"}] * (spec.family == "nvfp4")
        for option in options:
            q = bs.quantize(x, name, axis=axis, offs=ends, **option)
            sources += [(q, ends), (q.mT, ends)]
    if spec.hadamard and not spec.is_2d:
        sources += [(bs.quantize(x, name, axis=axis, hadamard=True), None)]
    for (q, offs), dtype in itertools.product(sources, (torch.bfloat16, torch.float16, torch.float32)):
        with bs.use_backend(dequantize="reference"):
            want = bs.dequantize(q, dtype, offs=offs)
        with bs.use_backend(dequantize="triton"):
            got = bs.dequantize(q, dtype, offs=offs)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (q, dtype)
        compared["the reference, Triton dequantize on the GPU"] += want.numel()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int32)


@pytest.mark.gpu
def test_the_registry_prefers_triton_on_a_gpu() -> None:
    x = torch.ones(4, 64, device="cuda")
    assert bs.explain("cast", x, "mxfp4").taken.backend == "triton"
    assert bs.explain("dequantize", bs.quantize(x, "mxfp4")).taken.backend == "triton"


@pytest.mark.parametrize("shape", [(70_000, 1, 32), (3_000_000, 32), (2, 0, 32)])
def test_which_shapes_go_to_triton(shape: tuple[int, ...]) -> None:
    explanation = bs.explain("cast", torch.empty(shape, device="meta"), "mxfp4", on=Capability("cuda", 90))
    assert explanation.taken is not None
    assert explanation.taken.backend == ("reference" if 0 in shape else "triton")
    assert ("takes no empty tensors" in str(explanation)) == (0 in shape)


@pytest.mark.parametrize("x", [torch.empty(4, 1 << 29, device="meta"), torch.empty(9, 1 << 24, device="meta")[:, :64]])
def test_rows_too_far_apart_for_32_bits_go_to_the_reference(x: torch.Tensor) -> None:
    """Offsets in a tile of 256 rows that are 2^23 values apart would exceed 2^31."""
    for source in (x, x.t()):
        explanation = bs.explain("cast", source, "mxfp8_e4m3", on=Capability("cuda", 90))
        assert explanation.taken is not None
        assert explanation.taken.backend == "reference"
        assert "2^23 values apart" in str(explanation)
