"""What tests of weights that are cast once per optimizer step share: a model, its training, who counts casts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.autograd import weights
from blockscale.nn import Linear
from support.products import assert_same_bits

FORMATS = ["fp8_blockwise", "mxfp8", "nvfp4"]
STEPS, MICROBATCHES, TOKENS = 3, 2, 24
SIZES = frozenset({(48, 64), (32, 48), (48, 48)})  # of all weights here, and of nothing else
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
    "for-loop": lambda params: AdamW(params, lr=0.01, foreach=False),
    "sgd": lambda params: SGD(params, lr=0.5, momentum=0.9),
    "sgd fused": lambda params: SGD(params, lr=0.5, fused=True),
}


class Calls(TorchDispatchMode):
    """Counts our casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "blockscale" and "quantize" in name:
            source = args[{"requantize_": 3, "requantize_both_": 6}.get(name, 0)]
            self.found[name] += tuple(source.shape) in SIZES
        return func(*args, **(kwargs or {}))

    @property
    def casts(self) -> int:
        return sum(self.found.values())


def build(weight_cast: str, recipe: str = "fp8_blockwise", **changes: Any) -> nn.Sequential:
    """The same model every time: 64 -> 48 -> 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    chosen = bs.get_recipe(recipe).replace(weight_cast=weight_cast, **changes)
    bs.quantize_(model, chosen, lambda module, name: True)
    return model


def shared(layer: nn.Module) -> weights.SharedWeight:
    found = layer.shared_weight
    assert isinstance(found, weights.SharedWeight)
    return found


def is_open(model: nn.Module) -> bool:
    return any(each.is_open for *_, each in weights.shared_weights(model))


def batch(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    return torch.randn(TOKENS, 64, generator=generator)


def accumulate(model: Callable[[Tensor], Tensor], step: int = 0, microbatches: int = MICROBATCHES) -> None:
    for each in range(microbatches):
        model(batch(step, each)).square().mean().backward()


def train(model: nn.Module, *optimizers: Optimizer, steps: int = STEPS, microbatches: int = MICROBATCHES) -> None:
    for step in range(steps):
        accumulate(model, step, microbatches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_same_weights(got: nn.Module, want: nn.Module) -> None:
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, value in want.state_dict().items():
        assert_same_bits(got.state_dict()[name], value)


def assert_fresh(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> None:
    """A forward and its gradients are those of a model with these weights that shares nothing."""
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if isinstance(layer, Linear):
            layer.apply_recipe(layer.recipe_now.replace(weight_cast="forward"), name=layer.name, rng=layer.rng)
    results: list[list[Tensor]] = []
    for each in (call or model, plain):
        x = batch(9, 9).to(next(model.parameters()).dtype).requires_grad_()
        y = each(x)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        results.append([y, x.grad])
    model.zero_grad()
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)
