"""Forward and backward of one microbatch: as it is, compiled block by block, or captured once and replayed.

A captured microbatch reads its pieces from one buffer, adds its gradients into `.grad` and its loss into one number, so
all that a step does between replays is a copy of the next pieces. Weights that the optimizer moves, casts of weights
that are refreshed in place, ticks of stochastic rounding and loads of experts all keep their storage, which is what
makes the replay right. Recipes that change at a step are captured again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .config import Compile
from .model import Transformer

# what a stream has to have seen before it can be captured: allocations, autotuning, replays of our own
WARM_UP = 4
# blocks have one piece of code, and each may need a graph of its own: names and shared casts are constants there
_GRAPHS_PER_BLOCK = 4


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
    """Adds gradients of loss / accumulate to `.grad`, and loss / accumulate to `loss`, which the loop sets to zero."""

    def __init__(self, model: Transformer, accumulate: int) -> None:
        self.model, self.accumulate = model, accumulate
        device = model.embedding.weight.device
        self.loss = torch.zeros((), device=device)

    def __call__(self, pieces: Tensor) -> None:
        """pieces [B, T + 1], on the device."""
        loss = self.model.loss(pieces) / self.accumulate
        loss.backward()
        self.loss += loss.detach()


class CapturedMicrobatch(Microbatch):
    """The same as a CUDA graph. Gradients keep their storage: set them to zero in place, never to None."""

    def __init__(self, model: Transformer, accumulate: int) -> None:
        super().__init__(model, accumulate)
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


def _running(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """What a microbatch adds to: gradients, loads and the loss. Gradients have to be there before."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    loads = [load for module in model.modules() if isinstance(load := getattr(module, "load", None), Tensor)]
    return [loss, *gradients, *loads]
