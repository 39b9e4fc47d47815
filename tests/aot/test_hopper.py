"""The machine code of Hopper's product, compiled without a GPU: no spills, products by the tensor cores, memory that
fits and that the model of `heuristics` knows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE, OTHER_PTXAS, compiled_for, report
from blockscale import quantize
from blockscale.gemm import heuristics

_hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]

# output, bias, accumulate: the largest tile with each of them, the others with one
_EPILOGUES = ((torch.bfloat16, True, False), (torch.float32, False, True), (torch.float16, False, False))
_CASES = [
    (tile, weight, epilogue)
    for weight in ("fp8_128x128", "fp8_1x128")
    for number, tile in enumerate(heuristics.TILES)
    for epilogue in _EPILOGUES[: 3 if number == 0 else 1]
]


@pytest.mark.parametrize(("tile", "weight", "epilogue"), _CASES, ids=str)
def test_machine_code(
    tile: heuristics.Tile, weight: str, epilogue: tuple[torch.dtype, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")
    check(tile, weight, epilogue)


# those with the fewest registers to spare
@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize("tile", heuristics.TILES[:3], ids=str)
def test_machine_code_by_the_other_assembler(
    tile: heuristics.Tile, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of CUDA 12.9, which the library takes for Triton 3.6."""
    monkeypatch.setenv("BLOCKSCALE_PTXAS", OTHER_PTXAS)
    check(tile, weight, _EPILOGUES[1])


def check(tile: heuristics.Tile, weight: str, epilogue: tuple[torch.dtype, bool, bool]) -> None:
    dtype, has_bias, accumulate = epilogue
    problem = heuristics.Problem(512, 512, 512, weight == "fp8_1x128", dtype == torch.float32, 132)
    tile = heuristics.fitted(tile, problem)
    a, b = quantize(torch.zeros(512, 512), "fp8_1x128"), quantize(torch.zeros(512, 512), weight)
    out, bias = torch.empty(512, 512, dtype=dtype), torch.zeros(512) if has_bias else None
    with compiled_for(90) as kernels:
        _hopper.launch(a, b, out, bias, accumulate=accumulate, tile=tile)
    found = report(kernels[0])
    assert found.spilled == 0
    # per wave of a group: 128 of K by instructions of 32
    assert found.opcodes["QGMMA"] == 4 * tile.groups * tile.waves
    assert found.opcodes["FFMA"] >= tile.groups * tile.waves * tile.bn // 2, "sums are fused multiply-adds"
    assert not found.stray
    estimate = heuristics.shared_bytes(tile, problem)
    assert estimate - 2048 <= found.shared <= estimate <= heuristics.SHARED_BYTES
