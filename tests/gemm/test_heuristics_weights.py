"""Tile and schedule of the weight-only GEMM: cuts do not depend on M, cover all of K once, and stages fit."""

from __future__ import annotations

import pytest

from blockscale.gemm import heuristics_weights as weights
from blockscale.gemm.heuristics_weights import BITS, MAX_TOKENS, WeightProblem, bound, choose, schedule, tile_for

SHAPES = (
    (1, 1), (256, 256), (257, 300), (576, 7168), (2112, 7168), (2880, 2880), (4096, 4096), (4096, 14336), (7168, 18432),
    (28672, 8192), (57344, 8192), (201088, 2880),
)  # fmt: skip


@pytest.mark.parametrize("sms", [1, 114, 132])
def test_the_cut_is_the_same_for_every_m_and_format(sms: int) -> None:
    """A condition of batch invariance: sums are cut by (N, K) and the GPU alone."""
    for n, k in SHAPES:
        cuts = {
            choose(WeightProblem(m, n, k, name, sms))[1]
            for name in BITS for m in (*range(1, MAX_TOKENS + 1), 65, 128, 200, 256)
        }  # fmt: skip
        assert cuts == {schedule(n, k, sms)}


def test_units_are_whole_stages() -> None:
    """Another condition: the K of a stage divides a unit, so that no stage lies across a cut."""
    for name in BITS:
        for m in range(1, MAX_TOKENS + 1):
            tile = tile_for(m, name)
            assert weights.K_UNIT % (tile.chunks * weights.CHUNK) == 0
            assert m <= tile.bn <= max(8, 2 * m - 1)
            assert tile.chunks % 2 == 0 or name == "bf16"  # scales of a block come together


def test_every_unit_is_taken_once_and_counters_suffice() -> None:
    schedules = pytest.importorskip("blockscale.gemm._hopper_schedule", reason="this Triton has no Gluon for Hopper")
    units_of, cta_of = schedules.k_block_range.fn, schedules.cta_of_k_block.fn
    for sms in (1, 114, 132):
        for n, k in SHAPES:
            cut = schedule(n, k, sms)
            assert 1 <= cut.ctas <= min(sms, cut.units)
            assert cut.units == cut.tile_units * -(-n // 256)
            taken = [units_of(cta, cut.ctas, cut.units) for cta in range(cut.ctas)]
            assert [begin for begin, _ in taken] == [0, *(end for _, end in taken[:-1])]
            assert taken[-1][1] == cut.units
            assert all(1 <= end - begin <= cut.units_of_a_cta for begin, end in taken)
            most = 0
            for first in range(0, cut.units, cut.tile_units):
                owner, last = (cta_of(unit, cut.ctas, cut.units) for unit in (first, first + cut.tile_units - 1))
                assert taken[owner][0] <= first < taken[owner][1]
                most = max(most, last - owner)
            assert most <= cut.partials


def test_stages_fit_in_shared_memory() -> None:
    for name in BITS:
        for m in (1, 8, 16, 32, 64):
            tile = tile_for(m, name)
            size = tile.stages * weights.stage_bytes(name, tile.bn, tile.chunks)
            assert tile.stages >= 3
            assert size <= weights.SHARED_BYTES - (8192 if tile.bn > 8 else 0)


def test_predictions_follow_the_study() -> None:
    """The measured times of MXFP4 on one H200 with dependent launch, within a quarter."""
    measured = {
        (57344, 8192): (61.6, 69.2, 76.0, 101), (28672, 8192): (33.6, 36.5, 40.6, 54.1),
        (8192, 28672): (34.0, 37.1, 42.6, 58.6), (7168, 18432): (21.9, 24.6, 29.3, 40.4),
        (14336, 4096): (13.9, 15.3, 16.6, 23.7), (4096, 14336): (14.1, 16.1, 21.2, 32.5),
    }  # fmt: skip
    for (n, k), row in measured.items():
        for m, us in zip((1, 16, 32, 64), row, strict=True):
            problem = WeightProblem(m, n, k, "mxfp4")
            predicted = choose(problem)[2]
            assert 0.75 < predicted / us < 1.25, (n, k, m, predicted, us)
            assert bound(problem)[0] < predicted


def test_more_rows_are_further_launches() -> None:
    one, two = (choose(WeightProblem(m, 4096, 4096, "nvfp4"))[2] for m in (64, 128))
    assert two == 2 * one
