"""Permute and combine in Triton: bitwise equal to the reference in the interpreter and on a GPU; rejected requests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale.grouped import routing as moves
from blockscale.grouped.routing import rows_request
from blockscale.hardware import Capability
from support import helpers
from support.products import assert_same_bits

pytest.importorskip("triton", reason="needs triton, which is not installed")


@pytest.mark.slow
def test_interpreted_kernels_equal_the_reference(compared: Counter[str]) -> None:
    cases, values, wrong = helpers.interpreted(Path(__file__).parent / "interpreted_rows.py")
    assert (cases >= 120, wrong) == (True, 0)
    compared["the reference, Triton permute and combine in the interpreter"] += values


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "columns", "k"), [(4096, 2048, 8), (1000, 1000, 1), (777, 7168, 6)])
def test_bitwise_equal_to_the_reference(tokens: int, columns: int, k: int, dtype: torch.dtype) -> None:
    scores = torch.rand(tokens, 64, device="cuda")
    routing, gate_weights = bs.route(scores, k)
    x, y = (torch.randn(count, columns, device="cuda", dtype=dtype) for count in (tokens, tokens * k))
    found = []
    for backend in ("triton", "triton", "reference"):
        with bs.use_backend(**dict.fromkeys(("permute_rows", "combine_rows", "combine_dots"), backend)):
            results = [moves.combine_dots(y, x, routing.rows)]
            for each in (None, gate_weights):
                results.append(moves.permute_rows(x, routing.tokens, routing.rows, each))
                results.append(moves.combine_rows(y, routing.rows, each))
        found.append(results)
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0][1:], found[2][1:])
    torch.testing.assert_close(found[0][0], found[2][0], rtol=1e-4, atol=1e-4 * columns**0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [0, 1, 4095, 4096])
def test_clear_rows_zeroes_only_rows_of_no_group(last: int) -> None:
    x = torch.full((4096, 1408), float("nan"), device="cuda", dtype=torch.bfloat16)
    moves.clear_rows(x, torch.tensor([0, last], device="cuda", dtype=torch.int32))
    assert torch.equal(x.isnan().all(1).sum(), torch.tensor(last, device="cuda"))
    assert int((x == 0).sum()) == (4096 - last) * 1408


def test_requests_that_only_the_reference_serves() -> None:
    x, rows = torch.empty(8, 16), torch.zeros(8, 2, dtype=torch.int32)
    on = Capability("cuda", 90)

    def served(x: torch.Tensor, rows: torch.Tensor) -> str:
        taken = bs.explain("combine_rows", x, rows, on=on).taken
        assert taken is not None
        return taken.backend

    assert served(x, rows) == "triton"
    assert served(x.mT, rows) == "reference"
    assert served(x.double(), rows) == "reference"
    assert served(x[:0], rows[:0]) == "reference"
    assert served(x, torch.zeros(8, 17, dtype=torch.int32)) == "reference"
    assert str(rows_request("combine_rows", x, rows)) == "combine_rows 8x16 float32 on cpu"
