"""Runs that branch from one checkpoint: the shared steps are bf16's to the bit, later steps follow each recipe."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale.compare import comparison, stored, throughput
from blockscale.compare.comparison import BASELINE, NULL, Comparison, compare, trunk
from blockscale.compare.report import notes
from blockscale.compare.rows import rows_of
from blockscale.errors import CheckpointError, OptionError
from blockscale.train import ModelConfig, Run, RunConfig, train
from blockscale.train.records import StepRecord, StopAfter
from support.small_runs import small

ONE_BLOCK = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48)
# its recipe is no arm of the comparison: the shared steps are bf16's whatever the config says
LITTLE = small("nvfp4", model=ONE_BLOCK, steps=5, eval_every=1)
AT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("branches")


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    return compare(LITTLE, ["mxfp8"], 2, out=folder, branch_at=AT)


def test_the_branched_bf16_arm_equals_a_whole_run(found: Comparison):
    for seed, run in zip(found.seeds, found.runs[BASELINE], strict=True):
        whole = train(replace(LITTLE, seed=seed, recipe=replace(LITTLE.recipe, name="bf16")))
        assert run.losses == {each.step: each.loss for each in whole.history if each.step > AT}
        assert run.loss == whole.loss


def test_the_first_gap_is_that_of_rounding(found: Comparison, folder: Path):
    assert [step for step, _ in found.along("mxfp8")] == [3, 4, 5]
    start = trunk(LITTLE, AT, folder)
    losses = {
        name: Run(replace(LITTLE, start=start, recipe=replace(LITTLE.recipe, name=name))).evaluate().loss
        for name in ("bf16", "mxfp8")
    }
    assert losses["bf16"] != losses["mxfp8"]
    assert {name: found.runs[name][0].evaluations[AT] for name in losses} == losses
    # all arms continue with the same sequences: training losses differ by rounding alone
    first = {name: runs[0].losses[AT + 1] for name, runs in found.runs.items()}
    assert first[NULL] == pytest.approx(first[BASELINE], rel=1e-4)
    assert first["mxfp8"] == pytest.approx(first[BASELINE], rel=5e-3)
    assert first["mxfp8"] != first[BASELINE]


def test_the_branch_step_is_reported(found: Comparison):
    assert found.branch_at == AT
    assert any("up to step 3" in note for note in notes(found))


def test_rows_of_branched_runs_have_keys_of_their_own(found: Comparison):
    rows = rows_of(found)
    assert {(row.branch_at, row.arm) for row in rows} == {(AT, arm) for arm in ("bf16", "null", "mxfp8")}
    assert {row.key for row in rows}.isdisjoint({replace(row, branch_at=0).key for row in rows})


def test_each_step_has_a_trunk_of_its_own(tmp_path: Path):
    """A checkpoint of a later step exists; the shorter trunk is a run of its own."""
    assert [trunk(LITTLE, step, tmp_path).name for step in (2, 1)] == ["step-00000002", "step-00000001"]


def test_a_finished_comparison_needs_no_trunk(
    found: Comparison, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also if its folder was moved, and whether its path is absolute or relative."""
    shutil.copytree(folder / "runs", tmp_path / "moved" / "runs")
    for module in (comparison, stored):
        monkeypatch.setattr(module, "train", lambda *args, **named: pytest.fail("trained"))
    monkeypatch.chdir(tmp_path)
    for out in (Path("moved"), tmp_path / "moved"):
        assert compare(LITTLE, ["mxfp8"], 2, out=out, branch_at=AT).runs == found.runs


