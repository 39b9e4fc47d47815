"""Training loop: learns, repeats, resumes to the bit, accumulates as one batch, casts weights once per step."""

from __future__ import annotations

import gc
import math
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockscale.autograd.weights import shared_weights
from blockscale.errors import CheckpointError, OptionError
from blockscale.train import DataConfig, Hooks, OptimizerConfig, RecipeConfig, Run, TrainResult, loop, train
from blockscale.train.records import StopAfter
from support.small_runs import DENSE, SPARSE, small


def losses(result: TrainResult) -> list[float]:
    return [each.loss for each in result.history]


def test_it_learns_and_repeats():
    run = small("bf16", steps=40, batch=4, eval_every=20, log_every=7)
    first = train(run)
    assert [each.step for each in first.history] == list(range(1, 41))
    assert [each.step for each in first.evaluations] == [20, 40]
    assert first.history[0].loss == pytest.approx(5.6, abs=0.3)
    assert first.loss < 4.3
    assert first.stopped == "done"
    assert first.tokens_per_second > 0
    assert first.peak_memory is None
    again = train(replace(run, log_every=1))
    assert losses(again) == losses(first)
    assert again.evaluations == first.evaluations
    other = train(replace(run, steps=1, seed=1))
    assert losses(other) != losses(first)[:1]


def test_recipes_begin_alike_and_see_the_same_text():
    results = [train(small(name, steps=1)) for name in ("bf16", "fp8_blockwise", "mxfp8")]
    assert len({result.data_hash for result in results}) == 1
    first = [result.history[0].loss for result in results]
    assert len(set(first)) == 3
    assert max(first) - min(first) < 0.02
    assert results[1].flop_share > 0.6
    assert "layers converted" in results[1].conversion


@pytest.mark.parametrize(
    ("recipe", "model"),
    [("fp8_blockwise", DENSE), ("fp8_blockwise", SPARSE), ("nvfp4", replace(DENSE, layers=1))],
    ids=["dense", "sparse", "stochastic"],
)
def test_a_resumed_run_is_the_run_that_never_stopped(recipe: str, model, tmp_path: Path):
    run = small(recipe, model=model, steps=3, accumulate=2, batch=1, eval_every=2)
    whole = train(run)
    here = replace(run, folder=tmp_path)
    part = train(here, hooks=[StopAfter(2)])
    assert (part.stopped, part.steps) == ("interrupted", 2)
    torch.manual_seed(999)  # the process may have used torch's generator meanwhile
    rest = train(replace(here, resume=True))
    assert rest.history == whole.history
    assert rest.evaluations == whole.evaluations
    assert (rest.stopped, rest.steps) == ("done", 3)


