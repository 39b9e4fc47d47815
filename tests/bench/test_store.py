"""Stored rows: round trip, replacement of the same key, facts about the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from blockscale.bench import store
from blockscale.errors import OptionError
from support.bench_rows import row


def test_round_trip(tmp_path: Path):
    path = tmp_path / "sub" / "casts-h200.jsonl"
    rows = [row("a"), row("b", us=None, wrong_bytes=3)]
    store.write(path, rows)
    assert store.read(path) == rows
    assert len(path.read_text().splitlines()) == 2
    assert list(path.parent.iterdir()) == [path]


def test_a_row_replaces_the_row_of_the_same_key_in_place(tmp_path: Path):
    path = tmp_path / "casts.jsonl"
    store.write(path, [row("a", us=1.0), row("b", us=2.0)])
    elsewhere = dataclasses.replace(row("a", us=9.0), where={"gpu": "another"})
    store.write(path, [row("a", us=3.0), row("c", us=4.0), elsewhere])
    assert [(r.case, r.us) for r in store.read(path)] == [("a", 3.0), ("b", 2.0), ("c", 4.0), ("a", 9.0)]


def test_a_missing_file_has_no_rows(tmp_path: Path):
    assert store.read(tmp_path / "nothing.jsonl") == []


@pytest.mark.parametrize("line", ['{"test": "tests/a.py", "outcome": "passed"}', "no json"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, line: str):
    path = tmp_path / "tests.jsonl"
    path.write_text(line)
    with pytest.raises(OptionError, match=r"tests\.jsonl has other lines.*name another file"):
        store.write(path, [row("a")])
    assert path.read_text() == line


def test_where_tells_versions_and_commit(monkeypatch):
    found = store.where(torch.device("cpu"), "0.1.0", commit="abc1234")
    assert (found.commit, found.torch, found.blockscale) == ("abc1234", torch.__version__, "0.1.0")
    assert json.dumps(dataclasses.asdict(found))
    monkeypatch.setenv("PATH", "")  # no git
    assert store.where(torch.device("cpu"), "0.1.0").commit is None


def test_rows_of_old_versions_still_load():
    rows = store.read(Path(__file__).parents[2] / "benchmarks" / "results" / "casts-h200.jsonl")
    assert rows
    assert all(old.tflop_s is None and old.sqnr_db is None and not old.problem for old in rows)
    assert row("a", us=None, wrong_bytes=3).fault == "3 bytes"
    assert row("a", us=None, problem="it raises").fault == "it raises"
    assert not row("a").fault
