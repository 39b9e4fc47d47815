"""The second launch of a product gives what the first gave, from a dictionary: other operands, strides, addresses."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is not installed")

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import BlockScaled
from blockscale.gemm import exact_mm
from products import HOPPER_DB

_launch = pytest.importorskip("blockscale.gemm._hopper_launch", reason="this Triton has no Gluon for Hopper")
on_hopper = [pytest.mark.gpu, pytest.mark.sm90]


def operands(m: int, n: int = 256, k: int = 512) -> tuple[BlockScaled, BlockScaled]:
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    return bs.quantize(x, "fp8_1x128"), bs.quantize(w, "fp8_128x128")


def db(want: Tensor, got: Tensor) -> float:
    return sqnr_db(want, got.double()).item()


def check(a: BlockScaled, b: BlockScaled, out: Tensor) -> None:
    assert db(exact_mm(a, b), out) > HOPPER_DB[out.dtype]


def test_a_descriptor_is_filled_as_its_class_would() -> None:
    from blockscale.gemm._gluon import gl

    layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.float8e4nv)
    first, second = (torch.zeros(128, 256, dtype=torch.float8_e4m3fn) for _ in range(2))
    made = _launch.descriptor(first, (64, 128), layout)
    filled = _launch._filled(dict(vars(made)), second)
    assert type(filled) is type(made)
    assert filled.base is second
    assert made.base is first
    want = _launch.descriptor(second, (64, 128), layout)
    assert {k: v for k, v in vars(filled).items() if k != "base"} == {
        k: v for k, v in vars(want).items() if k != "base"
    }


class TestAgain:
    pytestmark = on_hopper

    @pytest.fixture(autouse=True)
    def nothing_known(self) -> None:
        _launch._KNOWN.clear()

    @pytest.mark.parametrize("m", [1, 16, 100, 4096])
    def test_other_operands(self, m: int) -> None:
        for _ in range(4):
            a, b = operands(m)
            check(a, b, bs.scaled_mm(a, b))
        assert len(_launch._KNOWN) == 1

    def test_other_sizes_and_dtypes(self) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for _ in range(2):
                for m, n, k in ((100, 256, 512), (101, 256, 512), (100, 272, 512), (100, 256, 528)):
                    a, b = operands(m, n, k)
                    check(a, b, bs.scaled_mm(a, b, dtype))
        assert len(_launch._KNOWN) == 12

    def test_bias_and_adding(self) -> None:
        a, b = operands(100)
        for dtype in (torch.bfloat16, torch.float32):
            for _ in range(3):
                bias = torch.randn(256, device="cuda", dtype=dtype)
                got = bs.scaled_mm(a, b, torch.float32, bias=bias)
                assert db(exact_mm(a, b) + bias.double(), got) > HOPPER_DB[torch.float32]
        for _ in range(3):
            before = torch.randn(100, 256, device="cuda")
            got = bs.scaled_mm(a, b, torch.float32, accumulate=before.clone())
            assert db(exact_mm(a, b) + before.double(), got) > HOPPER_DB[torch.float32]

    def test_what_is_copied_first_is_not_remembered(self) -> None:
        a, b = operands(100)
        frame = torch.zeros(100, 257, device="cuda")
        for _ in range(2):
            out = frame.zero_()[:, 1:]
            check(a, b, bs.scaled_mm(a, b, torch.float32, accumulate=out))

    def test_threads(self) -> None:
        """As a backward does beside a forward."""
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

    def test_a_graph(self) -> None:
        a, b = operands(100)
        bs.scaled_mm(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = bs.scaled_mm(a, b)
        a.data.copy_(torch.randn(100, 512, device="cuda").to(a.data.dtype))
        graph.replay()
        check(a, b, out)

    def test_hooks_are_told(self) -> None:
        from triton import knobs

        a, b = operands(100)
        bs.scaled_mm(a, b)
        told: list[object] = []
        with knobs.runtime.scope():
            knobs.runtime.launch_enter_hook = lambda *args: told.append(args)
            check(a, b, bs.scaled_mm(a, b))
        assert told
