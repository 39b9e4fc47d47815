"""Tile and plan of the Hopper GEMM: a pure function of the problem, testable without a GPU.

The cost model: one CTA per SM takes tiles in waves; a tile costs a fixed time and a time per K-block. Tiles that do not
fill a wave may be split along K (stream-K, `_hopper_schedule`), which costs a trip of the partials through memory. The
time of the bytes moved is a lower bound.

Any M, N and K is valid: the last tile and the last K-block cost as much as the others. Only an output whose rows do not
start at multiples of 16 bytes needs a second pass (`kernel_problem`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

SUBTILE_M = 64  # rows of one warpgroup instruction
BLOCK = 128  # K-block: the extent of a scale along K


class Tile(NamedTuple):
    """warpgroups * m_subtiles * 64 rows by bn columns, and how the kernel computes them.

    warpgroups: consumers.  m_subtiles: of 64 rows, computed one after the other by each consumer.  stages: of the
    pipeline, one K-block each.  group_m: rasterisation.  k_unroll: K-blocks per loop iteration; each MMA runs while the
    result of the one before is accumulated.  registers: per consumer thread.  a_rows: the most rows in one TMA load of
    a.  a_loads: TMA loads per K-block of a, since a box has a power of two of rows.
    """

    warpgroups: int
    m_subtiles: int
    bn: int
    stages: int
    group_m: int
    k_unroll: int = 1
    registers: int = 232
    a_rows: int = 256
    a_loads: int = 1

    @property
    def bm(self) -> int:
        return self.warpgroups * self.m_subtiles * SUBTILE_M

    @property
    def span(self) -> int:
        """Scales of a in one TMA load: the rows, rounded up to a power of two."""
        return 1 << (self.bm - 1).bit_length()

    @property
    def label(self) -> str:
        """Text for users. Not `__str__`: Triton puts that into its cache key, so it must name every field."""
        return f"{self.bm}x{self.bn}, {self.warpgroups} warpgroups, {self.stages} stages"


class Plan(NamedTuple):
    """A tile and its schedule.

    ctas: the grid.  waves: whole tiles per CTA.  stream_k: split the other tiles.
    """

    tile: Tile
    ctas: int
    waves: int
    stream_k: bool

    @property
    def label(self) -> str:
        """Text for users."""
        rest = ", then stream-K" if self.stream_k else ""
        return f"{self.tile.label}; {self.ctas} CTAs, {self.waves} waves{rest}"


@dataclass(frozen=True)
class Problem:
    """Sizes and options of a GEMM that decide the plan.

    b_1x128: b has scales 1x128, else 128x128.  fp32_out: else 16 bits.  sms: of the GPU.  accumulate: out += product.
    """

    m: int
    n: int
    k: int
    b_1x128: bool
    fp32_out: bool
    sms: int
    accumulate: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.k // BLOCK)

    @property
    def direct(self) -> bool:
        """Whether rows of a dense output start at multiples of 16 bytes, so that TMA can store them."""
        return self.n * self.output_bytes % 16 == 0

    @property
    def output_bytes(self) -> int:
        """Bytes of an output element."""
        return 4 if self.fp32_out else 2


@dataclass(frozen=True)
class Cost:
    """Microseconds of a tile: per K-block, and fixed."""

    block: float
    tile: float


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of a CTA in bytes: pipeline stages, output tiles, mbarriers."""
    block = (tile.bm + tile.bn) * 128 + tile.span * 4 + 8 * 2
    scales = tile.bn * 4 * (tile.stages if problem.b_1x128 else 1)
    output = tile.warpgroups * SUBTILE_M * tile.bn * (4 if problem.fp32_out else 2 * tile.m_subtiles)
    return tile.stages * block + scales + output + 8 * tile.warpgroups + 1024


SHARED_BYTES = 232_448  # the most that a CTA may have on sm_90

