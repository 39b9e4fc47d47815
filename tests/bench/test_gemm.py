"""GEMM suite: correct GEMMs are timed, wrong ones are not, and peers multiply the operands that they claim."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import blockscale as bs
from benchmarks.report import gemm as report
from blockscale.bench import gemms, harness, rooflines, shapes, store, timing
from blockscale.bench.suites import gemm
from blockscale.hardware import Capability, capability
from blockscale.registry import Request
from blockscale.roofline import Ceilings

CPU = torch.device("cpu")
HOPPER = Capability("cuda", 90)
CEILINGS = Ceilings("", "hopper", 4e12, 7e14, 1.3e15, None, "")
WHERE = store.where(CPU, "0.1.0", "test")
ADDED = gemm.Kind("fp8_1x128", "fp8_1x128", accumulate=True)


def case(kind: gemm.Kind = gemm.WEIGHTS, *peers: str) -> harness.Case:
    return harness.with_peers(gemm.case(kind, shapes.TINY_PRODUCT, capability(CPU), CEILINGS, group="large"), peers)


def run(case: harness.Case, device: torch.device = CPU) -> store.Row:
    budget = harness.Budget(rounds=1, seconds=1e-4)
    return harness.run_case(case, "gemm", device, WHERE, budget, timing.Telemetry())


def request(*formats: str, product: tuple[int, int, int] = (16, 256, 256), sm: int = 90) -> Request:
    return Request("gemm", Capability("cuda", sm), formats, product, torch.bfloat16)


def test_every_case_is_listed_once():
    found = list(gemm.cases(HOPPER, CEILINGS))
    names = [case.name for case in found]
    assert len(names) == len(set(names)) == 16 + 12 + 24 + 150 + 3 + 8
    assert list(dict.fromkeys(case.group for case in found)) == list(report.GROUPS)
    for name in (
        "1x128 @ 128x128 4096x7168x18432",
        "1x128 @ 1x128 fp32 += 8192x8192x8192",
        "few rows 1x128 @ 128x128 1x2112x7168",
        "gpt-oss 1x128 @ 128x128 16384x2880x4096",
        "mxfp4 @ mxfp4 8192x8192x8192",
    ):
        assert name in names
    assert not any(case.shape[2] < 4096 for case in found if "+=" in case.name)


@pytest.mark.parametrize("kind", [gemm.WEIGHTS, ADDED, gemm.Kind("nvfp4", "nvfp4")], ids=lambda kind: kind.label)
def test_a_correct_gemm_is_timed(kind: gemm.Kind):
    row = run(case(kind, "bf16", "row hopper"))
    assert not row.fault
    assert row.checked.startswith("16 rows")
    assert row.us is not None
    assert row.tflop_s == pytest.approx(2 * 16 * 256 * 256 / row.us / 1e6, abs=0.06)
    assert row.bound_us is not None
    assert row.percent_of_bound == pytest.approx(100 * row.bound_us / row.us, abs=0.06)
    assert row.sqnr_db is not None
    assert row.sqnr_db > (100 if kind.accumulate else 54)
    assert row.dtype == ("float32" if kind.accumulate else "bfloat16")
    assert 54 < row.peers["bf16"]["sqnr_db"] < 60
    assert {"us", "ratio", "tflop_s"} <= set(row.peers["bf16"])
    assert row.peers["row hopper"] == {"note": "refuses: runs on cuda, not on cpu"}


def last_row_is_off(out: torch.Tensor) -> torch.Tensor:
    out[-1] += 1
    return out


def one_value_is_missing(out: torch.Tensor) -> torch.Tensor:
    out[3, 5] = torch.nan
    return out


class Drifts:
    """A result whose last bit differs in every run."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out.view(torch.int16 if out.dtype == torch.bfloat16 else torch.int32)[2, 7] += self.calls
        return out


