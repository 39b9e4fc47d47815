"""Blackwell's grouped products without a GPU: in the interpreter, as machine code, and what their rows take and say.

On a GPU the tests of all rows of the table run them by themselves.
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
from blockscale.registry import Request, explain_request, select
from support import helpers
from support.products import HYPOTHETICAL, offsets


@pytest.mark.slow
def test_interpreted_products_are_exact(compared: Counter[str]) -> None:
    cases, values, wrong = helpers.interpreted(Path(__file__).parent / "interpreted.py", "blackwell")
    assert (cases >= 55, wrong) == (True, 0)
    compared["exact grouped products, Triton for Blackwell in the interpreter"] += values


# ---- machine code ----------------------------------------------------------------------------------------------------

_SM100 = {"mxfp8_e4m3": ("mxf8f6f4", "UTCQMMA"), "mxfp4": ("mxf4", "UTCOMMA"), "nvfp4": ("mxf4nvf4", "UTCOMMA")}
_SM120 = {"mxfp8_e4m3": "QMMA", "mxfp4": "OMMA", "nvfp4": "OMMA"}
_can_compile = pytest.mark.skipif(
    not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"
)


def operands(name: str, *, of_tokens: bool) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Two groups; the result's 4096 columns fill a GPU with wide tiles."""
    offs = offsets([600, 600])
    options = {"scale_layout": "blocked", **({"amax": "group"} if name == "nvfp4" else {})}
    if of_tokens:
        a, b = (quantize(torch.zeros(1200, wide), name, axis=-2, offs=offs, **options).mT for wide in (1024, 4096))
        return a, b, offs
    return (
        quantize(torch.zeros(1200, 256), name, offs=offs, **options),
        quantize(torch.zeros(2, 4096, 256), name, **options),
        offs,
    )


def compiled(arch: int, name: str, dtype: torch.dtype, *, of_tokens: bool) -> Report:
    """16-bit results with a bias where there is one, fp32 added to what was there."""
    a, b, offs = operands(name, of_tokens=of_tokens)
    out = torch.empty((2, a.rows, b.rows) if of_tokens else (a.rows, b.rows), dtype=dtype)
    add = dtype == torch.float32
    bias = None if of_tokens or add else torch.zeros(2, b.rows)
    tile = _blackwell.tile_for_sm100(a, b, offs, out) if arch == 100 else _blackwell.tile_for_sm120(a, b)
    assert tile.bn == (128 if add or arch == 120 else 256)
    assert tile.bk == (128 if of_tokens or name == "mxfp8_e4m3" else 256)
    with compiled_for(arch) as kernels:
        _blackwell.launch(a, b, offs, out, bias, accumulate=add, tile=tile)
    assert getattr(kernels[-1].metadata, "tmem_size", 0) <= 512
    return report(kernels[-1])


@pytest.mark.slow
@_can_compile
@pytest.mark.parametrize(
    "dtype", helpers.first_of([torch.bfloat16, torch.float32], lambda dtype: dtype == torch.bfloat16), ids=str
)
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize(("name", "names"), _SM100.items())
def test_sm100(name: str, names: tuple[str, str], of_tokens: bool, dtype: torch.dtype) -> None:
    """By the rules of the dense product: codes as they are stored, scales that reach tensor memory by copies alone."""
    found = compiled(100, name, dtype, of_tokens=of_tokens)
    kind, code = names
    made = re.findall(r"tcgen05\.mma\.\S+", found.ptx)
    assert {re.sub(r".*kind::|\.(scale_vec::|block)\d.*", "", each) for each in made} == {f"{kind}.block_scale"}
    assert {op for op in found.opcodes if op.endswith("MMA")} == {code}
    assert found.opcodes["UTCCP"] > 0
    assert found.opcodes["STTM"] == 1, "the zero that sums start from"
    assert found.opcodes["UTMALDG"] > 0
    assert found.spilled == 0
    assert not found.stray
    assert set(found.stores) == {128}
    assert found.shared <= SHARED[100]


@pytest.mark.slow
@_can_compile
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize(("name", "code"), _SM120.items())
def test_sm120(name: str, code: str, of_tokens: bool) -> None:
    found = compiled(120, name, torch.float32, of_tokens=of_tokens)
    assert {op for op in found.opcodes if op.endswith("MMA")} == {code}
    assert "block_scale" in found.ptx
    # the assembler of CUDA 12.9 leaves a word on the stack for each copy by TMA, and never reads it
    assert found.opcodes["LDL"] == 0
    assert found.opcodes["STL"] <= (0 if LATER else found.opcodes["UTMALDG"])
    assert not found.stray
    assert set(found.stores) == {128}
    assert found.shared <= SHARED[120]


# ---- the table -------------------------------------------------------------------------------------------------------


def request(op: str, pair: tuple[str, str], where: str, shape: tuple[int, ...] = (256, 512, 1024, 8)) -> Request:
    return Request(op, HYPOTHETICAL[where], pair, shape, torch.bfloat16, ("plain", "plain"))


@pytest.mark.parametrize("where", ["sm_100", "sm_120"])
@pytest.mark.parametrize("op", ["m_grouped", "k_grouped"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_it_is_able_and_waits_for_a_demand(name: str, op: str, where: str) -> None:
    asked = request(op, (name, name), where)
    assert select(asked).backend in ("torch", "triton")
    reasons = [row.reason for row in explain_request(asked).candidates if row.backend == "blackwell" and row.fits]
    assert reasons == ["able, but only by demand"]
    with use_backend(**{op: "blackwell"}):
        taken = explain_request(asked).taken
    assert taken is not None
    assert where in taken.summary
    assert taken.conversions == (f"{name} scales plain -> blocked",) * 2


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request("m_grouped", ("mxfp8_e4m3", "mxfp4"), "sm_100", (9, 9, 130, 2)), "multiples of 128 where FP8 meets"),
        (request("m_grouped", ("mxfp8_e4m3", "mxfp4"), "sm_120"), "does not serve mxfp8_e4m3 @ mxfp4"),
        (request("k_grouped", ("mxfp6_e2m3", "mxfp4"), "sm_100"), "does not serve mxfp6_e2m3 @ mxfp4"),
        (request("k_grouped", ("nvfp4", "nvfp4"), "sm_100", (9, 9, 131072, 1025)), "at most 1024 groups"),
        (request("m_grouped", ("nvfp4", "nvfp4"), "sm_90"), "needs sm_100 to sm_103, this is sm_90"),
    ],
)
def test_what_it_refuses(asked: Request, reason: str) -> None:
    with use_backend(**{asked.op: "blackwell"}), pytest.raises(BackendError, match=reason):
        select(asked)
