"""FP8 GEMM of few rows on a Hopper GPU: every tile, tails, all output dtypes, nothing written outside the output."""

from __future__ import annotations

import pytest
import torch

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.gemm import ACCUMULATOR_DTYPES, exact_mm, heuristics
from support.products import HOPPER_DB, check_frame, fp8_operands, framed, hopper_gate

_rows = pytest.importorskip("blockscale.gemm._hopper_rows", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


def plan_of(m: int, n: int, k: int, weight: str) -> heuristics.Plan:
    return heuristics.choose_few_rows(heuristics.Problem(m, n, k, weight == "fp8_1x128", False, 132))[0]


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize("m", [1, 7, 16, 17, 32])
def test_every_tile(m: int, weight: str) -> None:
    for n, k in ((16, 16), (176, 400), (2112, 1408), (1536, 7168), (26000, 528)):
        a, b = fp8_operands(m, n, k, weight)
        plan, want, bias = plan_of(m, n, k, weight), exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
        for dtype in HOPPER_DB:
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
@pytest.mark.parametrize("m", [1, 7, 32])
def test_any_n_and_k(m: int, weight: str) -> None:
    """Stores come from registers, so any output is legal: a dense one and a window."""
    for n, k in ((2111, 4095), (2111, 129), (2111, 127), (17, 15), (15, 17), (7, 1), (1, 1)):
        a, b = fp8_operands(m, n, k, weight)
        plan, want, bias = plan_of(m, n, k, weight), exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
        for dtype in HOPPER_DB:
            for given in (None, bias):
                exact = want if given is None else want + given.double()
                dense, (frame, out) = torch.full((m, n), torch.nan, dtype=dtype, device="cuda"), framed(m, n, dtype)
                _rows.launch(a, b, dense, given, accumulate=False, plan=plan)
                _rows.launch(a, b, out, given, accumulate=False, plan=plan)
                assert sqnr_db(exact, dense) > hopper_gate(dtype, m, n), (m, n, k, dtype)
                assert torch.equal(out, dense)
                check_frame(frame, m, n)


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
def test_accumulation(weight: str, dtype: torch.dtype) -> None:
    for m, n, k in ((1, 2112, 7168), (27, 576, 2048), (27, 2111, 4095), (32, 2111, 17)):
        a, b = fp8_operands(m, n, k, weight)
        plan, before = plan_of(m, n, k, weight), torch.randn(m, n, device="cuda").to(dtype)
        out, alone = before.clone(), torch.empty(m, n, device="cuda")
        _rows.launch(a, b, out, None, accumulate=True, plan=plan)
        _rows.launch(a, b, alone, None, accumulate=False, plan=plan)
        assert sqnr_db(exact_mm(a, b), alone) > HOPPER_DB[torch.float32], (m, n, k)
        assert torch.equal(out, (before.float() + alone).to(dtype)), (m, n, k)


def test_forced_backend() -> None:
    """Also where the model would defer to another kernel."""
    for m, n, k in ((1, 7168, 2048), (16, 2112, 7168), (32, 24576, 1536), (7, 2880, 2880)):
        a, b = fp8_operands(m, n, k, "fp8_128x128")
        with bs.use_backend(gemm="hopper_rows"):
            assert sqnr_db(exact_mm(a, b), bs.scaled_mm(a, b, torch.float32)) > HOPPER_DB[torch.float32]


def test_selected_where_predicted_faster() -> None:
    a, b = fp8_operands(16, 18432, 7168, "fp8_128x128")
    assert bs.explain("gemm", a, b).taken.backend == "hopper_rows"
