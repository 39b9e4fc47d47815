"""`blockscale roofline inference`: the table on the page, its options, and its refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

from blockscale.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "roofline.md").read_text()


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["roofline", "inference", *words]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_the_output_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    ((words, output),) = re.findall(r"```console\n\$ blockscale roofline inference([^\n]*)\n(.*?)```", PAGE, re.DOTALL)
    assert said(capsys, *words.split()) == [line.rstrip() for line in output.splitlines() if line.strip()]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model", "gpt-oss-120b", "--weights", "mxfp4", "--batch", "4", "--prompt", "4096", "--machine", "b200"
    text = said(capsys, *words, "--activations", "mxfp8_e4m3")
    assert text[0].startswith("gpt-oss 120B, 116.8 billion")
    assert sum("mxfp4 @ mxfp8_e4m3" in line for line in text) == 3  # decoding, prefill, turning
    assert "a prefill of 4,096 tokens into an empty cache" in text
    slower = said(capsys, "--roof", "nominal")[1]
    assert "nominal" in slower


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--model gpt9", "unknown model"),
        ("--weights int4", "unknown format"),
        ("--weights mxfp4 --activations fp8_1x128", "fp8_1x128"),
        ("--weights bf16 --activations mxfp8_e4m3", "bf16 weights alone"),
        ("--batch 0", "--batch 0"),
        ("--prompt 0", "--prompt 0"),
        ("--machine h300", "unknown machine"),
    ],
)
def test_refusals(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "inference", *words.split()]) == 2
    assert part in capsys.readouterr().err
