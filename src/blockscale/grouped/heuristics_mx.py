"""Choice of the tile of the m-grouped MXFP8 GEMM for Hopper: a pure function of static sizes, testable without a GPU.

The tiles and costs of the dense GEMM (`gemm.heuristics_mx`) in the model of `heuristics`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..gemm import heuristics as dense
from ..gemm import heuristics_mx as dense_mx
from ..gemm.heuristics import SUBTILE_M, Tile
from .heuristics import Problem, predicted_us

# group_m is larger than in the dense GEMM, because only tiles of the same group share b. Consumers keep the tile
# coordinates beside the accumulator: with 216 registers they spilled. The scaler warps need no more than 32.
_CANDIDATES = tuple(
    (tile._replace(group_m=32 // tile.warpgroups, registers=224), cost) for tile, cost in dense_mx.CANDIDATES
)
TILES = tuple(tile for tile, _ in _CANDIDATES)
_LONE_SUBTILE_US = 0.4  # µs per K-block if one of two warpgroups multiplies 64 rows


def fitted(tile: Tile, problem: Problem) -> Tile:
    """The tile with as many stages as fit in shared memory."""
    return dense.fitted(tile, replace(problem.dense_problem, m=4 * SUBTILE_M), dense_mx.shared_bytes)


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of the kernel in bytes per CTA."""
    return dense_mx.shared_bytes(tile, problem.dense_problem)


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Tile, float]:
    """Fastest tile by the model, and its predicted µs.

    >>> tile, us = choose(Problem(16640, 8192, 5120, 64, k_grouped=False, fp32_out=False, sms=132))
    >>> tile.label
    '128x128, 2 warpgroups, 5 stages'
    """
    # ties (memory-bound): the smallest BM
    return min(candidates(problem), key=lambda pair: (pair[1], pair[0].bm))


def candidates(problem: Problem) -> list[tuple[Tile, float]]:
    """Every tile that the kernel supports, with its predicted µs."""
    return [
        (fitted(tile, problem), predicted_us(tile, cost, problem, _LONE_SUBTILE_US if tile.warpgroups > 1 else 0.0))
        for tile, cost in _CANDIDATES
    ]
