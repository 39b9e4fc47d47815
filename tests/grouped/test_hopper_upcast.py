"""Grouped upcast GEMMs for Hopper on a GPU: every tile and epilogue, m-grouped and k-grouped, tensor scales.
test_hopper.py tests the shared code with FP8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.formats import BlockScaled
from blockscale.gemm import ACCUMULATOR_DTYPES
from blockscale.gemm.heuristics import Tile
from blockscale.grouped import heuristics
from blockscale.grouped._reference import exact_grouped
from blockscale.grouped.ops import Inputs
from support.grouped_kernels import GROUPS, is_right, twice, with_bias
from support.products import HOPPER_DB, offsets

_hopper_upcast = pytest.importorskip("blockscale.grouped._hopper_upcast", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BACKEND = {"m_grouped": "hopper_upcast", "k_grouped": "hopper_upcast"}
PAIRS = [
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp8_e5m2", "mxfp8_e4m3_128x128"),
    ("mxfp6_e2m3", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_16x16"),
]
every_tile = pytest.mark.parametrize("tile", heuristics.UPCAST.tiles, ids=lambda tile: tile.label)
every_kind = pytest.mark.parametrize("k_grouped", [False, True], ids=["m", "k"])


def operands(
    sizes: list[int], rest: int, n: int, k: int, pair: tuple[str, str] = PAIRS[3], *, k_grouped: bool = False
) -> tuple[BlockScaled, BlockScaled, Tensor]:
    """Scales differ between experts, rows and K-blocks.  n, k: for k-grouped, the sizes of one output."""
    offs, tokens = offsets(sizes, "cuda"), sum(sizes) + rest
    x = torch.randn(tokens, k, device="cuda") * torch.exp2((torch.arange(k, device="cuda") // 16 % 3).float())
    if k_grouped:
        y = torch.randn(tokens, n, device="cuda") * torch.exp2((torch.arange(n, device="cuda") // 16 % 4).float())
        left, right = (
            bs.quantize(z.bfloat16(), name, axis=-2, offs=offs).mT for z, name in zip((y, x), pair, strict=True)
        )
        return left, right, offs
    w = torch.randn(len(sizes), n, k, device="cuda") * torch.arange(1, 1 + len(sizes), device="cuda")[:, None, None]
    return bs.quantize(x.bfloat16(), pair[0]), bs.quantize(w.bfloat16(), pair[1]), offs


def launched(
    tile: Tile,
    a: BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Output [M, N], or [G, M, N] if k-grouped."""
    accumulate, k_grouped, groups = before is not None, len(b.shape) == 2, offs.shape[0]
    problem = heuristics.Problem(a.rows, b.rows, a.length, groups, k_grouped, dtype == torch.float32, 132, accumulate)
    fitted = heuristics.UPCAST.fitted(tile, problem)
    rows = a.rows * (groups if k_grouped else 1)
    out = twice(
        lambda out: _hopper_upcast.launch(Inputs(a, b, offs, bias=bias), out, fitted, accumulate=accumulate),
        rows, b.rows, dtype, None if before is None else before.view(rows, b.rows),
    )  # fmt: skip
    return out.view(groups, a.rows, b.rows) if k_grouped else out


@pytest.mark.parametrize("name", GROUPS)
@every_kind
@every_tile
def test_exact_sums_equal_fp64(tile: Tile, name: str, *, k_grouped: bool) -> None:
    """Codes -1, 0, 1 and scales near 1 make all sums exact: any wrong value changes the result."""
    for n, k in ((336, 400), (144, 1040)):
        a, b, offs = operands(*GROUPS[name], n, k, PAIRS[0], k_grouped=k_grouped)
        exact: list[BlockScaled] = []
        for q in (a, b):
            zero = q.data.view(torch.uint8) == 0  # padding between groups stays zero
            code = torch.randint(-1, 2, q.data.shape, device="cuda").float().masked_fill(zero, 0).to(q.data.dtype)
            scale = torch.randint(125, 130, q.scale.shape, device="cuda").to(torch.uint8)
            exact.append(replace(q, data=code, scale=scale.view(q.scale.dtype)))
        wrong = launched(tile, *exact, offs, torch.float32).double() != exact_grouped(*exact, offs)
        assert not wrong.any(), (n, k, int(wrong.sum()), wrong.nonzero()[:8].tolist())


