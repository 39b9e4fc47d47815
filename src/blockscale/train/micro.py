"""Forward and backward of one microbatch: eager, compiled block by block, or captured as a CUDA graph.

A captured microbatch reads its sequences from one buffer and accumulates gradients into `.grad` and the loss into one
scalar, so that a step only copies the next sequences between replays. The replay is correct because weights, weight
casts that are refreshed in place, ticks of stochastic rounding and loads of experts keep their storage. A recipe that
changes at a step is captured again.

With several microbatches a step, wgrad of quantized layers accumulates into `.grad` in its epilogue. Autograd would
write each gradient, read it and the sum, and write the sum, with two roundings.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..models import Transformer
from ..nn import GroupedLinear, Linear
from .config import Compile

# microbatches before a capture: allocations, autotuning and our call recordings are then over
WARM_UP = 4
# all blocks share one code object, and each may need its own graph: names and shared casts are constants in it
_GRAPHS_PER_BLOCK = 4


def forget_compiled() -> None:
    """Drop compiled graphs and the weights of an earlier run that they hold in reference cycles. Those weights would
    take memory, and count in the peak, during this run."""
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    gc.collect()


def compile_(model: Transformer, how: Compile) -> None:
    """Compile each block as one graph, and the loss; in place, so that module and parameter names stay."""
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
    """Accumulates gradients of loss / accumulate in `.grad`, and loss / accumulate in `loss`; `clear` resets both."""

    def __init__(self, model: Transformer, accumulate: int) -> None:
        self.model, self.accumulate = model, accumulate
        device = model.embedding.weight.device
        self.loss = torch.zeros((), device=device)
        # with one microbatch there is nothing to accumulate: the gradient is wgrad's output
        self.summed = _accumulate_in_wgrad(model) if accumulate > 1 else []

    def clear(self) -> None:
        """Reset after a step: gradients that wgrad accumulates into are zeroed in place, others are freed."""
        self.loss.zero_()
        kept = {id(each) for each in self.summed}
        for parameter in self.model.parameters():
            if id(parameter) not in kept:
                parameter.grad = None
        _zero_gradients(self.summed)

    def __call__(self, pieces: Tensor) -> None:
        """Forward and backward of pieces [B, T + 1], on the device."""
        loss = self.model.loss(pieces) / self.accumulate
        loss.backward()
        self.loss += loss.detach()


class CapturedMicrobatch(Microbatch):
    """A microbatch as a CUDA graph. Gradients keep their storage: set them to zero in place, never to None."""

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
        """Zero the loss and all gradients in place."""
        self.loss.zero_()
        _zero_gradients(self.model.parameters())

    def _capture(self, pieces: Tensor) -> None:
        """Run the microbatch WARM_UP times on a side stream, capture it, then zero what these runs accumulated."""
        self.graph, self.pieces = None, pieces.clone()
        run = super().__call__
        running = _accumulators(self.model, self.loss)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run(self.pieces)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(self.pieces)
        # recipes change between steps only, so this is a step's first microbatch, and all accumulators were zero
        for each in running:
            each.zero_()
        self.graph = graph


def _allocate(parameters: Iterable[Tensor]) -> None:
    """Allocate zero gradients where there are none."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _accumulate_in_wgrad(model: nn.Module) -> list[Tensor]:
    """Weights of quantized layers, each with `main_grad` set to its `.grad`, which wgrad accumulates into."""
    layers = [each for each in model.modules() if isinstance(each, Linear | GroupedLinear) and each.recipe.is_quantized]
    # gradients of sharded weights are summed over ranks first
    weights = [each.weight for each in layers if each.weight.requires_grad and not isinstance(each.weight, DTensor)]
    _allocate(weights)
    for weight in weights:
        weight.main_grad = weight.grad  # pyright: ignore[reportAttributeAccessIssue]
    return weights


def _zero_gradients(parameters: Iterable[Tensor]) -> None:
    gradients = [each.grad for each in parameters if each.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _accumulators(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Tensors that a microbatch accumulates into: loss, gradients and loads of experts."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    loads = [load for module in model.modules() if isinstance(load := getattr(module, "load", None), Tensor)]
    return [loss, *gradients, *loads]
