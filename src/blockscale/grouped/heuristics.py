"""Choice of the tile of the grouped Hopper GEMMs: a pure function of static sizes, testable without a GPU.

The host does not know the group sizes, so the model assumes a uniform distribution between 0 and twice the mean. A
group is whole tiles and a remainder. In the remainder only m_subtiles (64 rows) that hold rows are multiplied, but the
whole tile of b is loaded. The rest is as in `gemm.heuristics`: µs per tile and K-block, plus µs per tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..gemm import heuristics as dense
from ..gemm.heuristics import BLOCK, SUBTILE_M, Cost, Tile

ASSUMED = "by the model of the dense GEMM, for group sizes between 0 and twice the mean"


@dataclass(frozen=True)
class Problem:
    """Static sizes of a grouped GEMM.

    m, n, k: for m-grouped, all rows and N and K of one group; for k-grouped, the rows and columns of one output and all
    padded tokens.  accumulate: out += the product."""

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
    def dense_problem(self) -> dense.Problem:
        """Dense problem with the same M, N and K (all groups), for the functions of the dense model."""
        return dense.Problem(self.m, self.n, self.k, self.k_grouped, self.fp32_out, self.sms, self.accumulate)

    @property
    def moved_bytes(self) -> int:
        """Minimum memory traffic: read operands once, write the output once, read the accumulator once."""
        if self.k_grouped:
            operands, outputs = (self.m + self.n) * self.k, self.groups * self.m * self.n
        else:
            operands, outputs = (self.m + self.groups * self.n) * self.k, self.m * self.n
        return operands + outputs * self.dense_problem.output_bytes * (2 if self.accumulate else 1)


# Tile; cost with scales 128x128 for b (m-grouped); cost with scales 1x128 (k-grouped). Costs of the dense GEMM, fitted
# on an H200. For 192 rows group_m = 8 was the best of 8, 12 and 24 (docs/design/grouped.md).
_CANDIDATES = (
    (Tile(2, 2, 128, 3, 8), Cost(0.915, 0.6), Cost(1.22, 0.4)),
    (Tile(3, 1, 128, 4, 8, registers=160, a_loads=3), Cost(0.652, 0.3), Cost(0.843, 0.3)),
    (Tile(2, 1, 128, 5, 16, k_unroll=4), Cost(0.447, 0.35), Cost(0.61, 0.2)),
    (Tile(2, 1, 128, 5, 16, k_unroll=2), Cost(0.47, 0.35), Cost(0.594, 0.1)),
    (Tile(1, 1, 128, 8, 32, k_unroll=4), Cost(0.25, 0.6), Cost(0.35, 0.6)),
    (Tile(1, 1, 64, 8, 32, k_unroll=4), Cost(0.222, 0.5), Cost(0.30, 0.5)),
)
TILES = tuple(tile for tile, _, _ in _CANDIDATES)
# µs per K-block if only one warpgroup multiplies 64 rows. k_unroll > 1 overlaps the promotion, else it waits.
_LONE_SUBTILE_US = {True: 0.25, False: 0.31}
_LAUNCHES_US = 6.0  # two launches: tile list, GEMM
_BYTES_PER_US = 4.1e6
_SAMPLES = 16  # group sizes sampled by the model
_LOW_GROUP_M = 4  # of tiles of 128 rows, chosen where groups have about 128 rows


def fitted(tile: Tile, problem: Problem) -> Tile:
    """The tile with as many stages as fit in shared memory, and a low group_m if groups are small.

    A group_m that spans many groups reads the weights of all of them concurrently, in short pieces; a low group_m has
    better memory throughput (docs/design/grouped.md)."""
    if not problem.k_grouped and tile.bm == 128:
        tile = tile._replace(group_m=_LOW_GROUP_M)
    return dense.fitted(tile, replace(problem.dense_problem, m=dense.SUBTILE_M * 4))


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of the kernel in bytes per CTA."""
    return dense.shared_bytes(tile, problem.dense_problem)


def _column_us(tile: Tile, cost: Cost, rows: int, blocks: int, lone_us: float) -> float:
    """µs of one column of tiles over `rows` rows."""
    full, rest = divmod(rows, tile.bm)
    us = full * (cost.block * blocks + cost.tile)
    if rest:
        busy = -(-rest // (SUBTILE_M * tile.m_subtiles))  # warpgroups with rows
        us += max(cost.block * busy / tile.warpgroups, lone_us) * blocks + cost.tile
    return us


def predicted_us(tile: Tile, cost: Cost, problem: Problem, lone_us: float) -> float:
    """Predicted µs: all tiles spread evenly over the SMs, but at least the time of one tile and of the memory traffic.

    lone_us: µs per K-block if only one warpgroup works."""
    columns = -(-problem.n // tile.bn)
    adding = 0.02 * tile.bm if problem.accumulate else 0.0  # epilogue that loads the accumulator
    cost = replace(cost, tile=cost.tile + adding)
    blocks = -(-problem.k // BLOCK)
    if problem.k_grouped:
        group_blocks = -(-blocks // problem.groups)
        work = problem.groups * columns * _column_us(tile, cost, problem.m, group_blocks, lone_us)
        longest = cost.block * group_blocks + cost.tile
    else:
        mean = problem.m / problem.groups
        sizes = [round(mean * (2 * i + 1) / _SAMPLES) for i in range(_SAMPLES)] if problem.groups > 1 else [problem.m]
        work = (
            problem.groups * columns * sum(_column_us(tile, cost, size, blocks, lone_us) for size in sizes) / len(sizes)
        )
        longest = cost.block * blocks + cost.tile
    # CTAs finish within one tile of each other: half a tile is lost on average
    us = max(work / problem.sms + longest / 2, longest, problem.moved_bytes / _BYTES_PER_US)
    return _LAUNCHES_US + us


def kernel_part(problem: Problem) -> tuple[Problem, float]:
    """Problem that the kernel solves, and µs of the second pass (dtype, accumulation), as in the dense GEMM."""
    if problem.dense_problem.direct:
        return problem, 0.0
    rows = problem.m * (problem.groups if problem.k_grouped else 1)
    part, us = dense.kernel_problem(replace(problem.dense_problem, m=rows))
    return replace(problem, fp32_out=part.fp32_out, accumulate=False), us


def bound(problem: Problem) -> tuple[float, str]:
    """Roofline: lower bound in µs, and the limiting resource."""
    return dense.bound_of(problem.flops, problem.moved_bytes, problem.sms)


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Tile, float]:
    """Fastest tile by the model, and its predicted µs.

    >>> tile, us = choose(Problem(16640, 8192, 5120, 64, k_grouped=False, fp32_out=False, sms=132))
    >>> tile.label
    '192x128, 3 warpgroups, 4 stages'
    """
    # ties (memory-bound): the smallest BM
    return min(candidates(problem), key=lambda pair: (pair[1], pair[0].bm))


def _lone_us(tile: Tile) -> float:
    return _LONE_SUBTILE_US[tile.k_unroll > 1] * tile.m_subtiles


def candidates(problem: Problem) -> list[tuple[Tile, float]]:
    """Every tile that the kernel supports, with its predicted µs."""
    return [
        (fitted(tile, problem), predicted_us(tile, vector if problem.k_grouped else block, problem, _lone_us(tile)))
        for tile, block, vector in _CANDIDATES
        if not (problem.accumulate and tile.m_subtiles > 1)  # the accumulator buffer of a warpgroup holds one m_subtile
    ]