@pytest.mark.parametrize("kind", [gemm.WEIGHTS, ADDED], ids=lambda kind: kind.label)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (last_row_is_off, "dB from the exact one"),
        (one_value_is_missing, "1 values are not finite, or were not written"),
        (Drifts(), "1 values differ between two runs"),
    ],
    ids=["off", "missing", "drifts"],
)
def test_a_wrong_gemm_is_not_timed(kind: gemm.Kind, spoil, says: str):
    good = case(kind)
    row = run(dataclasses.replace(good, run=lambda operands: spoil(good.run(operands))))
    assert says in row.problem
    assert row.fault
    assert (row.us, row.tflop_s, row.percent_of_bound, row.peers) == (None, None, None, {})


def test_a_gemm_that_does_not_accumulate_is_wrong():
    def overwrites(operands: gemms.Operands) -> torch.Tensor:
        return operands.acc.copy_(bs.scaled_mm(operands.a, operands.b, torch.float32))

    assert "a second sum" in run(dataclasses.replace(case(ADDED), run=overwrites)).problem


def test_a_kernel_that_raises_is_wrong_and_the_run_continues():
    def fails(operands: gemms.Operands) -> torch.Tensor:
        raise RuntimeError("no such\ninstruction")

    row = run(dataclasses.replace(case(), run=fails))
    assert row.problem == "fails: RuntimeError: no such"
    assert row.us is None


def test_refusals_become_notes():
    found = gemms.other_kernels(request("fp8_1x128", "fp8_128x128", product=(1, 256, 256)))
    assert "multiples of 4" in str(found["row torch"])
    assert found["row torch_sm100"] == "refuses: needs sm_100 to sm_103, this is sm_90"
    assert "not run" in str(found["row reference"])
    taken = bs.registry.select(request("fp8_1x128", "fp8_128x128")).backend
    assert f"row {taken}" not in gemms.other_kernels(request("fp8_1x128", "fp8_128x128"))


def test_every_other_backend_is_a_peer():
    found = gemms.other_kernels(request("mxfp4", "mxfp4"))
    taken = bs.registry.select(request("mxfp4", "mxfp4")).backend
    assert set(found) == {f"row {row.backend}" for row in bs.registry.kernels("gemm")} - {f"row {taken}"}


