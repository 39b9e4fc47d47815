"""Triton GEMM without a GPU: every legal pair in the interpreter, and its machine code for every architecture.

On a GPU the tests of all registered kernels run it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE, compiled_for, report
from blockscale import quantize
from blockscale.gemm import _triton
from support import helpers


@pytest.mark.slow
def test_interpreted_products_are_exact(compared: Counter[str]) -> None:
    cases, values, wrong = helpers.interpreted(Path(__file__).parent / "interpreted.py")
    assert (cases >= 70, wrong) == (True, 0)
    compared["exact products, Triton in the interpreter"] += values


# MMA instruction: FP8 if the GPU has it, else 16 bits; sm_90 and sm_100 have their own
_FP8 = {80: "HMMA", 89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"}
_UPCAST = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
_CASES = [(arch, "fp8_1x128", "fp8_128x128", code) for arch, code in _FP8.items()]
_CASES += [(arch, name, name, _UPCAST[arch]) for arch in (80, 90, 100) for name in ("mxfp8_e4m3", "nvfp4")]
_CASES += [(90, "mxfp4", "mxfp4", "HGMMA"), (90, "fp8_1x128", "fp8_1x128", "QGMMA")]


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET")
@pytest.mark.parametrize(("arch", "first", "second", "code"), _CASES)
def test_machine_code(arch: int, first: str, second: str, code: str) -> None:
    a, b = quantize(torch.zeros(512, 1024), first), quantize(torch.zeros(512, 1024), second)
    with compiled_for(arch) as kernels:
        _triton.scaled_mm(a, b, torch.empty(512, 512), bias=None, accumulate=False)
    found = report(kernels[0])
    assert found.spilled == 0
    assert found.opcodes[code] > 0
    assert not found.stray
