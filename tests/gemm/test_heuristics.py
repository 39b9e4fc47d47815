"""Heuristics of the Hopper GEMM: a pure function, so a CPU is enough."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from blockscale.gemm import heuristics_mx
from blockscale.gemm.heuristics import (
    SHARED_BYTES,
    TILES,
    Problem,
    Tile,
    bound,
    choose,
    choose_few_rows,
    few_rows_win,
    fitted,
    kernel_problem,
    shared_bytes,
    stream_k_plan,
)
from blockscale.hardware import Capability
from blockscale.registry import Request, select, use_backend


def problems() -> list[Problem]:
    sizes = itertools.product(
        (1, 17, 128, 4096, 16384, 2**20),
        (1, 15, 16, 576, 2111, 2112, 7168, 24576),
        (1, 16, 127, 128, 2880, 4095, 18432),
    )
    return [
        Problem(m, n, k, b_1x128, fp32, 132) for m, n, k in sizes for b_1x128 in (False, True) for fp32 in (False, True)
    ]


def test_every_plan_fits_in_shared_memory() -> None:
    for problem in problems():
        plan, us = choose(problem)
        assert us > 0
        assert plan.tile.stages >= 2
        assert shared_bytes(plan.tile, problem) <= SHARED_BYTES
        assert 1 <= plan.ctas <= problem.sms


def test_streamk_ctas_have_work_and_counters_suffice() -> None:
    for problem in problems():
        for tile in TILES:
            plan = stream_k_plan(tile, problem)
            if plan is None:
                continue
            left = -(-problem.m // tile.bm) * -(-problem.n // tile.bn) - plan.waves * plan.ctas
            assert 0 < left < plan.ctas
            assert left * problem.blocks >= plan.ctas, "no CTA without a K-block"
            assert left * tile.warpgroups * tile.m_subtiles <= 1024, "counters"


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.label)
def test_every_tile_fits_with_fewer_stages(tile: Tile) -> None:
    for problem in problems()[:4]:
        assert shared_bytes(fitted(tile, problem), problem) <= SHARED_BYTES


def test_str_of_a_tile_names_every_field() -> None:
    """Triton's cache key has the str of a constant: tiles with the same str would share machine code."""
    tile = TILES[0]
    others = [tile._replace(**{name: getattr(tile, name) + 1}) for name in tile._fields]
    assert len({str(tile), *map(str, others)}) == 1 + len(others)


