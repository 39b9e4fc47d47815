"""The machine code of Hopper's MXFP8 product, compiled without a GPU: no spills, an instruction of the tensor cores for
each 32 of K, sums that are fused and little beside them, memory that fits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE, OTHER_PTXAS, compiled_for, report
from blockscale import quantize
from blockscale.formats import get_format
from blockscale.gemm import heuristics, heuristics_mx

_hopper_mx = pytest.importorskip("blockscale.gemm._hopper_mx", reason="this Triton has no Gluon for Hopper")
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Case:
    """weight_block: rows of b that share scales."""

    tile: heuristics.Tile
    weight_block: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    accumulate: bool = False
    formats: tuple[str, str] = ("mxfp8_e4m3", "mxfp8_e4m3")

    def __str__(self) -> str:
        kind = f"{self.tile.label}, run {self.tile.run}, weight block {self.weight_block}, {self.dtype}"
        return f"{kind}, {'@'.join(self.formats)}{' bias' if self.bias else ''}{' add' if self.accumulate else ''}"


_EVERY_TILE = [
    *(Case(tile, 128, bias=True) for tile in heuristics_mx.TILES),
    *(Case(tile, 1, bias=True) for tile in heuristics_mx.VECTOR_TILES),
]
_FIRST, _LAST = heuristics_mx.TILES[0], heuristics_mx.TILES[-1]
_OTHERS = [
    *(Case(_FIRST, block, torch.float32, accumulate=True) for block in (128, 1)),
    *(Case(_FIRST, block, torch.float16) for block in (128, 1)),
    *(Case(tile, 128, torch.float32, accumulate=True) for tile in heuristics_mx.TILES[1:3]),
    Case(_LAST, 1, formats=("mxfp8_e5m2", "mxfp8_e4m3")),
    Case(_LAST, 1, formats=("mxfp8_e4m3", "mxfp8_e5m2")),
    Case(_LAST, 128, formats=("mxfp8_e5m2", "mxfp8_e5m2")),
    Case(_LAST, 128, formats=("mxfp8_e5m2", "mxfp8_e4m3_128x128")),
]


@pytest.mark.parametrize("case", [*_EVERY_TILE, *_OTHERS], ids=str)
def test_machine_code(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")
    check(case)


# those with the fewest registers to spare
@pytest.mark.parametrize("case", [*(Case(tile, 128) for tile in heuristics_mx.TILES[:2]), Case(_FIRST, 1)], ids=str)
def test_machine_code_by_the_other_assembler(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of CUDA 12.9, which the library takes for Triton 3.6."""
    monkeypatch.setenv("BLOCKSCALE_PTXAS", OTHER_PTXAS)
    check(case)


def check(case: Case) -> None:
    tile, k = case.tile, 2048
    problem = heuristics.Problem(512, 512, k, case.weight_block == 1, case.dtype == torch.float32, 132)
    plan = heuristics_mx.plan_for(tile, problem)
    a, b = (quantize(torch.zeros(512, k), name) for name in case.formats)
    out, bias = torch.empty(512, 512, dtype=case.dtype), torch.zeros(512) if case.bias else None
    with compiled_for(90) as kernels:
        _hopper_mx.launch(
            a, b, out, bias, accumulate=case.accumulate, plan=plan, weight_block=case.weight_block
        )  # fmt: skip
    found = report(kernels[0])
    assert found.spilled == 0
    products = tile.groups * tile.run
    assert found.opcodes["QGMMA"] == products, "one for each 32 of K"
    # the assembler waits for every instruction of a product where it loses sight of one that is under way
    assert found.opcodes["WARPGROUP"] == 2 * products, "products are waited for once"
    outputs = products * tile.bn // 2  # of a thread
    assert outputs <= found.opcodes["FFMA"] <= outputs + 8, "sums are fused multiply-adds"
    # the scalers' own: of each row they hold
    scalings = outputs if case.weight_block == 1 else 4 * tile.bm // 64
    assert found.opcodes["FMUL"] <= scalings + 8, "scales are multiplied once, by the scalers where they can"
    assert ".ftz" not in found.ptx, "scales may be subnormal"
    names = ".".join(get_format(name).element.name for name in case.formats)
    assert f"f32.{names}" in found.ptx
    assert not found.stray
    estimate = heuristics_mx.shared_bytes(plan.tile, problem)
    assert estimate - 2048 <= found.shared <= estimate <= heuristics.SHARED_BYTES
