"""The report: same rows, same bytes; wrong kernels have no figures; the pages of this checkout are up to date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench_rows import suite
from blockscale.bench import picture, report

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
    once = report.render(PAGE, suite())
    assert once.startswith("before\n<!-- bench:casts -->\n")
    assert "old" not in once
    assert "\nbetween\n" in once
    assert report.render(once, suite()) == once


def test_tables_tell_what_rows_tell():
    text = report.casts_table(suite())
    assert "| fp8_1x128 axis -1 | 16384x8192 | 100.0 | 2.0 % | 3,900 | 4,100 | 95 | 9.00x | 1.50x* | - |" in text
    assert "NVIDIA H200; torch 2.11.0, triton 3.6.0, torchao 0.18.0; commit abc1234; 2026-11-15." in text
    (wrong,) = [line for line in text.splitlines() if "WRONG" in line]
    assert "17 bytes" in wrong
    assert "100.0" not in wrong
    assert "| quantize nvfp4 | 21.5 | 2.0 % | 4.5 |" in report.dispatch_table(suite())


def test_no_rows_say_so():
    assert all(section([]) == report.EMPTY for section in report.SECTIONS.values())


def test_pages_are_rewritten_once(tmp_path: Path):
    (tmp_path / "README.md").write_text(PAGE)
    assert report.update(tmp_path, suite()) == [Path("README.md")]
    assert report.update(tmp_path, suite()) == []


def test_the_picture_is_the_same_every_time(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    for name in ("one.svg", "two.svg"):
        picture.draw(suite(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    picture.draw(suite(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_pages_are_up_to_date():
    rows = report.load(ROOT / report.RESULTS)
    if not rows:
        pytest.skip("no results are stored")
    for page in report.PAGES:
        text = (ROOT / page).read_text()
        assert report.render(text, rows) == text, f"{page}: run `blockscale bench report`"


def test_a_slow_copy_is_told() -> None:
    rows = suite()
    assert "itself reaches" not in report.casts_table(rows)
    slow = [replace(row, copy_gb_s=2700.0) if row.group == "expert weights" else row for row in rows]
    assert "reaches 2,700 GB/s on tensors of 5,369 MB and more, against 4,100 GB/s" in report.casts_table(slow)


def test_rows_of_several_runs_are_put_in_order() -> None:
    groups = [row.group for row in report.in_order(suite()[::-1]) if row.suite == "casts"]
    assert len(set(groups)) > 2
    assert groups == sorted(groups, key=report.GROUPS.index)