def test_few_rows_get_small_tiles_and_many_get_large_ones() -> None:
    assert choose(Problem(16, 7168, 2048, False, False, 132))[0].tile.bm == 64
    assert choose(Problem(8192, 8192, 8192, False, False, 132))[0].tile.bm >= 192


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [(4096, 4096, 4096, 152.8), (8192, 8192, 8192, 1006.8), (4096, 7168, 18432, 970.6), (4096, 4096, 7168, 239.3)],
)
def test_predicted_time_of_accumulation(m: int, n: int, k: int, us: float) -> None:
    """Within 10 % of benchmarks/results/gemm-h200.jsonl."""
    assert choose(Problem(m, n, k, False, True, 132, accumulate=True))[1] == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize("b_1x128", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_odd_k_takes_the_plan_of_the_next_multiple_of_128(b_1x128: bool, accumulate: bool) -> None:
    for m, n in ((18432, 7168), (7168, 2111), (16, 2112), (1, 1)):
        for k in (1, 15, 17, 127, 129, 2047, 4095):
            whole = Problem(m, n, k + -k % 128, b_1x128, accumulate, 132, accumulate)
            (plan, us), (same, most) = choose(replace(whole, k=k)), choose(whole)
            assert plan == same
            assert us <= most


def test_output_that_tma_cannot_store_costs_a_second_pass() -> None:
    for n, fp32, direct in (
        (2112, False, True),
        (2108, False, False),
        (2108, True, True),
        (2111, True, False),
        (1, True, False),
    ):
        for accumulate in (False, True):
            problem = Problem(4096, n, 4096, True, fp32, 132, accumulate)
            part, us = kernel_problem(problem)
            assert problem.direct is direct
            # the second pass accumulates, so the kernel does not round
            assert part == (problem if direct else replace(problem, fp32_out=fp32 or accumulate, accumulate=False))
            assert (us > 0) is not direct
    once, twice = (kernel_problem(Problem(4096, 2111, 64, True, True, 132, each))[1] for each in (False, True))
    assert twice > once, "`out +=` also reads the output"
    halves = kernel_problem(Problem(4096, 2111, 64, True, False, 132, accumulate=True))[1]
    assert once == halves < twice, "4 bytes read, 2 read and 2 written"


def test_accumulation_has_one_m_subtile_per_warpgroup() -> None:
    for m, n, k in itertools.product((1, 4096), (576, 8192), (128, 8192)):
        for fp32 in (False, True):
            assert choose(Problem(m, n, k, True, fp32, 132, accumulate=True))[0].tile.m_subtiles == 1


def test_few_rows_plans_cover_all_rows() -> None:
    for m, n, k in itertools.product((1, 16, 17, 32), (16, 2112, 18432), (16, 2048, 18432)):
        plan, us = choose_few_rows(Problem(m, n, k, False, False, 132))
        assert plan.tile.bn >= m
        assert plan.tile.stages > plan.tile.k_unroll, "more than one unrolled iteration"
        assert us > 0


@pytest.mark.parametrize(
    ("n", "k", "wins"),
    [(18432, 7168, True), (7168, 18432, False), (7168, 16384, False), (7168, 2048, False), (2112, 7168, False)],
)
def test_few_rows_win_where_measured(n: int, k: int, wins: bool) -> None:
    """docs/design/gemm.md has both times."""
    assert few_rows_win(Problem(16, n, k, False, False, 132)) is wins


def test_predicted_time_grows_with_every_size() -> None:
    for m, n, k in itertools.product((128, 1024), (512, 4096), (1024, 8192)):
        us = choose(Problem(m, n, k, False, False, 132))[1]
        for bigger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
            assert choose(Problem(*bigger, False, False, 132))[1] >= us


def test_no_prediction_beats_the_roofline() -> None:
    for problem in problems():
        us, by = bound(problem)
        assert 0 < us <= choose(problem)[1], str(problem)
        assert by.startswith(("FP8 units at", "memory at"))


def test_roofline_limits() -> None:
    assert bound(Problem(16, 7168, 18432, False, False, 132))[1] == "memory at 4.2 TB/s"
    us, by = bound(Problem(8192, 8192, 8192, False, False, 132))
    assert by == "FP8 units at 1,450 TFLOP/s"
    assert us == pytest.approx(2 * 8192**3 / 1.45e9)
    assert bound(Problem(8192, 8192, 8192, False, False, 66))[0] == pytest.approx(2 * us)


@pytest.mark.parametrize(
    ("shape", "backend"),
    [((128, 14336, 4096), "torch"), ((100, 10240, 8192), "torch"), ((64, 14336, 4096), "hopper"),
     ((128, 7168, 18432), "hopper"), ((129, 14336, 4096), "hopper"), ((102, 10240, 8192), "hopper"),
     ((128, 14336, 4095), "hopper"), ((128, 14335, 4096), "hopper"), ((100, 10248, 8192), "hopper")],
)  # fmt: skip
def test_hopper_defers_to_the_vendor_where_it_is_faster(shape: tuple[int, int, int], backend: str) -> None:
    """65 to 128 rows in tiles of 128x128; F.scaled_mm needs rows in multiples of 4, N and K in multiples of 16."""
    pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
    pair, layouts = ("fp8_1x128", "fp8_128x128"), ("mn_major", "grid")
    request = Request("gemm", Capability("cuda", 90), pair, shape, torch.bfloat16, layouts)
    assert select(request).backend == backend
    for other in (replace(request, dtype=torch.float16), replace(request, options=frozenset({"bias"}))):
        assert select(other).backend == "hopper"
    with use_backend(gemm="hopper"):
        assert select(request).backend == "hopper"


# MXFP8 with tiles 128x128, 64x128 and 64x64: microseconds on one H200
_MX_MEASURED = {
    (1, 7168, 2048): (10.3, 10.4, 8.1),
    (128, 7168, 2048): (14.6, 11.0, 13.0),
    (512, 7168, 2048): (25.3, 32.8, 36.7),
    (64, 18432, 7168): (67.6, 58.9, 51.2),
    (128, 18432, 7168): (78.7, 77.5, 80.2),
    (512, 18432, 7168): (181.6, 220.5, 275.8),
    (256, 2112, 7168): (38.1, 27.0, 18.4),
    (512, 2112, 7168): (38.3, 51.1, 33.4),
    (256, 4096, 4096): (24.8, 18.4, 21.7),
    (512, 4096, 4096): (25.5, 33.2, 40.0),
}


@pytest.mark.parametrize("shape", _MX_MEASURED, ids=lambda shape: "x".join(map(str, shape)))
def test_mxfp8_takes_the_fastest_measured_tile(shape: tuple[int, int, int]) -> None:
    plan, us = heuristics_mx.choose(Problem(*shape, False, False, 132))
    times = {(tile.bm, tile.bn): time for tile, time in zip(heuristics_mx.TILES, _MX_MEASURED[shape], strict=True)}
    taken = times[plan.tile.bm, plan.tile.bn]
    assert taken == min(times.values())
    assert us == pytest.approx(taken, rel=0.12)


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [(4096, 4096, 4096, 193.4), (8192, 8192, 8192, 1538.1), (4096, 7168, 18432, 1481.9), (4096, 24576, 1536, 438.4)],
)
def test_mxfp8_predicted_time_under_load(m: int, n: int, k: int, us: float) -> None:
    """Within 12 % of benchmarks/results/gemm-h200.jsonl."""
    assert heuristics_mx.choose(Problem(m, n, k, False, False, 132))[1] == pytest.approx(us, rel=0.12)
