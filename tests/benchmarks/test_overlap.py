"""Tables of overlapped products: published figures are Flux's, modelled ones the command's, measured ones stored."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.report import overlap, pages
from blockscale.bench import store
from blockscale.bench.overlaps import ONE
from blockscale.bench.suites.overlap import Problem
from blockscale.cli.main import main
from blockscale.roofline.calibration import FLUX_ROWS
from support.bench_rows import row as made_up


def lines(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines()[2:] if line.startswith("|")]


def stored(problem: Problem, us: float, product: float) -> store.Row:
    shape = [problem.m, problem.n, problem.k]
    peers = {ONE: {"us": product, "ratio": product / us}}
    return made_up(
        problem.name, suite="overlap", group=problem.op, format=problem.payload, shape=shape, us=us, peers=peers
    )


def test_published_figures_are_those_of_the_calibration() -> None:
    for row in FLUX_ROWS:
        if row.experts > 1:
            continue
        published = overlap._DENSE[row.op, row.machine]
        assert row.serial is not None
        assert published.torch[2] == pytest.approx(1e3 * row.serial)
        assert published.flux == pytest.approx((1e3 * (row.product or 0), published.flux[1], 1e3 * row.overlapped))
    for torch, flux in overlap._DENSE.values():
        for product, exposed, total in (torch, flux):
            assert total == pytest.approx(product + exposed, abs=0.0011)
    shown = [cells[2:4] for cells in lines(overlap.experts_table([])) if cells[2].endswith(" p")]
    ms = [[f"{1e3 * (row.serial or 0):.3f} p", f"{1e3 * row.overlapped:.3f} p"] for row in FLUX_ROWS if row.experts > 1]
    assert sorted(shown) == sorted(ms)


def test_every_figure_has_its_basis() -> None:
    for make in pages.MODEL_SECTIONS.values():
        for cells in lines(make([])):
            for cell in cells[2:]:
                assert re.fullmatch(
                    r"-|Flux's report|`.*`|not measured|on|off|on in layer \d|[\d.]+x? [pm](, plain)?", cell
                )


def test_commands_print_the_modelled_figures(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    pytest.importorskip("rich", reason="the command line needs rich, which is not installed")
    dense, experts = lines(overlap.dense_table([])), lines(overlap.experts_table([]))
    ours = [cells for cells in dense if cells[2].endswith(" m")]
    for *_, product, exposed, total, command in (
        ours[1],
        ours[-1],
        *(cells[:7] + cells[-1:] for cells in experts[::5]),
    ):
        if command == "-":
            continue
        assert main(shlex.split(command.strip("`"))[1:]) == 0
        printed = capsys.readouterr().out.splitlines()
        payload = "bf16" if "--payload" not in command else shlex.split(command.strip("`"))[-1]
        (row,) = [line.split() for line in printed if line.split()[:1] == [payload]]
        us = [float(cell.replace(",", "")) for cell in (row[2], row[4], row[5])]
        total, plain = total.partition(" m")[::2]
        assert [us[0], us[2 if plain else 1]] == pytest.approx([1e3 * float(product[:-2]), 1e3 * float(total)], abs=1)
        assert float(exposed[:-2]) == pytest.approx(float(total) - float(product[:-2]), abs=0.0011)


def test_measured_rows_take_the_place_of_the_text() -> None:
    dense = Problem("all_gather_mm", 4096, 49152, 12288, 8, "bf16")
    rows = [stored(dense, 1600.0, 900.0), stored(Problem(*_changed(dense, groups=(1, 3, 4))), 1500.0, 910.0)]
    other = stored(Problem(*_changed(dense, n=8192)), 1.0, 1.0)
    text = overlap.dense_table([*rows, other])
    measured = [cells for cells in lines(text) if cells[1] == overlap.MEASURED_ON]
    assert measured[0][2:5] == ["0.910", "0.590", "1.500"], "the fastest of a case"
    assert measured[1][2:5] == ["-", "-", "not measured"]
    assert "Measured: NVIDIA H200" in text
    wrong = store.Row(**{**vars(rows[0]), "us": None, "wrong_bytes": 5})
    assert overlap.dense_table([wrong]).count("not measured") == 4
    mixture = Problem("all_gather_grouped_mm", 8192, 8192, 8192, 4, "fp8_blockwise_pow2", 2, 32, 4)
    of_experts = [stored(mixture, 700.0, 500.0), stored(Problem(*_changed(mixture, groups=(1, 3, 4))), 800.0, 510.0)]
    assert overlap.dense_table(of_experts).count("not measured") == 4
    assert "Measured" not in overlap.dense_table(of_experts), "rows of the other table"
    assert "Measured: NVIDIA H200" in overlap.experts_table(of_experts)
    found = lines(overlap.experts_table([*of_experts, *rows]))
    (line,) = [cells for cells in found if cells[1] == overlap.MEASURED_ON]
    assert line[0] == "layer 0, TP 4 EP 2, E=32 k=4"
    assert line[4:10] == ["-", "-", "not measured", "0.500", "0.200", "0.700"]
    (none,) = [cells for cells in lines(overlap.experts_table([])) if cells[1] == overlap.MEASURED_ON]
    assert none[6] == "not measured"


def _changed(problem: Problem, **fields: object):
    return {**vars(problem), **fields}.values()


def test_overlap_pays_more_on_a_slower_link() -> None:
    gains = {(cells[0], cells[1]): float(cells[4].removesuffix("x m")) for cells in lines(overlap.models_table([]))}
    slow, fast = (gains["Mixtral 8x7B, 32 layers", overlap.MACHINES[name]] for name in ("l20", "h200"))
    assert slow > 1.3 > fast > 1
