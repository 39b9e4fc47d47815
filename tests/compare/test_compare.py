"""Comparisons: runs are paired, the null run is bf16 with another reduction order, finished runs are not repeated, and
a broken recipe comes out as worse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockscale.casts import _reference
from blockscale.compare import stored as module
from blockscale.compare.comparison import BASELINE, CONTROL, NULL, Comparison, arms_of, compare, config_of, null_of
from blockscale.compare.rows import rows_of
from blockscale.compare.statistics import Length
from blockscale.compare.stored import read
from blockscale.errors import CheckpointError, NonFiniteError, OptionError
from blockscale.train import DataConfig, Hooks, ModelConfig, RecipeConfig, Run, RunConfig, get_preset
from blockscale.train.breakdown import KINDS, Breakdown
from blockscale.train.records import StopAfter
from support.small_runs import small

ONE_BLOCK = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48)


def little(**changes) -> RunConfig:
    return small(**({"model": ONE_BLOCK, "steps": 3, "eval_every": 1} | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    return compare(little(), ["mxfp8"], 2, out=folder)


def test_arms_differ_in_the_recipe_alone():
    config = little()
    arms = arms_of(config, ["bf16", "mxfp8", "nvfp4", "mxfp8"])
    assert [arm.name for arm in arms] == ["bf16", "null", "mxfp8", "nvfp4"]
    for arm in arms:
        if arm.name != NULL:
            assert replace(config_of(arm.name, config), recipe=config.recipe) == config
            assert config_of(arm.name, config).recipe.name == arm.name
    assert [arm.budget for arm in arms] == [None, None, 0.0025, 0.02]
    assert arms_of(config, ["nvfp4"], budget=0.01)[-1].budget == 0.01


@pytest.mark.parametrize(("batch", "accumulate"), [(4, 1), (3, 2)])
def test_the_null_run_sees_the_same_sequences(batch: int, accumulate: int):
    config = little(batch=batch, accumulate=accumulate, eval_batches=2)
    null = null_of(config)[0]
    runs = [Run(replace(each, recipe=replace(each.recipe, name="bf16"))) for each in (config, null)]
    assert null.batch < batch
    train, held_out = ([] for _ in range(2))
    for run in runs:
        mine = run.config
        train.append(torch.cat([run.pieces(5, micro) for micro in range(mine.accumulate)]))
        places = range(mine.eval_batches)
        parts = [run.symbols.validation(at, mine.eval_batches, mine.batch, mine.data.sequence) for at in places]
        held_out.append(torch.cat(parts))
    assert torch.equal(*train)
    assert torch.equal(*held_out)


def test_a_null_run_of_one_sequence_splits_the_loss():
    config = replace(get_preset("llama3-8b"), batch=1)
    null, says = null_of(config)
    assert (null.batch, null.loss_chunks) == (1, 16)
    assert "16 pieces" in says


def test_paired_runs_start_from_the_same_weights(found: Comparison):
    first = {name: [run.losses[1] for run in runs] for name, runs in found.runs.items()}
    assert first[BASELINE][0] != first[BASELINE][1]
    for name in (NULL, "mxfp8"):
        for mine, theirs in zip(first[name], first[BASELINE], strict=True):
            assert mine == pytest.approx(theirs, rel=3e-3)
    assert len({run.about["data_hash"] for runs in found.runs.values() for run in runs}) == 1


def test_gaps_and_noise_of_a_comparison(found: Comparison):
    assert found.gap(BASELINE).values == (0.0, 0.0)
    assert [step for step, _ in found.along("mxfp8")] == [1, 2, 3]
    last = found.along("mxfp8")[-1][1]
    assert last == pytest.approx(found.gap("mxfp8").mean)
    assert 0 <= found.noise < 0.01
    run = found.runs["mxfp8"][0]
    assert run.about["flop_share"] > 0.3
    assert run.shares == {}, "a CPU shows the cost of emulation"
    layers = {each["layer"]: each for each in run.layers}
    assert all(20 < layers["layers.0.mlp.down"][key] < 45 for key in ("x", "w", "dy", "fprop", "dgrad", "wgrad"))
    assert found.runs[BASELINE][0].layers == []


def test_finished_runs_are_read_and_not_run(found: Comparison, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "train", lambda *args, **named: pytest.fail("ran again"))
    again = compare(little(), ["mxfp8"], 2, out=folder)
    assert again.runs == found.runs


def test_an_interrupted_comparison_resumes(tmp_path: Path):
    config = little(steps=2)
    with pytest.raises(KeyboardInterrupt):
        compare(config, [], 1, out=tmp_path, hooks=lambda title: [StopAfter(1)] if NULL in title else [])
    files = sorted(tmp_path.rglob("metrics.jsonl"))
    assert [read(each).is_done for each in files] == [True, False]
    before = files[0].read_text()
    with files[1].open("a") as file:
        file.write('{"kind": "step", "st')  # the process was killed
    done = compare(config, [], 1, out=tmp_path)
    assert files[0].read_text() == before
    assert set(done.runs[NULL][0].losses) == {1, 2}


def test_a_non_finite_run_is_stored_as_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = module.train

    def train(config: RunConfig, **named):
        if config.recipe.name == "mxfp8":
            named["hooks"][0].on_start(Run(config))
            raise NonFiniteError("step 1: loss nan")
        return real(config, **named)

    monkeypatch.setattr(module, "train", train)
    found = compare(little(steps=1), ["mxfp8"], 1, out=tmp_path)
    verdict = found.verdict(found.arms[-1])
    assert verdict is not None
    assert verdict.kind == "diverged"
    assert "loss nan" in found.runs["mxfp8"][0].failed


def test_the_control_is_worse_and_the_recipe_that_it_breaks_is_not(tmp_path: Path):
    real = _reference.encode
    config = little(weight_cast="forward", steps=8, eval_every=4, eval_batches=4)
    found = compare(config, ["mxfp8"], 3, out=tmp_path, control=True)
    recipe, control = found.verdict(found.arms[-2]), found.verdict(found.arms[-1])
    assert recipe is not None
    assert control is not None
    assert found.arms[-1].name == CONTROL
    assert (recipe.kind, control.kind) == ("too short to tell", "worse"), (found.gap("mxfp8"), found.gap(CONTROL))
    assert list(found.verdicts()) == ["mxfp8"]
    mine, theirs = (found.runs[name][0].layers[0] for name in (CONTROL, "mxfp8"))
    assert mine["x"] < 5 < 25 < theirs["x"]
    assert _reference.encode is real, "casts are correct again"


def test_length_excludes_shared_steps(tmp_path: Path):
    found = compare(little(steps=4), ["mxfp8"], 1, out=tmp_path, branch_at=2)
    assert [step for step, _ in found.along("mxfp8")] == [2, 3, 4]
    assert found.length("mxfp8") == Length(4, 2, shared_steps=2)
    late = replace(little(steps=4), recipe=RecipeConfig(keep_first=0, keep_last=0, since=3))
    assert compare(late, ["mxfp8"], 1, out=tmp_path / "late").length("mxfp8") == Length(4, 1, shared_steps=3)


def test_text_has_to_be_the_same(found: Comparison, folder: Path, tmp_path: Path):
    for file in folder.rglob("metrics.jsonl"):
        copy = tmp_path / file.relative_to(folder)
        copy.parent.mkdir(parents=True)
        copy.write_text(file.read_text())
    victim = next(iter(sorted(tmp_path.rglob("metrics.jsonl"))))
    rows = [json.loads(line) for line in victim.read_text().splitlines()]
    victim.write_text("".join(json.dumps(row | {"data_hash": "other"}) + "\n" for row in rows))
    with pytest.raises(OptionError, match="different text"):
        compare(little(), ["mxfp8"], 2, out=tmp_path)


def test_text_that_changed_is_noticed_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "text.txt"
    text.write_text("something to read, " * 200)
    config = little(steps=1, data=DataConfig(str(text), sequence=16, cache=tmp_path / "cache"))
    compare(config, [], 1, out=tmp_path / "out")
    text.write_text("something else to read, " * 200)
    monkeypatch.setattr(module, "train", lambda *args, **named: pytest.fail("ran"))
    with pytest.raises(OptionError, match="different text"):
        compare(config, [], 2, out=tmp_path / "out")
    assert len(compare(config, [], 1, out=tmp_path / "out").seeds) == 1, "no run is missing"


def test_text_that_changes_meanwhile_is_noticed_too(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("something to read, " * 200)
    config = little(steps=1, data=DataConfig(str(text), sequence=16, cache=tmp_path / "cache"))

    class Edits(Hooks):
        def on_start(self, run: Run) -> None:
            text.write_text("something else to read, " * 200)

    with pytest.raises(OptionError, match="different text"):
        compare(config, [], out=tmp_path / "out", hooks=lambda title: [Edits()])


def test_a_non_finite_evaluation_is_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last update may break the weights, and no step follows that would detect it."""
    real = Run.evaluate

    def evaluate(self: Run):
        found = real(self)
        if self.config.recipe.name == "mxfp8":
            self.evaluations[-1] = found = replace(found, loss=float("nan"))
        return found

    monkeypatch.setattr(Run, "evaluate", evaluate)
    found = compare(little(steps=1), ["mxfp8"], out=tmp_path)
    verdict = found.verdict(found.arms[-1])
    assert verdict is not None
    assert verdict.kind == "diverged"
    assert [row.losses for row in rows_of(found)][-1] == [None]


