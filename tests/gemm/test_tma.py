"""TMA descriptors of the Hopper kernels, and repeated launches with other operands, strides and addresses."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is not installed")

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import BlockScaled
from blockscale.gemm import ACCUMULATOR_DTYPES, exact_mm
from blockscale.gemm.heuristics import Plan
from support.products import HOPPER_DB

_launch = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
on_hopper = [pytest.mark.gpu, pytest.mark.sm90]


def operands(m: int, n: int = 256, k: int = 512) -> tuple[BlockScaled, BlockScaled]:
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    return bs.quantize(x, "fp8_1x128"), bs.quantize(w, "fp8_128x128")


def db(want: Tensor, got: Tensor) -> float:
    return sqnr_db(want, got.double()).item()


def check(a: BlockScaled, b: BlockScaled, out: Tensor) -> None:
    assert db(exact_mm(a, b), out) > HOPPER_DB[out.dtype]


ANY_SIZES = [(1, 1), (1, 15), (7, 17), (3, 127), (130, 129), (15, 4095), (2111, 33), (64, 128)]


@pytest.mark.parametrize("form", ["fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3_128x128"])
@pytest.mark.parametrize(("rows", "length"), ANY_SIZES)
def test_tma_can_address_codes_of_any_size(form: str, rows: int, length: int) -> None:
    """Casts along either axis need no copy: rows of codes and of scales are padded."""
    along = bs.quantize(torch.randn(rows, length), form)
    across = bs.quantize(torch.randn(length, rows), form, axis=-2).mT
    for q in (along, across):
        codes = _launch.unpadded(q.data, q.length)
        assert codes.shape == (rows, length)
        assert _launch.is_tma_addressable(codes)
        if q.scale_layout == "mn_major":
            assert _launch.is_tma_addressable(q.scale.mT)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 7), (5, 8), (3, 2111), (2, 2112)])
def test_empty_for_tma_is_addressable(rows: int, columns: int, dtype: torch.dtype) -> None:
    room = _launch.empty_for_tma((rows, columns), dtype, torch.device("cpu"))
    assert room.shape == (rows, columns)
    assert room.dtype == dtype
    assert _launch.is_tma_addressable(room)
    assert room.stride(0) * dtype.itemsize < columns * dtype.itemsize + 16, "no more padding than needed"
    assert _launch.is_tma_addressable(torch.empty(rows, columns, dtype=dtype)) == (columns * dtype.itemsize % 16 == 0)


@pytest.mark.parametrize("module", ["_hopper", "_hopper_mx"])
@pytest.mark.parametrize("n", [1, 7, 15, 17, 24, 2111])
def test_outputs_that_tma_cannot_store(n: int, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reference in place of the kernel: its output is always TMA addressable, and all results are correct."""
    backend = pytest.importorskip(f"blockscale.gemm.{module}")
    formats = ("fp8_1x128", "fp8_128x128") if module == "_hopper" else ("mxfp8_e4m3", "mxfp8_e4m3_128x128")
    a, b = bs.quantize(torch.randn(5, 33), formats[0]), bs.quantize(torch.randn(n, 33), formats[1])
    product, bias, added = exact_mm(a, b).float(), torch.randn(n), []

    def launch(
        a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan
    ) -> None:
        assert _launch.is_tma_addressable(out)
        assert plan.tile.m_subtiles == 1 or not accumulate
        added.append(accumulate)
        whole = product if bias is None else product + bias
        out.copy_(out + whole if accumulate else whole)
        # like TMA: it overwrites up to the next multiple of 16 bytes
        width = n + -n % (16 // out.element_size())
        out.as_strided((len(out), width), out.stride(), out.storage_offset())[:, n:] = torch.nan

    monkeypatch.setattr(backend, "launch", launch)
    serve = backend.scaled_mm if module == "_hopper" else backend.scaled_mm_mx
    for dtype in HOPPER_DB:
        out = torch.full((5, n), torch.nan, dtype=dtype)
        serve(a, b, out, bias=bias, accumulate=False)
        assert torch.equal(out, (product + bias).to(dtype))
    for dtype in ACCUMULATOR_DTYPES:
        want, pad = (1 + product).to(dtype), -n % (16 // dtype.itemsize)
        for width in (n, n + pad, n + 1 + pad):
            frame = torch.ones(5, width, dtype=dtype)
            total = frame[:, -n:]
            serve(a, b, total, bias=None, accumulate=True)
            assert torch.equal(total, want)
            assert added[-1] == _launch.is_tma_writable(total), "no second pass if TMA can store to it"
            assert bool((frame[:, :-n] == 1).all())
        frame = torch.ones(5, n + pad + 8, dtype=dtype)  # rows are addressable, and continue after the window
        serve(a, b, frame[:, :n], bias=None, accumulate=True)
        assert torch.equal(frame[:, :n], want)
        assert bool((frame[:, n:] == 1).all()), "written outside the window"


def test_specialization_of_sizes() -> None:
    assert [_launch.specialization_of(size) for size in (1, 2, 15, 16, 17, 2111, 2112)] == [1, 0, 0, 16, 0, 0, 16]


@pytest.mark.usefixtures("forgotten")
class TestRepeatedLaunches:
    pytestmark = on_hopper

    def test_recordings_keep_no_tensor_alive(self) -> None:
        a, b = operands(100)
        bs.scaled_mm(a, b)  # allocates the counters of the stream
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            bs.scaled_mm(a, b)
        assert torch.cuda.memory_allocated() == before
        del a, b
        assert torch.cuda.memory_allocated() < before

    @pytest.mark.parametrize("m", [1, 16, 100, 4096])
    def test_other_operands(self, m: int) -> None:
        for _ in range(4):
            a, b = operands(m)
            check(a, b, bs.scaled_mm(a, b))

    def test_other_sizes_and_dtypes(self) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for _ in range(4):
                for m, n, k in ((100, 256, 512), (101, 256, 512), (100, 272, 512), (100, 256, 528)):
                    a, b = operands(m, n, k)
                    check(a, b, bs.scaled_mm(a, b, dtype))

    def test_bias_and_accumulation(self) -> None:
        a, b = operands(100)
        for dtype in (torch.bfloat16, torch.float32):
            for _ in range(4):
                bias = torch.randn(256, device="cuda", dtype=dtype)
                got = bs.scaled_mm(a, b, torch.float32, bias=bias)
                assert db(exact_mm(a, b) + bias.double(), got) > HOPPER_DB[torch.float32]
        for _ in range(4):
            before = torch.randn(100, 256, device="cuda")
            got = bs.scaled_mm(a, b, torch.float32, accumulate=before.clone())
            assert db(exact_mm(a, b) + before.double(), got) > HOPPER_DB[torch.float32]

    def test_operands_that_are_copied_for_tma(self) -> None:
        a, b = operands(100)
        frame = torch.zeros(100, 257, device="cuda")
        for _ in range(4):
            out = frame.zero_()[:, 1:]
            check(a, b, bs.scaled_mm(a, b, torch.float32, accumulate=out))

    def test_threads(self) -> None:
        """A backward launches from another thread than the forward."""
        pairs = [operands(m) for m in (100, 100, 300, 300)]
        wrong: list[BaseException] = []

        def work(a: BlockScaled, b: BlockScaled) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(50):
                        out = bs.scaled_mm(a, b)
                    torch.cuda.current_stream().synchronize()
                    check(a, b, out)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_cuda_graph(self) -> None:
        a, b = operands(100)
        bs.scaled_mm(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = bs.scaled_mm(a, b)
        a.data.copy_(torch.randn(100, 512, device="cuda").to(a.data.dtype))
        graph.replay()
        check(a, b, out)

    def test_launch_hooks_are_called(self) -> None:
        from triton import knobs

        a, b = operands(100)
        bs.scaled_mm(a, b)
        told: list[object] = []
        with knobs.runtime.scope():
            knobs.runtime.launch_enter_hook = lambda *args: told.append(args)
            check(a, b, bs.scaled_mm(a, b))
        assert told