@pytest.mark.parametrize("name", ["fp8_1x128", "mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_compared_rows_equal_those_of_the_whole_gemm(name: str):
    q = bs.quantize(torch.randn(40, 256), name)
    index = torch.tensor([0, 3, 39])
    got, want = bs.gemm.exact_mm(gemms.take_rows(q, index), q), bs.gemm.exact_mm(q, q)[index]
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-12)  # the reduction order depends on the shape


def test_the_last_row_is_compared():
    operands = gemms.make_operands((1000, 16, 128), ("fp8_1x128", "fp8_1x128"), CPU, accumulate=False)
    assert len(operands.judged) == len(operands.judged.unique()) == 256
    assert operands.judged[[0, -1]].tolist() == [0, 999]


def test_rowwise_operands_are_near_their_source():
    operands = gemms.make_operands(shapes.TINY_PRODUCT, ("fp8_1x128", "fp8_128x128"), CPU, accumulate=False)
    codes, scale, _, _ = operands.rowwise
    assert gemms.sqnr_db(operands.x, codes.float() * scale) > 28
    assert operands.rowwise_accuracy(lambda o: o.x.float() @ o.w.float().mT) < 40  # of its own operands, not of x and w


@pytest.mark.parametrize("weights", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize("product", [(16, 256, 256), (5, 144, 384)])
def test_torchao_gets_scales_as_it_reads_them(weights: str, product, monkeypatch: pytest.MonkeyPatch):
    """A stand-in with torchao's contract: its stride checks, and scales read up to the end of a tile of 256."""

    def multiply(a, b, a_s, b_s, block, dtype):
        (m, k), n = a.shape, b.shape[1]
        blocks, edge = k // block, 256
        vector = weights == "fp8_1x128"
        assert (a.stride(-1), b.stride(-2), a_s.stride(-2), b_s.stride(-1 if vector else -2)) == (1, 1, 1, 1)
        rows, columns = -(-m // edge) * edge, -(-n // edge) * edge
        a_all = a_s.as_strided((rows, blocks), a_s.stride())  # raises when this leaves the storage
        b_all = b_s.as_strided((blocks, columns if vector else columns // block), b_s.stride())
        out = torch.zeros(m, n)
        for i in range(blocks):
            span = slice(i * block, (i + 1) * block)
            scale_b = b_all[i] if vector else b_all[i].repeat_interleave(block)
            out += (a[:, span].float() @ b[span].float()) * a_all[:m, i, None] * scale_b[:n]
        return out.to(dtype)

    names = ("triton_fp8_gemm_1x128_128x1", "triton_fp8_gemm_1x128_128x128")
    monkeypatch.setattr(gemms, "torchao", lambda name: SimpleNamespace(**dict.fromkeys(names, multiply)))
    asked = request("fp8_1x128", weights, product=product)
    peer = gemms.peers(asked, compiling=True)["torchao"]
    assert isinstance(peer, harness.Peer)
    assert peer.note == names[weights == "fp8_128x128"]
    operands = gemms.make_operands(product, ("fp8_1x128", weights), CPU, accumulate=False)
    assert peer.accuracy is not None
    assert peer.accuracy(operands) > 54


def test_torchao_is_a_peer_where_it_can_run():
    def note(*formats: str, k: int = 256, compiling: bool = True) -> object:
        asked = request(*formats, product=(16, 256, k))
        return gemms.peers(asked, compiling=compiling)["torchao"]

    assert "has none" in str(note("mxfp4", "mxfp4"))
    assert "multiples of 128" in str(note("fp8_1x128", "fp8_128x128", k=2880))
    assert note("fp8_1x128", "fp8_128x128", compiling=False) == harness.NOT_COMPILED


def test_the_bound_is_the_longer_of_compute_and_memory_time():
    large = gemm.case(gemm.WEIGHTS, shapes.SQUARE, HOPPER, CEILINGS, group="")
    assert large.bound_us == pytest.approx(2 * 8192**3 / 1300e6)
    few = gemm.case(gemm.WEIGHTS, (1, 7168, 18432), HOPPER, CEILINGS, group="")
    assert few.bytes == 18432 + 144 * 4 + 7168 * 18432 + 56 * 144 * 4 + 7168 * 2
    assert few.bound_us == pytest.approx(few.bytes / 4e6)
    upcast = gemm.case(gemm.Kind("mxfp4", "mxfp4"), shapes.SQUARE, HOPPER, CEILINGS, group="")
    assert upcast.bound_us == pytest.approx(2 * 8192**3 / 700e6), "no units for it: the rate of bf16"
    added = gemm.case(ADDED, (4096, 4096, 4096), HOPPER, CEILINGS, group="")
    assert added.bytes == 2 * (4096 * 4096 + 4096 * 32 * 4) + 2 * 4096 * 4096 * 4


def test_this_machine_has_ceilings():
    found = rooflines.measure_ceilings(CPU, rounds=1, seconds=1e-4)
    assert found.bandwidth > 0
    assert found.bf16 > 0


def test_zero_error_has_a_finite_sqnr():
    assert gemms.sqnr_db(torch.ones(3), torch.ones(3)) == gemms.NO_ERROR_DB
    assert gemms.sqnr_db(torch.ones(3), torch.full((3,), torch.nan)) != gemms.NO_ERROR_DB


@pytest.mark.gpu
@pytest.mark.sm90
def test_rows_on_hopper():
    device = torch.device("cuda")
    for kind in (gemm.WEIGHTS, ADDED):
        row = run(gemm.case(kind, (512, 1024, 2048), HOPPER, CEILINGS, group="large"), device)
        assert not row.fault
        assert row.method == "graph"
        assert {"rowwise fast", "rowwise", "bf16"} <= {name for name, cell in row.peers.items() if "us" in cell}
