"""Run folders to stored rows: figures of a tiny comparison are stored unchanged; missing runs are named."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.bench import report_speed, trainings
from blockscale.bench.trainings import Convergence, Throughput
from blockscale.cli.main import main
from blockscale.compare import stored
from blockscale.compare.comparison import Comparison, compare
from blockscale.compare.pool import pool
from blockscale.compare.publish import MOST, publish, thin
from blockscale.compare.side_by_side import side_by_side
from blockscale.compare.statistics import Length, drift_of, judge, paired
from blockscale.compare.stored import run_or_read
from blockscale.compare.throughput import MEASURES, arms_of, measure, throughput_of
from blockscale.errors import OptionError, OutOfMemoryError
from blockscale.train import ModelConfig
from support.small_runs import small

ONE_BLOCK = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LITTLE = small("bf16", model=ONE_BLOCK, steps=3, eval_every=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    """Two runs at a time, in worker processes."""
    return compare(LITTLE, ["mxfp8"], 2, out=folder, jobs=2, commit="abc1234")


def lines(folder: Path) -> dict[str, Convergence]:
    return {row.arm: row for row in trainings.convergences(publish(folder).lines)}


def test_runs_side_by_side_are_those_that_run_alone(found: Comparison, tmp_path: Path):
    alone = compare(LITTLE, ["mxfp8"], 1, out=tmp_path)
    for name in ("bf16", "null", "mxfp8"):
        assert found.runs[name][0].losses == alone.runs[name][0].losses
    assert alone.is_timed
    assert not found.is_timed


def test_lines_have_what_the_comparison_found(found: Comparison, folder: Path):
    rows = lines(folder)
    assert list(rows) == ["bf16", "null", "mxfp8"]
    row, gap = rows["mxfp8"], found.gap("mxfp8")
    verdict = found.verdict(found.arms[-1])
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


def test_missing_runs_are_named_and_never_trained(found: Comparison, folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (gone,) = tmp_path.glob("runs/mxfp8-seed1-*")
    shutil.rmtree(gone)
    assert publish(tmp_path).left_out == ["small, 3 steps: mxfp8, seeds 1 are missing"]
    assert list(lines(tmp_path)) == ["bf16", "null"]
    (cut,) = tmp_path.glob("runs/null-seed1-*/metrics.jsonl")
    cut.write_text("".join(f"{line}\n" for line in cut.read_text().splitlines()[:-1]))
    rows = lines(tmp_path)
    assert rows["mxfp8"].seeds == [0], "the seeds that bf16 and the null run have"
    assert rows["mxfp8"].error is None
    assert any("null-seed1" in each and "not done, 3 steps" in each for each in publish(tmp_path).left_out)
    for each in tmp_path.glob("runs/null-*"):
        shutil.rmtree(each)
    assert lines(tmp_path) == {}


def test_other_configs_are_other_comparisons(found: Comparison, folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("runs/*-seed1-*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[0]["config"]["optimizer"]["rate"] = 1.0
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = trainings.convergences(publish(tmp_path).lines)
    assert sorted((row.arm, row.seeds) for row in rows) == sorted(
        (arm, [seed]) for arm in ("bf16", "null", "mxfp8") for seed in (0, 1)
    )


def test_runs_that_validate_on_other_text_are_other_comparisons(found: Comparison, folder: Path, tmp_path: Path):
    """All in one folder, as from `compare` with other options; each arm is paired with its own bf16."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for path in [*folder.glob("runs/*/metrics.jsonl")]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[0]["config"]["eval_batches"] *= 2
        rows[-1]["loss"] *= 2
        other = tmp_path / "runs" / f"0{path.parent.name}" / path.name
        other.parent.mkdir()
        other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = trainings.convergences(publish(tmp_path).lines)
    assert [row.arm for row in rows] == 2 * ["bf16", "null", "mxfp8"]
    assert {row.gap for row in rows if row.arm == "mxfp8"} == {found.gap("mxfp8").mean}


def test_a_run_that_is_there_twice_is_named(found: Comparison, folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (one,) = folder.glob("runs/mxfp8-seed1-*")
    shutil.copytree(one, tmp_path / "runs" / "again")
    assert publish(tmp_path).left_out == ["small, 3 steps: mxfp8, seed 1 is there twice"]
    assert lines(tmp_path) == {}


def test_curves_are_thinned():
    points = thin([(step, 1 / step) for step in range(1, 3001)])
    assert len(points) == MOST
    assert points[0] == [1, 1.0]
    assert points[-1] == [3000, round(1 / 3000, 6)]
    assert thin([]) == []


def test_collect_stores_and_replaces(
    found: Comparison,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "training-cpu.jsonl"
    for _ in range(2):
        assert main(["collect", str(folder), "--json", str(file)]) == 0
        assert "stored 3 lines" in capsys.readouterr().out
        assert len(file.read_text().splitlines()) == 3
    assert trainings.load(tmp_path) == publish(folder).lines
    assert main(["collect", str(tmp_path), "--json", str(file)]) == 1
    capsys.readouterr()
    assert main(["collect", str(folder)]) == 1  # the default file holds GPU results
    assert "left out: 3 lines of runs on a CPU" in capsys.readouterr().out
    file.write_text('{"suite": "casts"}\n')
    with pytest.raises(OptionError, match="other lines"):
        trainings.read(file)
    file.write_text("no JSON\n")
    with pytest.raises(OptionError, match="other lines"):
        trainings.read(file)


def of_seed(folder: Path, seed: int, to: Path) -> Path:
    for each in folder.glob(f"runs/*-seed{seed}-*"):
        shutil.copytree(each, to / "runs" / each.name)
    return to


def test_seeds_of_different_times_are_pooled(
    found: Comparison, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Seeds run one at a time and pooled give the same rows as both seeds in one comparison."""
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    first, second = (of_seed(folder, seed, tmp_path / str(seed)) for seed in (0, 1))
    file = tmp_path / "training-cpu.jsonl"
    assert main(["collect", str(second), "--json", str(file)]) == 0
    for _ in range(2):
        assert main(["collect", str(first), "--json", str(file), "--pool"]) == 0
        assert "stored 3 lines" in capsys.readouterr().out
    kept = trainings.convergences(trainings.load(tmp_path))
    assert [row.seeds for row in kept] == 3 * [[1]] + 3 * [[0, 1]], "single seeds stay: they may have further arms"
    whole = lines(folder)
    for row in kept[3:]:
        same = whole[row.arm]
        assert replace(row, along=[], where={}) == replace(same, along=[], where={})
        assert [step for step, _ in row.along] == [step for step, _ in same.along]
        assert [gap for _, gap in row.along] == pytest.approx([gap for _, gap in same.along], abs=2e-6)


def test_only_other_seeds_of_the_same_are_pooled(found: Comparison, folder: Path, tmp_path: Path):
    one, other = (trainings.convergences(publish(of_seed(folder, seed, tmp_path / str(seed))).lines) for seed in (0, 1))
    changes = [{"seeds": [1, 0]}, {"data_hash": "other"}, {"steps": 4}, {"branch_at": 2}, {"says": "another null"}]
    for change in changes:
        with pytest.raises(OptionError, match=r"seeds \[0\] of small, 3 steps, have no stored seeds"):
            pool(one, [replace(row, **change) for row in other])
    assert not pool(one, other).left_out
    broken = [replace(row, losses=[None]) if row.arm == "mxfp8" else row for row in other]
    row = pool(one, broken).lines[-1]
    assert (row.gap, row.error, row.verdict) == (None, None, "diverged")
    plain = [[replace(row, flop_share=0.0) for row in rows] for rows in (one, other)]
    assert pool(*plain).lines[-1].why.startswith("no layer was converted")
    at = [replace(row, where=row.where | {"commit": "def5678"}) for row in other]
    assert pool(one, at).lines[0].where["commit"] == "def5678; abc1234"


def test_arms_that_are_not_pooled_are_named(
    found: Comparison, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """All ways in which only one side has an arm; stored rows stay."""
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    first, second = (of_seed(folder, seed, tmp_path / str(seed)) for seed in (0, 1))
    one, other = (trainings.convergences(publish(each).lines) for each in (first, second))
    assert [row.arm for row in pool(one, other[:2]).lines] == ["bf16", "null"], "arms that both have"
    for kept, says in (
        (other[:2], "mxfp8 has no stored row of seed 1; its new runs, seed 0, are not stored"),
        (
            [*other, replace(other[-1], arm="nvfp4")],
            "nvfp4 was not run with seed 0; its stored row of seed 1 stays unchanged",
        ),
        (
            [*other[:2], replace(other[-1], budget=0.5)],
            "mxfp8 of seed 0 has other formats, another budget or another share of FLOPs than that of seed 1, and is "
            "not stored",
        ),
    ):
        assert pool(one, kept).left_out == [f"small, 3 steps: {says}"]
        file = tmp_path / "training-cpu.jsonl"
        file.unlink(missing_ok=True)
        trainings.write(file, kept)
        assert main(["collect", str(first), "--json", str(file), "--pool"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"left out: small, 3 steps: {says}" in said
        assert trainings.read(file)[: len(kept)] == kept


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


def test_nothing_begins_after_an_error(tmp_path: Path):
    tasks = [(tmp_path / "one",), (tmp_path / "no folder" / "two",), (tmp_path / "three",)]
    done = side_by_side(Path.touch, tasks, 1)
    assert next(done) == (0, None)
    with pytest.raises(FileNotFoundError):
        next(done)
    assert [each.name for each in tmp_path.iterdir()] == ["one"]


# throughput


def test_arms_of_throughput():
    arms = arms_of(LITTLE, ["bf16", "fp8_blockwise"], ["none", "blocks"], ["forward", "step"])
    names = [(each.compile, each.recipe.name, each.recipe.weight_cast) for each in arms]
    one = [("bf16", "forward"), ("fp8_blockwise", "forward"), ("fp8_blockwise", "step")]
    assert names == [(how, *each) for how in ("none", "blocks") for each in one]
    assert [each.recipe.weight_cast for each in arms_of(LITTLE, ["mxfp8"])] == ["forward", "step"]
    with pytest.raises(ValueError, match="unknown compile 'all'"):
        arms_of(LITTLE, [], ["all"])


def test_steps_are_timed_after_the_warm_up(tmp_path: Path):
    told: list[Throughput] = []
    rows = measure(arms_of(LITTLE, ["mxfp8"]), out=tmp_path, warm_up=2, timed=3, commit="abc", on_row=told.append)
    assert told == rows
    assert [row.recipe for row in rows] == ["bf16", "mxfp8"]
    for row in rows:
        assert (row.timed, row.warm_up, row.failed) == (3, 2, "")
        assert row.step_ms
        assert row.spread_ms
        assert row.spread_ms[0] <= row.step_ms <= row.spread_ms[1]
        assert row.tokens_per_second == pytest.approx(32e3 / row.step_ms)
        assert sum(row.shares.values()) == pytest.approx(1)
    assert 0 < rows[1].converted < rows[1].parameters
    assert publish(tmp_path).lines == rows
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
    facts = {"measures": MEASURES, "warm_up": 1}
    run_or_read("bf16", LITTLE, tmp_path, arm=facts, results=(Exception,))
    (row,) = trainings.throughputs(publish(tmp_path).lines)
    assert (row.failed, row.step_ms, row.model) == ("too large", None, "small")
    assert "failed" in report_speed.long_table([row])
    with pytest.raises(OutOfMemoryError):  # in a comparison it is an error
        run_or_read("bf16", replace(LITTLE, seed=5), tmp_path)
