"""Which tiles Hopper's grouped kernels work on: every row and column of every group once, and by its blocks.

Plain Python calls the kernels' own functions, with lists in the place of memory.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from blockscale.gemm.heuristics import Tile
from blockscale.grouped import heuristics, heuristics_mx

walk: Any = pytest.importorskip("blockscale.grouped._hopper_tiles", reason="this Triton has no Gluon for Hopper")


@dataclass(frozen=True)
class Memory:
    """A pointer into a list of numbers."""

    values: list[int]
    at: int = 0

    def __add__(self, step: int) -> Memory:
        return Memory(self.values, self.at + step)


class Machine:
    """As much of the language as the functions ask for."""

    def __init__(self, programs: int) -> None:
        self.programs, self.program = programs, 0

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(
            cdiv=lambda a, b: -(-a // b),
            load=lambda memory: memory.values[memory.at],
            minimum=min,
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(132)
    for name in ("count_rotated_tiles", "tile_at", "rotated_tile_at"):
        monkeypatch.setattr(walk, name, getattr(walk, name).fn)
    monkeypatch.setattr(walk, "gl", made.module())
    return made


def places(machine: Machine, listed: list[int], sizes: tuple[int, ...], tile: Tile, k_grouped: bool):
    work = (Memory(listed), *sizes)
    for program in range(machine.programs):
        machine.program = program
        for item in range(walk.count_tiles.fn(work, tile, k_grouped)):
            yield walk.place_of.fn(item, work, tile, k_grouped)


def patterns() -> list[list[int]]:
    draw = random.Random(2)
    drawn = [[draw.choice((0, 1, 63, 64, 65, 200, 700)) for _ in range(draw.randint(1, 30))] for _ in range(6)]
    return [[0, 0, 0], [517], [0, 130, 0, 64, 0], [260] * 64, *drawn]


@pytest.mark.parametrize(
    ("tile", "step"), [*((tile, 4) for tile in heuristics.TILES), *((tile, 1) for tile in heuristics_mx.TILES)], ids=str
)
def test_groups_of_rows(machine: Machine, tile: Tile, step: int) -> None:
    """step: tiles of FP8 start where scales can be fetched, those of MXFP8 anywhere."""
    for programs in (132, 7):  # of an H200, and of none
        machine.programs = programs
        for sizes in patterns():
            n, k, rest, groups = 336, 400, 70, len(sizes)
            ends = [0, *accumulate(sizes)]
            spans = [*pairwise(ends), (ends[-1], ends[-1] + rest)]
            rows = [
                (row, min(row + tile.bm, end), group, max(row, first))
                for group, (first, end) in enumerate(spans)
                for row in range(first // step * step, end, tile.bm)
                if first < end
            ]
            listed = [number for entry in [(len(rows), 0, 0, 0), *rows] for number in entry]
            found: Counter[tuple[int, int, int]] = Counter()
            shape = (groups, ends[-1] + rest, n, k)
            for group, row, top, end, column, start, stop, begin in places(machine, listed, shape, tile, False):
                assert row == top
                assert row % step == 0
                assert (start, stop) == ((0, 4) if group < groups else (0, 0))
                assert spans[group][0] <= begin < end <= spans[group][1]
                assert top <= begin < top + step
                assert end - top == min(tile.bm, spans[group][1] - top)
                found.update((group, each, column) for each in range(begin, end))
            columns = range(0, n, tile.bn)
            want = [(g, row, c) for g, (first, end) in enumerate(spans) for row in range(first, end) for c in columns]
            assert found == Counter(want)


@pytest.mark.parametrize("tile", heuristics.TILES, ids=str)
def test_groups_of_tokens(machine: Machine, tile: Tile) -> None:
    m, n = 336, 400
    for sizes in patterns():
        blocks = [-(-size // 128) for size in sizes]
        starts = [0, *accumulate(blocks)]
        order = sorted(range(len(sizes)), key=lambda group: -blocks[group])
        listed = [number for group in order for number in (group, starts[group], blocks[group], 0)]
        found: list[tuple[int, int, int]] = []
        length = (starts[-1] + len(sizes)) * 128  # the buffer is longer than what its groups fill
        lengths: list[list[int]] = [[] for _ in range(machine.programs)]
        for group, row, top, end, column, start, stop, begin in places(
            machine, listed, (len(sizes), m, n, length), tile, True
        ):
            assert begin == top
            assert (start, stop) == (starts[group], starts[group] + blocks[group])
            assert (top, end) == (group * m + row, group * m + m)
            found.append((group, row, column))
            lengths[machine.program].append(blocks[group])
        tiles = [(g, row, c) for g in range(len(sizes)) for row in range(0, m, tile.bm) for c in range(0, n, tile.bn)]
        assert sorted(found) == tiles
        assert all(each == sorted(each, reverse=True) for each in lengths), "the longest first"


def test_a_group_past_the_operand_ends_with_it(machine: Machine) -> None:
    """Ends that no cast has seen: blocks outside of the operands are never asked for one by one."""
    listed = [0, 3, 10**6, 0]
    places_of = list(places(machine, listed, (1, 64, 64, 1024), heuristics.TILES[-1], True))
    assert [place[5:7] for place in places_of] == [(3, 8)]
