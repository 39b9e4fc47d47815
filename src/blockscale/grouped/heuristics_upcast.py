"""How Hopper's grouped products of decoded operands are cut up: a pure function of static sizes.

The model of `heuristics`, with tiles that the bf16 units multiply at 5.9 TFLOP/s for each multiprocessor, and with the
pass that decodes: codes are read, and two bytes written for each.
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
_LONE_PART = 0.4  # microseconds of a block of K where one of two groups multiplies 64 rows by 128
_BYTES_PER_US = 4.1e6


def fitted(tile: Tile, problem: Problem) -> Tile:
    """With as many stages as fit: a block of the ring has as many bytes as one of FP8, whose K is twice as long."""
    return dense.fitted(tile, replace(problem.one, m=4 * SUBTILE_M))


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of a multiprocessor that the kernel takes, at most."""
    return dense.shared_bytes(tile, problem.one)


def decoding_us(problem: Problem) -> float:
    """One byte read and two written for each code."""
    matrices = 1 if problem.k_grouped else problem.groups
    return 3 * (problem.m + matrices * problem.n) * problem.k / _BYTES_PER_US


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Tile, float]:
    """The quickest tile by the model, and its predicted microseconds.

    >>> tile, us = choose(Problem(16640, 8192, 5120, 4, k_grouped=False, fp32_out=False, sms=132))
    >>> tile.label
    '256x128, 2 warpgroups, 3 stages'
    """
    return min(candidates(problem), key=lambda pair: (pair[1], pair[0].bm))


def candidates(problem: Problem) -> list[tuple[Tile, float]]:
    """Every tile that the kernel can run, each with its predicted microseconds, the decoding included."""
    return [
        (fitted(tile, problem), predicted_us(tile, cost, problem, _lone(tile)) + decoding_us(problem))
        for tile, cost in _CANDIDATES
        if not (problem.accumulate and tile.m_subtiles > 1)  # a group's buffer holds one part of what is added to
    ]


def _lone(tile: Tile) -> float:
    return _LONE_PART * tile.m_subtiles
