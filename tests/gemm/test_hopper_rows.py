"""The Gluon product for few rows on a Hopper GPU: every tile, tails, results of all types, nothing written outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.formats import BlockScaled
from blockscale.gemm import exact_mm, heuristics

_rows = pytest.importorskip("blockscale.gemm._hopper_rows", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

GATE_DB = {torch.float32: 77.0, torch.float16: 60.0, torch.bfloat16: 50.0}
SENTINEL = 12345.0


def operands(m: int, n: int, k: int, weight: str) -> tuple[BlockScaled, BlockScaled]:
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    return bs.quantize(x, "fp8_1x128"), bs.quantize(w, weight)


def sqnr(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want).square().sum()
    return float(10 * torch.log10(want.square().sum() / noise)) if noise > 0 else 999.0


def plans(tile: heuristics.Tile, problem: heuristics.Problem) -> list[heuristics.Plan]:
    """Whole and shared tiles of weights by tokens."""
    turned = heuristics.Problem(
        problem.n, problem.m, problem.k, problem.vector, problem.wide, problem.multiprocessors, problem.add
    )
    found = (heuristics.whole_tiles(tile, turned), heuristics.shared_tiles(tile, turned))
    return [plan._replace(tile=tile) for plan in found if plan is not None]


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize(
    ("m", "tile"), [(m, tile) for m in (1, 16, 17, 64) for tile in heuristics.few_rows_tiles(m)], ids=str
)
def test_every_tile(m: int, tile: heuristics.Tile, weight: str) -> None:
    for n, k in ((16, 16), (176, 400), (2112, 1408), (1536, 7168)):
        a, b = operands(m, n, k, weight)
        want, bias = exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
        for dtype in GATE_DB:
            problem = heuristics.Problem(m, n, k, weight == "fp8_1x128", dtype == torch.float32, 132)
            for plan in plans(tile, problem):
                for given in (None, bias):
                    frame = torch.full((m + 2, n + 32), SENTINEL, dtype=dtype, device="cuda")
                    out = frame[1 : m + 1, 16 : n + 16]
                    _rows.launch(a, b, out, given, accumulate=False, plan=plan)
                    exact = want if given is None else want + given.double()
                    assert sqnr(out, exact) > GATE_DB[dtype], (m, n, k, dtype, plan)
                    again = torch.full((n, m), torch.nan, dtype=dtype, device="cuda").mT
                    _rows.launch(a, b, again, given, accumulate=False, plan=plan)
                    assert torch.equal(out, again), (m, n, k, dtype, plan)
                    out.fill_(SENTINEL)
                    assert bool((frame == SENTINEL).all()), "written outside the output"


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
def test_adding(weight: str) -> None:
    for m, n, k in ((1, 2112, 7168), (33, 576, 2048)):
        a, b = operands(m, n, k, weight)
        want, before = exact_mm(a, b), torch.randn(m, n, device="cuda")
        for tile in heuristics.few_rows_tiles(m):
            for plan in plans(tile, heuristics.Problem(m, n, k, weight == "fp8_1x128", True, 132, add=True)):
                out = before.clone()
                _rows.launch(a, b, out, None, accumulate=True, plan=plan)
                assert sqnr(out, want + before.double()) > GATE_DB[torch.float32], plan


def test_by_demand() -> None:
    """What the model chooses, over shapes of real layers."""
    for m, n, k in ((1, 7168, 2048), (16, 2112, 7168), (64, 24576, 1536), (7, 2880, 2880)):
        a, b = operands(m, n, k, "fp8_128x128")
        with bs.use_backend(gemm="hopper_rows"):
            assert sqnr(bs.scaled_mm(a, b, torch.float32), exact_mm(a, b)) > GATE_DB[torch.float32]