def test_zero_seeds_are_refused(tmp_path: Path):
    with pytest.raises(OptionError, match="at least one seed"):
        compare(little(), [], 0, out=tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"export": Path("out")}, {"tensorboard": True}, {"numerics_every": 2}, {"profile": 1}, {"folder": Path("a")}],
)
def test_options_of_a_single_run_are_refused(change, tmp_path: Path):
    with pytest.raises(OptionError, match="each run of a comparison has a folder of its own"):
        compare(little(**change), [], out=tmp_path)


def test_losses_of_held_out_text_are_compared(tmp_path: Path):
    with pytest.raises(OptionError, match="eval_batches=0"):
        compare(little(eval_batches=0), [], out=tmp_path)


def test_a_recipe_that_converts_nothing_is_not_judged(tmp_path: Path):
    config = replace(little(steps=1, model=replace(ONE_BLOCK, layers=3)), recipe=RecipeConfig(keep_first=3))
    found = compare(config, ["mxfp8"], out=tmp_path)
    verdict = found.verdict(found.arms[-1])
    assert verdict is not None
    assert (verdict.kind, "no layer was converted" in verdict.why) == ("undecided", True)


def test_ctrl_c_in_the_last_step_ends_the_comparison_and_the_run_is_whole(tmp_path: Path):
    config = little(steps=2, eval_every=0)
    with pytest.raises(KeyboardInterrupt):
        compare(config, [], out=tmp_path, hooks=lambda title: [StopAfter(2)])
    (only,) = tmp_path.rglob("metrics.jsonl")
    assert read(only).is_done
    assert read(only).loss == compare(config, [], out=tmp_path / "whole").runs[BASELINE][0].loss