@pytest.mark.parametrize("name", GROUPS)
@every_kind
@every_tile
def test_every_epilogue(tile: Tile, name: str, *, k_grouped: bool) -> None:
    """All output dtypes with tensor scales, bias per expert, accumulation; rows of no group are unchanged."""
    sizes, rest = GROUPS[name]
    a, b, offs = operands(sizes, rest, 336, 400, k_grouped=k_grouped)
    want = exact_grouped(a, b, offs)
    for dtype in HOPPER_DB:
        assert is_right(launched(tile, a, b, offs, dtype), want), dtype
    if not k_grouped:
        bias = torch.randn(len(sizes), 336, device="cuda").bfloat16()
        assert is_right(launched(tile, a, b, offs, torch.bfloat16, bias), with_bias(want, bias, offs))
    if tile.m_subtiles == 1:
        alone = launched(tile, a, b, offs, torch.float32)
        for dtype in ACCUMULATOR_DTYPES:
            before = torch.randn(want.shape, device="cuda").to(dtype)
            added = launched(tile, a, b, offs, dtype, before=before)
            assert torch.equal(added, (before.float() + alone).to(dtype)), "one more rounding, no other sum"


@pytest.mark.parametrize(
    ("pair", "k_grouped"),
    [
        pytest.param(pair, k_grouped, id=f"{' @ '.join(pair)} {'k' if k_grouped else 'm'}")
        for pair in PAIRS
        for k_grouped in (False, True)
        if not (k_grouped and "x" in pair[1][5:])  # 2-D blocks are for weights
    ],
)
def test_every_format(pair: tuple[str, str], *, k_grouped: bool) -> None:
    """Through the registry, with every epilogue of training; tensor scales per expert and per group."""
    sizes, rest = GROUPS["ascending"]
    a, b, offs = operands(sizes, rest, 272, 400, pair, k_grouped=k_grouped)
    want = exact_grouped(a, b, offs)
    with bs.use_backend(**BACKEND):
        for dtype in HOPPER_DB:
            assert is_right(bs.scaled_grouped_mm(a, b, offs, dtype), want), dtype
        for dtype in ACCUMULATOR_DTYPES:
            total = torch.ones(want.shape, dtype=dtype, device="cuda")
            bs.scaled_grouped_mm(a, b, offs, accumulate=total)
            assert torch.equal(total, (1 + bs.scaled_grouped_mm(a, b, offs, torch.float32)).to(dtype))


@pytest.mark.parametrize("n", [1, 17, 333])
@pytest.mark.parametrize("k", [8, 136, 400])
def test_any_n(k: int, n: int) -> None:
    a, b, offs = operands(*GROUPS["ascending"], n, k, PAIRS[0])
    want = exact_grouped(a, b, offs)
    with bs.use_backend(**BACKEND):
        got = bs.scaled_grouped_mm(a, b, offs, torch.float32)
    assert got.is_contiguous()
    assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max())


def test_k_that_is_no_multiple_of_8_is_rejected() -> None:
    a, b, offs = operands(*GROUPS["ascending"], 64, 100, PAIRS[0])
    with bs.use_backend(**BACKEND), pytest.raises(NotImplementedError, match="multiple of 8"):
        bs.scaled_grouped_mm(a, b, offs)


@every_kind
def test_many_groups(*, k_grouped: bool) -> None:
    a, b, offs = operands([i % 21 for i in range(1024)], 9, 144, 272, k_grouped=k_grouped)
    with bs.use_backend(**BACKEND):
        assert is_right(bs.scaled_grouped_mm(a, b, offs, torch.float32), exact_grouped(a, b, offs))


@pytest.mark.parametrize("ends", [[100, 900, 950], [300, 100, 400, 50], [2**31 - 1, 5], [-7, 200, -1]])
@every_tile
def test_invalid_offs_write_nothing_out_of_bounds(tile: Tile, ends: list[int]) -> None:
    """Offsets that descend or exceed the rows: the host cannot check them without a sync."""
    a, b, _ = operands([100] * len(ends), 17, 144, 272)
    launched(tile, a, b, torch.tensor(ends, dtype=torch.int32, device="cuda"), torch.bfloat16)


@every_kind
@every_tile
def test_large_sums_are_repeatable(tile: Tile, *, k_grouped: bool) -> None:
    """Many tiles per CTA, many pipeline phases: finds a stage that is overwritten too early."""
    a, b, offs = operands([1000, 0, 2000, 1096], 0, 2048, 2048, PAIRS[0], k_grouped=k_grouped)
    want = exact_grouped(a, b, offs)
    for _ in range(3):
        assert is_right(launched(tile, a, b, offs, torch.float32), want)


def test_cuda_graph_replays_with_any_group_sizes() -> None:
    """Captured once, replayed with other offsets: group sizes are read on the device, without a host sync."""
    patterns = [[100, 200, 217, 0], [0, 0, 0, 517], [1, 300, 15, 201], [0, 0, 0, 0]]
    a, b, offs = operands(patterns[0], 0, 272, 336, PAIRS[0])
    with bs.use_backend(**BACKEND):
        out = bs.scaled_grouped_mm(a, b, offs, torch.float32)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                out.copy_(bs.scaled_grouped_mm(a, b, offs, torch.float32))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for sizes in patterns:
        offs.copy_(offsets(sizes, "cuda"))
        graph.replay()
        assert is_right(out, exact_grouped(a, b, offs))
