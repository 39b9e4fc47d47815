"""Rows of comparisons and throughputs: figures of a tiny comparison are stored unchanged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.bench import trainings
from blockscale.bench.trainings import Convergence
from blockscale.cli.main import main
from blockscale.compare import stored, throughput
from blockscale.compare.comparison import CONTROL, Comparison, compare
from blockscale.compare.rows import MOST, rows_of, thin
from blockscale.compare.statistics import Length, drift_of, judge, paired
from blockscale.compare.stored import run_or_read
from blockscale.compare.throughput import arms_of, measure, throughput_of
from blockscale.errors import OptionError, OutOfMemoryError
from blockscale.train import ModelConfig
from support.small_runs import small

ONE_BLOCK = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LITTLE = small("bf16", model=ONE_BLOCK, steps=3, eval_every=1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two runs at a time, in worker processes."""
    folder = tmp_path_factory.mktemp("rows")
    return compare(LITTLE, ["mxfp8"], 2, out=folder, jobs=2, commit="abc1234", control=True)


def test_runs_side_by_side_are_those_that_run_alone(found: Comparison, tmp_path: Path):
    alone = compare(LITTLE, ["mxfp8"], 1, out=tmp_path)
    for name in ("bf16", "null", "mxfp8"):
        assert found.runs[name][0].losses == alone.runs[name][0].losses
    assert alone.is_timed
    assert not found.is_timed


def test_the_control_is_broken_in_its_process_alone(found: Comparison):
    mine, theirs = (found.runs[name][0].layers[0] for name in (CONTROL, "mxfp8"))
    assert mine["x"] < 5 < 25 < theirs["x"]


def test_rows_have_what_the_comparison_found(found: Comparison):
    rows = {row.arm: row for row in rows_of(found)}
    assert list(rows) == ["bf16", "null", "mxfp8", "broken"]
    row, gap = rows["mxfp8"], found.gap("mxfp8")
    verdict = found.verdict(found.arms[2])
    assert verdict is not None
    assert (row.gap, row.error, row.noise) == (gap.mean, gap.error, found.noise)
    assert (row.verdict, row.why, row.budget) == (verdict.kind, verdict.why, 0.0025)
    assert row.losses == [run.loss for run in found.runs["mxfp8"]]
    assert (row.model, row.steps, row.seeds, row.tokens_per_step) == ("small", 3, [0, 1], 32)
    assert [[step for step, _ in curve] for curve in row.curves] == [[1, 2, 3], [1, 2, 3]]
    assert row.along == [[step, round(gap, 6)] for step, gap in found.along("mxfp8")]
    assert row.data_hash == found.runs["mxfp8"][0].about["data_hash"]
    assert row.where["commit"] == "abc1234"
    assert row.where["torch"]
    assert row.tokens_per_second is None, "they shared the machine"
    assert row.shares == {}
    assert rows["null"].says.startswith("bf16 with each microbatch of 2 sequences in 2 parts")


def test_curves_are_thinned():
    points = thin([(step, 1 / step) for step in range(1, 3001)])
    assert len(points) == MOST
    assert points[0] == [1, 1.0]
    assert points[-1] == [3000, round(1 / 3000, 6)]
    assert thin([]) == []


def test_compare_stores_and_replaces_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    file = tmp_path / "training-cpu.jsonl"
    words = ["compare", "tiny", "--recipes", "mxfp8", "--steps", "1", "--eval-batches", "1", "--batch", "2"]
    words += ["--sequence", "8", "--layers", "1", "--device", "cpu", "--out", str(tmp_path / "out")]
    for _ in range(2):
        assert main([*words, "--rows", str(file)]) == 0
        assert "stored 3 rows" in capsys.readouterr().out
    assert [row.arm for row in trainings.convergences(trainings.load(tmp_path))] == ["bf16", "null", "mxfp8"]
    for other in ('{"suite": "casts"}\n', "no JSON\n"):
        file.write_text(other)
        assert main([*words, "--rows", str(file), "--seed", "5"]) == 2, "before any run"
        assert "other lines" in capsys.readouterr().err
        assert not [*tmp_path.glob("out/runs/*-seed5-*")]


