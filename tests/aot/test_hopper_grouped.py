"""Machine code of the Hopper grouped GEMM, compiled without a GPU, by the checks of the dense one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.cases import LATER
from aot.compiled import CAN_COMPILE, OTHER_PTXAS, compiled_for, released_stages, report
from blockscale import quantize
from blockscale.gemm.heuristics import SHARED_BYTES, Tile
from blockscale.grouped import heuristics
from blockscale.grouped.ops import Inputs, grouped_request
from blockscale.hardware import Capability
from blockscale.registry import kernels
from support.helpers import first_of
from support.products import offsets

_hopper = pytest.importorskip("blockscale.grouped._hopper", reason="this Triton has no Gluon for Hopper")
_hopper_mx = pytest.importorskip("blockscale.grouped._hopper_mx")
empty_for_tma = pytest.importorskip("blockscale.gemm._hopper").empty_for_tma
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Case:
    tile: Tile
    k_grouped: bool = False
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    accumulate: bool = False
    n: int = 512

    def __str__(self) -> str:
        kind = f"{'k' if self.k_grouped else 'm'}, N = {self.n}, {self.tile.label}, k_unroll {self.tile.k_unroll}"
        return f"{kind}, {self.dtype}{' bias' if self.bias else ''}{' accumulate' if self.accumulate else ''}"


_TALL, _THREE, _TWO, _SHORT_UNROLL, _ONE, _NARROW = heuristics.FP8.tiles
_BF16_ACCUMULATE = Case(_THREE, True, accumulate=True)
# every tile with its most demanding epilogue, and the common ones
_CASES = [
    Case(_TALL, bias=True),
    Case(_THREE, bias=True),
    Case(_THREE, dtype=torch.float32, accumulate=True),
    Case(_TWO, bias=True),
    Case(_TWO, dtype=torch.float32, accumulate=True),
    Case(_ONE, bias=True),
    Case(_NARROW, dtype=torch.float16),
    Case(_TALL, True),
    Case(_THREE, True),
    Case(_THREE, True, torch.float32, accumulate=True),
    Case(_SHORT_UNROLL, True),
    Case(_SHORT_UNROLL, True, torch.float32, accumulate=True),
    Case(_ONE, True, torch.float32, accumulate=True),
    Case(_THREE, bias=True, n=511),
    _BF16_ACCUMULATE,
]


# m-grouped with a bias, k-grouped with `out +=`; the others with --all
@pytest.mark.parametrize(
    "case", first_of(_CASES, lambda case: case.bias or (case.k_grouped and case.accumulate)), ids=str
)
def test_machine_code(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")
    check(case, spilled=8 if case is _BF16_ACCUMULATE else 0)  # values that two warpgroups load once per tile


# cases with the fewest spare registers
@pytest.mark.parametrize(
    "case",
    first_of(
        [_CASES[0], _CASES[1], _CASES[4], _CASES[9], _BF16_ACCUMULATE],
        lambda case: case in (_CASES[0], _CASES[9]),
    ),
    ids=str,
)
def test_machine_code_by_the_other_ptxas(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas 12.9, which the library takes for Triton 3.6."""
    monkeypatch.setenv("BLOCKSCALE_PTXAS", OTHER_PTXAS)
    check(case)


def check(case: Case, *, spilled: int = 0) -> None:
    offs, n = offsets([100, 200, 212]), case.n
    if case.k_grouped:
        a, b = (quantize(torch.zeros(512, size), "fp8_1x128", axis=-2, offs=offs).mT for size in (384, n))
    else:
        a, b = quantize(torch.zeros(512, 2048), "fp8_1x128"), quantize(torch.zeros(3, n, 2048), "fp8_128x128")
    fp32_out = case.dtype == torch.float32
    problem = heuristics.Problem(a.rows, n, a.length, 3, case.k_grouped, fp32_out, 132, case.accumulate)
    tile = heuristics.FP8.fitted(case.tile, problem)
    out = empty_for_tma((3 * a.rows if case.k_grouped else a.rows, n), case.dtype, torch.device("cpu"))
    with compiled_for(90) as kernels:
        bias = torch.zeros(3, n) if case.bias else None
        _hopper.launch(Inputs(a, b, offs, bias=bias), out, tile, accumulate=case.accumulate)
    found = report(kernels[-1])
    # a later Triton spills some values of a tile; consumers load them once per tile, not per K-block
    assert found.spilled <= (24 if LATER and case.k_grouped and tile.k_unroll == 2 else spilled)
    m_subtiles = tile.warpgroups * tile.m_subtiles
    assert found.opcodes["QGMMA"] == 4 * m_subtiles * tile.k_unroll
    assert found.opcodes["FFMA"] >= m_subtiles * tile.k_unroll * tile.bn // 2, "promotion by fused multiply-adds"
    assert found.opcodes["WARPGROUP"] == 2 * m_subtiles * tile.k_unroll, "one wait per MMA"
    assert released_stages(found.ptx) == ["fenced"] * tile.warpgroups * tile.k_unroll
    # stores of tails from registers: in pairs if rows start at multiples of 16 values
    width = 2 * 8 * case.dtype.itemsize
    stores = m_subtiles * tile.bn // 2
    assert found.stores == ({width: stores // 2} if n % 16 == 0 else {width // 2: stores}) or LATER
    assert not found.stray
    estimate = heuristics.FP8.shared_bytes(tile, problem)
    assert estimate - 2048 <= found.shared <= estimate <= SHARED_BYTES


@pytest.mark.parametrize("kind", ["m", "k", "mx"])
def test_precompile_key_identifies_the_kernel(kind: str) -> None:
    """A launch with meta operands requests kernels and runs none, and requests with equal precompile keys request the
    same kernel."""
    from triton import knobs

    from blockscale.diagnostics.precompile import Target, _stub_driver

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    product = "grouped_mm_mx_kernel" if kind == "mx" else "grouped_mm_kernel"
    target, asked = Target(Capability("cuda", 90)), []

    def note(*, key: str, fn: Any, **_: object) -> bool:
        asked.append((fn.name.rpartition(".")[2], key))
        return True  # do not compile

    found = {}
    with target.compiling(), _stub_driver(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        for tokens, groups in ((4096, 8), (5000, 7)):
            offs = meta(groups, dtype=torch.int32)
            if kind == "k":
                a, b = (quantize(meta(tokens, size), "fp8_1x128", axis=-2, offs=offs).mT for size in (512, 1024))
                out, serve = meta(groups, 512, 1024), _hopper.scaled_grouped_mm
            else:
                left, right = ("mxfp8_e4m3", "mxfp8_e4m3_128x128") if kind == "mx" else ("fp8_1x128", "fp8_128x128")
                a, b = quantize(meta(tokens, 1024), left), quantize(meta(groups, 512, 1024), right)
                out = meta(tokens, 512)
                serve = _hopper_mx.scaled_grouped_mm_mx if kind == "mx" else _hopper.scaled_grouped_mm
            asked.clear()
            serve(Inputs(a, b, offs), out, accumulate=False)
            request = grouped_request(a, b, groups, torch.bfloat16, bias=False, accumulate=False)
            entry = next(entry for entry in kernels(request.op) if entry.launch is serve)
            assert entry.precompile_key is not None
            found[tokens] = (entry.precompile_key(request), [pair for pair in asked if pair[0] == product])
            assert {name for name, _ in asked} <= {
                product, "_row_tiles_kernel", "_group_spans_kernel", "cast_kernel",
            }  # fmt: skip
    assert len(found[4096][1]) == 1
    assert found[4096] == found[5000]
