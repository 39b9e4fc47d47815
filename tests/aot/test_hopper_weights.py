"""Machine code of the weight-only Hopper GEMM, compiled without a GPU: no spills, wgmma with weights in registers that
ptxas does not serialise, few instructions per decoded value, dependent launch, shared memory that fits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

import blockscale as bs
from aot.compiled import CAN_COMPILE, Report, compiled_for, report
from blockscale.gemm import heuristics_weights as weights
from blockscale.gemm import pack_weight
from support.helpers import first_of

_hopper_weights = pytest.importorskip("blockscale.gemm._hopper_weights", reason="this Triton has no Gluon for Hopper")
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Case:
    format: str
    m: int
    n: int = 512
    k: int = 1024
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    pdl: bool = True

    def __str__(self) -> str:
        words = [self.format, f"{self.m}x{self.n}x{self.k}", str(self.dtype)[6:]]
        return " ".join([*words, *(["bias"] if self.bias else []), *([] if self.pdl else ["no pdl"])])


CASES = [
    *(Case(name, m) for name in weights.BITS for m in (1, 16, 32, 64)),
    *(Case(name, 64, dtype=torch.float32, bias=True) for name in weights.BITS),
    Case("mxfp4", 16, dtype=torch.float16),
    *(Case(name, m, n=511, k=2047, bias=True) for name in ("mxfp4", "nvfp4") for m in (1, 64)),
    Case("mxfp4", 1, n=1, bias=True),
    Case("mxfp4", 1, pdl=False),
]
FIRST = (Case("mxfp4", 1), Case("nvfp4", 64, dtype=torch.float32, bias=True))

# By format: multiplications of a chunk and a consumer's thread, bf16 pairs: 32 values by 16, of NVFP4 also 4 pairs of
# scales twice. LOP3 and SHF of a value of a thread, a tenth above today's; shifts to the left are IMAD, on other units.
MULTIPLICATIONS = {"mxfp4": 16, "nvfp4": 24, "mxfp8_e4m3": 16, "bf16": 0}
INTEGER_PER_VALUE = {"mxfp4": 1.35, "nvfp4": 1.5, "mxfp8_e4m3": 1.77}


def compiled(case: Case) -> Report:
    w = torch.zeros(case.n, case.k, dtype=torch.bfloat16)
    operand = w if case.format == "bf16" else pack_weight(bs.quantize(w, case.format))
    x, out = torch.zeros(case.m, case.k, dtype=torch.bfloat16), torch.zeros(case.m, case.n, dtype=case.dtype)
    bias = torch.zeros(case.n, dtype=torch.bfloat16) if case.bias else None
    tile = weights.tile_for(case.m, case.format)._replace(pdl=case.pdl)
    with compiled_for(90) as kernels:
        _hopper_weights.launch(x, operand, out, bias, cut=weights.schedule(case.n, case.k, 132), tile=tile)
    assert kernels[0].metadata.launch_pdl == case.pdl
    return report(kernels[0])


@pytest.mark.parametrize("case", first_of(CASES, lambda case: case in FIRST), ids=str)
def test_machine_code(case: Case) -> None:
    found, tile = compiled(case), weights.tile_for(case.m, case.format)
    assert found.spilled == 0
    assert not found.stray
    # the most at the start of 20 warps; each part sets its own limit afterwards
    assert found.registers == 96
    chunks = 4 * tile.chunks  # of all consumers
    assert found.opcodes["HGMMA"] == 4 * chunks, "one MMA per 16 of K"
    # ptxas waits for every MMA if it loses track of one in flight
    assert found.opcodes["WARPGROUP"] == chunks + 4, "MMAs of a stage are waited for at once"
    assert found.opcodes["HMUL2"] == MULTIPLICATIONS[case.format] * chunks
    assert f"wgmma.mma_async.sync.aligned.m64n{tile.bn}k16.f32.bf16.bf16" in found.ptx
    assert ".ftz" not in found.ptx, "codes and scales may be subnormal"
    for instruction in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        assert (instruction in found.ptx) == case.pdl
    stages = tile.stages * weights.stage_bytes(case.format, tile.bn, tile.chunks)
    assert stages <= found.shared <= stages + (8192 if tile.bn > 8 else 0) + 1024
    assert found.shared <= weights.SHARED_BYTES


@pytest.mark.sweep
def test_16_byte_stores() -> None:
    """Stores of bf16 outputs for 16 tokens have 16 bytes; those of partials 8, as the accumulator lies in registers."""
    found = compiled(Case("mxfp4", 16))
    assert found.stores[128] == 4, "one for each consumer"
    assert set(found.stores) == {64, 128}


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8_e4m3"])
def test_instructions_per_value(name: str) -> None:
    """Integer instructions that a stage of twice the K has more: those of decoding and little else."""
    tile = weights.tile_for(1, name)
    counts = []
    for chunks in (2, 4):
        w = pack_weight(bs.quantize(torch.zeros(512, 1024), name))
        x, out = torch.zeros(1, 1024, dtype=torch.bfloat16), torch.zeros(1, 512, dtype=torch.bfloat16)
        stages = 3
        with compiled_for(90) as kernels:
            cut = weights.schedule(512, 1024, 132)
            _hopper_weights.launch(x, w, out, None, cut=cut, tile=tile._replace(chunks=chunks, stages=stages))
        found = report(kernels[0])
        counts.append(found.opcodes["LOP3"] + found.opcodes["SHF"])
    assert (counts[1] - counts[0]) / (2 * 4 * 32) <= INTEGER_PER_VALUE[name]


@pytest.mark.sweep
def test_the_operator_launches_it() -> None:
    """Through scaled_mm, forced: 130 rows are three launches, of two kernels. Nothing runs."""
    w = pack_weight(bs.quantize(torch.zeros(300, 320), "mxfp4"))
    with compiled_for(90) as kernels, bs.use_backend(gemm="hopper_weights"):
        bs.scaled_mm(torch.zeros(130, 320, dtype=torch.bfloat16), w)
    assert [kernel.metadata.name for kernel in kernels] == ["weights_kernel"] * 3
    assert kernels[0].hash == kernels[1].hash != kernels[2].hash
