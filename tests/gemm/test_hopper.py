"""FP8 GEMM on a Hopper GPU: every tile and epilogue, partial tiles, and nothing written outside the output."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import BlockScaled
from blockscale.gemm import ACCUMULATOR_DTYPES, exact_mm, heuristics
from support.products import (
    HOPPER_DB,
    ODD_SIZES,
    check_frame,
    check_replay,
    fp8_operands,
    framed,
    hopper_gate,
    with_poisoned_pad,
)

_hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


def plans(tile: heuristics.Tile, problem: heuristics.Problem) -> list[heuristics.Plan]:
    whole, split = heuristics.data_parallel_plan(tile, problem), heuristics.stream_k_plan(tile, problem)
    return [whole, *([] if split is None else [split])]


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize("tile", heuristics.TILES, ids=lambda tile: tile.label)
def test_every_tile(tile: heuristics.Tile, weight: str) -> None:
    """Tails in all three dimensions, all outputs and bias, data-parallel and stream-K; twice, for the same bytes."""
    for m, n, k in ((1, 16, 16), (16, 2112, 7168), (300, 176, 400), (517, 2112, 1408), (2048, 1536, 1024)):
        a, b = fp8_operands(m, n, k, weight)
        want = exact_mm(a, b)
        bias = torch.randn(n, device="cuda").bfloat16()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            problem = heuristics.Problem(m, n, k, weight == "fp8_1x128", dtype == torch.float32, 132)
            for plan in plans(tile, problem):
                for given in (None, bias):
                    frame, out = framed(m, n, dtype)
                    _hopper.launch(a, b, out, given, accumulate=False, plan=plan)
                    exact = want if given is None else want + given.double()
                    assert sqnr_db(exact, out) > HOPPER_DB[dtype], (m, n, k, dtype, plan)
                    check_frame(frame, m, n)
                    again = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
                    _hopper.launch(a, b, again, given, accumulate=False, plan=plan)
                    assert torch.equal(out, again), (m, n, k, dtype, plan)


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize("tile", heuristics.TILES, ids=lambda tile: tile.label)
def test_every_tile_takes_odd_sizes(tile: heuristics.Tile, weight: str) -> None:
    """Neither N nor K in multiples of 16, straight into a window whose rows are padded to multiples of 16 bytes."""
    for m, n, k in ODD_SIZES[:3]:
        a, b = fp8_operands(m, n, k, weight)
        want, bias = exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
        for dtype, given in ((torch.bfloat16, bias), (torch.float32, None)):
            exact = want if given is None else want + given.double()
            for plan in plans(tile, heuristics.Problem(m, n, k, weight == "fp8_1x128", dtype == torch.float32, 132)):
                frame, out = framed(m, n, dtype)
                _hopper.launch(a, b, out, given, accumulate=False, plan=plan)
                assert sqnr_db(exact, out) > hopper_gate(dtype, m, n), (m, n, k, dtype, plan)
                check_frame(frame, m, n, pads=True)


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize("n", [1, 7, 15, 17, 2111])
@pytest.mark.parametrize("k", [1, 15, 17, 127, 129, 4095])
def test_any_n_and_k(k: int, n: int, weight: str) -> None:
    """All outputs, with a bias and with `out +=`; outputs that TMA cannot store take a second pass."""
    m = 517
    a, b = fp8_operands(m, n, k, weight)
    want, bias, before = exact_mm(a, b), torch.randn(n, device="cuda").bfloat16(), torch.randn(m, n, device="cuda")
    with bs.use_backend(gemm="hopper"):
        for dtype in HOPPER_DB:
            for given in (None, bias):
                exact = want if given is None else want + given.double()
                got = bs.scaled_mm(a, b, dtype, bias=given)
                assert got.is_contiguous()
                assert sqnr_db(exact, got) > hopper_gate(dtype, m, n), (m, n, k, dtype)
        alone = bs.scaled_mm(a, b, torch.float32)
        for dtype in ACCUMULATOR_DTYPES:
            start = before.to(dtype)
            total = bs.scaled_mm(a, b, accumulate=start.clone())
            assert torch.equal(total, (start.float() + alone).to(dtype)), "one more rounding, no other sum"
        frame, window = framed(m, n, torch.float32)
        bs.scaled_mm(a, b, accumulate=window.copy_(before))
    assert sqnr_db(want + before.double(), window) > hopper_gate(torch.float32, m, n)
    check_frame(frame, m, n)


@pytest.mark.parametrize("tokens", [1, 17, 129, 4095])
def test_wgrad_over_any_number_of_tokens(tokens: int) -> None:
    """Operands cast along tokens: no codes or scales are copied first."""
    dy, x = torch.randn(tokens, 272, device="cuda").bfloat16(), torch.randn(tokens, 333, device="cuda").bfloat16()
    a, b = bs.quantize(dy, "fp8_1x128", axis=-2).mT, bs.quantize(x, "fp8_1x128", axis=-2).mT
    for left, right in ((a, b), (b, a)):
        want = exact_mm(left, right)
        total = torch.ones(want.shape, device="cuda")
        assert bs.explain("gemm", left, right, accumulate=True).taken.backend == "hopper"
        bs.scaled_mm(left, right, accumulate=total)
        if right.rows % 8 == 0:  # TMA cannot store other rows: torch copies them from a buffer
            check_replay(lambda: bs.scaled_mm(left, right), left, right)  # noqa: B023, called at once
        assert sqnr_db(want + 1, total) > HOPPER_DB[torch.float32]


@pytest.mark.parametrize("backend", ["hopper", "hopper_rows"])
def test_padding_of_rows_is_not_read(backend: str) -> None:
    for weight in ("fp8_128x128", "fp8_1x128"):
        for m, n, k in ((32, 2111, 129), (7, 40, 17)):
            a, b = fp8_operands(m, n, k, weight)
            with bs.use_backend(gemm=backend):
                got = bs.scaled_mm(with_poisoned_pad(a), with_poisoned_pad(b), torch.float32)
                assert torch.equal(got, bs.scaled_mm(a, b, torch.float32))


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize(
    "tile", [tile for tile in heuristics.TILES if tile.m_subtiles == 1], ids=lambda tile: tile.label
)
def test_every_tile_accumulates(tile: heuristics.Tile, weight: str, dtype: torch.dtype) -> None:
    """Into a window of a buffer; the same bytes twice."""
    wide = dtype == torch.float32
    for m, n, k in ((1, 16, 16), (300, 176, 400), (517, 2112, 1408), (517, 2111, 4095), (2048, 1536, 1024)):
        a, b = fp8_operands(m, n, k, weight)
        want, before = exact_mm(a, b), torch.randn(m, n, device="cuda").to(dtype)
        for plan in plans(tile, heuristics.Problem(m, n, k, weight == "fp8_1x128", wide, 132, accumulate=True)):
            results: list[Tensor] = []
            for _ in range(2):
                frame, out = framed(m, n, dtype)
                out.copy_(before)
                _hopper.launch(a, b, out, None, accumulate=True, plan=plan)
                assert sqnr_db(want + before.double(), out) > HOPPER_DB[dtype], (m, n, k, plan)
                check_frame(frame, m, n, pads=True)
                results.append(out)
            assert torch.equal(*results)


def test_streamk_graphs_and_streams_do_not_share_counters() -> None:
    """The same stream-K GEMM in two streams at once, and from a CUDA graph beside both."""
    a, b = fp8_operands(64, 2112, 7168, "fp8_128x128")
    plan = heuristics.stream_k_plan(heuristics.TILES[-1], heuristics.Problem(64, 2112, 7168, False, True, 132))
    assert plan is not None
    want = torch.empty(64, 2112, device="cuda")
    _hopper.launch(a, b, want, None, accumulate=False, plan=plan)
    outs = [torch.full_like(want, torch.nan) for _ in range(30)]
    graph, captured = torch.cuda.CUDAGraph(), torch.full_like(want, torch.nan)
    with torch.cuda.graph(graph):
        _hopper.launch(a, b, captured, None, accumulate=False, plan=plan)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        with torch.cuda.stream(streams[number % 2]):
            _hopper.launch(a, b, out, None, accumulate=False, plan=plan)
        with torch.cuda.stream(streams[2]):
            graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in (*outs, captured))


def test_random_shapes() -> None:
    """3000 random shapes with the plans that the library chooses; half accumulate into a framed buffer."""
    draw = random.Random(7)
    for number in range(3000):
        m, unit = draw.randint(1, draw.choice((33, 700))), draw.choice((1, 16))
        n, k = (unit * draw.randint(16 // unit, most // unit) for most in (960, 1280))
        a, b = fp8_operands(m, n, k, draw.choice(("fp8_128x128", "fp8_1x128")))
        backend = "hopper_rows" if m <= heuristics.MAX_FEW_ROWS and draw.random() < 0.5 else "hopper"
        frame, out = framed(m, n, torch.float32)
        with bs.use_backend(gemm=backend):
            if number % 2:
                bs.scaled_mm(a, b, accumulate=out.zero_())
                check_frame(frame, m, n)
            else:
                out = bs.scaled_mm(a, b, torch.float32)
        assert sqnr_db(exact_mm(a, b), out) > hopper_gate(torch.float32, m, n), (m, n, k, b.format, backend)


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize(
    "tile", [tile for tile in heuristics.TILES if tile.m_subtiles == 1], ids=lambda tile: tile.label
)
def test_large_accumulation_is_repeatable(tile: heuristics.Tile, weight: str) -> None:
    """Many tiles per CTA, whose loads of the output delay those of scales: this test found the race in which TMA
    overwrote scales before they had been read."""
    a, b = fp8_operands(4096, 4096, 4096, weight)
    want = exact_mm(a, b)
    for plan in plans(tile, heuristics.Problem(4096, 4096, 4096, weight == "fp8_1x128", True, 132, accumulate=True)):
        for _ in range(4):
            out = torch.full((4096, 4096), 1000.0, device="cuda")
            _hopper.launch(a, b, out, None, accumulate=True, plan=plan)
            # one wrong scale in one of 32 K-blocks shifts a sum by more than 1
            assert float((out - 1000.0 - want).abs().max()) < 0.25, plan


def test_unaligned_operands_and_buffers() -> None:
    """Codes and a gradient buffer that do not start at multiples of 16 bytes, and a transposed buffer."""
    m, n, k = 200, 304, 528
    a, b = fp8_operands(m, n, k, "fp8_128x128")
    want = exact_mm(a, b)
    for dtype in ACCUMULATOR_DTYPES:
        off = torch.empty(m * n + 1, dtype=dtype, device="cuda")[1:].view(m, n).zero_()
        apart = torch.zeros(n, m, dtype=dtype, device="cuda").mT
        for buffer in (off, apart):
            with bs.use_backend(gemm="hopper"):
                bs.scaled_mm(a, b, accumulate=buffer)
                bs.scaled_mm(a, b, accumulate=buffer)
            assert sqnr_db(2 * want, buffer) > HOPPER_DB[dtype]
    raw = torch.empty(m * k + 1, dtype=torch.uint8, device="cuda")[1:].view(m, k)
    raw.copy_(a.data.view(torch.uint8))
    moved = BlockScaled(raw.view(a.data.dtype), a.scale, a.global_scale, a.format, a.axis, a.scale_layout, a.shape)
    with bs.use_backend(gemm="hopper"):
        assert torch.equal(bs.scaled_mm(moved, b), bs.scaled_mm(a, b))


def test_nan_and_zero_rows_stay_in_their_rows() -> None:
    a, b = fp8_operands(130, 144, 272, "fp8_128x128")
    x = torch.randn(130, 272, device="cuda")
    x[3, 5], x[7] = torch.nan, 0.0
    a = bs.quantize(x, "fp8_1x128")
    with bs.use_backend(gemm="hopper"):
        got = bs.scaled_mm(a, b, torch.float32)
    assert bool(got[3].isnan().all())
    assert bool((got[7] == 0).all())
    assert int(got.isnan().any(1).sum()) == 1
