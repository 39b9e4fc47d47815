"""Machine code of the cast kernels, compiled without a GPU and checked against `cases.py`; and controls."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from aot.cases import CASES, MAY_SPILL, Budget, Case, Cast, problems, reports, variants
from aot.compiled import CAN_COMPILE, TILES, compiled_for, launched, report, stray_reads
from blockscale import CastSpec, quantize, quantize_both
from blockscale.errors import BackendError
from blockscale.hardware import CPU, capability

pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]


# Kernels of which another case has all the code: one operand of a kernel that writes both, the same kernel of another
# format. On Blackwell one cast with each kind of scale; `make aot` has all of them.
WITH_ALL = {
    "fp8_128x128 row bf16", "mxfp8_e4m3 row bf16", "mxfp8_e4m3 col bf16", "mxfp8_e4m3_128x128 row bf16",
    "mxfp8_e5m2 both bf16", "mxfp4 row bf16", "mxfp4 col bf16", "nvfp4_16x16 row bf16 given", "swiglu fp8_1x128",
    "swiglu backward fp8_1x128", "decode fp8_1x128",
}  # fmt: skip
ON_BLACKWELL = {"fp8_1x128 both bf16", "nvfp4 row bf16"}


def is_first(case: Case, arch: int) -> bool:
    return (arch == 90 and case.name not in WITH_ALL) or (arch == 100 and case.name in ON_BLACKWELL)


def test_cases_that_run_with_all_exist() -> None:
    assert {case.name for case in CASES} > WITH_ALL | ON_BLACKWELL


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        pytest.param(case, arch, id=f"sm_{arch} {case.name}", marks=() if is_first(case, arch) else pytest.mark.sweep)
        for case in CASES
        for arch in case.arches
    ],
)
def test_machine_code(case: Case, arch: int) -> None:
    budget = case.budget
    if arch < 89 and budget.ptx and "mxfp4" not in case.name:
        # codes by integer arithmetic: the budgets are those of the conversion instruction
        budget = replace(budget, registers=255, per_value=0.0)
    wrong = []
    for found in reports(case.call, arch):
        figures = f"{found.registers} registers, {found.per_value:.2f} instructions for a value"
        wrong += [f"{found.kernel} ({figures}): {problem}" for problem in problems(case.name, found, budget)]
    assert not wrong, "\n".join(wrong)


def test_every_kernel_has_a_case() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("blockscale.casts")]
    functions = {
        function for module in modules for function in vars(module).values() if isinstance(function, JITFunction)
    }
    kernels = {function.__name__ for function in functions if function.__name__.endswith("_kernel")}
    assert kernels == set(TILES), "a kernel's tile is in TILES"
    assert set().union(*(launched(case.call, 90) for case in CASES)) == kernels, "a kernel has a line in CASES"


def test_the_list_stays_short() -> None:
    """Compilation takes most of the time of these tests; `make aot` has the long list."""
    assert sum(len(case.arches) for case in CASES) <= 67


def test_exceptions_match_a_variant() -> None:
    names = [*(variant.name for variant in variants()), *(case.name for case in CASES)]
    for known in MAY_SPILL:
        assert any(re.match(known.pattern, name) for name in names), known
        assert known.reason


@pytest.mark.parametrize(
    ("col", "kernels"),
    [
        (CastSpec("nvfp4_16x16"), ["amax_kernel", "cast_kernel"]),  # one amax for both operands, one read
        (CastSpec("nvfp4", hadamard=True), ["amax_kernel", "cast_kernel"] * 2),  # each operand has its own
    ],
)
def test_kernels_of_both_operands(col: CastSpec, kernels: list[str]) -> None:
    with compiled_for(90) as found:
        quantize_both(torch.empty(256, 256, dtype=torch.bfloat16), replace(col, hadamard=False), col)
    assert [kernel.metadata.name for kernel in found] == kernels


# ---- controls: what the checks must find -----------------------------------------------------------------------------


@triton.jit
def _spilling_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """More live values than 32 registers hold."""
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    total = tl.sum(x, 0)
    tl.store(out_ptr + i, tl.sqrt(x) + total * x)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, step, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + i * step, tl.load(x_ptr + i * step))


def copied(arch: int, step: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(TILES, "_copy_kernel", ("SIZE",))
    x = torch.empty(1 << 16)
    with compiled_for(arch) as kernels:
        _copy_kernel[(8,)](x, torch.empty_like(x), step, SIZE=2048)
    return problems("copy", report(kernels[0]), Budget())


@pytest.mark.parametrize("limit", [None, 32])
def test_a_spilling_kernel_is_found(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILES, "_spilling_kernel", ("SIZE",))
    x = torch.empty(16384)
    with compiled_for(90) as kernels:
        _spilling_kernel[(1,)](x, torch.empty_like(x), SIZE=16384, num_warps=4, maxnreg=limit)
    found = report(kernels[0])
    wrong = problems("spilling", found, Budget())
    assert (found.spilled > 0) == (limit == 32)
    assert any("spills" in problem for problem in wrong) == (limit == 32)


def test_narrow_accesses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copied(90, 1, monkeypatch) == []
    narrow = copied(90, 3, monkeypatch)
    assert len(narrow) == 2
    assert "loads 0% of its bytes by 128 bits" in narrow[0]
    assert "stores 0% of its bytes by 128 bits" in narrow[1]


def test_each_budget_can_fail() -> None:
    found = reports(Cast("mxfp8_e4m3", "row"), 90)[0]
    assert problems("row", found, Budget(found.registers, found.per_value, "e4m3x2")) == []
    assert "registers" in problems("row", found, Budget(found.registers - 1))[0]
    assert "instructions" in problems("row", found, Budget(per_value=found.per_value - 0.1))[0]
    assert problems("row", found, Budget(ptx="e5m2x2")) == ["lacks e5m2x2"]


def test_everything_is_restored() -> None:
    x = torch.ones(2, 64)
    assert launched(Cast("mxfp4", "row"), 90) == {"cast_kernel"}
    assert capability(x.device) == CPU
    assert quantize(x, "mxfp4").data.device.type == "cpu"
    with pytest.raises(BackendError), compiled_for(75):
        quantize(x, "mxfp4")
    assert float(quantize(x, "mxfp8_e4m3").data.float().sum()) > 0


def test_a_lost_value_is_found() -> None:
    line = "        /*0a10*/                   {} ;      /* 0x00007610010c7816 */\n"
    fine = "LDC R1, c[0x0][0x28]", "VIADD R1, R1, 0xffffffe8", "STL [R1+0x4], R12", "LDL R3, [R1]", "MOV R10, R11"
    fine += (
        "PRMT R5, R20, 0x3120, R1",
        "PRMT R18, R18, 0x3340, R1.reuse",
        "PRMT R0, R1, 0x3340, R1",
        "PRMT R37, R46, RZ, R1",
    )
    assert stray_reads("".join(line.format(code) for code in fine)) == ()
    for lost in ("PRMT R12, R1, 0x7610, R12", "PRMT R12, R4, 0x7610, R1", "FMUL R3, R1, R4", "PRMT R2, R3, R4, R1"):
        assert stray_reads(line.format(fine[0]) + line.format(lost)) == (lost,)
