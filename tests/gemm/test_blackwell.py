"""Blackwell GEMM without a GPU: every pair in the interpreter, with tails, and the registry entries.

On a GPU the tests of all registered kernels run it; `tests/aot` checks its machine code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from blockscale import explain, quantize, use_backend
from blockscale.errors import BackendError
from blockscale.formats import BlockScaled
from blockscale.gemm import _blackwell, _torch
from blockscale.hardware import Capability
from blockscale.registry import Candidate, Request, kernels, select
from support import helpers


@pytest.mark.slow
def test_interpreted_products_are_exact(compared: Counter[str]) -> None:
    cases, values, wrong = helpers.interpreted(Path(__file__).parent / "interpreted_blackwell.py")
    assert (cases >= 65, wrong) == (True, 0)
    compared["exact products, Triton for Blackwell in the interpreter"] += values


def operands(pair: tuple[str, str], shape: tuple[int, int, int] = (256, 512, 1024)) -> tuple[BlockScaled, BlockScaled]:
    m, n, k = shape
    return quantize(torch.empty(m, k, device="meta"), pair[0]), quantize(torch.empty(n, k, device="meta"), pair[1])


def candidates(pair: tuple[str, str], sm: int, backend: str) -> list[Candidate]:
    found = explain("gemm", *operands(pair), on=Capability("cuda", sm))
    return [row for row in found.candidates if row.backend == backend]


@pytest.mark.parametrize("sm", [100, 103, 120, 121])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_it_serves_only_if_forced(sm: int, name: str) -> None:
    a, b = operands((name, name))
    found = explain("gemm", a, b, on=Capability("cuda", sm))
    assert found.taken is not None
    assert found.taken.backend == "torch"
    assert [row.reason for row in candidates((name, name), sm, "blackwell") if row.fits] == ["able, but only if forced"]
    with use_backend(gemm="blackwell"):
        taken = explain("gemm", a, b, on=Capability("cuda", sm)).taken
    assert taken is not None
    assert f"sm_{sm // 10 * 10}" in taken.summary
    assert taken.conversions == (f"{name} scales plain -> blocked",) * 2


def request(pair: tuple[str, str], sm: int, shape: tuple[int, int, int] = (256, 512, 1024)) -> Request:
    return Request("gemm", Capability("cuda", sm), pair, shape, torch.bfloat16, ("blocked", "blocked"))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(("mxfp8_e4m3", "mxfp4"), 100, (1, 1, 130)), "multiples of 128 for FP8 by FP4, this is 130"),
        (request(("mxfp8_e4m3", "mxfp4"), 120), "does not serve mxfp8_e4m3 @ mxfp4"),
        (request(("mxfp6_e2m3", "mxfp8_e4m3"), 100), "does not serve mxfp6_e2m3 @ mxfp8_e4m3"),
        (request(("nvfp4", "nvfp4"), 100, (0, 64, 64)), "takes no empty operands"),
        (request(("nvfp4", "nvfp4"), 90), "needs sm_100 to sm_103, this is sm_90"),
    ],
)
def test_refusals(asked: Request, reason: str) -> None:
    with use_backend(gemm="blackwell"), pytest.raises(BackendError, match=reason):
        select(asked)


def test_odd_sizes_are_taken() -> None:
    for pair in (
        ("mxfp8_e5m2", "mxfp8_e5m2"),
        ("mxfp4", "mxfp4"),
        ("nvfp4_16x16", "nvfp4"),
        ("mxfp8_e4m3", "mxfp8_e4m3_128x128"),
    ):
        with use_backend(gemm="blackwell"):
            for sm in (100, 120):
                assert select(request(pair, sm, (1, 3, 33))).backend == "blackwell"


def test_choice_of_tile() -> None:
    """Wide for 16-bit outputs if they fill the GPU; BK 256 only for FP4 by FP4."""
    a, b = operands(("mxfp8_e4m3", "mxfp8_e4m3"), (4096, 4096, 512))
    assert _blackwell.tile_for_sm100(a, b, torch.bfloat16, 148)[:3] == (128, 256, 128)
    assert _blackwell.tile_for_sm100(a, b, torch.float32, 148)[:3] == (128, 128, 128)
    assert _blackwell.tile_for_sm100(*operands(("mxfp4", "mxfp4")), torch.bfloat16, 148)[:3] == (128, 128, 256)
    assert _blackwell.tile_for_sm100(*operands(("mxfp4", "mxfp8_e4m3")), torch.bfloat16, 1).bk == 128


# ---- F.scaled_mm for MXFP4 -----------------------------------------------------------------------------------------


def test_vendor_mxfp4_depends_on_the_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = [row for row in kernels("gemm") if row.launch is _torch.scaled_mm_mxfp4]
    asked = request(("mxfp4", "mxfp4"), 100)
    monkeypatch.setattr(_torch, "_has_mxfp4", lambda: False)
    assert "optional library of FP4 GEMMs" in str(row.refusal(asked))
    monkeypatch.setattr(_torch, "_has_mxfp4", lambda: True)
    assert row.refusal(asked) is None
    for option in ("bias", "accumulate"):
        assert "round a second time" in str(row.refusal(replace(asked, options=frozenset({option}))))
    assert row.refusal(replace(asked, dtype=torch.float32)) == "has no float32"
    assert "these are 60 and 64" in str(row.refusal(replace(asked, shape=(1, 60, 64))))