def test_shares_of_a_step_are_stored_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = Breakdown(dict.fromkeys(KINDS, 0.25), {"cast_kernel": 0.1}, 3.5)
    monkeypatch.setattr(module, "breakdown", lambda work: found)
    for device in ("cpu", "cuda"):
        log = module.RunLog(tmp_path / device, {})
        log._measure("shares", SimpleNamespace(device=torch.device(device), advance=None))
    assert read(tmp_path / "cpu" / "metrics.jsonl").shares == {}
    on_gpu = read(tmp_path / "cuda" / "metrics.jsonl")
    assert (on_gpu.shares, on_gpu.longest, on_gpu.kernel_ms) == (found.shares, found.longest, 3.5)


def test_a_run_stays_valid_if_a_measurement_fails(tmp_path, monkeypatch):
    def no_memory(run: Run) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "sample_run", no_memory)
    found = module.run_or_read("mxfp8", small("mxfp8", steps=2), tmp_path)
    assert found.is_done
    assert found.loss > 0
    assert found.layers == []
    text = next(tmp_path.rglob("metrics.jsonl")).read_text()
    assert '"what": "layers", "why": "CUDA out of memory"' in text


@pytest.mark.parametrize("line", [b'{"kind": "st', b"\xff\xfe", b"5", b"{}", b'{"kind": "step"}'])
def test_a_damaged_line_is_skipped(line: bytes, found: Comparison, folder: Path, tmp_path: Path):
    (path,) = folder.glob("runs/mxfp8-seed0-*/metrics.jsonl")
    first, *others = path.read_bytes().splitlines()
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, line, *others, b""]))
    again = read(tmp_path / "metrics.jsonl")
    assert again == read(path)
    assert again.is_done


def test_an_incomplete_record_is_not_done(found: Comparison, folder: Path, tmp_path: Path):
    (path,) = folder.glob("runs/mxfp8-seed0-*/metrics.jsonl")
    first, *others = path.read_bytes().splitlines()
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first[:9], *others, b""]))
    assert not read(tmp_path / "metrics.jsonl").is_done


def test_a_run_without_a_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "read", lambda path: module.Stored())
    with pytest.raises(CheckpointError, match="has no record of the run that has just ended"):
        module.run_or_read("bf16", little(steps=1), tmp_path, measurements=())