# Fitted to one H200 under load, with ptxas 12.9 (docs/design/gemm.md).
_LAUNCH_US = 2.5
_BYTES_PER_US = 4.1e6  # DRAM
_PARTIAL_BYTES_PER_US = 2.3e3  # a partial of a split tile, to L2 and back
_ACCUMULATE_US_PER_ROW = 0.02  # row of a tile with `out +=`: load and store, measured in fp32
_STREAM_K_MARGIN = 1.03  # stream-K must win by this: with idle SMs the others run at a higher clock
# a guess: from this many waves on, power limits the clock; a last wave on few SMs is shorter by up to this fraction
_MANY_WAVES, _LAST_WAVE = 4, 0.25
_MIN_BLOCKS_PER_CTA = 4  # fewer K-blocks are not worth a CTA
# tile; cost with scales 128x128 of b, and with 1x128
_CANDIDATES = (
    (Tile(2, 2, 128, 3, 8), Cost(0.915, 0.6), Cost(1.22, 0.4)),
    (Tile(3, 1, 128, 4, 8, registers=160, a_loads=3), Cost(0.652, 0.3), Cost(0.843, 0.3)),
    (Tile(2, 1, 128, 5, 12, k_unroll=4), Cost(0.447, 0.35), Cost(0.61, 0.2)),
    (Tile(2, 1, 128, 5, 12, k_unroll=2), Cost(0.47, 0.35), Cost(0.594, 0.1)),
    (Tile(1, 1, 128, 8, 16, k_unroll=4), Cost(0.25, 0.6), Cost(0.35, 0.6)),
    (Tile(1, 1, 64, 8, 16, k_unroll=4), Cost(0.222, 0.5), Cost(0.30, 0.5)),
)
TILES = tuple(tile for tile, _, _ in _CANDIDATES)


def fitted(tile: Tile, problem: Problem, size: Callable[[Tile, Problem], int] = shared_bytes) -> Tile:
    """The tile with as many stages as fit, and 16 rows per load for M <= 16.  size: shared memory of a kernel."""
    stages = tile.stages
    while stages > 2 and size(tile._replace(stages=stages), problem) > SHARED_BYTES:
        stages -= 1
    return tile._replace(stages=stages, a_rows=16 if problem.m <= 16 and tile.bm == SUBTILE_M else 256)


