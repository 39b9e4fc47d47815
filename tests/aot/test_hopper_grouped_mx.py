"""Machine code of the Hopper m-grouped MXFP8 GEMM, compiled without a GPU, by the checks of the dense one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.cases import LATER
from aot.compiled import CAN_COMPILE, OTHER_PTXAS, compiled_for, report
from blockscale import quantize
from blockscale.formats import get_format
from blockscale.gemm.heuristics import SHARED_BYTES, Tile
from blockscale.grouped import heuristics
from blockscale.grouped.ops import Inputs
from support.helpers import first_of
from support.products import offsets

_hopper_mx = pytest.importorskip("blockscale.grouped._hopper_mx", reason="this Triton has no Gluon for Hopper")
empty_for_tma = pytest.importorskip("blockscale.gemm._hopper").empty_for_tma
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Case:
    tile: Tile
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    accumulate: bool = False
    left: str = "mxfp8_e4m3"
    n: int = 512

    def __str__(self) -> str:
        kind = f"{self.left} @ 128x128, N = {self.n}, {self.tile.label}, {self.dtype}"
        return f"{kind}{' bias' if self.bias else ''}{' accumulate' if self.accumulate else ''}"


_TWO, _ONE, _NARROW = heuristics.MX.tiles
# every tile with its most demanding epilogue, and the common ones
_CASES = [
    Case(_TWO),
    Case(_TWO, bias=True),
    Case(_TWO, torch.float32, accumulate=True),
    Case(_TWO, torch.float16, left="mxfp8_e5m2"),
    Case(_TWO, bias=True, n=511),
    Case(_ONE, bias=True),
    Case(_NARROW, torch.float32, accumulate=True),
]


@pytest.mark.parametrize("case", first_of(_CASES, lambda case: case.bias or case.accumulate), ids=str)
def test_machine_code(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")
    check(case)


# cases with the fewest spare registers
@pytest.mark.parametrize("case", first_of(_CASES[:3], lambda case: case == _CASES[0]), ids=str)
def test_machine_code_by_the_other_ptxas(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas 12.9, which the library takes for Triton 3.6."""
    monkeypatch.setenv("BLOCKSCALE_PTXAS", OTHER_PTXAS)
    check(case)


def check(case: Case) -> None:
    n, fp32_out = case.n, case.dtype == torch.float32
    a, b = quantize(torch.zeros(512, 2048), case.left), quantize(torch.zeros(3, n, 2048), "mxfp8_e4m3_128x128")
    problem = heuristics.Problem(512, n, 2048, 3, False, fp32_out, 132, case.accumulate)
    tile = heuristics.MX.fitted(case.tile, problem)
    out, bias = empty_for_tma((512, n), case.dtype, torch.device("cpu")), torch.zeros(3, n) if case.bias else None
    with compiled_for(90) as kernels:
        inputs = Inputs(a, b, offsets([100, 200, 212]), bias=bias)
        _hopper_mx.launch(inputs, out, tile, accumulate=case.accumulate)
    found = report(kernels[-1])
    # two registers of the 128x128 tile with a bias, with the ptxas of a later Triton
    assert found.spilled <= (8 if LATER and case.bias else 0)
    mmas = tile.warpgroups * tile.k_unroll
    assert found.opcodes["QGMMA"] == mmas, "one MMA per 32 of K"
    assert found.opcodes["WARPGROUP"] == 2 * mmas, "one wait per MMA"
    outputs = mmas * tile.bn // 2  # per thread
    assert outputs <= found.opcodes["FFMA"] <= outputs + 8, "promotion by fused multiply-adds"
    assert found.opcodes["FMUL"] == 4, "scales are multiplied once, by the scaler warps"
    assert ".ftz" not in found.ptx, "scales may be subnormal"
    assert f"f32.{get_format(case.left).element.name}.e4m3" in found.ptx
    # stores of tails from registers: in pairs if rows start at multiples of 16 values
    width = 2 * 8 * case.dtype.itemsize
    stores = tile.warpgroups * tile.bn // 2
    assert found.stores == ({width: stores // 2} if n % 16 == 0 else {width // 2: stores}) or LATER
    assert not found.stray
    estimate = heuristics.MX.shared_bytes(tile, problem)
    assert estimate - 2048 <= found.shared <= estimate <= SHARED_BYTES
