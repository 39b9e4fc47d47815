"""Faults of a run: a NaN is located by step, layer and GEMM, weights stay those before it; out of memory has advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockscale.autograd import linear_plan
from blockscale.diagnostics import store
from blockscale.errors import CheckpointError, NonFiniteError, OutOfMemoryError
from blockscale.models import attention
from blockscale.models.non_finite import Place, locate
from blockscale.nn import Linear
from blockscale.train import Hooks, OptimizerConfig, Run, faults, get_preset, train
from blockscale.train.checkpoint import complete
from blockscale.train.metrics import JsonLines
from blockscale.train.numerics import NumericsLog
from support.small_runs import DENSE, SPARSE, small


class Spoil(torch.autograd.Function):
    """Identity that makes one value of the output infinite, or one value of the gradient NaN."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        y = x.clone()
        if forward:
            y.view(-1)[0] = float("inf")
        return y

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.backward:
            grad.view(-1)[0] = float("nan")
        return grad, None, None


class Spoiler(Hooks):
    """From a step on, the output of a layer's fprop, dgrad or wgrad is not finite."""

    def __init__(self, layer: str, gemm: str, step: int) -> None:
        self.layer, self.gemm, self.step = layer, gemm, step
        self.weights: list[torch.Tensor] = []

    def before_step(self, run: Run) -> None:
        if run.step != self.step:
            return
        self.weights = [each.detach().clone() for each in run.model.parameters()]
        layer = run.model.get_submodule(self.layer)
        plain, gemm = type(layer).forward, self.gemm

        class Spoiled(type(layer)):
            def forward(self, *args):
                first, *rest = args
                if gemm == "dgrad":
                    first = Spoil.apply(first, False, True)
                if gemm == "wgrad":
                    weight = self.weight
                    del self._parameters["weight"]
                    self.weight = Spoil.apply(weight, False, True)
                    try:
                        return plain(self, first, *rest)
                    finally:
                        del self.weight
                        self.register_parameter("weight", weight)
                y = plain(self, first, *rest)
                return Spoil.apply(y, True, False) if gemm == "fprop" else y

        layer.__class__ = Spoiled


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    ("layer", "model"),
    [("layers.1.attention.out", DENSE), ("layers.0.mlp.down", DENSE), ("layers.1.mlp.experts.gate_up", SPARSE)],
)
def test_a_nan_is_traced_to_its_gemm(layer: str, model, gemm: str, tmp_path: Path):
    recipe = "bf16" if gemm == "wgrad" else "fp8_blockwise"  # bf16 layers accept a weight that is no leaf
    spoiler = Spoiler(layer, gemm, step=1)
    run = small(recipe, weight_cast="forward", model=model, steps=6, log_every=5, folder=tmp_path, batch=1)
    with pytest.raises(NonFiniteError) as raised:
        train(run, hooks=[spoiler])
    said = str(raised.value)
    assert said.startswith("step 2 of small")
    assert f"first in {layer}, {gemm}" in said
    assert "Fix: try a lower optimizer.rate" in said
    assert complete(tmp_path) == []


def test_a_gemm_with_non_finite_input_is_not_blamed(monkeypatch: pytest.MonkeyPatch):
    """Attention's output is not finite; the GEMM after it is not blamed."""
    plain = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: plain(*args) * float("inf"))
    with pytest.raises(
        NonFiniteError, match=r"first in layers\.0\.attention\.out, its input, from the layer before it"
    ):
        train(small("fp8_blockwise"))


def test_steps_before_a_nan_are_logged(tmp_path: Path):
    """Also if they are read back together with the step that is not finite."""
    log = JsonLines(tmp_path)
    run = small(steps=8, log_every=6, folder=tmp_path, save_every=2, eval_every=0)
    with pytest.raises(NonFiniteError, match=r"step 6 .* the last checkpoint is .*step-00000004"):
        train(run, hooks=[log, Spoiler("layers.0.mlp.down", "fprop", step=5)])
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2, 3, 4, 5]


def test_samples_after_a_nan_are_not_written(tmp_path: Path):
    log = NumericsLog(tmp_path, 1)
    with pytest.raises(NonFiniteError):
        train(small("mxfp8", steps=6, log_every=6), hooks=[log, Spoiler("layers.0.mlp.down", "fprop", step=3)])
    assert sorted(store.read(tmp_path).samples) == [0, 1, 2]


