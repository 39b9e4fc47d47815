"""`blockscale roofline fsdp`, `tp` and `ep`, and the tables of the documentation that they made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

from blockscale.cli.main import main
from blockscale.roofline import LINKS
from support.markdown import parse

DOCS = Path(__file__).parents[2] / "docs"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["roofline", *words]) == 0
    return capsys.readouterr().out


def rows_of(text: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """(recipe, wire) -> figures."""
    return {(each[0], each[1]): tuple(each[2:]) for each in map(str.split, text.splitlines()) if len(each) == 8}


def test_the_output_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "roofline.md").read_text()
    ((words, output),) = re.findall(
        r"```console\n\$ blockscale roofline (fsdp [^\n]*)\n(.*?)```", page, flags=re.DOTALL
    )[:1]
    found = said(capsys, *words.split())
    assert [line.rstrip() for line in found.splitlines() if line.strip()] == [
        line.rstrip() for line in output.splitlines() if line.strip()
    ]
    assert "model, not measured" in found


def test_links_of_the_page() -> None:
    rows = [row for row in parse((DOCS / "roofline.md").read_text()).rows if row.head[0] == "--link"]
    assert [row.cells[0].partition(",")[0] for row in rows] == [*LINKS]
    for row, link in zip(rows, LINKS.values(), strict=True):
        figures = (link.bandwidth / 1e9, link.nominal / 1e9, link.latency * 1e6)
        assert row.cells[1:4] == tuple(f"{each:.0f}" for each in figures)
        assert row.cells[4].split()[0] == link.kind


def test_modelled_figures_of_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of the table in docs/distributed.md is a row of the commands above it."""
    page = (DOCS / "distributed.md").read_text().partition("## Eight GPUs, modelled\n")[2].partition("\n## ")[0]
    assert "**a model, not measured**" in page
    commands = re.findall(r"^\$ blockscale roofline (.*)$", page, flags=re.MULTILINE)
    found = {}
    for words in commands:
        kind, model = words.split()[0], words.split("--model ")[1].split()[0]
        found |= {(kind, model, *key): figures for key, figures in rows_of(said(capsys, *words.split())).items()}
    stated = {}
    for row in parse(f"# modelled\n{page}").rows:
        (kind, model), recipe, wire, *figures = row.cells[0].split(", "), *row.cells[1:]
        stated[kind, model, recipe, wire] = tuple(figures)
    assert stated == found
    assert len(commands) == 4


def test_recipes_have_the_wires_that_layers_accept(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = ("--recipes", "fp8_blockwise", "mxfp8", "nvfp4", "mxfp8_128x128")
    wires = {kind: {*rows_of(said(capsys, kind, *recipes))} for kind in ("fsdp", "tp", "ep")}
    every = {(name, "bf16") for name in ("bf16", *recipes[1:])} | {("recipe", "wire")}
    fsdp = {(name, "codes") for name in ("fp8_blockwise", "nvfp4", "mxfp8_128x128")}
    mx = ("mxfp8", "mxfp8_128x128")
    assert wires["fsdp"] - {("recipe", "wire")} == every - {("recipe", "wire")} | fsdp
    tp = {(name, "owner") for name in ("fp8_blockwise", *mx)} | {(name, "requantized") for name in mx}
    assert wires["tp"] - {("recipe", "wire")} == every - {("recipe", "wire")} | tp
    assert wires["ep"] - {("recipe", "wire")} == every - {("recipe", "wire")} | {(name, "low") for name in mx}


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["fsdp", "--link", "nvlink9"], "unknown link 'nvlink9'", "did you mean"),
        (["fsdp", "--ranks", "0"], "--ranks 0", "pass --ranks 1 or more"),
        (["fsdp", "--shapes", "512,256"], "--shapes with fsdp", "leave --shapes out"),
        (["fsdp", "--model", "gpt-oss"], "unknown model with blocks 'gpt-oss'", "from that list"),
        (["tp", "--model", "deepseek-16b"], "tp of DeepSeek 16B", "blockscale roofline ep"),
        (["ep", "--model", "llama3-8b"], "ep of Llama3 8B", "--model deepseek-16b"),
        (["--ranks", "8"], "--ranks with linear", "blockscale roofline fsdp --ranks"),
        (["mlp", "--link", "nvlink4"], "--link with mlp", "blockscale roofline fsdp --link"),
    ],
)
def test_errors_name_value_and_fix(words: list[str], what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", *words]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert fix in error.split("Fix: ")[1]
