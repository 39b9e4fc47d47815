"""Tile and plan of the Hopper MXFP8 GEMM: a pure function of the problem, testable without a GPU.

As in `heuristics`, without stream-K. docs/design/mxfp8-hopper.md has measurements.
"""

from __future__ import annotations

import functools

from .heuristics import Cost, Plan, Problem, Tile, data_parallel_plan, fitted, predicted_us

BLOCK = 128  # of K, per pipeline stage
STEP = 32  # of K: the extent of a scale, and of one MMA instruction

# k_unroll counts steps, four per K-block. Consumers leave registers to the producer and the scaler warps. Costs are
# fitted to one H200, within 12 %: small tiles at 1 to 512 rows, the large one from there to the shapes of training.
CANDIDATES = (
    (Tile(2, 1, 128, 5, 12, k_unroll=8, registers=216), Cost(0.70, 0.6)),
    (Tile(1, 1, 128, 8, 16, k_unroll=4), Cost(0.40, 2.0)),
    (Tile(1, 1, 64, 8, 16, k_unroll=4), Cost(0.25, 1.6)),
)
TILES = tuple(tile for tile, _ in CANDIDATES)


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of a CTA in bytes: pipeline stages, output tiles, mbarriers."""
    factors = 4 * BLOCK // STEP
    block = (tile.bm + tile.bn) * BLOCK + tile.bm * factors
    output = tile.bm * tile.bn * (4 if problem.fp32_out else 2)
    return tile.stages * block + output + 8 * (2 * tile.stages + tile.warpgroups) + 1024


def plan_for(tile: Tile, problem: Problem) -> Plan:
    """Data-parallel plan. With 16-bit `out +=` consumers keep more addresses: 216 registers spilled, 224 do not."""
    if problem.accumulate and not problem.fp32_out and tile.warpgroups > 1:
        tile = tile._replace(registers=224)
    return data_parallel_plan(tile, problem)._replace(tile=fitted(tile, problem, shared_bytes))


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Plan, float]:
    """Fastest plan by the model of `heuristics`, and its predicted microseconds.

    >>> plan, us = choose(Problem(4096, 4096, 4096, b_1x128=False, fp32_out=False, sms=132))
    >>> plan.tile.label
    '128x128, 2 warpgroups, 5 stages'
    """
    plans = [(plan_for(tile, problem), cost) for tile, cost in CANDIDATES]
    return min(((plan, predicted_us(plan, cost, problem)) for plan, cost in plans), key=lambda pair: pair[1])
