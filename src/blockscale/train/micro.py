"""Forward and backward of one microbatch: as it is, compiled block by block, or captured once and replayed.

A captured microbatch reads its pieces from one buffer, adds its gradients into `.grad` and its loss into one number, so
all that a step does between replays is a copy of the next pieces. Weights that the optimizer moves, casts of weights
that are refreshed in place, ticks of stochastic rounding and loads of experts all keep their storage, which is what
makes the replay right. Recipes that change at a step are captured again.

Where a step has several microbatches, layers that follow a recipe add to `.grad` from within their products: autograd
would write each gradient, then read it and the sum and write the sum, and round twice.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import GroupedLinear, Linear
from .config import Compile
from .model import Transformer

# what a stream has to have seen before it can be captured: allocations, autotuning, replays of our own
WARM_UP = 4
# blocks have one piece of code, and each may need a graph of its own: names and shared casts are constants there
_GRAPHS_PER_BLOCK = 4


def forget_compiled() -> None:
    """Drop what is compiled, and the weights of an earlier run that it holds in cycles: they would still be there, and
    counted, while this run has the device."""
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    gc.collect()


def compile_(model: Transformer, how: Compile) -> None:
    """Compile each block as one graph, in place, so that names of modules and parameters stay, and the loss."""
    if how == "none":
        return
    config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    enough = _GRAPHS_PER_BLOCK * (len(model.layers) + 2)
    config.recompile_limit = max(config.recompile_limit, enough)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * enough)
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False)
    model.entropy = torch.compile(model.entropy, fullgraph=True, dynamic=False)


class Microbatch:
    """Adds gradients of loss / accumulate to `.grad`, and loss / accumulate to `loss`; `clear` forgets both."""

    def __init__(self, model: Transformer, accumulate: int) -> None:
        self.model, self.accumulate = model, accumulate
        device = model.embedding.weight.device
        self.loss = torch.zeros((), device=device)
        # of one microbatch a gradient is kept as the product wrote it, which nothing beats
        self.summed = _summed_in_place(model) if accumulate > 1 else []

    def clear(self) -> None:
        """After a step: gradients that nothing adds to in place are given back."""
        self.loss.zero_()
        kept = {id(each) for each in self.summed}
        for parameter in self.model.parameters():
            if id(parameter) not in kept:
                parameter.grad = None
        _zero_gradients(self.summed)

    def __call__(self, pieces: Tensor) -> None:
        """pieces [B, T + 1], on the device."""
        loss = self.model.loss(pieces) / self.accumulate
        loss.backward()
        self.loss += loss.detach()


class CapturedMicrobatch(Microbatch):
    """The same as a CUDA graph. Gradients keep their storage: set them to zero in place, never to None."""

    def __init__(self, model: Transformer, accumulate: int) -> None:
        super().__init__(model, accumulate)
        _allocate(model.parameters())
        self.pieces: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.recipes: list[Any] = []

    def __call__(self, pieces: Tensor) -> None:
        recipes = [getattr(module, "recipe_now", None) for module in self.model.modules()]
        if self.graph is None or self.pieces is None or self.pieces.shape != pieces.shape or recipes != self.recipes:
            self.recipes = recipes
            self._capture(pieces)
        assert self.graph is not None
        assert self.pieces is not None
        self.pieces.copy_(pieces, non_blocking=True)
        self.graph.replay()

    def clear(self) -> None:
        """In place, all of it."""
        self.loss.zero_()
        _zero_gradients(self.model.parameters())

    def _capture(self, pieces: Tensor) -> None:
        """Run it a few times beside, forget what that did, then capture."""
        self.graph, self.pieces = None, pieces.clone()
        run = super().__call__
        running = _running(self.model, self.loss)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run(self.pieces)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(self.pieces)
        # recipes change between steps only, so this is a step's first microbatch: all of it was zero before
        for each in running:
            each.zero_()
        self.graph = graph


def _allocate(parameters: Iterable[Tensor]) -> None:
    """Gradients that are there before anything is added to them."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _summed_in_place(model: nn.Module) -> list[Tensor]:
    """Weights of layers in low precision, each with its gradient as what its products add to."""
    layers = [each for each in model.modules() if isinstance(each, Linear | GroupedLinear) and each.recipe.is_quantized]
    weights = [each.weight for each in layers if each.weight.requires_grad]
    _allocate(weights)
    for weight in weights:
        weight.main_grad = weight.grad  # pyright: ignore[reportAttributeAccessIssue]
    return weights


def _zero_gradients(parameters: Iterable[Tensor]) -> None:
    gradients = [each.grad for each in parameters if each.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _running(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """What a microbatch adds to: gradients, loads and the loss."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    loads = [load for module in model.modules() if isinstance(load := getattr(module, "load", None), Tensor)]
    return [loss, *gradients, *loads]
