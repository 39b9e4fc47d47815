"""How Hopper's product is cut up: a pure function of the problem, testable without a GPU.

The model: a program per multiprocessor takes tiles in rounds; a tile costs a fixed time and a time per block of K.
Tiles that fill no round may be shared between programs (`_hopper_schedule`), which costs a trip through memory. What
has to come from memory takes its time in any case.

Any M, N and K will do: the last tile and the last block are as long as the others, and cost as much. Only an output
whose rows do not start at multiples of 16 bytes costs a pass of its own (`kernel_part`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

SUBTILE_M = 64  # rows of one warpgroup instruction
BLOCK = 128  # of K: a scale's reach


class Tile(NamedTuple):
    """groups * waves * 64 rows by bn columns, and how they are worked on.

    groups: consumer warpgroups.  waves: parts of 64 rows that each takes one after the other.  stages: blocks of K in
    the ring.  band: rows of tiles that are walked down before going right.  run: blocks of K that a group multiplies in
    one go, each while it adds the one before.  registers: of a consumer's thread.  rows: at most as many of a are
    loaded.  loads: copies that fetch a block of a, whose rows are powers of two.  cluster: multiprocessors that share a
    tile, 64 rows of each part on every one; a block of b is fetched once for all.
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
    cluster: int = 1

    @property
    def bm(self) -> int:
        return self.warpgroups * self.m_subtiles * SUBTILE_M * self.cluster

    @property
    def span(self) -> int:
        """Scales of a that are fetched for a block: a power of two."""
        return 1 << (self.bm - 1).bit_length()

    @property
    def label(self) -> str:
        """For people. Not `__str__`: the compiler takes that for its key, so it must name every field."""
        on_two = " on 2 multiprocessors" if self.cluster == 2 else ""
        return f"{self.bm}x{self.bn}{on_two}, {self.warpgroups} groups, {self.stages} stages"


class Plan(NamedTuple):
    """A tile, how many programs run, how many whole tiles each takes, and whether they share the rest of the tiles."""

    tile: Tile
    ctas: int
    waves: int
    stream_k: bool

    @property
    def label(self) -> str:
        """For people."""
        rest = f", then shares of {BLOCK} of K" if self.stream_k else ""
        return f"{self.tile.label}; {self.ctas} programs, {self.waves} tiles each{rest}"


@dataclass(frozen=True)
class Problem:
    """vector: b has a scale per row and block of 128 (1x128), else one per 128x128.  wide: the output is fp32.  add: to
    what it holds."""

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
        """Whether rows of a dense output start at multiples of 16 bytes, where the copy engine can write them."""
        return self.n * self.output_bytes % 16 == 0

    @property
    def output_bytes(self) -> int:
        """Of a value."""
        return 4 if self.fp32_out else 2