class Full(Hooks):
    """A hook whose disk is full."""

    def __init__(self, also_closing: bool) -> None:
        self.closed, self.also_closing = False, also_closing

    def on_log(self, run: Run, records: object, speed: object) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed = True
        if self.also_closing:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("also_closing", [False, True])
def test_a_full_disk_is_a_message_and_all_hooks_are_closed(also_closing: bool, tmp_path: Path):
    train(small("bf16", steps=2, folder=tmp_path))
    hooks = [Full(also_closing), Full(also_closing)]
    with pytest.raises(
        CheckpointError, match=r"small stopped at a file: .*No space left.*free some.*resume from .*step-00000002"
    ):
        train(small("bf16", folder=tmp_path, resume=True), hooks=hooks)
    assert all(each.closed for each in hooks)


def test_an_impossible_export_fails_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(Run, "advance", lambda self: pytest.fail("a step was made"))
    with pytest.raises(CheckpointError, match=r"File exists.*check its path and permissions"):
        train(small("bf16", export=tmp_path / "file"))


def test_a_disk_that_is_full_when_weights_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    safetensors = pytest.importorskip("safetensors", reason="weights are exported by safetensors")
    torch_part = pytest.importorskip("safetensors.torch", reason="weights are exported by safetensors")

    def fails(tensors: object, path: Path, **named: object) -> None:
        Path(path).write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(torch_part, "save_file", fails)
    with pytest.raises(CheckpointError, match="No space left"):
        train(small("bf16", steps=1, export=tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


def test_a_gradient_accumulated_in_place_is_checked(monkeypatch: pytest.MonkeyPatch):
    """With several microbatches wgrad accumulates into `main_grad`; the replay has to check its output too."""
    run = Run(small("fp8_blockwise", weight_cast="forward", accumulate=2, batch=1))
    plain, spoiled = linear_plan.wgrad, run.model.layers[1].attention.out.weight

    def wgrad(grad, col, x, x_col, dtype, main_grad, groups=None):
        made = plain(grad, col, x, x_col, dtype, main_grad, groups)
        written = main_grad if made is None else made
        if written.shape == spoiled.shape:
            written.fill_(float("nan"))
        return made

    monkeypatch.setattr(linear_plan, "wgrad", wgrad)
    place = locate(run.model, [run.pieces(0, 0)])
    assert place is not None
    assert (place.layer.endswith("attention.out"), place.op) == (True, "wgrad")


def test_weights_do_not_change_after_a_nan():
    spoiler = Spoiler("layers.0.mlp.down", "fprop", step=1)
    run = Run(small("fp8_blockwise", model=SPARSE, log_every=10), [spoiler])
    for _ in range(2):
        spoiler.before_step(run)
        run.advance()
    balance = run.model.layers[1].mlp.balance.clone()
    run.advance()
    for before, now in zip(spoiler.weights, run.model.parameters(), strict=True):
        assert torch.equal(before, now)
    assert torch.equal(balance, run.model.layers[1].mlp.balance)
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {1.0}


def test_locate_finds_a_nan_weight():
    run = Run(small("bf16"))
    pieces = [run.pieces(0, 0)]
    assert locate(run.model, pieces) is None
    with torch.no_grad():
        run.model.layers[1].mlp_norm.weight[0] = float("nan")
    assert locate(run.model, pieces) == Place("layers.1.mlp_norm.weight", "the weight itself")


def test_a_rate_that_is_too_high_is_found():
    wild = OptimizerConfig(rate=1e38, warmup=0.0, clip=0.0)
    with pytest.raises(NonFiniteError, match=r"step \d of small.*optimizer\.clip=1\.0"):
        train(small("bf16", optimizer=wild, steps=5))


def test_out_of_memory_advice(monkeypatch: pytest.MonkeyPatch):
    def fails(self: Run) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 1 GiB")

    monkeypatch.setattr(Run, "advance", fails)
    with pytest.raises(OutOfMemoryError) as raised:
        train(small(batch=8))
    said = str(raised.value)
    for words in (
        "Tried to allocate 2.00 GiB",
        "recompute=selective",
        "batch=4 with accumulate=2",
        "weight_cast=twice",
    ):
        assert words in said
    large = faults.out_of_memory(replace(get_preset("llama3-8b"), recompute="full"), RuntimeError("x"))
    assert "recompute" not in str(large)
    assert "loss_chunks=16" in str(large)
    assert "parameters=bfloat16" not in str(large)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to "
                "allocate 8589934592 bytes."
            ),
            "tokens in a microbatch: DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes.",
        ),
        (MemoryError(), "tokens in a microbatch: not enough memory. Rule: "),
    ],
)
def test_out_of_memory_advice_on_a_cpu(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch):
    def fails(self: Run) -> None:
        raise error

    monkeypatch.setattr(Run, "advance", fails)
    with pytest.raises(OutOfMemoryError) as raised:
        train(small(batch=8))
    assert says in str(raised.value)
    assert "alloc_cpu" not in str(raised.value)
    assert "batch=4 with accumulate=2" in str(raised.value)
    assert "GPU" not in str(raised.value)
    monkeypatch.setattr(Run, "advance", lambda self: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):  # other errors pass unchanged
        train(small(batch=8))


