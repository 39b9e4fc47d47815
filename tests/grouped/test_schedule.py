"""Tile lists of grouped GEMMs without a GPU: in the interpreter, and compiled for sm_90."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.compiled import CAN_COMPILE, compiled_for, report
from blockscale.grouped._schedule import group_spans, row_tiles
from support import helpers


@pytest.mark.slow
def test_interpreted_tile_lists_equal_plain_loops(compared: Counter[str]) -> None:
    cases, entries, wrong = helpers.interpreted(Path(__file__).parent / "interpreted_schedule.py")
    assert (cases >= 190, entries >= 12000, wrong) == (True, True, 0)
    compared["entries of tile lists, Triton in the interpreter"] += entries


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET")
@pytest.mark.parametrize("groups", [1, 1024])
def test_tile_list_kernels_do_not_spill(groups: int) -> None:
    offs = torch.zeros(groups, dtype=torch.int32)
    with compiled_for(90) as kernels:
        row_tiles(offs, 4096, 64)
        row_tiles(offs, 4096, 64, starts=offs)
        group_spans(offs)
    assert [report(kernel).spilled for kernel in kernels] == [0, 0, 0]
