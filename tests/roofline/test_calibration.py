"""Published times of overlapped products beside the model: bars of every row, constants refitted, rows left out."""

from __future__ import annotations

import itertools
import random
from statistics import mean

import pytest

from blockscale.roofline import calibration
from blockscale.roofline.calibration import FITTED, FLUX_ROWS, GRID, IMBALANCE, TRITON_ROWS, UNFITTED
from blockscale.roofline.overlap import overlap_machine

CALIBRATED = calibration.calibrate()
ERRORS = list(zip(*(each.errors for each in CALIBRATED), strict=True))


def test_every_published_row_is_there() -> None:
    assert [each.row for each in CALIBRATED] == list(FLUX_ROWS)
    assert (len(FLUX_ROWS), len({*FLUX_ROWS}), len(TRITON_ROWS)) == (18, 18, 9)
    # sums over the report's tables, in ms
    flux, torch = (sum(1e3 * (getattr(row, each) or 0) for row in FLUX_ROWS) for each in ("overlapped", "serial"))
    assert flux == pytest.approx(5.903 + 5.730 + 28.596 + 30.174 + 4.093 + 5.548)
    assert torch == pytest.approx(16.946 + 17.664 + 95.117 + 130.106 + 13.179 + 24.939)


@pytest.mark.parametrize("at", range(18))
def test_fitted_rows_are_within_a_quarter(at: int) -> None:
    each = CALIBRATED[at]
    assert each.modelled == pytest.approx(each.row.overlapped, rel=0.25)


def test_mean_errors() -> None:
    """The bar of a calibration is 6.5 %. Left out and unfitted errors are what to expect of a machine without rows."""
    fitted, left_out, unfitted = map(calibration.mean_error, ERRORS)
    assert fitted <= 0.065
    assert fitted == pytest.approx(0.060, abs=0.001)
    assert left_out == pytest.approx(0.116, abs=0.001)
    assert unfitted == pytest.approx(0.186, abs=0.001)


def test_triton_rows_are_within_a_tenth() -> None:
    errors = [FITTED["h100"].predict(row)[2] / row.overlapped - 1 for row in TRITON_ROWS]
    assert mean(map(abs, errors)) < 0.03
    assert max(map(abs, errors)) < 0.1


@pytest.mark.parametrize(("machine", "first", "last"), [("l20", 0, 10), ("h800", 10, 18)])
def test_refit_finds_the_stored_constants(machine: str, first: int, last: int) -> None:
    """All points of the grid with the formulas written out, for all rows and without each of them."""
    rows = FLUX_ROWS[first:last]
    peak = {"l20": 119.5e12, "h800": 989.4e12}[machine]
    links, layer0s, layer1s, setups, slowdowns, slices = GRID[machine]
    table: list[tuple[tuple[float, ...], list[float]]] = []
    for (gather, out), layer0, layer1, setup, slowdown in itertools.product(links, layer0s, layer1s, setups, slowdowns):
        errors: list[float] = []
        for row in rows:
            before = row.op.startswith("all_gather")
            dense = row.experts == 1
            flops = 2 * row.m * row.n * row.k * row.topk / 8
            if row.ep == 2:
                flops *= {32: 1.087, 8: 1.157}[row.experts]
            g = row.product or flops / peak / (layer0 if before else layer1)
            c = row.m * (row.k if before else row.n) * 2 * 7 / 8 / (gather if before else out) / 1e9
            n = 8 if before or dense else slices
            time = max((1 + slowdown) * g, c + g / n) if before else max((1 + slowdown) * g + c / n, c + g / n)
            errors.append(abs((setup / 1e6 + time) / row.overlapped - 1))
        table.append(((gather * 1e9, out * 1e9, layer0, layer1, setup / 1e6, slowdown), errors))
    assert min(table, key=lambda point: mean(point[1]))[0] == FITTED[machine][:6]
    for at in range(len(rows)):
        others = min(table, key=lambda point: sum(point[1]) - point[1][at])
        assert abs(CALIBRATED[first + at].errors[1]) == pytest.approx(others[1][at])


def test_constants_of_predictions_are_those_that_were_fitted() -> None:
    for name, constants in FITTED.items():
        machine = overlap_machine(name)
        assert (machine.setup.value, machine.slowdown.value) == (constants.setup, constants.slowdown)
        assert {machine.setup.kind, machine.slowdown.kind} == {"fitted"}
    assert overlap_machine("l20").link.bandwidth == FITTED["l20"].gather
    assert FITTED["h800"].scatter <= overlap_machine("h800").link.bandwidth <= FITTED["h800"].gather
    assert {*UNFITTED} == {*GRID} == {row.machine for row in FLUX_ROWS}


@pytest.mark.parametrize(("experts", "topk"), IMBALANCE)
def test_imbalance_of_random_gates(experts: int, topk: int) -> None:
    """Gates uniform in (0, 1), experts without replacement: the exponential race draws them."""
    rng, ratios = random.Random(1), list[float]()
    for _ in range(300):
        gates = [rng.random() for _ in range(experts)]
        upper = 0
        for _ in range(100):
            race = sorted(range(experts), key=lambda each: rng.expovariate(1) / gates[each])
            upper += sum(each < experts // 2 for each in race[:topk])
        ratios.append(2 * max(upper, 100 * topk - upper) / (100 * topk))
    assert mean(ratios) == pytest.approx(IMBALANCE[experts, topk], abs=0.02)
