"""Spelling, as `make lint` checks it: codespell's own list and the banned words of `tools/banned-words.txt`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("codespell_lib", reason="codespell is not installed")

ROOT = Path(__file__).parents[1]
DICTIONARY = ROOT / "tools" / "banned-words.txt"
BANNED = [line.partition("->")[0] for line in DICTIONARY.read_text().splitlines()]


def codespell(*paths: Path) -> subprocess.CompletedProcess[str]:
    """codespell with the settings of pyproject.toml."""
    command = [sys.executable, "-m", "codespell_lib", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("word", [*BANNED, "reci" + "eve"])
def test_a_banned_or_misspelt_word_is_found(word: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Here {word} is named.\n")
    result = codespell(page)
    assert result.returncode != 0
    assert f"page.md:1: {word} ==>" in result.stdout


def test_words_of_the_field_are_accepted(tmp_path: Path) -> None:
    """Also identifiers of others that contain a banned word."""
    page = tmp_path / "page.py"
    page.write_text("# ptxas assembles code for SMs: multi_processor_count, streaming_multiprocessors\n")
    result = codespell(page)
    assert (result.returncode, result.stdout) == (0, "")


def test_banned_words_are_sorted_and_have_a_reason() -> None:
    assert sorted(BANNED) == BANNED
    assert all(line.partition("->")[2].count(", ") >= 1 for line in DICTIONARY.read_text().splitlines())
