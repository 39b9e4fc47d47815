"""Replayed calls of layers on a GPU have the bytes of ordinary calls, in graphs, threads and profilers too."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.launch import Recording, recording
from support.products import assert_same_bits, gaussian

pytestmark = pytest.mark.usefixtures("forgotten")

STEPS = 8


@pytest.fixture
def layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are not recorded, so that only calls of layers are replayed."""
    monkeypatch.setattr(recording, "may_replay", lambda tensor: False)


class Training:
    """A layer, its optimizer and an input for each step."""

    def __init__(self, m: int | tuple[int, ...], n: int, k: int, *, bias: bool = False, weight_cast: str = "forward"):
        recipe = bs.get_recipe("fp8_blockwise").replace(weight_cast=weight_cast)
        torch.manual_seed(0)
        self.layer = bs.nn.Linear(k, n, bias, "cuda", torch.bfloat16, recipe=recipe)
        lead = (m,) if isinstance(m, int) else m
        self.xs = [gaussian(*lead, k, device="cuda", seed=i) for i in range(STEPS)]
        self.dy = gaussian(*lead, n, device="cuda", seed=99)
        self.x = self.xs[0].clone().requires_grad_()
        parameters = self.layer.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)
        if weight_cast == "step":
            bs.attach(self.optimizer, self.layer)

    def step(self) -> list[Tensor | None]:
        """y and all gradients; the weights change."""
        self.x.grad = None
        self.optimizer.zero_grad()
        y = self.layer(self.x)
        y.backward(self.dy)
        found = [y.detach(), self.x.grad, *(param.grad for param in self.layer.parameters())]
        self.optimizer.step()
        return found

    def run(self, x: Tensor) -> list[Tensor | None]:
        with torch.no_grad():
            self.x.copy_(x)
        return [None if each is None else each.clone() for each in self.step()]


def same_training(*sizes: Any, **named: Any) -> None:
    """Compare training with replayed calls and without, step by step."""
    one, other = Training(*sizes, **named), Training(*sizes, **named)
    for x in one.xs:
        got = one.run(x)
        with bs.use_backend("auto"):
            want = other.run(x)
        assert_same_bits(got, want)
    assert_same_bits(list(one.layer.parameters()), list(other.layer.parameters()))


SIZES = (256, 512, 384)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.usefixtures("layers_alone")
@pytest.mark.parametrize("weight_cast", ["forward", "twice", "step"])
def test_replayed_calls_give_ordinary_bytes(replays: list[Recording], weight_cast: str):
    same_training(*SIZES, weight_cast=weight_cast)
    # plain, recorded, then replayed: the forward from the third step on, the backward two steps later
    assert len(replays) >= (STEPS - 3) + (STEPS - 5)
    assert len(set(replays)) == 2


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "sizes",
    [(37, 200, 72), (1, 17, 33), (0, 64, 64), (100, 512, 384), ((2, 128), 512, 384), ((3, 5, 7), 520, 136)],
    ids=str,
)
def test_sizes_of_other_kernels_give_ordinary_bytes(sizes: Any, bias: bool):
    same_training(*sizes, bias=bias)


@pytest.mark.gpu
@pytest.mark.sm90
def test_a_forward_without_a_backward_is_replayed(replays: list[Recording]):
    layer = Training(*SIZES, bias=True).layer
    with torch.no_grad():
        for seed in range(5):
            x = gaussian(256, 384, device="cuda", seed=seed)
            got = layer(x)
            with bs.use_backend("auto"):
                assert_same_bits(got, layer(x))
    assert len(replays) >= 2


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_accumulate_into_main_grad(replays: list[Recording], dtype: torch.dtype):
    one, other = Training(*SIZES), Training(*SIZES)
    for each in (one, other):
        each.layer.weight.main_grad = torch.zeros(512, 384, dtype=dtype, device="cuda")  # pyright: ignore[reportAttributeAccessIssue]
    for x in one.xs:
        got = one.run(x)
        with bs.use_backend("auto"):
            assert_same_bits(got, other.run(x))
        assert_same_bits(one.layer.weight.main_grad, other.layer.weight.main_grad)  # pyright: ignore[reportAttributeAccessIssue]
    assert replays


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after steps of the default stream"])
@pytest.mark.parametrize("weight_cast", ["forward", "step"])
def test_a_captured_training_step_is_an_eager_one(replays: list[Recording], weight_cast: str, trained: bool):
    """Forward, backward, optimizer and the refresh of shared casts in one CUDA graph. After steps on the default stream
    a capture fails while anything keeps their autograd graph alive: its leaves would have to wait for that stream."""
    warm = 6
    one, other = (
        Training(*SIZES, bias=True, weight_cast=weight_cast),
        Training(*SIZES, bias=True, weight_cast=weight_cast),
    )
    if trained:
        for each in (one, other):
            for _ in range(3):
                each.run(each.xs[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            one.run(one.xs[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    before = len(replays)
    with torch.cuda.graph(graph):
        found = one.step()
    assert len(replays) > before
    with bs.use_backend("auto"):
        for _ in range(warm):
            other.run(other.xs[0])
    for x in one.xs:
        with torch.no_grad():
            one.x.copy_(x)
        graph.replay()
        with bs.use_backend("auto"):
            want = other.run(x)
        assert_same_bits(found, want)
        assert_same_bits(list(one.layer.parameters()), list(other.layer.parameters()))


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("own_stream", [False, True], ids=["one stream", "own stream"])
def test_a_second_thread_replays_too(replays: list[Recording], own_stream: bool):
    same_training(*SIZES)
    before, failures = len(replays), []

    def work() -> None:
        try:
            stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                same_training(*SIZES)
        except BaseException as failure:  # an exception in a thread is not raised in the test
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    assert len(replays) > before


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.usefixtures("layers_alone")
def test_a_profiler_sees_operators_and_the_same_bytes(replays: list[Recording]):
    one, other = Training(*SIZES), Training(*SIZES)
    for x in one.xs[:6]:
        one.run(x)
        with bs.use_backend("auto"):
            other.run(x)
    before = len(replays)
    with torch.profiler.profile() as profile:
        got = one.run(one.xs[6])
    assert len(replays) == before
    with bs.use_backend("auto"):
        assert_same_bits(got, other.run(one.xs[6]))
    assert {"blockscale::quantize_both", "blockscale::scaled_mm"} <= {event.key for event in profile.key_averages()}
    got = one.run(one.xs[7])
    assert len(replays) == before + 2
    with bs.use_backend("auto"):
        assert_same_bits(got, other.run(one.xs[7]))


@pytest.mark.gpu
@pytest.mark.sm90
def test_operators_are_replayed_under_a_profiler(replays: list[Recording]):
    one, other = Training(*SIZES), Training(*SIZES)
    for at, x in enumerate(one.xs):
        before = len(replays)
        with torch.profiler.profile():
            got = one.run(x)
        # the first call compiles, the second is recorded
        assert at > 1 or len(replays) == before
        # the casts and products of a forward and a backward
        assert at < 4 or len(replays) >= before + 5
        with bs.use_backend("auto"):
            assert_same_bits(got, other.run(x))
