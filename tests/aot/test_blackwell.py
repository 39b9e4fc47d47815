"""Machine code of the Blackwell GEMM, compiled without a GPU: block-scaled MMA on the stored codes, scales that only
TMA and tcgen05.cp move, no spills, memory that fits.

The same with Triton 3.6 and 3.9, except for the suffixes of the instructions (`scale_vec::1X`, `block32`).
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.cases import LATER, SHARED
from aot.compiled import CAN_COMPILE, Report, compiled_for, report
from blockscale import quantize
from blockscale.formats import BlockScaled
from blockscale.gemm import _blackwell
from blockscale.gemm._tiles import Tile
from support.helpers import first_of

pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]
# MMA in PTX and in SASS: 8-bit, 4-bit with E8M0 scales, 4-bit with E4M3 scales
_MXFP8, _MXFP4, _NVFP4 = ("mxf8f6f4", "UTCQMMA"), ("mxf4", "UTCOMMA"), ("mxf4nvf4", "UTCOMMA")
_SM100 = {
    ("mxfp8_e4m3", "mxfp8_e4m3"): _MXFP8,
    ("mxfp8_e5m2", "mxfp8_e4m3"): _MXFP8,
    ("mxfp8_e4m3", "mxfp8_e4m3_128x128"): _MXFP8,
    ("mxfp8_e4m3", "mxfp4"): _MXFP8,
    ("mxfp4", "mxfp4"): _MXFP4,
    ("nvfp4", "nvfp4_16x16"): _NVFP4,
}
_SM120 = {
    ("mxfp8_e4m3", "mxfp8_e5m2"): ("mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e5m2.f32.ue8m0", "QMMA"),
    ("mxfp4", "mxfp4"): ("mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0", "OMMA"),
    ("nvfp4", "nvfp4"): ("mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", "OMMA"),
}
M, N, K = 512, 512, 1024
_Epilogue = tuple[torch.dtype, bool, bool]  # output, bias, accumulate
_EPILOGUES = (
    (torch.bfloat16, False, False),
    (torch.float16, True, False),
    (torch.float32, False, True),
    (torch.bfloat16, False, True),
)
# one epilogue for pairs that differ from the first one only in a field of the instruction, or not at all
_ALIKE = {("mxfp8_e5m2", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e4m3_128x128")}
_SM100_CASES = [(*case, each) for case in _SM100.items() for each in _EPILOGUES[: 1 if case[0] in _ALIKE else 4]]


def operands(pair: tuple[str, str], rows: int = M, k: int = K) -> tuple[BlockScaled, BlockScaled]:
    a, b = torch.zeros(rows, k), torch.zeros(N, k)
    return quantize(a, pair[0], scale_layout="blocked"), quantize(b, pair[1], scale_layout="blocked")


def compiled(arch: int, pair: tuple[str, str], epilogue: _Epilogue, tile: Tile) -> tuple[Report, int]:
    """Report, and the columns of tensor memory that the kernel takes."""
    dtype, bias, accumulate = epilogue
    (a, b), out = operands(pair), torch.empty(M, N, dtype=dtype)
    with compiled_for(arch) as kernels:
        _blackwell.launch_gemm(a, b, out, torch.zeros(N) if bias else None, accumulate=accumulate, tile=tile)
    return report(kernels[0]), kernels[0].metadata.tmem_size


@pytest.mark.parametrize(
    ("pair", "names", "epilogue"), first_of(_SM100_CASES, lambda case: case[2] not in _EPILOGUES[1::2]), ids=str
)
def test_sm100(pair: tuple[str, str], names: tuple[str, str], epilogue: _Epilogue) -> None:
    dtype, bias, accumulate = epilogue
    tile = _blackwell.tile_for_sm100(*operands(pair), dtype, 8)
    assert tile.bn == (128 if dtype == torch.float32 else 256)
    found, columns = compiled(100, pair, epilogue, tile)
    kind, code = names
    assert kinds(found.ptx) == {f"{kind}.block_scale"}
    assert found.opcodes[code] > 0
    assert not {op for op in found.opcodes if op.endswith("MMA")} - {code}
    # scales are copied from shared to tensor memory; threads store only the zero accumulator
    assert found.opcodes["UTCCP"] > 0
    assert found.opcodes["STTM"] == 1
    assert found.opcodes["UTMALDG"] > 0
    assert found.spilled == 0
    assert not found.stray
    assert set(found.stores) == {128}
    if not bias and not accumulate:
        assert set(found.loads) <= {32}, "tensor scales; TMA loads everything else"
    assert found.shared <= SHARED[100]
    assert columns <= 512


def test_sm103() -> None:
    """It compiles; cuobjdump in Triton 3.6's wheel does not know the architecture."""
    (a, b), tile = operands(("nvfp4", "nvfp4")), Tile(128, 256, 256, 8, 4)
    with compiled_for(103) as kernels:
        _blackwell.launch_gemm(a, b, torch.empty(M, N, dtype=torch.bfloat16), None, accumulate=False, tile=tile)
    assert "sm_103a" in kernels[0].asm["ptx"]
    assert kinds(kernels[0].asm["ptx"]) == {"mxf4nvf4.block_scale"}
    assert kernels[0].asm["cubin"]


