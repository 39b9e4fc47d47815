"""m-grouped MXFP8 GEMM for Hopper on a GPU: every tile and epilogue, groups that start at any row, no out-of-bounds
writes. test_hopper.py tests the shared code with FP8."""

from __future__ import annotations

import itertools
from dataclasses import replace

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

_hopper_mx = pytest.importorskip("blockscale.grouped._hopper_mx", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

E4M3, E5M2, WEIGHT = "mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3_128x128"
every_tile = pytest.mark.parametrize("tile", heuristics.MX.tiles, ids=lambda tile: tile.label)


def operands(sizes: list[int], rest: int, n: int, k: int, name: str = E4M3) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Tokens, experts and offsets; scales differ between experts, row blocks and K-blocks."""
    x = torch.randn(sum(sizes) + rest, k, device="cuda")
    experts, rows, columns = (torch.arange(size, device="cuda") for size in (len(sizes), n, k))
    steps = experts[:, None, None] % 2 + rows[None, :, None] // 128 % 3 - columns // 128 % 2
    w = torch.randn(len(sizes), n, k, device="cuda") * torch.exp2(steps.float())
    return bs.quantize(x.bfloat16(), name), bs.quantize(w.bfloat16(), WEIGHT), offsets(sizes, "cuda")


def launched(
    tile: Tile,
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    accumulate, sizes = before is not None, (a.rows, b.rows, a.length, offs.shape[0])
    tile = heuristics.MX.fitted(tile, heuristics.Problem(*sizes, False, dtype == torch.float32, 132, accumulate))
    return twice(
        lambda out: _hopper_mx.launch(Inputs(a, b, offs, bias=bias), out, tile, accumulate=accumulate),
        a.rows,
        b.rows,
        dtype,
        before,
    )


@pytest.mark.parametrize("name", GROUPS)
@every_tile
def test_exact_sums_equal_fp64(tile: Tile, name: str) -> None:
    """Codes -1, 0, 1 and scales near 1 make all sums exact: any wrong scale changes the result."""
    for n, k in ((336, 400), (256, 128), (144, 1040)):
        a, b, offs = operands(*GROUPS[name], n, k)
        exact: list[BlockScaled] = []
        for q in (a, b):
            code = torch.randint(-1, 2, q.data.shape, device="cuda").float().to(q.data.dtype)
            scale = torch.randint(125, 130, q.scale.shape, device="cuda").to(torch.uint8)
            exact.append(replace(q, data=code, scale=scale.view(q.scale.dtype)))
        wrong = launched(tile, *exact, offs, torch.float32).double() != exact_grouped(*exact, offs)
        assert not wrong.any(), (n, k, int(wrong.sum()), wrong.nonzero()[:8].tolist())


@pytest.mark.parametrize("name", GROUPS)
@every_tile
def test_every_epilogue(tile: Tile, name: str) -> None:
    """All output dtypes, bias per expert, accumulation; rows of no group are unchanged."""
    sizes, rest = GROUPS[name]
    a, b, offs = operands(sizes, rest, 336, 400)
    want, bias = exact_grouped(a, b, offs), torch.randn(len(sizes), 336, device="cuda").bfloat16()
    for dtype in HOPPER_DB:
        assert is_right(launched(tile, a, b, offs, dtype), want), dtype
    assert is_right(launched(tile, a, b, offs, torch.bfloat16, bias), with_bias(want, bias, offs))
    alone = launched(tile, a, b, offs, torch.float32)
    for dtype in ACCUMULATOR_DTYPES:
        before = torch.randn(want.shape, device="cuda").to(dtype)
        added = launched(tile, a, b, offs, dtype, before=before)
        assert torch.equal(added, (before.float() + alone).to(dtype)), "one more rounding, no other sum"


def test_bitwise_equal_to_the_dense_gemm() -> None:
    """Group by group: a sum does not depend on the position of its tile."""
    sizes, rest = GROUPS["ascending"]
    for name in (E4M3, E5M2):
        a, b, offs = operands(sizes, rest, 400, 1408, name)
        with bs.use_backend(gemm="hopper", m_grouped="hopper"):
            got = bs.scaled_grouped_mm(a, b, offs, torch.float32)
            assert bool((got[sum(sizes) :] == 0).all()), "rows of no group"
            for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
                rows = replace(a, data=a.data[start:end], scale=a.scale[start:end], shape=(end - start, 1408))
                matrix = replace(b, data=b.data[group], scale=b.scale[group], shape=(400, 1408))
                assert torch.equal(got[start:end], bs.scaled_mm(rows, matrix, torch.float32)), (name, group)


@pytest.mark.parametrize("n", [1, 15, 17, 333])
@pytest.mark.parametrize("k", [1, 31, 127, 129, 400])
def test_any_n_and_k(k: int, n: int) -> None:
    """Through the registry, all output dtypes; outputs that TMA cannot store go through a second buffer."""
    a, b, offs = operands(*GROUPS["ascending"], n, k)
    want = exact_grouped(a, b, offs)
    with bs.use_backend(m_grouped="hopper"):
        for dtype, db in HOPPER_DB.items():
            got = bs.scaled_grouped_mm(a, b, offs, dtype)
            assert got.is_contiguous()
            assert sqnr_db(want, got).item() > db - 6, dtype  # margin: few values and short sums scatter
        for dtype in ACCUMULATOR_DTYPES:
            total = torch.ones(want.shape, dtype=dtype, device="cuda")
            bs.scaled_grouped_mm(a, b, offs, accumulate=total)
            assert torch.equal(total, (1 + bs.scaled_grouped_mm(a, b, offs, torch.float32)).to(dtype))


@pytest.mark.parametrize("sizes", [list(range(1, 131)), [i % 21 for i in range(1024)]], ids=["1 to 130", "1024 groups"])
def test_many_groups(sizes: list[int]) -> None:
    a, b, offs = operands(sizes, 9, 144, 272)
    with bs.use_backend(m_grouped="hopper"):
        assert is_right(bs.scaled_grouped_mm(a, b, offs, torch.float32), exact_grouped(a, b, offs))


@pytest.mark.parametrize("ends", [[100, 900, 950], [300, 100, 400, 50], [2**31 - 1, 5], [-7, 200, -1]])
@every_tile
def test_invalid_offs_write_nothing_out_of_bounds(tile: Tile, ends: list[int]) -> None:
    """Offsets that descend or exceed the rows: the host cannot check them without a sync."""
    a, b, _ = operands([100] * len(ends), 17, 144, 272)
    launched(tile, a, b, torch.tensor(ends, dtype=torch.int32, device="cuda"), torch.bfloat16)


def test_cuda_graph_replays_with_any_group_sizes() -> None:
    """Captured once, replayed with other offsets: group sizes are read on the device, without a host sync."""
    patterns = [[100, 200, 217, 0], [0, 0, 0, 517], [517, 0, 0, 0], [1, 300, 15, 201], [0, 0, 0, 0]]
    cases = [operands(sizes, 517 - sum(sizes), 272, 336) for sizes in patterns]
    a, b, offs = cases[0]
    out = torch.zeros(517, 272, device="cuda")
    with bs.use_backend(m_grouped="hopper"):
        out.copy_(bs.scaled_grouped_mm(a, b, offs, torch.float32))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                out.copy_(bs.scaled_grouped_mm(a, b, offs, torch.float32))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for left, right, ends in cases:
            for held, other in ((a, left), (b, right)):
                held.data.view(torch.uint8).copy_(other.data.view(torch.uint8))
                held.scale.view(torch.uint8).copy_(other.scale.view(torch.uint8))
            offs.copy_(ends)
            out.zero_()
            graph.replay()
            assert is_right(out, exact_grouped(left, right, ends))


@every_tile
def test_large_sums_are_repeatable(tile: Tile) -> None:
    """Many tiles per CTA, many pipeline phases, with accumulation: finds a scale or buffer that is overwritten too
    early."""
    x, w = torch.randn(4096, 2048, device="cuda"), torch.randn(4, 2048, 2048, device="cuda")
    a, b = bs.quantize(x.bfloat16(), E4M3), bs.quantize(w.bfloat16(), WEIGHT)
    offs = offsets([1000, 0, 2000, 1096], "cuda")
    want, before = exact_grouped(a, b, offs), torch.full((4096, 2048), 1000.0, device="cuda")
    for _ in range(3):
        out = launched(tile, a, b, offs, torch.float32, before=before)
        # one wrong scale in one of 64 steps shifts sums by more
        assert float((out - 1000.0 - want).abs().max()) < 0.25


def test_a_product_is_launches_alone() -> None:
    a, b, offs = operands([30, 0, 98], 4, 272, 512)
    with bs.use_backend(m_grouped="hopper"):
        check_replay(lambda: bs.scaled_grouped_mm(a, b, offs), a, b, offs)
