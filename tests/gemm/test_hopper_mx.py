"""MXFP8 GEMM on a Hopper GPU: every tile and epilogue, partial tiles, edge scale bytes, and nothing written outside
the output."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import BlockScaled
from blockscale.gemm import ACCUMULATOR_DTYPES, exact_mm, heuristics, heuristics_mx
from blockscale.gemm._reference import block_product
from support.products import HOPPER_DB, ODD_SIZES, check_frame, framed, hopper_gate, with_poisoned_pad

_hopper_mx = pytest.importorskip("blockscale.gemm._hopper_mx", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

E4M3, E5M2, WEIGHT = "mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3_128x128"
every_tile = pytest.mark.parametrize("tile", heuristics_mx.TILES, ids=lambda tile: tile.label)


def activations(m: int, k: int, name: str = E4M3) -> BlockScaled:
    return bs.quantize(torch.randn(m, k, device="cuda").bfloat16(), name)


def weights(n: int, k: int) -> BlockScaled:
    """Weights whose 128x128 blocks have different scales."""
    rows, columns = torch.arange(n, device="cuda") // 128 % 3 * 3.0, torch.arange(k, device="cuda") // 128 % 2 * 2.0
    w = torch.randn(n, k, device="cuda") * torch.exp2(rows[:, None] - columns)
    return bs.quantize(w.bfloat16(), WEIGHT)


def plan_for(
    tile: heuristics.Tile, m: int, n: int, k: int, dtype: torch.dtype, *, accumulate: bool = False
) -> heuristics.Plan:
    return heuristics_mx.plan_for(tile, heuristics.Problem(m, n, k, False, dtype == torch.float32, 132, accumulate))


def product(a: BlockScaled, b: BlockScaled, tile: heuristics.Tile, dtype: torch.dtype = torch.float32) -> Tensor:
    """GEMM into a buffer of NaN whose rows start at multiples of 16 bytes."""
    plan = plan_for(tile, a.rows, b.rows, a.length, dtype)
    out = torch.full((a.rows, b.rows + -b.rows % 16), torch.nan, dtype=dtype, device="cuda")[:, : b.rows]
    _hopper_mx.launch(a, b, out, None, accumulate=False, plan=plan)
    return out


def db(want: Tensor, got: Tensor) -> float:
    return sqnr_db(want, got).item()


@every_tile
def test_exact_products_match_bit_for_bit(tile: heuristics.Tile) -> None:
    """Codes of -1, 0 and 1 and scales near 1 need no rounding: one wrong scale changes the result."""
    for m, n, k in ((64, 64, 128), (1, 16, 16), (300, 176, 400), (517, 2112, 1408), (65, 2111, 129), (130, 7, 17)):
        exact: list[BlockScaled] = []
        for q in (activations(m, k), weights(n, k)):
            code = torch.randint(-1, 2, q.shape, device="cuda").float().to(q.data.dtype)
            scale = torch.randint(125, 130, q.scale.shape, device="cuda").to(torch.uint8)
            exact.append(replace(q, data=code, scale=scale.view(q.scale.dtype)))
        want = exact_mm(*exact)
        got = product(*exact, tile)
        wrong = got.double() != want
        assert not wrong.any(), (m, n, k, int(wrong.sum()), wrong.nonzero()[:8].tolist())
        assert torch.equal(block_product(*exact), got)


@every_tile
def test_every_tile(tile: heuristics.Tile) -> None:
    """Tails in all three dimensions, all outputs and bias; twice, for the same bytes."""
    for m, n, k in ((1, 16, 16), (16, 2112, 7168), (300, 176, 400), (517, 2112, 1408), (2048, 1536, 1024)):
        a, b = activations(m, k), weights(n, k)
        want, bias = exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            plan = plan_for(tile, m, n, k, dtype)
            for given in (None, bias):
                frame, out = framed(m, n, dtype)
                _hopper_mx.launch(a, b, out, given, accumulate=False, plan=plan)
                exact = want if given is None else want + given.double()
                assert db(exact, out) > HOPPER_DB[dtype], (m, n, k, dtype)
                check_frame(frame, m, n)
                again = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
                _hopper_mx.launch(a, b, again, given, accumulate=False, plan=plan)
                assert torch.equal(out, again), (m, n, k, dtype)


@every_tile
def test_every_tile_takes_odd_sizes(tile: heuristics.Tile) -> None:
    """Neither N nor K in multiples of 16, straight into a window whose rows are padded to multiples of 16 bytes."""
    for m, n, k in ODD_SIZES[:3]:
        a, b = activations(m, k), weights(n, k)
        want, bias = exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
        for dtype, given, accumulate in (
            (torch.bfloat16, bias, False),
            (torch.float32, None, False),
            (torch.float32, None, True),
            (torch.bfloat16, None, True),
        ):
            exact = want if given is None else want + given.double()
            frame, out = framed(m, n, dtype)
            plan = plan_for(tile, m, n, k, dtype, accumulate=accumulate)
            _hopper_mx.launch(a, b, out.fill_(1), given, accumulate=accumulate, plan=plan)
            assert db(exact + 1 if accumulate else exact, out) > hopper_gate(dtype, m, n), (m, n, k, dtype, accumulate)
            check_frame(frame, m, n, pads=True)


@pytest.mark.parametrize("n", [1, 7, 15, 17, 2111])
@pytest.mark.parametrize("k", [1, 15, 17, 127, 129, 4095])
def test_any_n_and_k(k: int, n: int) -> None:
    """All outputs, with a bias and with `out +=`; outputs that TMA cannot store take a second pass."""
    m = 517
    a, b = activations(m, k), weights(n, k)
    want, bias = exact_mm(a, b), torch.randn(n, device="cuda").bfloat16()
    with bs.use_backend(gemm="hopper"):
        for dtype in HOPPER_DB:
            for given in (None, bias):
                exact = want if given is None else want + given.double()
                assert db(exact, bs.scaled_mm(a, b, dtype, bias=given)) > hopper_gate(dtype, m, n), (n, k, dtype)
        for dtype in ACCUMULATOR_DTYPES:
            total = bs.scaled_mm(a, b, accumulate=torch.ones(m, n, dtype=dtype, device="cuda"))
            assert torch.equal(total, (1 + bs.scaled_mm(a, b, torch.float32)).to(dtype))
        got = bs.scaled_mm(with_poisoned_pad(a), with_poisoned_pad(b))
        assert torch.equal(got, bs.scaled_mm(a, b)), "the padding of rows is not read"


@every_tile
def test_e5m2_activations(tile: heuristics.Tile) -> None:
    a, b = activations(300, 1408, E5M2), weights(400, 1408)
    assert db(exact_mm(a, b), product(a, b, tile)) > HOPPER_DB[torch.float32]


@pytest.mark.parametrize(
    ("kind", "gate"),
    [("gaussian", 77.0), ("outliers", 71.5), ("positive", 63.5)],
    ids=["gaussian", "outliers", "positive"],
)
def test_gate_a(kind: str, gate: float, record_property: pytest.RecordProperty) -> None:
    """The gates of FP8 on this GPU; docs/numerics.md records the result."""
    x, w = torch.randn(512, 4096, device="cuda"), torch.randn(512, 4096, device="cuda")
    if kind == "outliers":
        x[:, :16] *= torch.linspace(20, 60, 16, device="cuda")
    if kind == "positive":
        x, w = x.abs(), w.abs()
    a, b = bs.quantize(x.bfloat16(), E4M3), bs.quantize(w.bfloat16(), WEIGHT)
    found = db(exact_mm(a, b), product(a, b, heuristics_mx.TILES[0]))
    record_property("sqnr_db", round(found, 2))
    assert found > gate


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
@every_tile
def test_every_tile_accumulates(tile: heuristics.Tile, dtype: torch.dtype) -> None:
    """Into a window of a buffer; the same bytes twice."""
    for m, n, k in ((1, 16, 16), (300, 176, 400), (517, 2112, 1408), (4096, 4096, 1024)):
        a, b = activations(m, k), weights(n, k)
        want, before = exact_mm(a, b), torch.randn(m, n, device="cuda").to(dtype)
        results: list[Tensor] = []
        for _ in range(2):
            frame, out = framed(m, n, dtype)
            out.copy_(before)
            plan = plan_for(tile, m, n, k, dtype, accumulate=True)
            _hopper_mx.launch(a, b, out, None, accumulate=True, plan=plan)
            assert db(want + before.double(), out) > HOPPER_DB[dtype], (m, n, k)
            check_frame(frame, m, n)
            results.append(out)
        assert torch.equal(*results)


@every_tile
def test_large_gemms_are_repeatable(tile: heuristics.Tile) -> None:
    """Many tiles per CTA and many passes over the stages: a factor that is overwritten too early shows here."""
    a, b = activations(4096, 4096), bs.quantize(torch.randn(4096, 4096, device="cuda").bfloat16(), WEIGHT)
    want = exact_mm(a, b)
    first = product(a, b, tile)
    # one wrong scale in one of 128 K-steps shifts a sum by more
    assert float((first - want).abs().max()) < 0.1
    for _ in range(8):
        assert torch.equal(product(a, b, tile), first)


def test_random_shapes() -> None:
    """Random shapes with the plans that the library chooses."""
    draw = random.Random(7)
    for _ in range(400):
        m, unit = draw.randint(1, 700), draw.choice((1, 16))
        n, k = (unit * draw.randint(16 // unit, most // unit) for most in (960, 1280))
        a, b = activations(m, k, draw.choice((E4M3, E5M2))), weights(n, k)
        with bs.use_backend(gemm="hopper"):
            got = bs.scaled_mm(a, b, torch.float32)
        assert db(exact_mm(a, b), got) > hopper_gate(torch.float32, m, n), (m, n, k, a.format, b.format)


def test_edge_scale_bytes() -> None:
    """Codes of 1 under pairs of edge bytes: subnormal scales are not flushed, overflow is Inf, FF is NaN."""
    edges = (0x00, 0x01, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)
    for byte in edges:
        x, w = torch.ones(16, 48, device="cuda"), torch.ones(16, 48, device="cuda")
        a, b = bs.quantize(x, E4M3), bs.quantize(w, WEIGHT)
        ones = torch.ones(16, 48, device="cuda").to(a.data.dtype)
        rows = torch.tensor([*edges, *edges, 0x7F, 0x7F], dtype=torch.uint8, device="cuda")
        a = replace(a, data=ones, scale=rows[:, None].expand(a.scale.shape).contiguous().view(a.scale.dtype))
        b = replace(b, data=ones, scale=torch.full_like(b.scale.view(torch.uint8), byte).view(b.scale.dtype))
        for tile in heuristics_mx.TILES:
            got, want = product(a, b, tile), block_product(a, b)
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num(nan=-1), want.nan_to_num(nan=-1))


def test_nan_and_zero_rows_stay_in_their_rows() -> None:
    x = torch.randn(130, 272, device="cuda")
    x[3, 5], x[7] = torch.nan, 0.0
    a, b = bs.quantize(x, E4M3), weights(144, 272)
    with bs.use_backend(gemm="hopper"):
        got = bs.scaled_mm(a, b, torch.float32)
    assert bool(got[3].isnan().all())
    assert bool((got[7] == 0).all())
    assert int(got.isnan().any(1).sum()) == 1


def test_unaligned_operands_and_buffers() -> None:
    """Codes, scales and a gradient buffer that do not start at multiples of 16 bytes, and a transposed buffer."""
    m, n, k = 200, 304, 512
    a, b = activations(m, k), weights(n, k)
    want = exact_mm(a, b)
    off = torch.empty(m * n + 1, device="cuda")[1:].view(m, n).zero_()
    apart = torch.zeros(n, m, device="cuda").mT
    moved = a
    for field in ("data", "scale"):
        tensor = getattr(a, field)
        raw = torch.empty(tensor.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(tensor.shape)
        moved = replace(moved, **{field: raw.copy_(tensor.view(torch.uint8)).view(tensor.dtype)})
    with bs.use_backend(gemm="hopper"):
        for buffer in (off, apart):
            bs.scaled_mm(a, b, accumulate=buffer)
            bs.scaled_mm(a, b, accumulate=buffer)
            assert db(2 * want, buffer) > HOPPER_DB[torch.float32]
        assert torch.equal(bs.scaled_mm(moved, b), bs.scaled_mm(a, b))
