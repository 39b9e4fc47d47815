"""How Hopper's m-grouped MXFP8 product is cut up: a pure function of static sizes, testable without a GPU.

The tiles and costs of the dense product (`gemm.heuristics_mx`) in the model of `heuristics`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..gemm import heuristics as dense
from ..gemm import heuristics_mx as dense_mx
from ..gemm.heuristics import SUBTILE_M, Tile
from .heuristics import Problem, predicted_us

# Bands are higher than in the dense product, since what a band shares of b is one group's only. Consumers keep a tile's
# place beside their sums; with 216 registers they spilled, and the scalers need no more than 32.
_CANDIDATES = tuple(
    (tile._replace(group_m=32 // tile.warpgroups, registers=224), cost) for tile, cost in dense_mx.CANDIDATES
)
TILES = tuple(tile for tile, _ in _CANDIDATES)
_LONE_PART = 0.4  # microseconds of a block of K where one of two groups multiplies 64 rows


def fitted(tile: Tile, problem: Problem) -> Tile:
    """With as many stages as fit."""
    return dense.fitted(tile, replace(problem.one, m=4 * SUBTILE_M), dense_mx.shared_bytes)


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of a multiprocessor that the kernel takes."""
    return dense_mx.shared_bytes(tile, problem.one)


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Tile, float]:
    """The quickest tile by the model, and its predicted microseconds.

    >>> tile, us = choose(Problem(16640, 8192, 5120, 64, k_grouped=False, fp32_out=False, sms=132))
    >>> tile.label
    '128x128, 2 warpgroups, 5 stages'
    """
    # where bytes set the time, the lowest
    return min(candidates(problem), key=lambda pair: (pair[1], pair[0].bm))


def candidates(problem: Problem) -> list[tuple[Tile, float]]:
    """Every tile that the kernel can run, each with its predicted microseconds."""
    return [
        (fitted(tile, problem), predicted_us(tile, cost, problem, _LONE_PART if tile.warpgroups > 1 else 0.0))
        for tile, cost in _CANDIDATES
    ]
