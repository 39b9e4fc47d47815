"""Stream-K schedule of the Hopper GEMM: every K-block of every tile is assigned once, and partials meet in K order."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

schedule = pytest.importorskip("blockscale.gemm._hopper_schedule", reason="this Triton has no Gluon for Hopper")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python functions behind the JIT functions, called with integers."""
    for name in (
        "tile_at",
        "k_block_range",
        "cta_of_k_block",
        "count_work_units",
        "work_unit_at",
        "ctas_of_split_tile",
        "count_rotated_tiles",
        "rotated_tile_at",
    ):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).fn)


def plans() -> list[tuple[int, int, int, int]]:
    """CTAs, tiles, waves and K-blocks. As in `heuristics.stream_k_plan`, every CTA has a share of the split tiles."""
    draw = random.Random(3)
    drawn = [(draw.randint(1, 140), draw.randint(0, 3), draw.randint(1, 150)) for _ in range(400)]
    found: list[tuple[int, int, int, int]] = []
    for ctas, waves, blocks in drawn:
        left = draw.randint(1, max(1, ctas - 1))
        if left * blocks >= ctas:
            found.append((ctas, waves * ctas + left, waves, blocks))
    return [*found, (132, 704, 5, 32), (132, 17, 0, 56), (132, 1, 0, 132), (1, 1, 0, 3)]


def test_streamk_assigns_every_k_block_once_and_counts_partials() -> None:
    for ctas, tiles, waves, blocks in plans():
        seen: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for cta in range(ctas):
            units = schedule.count_work_units(cta, ctas, tiles, waves, blocks)
            for unit in range(units):
                tile, start, stop = schedule.work_unit_at(unit, cta, ctas, tiles, waves, blocks)
                assert 0 <= start < stop <= blocks
                seen[tile].append((start, stop, cta))
        assert sorted(seen) == list(range(tiles))
        for tile, partials in seen.items():
            partials.sort()
            assert [partial[0] for partial in partials] == [0, *(partial[1] for partial in partials[:-1])]
            assert partials[-1][1] == blocks
            if len(partials) > 1 or tile >= waves * ctas:
                expected = schedule.ctas_of_split_tile(tile, ctas, tiles, waves, blocks)
                assert [partial[2] for partial in partials] == list(range(*expected))


def test_streamk_cta_publishes_its_first_partial_and_reduces_at_its_last() -> None:
    """So each CTA needs one slot of the workspace, and waits only on CTAs that never wait themselves."""
    for ctas, tiles, waves, blocks in plans():
        for cta in range(ctas):
            owns: list[bool] = []
            for unit in range(waves, schedule.count_work_units(cta, ctas, tiles, waves, blocks)):
                tile, start, stop = schedule.work_unit_at(unit, cta, ctas, tiles, waves, blocks)
                if stop - start < blocks:
                    owns.append(cta == schedule.ctas_of_split_tile(tile, ctas, tiles, waves, blocks)[0])
                    assert owns[-1] == (start == 0), "the owner has the tile's first K-block"
            assert owns in ([], [False], [True], [False, True])


def test_rasterisation_covers_the_output() -> None:
    for tiles_m, tiles_n, group_m in ((1, 1, 8), (22, 32, 8), (33, 5, 12), (7, 9, 16), (8, 3, 8)):
        places = {schedule.tile_at(tile, tiles_m, tiles_n, group_m) for tile in range(tiles_m * tiles_n)}
        assert places == {(m, n) for m in range(tiles_m) for n in range(tiles_n)}


def test_rotated_assignment_covers_all_tiles_wave_by_wave() -> None:
    for ctas, tiles in ((132, 5568), (132, 0), (132, 7), (132, 132), (1, 5), (7, 52), (132, 8448)):
        taken = [
            [schedule.rotated_tile_at(unit, c, ctas) for unit in range(schedule.count_rotated_tiles(c, ctas, tiles))]
            for c in range(ctas)
        ]
        assert sorted(tile for each in taken for tile in each) == list(range(tiles))
        assert all(tile // ctas == wave for each in taken for wave, tile in enumerate(each)), "one tile per wave"


def test_rotated_assignment_spreads_periodic_tiles() -> None:
    """Ends of groups of one size recur with a period. SM counts of Hopper GPUs."""
    for ctas in (78, 114, 132):
        for period in (2, 3):
            tiles = [[schedule.rotated_tile_at(unit, c, ctas) for unit in range(12)] for c in range(ctas)]
            met = [sum(tile % period == 0 for tile in each) for each in tiles]
            assert max(met) - min(met) <= 2
            fixed = [sum((c + unit * ctas) % period == 0 for unit in range(12)) for c in range(ctas)]
            assert max(fixed) - min(fixed) == 12, "with a fixed assignment"