def test_accumulation_is_one_large_batch():
    """The same sequences: gradients differ by the reduction order in bf16 and fp32 alone."""
    gradients = []
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        run = Run(small("bf16", batch=batch, accumulate=accumulate))
        for micro in range(accumulate):
            run.microbatch(run.pieces(0, micro))
        gradients.append((run.microbatch.loss, [each.grad for each in run.model.parameters()]))
    whole_loss, whole = gradients[0]
    for loss, parts in gradients[1:]:
        assert torch.allclose(loss, whole_loss, rtol=1e-3)
        for mine, theirs in zip(parts, whole, strict=True):
            assert float((mine - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_wgrad_accumulates_as_autograd_would(model):
    run = Run(small(model=model, accumulate=3, batch=1))
    summed = run.microbatch.summed
    assert len(summed) == len(run.report.converted)
    places = [each.grad.data_ptr() for each in summed]

    def gradients() -> list[torch.Tensor]:
        for micro in range(3):
            run.microbatch(run.pieces(0, micro))
        found = [each.grad.clone() for each in run.model.parameters()]
        run.microbatch.clear()
        return found

    by_products = gradients()
    assert [each.grad.data_ptr() for each in summed] == places
    for each in summed:
        each.grad = each.main_grad = None
    by_autograd = gradients()
    assert all(torch.equal(*pair) for pair in zip(by_products, by_autograd, strict=True))


@pytest.mark.parametrize("parameters", ["float32", "bfloat16"])
def test_steps_are_by_the_clipped_gradient(parameters):
    run = Run(small("bf16", parameters=parameters, optimizer=OptimizerConfig(clip=1e-3, beta1=0.5)))
    run.advance()
    moments = [state["exp_avg"].float() for state in run.optimizer.state.values()]
    assert float(torch.nn.utils.get_total_norm(moments)) == pytest.approx(0.5e-3, rel=0.01)


def test_gradients_outside_wgrad_accumulation_are_freed():
    for run in (Run(small(accumulate=1)), Run(small("bf16", accumulate=2))):
        run.advance()
        assert run.microbatch.summed == []
        assert all(each.grad is None for each in run.model.parameters())
    run = Run(small(accumulate=2, batch=1))
    run.advance()
    kept = [each for each in run.model.parameters() if each.grad is not None]
    assert {id(each) for each in kept} == {id(each) for each in run.microbatch.summed}
    assert not any(each.grad.count_nonzero() for each in kept)


@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_weights_are_cast_once_per_step(model):
    run = Run(small(model=model, accumulate=3, batch=1))
    casts = [cast for *_, cast in shared_weights(run.model)]
    assert len(casts) == len(run.report.converted)
    assert {cast.casts for cast in casts} == {1}
    run.advance()
    run.advance()
    assert {cast.casts for cast in casts} == {3}
    plain = Run(small(weight_cast="forward"))
    assert shared_weights(plain.model) == []


def test_sharing_casts_changes_no_bit():
    run = small(accumulate=2, batch=1, steps=2)
    shared = train(run)
    each = train(replace(run, recipe=replace(run.recipe, weight_cast="forward")))
    assert losses(shared) == losses(each)


def test_stochastic_rounding_advances_with_every_microbatch():
    run = Run(small("nvfp4", model=replace(DENSE, layers=1), accumulate=2, batch=1))
    run.advance()
    rng = run.model.layers[0].mlp.down.rng
    assert rng is not None
    assert rng.tolist() == [0, 2]


def test_experts_are_balanced():
    run = Run(small("bf16", model=SPARSE))
    moe = run.model.layers[1].mlp
    run.advance()
    assert set(moe.balance.tolist()) <= {0.0, *torch.tensor([1e-3, -1e-3]).tolist()}
    assert float(moe.balance.abs().sum()) > 0
    assert int(moe.load.sum()) == 0


def test_parameters_can_be_bf16():
    run = Run(small(parameters="bfloat16"))
    run.advance()
    assert {each.dtype for each in run.model.parameters()} == {torch.bfloat16}
    assert run.optimizer.state[run.model.head.weight]["exp_avg"].dtype == torch.bfloat16
    assert {each.dtype for each in Run(small()).model.parameters()} == {torch.float32}


def test_hooks_are_told_in_order(tmp_path: Path):
    told: list[str] = []

    class Listener(Hooks):
        pass

    for name in ("on_start", "before_step", "after_backward", "on_log", "on_evaluation", "on_save", "on_end", "close"):
        setattr(Listener, name, lambda self, *rest, name=name: told.append(name))
    train(small("bf16", steps=2, folder=tmp_path), hooks=[Listener()])
    step = ["before_step", "after_backward", "on_log"]
    assert told == ["on_start", *step, *step, "on_evaluation", "on_save", "on_end", "close"]


def test_ctrl_c_saves_and_ends(tmp_path: Path):
    class Interrupt(Hooks):
        def after_backward(self, run: Run) -> None:
            if run.step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = train(small("bf16", folder=tmp_path), hooks=[Interrupt()])
    assert (result.stopped, result.steps) == ("interrupted", 2)
    assert result.checkpoint == tmp_path / "step-00000002"
    assert signal.getsignal(signal.SIGINT) is before


def test_two_signals_at_once_count_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process group may deliver a signal twice: by the sender and by the parent process. A later one ends at once."""

    class Interrupt(Hooks):
        def after_backward(self, run: Run) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    assert train(small("bf16", folder=tmp_path), hooks=[Interrupt()]).checkpoint == tmp_path / "step-00000001"
    monkeypatch.setattr(loop, "_SAME_SIGNAL", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train(small("bf16"), hooks=[Interrupt()])


@pytest.mark.parametrize("eval_every", [0, 3])
def test_a_run_that_is_stopped_in_its_last_step_is_complete(eval_every: int):
    run = small(steps=4, eval_every=eval_every)
    result = train(run, hooks=[StopAfter(4)])
    assert result.stopped == "done"
    assert result.loss == train(run).loss
    assert result.evaluations[-1].step == 4


def test_flop_share_counts_quantized_gemms():
    whole, without_wgrad, bf16 = (Run(small(each)) for each in ("mxfp8", "mxfp8_wgrad_bf16", "bf16"))
    assert whole.flop_share == whole.report.flop_share > 0.3
    assert without_wgrad.flop_share == pytest.approx(2 / 3 * whole.flop_share)
    assert bf16.flop_share == whole.flop_share, "the share of the layers that a recipe would convert"


def test_without_evaluation_the_loss_is_nan():
    result = train(small(steps=1, eval_every=1, eval_batches=0))
    assert result.evaluations == ()
    assert math.isnan(result.loss)


def test_a_new_run_does_not_write_over_another(tmp_path: Path):
    run = small("bf16", steps=1, folder=tmp_path)
    train(run)
    with pytest.raises(CheckpointError, match="resume=True"):
        train(run)


def test_text_with_more_symbols_than_the_model():
    with pytest.raises(OptionError, match=r"model\.vocabulary=128 for 256"):
        train(small(model=replace(DENSE, vocabulary=128)))


def test_graphs_need_a_gpu():
    with pytest.raises(OptionError, match="cuda_graph on cpu"):
        train(small(cuda_graph=True))


def test_a_trace_is_written(tmp_path: Path):
    result = train(small(model=replace(DENSE, layers=1), steps=5, folder=tmp_path, profile=1))
    (trace,) = tmp_path.glob("trace-*.json.gz")
    assert trace.stat().st_size > 1000
    assert result.steps == 5


def test_a_run_that_is_too_short_for_a_trace(tmp_path: Path):
    with pytest.raises(OptionError, match=r"profile=2 of 3 steps.*pass steps=5"):
        train(small(steps=3, profile=2, folder=tmp_path / "new"))
    run = small(steps=6, profile=2, folder=tmp_path, model=replace(DENSE, layers=1))
    train(run, hooks=[StopAfter(5)])
    assert train(replace(run, resume=True)).steps == 6, "a resumed run may be too short for a trace"


def test_an_attention_of_gpus_needs_one():
    with pytest.raises(OptionError, match="attention=cudnn on cpu"):
        train(small(attention="cudnn"))


@pytest.mark.slow
def test_compiled_blocks_are_eager_ones_to_the_bit(monkeypatch: pytest.MonkeyPatch):
    """With a backend that changes no operator; inductor's own sums differ in last bits."""
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **named: compile_function(f, **named | {"backend": "aot_eager"}))
    sparse = replace(SPARSE, experts=replace(SPARSE.experts, dense_layers=0), layers=1)
    run = small(steps=1, model=sparse, recompute="selective")
    compiled, eager = train(replace(run, compile="blocks")), train(run)
    assert (compiled.history, compiled.evaluations) == (eager.history, eager.evaluations)


def test_a_compiled_run_is_gone_when_the_next_begins(monkeypatch: pytest.MonkeyPatch):
    """Compiled blocks are held in reference cycles; on a GPU the weights of two runs would take memory together."""
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **named: compile_function(f, **named | {"backend": "aot_eager"}))
    config = small("bf16", model=replace(DENSE, layers=1), compile="blocks")
    gc.disable()
    try:
        run = Run(config)
        run.advance()
        weight = weakref.ref(next(run.model.parameters()))
        del run
        assert weight() is not None
        Run(config)
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_captured_microbatch_is_the_eager_one(recipe: str, model):
    wide = replace(model, dim=128, hidden=256, layers=3)
    run = small(recipe, model=wide, device="cuda", steps=6, accumulate=2)
    assert train(replace(run, cuda_graph=True)).history == train(run).history


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_compiled_and_captured_on_a_gpu(model, recompute):
    """With deterministic algorithms: torch's usual attention does not repeat, and sparse models route tokens by it."""
    wide = replace(model, dim=128, hidden=256, layers=3)
    run = small(model=wide, device="cuda", steps=10, batch=8, recompute=recompute, deterministic=True)
    eager = train(run)
    compiled = train(replace(run, compile="blocks"))
    captured = train(replace(run, compile="blocks", cuda_graph=True))
    assert compiled.loss == pytest.approx(eager.loss, rel=0.02)
    assert captured.loss == pytest.approx(compiled.loss, rel=1e-5)
    assert eager.peak_memory is not None
    assert eager.peak_memory > 0