def test_stored_verdicts_are_those_of_the_rule():
    """Rows of the repository, judged again from their losses: a change of the rule must not contradict the tables."""
    rows = trainings.convergences(trainings.load(RESULTS))
    groups: dict[object, dict[str, Convergence]] = {}
    for row in rows:
        groups.setdefault((row.setting, *row.seeds), {})[row.arm] = row
    judged = 0
    for arms in groups.values():
        base = [math.inf if loss is None else loss for loss in arms["bf16"].losses]
        for row in arms.values():
            if row.budget is None or row.noise is None:
                continue
            gap = paired([math.inf if loss is None else loss for loss in row.losses], base)
            shared_steps = max(row.branch_at, row.since)
            length = Length(row.steps, sum(step > shared_steps for step, _ in row.along), shared_steps)
            verdict = judge(gap, row.noise, row.budget, length, drift_of([gap for _, gap in row.along]))
            assert (verdict.kind, length.shortage(len(row.seeds))) == (row.verdict, ""), row.arm
            judged += 1
    assert judged >= 18


# throughput


def test_arms_of_throughput():
    arms = arms_of(LITTLE, ["bf16", "fp8_blockwise"], ["none", "blocks"], ["forward", "step"])
    names = [(each.compile, each.recipe.name, each.recipe.weight_cast) for each in arms]
    one = [("bf16", "forward"), ("fp8_blockwise", "forward"), ("fp8_blockwise", "step")]
    assert names == [(how, *each) for how in ("none", "blocks") for each in one]
    assert [each.recipe.weight_cast for each in arms_of(LITTLE, ["mxfp8"])] == ["forward", "step"]


def test_steps_are_timed_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process: those of test_side_by_side.py take seconds to start."""
    monkeypatch.setattr(throughput, "side_by_side", lambda run, tasks, jobs, fresh: [run(*each) for each in tasks])
    rows = measure(arms_of(LITTLE, ["mxfp8"]), out=tmp_path, warm_up=2, timed=3, commit="abc")
    assert [row.recipe for row in rows] == ["bf16", "mxfp8"]
    for row in rows:
        assert (row.timed, row.warm_up, row.failed) == (3, 2, "")
        assert row.step_ms
        assert row.spread_ms
        assert row.spread_ms[0] <= row.step_ms <= row.spread_ms[1]
        assert row.tokens_per_second == pytest.approx(32e3 / row.step_ms)
    assert 0 < rows[1].converted < rows[1].parameters
    with pytest.raises(OptionError, match="warm_up=0"):
        measure([], out=tmp_path, warm_up=0)


def test_a_warm_up_does_not_count():
    about = {"config": stored.to_dict(LITTLE), "parameters": 10, "converted": 5, "flop_share": 0.5}
    run = stored.Stored(about, seconds={1: 100.0, 2: 0.3, 3: 0.1, 4: 0.2}, arm={"warm_up": 1}, end={"stopped": "done"})
    row = throughput_of(run)
    assert (row.step_ms, row.timed) == (pytest.approx(200.0), 3)
    assert row.spread_ms == pytest.approx([150.0, 250.0])


def test_an_arm_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def train(*args: object, **named: object) -> None:
        raise OutOfMemoryError("too large")

    monkeypatch.setattr(stored, "train", train)
    facts = {"measures": "throughput", "warm_up": 1}
    row = throughput_of(run_or_read("bf16", LITTLE, tmp_path, arm=facts, results=(Exception,)))
    assert (row.failed, row.step_ms, row.model) == ("too large", None, "small")
    with pytest.raises(OutOfMemoryError):  # in a comparison it is an error
        run_or_read("bf16", replace(LITTLE, seed=5), tmp_path)
