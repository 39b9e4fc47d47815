"""Which tile serves a product on Hopper: a pure function of the problem, testable without a GPU.

The model: a program per multiprocessor takes tiles in waves; a tile costs a fixed time and a time per block of K.
Its constants are estimates: this kernel has not been timed on large shapes (docs/design/gemm.md), so predictions are
good for an order of tiles and not for a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

PART = 64  # rows of one warpgroup instruction


class Tile(NamedTuple):
    """groups * waves * 64 rows by bn columns, and how they are worked on.

    groups: consumer warpgroups.  waves: parts of 64 rows that each takes one after the other.  stages: blocks of K in
    the ring.  band: rows of tiles that are walked down before going right.  turns: groups issue their products one
    after the other.  registers: of a consumer's thread.
    """

    groups: int
    waves: int
    bn: int
    stages: int
    band: int
    turns: bool = False
    registers: int = 232

    @property
    def bm(self) -> int:
        return self.groups * self.waves * PART

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}, {self.groups} groups, {self.stages} stages"


@dataclass(frozen=True)
class Problem:
    """vector: b has a scale per row and block of 128 (1x128), else one per 128x128.  wide: the output is fp32."""

    m: int
    n: int
    k: int
    vector: bool
    wide: bool
    multiprocessors: int


@dataclass(frozen=True)
class _Cost:
    """Microseconds of a tile: for each block of K, and once."""

    block: float
    tile: float


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory that the kernel takes: the ring, the output tiles, and the barriers."""
    parts = tile.groups * tile.waves
    block = parts * PART * (128 + 4) + tile.bn * 128
    scales = tile.bn * 4 * (tile.stages if problem.vector else 1)
    output = tile.groups * PART * tile.bn * (4 if problem.wide else 2 * tile.waves)
    return tile.stages * block + scales + output + 8 * (2 * tile.stages + tile.groups) + 1024


SHARED_BYTES = 232_448  # bytes that a program may have on sm_90

# tile; costs with one scale per 128x128 of b, and with scales 1x128
_CANDIDATES = (
    (Tile(2, 2, 128, 3, 8), _Cost(0.906, 0.45), _Cost(1.10, 0.45)),
    (Tile(3, 1, 128, 4, 8, registers=160), _Cost(0.70, 0.45), _Cost(0.83, 0.45)),
    (Tile(2, 1, 128, 5, 12), _Cost(0.481, 0.36), _Cost(0.593, 0.21)),
    (Tile(1, 1, 128, 8, 16), _Cost(0.45, 0.4), _Cost(0.55, 0.4)),
    (Tile(1, 1, 64, 8, 16), _Cost(0.30, 0.4), _Cost(0.35, 0.4)),
)
TILES = tuple(tile for tile, _, _ in _CANDIDATES)


def fitted(tile: Tile, problem: Problem) -> Tile:
    """With as many stages as fit."""
    stages = tile.stages
    while stages > 2 and shared_bytes(tile._replace(stages=stages), problem) > SHARED_BYTES:
        stages -= 1
    return tile._replace(stages=stages)


def predicted_us(tile: Tile, cost: _Cost, problem: Problem) -> float:
    """Waves of tiles times what a tile takes."""
    tiles = -(-problem.m // tile.bm) * -(-problem.n // tile.bn)
    waves = -(-tiles // problem.multiprocessors)
    return waves * (cost.block * -(-problem.k // 128) + cost.tile)


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Tile, float]:
    """The quickest tile by the model, and its predicted microseconds.

    >>> tile, us = choose(Problem(8192, 8192, 8192, vector=False, wide=False, multiprocessors=132))
    >>> str(tile)
    '256x128, 2 groups, 3 stages'
    """
    ranked = [
        (predicted_us(tile, vector if problem.vector else block, problem), tile) for tile, block, vector in _CANDIDATES
    ]
    us, tile = min(ranked, key=lambda pair: pair[0])
    return fitted(tile, problem), us
