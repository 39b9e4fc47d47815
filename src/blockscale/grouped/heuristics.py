"""How Hopper's grouped products are cut up: a pure function of static sizes, testable without a GPU.

Sizes of groups are the device's alone, so the model takes them as spread evenly between nothing and twice the mean. A
group is whole tiles and a rest; of the rest only parts of 64 rows that hold rows are multiplied, but its block of b has
to be fetched all the same. Then as in `gemm.heuristics`: microseconds of a tile for each block of K, and once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..gemm import heuristics as dense
from ..gemm.heuristics import BLOCK, SUBTILE_M, Cost, Tile

ASSUMED = "by the model of the dense product, for groups between none and twice the mean of the rows"


@dataclass(frozen=True)
class Problem:
    """m, n, k: of an m-grouped product all rows, and one group's N and K; of a k-grouped one the rows and columns of a
    result, and all padded tokens.  wide: the output is fp32.  add: to what it holds."""

    m: int
    n: int
    k: int
    groups: int
    k_grouped: bool
    fp32_out: bool
    sms: int
    accumulate: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def one(self) -> dense.Problem:
        """A dense product with the same tiles: of one group."""
        return dense.Problem(self.m, self.n, self.k, self.k_grouped, self.fp32_out, self.sms, self.accumulate)

    @property
    def moved_bytes(self) -> int:
        """The fewest: operands once, the output once, and what it is added to."""
        if self.k_grouped:
            operands, outputs = (self.m + self.n) * self.k, self.groups * self.m * self.n
        else:
            operands, outputs = (self.m + self.groups * self.n) * self.k, self.m * self.n
        return operands + outputs * self.one.output_bytes * (2 if self.accumulate else 1)


# tile; costs with one scale per 128x128 of b, and with scales 1x128. As in the dense product, whose H200 they were
# fitted to; a band of 8 was the best of 8, 12 and 24 for 192 rows (docs/design/grouped.md).
_CANDIDATES = (
    (Tile(2, 2, 128, 3, 8), Cost(0.915, 0.6), Cost(1.22, 0.4)),
    (Tile(3, 1, 128, 4, 8, registers=160, a_loads=3), Cost(0.652, 0.3), Cost(0.843, 0.3)),
    (Tile(2, 1, 128, 5, 16, k_unroll=4), Cost(0.447, 0.35), Cost(0.61, 0.2)),
    (Tile(2, 1, 128, 5, 16, k_unroll=2), Cost(0.47, 0.35), Cost(0.594, 0.1)),
    (Tile(1, 1, 128, 8, 32, k_unroll=4), Cost(0.25, 0.6), Cost(0.35, 0.6)),
    (Tile(1, 1, 64, 8, 32, k_unroll=4), Cost(0.222, 0.5), Cost(0.30, 0.5)),
)
TILES = tuple(tile for tile, _, _ in _CANDIDATES)
# Microseconds of a block of K where one group multiplies 64 rows: in a run of blocks it adds meanwhile, else it waits.
_LONE_PART = {True: 0.25, False: 0.31}
_LAUNCHES_US = 6.0  # the list of tiles, then the product
_BYTES_PER_US = 4.1e6
_SAMPLES = 16  # sizes of groups that are looked at


_LOW_GROUP_M = 4  # of tiles of 128 rows, which are taken where groups have about as many


def fitted(tile: Tile, problem: Problem) -> Tile:
    """With as many stages as fit. A band of rows of tiles that holds many groups reads the matrices of all of them at
    one time, each in short pieces; low ones keep memory quicker (docs/design/grouped.md)."""
    if not problem.k_grouped and tile.bm == 128:
        tile = tile._replace(group_m=_LOW_GROUP_M)
    return dense.fitted(tile, replace(problem.one, m=dense.SUBTILE_M * 4))


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of a multiprocessor that the kernel takes."""
    return dense.shared_bytes(tile, problem.one)


def _rows_us(tile: Tile, cost: Cost, rows: int, blocks: int, lone: float) -> float:
    """Of one column of tiles over so many rows."""
    full, rest = divmod(rows, tile.bm)
    us = full * (cost.block * blocks + cost.tile)
    if rest:
        parts = -(-rest // (SUBTILE_M * tile.m_subtiles))  # which groups take, each its waves
        us += max(cost.block * parts / tile.warpgroups, lone) * blocks + cost.tile
    return us


def predicted_us(tile: Tile, cost: Cost, problem: Problem, lone: float) -> float:
    """All tiles, dealt out evenly; at the least one tile's time, and that of the bytes.  lone: microseconds of a block
    where one group of threads works alone."""
    columns = -(-problem.n // tile.bn)
    adding = 0.02 * tile.bm if problem.accumulate else 0.0  # a tile whose sums are added to memory
    cost = replace(cost, tile=cost.tile + adding)
    blocks = -(-problem.k // BLOCK)
    if problem.k_grouped:
        of_group = -(-blocks // problem.groups)
        work = problem.groups * columns * _rows_us(tile, cost, problem.m, of_group, lone)
        longest = cost.block * of_group + cost.tile
    else:
        mean = problem.m / problem.groups
        sizes = [round(mean * (2 * i + 1) / _SAMPLES) for i in range(_SAMPLES)] if problem.groups > 1 else [problem.m]
        work = problem.groups * columns * sum(_rows_us(tile, cost, size, blocks, lone) for size in sizes) / len(sizes)
        longest = cost.block * blocks + cost.tile
    # programs end within a tile of each other: half of one is lost
    us = max(work / problem.sms + longest / 2, longest, problem.moved_bytes / _BYTES_PER_US)
    return _LAUNCHES_US + us


def kernel_part(problem: Problem) -> tuple[Problem, float]:
    """What the kernel does of a problem, and the microseconds of the pass behind it, as in the dense product."""
    if problem.one.direct:
        return problem, 0.0
    rows = problem.m * (problem.groups if problem.k_grouped else 1)
    part, us = dense.kernel_problem(replace(problem.one, m=rows))
    return replace(problem, fp32_out=part.fp32_out, accumulate=False), us


def bound(problem: Problem) -> tuple[float, str]:
    """The fewest microseconds that any kernel could take, and what sets them."""
    return dense.bound_of(problem.flops, problem.moved_bytes, problem.sms)


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Tile, float]:
    """The quickest tile by the model, and its predicted microseconds.

    >>> tile, us = choose(Problem(16640, 8192, 5120, 64, k_grouped=False, fp32_out=False, sms=132))
    >>> tile.label
    '192x128, 3 warpgroups, 4 stages'
    """
    # where bytes set the time, the lowest
    return min(candidates(problem), key=lambda pair: (pair[1], pair[0].bm))


def _lone(tile: Tile) -> float:
    return _LONE_PART[tile.k_unroll > 1] * tile.m_subtiles


def candidates(problem: Problem) -> list[tuple[Tile, float]]:
    """Every tile that the kernel can run, each with its predicted microseconds."""
    return [
        (fitted(tile, problem), predicted_us(tile, vector if problem.k_grouped else block, problem, _lone(tile)))
        for tile, block, vector in _CANDIDATES
        if not (problem.accumulate and tile.m_subtiles > 1)  # a group's buffer holds one part of what is added to
    ]
