"""Grouped FP8 GEMMs for Hopper on a GPU: every tile, epilogue and kind of groups; no out-of-bounds writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import BlockScaled
from blockscale.gemm import ACCUMULATOR_DTYPES
from blockscale.gemm.heuristics import Tile
from blockscale.grouped import heuristics
from blockscale.grouped._reference import exact_grouped
from blockscale.grouped.ops import Inputs
from support.grouped_kernels import GROUPS, is_right, twice, with_bias
from support.products import HOPPER_DB, check_replay, offsets

_hopper = pytest.importorskip("blockscale.grouped._hopper", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

TILES = heuristics.FP8.tiles
ACCUMULATING = [tile for tile in TILES if tile.m_subtiles == 1]


def m_grouped_operands(sizes: list[int], rest: int, n: int, k: int) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Tokens, experts and offsets of an m-grouped GEMM."""
    x = torch.randn(sum(sizes) + rest, k, device="cuda").bfloat16()
    w = torch.randn(len(sizes), n, k, device="cuda").bfloat16()
    return bs.quantize(x, "fp8_1x128"), bs.quantize(w, "fp8_128x128"), offsets(sizes, "cuda")


def k_grouped_operands(sizes: list[int], rest: int, n: int, k: int) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Gradients [tokens, n], tokens [tokens, k] and offsets of a k-grouped GEMM."""
    offs = offsets(sizes, "cuda")
    sources = (torch.randn(sum(sizes) + rest, width, device="cuda").bfloat16() for width in (n, k))
    a, b = (bs.quantize(source, "fp8_1x128", axis=-2, offs=offs).mT for source in sources)
    return a, b, offs


def outputs(tile: Tile) -> list[torch.dtype]:
    """Output dtypes to test. fp16 differs from bf16 only in the final cast, so only one tile compiles it."""
    return list(HOPPER_DB) if tile == TILES[1] else [torch.bfloat16, torch.float32]


def fitted(
    tile: Tile, a: BlockScaled, b: BlockScaled, offs: Tensor, dtype: torch.dtype, *, accumulate: bool = False
) -> Tile:
    sizes = (a.rows, b.rows, a.length, offs.shape[0])
    return heuristics.FP8.fitted(
        tile, heuristics.Problem(*sizes, len(b.shape) == 2, dtype == torch.float32, 132, accumulate)
    )


def launched(
    tile: Tile,
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    rows = a.rows * (offs.shape[0] if len(b.shape) == 2 else 1)
    tile = fitted(tile, a, b, offs, dtype, accumulate=before is not None)
    accumulate = before is not None
    return twice(
        lambda out: _hopper.launch(Inputs(a, b, offs, bias=bias), out, tile, accumulate=accumulate),
        rows,
        b.rows,
        dtype,
        before,
    )


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_m_grouped_equals_exact(tile: Tile, name: str) -> None:
    """Tails in all dimensions, all output dtypes, with and without a bias per expert."""
    sizes, rest = GROUPS[name]
    for n, k in ((336, 400), (256, 128)):
        a, b, offs = m_grouped_operands(sizes, rest, n, k)
        want, bias = exact_grouped(a, b, offs), torch.randn(len(sizes), n, device="cuda").bfloat16()
        for dtype in outputs(tile):
            assert is_right(launched(tile, a, b, offs, dtype), want), (n, k, dtype)
        assert is_right(launched(tile, a, b, offs, torch.bfloat16, bias), with_bias(want, bias, offs)), (n, k)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_k_grouped_equals_exact(tile: Tile, name: str) -> None:
    """Outputs whose rows end within a tile and within an m_subtile; groups without tokens give zero."""
    sizes, rest = GROUPS[name]
    for n, k in ((336, 400), (100, 64), (256, 128)):
        a, b, offs = k_grouped_operands(sizes, rest, n, k)
        want = exact_grouped(a, b, offs).flatten(0, 1)
        for dtype in outputs(tile):
            assert is_right(launched(tile, a, b, offs, dtype), want), (n, k, dtype)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("tile", ACCUMULATING, ids=str)
def test_accumulate_adds_one_rounding(tile: Tile, name: str) -> None:
    """Into a window of a larger buffer; rows of no group are unchanged."""
    sizes, rest = GROUPS[name]
    for make in (m_grouped_operands, k_grouped_operands):
        a, b, offs = make(sizes, rest, 336, 400)
        alone = launched(tile, a, b, offs, torch.float32)
        for dtype in ACCUMULATOR_DTYPES:
            before = torch.randn(alone.shape, device="cuda").to(dtype)
            got = launched(tile, a, b, offs, dtype, before=before)
            assert torch.equal(got, (before.float() + alone).to(dtype)), "one more rounding, no other sum"


@pytest.mark.parametrize("n", [1, 15, 17, 333])
@pytest.mark.parametrize("k", [1, 127, 129, 400])
def test_any_n_and_k(k: int, n: int) -> None:
    """Through the registry, all output dtypes; outputs that TMA cannot store go through a second buffer."""
    sizes, rest = GROUPS["ascending"]
    with bs.use_backend(m_grouped="hopper", k_grouped="hopper"):
        for make in (m_grouped_operands, k_grouped_operands):
            a, b, offs = make(sizes, rest, n, k)
            want = exact_grouped(a, b, offs)
            for dtype, db in HOPPER_DB.items():
                got = bs.scaled_grouped_mm(a, b, offs, dtype)
                assert got.is_contiguous()
                assert sqnr_db(want, got) > db - 6, dtype  # margin: few values and short sums scatter
            for dtype in ACCUMULATOR_DTYPES:
                total = torch.ones(want.shape, dtype=dtype, device="cuda")
                bs.scaled_grouped_mm(a, b, offs, accumulate=total)
                assert torch.equal(total, (1 + bs.scaled_grouped_mm(a, b, offs, torch.float32)).to(dtype))


@pytest.mark.parametrize("make", [m_grouped_operands, k_grouped_operands])
def test_sizes_from_1_to_130(make) -> None:
    a, b, offs = make(list(range(1, 131)), 9, 144, 272)
    with bs.use_backend(m_grouped="hopper", k_grouped="hopper"):
        got = bs.scaled_grouped_mm(a, b, offs, torch.float32)
    assert is_right(got, exact_grouped(a, b, offs))


@pytest.mark.parametrize("make", [m_grouped_operands, k_grouped_operands])
def test_1024_groups(make) -> None:
    sizes = torch.randint(0, 20, (1024,), generator=torch.Generator().manual_seed(1)).tolist()
    a, b, offs = make(sizes, 9, 64, 144)
    with bs.use_backend(m_grouped="hopper", k_grouped="hopper"):
        got = bs.scaled_grouped_mm(a, b, offs, torch.float32)
    assert is_right(got, exact_grouped(a, b, offs))


def test_no_rows_at_all() -> None:
    a, b, offs = m_grouped_operands([0, 0, 0], 0, 64, 128)
    with bs.use_backend(m_grouped="hopper", k_grouped="hopper"):
        assert bs.scaled_grouped_mm(a, b, offs).shape == (0, 64)
        left, right, offs = k_grouped_operands([0, 0, 0], 0, 64, 128)
        assert bool((bs.scaled_grouped_mm(left, right, offs) == 0).all())


@pytest.mark.parametrize("ends", [[100, 900, 950], [300, 100, 400, 50], [2**31 - 1, 5], [-7, 200, -1]])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_invalid_offs_write_nothing_out_of_bounds(tile: Tile, ends: list[int]) -> None:
    """Offsets that descend or exceed the rows: the host cannot check them without a sync."""
    sizes = [100] * len(ends)
    wrong = torch.tensor(ends, dtype=torch.int32, device="cuda")
    for make in (m_grouped_operands, k_grouped_operands):
        a, b, _ = make(sizes, 17, 144, 272)
        launched(tile, a, b, wrong, torch.bfloat16)


@pytest.mark.parametrize("make", [m_grouped_operands, k_grouped_operands])
@pytest.mark.parametrize("accumulate", [False, True])
def test_cuda_graph_replays_with_any_group_sizes(make, accumulate: bool) -> None:
    """Captured once, replayed with other offsets: group sizes are read on the device, without a host sync."""
    patterns = [[100, 200, 217, 0], [0, 0, 0, 517], [517, 0, 0, 0], [1, 300, 15, 201], [0, 0, 0, 0]]
    cases = [make(sizes, 517 - sum(sizes), 272, 336) for sizes in patterns]
    a, b, offs = cases[0]
    shape = exact_grouped(a, b, offs).shape
    out = torch.zeros(shape, device="cuda")

    def product() -> None:
        if accumulate:
            bs.scaled_grouped_mm(a, b, offs, accumulate=out)
        else:
            out.copy_(bs.scaled_grouped_mm(a, b, offs, torch.float32))

    with bs.use_backend(m_grouped="hopper", k_grouped="hopper"):
        product()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                product()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for left, right, ends in cases:
            for held, other in ((a, left), (b, right)):
                held.data.view(torch.uint8).copy_(other.data.view(torch.uint8))
                held.scale.copy_(other.scale)
            offs.copy_(ends)
            out.zero_()
            graph.replay()
            assert is_right(out, exact_grouped(left, right, ends))


@pytest.mark.parametrize("tile", ACCUMULATING, ids=str)
def test_large_sums_are_repeatable(tile: Tile) -> None:
    """Many tiles per CTA, with accumulation: see the test of that name for dense GEMMs."""
    for make, sizes in ((m_grouped_operands, [1000, 0, 2000, 1096]), (k_grouped_operands, [1500, 100, 2496])):
        a, b, offs = make(sizes, 0, 2048, 2048)
        want, tall = exact_grouped(a, b, offs).flatten(0, -2), fitted(tile, a, b, offs, torch.float32, accumulate=True)
        for _ in range(3):
            out = torch.full(want.shape, 1000.0, device="cuda")
            _hopper.launch(Inputs(a, b, offs), out, tall, accumulate=True)
            # one wrong scale in one of 32 blocks shifts sums by more than 1
            assert float((out - 1000.0 - want).abs().max()) < 0.25


def test_a_product_is_launches_alone() -> None:
    # odd K and odd M, but results whose rows TMA can store
    for make, n, k in ((m_grouped_operands, 272, 333), (k_grouped_operands, 333, 272)):
        a, b, offs = make([30, 0, 98], 4, n, k)
        with bs.use_backend(m_grouped="hopper", k_grouped="hopper"):
            check_replay(lambda: bs.scaled_grouped_mm(a, b, offs), a, b, offs)  # noqa: B023, called at once
