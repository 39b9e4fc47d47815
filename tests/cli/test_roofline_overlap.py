"""`blockscale roofline overlap`: its tables, those on the page, and its refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

from blockscale.cli import roofline_overlap as command
from blockscale.cli.main import main
from blockscale.roofline import MEASURED, NOMINAL, OPERATIONS
from blockscale.roofline.calibration import FLUX_ROWS, TRITON_ROWS
from blockscale.roofline.overlap import OVERLAP_PAYLOADS
from support.markdown import parse

PAGE = (Path(__file__).parents[2] / "docs" / "roofline.md").read_text()
SECTION = PAGE.partition("## Overlapped communication\n")[2].partition("\n## ")[0]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["roofline", "overlap", *words]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_names_of_options_are_those_of_the_model() -> None:
    assert get_args(command.Op) == OPERATIONS == tuple(command.SHAPES)
    assert get_args(command.Payload) == tuple(OVERLAP_PAYLOADS)


def test_the_outputs_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```console\n\$ blockscale roofline overlap([^\n]*)\n(.*?)```", SECTION, flags=re.DOTALL)
    assert [words.split() for words, _ in blocks] == [["--op", "all_gather_mm", "--machine", "h200"]]
    for words, output in blocks:
        assert said(capsys, *words.split()) == [line.rstrip() for line in output.splitlines() if line.strip()]


def test_every_constant_has_its_basis(capsys: pytest.CaptureFixture[str]) -> None:
    for machine in NOMINAL:
        text = said(capsys, "--machine", machine, "--op", "all_gather_grouped_mm")
        lines = text[2 : next(at for at, line in enumerate(text) if line.split()[0] == "payload")]
        basis = [match[1] for line in lines if (match := re.match(r"[\d.,]+ ?\S.*? \((\w+)\): .", line))]
        assert len(basis) == len(lines) == (7 if machine == "a100" else 8)
        assert {*basis} <= {"measured", "published", "fitted", "assumed"}
        assert ("measured" in basis) == (machine in MEASURED or machine == "rtx5090")


def test_cells_of_published_rows_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "--flux")
    flux = [line.split() for line in lines if re.match(r" (l20|h800) ", line)]
    assert len(flux) == len(FLUX_ROWS)
    for cells, row in zip(flux, FLUX_ROWS, strict=True):
        figures, marks = cells[-13:-3:2], cells[-12:-3:2]
        assert marks == ["p" if row.product else "f", "f", "p", "p", "m"]
        assert [float(each) for each in figures[2:4]] == pytest.approx([1e3 * row.overlapped, 1e3 * (row.serial or 0)])
    marks = [re.findall(r"\d ([pfm])\b", line) for line in lines]
    assert marks.count(["p", "f", "p", "m"]) == len(TRITON_ROWS)
    assert lines[0].startswith("A calibration, not a validation")
    means = [match.groups() for line in lines if (match := re.match(r"(.*): mean (.*), largest (.*)", line))]
    assert [name for name, *_ in means] == ["fitted", "left out", "unfitted", "fitted"]
    rows = [row.cells for row in parse(PAGE).rows if row.head[0] == "constants"]
    assert [row[2:] for row in rows] == [tuple(errors) for _, *errors in means]


def test_options_change_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*words: str) -> dict[str, list[str]]:
        return {line.split()[0]: line.split() for line in said(capsys, *words) if re.match(r" (bf16|fp8_|mxfp8)", line)}

    usual = rows("--machine", "b200")
    assert [*usual] == ["bf16", "fp8_blockwise_pow2", "mxfp8"]
    assert usual["mxfp8"][1:] == usual["fp8_blockwise_pow2"][1:], "as many bytes and FLOPs"
    assert [*rows("--payload", "bf16,mxfp8")] == ["bf16", "mxfp8"]
    assert rows("--link", "infiniband")["bf16"][7:] == ["36%", "link", "overlap:", "1.34x"]
    assert rows("--m", "64")["bf16"][-5:] == ["plain:", "1e+10", "FLOP,", "below", "1e+11"]
    assert rows("--tp", "1")["bf16"][-4:] == ["plain:", "nothing", "is", "sent"]
    assert rows("--chunks", "1")["bf16"][8] == "link"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("--link nvlink9", "unknown link 'nvlink9'", "did you mean"),
        ("--machine h300", "unknown machine 'h300'", "did you mean"),
        ("--op gemm", "invalid choice 'gemm'", "pass such a value"),
        ("--payload nvfp4", "invalid choice 'nvfp4'", "pass such a value"),
        ("--tp 0", "--tp 0", "pass --tp 1 or more"),
        ("--m 0", "--m 0", "pass --m 1 or more"),
        ("--chunks 0", "--chunks 0", "pass --chunks 1 or more"),
        ("--chunks 5000", "5000 chunks of 4096 rows", "pass 1 to 4096"),
        ("--tp 7", "n=49152 on tp=7", "pass a multiple of 7"),
        ("--experts 8", "--experts 8 with all_gather_mm", "--op all_gather_grouped_mm --experts 8"),
        ("--ep 2", "--ep 2 with all_gather_mm", "--op all_gather_grouped_mm --ep 2"),
        ("--op all_gather_grouped_mm --experts 2", "topk=4 of 2 experts", "pass 1 to 2"),
        ("--flux --tp 4", "--tp with --flux", "leave --tp or --flux out"),
        ("--flux --machine l20", "--machine with --flux", "leave --machine or --flux out"),
        ("--recipes mxfp8", "unknown option --recipes mxfp8", "leave --recipes out"),
    ],
)
def test_errors_name_value_and_fix(words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "overlap", *words.split()]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert what in error
    assert "Rule: " in error
    assert fix in error.split("Fix: ")[1]
