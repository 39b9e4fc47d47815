"""The report: same rows, same bytes; wrong kernels have no figures; pages and pictures of this checkout are current."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import (
    __main__ as command,
)
from benchmarks.report import (
    casts,
    casts_picture,
    gemm,
    goals,
    headline,
    headline_picture,
    index,
    layers,
    moe,
    pages,
    pictures,
    speed,
)
from benchmarks.report.tables import EMPTY
from blockscale.bench import store, trainings
from blockscale.bench.store import Row
from support.bench_rows import product, products, suite

ROOT = Path(__file__).parents[2]
PAGE = """before
<!-- bench:casts -->
old
<!-- /bench:casts -->
between
<!-- bench:dispatch -->
<!-- /bench:dispatch -->
"""


def test_sections_are_rewritten_and_nothing_else():
    once = pages.render(PAGE, suite())
    assert once.startswith("before\n<!-- bench:casts -->\n")
    assert "old" not in once
    assert "\nbetween\n" in once
    assert pages.render(once, suite()) == once


def test_tables_show_the_stored_rows():
    text = casts.casts_table(suite())
    assert "| fp8_1x128 axis -1 | 16384x8192 | 100.0 | 2.0 % | 3,900 | 4,100 | 95 | 9.00x | 1.50x* | - |" in text
    assert "NVIDIA H200; torch 2.11.0, triton 3.6.0, torchao 0.18.0; commit abc1234; 2026-11-15." in text
    (wrong,) = [line for line in text.splitlines() if "WRONG" in line]
    assert "17 bytes" in wrong
    assert "100.0" not in wrong
    assert "| quantize nvfp4 | 21.5 | 2.0 % | 4.5 |" in casts.dispatch_table(suite())


def test_sections_without_rows_are_empty():
    assert all(section([]) == EMPTY for section in pages.SECTIONS.values())
    assert all(section([], []) == EMPTY for section in pages.COMMON_SECTIONS.values())


def test_pages_are_rewritten_once(tmp_path: Path):
    (tmp_path / "README.md").write_text(PAGE)
    assert pages.update(tmp_path, suite()) == [Path("README.md")]
    assert pages.update(tmp_path, suite()) == []


def test_the_picture_is_the_same_every_time(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    for name in ("one.svg", "two.svg"):
        casts_picture.draw(suite(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    casts_picture.draw(suite(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_pages_are_up_to_date():
    rows = pages.load(ROOT / pages.RESULTS)
    if not rows:
        pytest.skip("no results are stored")
    for page in pages.PAGES:
        text = (ROOT / page).read_text()
        assert pages.render(text, rows, trainings.load(ROOT / pages.RESULTS)) == text, f"{page}: run `make report`"


def test_every_section_is_on_one_page() -> None:
    marked = [name for page in pages.PAGES for name in re.findall(r"<!-- bench:(\S+) -->", (ROOT / page).read_text())]
    sections = (pages.SECTIONS, pages.MODEL_SECTIONS, pages.TRAINING_SECTIONS, pages.COMMON_SECTIONS)
    assert sorted(marked) == sorted(name for each in sections for name in each)


def test_pictures_of_the_front_page_are_up_to_date() -> None:
    rows, runs = pages.load(ROOT / pages.RESULTS), trainings.load(ROOT / pages.RESULTS)
    for name, words in (
        (headline_picture.PICTURE, headline_picture.description(headline.panels(rows, runs))),
        (headline_picture.LOSS_PICTURE, headline_picture.loss_description(headline.loss_comparison(runs))),
    ):
        assert words in (ROOT / pictures.FOLDER / name).read_text(), f"{name}: run `make report`"


def test_readme_has_one_generated_section_of_limited_size() -> None:
    text = (ROOT / "README.md").read_text()
    (section,) = re.findall(r"<!-- bench:.*<!-- /bench:\S+ -->", text, flags=re.DOTALL)
    assert section.startswith("<!-- bench:headline -->")
    assert len(section.encode()) <= 1600
    assert section.count("\n| ") <= 16


def test_headline_figures_come_from_rows() -> None:
    ours = [product(f"1x128 @ 128x128 {m}x1x1", shape=[m, 1, 1], tflop_s=1000.0 + m) for m in (1, 2)]
    slower = replace(ours[1], peers=ours[1].peers | {gemm.CUBLAS: {"us": 1.0, "ratio": 0.9}})
    text = headline.headline_table([ours[0], slower], [])
    assert "2 shapes | 1,001 to 1,002 TFLOP/s | cuBLAS blockwise | 0.99x (0.90 to 1.10) |" in text
    assert headline.headline_table([replace(ours[0], where={"gpu": "another GPU"})], []) == EMPTY
    (panel,) = headline.panels([ours[0]], [])
    assert {name: round(value) for name, value in panel.bars.items()} == {
        "bf16": 574, "cuBLAS FP8": 910, "Blockscale": 1001,
    }  # fmt: skip


def test_pictures_are_drawn_where_their_rows_are_stored(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    runs = trainings.load(ROOT / pages.RESULTS)
    assert [path.name for path in pictures.draw_all(tmp_path, [], [])] == ["overlap.svg"], "a model without rows"
    drawn = pictures.draw_all(tmp_path, [*suite(), product()], runs)
    assert [path.name for path in drawn] == [
        "overlap.svg", "casts.svg", "training.svg", "headline.svg", "headline-loss.svg",
    ]  # fmt: skip
    first = [(tmp_path / path).read_bytes() for path in drawn]
    assert pictures.draw_all(tmp_path, [*suite(), product()], runs) == drawn
    assert [(tmp_path / path).read_bytes() for path in drawn] == first


def test_index_counts_met_and_missed_goals() -> None:
    good = product(peers={gemm.CUBLAS: {"us": 1.0, "ratio": 1.2}})
    wgrad = product("1x128 @ 1x128 4096x7168x18432", peers={gemm.CUBLAS: {"us": 1.0, "ratio": 0.9}})
    text = index.goals_table([good, wgrad], [])
    assert "| [GEMM](gemm.md) | 1 | 2 | 0 | 0 |" in text  # the third goal is that of all rows
    assert "[experts](moe.md)" not in text
    assert text.count("| not measured yet | - |") > 10, "goals of training runs are listed before they are measured"


def test_every_goal_can_fail() -> None:
    for goal in (*gemm.GOALS, *layers.GOALS, *moe.GOALS, *speed.goals([])):
        assert goal.met or goal.least_mean
        extremes = (-1e9, 1e9)
        assert goal.met is None or not all(map(goal.met, extremes)), goal.what


@pytest.mark.parametrize(
    ("figure", "met", "shown"),
    [
        (1.00000004, "yes", "1.00x"),
        (1.0004, "yes", "1.00x"),
        (1.0006, "no", "1.001x"),  # a miss shows the decimal that makes it one
        (1.02, "no", "1.02x"),
        (0.9, "yes", "0.90x"),
    ],
)
def test_a_miss_below_the_printed_precision_is_no_miss(figure: float, met: str, shown: str) -> None:
    goal = goals.Goal[Row]("peak memory", "at most 1x", "", lambda row: True, lambda row: figure, goals.at_most(1))
    (verdict,) = goal.verdicts([product()])
    assert (verdict.met, verdict.figure) == (met, shown)


def test_a_slow_copy_is_remarked() -> None:
    rows = suite()
    assert "itself reaches" not in casts.casts_table(rows)
    slow = [replace(row, copy_gb_s=2700.0) if row.group == "expert weights" else row for row in rows]
    assert "reaches 2,700 GB/s on tensors of 5,369 MB and more, against 4,100 GB/s" in casts.casts_table(slow)


def test_rows_of_several_runs_are_put_in_order() -> None:
    groups = [row.group for row in pages.in_order(suite()[::-1]) if row.suite == "casts"]
    assert len(set(groups)) > 2
    assert groups == sorted(groups, key=pages.GROUPS.index)


def test_products_show_speed_and_accuracy() -> None:
    text = gemm.long_table(products())
    (line,) = [line for line in text.splitlines() if line.startswith("| 1x128 @ 128x128 | 4096x7168x18432")]
    assert "| 900.0 | 2.0 % | 1,202 | 3,900 | 93 | 56.1 | 1,500 | 690 | hopper | 689 |" in line
    # a peer is marked where it is wrong, and its accuracy told where fast accumulation lost it
    assert line.endswith("| 1.10x | 0.80x*, 20 dB | 1.74x | 0.92x, 31 dB |")
    (wrong,) = [line for line in text.splitlines() if "WRONG" in line]
    assert "3 values differ" in wrong
    assert not any(figure in wrong for figure in ("900", "1,202"))
    for group in gemm.GROUPS:
        assert (f"**{group}**" in text) == (group not in ("models", "MXFP8 natively"))
    heads = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len(set(heads)) <= 4  # every line has the cells of its table's head


def test_slower_choices_of_the_registry_are_listed() -> None:
    text = gemm.long_table(products())
    assert "faster by more than 3 % in 1 of 4 rows: 1x128 @ 1x128 4096x7168x18432 (torch)." in text
    assert "In none of 1 rows" in gemm.long_table([product()])
    # a wrong row is no better choice, and neither is one within the noise
    assert store.best_other(product()) == ("torch", 1.1)
    assert not store.misplaced(product(peers={"row torch": {"us": 880.0, "ratio": 0.978}}))


def test_summary_has_the_share_of_the_ceiling() -> None:
    text = gemm.summary_table(products())
    assert (
        "| 1x128 @ 128x128, 4096x7168x18432 | `scaled_mm(a, b)`, hopper | 1,202 | 1,304 | 92 % | torch 1.10x |" in text
    )
    assert "accumulate=acc" not in text, "the first page has room for the bf16 results alone"
    assert "few rows" not in text
    assert gemm.summary_table(suite()) == EMPTY


def test_products_are_put_in_order() -> None:
    shuffled = [*products()[::-1], product("1x128 @ 128x128 8192x8192x8192", shape=[8192, 8192, 8192])]
    assert [row.case for row in pages.in_order(shuffled)][:3] == [
        "1x128 @ 128x128 4096x7168x18432",
        "1x128 @ 128x128 8192x8192x8192",
        "1x128 @ 128x128 fp32 += 4096x7168x18432",
    ]


def goal_lines(*rows: Row) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in gemm.goals_table(rows).splitlines()[2:]]
    return {cells[0].split(",")[0]: cells[1:] for cells in lines}


def test_goals_are_judged_by_their_rows() -> None:
    def beside(ratio: float, name: str = "row torch") -> dict[str, dict[str, float]]:
        return {name: {"us": 1.0, "ratio": ratio}}

    good = [product(f"1x128 @ 128x128 {size}x1x1", peers=beside(ratio)) for size, ratio in ((1, 1.0), (2, 1.2))]
    found, met, commit, command = goal_lines(*good)["1x128 @ 128x128"]
    assert (found, met) == ("1.00 to 1.20x, mean 1.095x", "yes")
    assert (commit, command) == ("abc1234", "`blockscale bench gemm --only large`")
    assert goal_lines(*good, product(peers=beside(0.999)))["1x128 @ 128x128"][:2] == [
        "0.999 to 1.200x, mean 1.062x", "no",
    ], "one shape below is enough"  # fmt: skip
    added = product("1x128 @ 1x128 fp32 += 4096x4096x4096", peers=beside(0.93, "to bf16"))
    assert goal_lines(added) == {"1x128 @ 1x128": ["0.93x", "yes", commit, command]}
    slower = product(peers=beside(0.96))
    assert goal_lines(slower)["all rows"][1] == "no"
    assert gemm.goals_table([]) == EMPTY


def test_only_weights_from_memory_count_for_decoding() -> None:
    def few(m: int, n: int, k: int) -> dict[str, list[str]]:
        case = f"few rows 1x128 @ 128x128 {m}x{n}x{k}"
        return goal_lines(product(case, group="few rows", shape=[m, n, k], peers={}))

    assert few(16, 7168, 18432) == {
        "1 to 16 rows": ["93 %", "yes", "abc1234", "`blockscale bench gemm --only 'few rows'`"]
    }
    assert few(16, 7168, 2048) == few(17, 7168, 18432) == {}


def test_the_command_rewrites_pages_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    monkeypatch.chdir(tmp_path)
    assert command.main() == 1
    assert "no results" in capsys.readouterr().out
    store.write(tmp_path / "benchmarks" / "results" / "casts-h200.jsonl", suite())
    (tmp_path / "README.md").write_text("<!-- bench:casts-summary -->\n<!-- /bench:casts-summary -->\n")
    assert command.main() == 0
    assert "| fp8_1x128 axis -1 |" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "docs" / "images" / "casts.svg").exists()


def test_pictures_of_the_roofline_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    stored = tmp_path / pictures.LAYERS
    stored.parent.mkdir(parents=True)
    stored.write_bytes((ROOT / pictures.LAYERS).read_bytes())
    _, *drawn = pictures.draw_all(tmp_path, [], [])
    assert [path.name for path in drawn] == ["roofline.svg", "roofline-steps.svg"]
    speedups, steps = ((tmp_path / path).read_text() for path in drawn)
    dots = [text.count("fill: #0072b2; stroke: #ffffff") for text in (speedups, (ROOT / drawn[0]).read_text())]
    assert dots[0] == dots[1] > 6, "roofline.svg: run `make report`"
    assert "<!-- measured -->" in speedups
    assert "<!-- bf16 units, 682 TFLOP/s -->" in steps
    assert pictures.draw_all(tmp_path, [], [])[1:] == drawn
    assert [(tmp_path / path).read_text() for path in drawn] == [speedups, steps], "the same rows give the same file"