@dataclass(frozen=True)
class Cost:
    """Microseconds of a tile: for each block of K, and once."""

    block: float
    tile: float


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of a multiprocessor that the kernel takes: the ring, the output tiles, and the barriers."""
    block = (tile.bm // tile.cluster + tile.bn) * 128 + tile.span * 4 + 8 * (1 + tile.cluster)
    scales = tile.bn * 4 * (tile.stages if problem.b_1x128 else 1)
    output = tile.warpgroups * SUBTILE_M * tile.bn * (4 if problem.fp32_out else 2 * tile.m_subtiles)
    return tile.stages * block + scales + output + 8 * tile.warpgroups + 1024


SHARED_BYTES = 232_448  # bytes that a program may have on sm_90

# Fitted to one H200 under load, with the assembler of CUDA 12.9 (docs/design/gemm.md).
_LAUNCH_US = 2.5
_BYTES_PER_US = 4.1e6  # of memory
_PIECE_BYTES_PER_US = 2.3e3  # a piece of a shared tile, on its way to the second-level cache and back
_ADDING_US_PER_ROW = 0.02  # of a tile whose sums are added to memory: fetched and stored, measured in fp32
_SHARING_MARGIN = 1.03  # what it must win by: with idle multiprocessors the others run at a higher clock
# a guess: after so many rounds power is short, and a round with no programs would be shorter by this share
_LONG, _LAST_ROUND = 4, 0.25
_LEAST_SHARE = 4  # blocks of K that are worth a program of their own
# tile; costs with one scale per 128x128 of b, and with scales 1x128
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
    """With as many stages as fit, and no rows loaded that a small operand does not have.  size: bytes of a kernel."""
    stages = tile.stages
    while stages > 2 and size(tile._replace(stages=stages), problem) > SHARED_BYTES:
        stages -= 1
    return tile._replace(stages=stages, a_rows=16 if problem.m <= 16 and tile.bm == SUBTILE_M else 256)


def data_parallel_plan(tile: Tile, problem: Problem) -> Plan:
    """Every tile is one program's."""
    tiles, programs = _tiles(tile, problem), problem.sms // tile.cluster
    return Plan(fitted(tile, problem), min(tiles, programs), -(-tiles // programs), False)


def stream_k_plan(tile: Tile, problem: Problem) -> Plan | None:
    """Tiles that fill no round are shared; None where nothing is left, or too little."""
    tiles, programs = _tiles(tile, problem), problem.sms
    rounds, left = divmod(tiles, programs)
    most = left * problem.blocks // _LEAST_SHARE
    if rounds == 0:
        programs = min(programs, most)
    if left == 0 or most < programs or programs <= left:
        return None
    return Plan(fitted(tile, problem), programs, rounds, True)


def in_clusters(plan: Plan, problem: Problem) -> Plan:
    """The plan's tile on each of two multiprocessors, which fetch b once. The plan itself where one tile has all rows.

    >>> problem = Problem(8192, 8192, 8192, b_1x128=False, fp32_out=False, sms=132)
    >>> in_clusters(data_parallel_plan(TILES[2], problem), problem).label
    '256x128 on 2 multiprocessors, 2 groups, 5 stages; 66 programs, 32 tiles each'
    """
    tile = plan.tile
    if problem.m <= tile.bm:
        return plan
    doubled = tile._replace(cluster=2, a_loads=tile.warpgroups * tile.m_subtiles, group_m=-(-tile.group_m // 2))
    return data_parallel_plan(doubled, problem)


def _tiles(tile: Tile, problem: Problem) -> int:
    return -(-problem.m // tile.bm) * -(-problem.n // tile.bn)


def predicted_us(plan: Plan, cost: Cost, problem: Problem) -> float:
    """Whole rounds draw all the bandwidth there is; those that are left over take a tile's time, or that of their
    bytes."""
    tiles, end = (
        _tiles(plan.tile, problem),
        cost.tile + (_ADDING_US_PER_ROW * plan.tile.bm if problem.accumulate else 0.0),
    )
    one = cost.block * problem.blocks + end
    memory = moved_bytes(problem) / _BYTES_PER_US
    if plan.stream_k:
        share = -(-(tiles - plan.waves * plan.ctas) * problem.blocks // plan.ctas)
        work = plan.waves * one + cost.block * share + end
        piece = 4 * SUBTILE_M * plan.tile.m_subtiles * plan.tile.bn
        return _LAUNCH_US + max(work, memory) + piece / _PIECE_BYTES_PER_US
    rounds, left = divmod(tiles, plan.ctas)
    us = max(rounds * one, memory * (tiles - left) / tiles)
    if left:
        idle = 1 - left / plan.ctas if plan.waves >= _LONG else 0.0
        us += max(one * (1 - _LAST_ROUND * idle), memory * left / tiles)
    return _LAUNCH_US + us


def moved_bytes(problem: Problem) -> int:
    """The fewest: operands once, the output once, and what it is added to."""
    m, n, k = problem.m, problem.n, problem.k
    return (m + n) * k + m * n * problem.output_bytes * (2 if problem.accumulate else 1)


def kernel_part(problem: Problem) -> tuple[Problem, float]:
    """What the kernel does of a problem, and the microseconds of the pass behind it, from a padded buffer to an output
    that the kernel cannot write to: 0 where it can.

    >>> odd = Problem(4096, 2111, 4095, b_1x128=True, fp32_out=True, sms=132, accumulate=True)
    >>> part, us = kernel_part(odd)
    >>> part.accumulate, round(us)
    (False, 28)
    """
    if problem.direct:
        return problem, 0.0
    part = replace(
        problem, fp32_out=problem.fp32_out or problem.accumulate, accumulate=False
    )  # what is added later is not rounded before
    touched = problem.m * problem.n * (part.output_bytes + problem.output_bytes * (2 if problem.accumulate else 1))
    return part, _LAUNCH_US + touched / _BYTES_PER_US


# What the vendor's plain products reached on the same H200, whose multiprocessors are this many: rowwise FP8 with fast
# accumulation 1,308 to 1,448 TFLOP/s, as power allowed, and a sum of a large tensor 4.2 TB/s.
_MOST_FLOPS_PER_US, _OF_SMS = 1.45e9, 132
_MOST_BYTES_PER_US = 4.2e6


def bound(problem: Problem) -> tuple[float, str]:
    """The fewest microseconds that any kernel could take, and what sets them.

    >>> bound(Problem(16, 7168, 18432, b_1x128=False, fp32_out=False, sms=132))[1]
    'memory at 4.2 TB/s'
    """
    return bound_of(2 * problem.m * problem.n * problem.k, moved_bytes(problem), problem.sms)


def bound_of(flops: int, moved: int, multiprocessors: int) -> tuple[float, str]:
    """The same for any work of so many FLOPs and bytes."""
    rate = _MOST_FLOPS_PER_US * multiprocessors / _OF_SMS
    units, memory = flops / rate, moved / _MOST_BYTES_PER_US
    if units >= memory:
        return units, f"FP8 units at {rate / 1e6:,.0f} TFLOP/s"
    return memory, f"memory at {_MOST_BYTES_PER_US / 1e6:.1f} TB/s"


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem) -> tuple[Plan, float]:
    """The quickest plan by the model, and its predicted microseconds.

    >>> plan, us = choose(Problem(8192, 8192, 8192, b_1x128=False, fp32_out=False, sms=132))
    >>> plan.tile.label
    '192x128, 3 groups, 4 stages'
    """
    return min(candidates(problem), key=lambda pair: pair[1] * (_SHARING_MARGIN if pair[0].stream_k else 1.0))


def candidates(problem: Problem) -> list[tuple[Plan, float]]:
    """Every plan that the kernel can run, each with its predicted microseconds."""
    found: list[tuple[Plan, float]] = []
    for tile, block, vector in _CANDIDATES:
        if problem.accumulate and tile.m_subtiles > 1:
            continue  # a group's buffer holds one part of what is added to
        for plan in (data_parallel_plan(tile, problem), stream_k_plan(tile, problem)):
            if plan is not None:
                found.append((plan, predicted_us(plan, vector if problem.b_1x128 else block, problem)))
    return found


# ---- few rows: weights by tokens -------------------------------------------------------------------------------------

MOST_ROWS = 32
_FEW_ROWS = Cost(0.29, 0.5)
_FEW_ROWS_MARGIN = 0.97
_MOST_STAGES = 16


def scales_of(tokens: int) -> int:
    """Scales that are fetched for a block: the copy engine writes at multiples of 128 bytes."""
    return max(tokens, 32)


def few_rows_tile(rows: int) -> Tile:
    """192 rows of weights by 16 or 32 tokens, with as many stages as fit."""
    tokens = 16 if rows <= 16 else MOST_ROWS
    tile = Tile(3, 1, tokens, 1, 1, k_unroll=4, registers=160, a_loads=3)
    block = (tile.bm + tokens) * 128 + (tile.span + scales_of(tokens)) * 4 + 16  # the last: two barriers
    return tile._replace(stages=min(_MOST_STAGES, (SHARED_BYTES - 2048) // block))


@functools.lru_cache(maxsize=8192)
def choose_few_rows(problem: Problem) -> tuple[Plan, float]:
    """The plan of a kernel that takes the weights for rows, and its predicted microseconds.

    >>> plan, us = choose_few_rows(Problem(16, 18432, 7168, b_1x128=False, fp32_out=False, sms=132))
    >>> plan.label
    '192x16, 3 groups, 8 stages; 96 programs, 1 tiles each'
    """
    turned = replace(problem, m=problem.n, n=problem.m)
    tile = few_rows_tile(problem.m)
    plan = data_parallel_plan(tile, turned)._replace(tile=tile)  # there is no output tile that would take stages
    return plan, predicted_us(plan, _FEW_ROWS, turned)


def few_rows_pay(problem: Problem) -> bool:
    """Whether the kernel for few rows is the quicker one: where weights fill one round of its tiles, and more than one
    of the other's. It writes to any output by itself."""
    part, pass_us = kernel_part(problem)
    return choose_few_rows(problem)[1] < _FEW_ROWS_MARGIN * (choose(part)[1] + pass_us)
