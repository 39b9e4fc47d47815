"""How Hopper's product is cut up: a pure function of the problem, testable without a GPU.

The model: a program per multiprocessor takes tiles in rounds; a tile costs a fixed time and a time per block of K.
Tiles that fill no round may be shared between programs (`_hopper_schedule`), which costs a trip through memory. What
has to come from memory takes its time in any case.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

PART = 64  # rows of one warpgroup instruction
BLOCK = 128  # of K: a scale's reach


class Tile(NamedTuple):
    """groups * waves * 64 rows by bn columns, and how they are worked on.

    groups: consumer warpgroups.  waves: parts of 64 rows that each takes one after the other.  stages: blocks of K in
    the ring.  band: rows of tiles that are walked down before going right.  registers: of a consumer's thread.  rows:
    those of a part that are loaded.
    """

    groups: int
    waves: int
    bn: int
    stages: int
    band: int
    registers: int = 232
    rows: int = PART

    @property
    def bm(self) -> int:
        return self.groups * self.waves * PART

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}, {self.groups} groups, {self.stages} stages"


class Plan(NamedTuple):
    """A tile, how many programs run, how many whole tiles each takes, and whether they share the rest of the tiles."""

    tile: Tile
    programs: int
    rounds: int
    shared: bool

    def __str__(self) -> str:
        rest = f", then shares of {BLOCK} of K" if self.shared else ""
        return f"{self.tile}; {self.programs} programs, {self.rounds} tiles each{rest}"


@dataclass(frozen=True)
class Problem:
    """vector: b has a scale per row and block of 128 (1x128), else one per 128x128.  wide: the output is fp32.  add: to
    what it holds."""

    m: int
    n: int
    k: int
    vector: bool
    wide: bool
    multiprocessors: int
    add: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.k // BLOCK)


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
_BYTES_PER_US = 4.0e6  # of memory
_PIECE_BYTES_PER_US = 1.0e5  # of one program's, to and from the second-level cache
_LEAST_SHARE = 4  # blocks of K that are worth a program of their own

# tile; costs with one scale per 128x128 of b, and with scales 1x128
_CANDIDATES = (
    (Tile(2, 2, 128, 3, 8), _Cost(0.93, 0.35), _Cost(1.20, 0.45)),
    (Tile(3, 1, 128, 4, 8, registers=160), _Cost(0.656, 0.24), _Cost(0.86, 0.55)),
    (Tile(2, 1, 128, 5, 12), _Cost(0.51, 0.25), _Cost(0.60, 0.25)),
    (Tile(1, 1, 128, 8, 16), _Cost(0.37, 0.4), _Cost(0.45, 0.4)),
    (Tile(1, 1, 64, 8, 16), _Cost(0.29, 0.4), _Cost(0.35, 0.4)),
)
TILES = tuple(tile for tile, _, _ in _CANDIDATES)


def fitted(tile: Tile, problem: Problem) -> Tile:
    """With as many stages as fit, and no rows loaded that a small operand does not have."""
    stages = tile.stages
    while stages > 2 and shared_bytes(tile._replace(stages=stages), problem) > SHARED_BYTES:
        stages -= 1
    return tile._replace(stages=stages, rows=16 if problem.m <= 16 and tile.bm == PART else PART)


def whole_tiles(tile: Tile, problem: Problem) -> Plan:
    """Every tile is one program's."""
    tiles = _tiles(tile, problem)
    return Plan(fitted(tile, problem), min(tiles, problem.multiprocessors), -(-tiles // problem.multiprocessors), False)


def shared_tiles(tile: Tile, problem: Problem) -> Plan | None:
    """Tiles that fill no round are shared; None where nothing is left, or too little."""
    tiles, programs = _tiles(tile, problem), problem.multiprocessors
    rounds, left = divmod(tiles, programs)
    most = left * problem.blocks // _LEAST_SHARE
    if rounds == 0:
        programs = min(programs, most)
    if left == 0 or most < programs or programs <= left:
        return None
    return Plan(fitted(tile, problem), programs, rounds, True)


def _tiles(tile: Tile, problem: Problem) -> int:
    return -(-problem.m // tile.bm) * -(-problem.n // tile.bn)


def _predicted_us(plan: Plan, cost: _Cost, problem: Problem) -> float:
    tile, blocks = plan.tile, problem.blocks
    us = plan.rounds * (cost.block * blocks + cost.tile)
    if plan.shared:
        left = _tiles(tile, problem) - plan.rounds * plan.programs
        piece_us = 4 * tile.bm * tile.bn / _PIECE_BYTES_PER_US
        us += cost.block * -(-left * blocks // plan.programs) + cost.tile + 1 + piece_us * (1 + plan.programs / left)
    moved = (problem.m + problem.n) * problem.k + problem.m * problem.n * (4 if problem.wide else 2)
    return max(us, moved / _BYTES_PER_US)


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Plan, float]:
    """The quickest plan by the model, and its predicted microseconds.

    >>> plan, us = choose(Problem(8192, 8192, 8192, vector=False, wide=False, multiprocessors=132))
    >>> str(plan.tile)
    '192x128, 3 groups, 4 stages'
    """
    ranked: list[tuple[float, Plan]] = []
    for tile, block, vector in _CANDIDATES:
        if problem.add and tile.waves > 1:
            continue  # a group's buffer holds one part of what is added to
        for plan in (whole_tiles(tile, problem), shared_tiles(tile, problem)):
            if plan is not None:
                ranked.append((_predicted_us(plan, vector if problem.vector else block, problem), plan))
    us, plan = min(ranked, key=lambda pair: pair[0])
    return plan, us
