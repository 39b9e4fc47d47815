"""Triton casts without a GPU: every format, rule, layout and axis in the interpreter, byte for byte.

On a GPU the conformance tests go through the same kernels by themselves, since the table prefers them there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale.formats import FORMATS
from blockscale.hardware import Capability

pytest.importorskip("triton", reason="needs triton, which is not installed")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("program", ["interpreted", "interpreted_kernels_fused"])
def test_interpreted_casts_equal_the_reference(name: str, program: str, compared: Counter[str]) -> None:
    if program != "interpreted" and name not in ("mxfp8_e4m3", "nvfp4", "fp8_1x128", "fp8_128x128"):
        pytest.skip("one format of each family is enough for the fusions: they end in the same writes")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / f"{program}.py"), name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    cases, values, wrong = map(int, result.stdout.split()[:3])
    assert (cases >= 14, wrong) == (True, 0)
    compared["the reference, Triton casts in the interpreter"] += values


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_on_the_gpu(name: str, axis: int, compared: Counter[str]) -> None:
    """Large enough for many programs; every run gives the same bytes, and they are the reference's."""
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


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int32)


@pytest.mark.gpu
def test_the_table_prefers_triton_on_a_gpu() -> None:
    assert bs.explain("cast", torch.ones(4, 64, device="cuda"), "mxfp4").taken.backend == "triton"


@pytest.mark.parametrize("shape", [(70_000, 1, 32), (3_000_000, 32), (2, 0, 32)])
def test_which_shapes_go_to_triton(shape: tuple[int, ...]) -> None:
    explanation = bs.explain("cast", torch.empty(shape, device="meta"), "mxfp4", on=Capability("cuda", 90))
    assert explanation.taken is not None
    assert explanation.taken.backend == ("reference" if 0 in shape else "triton")
    assert ("takes no empty tensors" in str(explanation)) == (0 in shape)
