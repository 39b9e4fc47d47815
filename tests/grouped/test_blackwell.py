"""Grouped GEMMs for Blackwell without a GPU: in the interpreter, compiled, and the requests they serve.

On a GPU the tests of all registered kernels run them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.cases import LATER, SHARED
from aot.compiled import CAN_COMPILE, Report, compiled_for, report
from blockscale import quantize, use_backend
from blockscale.errors import BackendError
from blockscale.formats import BlockScaled
from blockscale.grouped import _blackwell
from blockscale.grouped.ops import Inputs
from blockscale.registry import Request, explain_request, select
from support import helpers
from support.products import HYPOTHETICAL, offsets


@pytest.mark.slow
def test_interpreted_gemms_are_exact(compared: Counter[str]) -> None:
    cases, values, wrong = helpers.interpreted(Path(__file__).parent / "interpreted.py", "blackwell")
    assert (cases >= 55, wrong) == (True, 0)
    compared["exact grouped products, Triton for Blackwell in the interpreter"] += values


# ---- compiled code ---------------------------------------------------------------------------------------------------

_SM100 = {"mxfp8_e4m3": ("mxf8f6f4", "UTCQMMA"), "mxfp4": ("mxf4", "UTCOMMA"), "nvfp4": ("mxf4nvf4", "UTCOMMA")}
_SM120 = {"mxfp8_e4m3": "QMMA", "mxfp4": "OMMA", "nvfp4": "OMMA"}
_can_compile = pytest.mark.skipif(
    not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"
)


def operands(name: str, *, k_grouped: bool) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Two groups; 4096 output columns fill a GPU with wide tiles."""
    offs = offsets([600, 600])
    options = {"scale_layout": "blocked", **({"amax": "group"} if name == "nvfp4" else {})}
    if k_grouped:
        a, b = (quantize(torch.zeros(1200, wide), name, axis=-2, offs=offs, **options).mT for wide in (1024, 4096))
        return a, b, offs
    return (
        quantize(torch.zeros(1200, 256), name, offs=offs, **options),
        quantize(torch.zeros(2, 4096, 256), name, **options),
        offs,
    )


def compiled(arch: int, name: str, dtype: torch.dtype, *, k_grouped: bool) -> Report:
    """16-bit outputs with a bias if m-grouped; fp32 outputs with accumulation."""
    a, b, offs = operands(name, k_grouped=k_grouped)
    out = torch.empty((2, a.rows, b.rows) if k_grouped else (a.rows, b.rows), dtype=dtype)
    accumulate = dtype == torch.float32
    bias = None if k_grouped or accumulate else torch.zeros(2, b.rows)
    inputs = Inputs(a, b, offs, bias=bias)
    tile = _blackwell.tile_for_sm100(inputs, out) if arch == 100 else _blackwell.tile_for_sm120(a, b)
    assert tile.bn == (128 if accumulate or arch == 120 else 256)
    assert tile.bk == (128 if k_grouped or name == "mxfp8_e4m3" else 256)
    with compiled_for(arch) as kernels:
        _blackwell.launch_gemm(inputs, out, tile, accumulate=accumulate)
    assert getattr(kernels[-1].metadata, "tmem_size", 0) <= 512
    return report(kernels[-1])


@pytest.mark.slow
@_can_compile
@pytest.mark.parametrize(
    "dtype", helpers.first_of([torch.bfloat16, torch.float32], lambda dtype: dtype == torch.bfloat16), ids=str
)
@pytest.mark.parametrize("k_grouped", [False, True])
@pytest.mark.parametrize(("name", "names"), _SM100.items())
def test_sm100(name: str, names: tuple[str, str], k_grouped: bool, dtype: torch.dtype) -> None:
    """As for the dense GEMM: codes as stored, scales copied to tensor memory without registers."""
    found = compiled(100, name, dtype, k_grouped=k_grouped)
    kind, code = names
    made = re.findall(r"tcgen05\.mma\.\S+", found.ptx)
    assert {re.sub(r".*kind::|\.(scale_vec::|block)\d.*", "", each) for each in made} == {f"{kind}.block_scale"}
    assert {op for op in found.opcodes if op.endswith("MMA")} == {code}
    assert found.opcodes["UTCCP"] > 0
    assert found.opcodes["STTM"] == 1, "zero-initialization of the accumulator"
    assert found.opcodes["UTMALDG"] > 0
    assert found.spilled == 0
    assert not found.stray
    assert set(found.stores) == {128}
    assert found.shared <= SHARED[100]


@pytest.mark.slow
@_can_compile
@pytest.mark.parametrize("k_grouped", helpers.first_of([False, True], lambda k_grouped: k_grouped))
@pytest.mark.parametrize(("name", "code"), _SM120.items())
def test_sm120(name: str, code: str, k_grouped: bool) -> None:
    found = compiled(120, name, torch.float32, k_grouped=k_grouped)
    assert {op for op in found.opcodes if op.endswith("MMA")} == {code}
    assert "block_scale" in found.ptx
    # ptxas of CUDA 12.9 leaves a word on the stack for each TMA load, and never reads it
    assert found.opcodes["LDL"] == 0
    assert found.opcodes["STL"] <= (0 if LATER else found.opcodes["UTMALDG"])
    assert not found.stray
    assert set(found.stores) == {128}
    assert found.shared <= SHARED[120]


# ---- the registry ----------------------------------------------------------------------------------------------------


def request(op: str, pair: tuple[str, str], where: str, shape: tuple[int, ...] = (256, 512, 1024, 8)) -> Request:
    return Request(op, HYPOTHETICAL[where], pair, shape, torch.bfloat16, ("plain", "plain"))


@pytest.mark.parametrize("where", ["sm_100", "sm_120"])
@pytest.mark.parametrize("op", ["m_grouped", "k_grouped"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_serves_only_if_forced(name: str, op: str, where: str) -> None:
    asked = request(op, (name, name), where)
    assert select(asked).backend in ("torch", "triton")
    reasons = [row.reason for row in explain_request(asked).candidates if row.backend == "blackwell" and row.fits]
    assert reasons == ["able, but only if forced"]
    with use_backend(**{op: "blackwell"}):
        taken = explain_request(asked).taken
    assert taken is not None
    assert where in taken.summary
    assert taken.conversions == (f"{name} scales plain -> blocked",) * 2


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request("m_grouped", ("mxfp8_e4m3", "mxfp4"), "sm_100", (9, 9, 130, 2)), "multiples of 128 for FP8 by FP4"),
        (request("m_grouped", ("mxfp8_e4m3", "mxfp4"), "sm_120"), "does not serve mxfp8_e4m3 @ mxfp4"),
        (request("k_grouped", ("mxfp6_e2m3", "mxfp4"), "sm_100"), "does not serve mxfp6_e2m3 @ mxfp4"),
        (request("k_grouped", ("nvfp4", "nvfp4"), "sm_100", (9, 9, 131072, 1025)), "at most 1024 groups"),
        (request("m_grouped", ("nvfp4", "nvfp4"), "sm_90"), "needs sm_100 to sm_103, this is sm_90"),
    ],
)
def test_rejections_name_the_reason(asked: Request, reason: str) -> None:
    with use_backend(**{asked.op: "blackwell"}), pytest.raises(BackendError, match=reason):
        select(asked)
