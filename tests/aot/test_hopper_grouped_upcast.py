"""Machine code of the Hopper grouped GEMM of upcast operands, compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE, OTHER_PTXAS, compiled_for, report
from blockscale import quantize
from blockscale.gemm.heuristics import SHARED_BYTES, Tile
from blockscale.grouped import heuristics
from blockscale.grouped.ops import Inputs
from support.products import offsets

_hopper_upcast = pytest.importorskip("blockscale.grouped._hopper_upcast", reason="this Triton has no Gluon for Hopper")
empty_for_tma = pytest.importorskip("blockscale.gemm._hopper").empty_for_tma
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Case:
    tile: Tile
    dtype: torch.dtype = torch.bfloat16
    k_grouped: bool = False
    bias: bool = False
    accumulate: bool = False

    def __str__(self) -> str:
        kind = f"{'k' if self.k_grouped else 'm'}, {self.tile.label}, {self.dtype}"
        return f"{kind}{' bias' if self.bias else ''}{' accumulate' if self.accumulate else ''}"


_TALL, _SHORT, _ONE = heuristics.UPCAST.tiles
# every tile with its most demanding epilogue, and the common ones
_CASES = [
    Case(_TALL, bias=True),
    Case(_TALL, torch.float32, k_grouped=True),
    Case(_SHORT, torch.float32, k_grouped=True, accumulate=True),
    Case(_SHORT, k_grouped=True, accumulate=True),
    Case(_ONE, bias=True),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_machine_code(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_PTXAS", OTHER_PTXAS)
    n, offs, fp32_out = 512, offsets([100, 200, 212]), case.dtype == torch.float32
    if case.k_grouped:
        a, b = (quantize(torch.zeros(512, size), "nvfp4", axis=-2, offs=offs).mT for size in (256, n))
    else:
        a, b = quantize(torch.zeros(512, 256), "nvfp4"), quantize(torch.zeros(3, n, 256), "nvfp4")
    problem = heuristics.Problem(a.rows, n, a.length, 3, case.k_grouped, fp32_out, 132, case.accumulate)
    tile = heuristics.UPCAST.fitted(case.tile, problem)
    out = empty_for_tma((a.rows * (3 if case.k_grouped else 1), n), case.dtype, torch.device("cpu"))
    with compiled_for(90) as kernels:
        bias = torch.zeros(3, n) if case.bias else None
        _hopper_upcast.launch(Inputs(a, b, offs, bias=bias), out, tile, accumulate=case.accumulate)
    found = report(kernels[-1])
    assert found.spilled == 0
    assert found.opcodes["HGMMA"] == tile.warpgroups * tile.m_subtiles * 4, "one MMA per 16 of K in a stage"
    assert found.opcodes["FFMA"] == 0, "tensor scales are multiplied and rounded before any addition"
    assert not found.stray
    estimate = heuristics.UPCAST.shared_bytes(tile, problem)
    assert found.shared <= estimate <= SHARED_BYTES
