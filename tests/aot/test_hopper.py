"""Machine code of the Hopper GEMM, compiled without a GPU: no spills, the expected MMAs and waits, and the shared
memory that `heuristics` predicts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.cases import LATER
from aot.compiled import CAN_COMPILE, OTHER_PTXAS, Report, compiled_for, released_stages, report
from blockscale import quantize
from blockscale.gemm import heuristics
from support.helpers import first_of

_hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
_rows = pytest.importorskip("blockscale.gemm._hopper_rows", reason="this Triton has no Gluon for Hopper")
empty_for_tma = pytest.importorskip("blockscale.gemm._hopper").empty_for_tma
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]

_Epilogue = tuple[torch.dtype, bool, bool, bool]
# output, bias, accumulate, stream-K
_EPILOGUES = (
    (torch.bfloat16, True, False, False),
    (torch.bfloat16, False, False, True),
    (torch.float32, False, True, False),
    (torch.float32, False, True, True),
    (torch.float16, False, False, False),
    (torch.bfloat16, False, True, False),
)
# Every tile with a bias, in the order of TILES; stream-K for each count of warpgroups and m_subtiles; the tile with the
# fewest registers with all epilogues but fp16, which differs from bf16 in one instruction.
_CASES = [
    (tile, weight, _EPILOGUES[number])
    for weight in ("fp8_128x128", "fp8_1x128")
    for tile, numbers in zip(heuristics.TILES, ((0, 1), (0, 1, 2, 3, 5), (0, 1), (0,), (0, 1), (0,)), strict=True)
    for number in numbers
] + [(heuristics.TILES[1], "fp8_128x128", _EPILOGUES[4])]
# Bytes by weight and stream-K: values hoisted out of the copies of the consumer, stored and loaded once per launch.
_MAY_SPILL = {("fp8_1x128", True): 32, ("fp8_128x128", True): 80 if LATER else 0}


def _is_first(case: tuple[heuristics.Tile, str, _Epilogue]) -> bool:
    """All epilogues of the tile with the fewest registers, the other tiles with a bias, and one of wgrad's."""
    tile, weight, epilogue = case
    scarce, biased = tile is heuristics.TILES[1], epilogue is _EPILOGUES[0]
    return scarce and biased if weight == "fp8_1x128" else scarce or biased


@pytest.mark.parametrize(("tile", "weight", "epilogue"), first_of(_CASES, _is_first), ids=str)
def test_machine_code(tile: heuristics.Tile, weight: str, epilogue: _Epilogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")
    check(tile, weight, epilogue)


# tiles with the fewest spare registers
@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize(
    "tile", first_of(heuristics.TILES[:3], lambda tile: tile is heuristics.TILES[1]), ids=lambda tile: tile.label
)
def test_machine_code_by_the_other_ptxas(tile: heuristics.Tile, weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas 12.9, which the library takes for Triton 3.6."""
    monkeypatch.setenv("BLOCKSCALE_PTXAS", OTHER_PTXAS)
    check(tile, weight, _EPILOGUES[0 if tile.m_subtiles > 1 else 2])


# an odd N is another kernel, since bias loads are narrower, and so is N = 1
@pytest.mark.parametrize("weight", first_of(["fp8_128x128", "fp8_1x128"], lambda weight: weight == "fp8_128x128"))
@pytest.mark.parametrize(
    ("tile", "n"),
    first_of(
        [(heuristics.TILES[1], 1), (heuristics.TILES[1], 511), (heuristics.TILES[2], 511)], lambda case: case[1] == 511
    ),
)
def test_odd_sizes(tile: heuristics.Tile, weight: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")
    check(tile, weight, _EPILOGUES[0], n=n, k=2047)


def check(tile: heuristics.Tile, weight: str, epilogue: _Epilogue, *, n: int = 512, k: int = 2048) -> Report:
    dtype, has_bias, accumulate, stream_k = epilogue
    problem = heuristics.Problem(512, n, k, weight == "fp8_1x128", dtype == torch.float32, 132, accumulate)
    plan = heuristics.stream_k_plan(tile, problem) if stream_k else heuristics.data_parallel_plan(tile, problem)
    assert plan is not None
    a, b = quantize(torch.zeros(512, k), "fp8_1x128"), quantize(torch.zeros(n, k), weight)
    out, bias = empty_for_tma((512, n), dtype, torch.device("cpu")), torch.zeros(n) if has_bias else None
    with compiled_for(90) as kernels:
        _hopper.launch(a, b, out, bias, accumulate=accumulate, plan=plan)
    found = report(kernels[0])
    column = 16 if LATER and n == 1 else 0  # an output of one column, which is rare
    assert found.spilled <= max(_MAY_SPILL.get((weight, stream_k), 0), column)
    # per m_subtile: 128 of K by instructions of 32
    m_subtiles = tile.warpgroups * tile.m_subtiles
    assert found.opcodes["QGMMA"] == 4 * m_subtiles * tile.k_unroll
    assert found.opcodes["FFMA"] >= m_subtiles * tile.k_unroll * tile.bn // 2, "promotion by fused multiply-adds"
    # ptxas waits for every MMA instruction if it loses track of one in flight
    assert found.opcodes["WARPGROUP"] == 2 * m_subtiles * tile.k_unroll, "one wait per MMA"
    assert released_stages(found.ptx) == ["fenced"] * tile.warpgroups * tile.k_unroll
    assert not found.stray
    estimate = heuristics.shared_bytes(plan.tile, problem)
    assert estimate - 2048 <= found.shared <= estimate <= heuristics.SHARED_BYTES
    return found


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize(
    ("rows", "n", "k"), first_of([(16, 512, 2048), (32, 512, 2048), (16, 511, 2047)], lambda sizes: sizes[0] == 16)
)
def test_few_rows(rows: int, n: int, k: int, weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped operands, weights by tokens: the same checks."""
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")
    plan, _ = heuristics.choose_few_rows(heuristics.Problem(rows, n, k, weight == "fp8_1x128", False, 132))
    a, b = quantize(torch.zeros(rows, k), "fp8_1x128"), quantize(torch.zeros(n, k), weight)
    with compiled_for(90) as kernels:
        _rows.launch(a, b, torch.empty(rows, n, dtype=torch.bfloat16), None, accumulate=False, plan=plan)
    found, tile = report(kernels[0]), plan.tile
    assert found.spilled == 0
    assert found.opcodes["QGMMA"] == 4 * tile.warpgroups * tile.k_unroll
    assert found.opcodes["WARPGROUP"] == 2 * tile.warpgroups * tile.k_unroll, "one wait per MMA"
    assert released_stages(found.ptx) == ["fenced"] * tile.warpgroups * tile.k_unroll
    assert found.shared <= heuristics.SHARED_BYTES
