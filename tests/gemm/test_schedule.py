"""How Hopper's product deals out its work: every block of every tile once, and pieces that meet."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

schedule = pytest.importorskip("blockscale.gemm._hopper_schedule", reason="this Triton has no Gluon for Hopper")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions behind the kernel's, called with integers."""
    for name in ("tile_at", "share", "owner", "count_items", "item_at", "pieces_of", "count_turns", "turn_at"):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).fn)


def plans() -> list[tuple[int, int, int, int]]:
    """Programs, tiles, rounds and blocks of K. As in `heuristics.stream_k_plan`, every program has a share."""
    draw = random.Random(3)
    drawn = [(draw.randint(1, 140), draw.randint(0, 3), draw.randint(1, 150)) for _ in range(400)]
    found: list[tuple[int, int, int, int]] = []
    for programs, rounds, blocks in drawn:
        left = draw.randint(1, max(1, programs - 1))
        if left * blocks >= programs:
            found.append((programs, rounds * programs + left, rounds, blocks))
    return [*found, (132, 704, 5, 32), (132, 17, 0, 56), (132, 1, 0, 132), (1, 1, 0, 3)]


def test_every_block_is_worked_on_once_and_pieces_are_counted() -> None:
    for programs, tiles, rounds, blocks in plans():
        seen: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for program in range(programs):
            items = schedule.count_items(program, programs, tiles, rounds, blocks)
            for item in range(items):
                tile, start, stop = schedule.item_at(item, program, programs, tiles, rounds, blocks)
                assert 0 <= start < stop <= blocks
                seen[tile].append((start, stop, program))
        assert sorted(seen) == list(range(tiles))
        for tile, pieces in seen.items():
            pieces.sort()
            assert [piece[0] for piece in pieces] == [0, *(piece[1] for piece in pieces[:-1])]
            assert pieces[-1][1] == blocks
            if len(pieces) > 1 or tile >= rounds * programs:
                who = schedule.pieces_of(tile, programs, tiles, rounds, blocks)
                assert [piece[2] for piece in pieces] == list(range(*who))


def test_a_program_leaves_one_piece_first_and_adds_others_last() -> None:
    """So its place in the workspace is its own, and whom it waits for waits for nobody."""
    for programs, tiles, rounds, blocks in plans():
        for program in range(programs):
            adds: list[bool] = []
            for item in range(rounds, schedule.count_items(program, programs, tiles, rounds, blocks)):
                tile, start, stop = schedule.item_at(item, program, programs, tiles, rounds, blocks)
                if stop - start < blocks:
                    adds.append(program == schedule.pieces_of(tile, programs, tiles, rounds, blocks)[0])
                    assert adds[-1] == (start == 0), "it has the tile's first blocks"
            assert adds in ([], [False], [True], [False, True])


def test_tiles_in_bands_cover_the_output() -> None:
    for tiles_m, tiles_n, band in ((1, 1, 8), (22, 32, 8), (33, 5, 12), (7, 9, 16), (8, 3, 8)):
        places = {schedule.tile_at(tile, tiles_m, tiles_n, band) for tile in range(tiles_m * tiles_n)}
        assert places == {(m, n) for m in range(tiles_m) for n in range(tiles_n)}


def test_turns_cover_all_tiles_and_change_places() -> None:
    for programs, tiles in ((132, 5568), (132, 0), (132, 7), (132, 132), (1, 5), (7, 52), (132, 8448)):
        turns = [
            [schedule.turn_at(item, p, programs) for item in range(schedule.count_turns(p, programs, tiles))]
            for p in range(programs)
        ]
        assert sorted(tile for taken in turns for tile in taken) == list(range(tiles))
        assert all(tile // programs == item for taken in turns for item, tile in enumerate(taken)), "round by round"


def test_turns_share_what_comes_back_at_every_second_or_third_tile() -> None:
    """As the ends of groups of one size do. Numbers of multiprocessors that Hoppers have."""
    for programs in (78, 114, 132):
        for period in (2, 3):
            met = [
                sum(schedule.turn_at(item, p, programs) % period == 0 for item in range(12)) for p in range(programs)
            ]
            assert max(met) - min(met) <= 2
            fixed = [sum((p + item * programs) % period == 0 for item in range(12)) for p in range(programs)]
            assert max(fixed) - min(fixed) == 12, "with one place for good"