def test_the_spoiler_spoils_one_layer():
    """Control: without the spoiler the same run finishes."""
    result = train(small(steps=2, weight_cast="forward"))
    assert result.stopped == "done"
    assert issubclass(type(Run(small()).model.layers[0].mlp.down), Linear)


# ---- faults of the last update ---------------------------------------------------------------------------------------


class Ruin(Hooks):
    """Makes a weight NaN in the last step, whose loss is finite."""

    def after_backward(self, run: Run) -> None:
        if run.step == run.config.steps - 1:
            layer = run.model.get_submodule("layers.1.attention.out")
            layer.weight.data.view(-1)[0] = float("nan")


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("eval_batches", [0, 1])
def test_non_finite_weights_are_not_saved(eval_batches: int, saves: bool, tmp_path: Path):
    folder = tmp_path if saves else None
    config = small("bf16", steps=2, eval_batches=eval_batches, folder=folder, export=tmp_path / "out")
    says = "validation loss nan" if eval_batches else "weights that are not finite"
    with pytest.raises(NonFiniteError, match=rf"step 2 .*{says}.*layers\.1\.attention\.out\.weight, the weight itself"):
        train(config, hooks=[Ruin()])
    assert not complete(tmp_path)
    assert not list((tmp_path / "out").iterdir())


def test_a_non_finite_evaluation_is_replayed():
    """The replay covers all evaluation batches: here only the last one overflows."""

    class Overflows(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module, last: torch.Tensor) -> None:
            super().__init__()
            self.inner, self.last = inner, last

        def forward(self, symbols: torch.Tensor) -> torch.Tensor:
            found = self.inner(symbols)
            return found * float("inf") if torch.equal(symbols, self.last) else found

    class Sets(Hooks):
        def on_start(self, run: Run) -> None:
            last = run.held_out(2)
            run.model.embedding = Overflows(run.model.embedding, last[:, :-1])  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(NonFiniteError, match=r"validation loss (nan|inf); first in (?!gone)\S+, .*nor exported"):
        train(small("bf16", steps=1, eval_batches=3), hooks=[Sets()])


def test_a_replay_scales_the_loss_of_a_microbatch():
    """With a learning rate of zero the weights stay the same, and so do the gradients of a layer's output."""
    run = Run(small("bf16", steps=1, accumulate=3, optimizer=OptimizerConfig(rate=0.0, weight_decay=0.0)))
    layer, came = run.model.get_submodule("layers.1.attention.out"), list[torch.Tensor]()
    layer.register_full_backward_hook(lambda module, into, out: came.append(out[0].clone()))
    run.advance()
    run.non_finite_error(run.read()[-1])
    assert len(came) == 6
    for trained, replayed in zip(came[:3], came[3:], strict=True):
        torch.testing.assert_close(replayed, trained)


def test_a_replay_repeats_stochastic_rounding():
    """Every microbatch of a step has its own tick of stochastic rounding."""
    run = Run(small("nvfp4", steps=2, accumulate=3))
    ticks: list[int] = []
    layer = next(each for each in run.model.modules() if isinstance(each, Linear))

    def note(module: torch.nn.Module, args: object) -> None:
        assert layer.rng is not None
        ticks.append(int(layer.rng[1]))

    layer.register_forward_pre_hook(note)
    run.advance()
    run.advance()
    run.non_finite_error(run.read()[-1])
    assert ticks == [0, 1, 2, 3, 4, 5, 3, 4, 5]