def test_an_interrupted_trunk_resumes(tmp_path: Path):
    config = replace(LITTLE, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        trunk(config, AT, tmp_path, [StopAfter(2)])
    made = trunk(config, AT, tmp_path)
    assert made.name == "step-00000003"
    again = replace(config, start=made, folder=tmp_path / "own", recipe=replace(config.recipe, name="mxfp8"))
    train(again, hooks=[StopAfter(4)])
    resumed = Run(replace(again, resume=True))
    assert resumed.step == 4, "its own checkpoint, not the one it started from"


def test_start_from_a_given_checkpoint(tmp_path: Path):
    made = trunk(LITTLE, AT, tmp_path)
    found = compare(replace(LITTLE, start=made), ["mxfp8"], out=tmp_path)
    assert found.branch_at == AT
    assert found.gap("mxfp8").is_finite
    with pytest.raises(CheckpointError, match="belongs to another run: seed"):
        train(replace(LITTLE, start=made, seed=1))
    with pytest.raises(CheckpointError, match="steps=4 or more"):
        train(replace(LITTLE, start=made, steps=3))
    with pytest.raises(OptionError, match="a checkpoint belongs to one seed"):
        compare(replace(LITTLE, start=made), ["mxfp8"], 2, out=tmp_path)
    with pytest.raises(OptionError, match="one checkpoint"):
        compare(replace(LITTLE, start=made), ["mxfp8"], out=tmp_path, branch_at=AT)


@pytest.mark.parametrize("at", [-1, 5, 6])
def test_impossible_branch_steps_are_refused(at: int, tmp_path: Path):
    with pytest.raises(OptionError, match="pass 1 to 4, or 0"):
        compare(LITTLE, ["mxfp8"], out=tmp_path, branch_at=at)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("weight_cast", ["step", "forward"])
def test_since_equals_a_run_started_from_the_bf16_checkpoint(recipe: str, weight_cast: str, tmp_path: Path):
    """`since` gives the same bits as two runs: bf16 up to the step, then the recipe from its checkpoint."""
    config = replace(LITTLE, recipe=replace(LITTLE.recipe, name=recipe, weight_cast=weight_cast))
    one = train(replace(config, recipe=replace(config.recipe, since=AT)))
    two = train(replace(config, start=trunk(config, AT, tmp_path)))
    plain = train(replace(config, recipe=replace(config.recipe, name="bf16")))
    assert one.history == two.history
    assert one.loss == two.loss
    assert one.history[:AT] == plain.history[:AT]
    assert one.history[AT:] != plain.history[AT:]
    assert one.flop_share == pytest.approx(two.flop_share * (config.steps - AT) / config.steps)


def test_a_run_with_since_resumes(tmp_path: Path):
    config = replace(LITTLE, recipe=replace(LITTLE.recipe, since=AT))
    whole = train(config)
    for stop in (AT - 1, AT, AT + 1):
        folder = tmp_path / str(stop)
        train(replace(config, folder=folder), hooks=[StopAfter(stop)])
        assert train(replace(config, folder=folder, resume=True)).history == whole.history


def test_a_recipe_begins_before_the_last_step():
    with pytest.raises(OptionError, match="since=5 of 5 steps"):
        train(replace(LITTLE, recipe=replace(LITTLE.recipe, since=5)))
    with pytest.raises(OptionError, match=r"since=1 of a run that starts from .*applies its recipe at once"):
        train(replace(LITTLE, start=Path("somewhere"), recipe=replace(LITTLE.recipe, since=1)))
    with pytest.raises(OptionError, match=r"branch_at=3 and recipe\.since=1"):
        compare(replace(LITTLE, recipe=replace(LITTLE.recipe, since=1)), ["mxfp8"], out=Path("nowhere"), branch_at=AT)
    with pytest.raises(OptionError, match=r"since=-1.*counted from 0"):
        bs.get_recipe("mxfp8").replace(since=-1)


def test_layers_begin_with_the_first_step():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    bs.quantize_(model, bs.get_recipe("mxfp8").replace(since=2), lambda module, name: True)
    low = []
    for step in range(4):
        low.append(model[0].recipe_now.is_quantized)
        bs.set_step_(model, step + 1)
    assert low == [False, False, True, True]


def test_a_comparison_of_recipes_that_begin_later(tmp_path: Path):
    config = replace(LITTLE, recipe=replace(LITTLE.recipe, since=AT))
    found = compare(config, ["mxfp8"], 1, out=tmp_path)
    assert [found.along("mxfp8")[step][1] for step in range(AT)] == [0.0] * AT
    assert found.along("mxfp8")[-1][1] != 0
    assert "from step 3 on" in found.arms[-1].says
    assert any("from step 3 on" in each for each in notes(found))
    lines = rows_of(found)
    assert {each.since for each in lines} == {AT}
    assert {each.key for each in lines}.isdisjoint({replace(each, since=0).key for each in lines})


@pytest.mark.parametrize("weight_cast", ["step", pytest.param("twice", marks=pytest.mark.sweep)])
def test_compiled_blocks_change_with_the_recipe(weight_cast: str, monkeypatch: pytest.MonkeyPatch):
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **named: compile_function(f, **named | {"backend": "aot_eager"}))
    config = small("mxfp8", weight_cast, model=ONE_BLOCK, steps=3)
    config = replace(config, recipe=replace(config.recipe, since=1))
    compiled, eager = train(replace(config, compile="blocks")), train(config)
    assert (compiled.history, compiled.loss) == (eager.history, eager.loss)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_cast", ["step", "forward"])
def test_microbatches_are_captured_again_when_a_recipe_begins(weight_cast: str):
    config = small("fp8_blockwise", weight_cast, steps=6, device="cuda", deterministic=True, accumulate=2)
    config = replace(config, recipe=replace(config.recipe, since=AT))
    captured, eager = train(replace(config, cuda_graph=True)), train(config)
    assert (captured.history, captured.loss) == (eager.history, eager.loss)
    assert captured.history[AT:] != train(replace(config, recipe=replace(config.recipe, since=0))).history[AT:]


# ---- other code that depends on the first step of a recipe -----------------------------------------------------------


def later(**changes: object) -> RunConfig:
    config = replace(LITTLE, **changes)
    return replace(config, recipe=replace(config.recipe, name="mxfp8", since=AT))


def test_a_step_before_since_is_replayed_in_bf16():
    run = Run(later())
    run.step = AT + 1
    bs.set_step_(run.model, run.step)
    assert any(each.recipe_now.is_quantized for each in run.model.modules() if hasattr(each, "recipe_now"))
    run.non_finite_error(StepRecord(1, float("nan"), 1.0, 0.1))
    assert not any(each.recipe_now.is_quantized for each in run.model.modules() if hasattr(each, "recipe_now"))


def test_a_trace_is_one_of_steps_in_low_precision(tmp_path: Path):
    with pytest.raises(OptionError, match=rf"profile=1 of 2 steps.*pass steps={AT + 4}"):
        train(later(profile=1, folder=tmp_path))


def test_speeds_are_those_of_the_recipe():
    assert throughput._timed(later(), 9).recipe.since == 0
