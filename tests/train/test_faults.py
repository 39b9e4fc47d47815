"""NaN: the step, the layer and the product; weights stay those before it. Memory: what to change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockscale.autograd import linear_plan
from blockscale.diagnostics import store
from blockscale.errors import CheckpointError, NonFiniteError, OutOfMemoryError
from blockscale.nn import Linear
from blockscale.train import Hooks, OptimizerConfig, Run, attention, faults, get_preset, train
from blockscale.train.checkpoint import complete
from blockscale.train.metrics import JsonLines
from blockscale.train.numerics import NumericsLog
from support.small_runs import DENSE, SPARSE, small


class Spoil(torch.autograd.Function):
    """Passes a tensor on, and spoils one number of it, or of its gradient."""

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
    """From a step on, a layer's product is no number: of forward, of the gradient of its input, or of its weight."""

    def __init__(self, layer: str, product: str, step: int) -> None:
        self.layer, self.product, self.step = layer, product, step
        self.weights: list[torch.Tensor] = []

    def before_step(self, run: Run) -> None:
        if run.step != self.step:
            return
        self.weights = [each.detach().clone() for each in run.model.parameters()]
        layer = run.model.get_submodule(self.layer)
        plain, product = type(layer).forward, self.product

        class Spoiled(type(layer)):
            def forward(self, *args):
                first, *rest = args
                if product == "dgrad":
                    first = Spoil.apply(first, False, True)
                if product == "wgrad":
                    weight = self.weight
                    del self._parameters["weight"]
                    self.weight = Spoil.apply(weight, False, True)
                    try:
                        return plain(self, first, *rest)
                    finally:
                        del self.weight
                        self.register_parameter("weight", weight)
                y = plain(self, first, *rest)
                return Spoil.apply(y, True, False) if product == "fprop" else y

        layer.__class__ = Spoiled


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    ("layer", "model"),
    [("layers.1.attention.out", DENSE), ("layers.0.mlp.down", DENSE), ("layers.1.mlp.experts.gate_up", SPARSE)],
)
def test_a_nan_is_traced_to_its_product(layer: str, model, product: str, tmp_path: Path):
    recipe = "bf16" if product == "wgrad" else "fp8_blockwise"  # where a weight may be a result
    spoiler = Spoiler(layer, product, step=1)
    run = small(recipe, weight_cast="forward", model=model, steps=6, log_every=5, folder=tmp_path, batch=1)
    with pytest.raises(NonFiniteError) as raised:
        train(run, hooks=[spoiler])
    said = str(raised.value)
    assert said.startswith("step 2 of small")
    assert f"first in {layer}, {product}" in said
    assert "Fix: try a lower optimizer.rate" in said
    assert complete(tmp_path) == []


def test_an_innocent_product_is_not_named(monkeypatch: pytest.MonkeyPatch):
    """What attention made is no number; the product behind it only passes that on."""
    plain = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v: plain(q, k, v) * float("inf"))
    with pytest.raises(
        NonFiniteError, match=r"first in layers\.0\.attention\.out, its input, made by what precedes it"
    ):
        train(small("fp8_blockwise"))


def test_steps_before_it_are_told(tmp_path: Path):
    """Though they are read back together with the one that is no number."""
    log = JsonLines(tmp_path)
    run = small(steps=8, log_every=6, folder=tmp_path, save_every=2, eval_every=0)
    with pytest.raises(NonFiniteError, match=r"step 6 .* the last checkpoint is .*step-00000004"):
        train(run, hooks=[log, Spoiler("layers.0.mlp.down", "fprop", step=5)])
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2, 3, 4, 5]


def test_samples_of_what_broke_are_not_told(tmp_path: Path):
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
        CheckpointError, match=r"small stopped at a file: .*No space left.*free some.*go on from .*step-00000002"
    ):
        train(small("bf16", folder=tmp_path, resume=True), hooks=hooks)
    assert all(each.closed for each in hooks)


def test_an_export_that_cannot_be_is_known_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(Run, "advance", lambda self: pytest.fail("a step was made"))
    with pytest.raises(CheckpointError, match=r"File exists.*check that it is there, and yours"):
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


