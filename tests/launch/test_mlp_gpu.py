"""Replayed calls of MLPs, experts, MoE layers and compiled layers on a GPU have the bytes of ordinary calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.launch import Recording
from support.products import assert_same_bits, gaussian

pytestmark = [pytest.mark.usefixtures("forgotten"), pytest.mark.gpu, pytest.mark.sm90]

STEPS, TOKENS, DIM, HIDDEN = 7, 256, 384, 512


class Experts(nn.Module):
    """Experts with groups whose ends change from step to step, as `Training.run` sets it."""

    def __init__(self, recipe: Any, bias: bool) -> None:
        super().__init__()
        self.experts = bs.nn.GroupedExperts(
            experts=4, dim=DIM, hidden=HIDDEN, bias=bias, device="cuda", dtype=torch.bfloat16, recipe=recipe
        )
        self.step = 1

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([3, 3, 17 * self.step, TOKENS - self.step], dtype=torch.int32, device="cuda")
        return self.experts(x, offs)


def swiglu(recipe: Any, bias: bool) -> nn.Module:
    return bs.nn.SwiGLU(DIM, HIDDEN, bias, "cuda", torch.bfloat16, recipe=recipe)


def mixture(recipe: Any, bias: bool) -> nn.Module:
    sizes = {"dim": DIM, "hidden": HIDDEN, "experts": 8, "top_k": 2, "shared": 256}
    return bs.nn.MoE(**sizes, bias=bias, device="cuda", dtype=torch.bfloat16, recipe=recipe)


BUILDS: dict[str, Callable[[Any, bool], nn.Module]] = {"MLP": swiglu, "experts": Experts, "mixture": mixture}


class Training:
    """A module and its optimizer."""

    def __init__(
        self,
        build: Callable[[Any, bool], nn.Module],
        weight_cast: str = "forward",
        *,
        bias: bool = False,
        recipe: str = "fp8_blockwise",
    ):
        chosen = bs.get_recipe(recipe).replace(weight_cast=weight_cast)
        torch.manual_seed(0)
        self.module = build(chosen, bias)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01, fused=True)
        if weight_cast == "step":
            bs.attach(self.optimizer, self.module)
        self.call: Callable[[Tensor], Tensor] = self.module

    def run(self, seed: int) -> list[Tensor | None]:
        """y and all gradients; the weights change."""
        x = gaussian(TOKENS, DIM, device="cuda", seed=seed).requires_grad_()
        self.optimizer.zero_grad()
        if isinstance(self.module, Experts):
            self.module.step = seed + 1
        y = self.call(x)
        y.backward(gaussian(TOKENS, DIM, device="cuda", seed=99))
        found = [y.detach(), x.grad, *(each.grad for each in self.module.parameters())]
        self.optimizer.step()
        return found


def same(one: Training, other: Training) -> None:
    """Compare training with replayed calls and without, step by step."""
    for seed in range(STEPS):
        got = one.run(seed)
        with bs.use_backend("auto"):
            assert_same_bits(got, other.run(seed))
    assert_same_bits(list(one.module.parameters()), list(other.module.parameters()))


@pytest.mark.parametrize("weight_cast", ["forward", "twice", "step"])
@pytest.mark.parametrize("name", BUILDS)
def test_replayed_calls_give_ordinary_bytes(replays: list[Recording], name: str, weight_cast: str):
    same(Training(BUILDS[name], weight_cast), Training(BUILDS[name], weight_cast))
    assert len(replays) >= STEPS


@pytest.mark.parametrize("name", BUILDS)
def test_biases_give_ordinary_bytes(name: str):
    same(Training(BUILDS[name], bias=True), Training(BUILDS[name], bias=True))


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
@pytest.mark.parametrize("name", [*BUILDS, "linear"])
def test_a_checkpointed_call_is_recomputed_by_a_replay(replays: list[Recording], name: str, recipe: str):
    """From the first step on: torch compares the shapes of saved tensors of a recorded call and of its replay."""

    def linear(recipe: Any, bias: bool) -> nn.Module:
        return bs.nn.Linear(DIM, DIM, bias, "cuda", torch.bfloat16, recipe=recipe)

    build = BUILDS.get(name, linear)
    one, other = Training(build, recipe=recipe), Training(build, recipe=recipe)
    one.call = lambda x: checkpoint(one.module, x, use_reentrant=False)  # pyright: ignore[reportReturnType]
    same(one, other)
    assert replays


@pytest.mark.parametrize("name", ["MLP", "experts"])
def test_replays_accumulate_into_main_grad(replays: list[Recording], name: str):
    one, other = Training(BUILDS[name]), Training(BUILDS[name])
    for each in (one, other):
        for weight in each.module.parameters():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
    same(one, other)
    for mine, theirs in zip(one.module.parameters(), other.module.parameters(), strict=True):
        assert_same_bits(mine.main_grad, theirs.main_grad)  # pyright: ignore[reportAttributeAccessIssue]
    assert replays


@pytest.mark.parametrize("name", BUILDS)
def test_a_forward_without_a_backward_is_replayed(replays: list[Recording], name: str):
    module = Training(BUILDS[name]).module
    with torch.no_grad():
        for seed in range(4):
            x = gaussian(TOKENS, DIM, device="cuda", seed=seed)
            got = module(x)
            with bs.use_backend("auto"):
                assert_same_bits(got, module(x))
    assert replays


@pytest.mark.parametrize("name", ["MLP", "mixture"])
def test_operators_of_compiled_code_are_replayed(replays: list[Recording], name: str):
    one, other = Training(BUILDS[name]), Training(BUILDS[name])
    one.call = torch.compile(one.module, fullgraph=True, dynamic=False, backend="aot_eager")
    same(one, other)
    assert len(replays) >= STEPS


def test_stochastic_rounding_of_a_replay_is_that_of_its_step(replays: list[Recording]):
    """The kernel reads the random state, so a replay rounds as its step does."""

    def build(recipe: Any, bias: bool) -> nn.Module:
        rng = bs.rng_state(1, device="cuda")
        return bs.nn.Linear(DIM, DIM, False, "cuda", torch.bfloat16, recipe="nvfp4", name="layer", rng=rng)

    same(Training(build), Training(build))


def test_steps_of_one_module_do_not_share_buffers():
    """Two forwards before their backwards."""
    module = swiglu("fp8_blockwise", False)
    xs = [gaussian(TOKENS, DIM, device="cuda", seed=seed).requires_grad_() for seed in range(2)]
    dy = gaussian(TOKENS, DIM, device="cuda", seed=9)
    for _ in range(5):
        module(xs[0]).backward(dy)
    for x in xs:
        x.grad = None
    ys = [module(x) for x in xs]
    for y in reversed(ys):
        y.backward(dy)
    got = [x.grad for x in xs]
    with bs.use_backend("auto"):
        for x, mine, y in zip(xs, got, ys, strict=True):
            x.grad = None
            again = module(x)
            again.backward(dy)
            assert_same_bits([y.detach(), mine], [again.detach(), x.grad])
