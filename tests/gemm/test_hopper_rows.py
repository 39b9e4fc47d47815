"""The Gluon product for few rows on a Hopper GPU: every tile, tails, results of all types, nothing written outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.gemm import exact_mm, heuristics
from products import HOPPER_DB, check_frame, fp8_operands, framed

_rows = pytest.importorskip("blockscale.gemm._hopper_rows", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


def plans(tile: heuristics.Tile, problem: heuristics.Problem) -> list[heuristics.Plan]:
    """Whole and shared tiles of weights by tokens."""
    turned = replace(problem, m=problem.n, n=problem.m)
    found = (heuristics.whole_tiles(tile, turned), heuristics.shared_tiles(tile, turned))
    return [plan._replace(tile=tile) for plan in found if plan is not None]


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize(
    ("m", "tile"), [(m, tile) for m in (1, 16, 17, 64) for tile in heuristics.few_rows_tiles(m)], ids=str
)
def test_every_tile(m: int, tile: heuristics.Tile, weight: str) -> None:
    for n, k in ((16, 16), (176, 400), (2112, 1408), (1536, 7168)):
        a, b = fp8_operands(m, n, k, weight)
        want, bias = exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
        for dtype in HOPPER_DB:
            problem = heuristics.Problem(m, n, k, weight == "fp8_1x128", dtype == torch.float32, 132)
            for plan in plans(tile, problem):
                for given in (None, bias):
                    frame, out = framed(m, n, dtype)
                    _rows.launch(a, b, out, given, accumulate=False, plan=plan)
                    exact = want if given is None else want + given.double()
                    assert sqnr_db(exact, out) > HOPPER_DB[dtype], (m, n, k, dtype, plan)
                    again = torch.full((n, m), torch.nan, dtype=dtype, device="cuda").mT
                    _rows.launch(a, b, again, given, accumulate=False, plan=plan)
                    assert torch.equal(out, again), (m, n, k, dtype, plan)
                    check_frame(frame, m, n)


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
def test_adding(weight: str) -> None:
    for m, n, k in ((1, 2112, 7168), (33, 576, 2048)):
        a, b = fp8_operands(m, n, k, weight)
        want, before = exact_mm(a, b), torch.randn(m, n, device="cuda")
        for tile in heuristics.few_rows_tiles(m):
            for plan in plans(tile, heuristics.Problem(m, n, k, weight == "fp8_1x128", True, 132, add=True)):
                out = before.clone()
                _rows.launch(a, b, out, None, accumulate=True, plan=plan)
                assert sqnr_db(want + before.double(), out) > HOPPER_DB[torch.float32], plan


def test_by_demand() -> None:
    """What the model chooses, over shapes of real layers."""
    for m, n, k in ((1, 7168, 2048), (16, 2112, 7168), (64, 24576, 1536), (7, 2880, 2880)):
        a, b = fp8_operands(m, n, k, "fp8_128x128")
        with bs.use_backend(gemm="hopper_rows"):
            assert sqnr_db(exact_mm(a, b), bs.scaled_mm(a, b, torch.float32)) > HOPPER_DB[torch.float32]
