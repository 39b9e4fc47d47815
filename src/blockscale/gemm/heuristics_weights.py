"""Tile and schedule of the weight-only Hopper GEMM: pure functions of the problem, testable without a GPU.

`schedule` cuts the weight among CTAs and does not know M: sums must not depend on the batch (`_hopper_weights_kernel`).
`tile_for` fits stages and tokens to shared memory and may. docs/design/inference.md has the measurements behind the
constants.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

TILE_ROWS = 256  # of the weight, 64 for each of four consumer warpgroups
K_UNIT = 256  # of K: the least that a CTA takes of a tile
CHUNK = 64  # of K: one row of 128 bytes of x in shared memory
MAX_TOKENS = 64  # of a tile; more rows of x take further launches
BITS = {"mxfp4": 4.25, "nvfp4": 4.5, "mxfp8_e4m3": 8.25, "bf16": 16.0}  # of a value, scales included
SHARED_BYTES = 232_448  # the most that a CTA may have on sm_90

# A guess, not measured: with more partials of a tile, adding them costs more than the CTAs save.
_MAX_CTAS_PER_TILE = 16
_MAX_STAGES = 12

# Fitted to a study of MXFP4 on one H200, in graphs with dependent launch, within 20 % (docs/design/inference.md).
_LAUNCH_US = 7.0
_BYTES_PER_US = 4.4e6
_SMS = 132
_UNIT_US = {8: 0.0, 16: 1.07, 32: 1.21, 64: 1.69}  # decoding and products of a unit, by tokens
_PARTIAL_US_PER_TOKEN = 0.02
_BF16_FLOPS_PER_US = 6.82e8


class WeightTile(NamedTuple):
    """How a CTA computes 256 rows of the weight.

    bn: tokens.  chunks: of 64 of K in a stage, a divisor of 4.  stages: of the pipeline.  pdl: programmatic dependent
    launch.
    """

    bn: int
    chunks: int
    stages: int
    pdl: bool = True

    @property
    def label(self) -> str:
        """Text for users."""
        return f"256x{self.bn}, {self.stages} stages of {self.chunks * CHUNK} of K"


class Schedule(NamedTuple):
    """Cut of a weight: `units` of 256 rows by 256 of K, `tile_units` for each tile, dealt evenly to `ctas` CTAs."""

    ctas: int
    units: int
    tile_units: int

    @property
    def units_of_a_cta(self) -> int:
        """The most units of a CTA."""
        return -(-self.units // self.ctas)

    @property
    def partials(self) -> int:
        """The most partials that are added to a tile."""
        return max(0, -(-self.tile_units * self.ctas // self.units) - 1 + (self.units % self.ctas > 0))


@dataclass(frozen=True)
class WeightProblem:
    """y [m, n] = x [m, k] @ w [n, k].mT with a weight of this format on a GPU with so many SMs."""

    m: int
    n: int
    k: int
    format: str
    sms: int = _SMS


def schedule(n: int, k: int, sms: int) -> Schedule:
    """Cut of a weight [n, k]: the same for every M and every format.

    >>> schedule(4096, 14336, 132)
    Schedule(ctas=132, units=896, tile_units=56)
    """
    tiles, tile_units = -(-n // TILE_ROWS), -(-k // K_UNIT)
    return Schedule(min(sms, tiles * min(tile_units, _MAX_CTAS_PER_TILE)), tiles * tile_units, tile_units)


def stage_bytes(format: str, bn: int, chunks: int) -> int:
    """Shared memory of a stage: weights, x, two mbarriers."""
    return int(TILE_ROWS * chunks * CHUNK * BITS[format]) // 8 + chunks * CHUNK * bn * 2 + 16


def tile_for(rows: int, format: str) -> WeightTile:
    """Tile for up to 64 rows of x, with as many stages as fit.

    >>> tile_for(1, "mxfp4").label
    '256x8, 5 stages of 256 of K'
    """
    bn = max(8, min(MAX_TOKENS, 1 << (rows - 1).bit_length()))
    # larger stages have fewer barriers; smaller ones leave room for enough of them
    chunks = {"mxfp8_e4m3": 2, "bf16": 1}.get(format, 4 if bn <= 32 else 2)
    epilogue = 0 if bn == 8 else 8192  # where four consumers turn their outputs around
    free = SHARED_BYTES - epilogue - 1024
    return WeightTile(bn, chunks, min(_MAX_STAGES, free // stage_bytes(format, bn, chunks)))


@functools.lru_cache(maxsize=8192)
def choose(problem: WeightProblem) -> tuple[WeightTile, Schedule, float]:
    """Tile of the first launch, schedule, and predicted microseconds of all launches.

    >>> tile, cut, us = choose(WeightProblem(1, 28672, 8192, "mxfp4"))
    >>> tile.bn, cut.ctas, round(us)
    (8, 132, 37)
    """
    cut = schedule(problem.n, problem.k, problem.sms)
    tile = tile_for(min(problem.m, MAX_TOKENS), problem.format)
    whole, rest = divmod(problem.m, MAX_TOKENS)
    launches = [MAX_TOKENS] * whole + ([rest] if rest else [])
    return tile, cut, sum(_launch_us(cut, tile_for(rows, problem.format).bn, problem) for rows in launches)


def _launch_us(cut: Schedule, bn: int, problem: WeightProblem) -> float:
    unit_bytes = TILE_ROWS * K_UNIT * BITS[problem.format] / 8
    # a CTA's share of the bandwidth; fewer CTAs than SMs do not get more each
    unit = max(unit_bytes * _SMS / _BYTES_PER_US, _UNIT_US[bn])
    return _LAUNCH_US + cut.units_of_a_cta * unit + cut.partials * bn * _PARTIAL_US_PER_TOKEN


def bound(problem: WeightProblem) -> tuple[float, str]:
    """Roofline: the least microseconds of any kernel, and the limit that sets them.

    >>> bound(WeightProblem(16, 7168, 18432, "mxfp4"))[1]
    'memory at 4.2 TB/s'
    """
    m, n, k = problem.m, problem.n, problem.k
    memory = (n * k * BITS[problem.format] / 8 + 2 * m * (n + k)) / 4.2e6
    units = 2 * m * n * k / (_BF16_FLOPS_PER_US * problem.sms / _SMS)
    return (units, "bf16 units at 682 TFLOP/s") if units > memory else (memory, "memory at 4.2 TB/s")
