"""Grouped GEMMs in Triton without a GPU: in the interpreter, compiled, and the requests they serve. On a GPU, cases
beyond the tests of all registered kernels: CUDA graphs, invalid offsets, many groups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is not installed")

import blockscale as bs
from aot.compiled import CAN_COMPILE, Report, compiled_for, report
from blockscale.diagnostics.quality import sqnr_db
from blockscale.errors import BackendError
from blockscale.formats import BlockScaled
from blockscale.grouped import _triton
from blockscale.grouped._reference import exact_grouped
from blockscale.grouped.ops import Inputs
from blockscale.registry import Request, select
from support import helpers
from support.products import HYPOTHETICAL, SENTINEL, offsets


@pytest.mark.slow
def test_interpreted_gemms_are_exact(compared: Counter[str]) -> None:
    cases, values, wrong = helpers.interpreted(Path(__file__).parent / "interpreted.py", "triton")
    assert (cases >= 100, wrong) == (True, 0)
    compared["exact grouped products, Triton in the interpreter"] += values


# ---- compiled code ---------------------------------------------------------------------------------------------------


def operands(
    pair: tuple[str, str], sizes: list[int], n: int, k: int, *, k_grouped: bool, device: str = "cpu"
) -> tuple[BlockScaled, BlockScaled, Tensor]:
    offs, rows = offsets(sizes, device), sum(sizes)
    x, w, dy = (torch.randn(*shape, device=device).bfloat16() for shape in ((rows, k), (len(sizes), n, k), (rows, n)))
    amax = {"amax": "group"} if pair[0] == "nvfp4" else {}
    if k_grouped:
        a, b = (bs.quantize(y, name, axis=-2, offs=offs, **amax).mT for y, name in zip((dy, x), pair, strict=True))
        return a, b, offs
    ends = {"offs": offs} if amax else {}
    return bs.quantize(x, pair[0], **amax, **ends), bs.quantize(w, pair[1], **amax), offs


@dataclass(frozen=True)
class Code:
    """rows: rows per group; they set the tile.  mma: MMA opcodes on sm_80, sm_90 and sm_100.  spilled: bytes allowed,
    where ptxas spills to fit one more CTA per SM."""

    pair: tuple[str, str]
    k_grouped: bool
    rows: int
    mma: tuple[str, str, str]
    spilled: int = 0


_FP8, _UPCAST = ("HMMA", "QGMMA", "UTCQMMA"), ("HMMA", "HGMMA", "UTCHMMA")
_CODES = [
    Code(("fp8_1x128", "fp8_128x128"), False, 256, _FP8),
    Code(("fp8_1x128", "fp8_128x128"), False, 20, ("HMMA",) * 3),
    Code(("fp8_1x128", "fp8_128x128"), False, 50, _FP8, 8),
    Code(("fp8_1x128", "fp8_1x128"), True, 256, _FP8),
    Code(("mxfp8_e4m3", "mxfp8_e4m3"), False, 256, _UPCAST),
    Code(("mxfp8_e4m3", "mxfp8_e4m3"), False, 50, _UPCAST),
    Code(("mxfp8_e4m3", "mxfp8_e4m3"), False, 20, ("HMMA",) * 3, 8),
    Code(("mxfp4", "mxfp4"), True, 256, _UPCAST),
    Code(("nvfp4", "nvfp4_16x16"), False, 256, _UPCAST),
    Code(("nvfp4", "nvfp4"), True, 256, _UPCAST),
]


def compiled(arch: int, code: Code, dtype: torch.dtype, *, bias: bool, accumulate: bool) -> Report:
    a, b, offs = operands(code.pair, [code.rows] * 3, 512, 1024, k_grouped=code.k_grouped)
    out = torch.empty((3, a.rows, b.rows) if code.k_grouped else (a.rows, b.rows), dtype=dtype)
    inputs = Inputs(a, b, offs, bias=torch.zeros(3, 512) if bias else None)
    with compiled_for(arch) as kernels:
        _triton.scaled_grouped_mm(inputs, out, accumulate=accumulate)
    return report(kernels[-1])


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET")
@pytest.mark.parametrize("arch", helpers.first_of([80, 90, 100], lambda arch: arch == 90))
@pytest.mark.parametrize("code", _CODES, ids=str)
def test_compiled_code(code: Code, arch: int) -> None:
    """The epilogues of training: bias (m-grouped) and accumulation (k-grouped)."""
    dtype = torch.float32 if code.k_grouped else torch.bfloat16
    found = compiled(arch, code, dtype, bias=not code.k_grouped, accumulate=code.k_grouped)
    assert found.spilled <= code.spilled
    assert {name for name in found.opcodes if name.endswith("MMA")} == {code.mma[(80, 90, 100).index(arch)]}
    assert found.opcodes["LDGSTS"] > 0, "K-blocks are prefetched"
    assert set(found.stores) == {128}
    assert not found.stray


# ---- the registry ----------------------------------------------------------------------------------------------------


def request(op: str, pair: tuple[str, str], where: str, dtype: torch.dtype = torch.bfloat16, *options: str) -> Request:
    return Request(op, HYPOTHETICAL[where], pair, (128, 64, 256, 4), dtype, (), frozenset(options))


@pytest.mark.parametrize("where", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_no_grouped_gemm_on_a_gpu_uses_the_reference(where: str) -> None:
    """The reference reads the offsets on the host."""
    for op, pairs in (("m_grouped", _triton.M_PAIRS), ("k_grouped", _triton.K_PAIRS)):
        for pair in pairs:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for options in ((), ("accumulate",), ("strided",), *([("bias",)] if op == "m_grouped" else [])):
                    assert select(request(op, pair, where, dtype, *options)).backend != "reference"


@pytest.mark.parametrize("where", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("op", ["m_grouped", "k_grouped"])
def test_requests_that_triton_serves(op: str, where: str) -> None:
    """Everything `F.grouped_mm` cannot do: outputs other than bf16, epilogues, FP8, NVFP4. Hopper has its own upcast
    kernels."""
    upcast = "hopper_upcast" if where == "sm_90" else None
    mx, nvfp4 = ("mxfp8_e4m3", "mxfp8_e4m3"), ("nvfp4", "nvfp4")
    fp8 = ("fp8_1x128", "fp8_128x128" if op == "m_grouped" else "fp8_1x128")
    assert select(request(op, mx, where)).backend == (upcast or "torch")
    for asked in (
        request(op, mx, where, torch.float32),
        request(op, mx, where, torch.float16),
        request(op, mx, where, torch.float32, "accumulate"),
        request(op, nvfp4, where),
    ):
        assert select(asked).backend == (upcast or "triton")
    assert select(request(op, fp8, where)).backend == ("hopper" if where == "sm_90" else "triton")
    assert select(request(op, fp8, where, torch.bfloat16, "strided")).backend == "triton"


def test_experts_with_1x128_scales_run_on_hopper() -> None:
    assert select(request("m_grouped", ("fp8_1x128", "fp8_1x128"), "sm_90")).backend == "triton"


@pytest.mark.parametrize(
    ("op", "shape", "reason"),
    [
        ("m_grouped", (128, 64, 0, 4), "takes no empty operands"),
        ("k_grouped", (128, 64, 131072, 1025), "at most 1024 groups, these are 1025"),
    ],
)
def test_rejections_name_the_reason(op: str, shape: tuple[int, ...], reason: str) -> None:
    asked = Request(op, HYPOTHETICAL["sm_90"], ("mxfp4", "mxfp4"), shape, torch.bfloat16)
    with bs.use_backend(**{op: "triton"}), pytest.raises(BackendError, match=reason):
        select(asked)


# ---- on a GPU --------------------------------------------------------------------------------------------------------

_PAIRS = [(False, "fp8_1x128", "fp8_128x128"), (False, "nvfp4", "nvfp4"), (False, "mxfp8_e4m3", "mxfp4")]
_PAIRS += [(True, "fp8_1x128", "fp8_1x128"), (True, "nvfp4", "nvfp4"), (True, "mxfp4", "mxfp4")]
on_gpu = pytest.mark.parametrize(("k_grouped", "first", "second"), _PAIRS)


def is_right(got: Tensor, want: Tensor) -> bool:
    """Within the SQNR gate of FP8 tensor cores, the wider one; zero for rows of no group."""
    inside = (want != 0).any(-1)
    if not inside.any():
        return bool((got == 0).all())
    return bool((got[~inside] == 0).all()) and sqnr_db(want, got).item() > 77.0


@pytest.mark.gpu
@on_gpu
def test_cuda_graph_replays_with_any_group_sizes(k_grouped: bool, first: str, second: str) -> None:
    """Captured once, replayed with other offsets: group sizes are read on the device, without a host sync."""
    patterns = [[100, 200, 217, 0], [0, 0, 0, 517], [517, 0, 0, 0], [1, 300, 15, 201]]
    made = [operands((first, second), sizes, 272, 336, k_grouped=k_grouped, device="cuda") for sizes in patterns]
    a, b, offs = made[0]
    total = torch.zeros(exact_grouped(a, b, offs).shape, device="cuda")
    with bs.use_backend(m_grouped="triton", k_grouped="triton"):
        bs.scaled_grouped_mm(a, b, offs, accumulate=total)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                bs.scaled_grouped_mm(a, b, offs, accumulate=total)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for left, right, ends in made:
        for held, other in ((a, left), (b, right)):
            held.data.view(torch.uint8).copy_(other.data.view(torch.uint8))
            kind = torch.float32 if held.scale.dtype == torch.float32 else torch.uint8
            held.scale.view(kind).copy_(other.scale.view(kind))
            if held.global_scale is not None and other.global_scale is not None:
                held.global_scale.copy_(other.global_scale)
        offs.copy_(ends)
        total.zero_()
        graph.replay()
        assert is_right(total, exact_grouped(left, right, ends))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("ends", [[100, 900, 950], [300, 100, 400], [2**31 - 1, 5, 5], [-7, 200, -1]])
def test_invalid_offs_write_nothing_out_of_bounds(k_grouped: bool, first: str, second: str, ends: list[int]) -> None:
    """Offsets that descend or exceed the rows: the host cannot check them without a sync."""
    a, b, offs = operands((first, second), [100, 117, 100], 144, 272, k_grouped=k_grouped, device="cuda")
    shape = exact_grouped(a, b, offs).shape
    frame = torch.full((*shape[:-2], shape[-2] + 2, shape[-1] + 2), SENTINEL, device="cuda")
    inside = frame[..., 1:-1, 1:-1]
    inside.zero_()
    with bs.use_backend(m_grouped="triton", k_grouped="triton"):
        bs.scaled_grouped_mm(a, b, torch.tensor(ends, dtype=torch.int32, device="cuda"), accumulate=inside)
    inside.fill_(SENTINEL)
    assert bool((frame == SENTINEL).all())


@pytest.mark.gpu
@on_gpu
def test_1024_groups(k_grouped: bool, first: str, second: str) -> None:
    sizes = torch.randint(0, 20, (1024,), generator=torch.Generator().manual_seed(1)).tolist()
    a, b, offs = operands((first, second), sizes, 64, 128, k_grouped=k_grouped, device="cuda")
    with bs.use_backend(m_grouped="triton", k_grouped="triton"):
        got = bs.scaled_grouped_mm(a, b, offs, torch.float32)
    assert is_right(got, exact_grouped(a, b, offs))
