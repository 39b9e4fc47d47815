"""Stored rows of layers as tables, and their goals, from made-up rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.report import layers, pages, tables
from benchmarks.report.roofline_picture import stored_times
from blockscale.bench import store
from support.bench_rows import row as made_up

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def stored(case: str, **fields: Any) -> store.Row:
    details = {"bf16_bound_us": 4000.0, "nominal_bound_us": 1500.0, "nominal_bf16_bound_us": 3000.0}
    details |= {"y_db": 28.6, "dx_db": 28.6, "dw_db": 28.6}
    details |= {"kept_bytes bf16": 100.0, "kept_bytes blockscale": 260.0, "kept_bytes cast per step": 52.0}
    peers = {"bf16": {"us": 4500.0, "ratio": 1.5}, "torchao": {"us": 3200.0, "ratio": 1.067}}
    given = {
        "suite": "linear", "group": "layers", "format": "fp8_blockwise", "shape": [4096, 18432, 7168], "us": 3000.0,
        "bound_us": 2000.0, "details": details, "peers": peers,
    }  # fmt: skip
    return made_up(case, **given | fields)


LARGE = "fp8_blockwise M=4096 DeepSeek-V3 671B 7168->18432"


def goals(*rows: store.Row) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in layers.goals_table(rows).splitlines()[2:]]
    return {cells[0]: cells[1:] for cells in lines}


def test_tables_tell_speedup_and_share():
    text = layers.summary_table([stored(LARGE)])
    assert "| DeepSeek-V3 671B 7168->18432 | 4096 | 4.500 | 3.000 | 1.50x | 2.00x | 75 % | 1.41x |" in text
    long = layers.long_table([stored(LARGE)])
    assert "| 75 % |" in long
    assert "2.60x, 0.52x per step" in long
    wrong = layers.summary_table([stored(LARGE, us=None, problem="dw is 3.0 dB")])
    assert "WRONG: dw is 3.0 dB" in wrong
    widths = {line.count("|") for line in (text + "\n" + wrong).splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_goals_are_judged_by_their_rows():
    found = goals(stored(LARGE))
    assert [cells[0:2] for cells in found.values()] == [
        ["1.50x", "yes"], ["75 %", "no"], ["0.52x", "yes"]
    ]  # fmt: skip
    slow = stored("fp8_blockwise M=4096 DeepSeek-V3 671B 18432->7168", peers={"bf16": {"us": 1.0, "ratio": 1.4}})
    assert next(iter(goals(stored(LARGE), slow).values()))[0:2] == ["1.40 to 1.50x", "no"]
    host = stored(
        "fp8_blockwise host time M=16 256->256", group="host time", peers={"nn.Linear": {"us": 50.0, "ratio": 0.5}}
    )
    ((text, *_),) = goals(host).values()
    assert text == "2.00x"
    peers = {"bf16": {"us": 1.0, "ratio": 1.5}, "torchao compiled": {"us": 1.0, "ratio": 0.9}}
    unit = stored(
        "fp8_blockwise MLP M=4096 x",
        suite="mlp",
        group="SwiGLU MLP",
        shape=[4096, 7168, 18432],
        peers=peers,
        details={},
    )
    assert [cells[1] for cells in goals(unit).values()] == ["yes", "no"]
    assert not goals(dataclasses.replace(unit, group="SwiGLU MLP, 8 microbatches")), "a step is another goal"


def test_no_rows_are_no_tables():
    for section in (layers.summary_table, layers.long_table, layers.goals_table):
        assert section([]) == tables.EMPTY


def test_rows_are_put_in_order():
    names = ("fp8_blockwise M=4096 Llama3 8B 4096->14336", LARGE)
    found = pages.in_order([stored(names[0]), stored(names[1])])
    assert [row.case for row in found] == [names[1], names[0]]


def test_rows_of_the_suite_can_be_shown() -> None:
    """Stored rows of `bench linear`: ours and bf16, without whole steps."""
    times = stored_times(RESULTS / "linear-h200.jsonl")
    assert {recipe for _, _, recipe in times} >= {"bf16", "fp8_blockwise"}
    large = (7168, 18432), 4096
    assert 1.2 < times[*large, "bf16"] / times[*large, "fp8_blockwise"] < 2
    steps = [row for row in store.read(RESULTS / "linear-h200.jsonl") if row.group != "layers"]
    assert steps
    assert not {row.us for row in steps} & set(times.values())
