"""Choice of the tile of the grouped upcast GEMMs for Hopper: a pure function of static sizes.

The model of `heuristics`, with bf16 tensor cores at 5.9 TFLOP/s per SM, plus the upcast pass: it reads one byte and
writes two for each code.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..gemm import heuristics as dense
from ..gemm.heuristics import SUBTILE_M, Cost, Tile
from .heuristics import Problem, predicted_us

_CANDIDATES = (
    (Tile(2, 2, 128, 4, 8), Cost(1.47, 1.0)),
    (Tile(2, 1, 128, 6, 16), Cost(0.78, 0.6)),
    (Tile(1, 1, 128, 8, 32), Cost(0.45, 0.6)),
)
TILES = tuple(tile for tile, _ in _CANDIDATES)
_LONE_SUBTILE_US = 0.4  # µs per K-block if one of two warpgroups multiplies 64 rows by 128
_BYTES_PER_US = 4.1e6


def fitted(tile: Tile, problem: Problem) -> Tile:
    """The tile with as many stages as fit: a stage has as many bytes as one of FP8, with half the K."""
    return dense.fitted(tile, replace(problem.dense_problem, m=4 * SUBTILE_M))


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Upper bound on the shared memory of the kernel in bytes per CTA."""
    return dense.shared_bytes(tile, problem.dense_problem)


def upcast_us(problem: Problem) -> float:
    """µs of the upcast pass: one byte read and two written for each code."""
    matrices = 1 if problem.k_grouped else problem.groups
    return 3 * (problem.m + matrices * problem.n) * problem.k / _BYTES_PER_US


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Tile, float]:
    """Fastest tile by the model, and its predicted µs.

    >>> tile, us = choose(Problem(16640, 8192, 5120, 4, k_grouped=False, fp32_out=False, sms=132))
    >>> tile.label
    '256x128, 2 warpgroups, 3 stages'
    """
    return min(candidates(problem), key=lambda pair: (pair[1], pair[0].bm))


def candidates(problem: Problem) -> list[tuple[Tile, float]]:
    """Every tile that the kernel supports, with its predicted µs, upcast included."""
    return [
        (fitted(tile, problem), predicted_us(tile, cost, problem, _lone_us(tile)) + upcast_us(problem))
        for tile, cost in _CANDIDATES
        if not (problem.accumulate and tile.m_subtiles > 1)  # the accumulator buffer of a warpgroup holds one m_subtile
    ]


def _lone_us(tile: Tile) -> float:
    return _LONE_SUBTILE_US * tile.m_subtiles
