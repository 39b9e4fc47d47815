"""Tiles of the Triton casts hold full blocks for every compute capability, source and dtype. Needs no GPU.

A tile that splits a block would take the amax of only a part of it, and only the GPU with that tile would show it.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from blockscale import CastSpec
from blockscale.casts._source import Source, tile_shape
from blockscale.formats import FORMATS

SMS = (0, 80, 89, 90, 100, 120)
SOURCES = ("plain", "swiglu", "swiglu_backward", "rmsnorm")


def source(name: str, dtype: torch.dtype, rows: int, columns: int) -> Source:
    x = torch.empty(rows, 2 * columns if name == "swiglu" else columns, dtype=dtype, device="meta")
    return Source(name, x, columns)


PAIRS = [pair for pair in itertools.product((None, *FORMATS), repeat=2) if pair != (None, None)]


@pytest.mark.parametrize(("row", "col"), PAIRS)
def test_tiles_hold_full_blocks(row: str | None, col: str | None) -> None:
    plans = [None if name is None else CastSpec(name).plan() for name in (row, col)]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for sm, name, dtype, full_tiles in itertools.product(SMS, SOURCES, dtypes, (False, True)):
        rows, columns = (512, 1024) if full_tiles else (500, 1004)
        tile = tile_shape(plans[0], plans[1], sm=sm, source=source(name, dtype, rows, columns), full_tiles=full_tiles)
        if plans[0] is not None:
            across, along = plans[0].spec.block
            assert (tile.J * tile.MQ % across, tile.BK % along) == (0, 0), (tile, sm, name, dtype, full_tiles)
        if plans[1] is not None:
            across, along = plans[1].spec.block
            assert (tile.J * tile.MQ % along, tile.BK % across) == (0, 0), (tile, sm, name, dtype, full_tiles)
            assert tile.MQ % (tile.J * tile.MQ // along) == 0, "blocks along M hold full groups of J rows"