@pytest.mark.gpu
def test_a_step_does_not_synchronize():
    run = Run(small(model=SPARSE, device="cuda"))
    for _ in range(3):
        run.advance()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Sees(Hooks):
    """Records torch's determinism settings during a step."""

    def before_step(self, run: Run) -> None:
        self.seen = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("fails", [False, True])
def test_deterministic_is_for_the_run_alone(fails: bool, monkeypatch: pytest.MonkeyPatch):
    """Settings are restored, also after an error; buffers are not filled."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    sees, config = Sees(), small(deterministic=True, steps=1)
    if fails:
        monkeypatch.setattr(Run, "advance", lambda run: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config, hooks=[sees])
    else:
        plain = train(replace(config, deterministic=False))
        assert train(config, hooks=[sees]).history == plain.history
    assert sees.seen == (True, False)
    assert (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    ) == before


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "mxfp8"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_deterministic_runs_repeat_on_a_gpu(recipe: str, experts: bool, tmp_path: Path):
    """With heads and lengths for which torch would choose cuDNN's attention, compiled, and across a resume."""
    mixture = replace(SPARSE.experts, hidden=128, shared=128) if experts else None
    model = replace(DENSE, dim=256, hidden=512, heads=4, kv_heads=4, experts=mixture)
    run = small(recipe, model=model, data=DataConfig(sequence=1024), device="cuda", steps=6, batch=4, compile="blocks")
    run = replace(run, deterministic=True)
    whole, here = train(run), replace(run, folder=tmp_path)
    train(here, hooks=[StopAfter(3)])
    assert train(replace(here, resume=True)).history == whole.history


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "nvfp4"])
def test_resume_on_a_gpu(recipe: str, tmp_path: Path):
    run = small(recipe, model=SPARSE, device="cuda", steps=4)
    whole = train(run)
    here = replace(run, folder=tmp_path)
    train(here, hooks=[StopAfter(2)])
    assert train(replace(here, resume=True)).history == whole.history


def test_recipes_by_config():
    from blockscale.train.run import recipe_of

    recipe = recipe_of(RecipeConfig("mxfp8", "twice", "mxfp8_e4m3_128x128"))
    assert recipe.weight_cast == "twice"
    assert recipe.name == "mxfp8, weights mxfp8_e4m3_128x128"
