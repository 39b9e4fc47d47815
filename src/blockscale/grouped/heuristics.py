"""Choice of the tile of the grouped Hopper GEMMs: a pure function of static sizes, testable without a GPU.

The host does not know the group sizes, so the model assumes a uniform distribution between 0 and twice the mean. A
group is whole tiles and a remainder. In the remainder only m_subtiles (64 rows) that hold rows are multiplied, but the
whole tile of b is loaded. The rest is as in `gemm.heuristics`: µs per tile and K-block, plus µs per tile. A `Model`
has the tiles and costs of one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..gemm import heuristics as dense
from ..gemm import heuristics_mx as dense_mx
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


_LAUNCHES_US = 6.0  # two launches: tile list, GEMM
_BYTES_PER_US = 4.1e6
_SAMPLES = 16  # group sizes sampled by the model


class Costs(NamedTuple):
    """Costs of a tile in m-grouped and in k-grouped GEMMs.  lone_us: µs per K-block if only one warpgroup works."""

    m_grouped: Cost
    k_grouped: Cost
    lone_us: float


def _column_us(tile: Tile, cost: Cost, rows: int, blocks: int, lone_us: float) -> float:
    """µs of one column of tiles over `rows` rows."""
    full, rest = divmod(rows, tile.bm)
    us = full * (cost.block * blocks + cost.tile)
    if rest:
        busy = -(-rest // (SUBTILE_M * tile.m_subtiles))  # warpgroups with rows
        us += max(cost.block * busy / tile.warpgroups, lone_us) * blocks + cost.tile
    return us


def predicted_us(tile: Tile, costs: Costs, problem: Problem) -> float:
    """Predicted µs: tiles spread evenly over the SMs, but at least the time of one tile and of the memory traffic."""
    cost, lone_us = costs.k_grouped if problem.k_grouped else costs.m_grouped, costs.lone_us
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


@dataclass(frozen=True, eq=False)
class Model:
    """Tiles of a kernel and their costs.

    bytes_of: shared memory of the dense kernel with the same pipeline.  low_group_m: `group_m` of tiles of 128 rows in
    m-grouped GEMMs, which are chosen where groups have about that many; None keeps the tile's. A high one spans many
    groups and reads the weights of all of them concurrently, in short pieces (docs/design/grouped.md).  first_us: µs of
    a pass before the kernel.
    """

    costs: dict[Tile, Costs]
    bytes_of: Callable[[Tile, dense.Problem], int] = dense.shared_bytes
    low_group_m: int | None = None
    first_us: Callable[[Problem], float] = lambda problem: 0.0

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(self.costs)

    def fitted(self, tile: Tile, problem: Problem) -> Tile:
        """The tile with as many stages as fit in shared memory."""
        if self.low_group_m is not None and not problem.k_grouped and tile.bm == 128:
            tile = tile._replace(group_m=self.low_group_m)
        return dense.fitted(tile, replace(problem.dense_problem, m=4 * SUBTILE_M), self.bytes_of)

    def shared_bytes(self, tile: Tile, problem: Problem) -> int:
        """Shared memory of the kernel in bytes per CTA, at most."""
        return self.bytes_of(tile, problem.dense_problem)

    def candidates(self, problem: Problem) -> list[tuple[Tile, float]]:
        """Every tile that the kernel supports, with its predicted µs."""
        first_us = self.first_us(problem)
        return [
            (self.fitted(tile, problem), first_us + predicted_us(tile, costs, problem))
            for tile, costs in self.costs.items()
            if not (problem.accumulate and tile.m_subtiles > 1)  # a warpgroup's accumulator buffer holds one m_subtile
        ]


@functools.lru_cache(maxsize=8192)
def choose(model: Model, problem: Problem) -> tuple[Tile, float]:
    """Fastest tile by a model, and its predicted µs.

    >>> problem = Problem(16640, 8192, 5120, 64, k_grouped=False, fp32_out=False, sms=132)
    >>> [choose(model, problem)[0].label for model in (FP8, MX)]
    ['192x128, 3 warpgroups, 4 stages', '128x128, 2 warpgroups, 5 stages']
    """
    # ties (memory-bound): the smallest BM
    return min(model.candidates(problem), key=lambda pair: (pair[1], pair[0].bm))


# Costs of the dense GEMM, fitted on an H200: m-grouped with scales 128x128 of b, k-grouped with 1x128. For 192 rows
# group_m = 8 was the best of 8, 12 and 24 (docs/design/grouped.md). k_unroll > 1 overlaps the promotion, else a lone
# m_subtile waits for it.
FP8 = Model(
    {
        Tile(2, 2, 128, 3, 8): Costs(Cost(0.915, 0.6), Cost(1.22, 0.4), 0.62),
        Tile(3, 1, 128, 4, 8, registers=160, a_loads=3): Costs(Cost(0.652, 0.3), Cost(0.843, 0.3), 0.31),
        Tile(2, 1, 128, 5, 16, k_unroll=4): Costs(Cost(0.447, 0.35), Cost(0.61, 0.2), 0.25),
        Tile(2, 1, 128, 5, 16, k_unroll=2): Costs(Cost(0.47, 0.35), Cost(0.594, 0.1), 0.25),
        Tile(1, 1, 128, 8, 32, k_unroll=4): Costs(Cost(0.25, 0.6), Cost(0.35, 0.6), 0.25),
        Tile(1, 1, 64, 8, 32, k_unroll=4): Costs(Cost(0.222, 0.5), Cost(0.30, 0.5), 0.25),
    },
    low_group_m=4,
)

# The tiles and costs of the dense GEMM. group_m is larger, because only tiles of the same group share b. Consumers keep
# the tile coordinates beside the accumulator: with 216 registers they spilled. The scaler warps need no more than 32.
MX = Model(
    {
        tile._replace(group_m=32 // tile.warpgroups, registers=224): Costs(
            cost, cost, 0.4 if tile.warpgroups > 1 else 0.0
        )
        for tile, cost in dense_mx.CANDIDATES
    },
    dense_mx.shared_bytes,
)


def upcast_us(problem: Problem) -> float:
    """µs of the upcast pass: one byte read and two written for each code."""
    matrices = 1 if problem.k_grouped else problem.groups
    return 3 * (problem.m + matrices * problem.n) * problem.k / _BYTES_PER_US


# bf16 tensor cores at 5.9 TFLOP/s per SM. A stage has as many bytes as one of FP8, with half the K.
UPCAST = Model(
    {
        tile: Costs(cost, cost, 0.4 * tile.m_subtiles)
        for tile, cost in (
            (Tile(2, 2, 128, 4, 8), Cost(1.47, 1.0)),
            (Tile(2, 1, 128, 6, 16), Cost(0.78, 0.6)),
            (Tile(1, 1, 128, 8, 32), Cost(0.45, 0.6)),
        )
    },
    first_us=upcast_us,
)
