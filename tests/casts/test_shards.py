"""Casts of shards against the cast of the whole, byte for byte, and column operands made by transposing codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.casts.shards import Rows, block_amax, cast_rows, scales_from_amax, transpose_square
from blockscale.formats.cast_spec import Cast, CastPlan, CastSpec
from support.products import assert_same_bits

SQUARE = ("fp8_128x128", "mxfp8_e4m3_128x128", "nvfp4_16x16")
SPECIAL = ("normal", "zeros", "huge", "nan", "inf")


def plan_of(format: str, rule: str | None = None) -> CastPlan:
    return CastSpec(format, rule, scale_layout="plain").plan()


def source(kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    # blocks differ in magnitude, so that the scale of a neighbour is wrong
    x *= torch.exp2(torch.arange(shape[-2]) // 7 % 11 - 5.0)[:, None]
    if kind == "zeros":
        x[..., : shape[-2] // 2, :] = 0
    elif kind == "huge":
        x[..., -1, -1] = 3e38
    elif kind in ("nan", "inf"):
        x[..., shape[-2] // 3, 1] = float(kind)
    return x.to(dtype)


def shards_of(rows: int, ranks: int) -> list[Rows]:
    chunk = -(-rows // ranks)
    firsts = [min(rank * chunk, rows) for rank in range(ranks)]
    return [Rows(first, min(chunk, rows - first), rows) for first in firsts]


def maxima_of_the_whole(x: Tensor, plan: CastPlan, shards: list[Rows], *, exchanged: bool = True) -> list[Tensor]:
    """amax of the blocks that each shard touches: the maximum over shards, or the shard's own if not `exchanged`."""
    spec = plan.spec
    tiles = -(-x.shape[-2] // spec.block[0])
    own = []
    for rows in shards:
        grid = torch.zeros(*x.shape[:-2], tiles, -(-x.shape[-1] // spec.block[1]), dtype=torch.int32)
        if rows.size:
            grid[..., list(rows.tiles(spec)), :] = block_amax(x[..., rows.first : rows.end, :], spec, rows)
        own.append(grid)
    whole = torch.stack(own).amax(0)
    return [
        (whole if exchanged else grid)[..., list(rows.tiles(spec)), :] for grid, rows in zip(own, shards, strict=True)
    ]


def cast_in_shards(
    x: Tensor, plan: CastPlan, ranks: int, *, exchanged: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    shards = shards_of(x.shape[-2], ranks)
    amax = x.abs().amax().float() if plan.spec.family == "nvfp4" else None
    maxima = maxima_of_the_whole(x, plan, shards, exchanged=exchanged)
    made = [
        cast_rows(x[..., rows.first : rows.end, :], Cast(plan, None, amax), rows, own[..., 0, :], own[..., -1, :])
        for rows, own in zip(shards, maxima, strict=True)
        if rows.size
    ]
    return [codes for codes, *_ in made], [scales for _, scales, _ in made]


@pytest.mark.parametrize("format", SQUARE)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(("rows", "ranks"), [(512, 2), (384, 2), (300, 3), (40, 4), (5, 4), (129, 2)])
def test_codes_of_shards_are_rows_of_the_whole(format: str, kind: str, rows: int, ranks: int):
    plan, x = plan_of(format), source(kind, rows, 200)
    whole = bs.quantize(x, format, scale_layout="plain")
    codes, scales = cast_in_shards(x, plan, ranks)
    width = whole.data.shape[-1]
    assert_same_bits(torch.cat(codes)[:, :width], whole.data.view(torch.uint8))
    for rows_of_rank, mine in zip(shards_of(rows, ranks), scales, strict=False):
        touched = list(rows_of_rank.tiles(plan.spec))
        assert_same_bits(mine.view(torch.uint8), whole.scale.view(torch.uint8)[touched])


@pytest.mark.parametrize("format", SQUARE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_experts(format: str, dtype: torch.dtype):
    plan, x = plan_of(format), source("normal", 3, 72, 48, dtype=dtype)
    whole = bs.quantize(x, format, scale_layout="plain")
    codes, _ = cast_in_shards(x, plan, 2)
    assert_same_bits(torch.cat(codes, dim=-2)[..., : whole.data.shape[-1]], whole.data.view(torch.uint8))


@pytest.mark.parametrize("format", SQUARE)
def test_without_the_exchange_codes_differ(format: str):
    """The control: with maxima of its own rows alone, a shard's blocks have other scales."""
    plan, x = plan_of(format), source("normal", 104, 64)
    whole = bs.quantize(x, format, scale_layout="plain")
    codes, _ = cast_in_shards(x, plan, 2, exchanged=False)
    assert not torch.equal(torch.cat(codes)[:, : whole.data.shape[-1]], whole.data.view(torch.uint8))


@pytest.mark.parametrize(
    ("format", "rule"),
    [(format, rule) for format in SQUARE[:2] for rule in bs.formats.get_format(format).rules],
)
@pytest.mark.parametrize("kind", SPECIAL)
def test_scales_follow_from_maxima(format: str, rule: str, kind: str):
    plan, x = plan_of(format, rule), source(kind, 150, 300)
    whole = bs.quantize(x, format, scale_rule=rule, scale_layout="plain")
    found = scales_from_amax(block_amax(x, plan.spec, Rows(0, 150, 150)), plan)
    assert_same_bits(found.view(torch.uint8), whole.scale.contiguous().view(torch.uint8))


@pytest.mark.parametrize("format", SQUARE)
@pytest.mark.parametrize("shape", [(256, 384), (130, 50), (3, 40, 129), (1, 1), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("layout", [0, 1])
def test_transposed_codes_are_the_column_operand(format: str, shape: tuple[int, ...], layout: int):
    x = source("normal", *shape, dtype=torch.bfloat16)
    wanted_layout = bs.formats.get_format(format).layouts[layout]
    amax = "group" if format == "nvfp4_16x16" and len(shape) == 3 else "tensor"
    want = bs.quantize(x, format, axis=-2, scale_layout=wanted_layout, amax=amax)
    row = bs.quantize(x, format, amax=amax)
    got = transpose_square(row, CastSpec(format, scale_layout=wanted_layout, amax=amax).plan())
    assert_same_bits(got, want)
    assert got.data.stride() == want.data.stride()
    assert got.scale.stride() == want.scale.stride()
    assert_same_bits(bs.dequantize(got), bs.dequantize(want))
