"""The choice of a tile: a pure function, so a CPU is enough."""

from __future__ import annotations

import itertools

import pytest

from blockscale.gemm.heuristics import SHARED_BYTES, TILES, Problem, Tile, choose, fitted, shared_bytes


def problems() -> list[Problem]:
    sizes = itertools.product((1, 17, 128, 4096, 16384, 2**20), (16, 576, 2112, 7168, 24576), (16, 128, 2880, 18432))
    return [
        Problem(m, n, k, vector, wide, 132) for m, n, k in sizes for vector in (False, True) for wide in (False, True)
    ]


def test_every_choice_fits() -> None:
    for problem in problems():
        tile, us = choose(problem)
        assert us > 0
        assert tile.stages >= 2
        assert shared_bytes(tile, problem) <= SHARED_BYTES


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_can_be_made_to_fit(tile: Tile) -> None:
    for problem in problems()[:4]:
        assert shared_bytes(fitted(tile, problem), problem) <= SHARED_BYTES


def test_few_rows_get_small_tiles_and_many_get_large_ones() -> None:
    assert choose(Problem(16, 7168, 2048, False, False, 132))[0].bm == 64
    assert choose(Problem(8192, 8192, 8192, False, False, 132))[0].bm == 256


def test_more_work_never_takes_less_time() -> None:
    for m, n, k in itertools.product((128, 1024), (512, 4096), (1024, 8192)):
        us = choose(Problem(m, n, k, False, False, 132))[1]
        for bigger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
            assert choose(Problem(*bigger, False, False, 132))[1] >= us