def kinds(ptx: str) -> set[str]:
    """Kinds of all tcgen05.mma, without the suffix that differs between Triton versions."""
    return {re.sub(r".*kind::|\.(scale_vec::|block)\d.*", "", name) for name in re.findall(r"tcgen05\.mma\.\S+", ptx)}


def test_fp4_beside_fp8_is_unpacked_by_tma() -> None:
    """The reason why K is a multiple of 128 and rows start at multiples of 32 bytes."""
    (a, b), tile = operands(("mxfp8_e4m3", "mxfp4")), Tile(128, 128, 128, 8, 3)
    with compiled_for(100) as kernels:
        _blackwell.launch_gemm(a, b, torch.empty(M, N), None, accumulate=False, tile=tile)
    descriptors = kernels[0].metadata.tensordesc_meta
    assert [described["fp4_padded"] for described in descriptors] == [False, True, False, False]


def test_two_ctas_per_sm_on_sm100() -> None:
    """With narrow tiles: one CTA stores while the other computes."""
    for pair in (("mxfp8_e4m3", "mxfp8_e4m3"), ("nvfp4", "nvfp4")):
        tile = _blackwell.tile_for_sm100(*operands(pair), torch.bfloat16, 148)
        found, columns = compiled(100, pair, (torch.bfloat16, False, False), tile)
        assert tile.bn == 128
        assert found.spilled == 0
        assert found.resident_warps >= 2 * tile.warps
        assert 2 * (found.shared + 1024) <= SHARED[100] + 1024  # the driver takes 1 KiB per CTA
        assert 2 * columns <= 512


@pytest.mark.parametrize("epilogue", [pytest.param(_EPILOGUES[1], marks=pytest.mark.sweep), _EPILOGUES[2]], ids=str)
@pytest.mark.parametrize(("pair", "names"), _SM120.items(), ids=str)
def test_sm120(pair: tuple[str, str], names: tuple[str, str], epilogue: _Epilogue) -> None:
    found, _ = compiled(120, pair, epilogue, _blackwell.tile_for_sm120(*operands(pair)))
    kind, code = names
    assert {name.split("kind::")[-1] for name in re.findall(r"mma\.sync\S+", found.ptx)} == {kind}
    assert found.opcodes[code] > 0
    assert not {op for op in found.opcodes if op.endswith("MMA")} - {code}
    # ptxas 12.9 stores a word on the stack for each TMA load, and never reads it
    assert found.opcodes["LDL"] == 0
    assert found.opcodes["STL"] <= (0 if LATER else found.opcodes["UTMALDG"])
    assert found.opcodes["UTMALDG"] > 0
    assert not found.stray
    assert set(found.stores) == {128}
    assert found.shared <= SHARED[120]


def test_sm120_has_no_mixed_pairs() -> None:
    """The reason why its registry entry does not list them: Triton multiplies them as bf16. Once this fails, it can."""
    pair = ("mxfp8_e4m3", "mxfp4")
    found, _ = compiled(120, pair, (torch.bfloat16, False, False), _blackwell.tile_for_sm120(*operands(pair)))
    assert set(re.findall(r"mma\.sync\S+", found.ptx)) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


def test_m_and_k_are_not_specialized() -> None:
    tile = Tile(128, 128, 128, 8, 3)
    cases = [operands(("mxfp8_e4m3", "mxfp8_e4m3"), rows, k) for rows in (1, 16, 17) for k in (K, 90)]
    with compiled_for(100) as kernels:
        for a, b in cases:
            _blackwell.launch_gemm(a, b, torch.empty(a.rows, N), None, accumulate=False, tile=tile)
    assert len(kernels) == len(cases)
    assert len({kernel.hash for kernel in kernels}) == 1
