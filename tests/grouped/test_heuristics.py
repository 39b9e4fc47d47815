"""Tile choice of the grouped Hopper GEMMs and its use by the registry; needs no GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import blockscale as bs
from blockscale.gemm import ACCUMULATOR_DTYPES
from blockscale.gemm.heuristics import SHARED_BYTES
from blockscale.grouped.heuristics import (
    FP8,
    MX,
    UPCAST,
    Problem,
    bound,
    choose,
    kernel_part,
    upcast_us,
)
from blockscale.grouped.ops import Inputs
from blockscale.hardware import Capability
from blockscale.registry import Request, explain_request, select


def problems() -> list[Problem]:
    sizes = itertools.product((0, 1, 517, 16640, 2**20), (1, 333, 8192), (1, 128, 5120), (1, 8, 1024))
    return [
        Problem(*size, k_grouped, fp32_out, 132)
        for size in sizes
        for k_grouped in (False, True)
        for fp32_out in (False, True)
    ]


def test_every_candidate_fits() -> None:
    for problem in problems():
        for tile, us in FP8.candidates(problem):
            assert us > 0
            assert tile.stages >= 2
            assert tile.a_rows == 256, "rows of other groups are in bounds"
            assert FP8.shared_bytes(tile, problem) <= SHARED_BYTES


def test_accumulate_takes_tiles_of_one_m_subtile() -> None:
    for problem in problems():
        plain, accumulating = dict(FP8.candidates(problem)), dict(FP8.candidates(replace(problem, accumulate=True)))
        assert {tile.m_subtiles for tile in accumulating} == {1}
        assert all(us >= plain[tile] for tile, us in accumulating.items()), "the accumulator is loaded, too"


def test_small_groups_get_small_bm() -> None:
    """BM never decreases as groups grow."""
    bms = [
        choose(FP8, Problem(rows * 64, 4096, 4096, 64, False, False, 132))[0].bm
        for rows in (1, 16, 64, 300, 1000, 4096)
    ]
    assert bms[0] == 64
    assert bms[-1] >= 128
    assert bms == sorted(bms)


def test_time_grows_with_the_work() -> None:
    base = Problem(16640, 8192, 5120, 16, False, False, 132)
    for larger in (replace(base, m=33280), replace(base, n=16384), replace(base, k=10240), replace(base, groups=64)):
        assert choose(FP8, larger)[1] > choose(FP8, base)[1]


def test_no_prediction_beats_the_bound() -> None:
    for problem in problems():
        assert choose(FP8, problem)[1] > bound(problem)[0]


def test_second_pass_over_unaligned_outputs_is_counted() -> None:
    odd = Problem(16640, 8191, 5120, 16, False, True, 132, accumulate=True)
    kernel_problem, us = kernel_part(odd)
    assert not kernel_problem.accumulate
    assert us > 100
    narrow, less = kernel_part(replace(odd, fp32_out=False))
    assert narrow == kernel_problem, "a second pass accumulates fp32"
    assert less < us
    assert kernel_part(replace(odd, n=8192)) == (replace(odd, n=8192), 0.0)


@pytest.mark.parametrize("tile", FP8.tiles, ids=str)
def test_every_tile_can_be_made_to_fit(tile) -> None:
    for problem in problems()[:4]:
        assert FP8.shared_bytes(FP8.fitted(tile, problem), problem) <= SHARED_BYTES


# ---- MXFP8 ---------------------------------------------------------------------------------------------------------


def test_every_candidate_of_mxfp8_fits() -> None:
    for problem in problems():
        if not problem.k_grouped:
            for tile, us in MX.candidates(problem):
                assert us > bound(problem)[0]
                assert tile.stages >= max(2, tile.k_unroll // 4), "all K-blocks of k_unroll are in flight together"
                assert (tile.m_subtiles, tile.a_loads, tile.a_rows) == (1, 1, 256)
                assert MX.shared_bytes(tile, problem) <= SHARED_BYTES


def test_small_groups_of_mxfp8_get_small_bm() -> None:
    chosen = [choose(MX, Problem(rows * 64, 4096, 4096, 64, False, False, 132)) for rows in (1, 16, 300, 4096)]
    assert [tile.bm for tile, _ in chosen] == [64, 64, 128, 128]
    times = [us for _, us in chosen]
    assert times == sorted(times)


# ---- upcast operands -----------------------------------------------------------------------------------------------


def test_every_candidate_for_upcast_operands_fits() -> None:
    for problem in problems():
        for tile, us in UPCAST.candidates(problem):
            assert us > bound(problem)[0] + upcast_us(problem)
            assert tile.stages >= 2
            assert (tile.k_unroll, tile.a_loads, tile.a_rows) == (1, 1, 256)
            assert UPCAST.shared_bytes(tile, problem) <= SHARED_BYTES
        accumulating = UPCAST.candidates(replace(problem, fp32_out=True, accumulate=True))
        assert {tile.m_subtiles for tile, _ in accumulating} == {1}


def test_small_groups_of_upcast_operands_get_small_bm() -> None:
    chosen = [choose(UPCAST, Problem(rows * 64, 4096, 4096, 64, False, False, 132)) for rows in (1, 16, 300, 4096)]
    bms = [tile.bm for tile, _ in chosen]
    assert bms[0] == 64
    assert bms[-1] == 256
    assert bms == sorted(bms)


# ---- the registry --------------------------------------------------------------------------------------------------

# kernels for Hopper: operation, formats, and the scale layouts read without conversion
SERVED = {
    "m": ("m_grouped", ("fp8_1x128", "fp8_128x128"), ("mn_major", "grid")),
    "k": ("k_grouped", ("fp8_1x128", "fp8_1x128"), ("mn_major", "mn_major")),
    "mx": ("m_grouped", ("mxfp8_e4m3", "mxfp8_e4m3_128x128"), ("plain", "plain")),
}


def request(kind: str, shape: tuple[int, ...], *options: str, sm: int = 90) -> Request:
    op, formats, layouts = SERVED[kind]
    return Request(op, Capability("cuda", sm), formats, shape, torch.bfloat16, layouts, frozenset(options))


@pytest.mark.parametrize("kind", SERVED)
def test_registry_selects_it_on_hopper(kind: str) -> None:
    pytest.importorskip("blockscale.grouped._hopper", reason="this Triton has no Gluon for Hopper")
    for shape in ((16640, 8192, 5120, 64), (1, 1, 1, 1), (0, 64, 128, 3), (517, 333, 129, 1024)):
        assert select(request(kind, shape)).backend == "hopper"
        assert select(request(kind, shape, sm=100)).backend != "hopper"
    for shape, options, reason in (
        ((128, 64, 256, 1025), (), "takes at most 1024 groups"),
        ((128, 64, 256, 4), ("strided",), "strides of their layout"),
        ((128, 64, 0, 4), (), "takes no empty operands"),
        ((128, 64, 256, 0), (), "takes no empty operands"),
    ):
        asked = request(kind, shape, *options)
        assert select(asked).backend != "hopper"
        assert reason in str(explain_request(asked))


@pytest.mark.parametrize("kind", SERVED)
def test_explain_shows_tile_time_and_bound(kind: str) -> None:
    pytest.importorskip("blockscale.grouped._hopper", reason="this Triton has no Gluon for Hopper")
    taken = explain_request(request(kind, (16640, 8192, 5120, 16))).taken
    assert taken is not None
    assert taken.conversions == ()
    assert taken.forecast is not None
    assert taken.forecast.share < 1
    text = str(taken.forecast)
    assert "group sizes between 0 and twice the mean" in text
    assert "stages" in text
    odd = explain_request(request(kind, (16640, 8191, 5120, 16))).taken
    assert odd is not None
    assert "a pass over the output" in str(odd.forecast)


@pytest.mark.parametrize("n", [1, 7, 24, 33])
@pytest.mark.parametrize("kind", SERVED)
def test_outputs_that_tma_cannot_store(kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake kernel: it gets a matrix that TMA can address, and all outputs are right."""
    from blockscale.grouped import _reference

    name = "blockscale.grouped._hopper_mx" if kind == "mx" else "blockscale.grouped._hopper"
    module = pytest.importorskip(name, reason="this Triton has no Gluon for Hopper")
    launches = pytest.importorskip("blockscale.gemm._hopper")
    offs = torch.tensor([3, 3, 20], dtype=torch.int32)
    x, y = torch.randn(22, 33), torch.randn(22, n)
    op, (left, right), _ = SERVED[kind]
    if op == "m_grouped":
        a, b = bs.quantize(x, left), bs.quantize(torch.randn(3, n, 33), right)
    else:
        a, b = (bs.quantize(source, left, axis=-2, offs=offs).mT for source in (x, y))
    product, added = _reference.exact_grouped(a, b, offs).float(), []

    def launch(inputs, out, tile, *, accumulate) -> None:
        assert inputs.starts is None
        assert launches.is_tma_addressable(out)
        assert out.dim() == 2
        assert tile.m_subtiles == 1 or not accumulate
        added.append(accumulate)
        whole = product.flatten(0, -2)
        out.copy_(out + whole if accumulate else whole)
        # as TMA does: writes up to the next 16 bytes
        width = n + -n % (16 // out.element_size())
        out.as_strided((len(out), width), out.stride(), out.storage_offset())[:, n:] = torch.nan

    monkeypatch.setattr(module, "launch", launch)
    run = module.scaled_grouped_mm_mx if kind == "mx" else module.scaled_grouped_mm
    inputs = Inputs(a, b, offs)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full(product.shape, torch.nan, dtype=dtype)
        run(inputs, out, accumulate=False)
        assert torch.equal(out, product.to(dtype))
    room = [*product.shape[:-1]]
    for dtype in ACCUMULATOR_DTYPES:
        want, pad = (1 + product).to(dtype), -n % (16 // dtype.itemsize)
        for width in (n, n + pad, n + 8 + pad):
            frame = torch.ones(*room, width, dtype=dtype)
            run(inputs, frame[..., :n], accumulate=True)
            assert torch.equal(frame[..., :n], want)
            assert bool((frame[..., n:] == 1).all()), "written out of bounds"
        # matrices, or rows, that are not contiguous
        apart = torch.ones(room[0] * 2, *room[1:], n, dtype=dtype)[::2]
        run(inputs, apart, accumulate=True)
        assert torch.equal(apart, want)
        assert added[-1] == (op == "m_grouped" and n == 24)


def test_mxfp8_with_1x32_weight_scales_uses_the_upcast() -> None:
    _, _, layouts = SERVED["mx"]
    for op, formats in (
        ("m_grouped", ("mxfp8_e4m3", "mxfp8_e4m3")),
        ("k_grouped", ("mxfp8_e4m3", "mxfp8_e4m3")),
    ):
        asked = replace(request("mx", (512, 256, 1024, 4)), op=op, formats=formats, layouts=layouts)
        assert select(asked).backend == "hopper_upcast"
        assert "does not serve mxfp8_e4m3 @ mxfp8_e4m3" in str(explain_request(asked))
