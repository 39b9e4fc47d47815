"""Tile coordinates of the grouped Hopper kernels: every row and column of every group once, with its K-blocks.

Plain Python calls the functions of the kernels, with lists as memory.
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
from blockscale.grouped import heuristics

tiles: Any = pytest.importorskip("blockscale.grouped._hopper_tiles", reason="this Triton has no Gluon for Hopper")


@dataclass(frozen=True)
class Memory:
    """A pointer into a list of numbers."""

    values: list[int]
    at: int = 0

    def __add__(self, offset: int) -> Memory:
        return Memory(self.values, self.at + offset)


class Interpreter:
    """The part of `gl` that the functions use."""

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
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    made = Interpreter(132)
    for name in ("count_rotated_tiles", "tile_at", "rotated_tile_at"):
        monkeypatch.setattr(tiles, name, getattr(tiles, name).fn)
    monkeypatch.setattr(tiles, "gl", made.module())
    return made


def all_coords(interpreter: Interpreter, tile_list: list[int], sizes: tuple[int, ...], tile: Tile, k_grouped: bool):
    problem = (Memory(tile_list), *sizes)
    for program in range(interpreter.programs):
        interpreter.program = program
        for item in range(tiles.count_tiles.fn(problem, tile, k_grouped)):
            yield tiles.tile_coords.fn(item, problem, tile, k_grouped)


def patterns() -> list[list[int]]:
    draw = random.Random(2)
    drawn = [[draw.choice((0, 1, 63, 64, 65, 200, 700)) for _ in range(draw.randint(1, 30))] for _ in range(6)]
    return [[0, 0, 0], [517], [0, 130, 0, 64, 0], [260] * 64, *drawn]


@pytest.mark.parametrize(
    ("tile", "align"),
    [*((tile, 4) for tile in heuristics.FP8.tiles), *((tile, 1) for tile in heuristics.MX.tiles)],
    ids=str,
)
def test_m_grouped_tiles_cover_every_row_once(interpreter: Interpreter, tile: Tile, align: int) -> None:
    """align: FP8 tiles start where TMA can load the scales, MXFP8 tiles at any row."""
    for programs in (132, 7):  # 132: the SMs of an H200
        interpreter.programs = programs
        for sizes in patterns():
            n, k, rest, groups = 336, 400, 70, len(sizes)
            ends = [0, *accumulate(sizes)]
            spans = [*pairwise(ends), (ends[-1], ends[-1] + rest)]
            rows = [
                (row, min(row + tile.bm, end), group, max(row, first))
                for group, (first, end) in enumerate(spans)
                for row in range(first // align * align, end, tile.bm)
                if first < end
            ]
            tile_list = [number for entry in [(len(rows), 0, 0, 0), *rows] for number in entry]
            found: Counter[tuple[int, int, int]] = Counter()
            shape = (groups, ends[-1] + rest, n, k)
            for group, a_row, c_row, end, column, k_start, k_stop, begin in all_coords(
                interpreter, tile_list, shape, tile, False
            ):
                assert a_row == c_row
                assert a_row % align == 0
                assert (k_start, k_stop) == ((0, 4) if group < groups else (0, 0))
                assert spans[group][0] <= begin < end <= spans[group][1]
                assert c_row <= begin < c_row + align
                assert end - c_row == min(tile.bm, spans[group][1] - c_row)
                found.update((group, each, column) for each in range(begin, end))
            columns = range(0, n, tile.bn)
            want = [(g, row, c) for g, (first, end) in enumerate(spans) for row in range(first, end) for c in columns]
            assert found == Counter(want)


@pytest.mark.parametrize("tile", heuristics.FP8.tiles, ids=str)
def test_k_grouped_tiles_cover_every_output_once(interpreter: Interpreter, tile: Tile) -> None:
    m, n = 336, 400
    for sizes in patterns():
        blocks = [-(-size // 128) for size in sizes]
        starts = [0, *accumulate(blocks)]
        order = sorted(range(len(sizes)), key=lambda group: -blocks[group])
        tile_list = [number for group in order for number in (group, starts[group], blocks[group], 0)]
        found: list[tuple[int, int, int]] = []
        length = (starts[-1] + len(sizes)) * 128  # the buffer is longer than its groups
        lengths: list[list[int]] = [[] for _ in range(interpreter.programs)]
        for group, a_row, c_row, end, column, k_start, k_stop, begin in all_coords(
            interpreter, tile_list, (len(sizes), m, n, length), tile, True
        ):
            assert begin == c_row
            assert (k_start, k_stop) == (starts[group], starts[group] + blocks[group])
            assert (c_row, end) == (group * m + a_row, group * m + m)
            found.append((group, a_row, column))
            lengths[interpreter.program].append(blocks[group])
        want = [(g, row, c) for g in range(len(sizes)) for row in range(0, m, tile.bm) for c in range(0, n, tile.bn)]
        assert sorted(found) == want
        assert all(each == sorted(each, reverse=True) for each in lengths), "the longest first"


def test_k_range_is_clamped_to_the_operand(interpreter: Interpreter) -> None:
    """Offsets that no cast has checked: the K range ends with the operand."""
    tile_list = [0, 3, 10**6, 0]
    coords = list(all_coords(interpreter, tile_list, (1, 64, 64, 1024), heuristics.FP8.tiles[-1], True))
    assert [each[5:7] for each in coords] == [(3, 8)]