def test_a_gradient_that_is_added_in_place_is_looked_at_too(monkeypatch: pytest.MonkeyPatch):
    """With several microbatches wgrad adds to a buffer of the weight; the replay has to see what it made."""
    run = Run(small("fp8_blockwise", weight_cast="forward", accumulate=2, batch=1))
    plain, spoiled = linear_plan.wgrad, run.model.layers[1].attention.out.weight

    def wgrad(grad, col, x, x_col, dtype, main_grad, groups=None):
        made = plain(grad, col, x, x_col, dtype, main_grad, groups)
        written = main_grad if made is None else made
        if written.shape == spoiled.shape:
            written.fill_(float("nan"))
        return made

    monkeypatch.setattr(linear_plan, "wgrad", wgrad)
    place = faults.locate(run.model, [run.pieces(0, 0)])
    assert place is not None
    assert (place.layer.endswith("attention.out"), place.product) == (True, "wgrad")


def test_weights_stay_those_before_it():
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


def test_other_places():
    run = Run(small("bf16"))
    pieces = [run.pieces(0, 0)]
    assert faults.locate(run.model, pieces) is None
    with torch.no_grad():
        run.model.layers[1].mlp_norm.weight[0] = float("nan")
    assert faults.locate(run.model, pieces) == faults.Place("layers.1.mlp_norm.weight", "the weight itself")


def test_a_rate_that_is_too_high_is_found():
    wild = OptimizerConfig(rate=1e38, warmup=0.0, clip=0.0)
    with pytest.raises(NonFiniteError, match=r"step \d of small.*optimizer\.clip=1\.0"):
        train(small("bf16", optimizer=wild, steps=5))


def test_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch):
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
def test_memory_of_a_cpu_does_too(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch):
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
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):  # another error stays what it is
        train(small(batch=8))


def test_the_spoiler_spoils_one_layer():
    """A control: without it the same runs end well."""
    result = train(small(steps=2, weight_cast="forward"))
    assert result.stopped == "done"
    assert issubclass(type(Run(small()).model.layers[0].mlp.down), Linear)


# ---- what the last update made ---------------------------------------------------------------------------------------


class Ruin(Hooks):
    """Weights are no numbers after the last step, whose loss was one."""

    def after_backward(self, run: Run) -> None:
        if run.step == run.config.steps - 1:
            layer = run.model.get_submodule("layers.1.attention.out")
            layer.weight.data.view(-1)[0] = float("nan")  # one is enough


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("eval_batches", [0, 1])
def test_weights_that_are_no_numbers_are_not_saved(eval_batches: int, saves: bool, tmp_path: Path):
    folder = tmp_path if saves else None
    config = small("bf16", steps=2, eval_batches=eval_batches, folder=folder, export=tmp_path / "out")
    says = "validation loss nan" if eval_batches else "weights that are no numbers"
    with pytest.raises(NonFiniteError, match=rf"step 2 .*{says}.*layers\.1\.attention\.out\.weight, the weight itself"):
        train(config, hooks=[Ruin()])
    assert not complete(tmp_path)
    assert not list((tmp_path / "out").iterdir())


def test_an_evaluation_that_is_no_number_is_replayed_as_it_was():
    """All of its batches: here the last one alone meets what overflows."""

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


def test_a_replay_takes_a_microbatch_for_its_share_of_the_step():
    """With a rate of zero weights are the same, and so is what comes back to a layer."""
    run = Run(small("bf16", steps=1, accumulate=3, optimizer=OptimizerConfig(rate=0.0, weight_decay=0.0)))
    layer, came = run.model.get_submodule("layers.1.attention.out"), list[torch.Tensor]()
    layer.register_full_backward_hook(lambda module, into, out: came.append(out[0].clone()))
    run.advance()
    run.located(run.read()[-1])
    assert len(came) == 6
    for trained, replayed in zip(came[:3], came[3:], strict=True):
        torch.testing.assert_close(replayed, trained)


def test_a_replay_draws_what_was_drawn():
    """Every microbatch of a step has draws of its own."""
    run = Run(small("nvfp4", steps=2, accumulate=3))
    ticks: list[int] = []
    layer = next(each for each in run.model.modules() if isinstance(each, Linear))

    def note(module: torch.nn.Module, args: object) -> None:
        assert layer.rng is not None
        ticks.append(int(layer.rng[1]))

    layer.register_forward_pre_hook(note)
    run.advance()
    run.advance()
    run.located(run.read()[-1])
    assert ticks == [0, 1, 2, 3, 4, 5, 3, 4, 5]