def data_parallel_plan(tile: Tile, problem: Problem) -> Plan:
    """Plan without split tiles."""
    tiles, ctas = _tiles(tile, problem), problem.sms
    return Plan(fitted(tile, problem), min(tiles, ctas), -(-tiles // ctas), False)


def stream_k_plan(tile: Tile, problem: Problem) -> Plan | None:
    """Plan that splits the tiles of the last, incomplete wave; None if there are none, or too few K-blocks per CTA."""
    tiles, ctas = _tiles(tile, problem), problem.sms
    waves, left = divmod(tiles, ctas)
    most = left * problem.blocks // _MIN_BLOCKS_PER_CTA
    if waves == 0:
        ctas = min(ctas, most)
    if left == 0 or most < ctas or ctas <= left:
        return None
    return Plan(fitted(tile, problem), ctas, waves, True)


def _tiles(tile: Tile, problem: Problem) -> int:
    return -(-problem.m // tile.bm) * -(-problem.n // tile.bn)


def predicted_us(plan: Plan, cost: Cost, problem: Problem) -> float:
    """Predicted time in microseconds. Full waves share the DRAM bandwidth; the last wave takes the time of a tile, or
    of its bytes."""
    tiles = _tiles(plan.tile, problem)
    end = cost.tile + (_ACCUMULATE_US_PER_ROW * plan.tile.bm if problem.accumulate else 0.0)
    one = cost.block * problem.blocks + end
    memory = moved_bytes(problem) / _BYTES_PER_US
    if plan.stream_k:
        blocks = -(-(tiles - plan.waves * plan.ctas) * problem.blocks // plan.ctas)
        work = plan.waves * one + cost.block * blocks + end
        partial = 4 * SUBTILE_M * plan.tile.m_subtiles * plan.tile.bn
        return _LAUNCH_US + max(work, memory) + partial / _PARTIAL_BYTES_PER_US
    waves, left = divmod(tiles, plan.ctas)
    us = max(waves * one, memory * (tiles - left) / tiles)
    if left:
        idle = 1 - left / plan.ctas if plan.waves >= _MANY_WAVES else 0.0
        us += max(one * (1 - _LAST_WAVE * idle), memory * left / tiles)
    return _LAUNCH_US + us


def moved_bytes(problem: Problem) -> int:
    """Least DRAM traffic in bytes: operands read once, output written once, and read once with `out +=`."""
    m, n, k = problem.m, problem.n, problem.k
    return (m + n) * k + m * n * problem.output_bytes * (2 if problem.accumulate else 1)


def kernel_problem(problem: Problem) -> tuple[Problem, float]:
    """Problem that the kernel computes, and microseconds of the second pass, from a padded buffer to an output that TMA
    cannot store to; 0.0 if the kernel writes the output itself.

    >>> odd = Problem(4096, 2111, 4095, b_1x128=True, fp32_out=True, sms=132, accumulate=True)
    >>> launched, us = kernel_problem(odd)
    >>> launched.accumulate, round(us)
    (False, 28)
    """
    if problem.direct:
        return problem, 0.0
    # the second pass accumulates, so the kernel must not round
    launched = replace(problem, fp32_out=problem.fp32_out or problem.accumulate, accumulate=False)
    touched = problem.m * problem.n * (launched.output_bytes + problem.output_bytes * (2 if problem.accumulate else 1))
    return launched, _LAUNCH_US + touched / _BYTES_PER_US


# Peaks measured on the same H200, which has this many SMs: cuBLAS rowwise FP8 with fast accumulation reached 1,308 to
# 1,448 TFLOP/s, as power allowed, and the sum of a large tensor 4.2 TB/s.
_PEAK_FLOPS_PER_US, _PEAK_SMS = 1.45e9, 132
_PEAK_BYTES_PER_US = 4.2e6


def bound(problem: Problem) -> tuple[float, str]:
    """Roofline: the least microseconds of any kernel, and the limit that sets them.

    >>> bound(Problem(16, 7168, 18432, b_1x128=False, fp32_out=False, sms=132))[1]
    'memory at 4.2 TB/s'
    """
    return bound_of(2 * problem.m * problem.n * problem.k, moved_bytes(problem), problem.sms)


def bound_of(flops: int, moved: int, sms: int) -> tuple[float, str]:
    """Roofline of any work with these FLOPs and bytes, on a Hopper with so many SMs."""
    rate = _PEAK_FLOPS_PER_US * sms / _PEAK_SMS
    units, memory = flops / rate, moved / _PEAK_BYTES_PER_US
    if units >= memory:
        return units, f"FP8 units at {rate / 1e6:,.0f} TFLOP/s"
    return memory, f"memory at {_PEAK_BYTES_PER_US / 1e6:.1f} TB/s"


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Plan, float]:
    """Fastest plan by the model, and its predicted microseconds.

    >>> plan, us = choose(Problem(8192, 8192, 8192, b_1x128=False, fp32_out=False, sms=132))
    >>> plan.tile.label
    '192x128, 3 warpgroups, 4 stages'
    """
    return min(candidates(problem), key=lambda pair: pair[1] * (_STREAM_K_MARGIN if pair[0].stream_k else 1.0))


def candidates(problem: Problem) -> list[tuple[Plan, float]]:
    """Every plan that the kernel can run, with its predicted microseconds."""
    found: list[tuple[Plan, float]] = []
    for tile, cost_128x128, cost_1x128 in _CANDIDATES:
        if problem.accumulate and tile.m_subtiles > 1:
            continue  # the output buffer of a consumer holds one m_subtile
        for plan in (data_parallel_plan(tile, problem), stream_k_plan(tile, problem)):
            if plan is not None:
                found.append((plan, predicted_us(plan, cost_1x128 if problem.b_1x128 else cost_128x128, problem)))
    return found


# ---- few rows, operands swapped: weights by tokens -------------------------------------------------------------------

MAX_FEW_ROWS = 32
_FEW_ROWS = Cost(0.29, 0.5)
_FEW_ROWS_MARGIN = 0.97
_MAX_STAGES = 16


def token_scales(tokens: int) -> int:
    """Token scales in one TMA load: at least 32, since TMA writes at multiples of 128 bytes."""
    return max(tokens, 32)


def few_rows_tile(rows: int) -> Tile:
    """Tile of 192 rows of weights by 16 or 32 tokens, with as many stages as fit."""
    tokens = 16 if rows <= 16 else MAX_FEW_ROWS
    tile = Tile(3, 1, tokens, 1, 1, k_unroll=4, registers=160, a_loads=3)
    block = (tile.bm + tokens) * 128 + (tile.span + token_scales(tokens)) * 4 + 16  # two mbarriers
    return tile._replace(stages=min(_MAX_STAGES, (SHARED_BYTES - 2048) // block))


@functools.lru_cache(maxsize=8192)
def choose_few_rows(problem: Problem) -> tuple[Plan, float]:
    """Plan of the kernel with swapped operands, and its predicted microseconds.

    >>> plan, us = choose_few_rows(Problem(16, 18432, 7168, b_1x128=False, fp32_out=False, sms=132))
    >>> plan.label
    '192x16, 3 warpgroups, 8 stages; 96 CTAs, 1 waves'
    """
    swapped = replace(problem, m=problem.n, n=problem.m)
    tile = few_rows_tile(problem.m)
    plan = data_parallel_plan(tile, swapped)._replace(tile=tile)  # no output tile in shared memory, so more stages fit
    return plan, predicted_us(plan, _FEW_ROWS, swapped)


def few_rows_win(problem: Problem) -> bool:
    """Whether the kernel for few rows is predicted to be faster: where the weights are one wave of its tiles, and more
    than one of the other kernel's. It writes to any output without a second pass."""
    launched, pass_us = kernel_problem(problem)
    return choose_few_rows(problem)[1] < _FEW_ROWS_MARGIN * (choose(launched)[1] + pass_us)
