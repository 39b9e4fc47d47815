"""Machine code of the transpose of codes, compiled without a GPU: no spills, 16-byte accesses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE, Report, compiled_for, report
from blockscale.casts import _triton_transpose

pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]


def compiled(arch: int, bits: int, columns: int) -> Report:
    codes = torch.empty(512, columns * bits // 8, dtype=torch.uint8)
    out = torch.empty(columns, 512 * bits // 8, dtype=torch.uint8)
    with compiled_for(arch) as kernels:
        _triton_transpose.transpose_codes(codes, out, columns, bits)
    (found,) = kernels
    return report(found)


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("bits", [8, 4])
def test_machine_code(arch: int, bits: int) -> None:
    found = compiled(arch, bits, 1024)
    assert found.spilled == 0
    assert found.registers <= 64
    assert set(found.loads) == {128}
    assert set(found.stores) == {128}
    assert found.opcodes["LDS"] + found.opcodes["STS"] + found.opcodes["LDSM"] + found.opcodes["STSM"] <= 32, (
        "shared memory is read and written by words of four rows, not byte by byte"
    )


def test_unaligned_rows_have_narrow_loads() -> None:
    """Control: the result if the compiler did not know that rows start at multiples of 16 bytes."""
    assert 128 not in compiled(90, 8, 1023).loads
