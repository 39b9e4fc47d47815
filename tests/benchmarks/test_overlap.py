"""Tables of overlapped products: published figures are Flux's, modelled ones the command's, measured ones stored."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.report import overlap, overlap_models, overlap_picture, pages
from blockscale.bench import store
from blockscale.bench.overlaps import CHUNKED, ONE, PERMUTED, SERIAL
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


# ---- models ----------------------------------------------------------------------------------------------------------

MIXTRAL = "Mixtral 8x7B"


def of_model(payload: str = "bf16", slower: float = 1.0, layers: int = 2, **changed: object) -> list[store.Row]:
    """Rows of the layers of a model: 1000 µs a product, 1100 with its rows placed, 1300 in chunks, all times slower."""
    rows: list[store.Row] = []
    for case in overlap_models.cases_of(MIXTRAL)[:layers]:
        op, sizes, *divided = case
        tp, ep, experts, topk = divided
        problem = Problem(*_changed(Problem(op, *sizes, tp, payload, ep, experts, topk), **changed))
        row = stored(problem, 2000.0 * slower, 1000.0 * slower)
        for name, us in ((PERMUTED, 1100.0), (CHUNKED, 1300.0), (SERIAL, 2500.0)):
            row.peers[name] = {"us": us * slower}
        rows.append(row)
    return rows


def cells_of(rows: list[store.Row], gpus: str, model: str = MIXTRAL) -> list[str]:
    (found,) = [
        cells for cells in lines(overlap_models.models_table(rows)) if cells[0].startswith(model) and cells[1] == gpus
    ]
    return found


def test_overlap_pays_more_on_a_slower_link() -> None:
    slow, fast = (float(cells_of([], overlap.MACHINES[name])[4].removesuffix("x m")) for name in ("l20", "h200"))
    assert slow > 1.3 > fast > 1


def test_a_stored_product_takes_the_place_of_the_modelled_one() -> None:
    """The link stays as it is, so with a product of twice the time the serial time grows by the product alone."""
    eight = overlap.MACHINES["h200"]
    modelled, once, twice = (cells_of(rows, eight) for rows in ([], of_model(), of_model(slower=2.0)))
    assert modelled[6:10] == once[6:10] == twice[6:10], "the other payload is not stored"
    assert [cell[-2:] for cell in once[2:5]] == [" g"] * 3
    off, longer = (float(cells[2].removesuffix(" g")) for cells in (once, twice))
    assert longer - off == pytest.approx(32 * 2 * 1.1, abs=0.1), "two layers of 32, rows placed"
    on, longer = (float(cells[3].removesuffix(" g")) for cells in (once, twice))
    assert longer - on == pytest.approx(32 * 2 * 1.1 * 1.08 * 1.2, rel=0.15), "chunks, slower beside copies"
    assert once[5] == modelled[5], "auto decides before anything is measured"
    for machine in ("l20", "h800"):
        assert cells_of(of_model(), overlap.MACHINES[machine]) == cells_of([], overlap.MACHINES[machine])
    text = overlap_models.models_table(of_model())
    assert "Measured: NVIDIA H200" in text
    assert "Measured" not in overlap.experts_table(of_model()), "rows of the other table"


@pytest.mark.parametrize("rows", [of_model(layers=1), of_model(m=4096), of_model("mxfp8")], ids=len)
def test_other_rows_leave_the_model_as_it_is(rows: list[store.Row]) -> None:
    """One layer of two, other sizes, another payload."""
    eight = overlap.MACHINES["h200"]
    assert cells_of(rows, eight) == cells_of([], eight)


def test_both_layers_over_pcie_are_measured() -> None:
    cells = cells_of([*of_model(), *of_model(groups=(1, 3, 4), slower=0.5)], overlap.MEASURED_ON)
    assert cells[2:6] == ["80.0", "64.0", "1.25x", "-"], "the fastest of each layer, times 32 layers"
    assert cells[6:10] == ["not measured", "-", "-", "-"]
    assert cells_of(of_model(layers=1), overlap.MEASURED_ON)[2] == "not measured"


def test_a_model_has_one_command_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    pytest.importorskip("rich", reason="the command line needs rich, which is not installed")
    for cells in lines(overlap_models.models_table([])):
        if cells[1] == overlap.MEASURED_ON:
            assert cells[-1].startswith("`blockscale bench overlap --model ")
            continue
        assert main(shlex.split(cells[-1].strip("`"))[1:]) == 0
        printed = capsys.readouterr().out
        for payload, (off, on) in {"bf16": cells[2:4], "fp8_blockwise_pow2": cells[6:8]}.items():
            assert f"{cells[0]}, {payload}: {off[:-2]} ms serial, {on[:-2]} ms overlapped" in printed


def test_the_picture_of_models_is_current_and_hatches_what_is_modelled(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    root = Path(__file__).parents[2]
    stored_rows = pages.load(root / pages.RESULTS)
    current = (root / "docs" / overlap_picture.PICTURE).read_text()
    assert overlap_picture.description(stored_rows) in current, "docs/images: run `make report`"
    found: dict[int, str] = {}
    for number, rows in enumerate(([], of_model(), [*of_model(), *of_model("fp8_blockwise_pow2", 0.6)])):
        overlap_picture.draw(rows, tmp_path / "x.svg")
        found[number] = (tmp_path / "x.svg").read_text()
        assert overlap_picture.description(rows) in found[number]
    hatched = [text.count("url(#h") for text in found.values()]
    assert hatched[0] - hatched[1] == hatched[1] - hatched[2] == 2, "the GEMM of two bars each"
    assert ["rows placed" in text for text in found.values()] == [False, True, True]
