"""Machine code of the kernels that permute and combine rows, compiled without a GPU: no spills, 16-byte accesses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE, TILES, Report, compiled_for, report
from blockscale import sort_by_expert
from blockscale.grouped import _triton_rows

pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]
KERNELS = (
    "_permute_rows_kernel",
    "_combine_rows_kernel",
    "_combine_dots_kernel",
    "_clear_rows_kernel",
    "_place_rows_kernel",
)
TOKENS, SLOTS, COLUMNS = 256, 8, 7168


def compiled(arch: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    for name in KERNELS:
        monkeypatch.setitem(TILES, name, ("BD",) if "clear" in name else ("BM", "BD"))
    routing = sort_by_expert(torch.rand(TOKENS, 64).topk(SLOTS).indices, 64)
    x, y = (torch.empty(count, columns, dtype=torch.bfloat16) for count in (TOKENS, TOKENS * SLOTS))
    weights = torch.rand(TOKENS, SLOTS)
    with compiled_for(arch) as kernels:
        for each in (None, weights):
            _triton_rows.permute_rows(x, routing.tokens, routing.rows, each, y)
            _triton_rows.combine_rows(y, routing.rows, each, x)
        _triton_rows.combine_dots(y, x, routing.rows, weights)
        _triton_rows.clear_rows(y, routing.offs)
        word = torch.int64 if columns % 4 == 0 else torch.int16  # as `place_rows` of routing.py passes them
        _triton_rows.place_rows(x.view(word), routing.rows, y.view(word))
    return [report(kernel) for kernel in kernels]


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.sweep), 90, 100])
def test_machine_code(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled(arch, COLUMNS, monkeypatch)
    assert [each.kernel for each in found] == [*KERNELS[:2], *KERNELS]
    for each in found:
        assert each.spilled == 0, each.kernel
        assert each.registers <= 80, each.kernel
        # one load per slot for each half of a tile, and the token's vector for dot products
        least = {"_combine_rows_kernel": 16, "_clear_rows_kernel": 0}.get(each.kernel, 2)
        assert each.loads.get(128, 0) >= least, each.kernel
        if "dots" not in each.kernel:
            assert set(each.stores) == {128}, each.kernel


def test_unaligned_rows_have_narrow_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the result if the compiler did not know that rows start at multiples of 16 bytes."""
    assert all(128 not in each.stores for each in compiled(90, COLUMNS + 1, monkeypatch))
