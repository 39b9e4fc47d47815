"""`GraphedCall`: a function of tensors as a CUDA graph, whose launches cost the host one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 2


class GraphedCall:
    """A function of GPU tensors, captured at its first call and replayed from then on.

    The function always gets the same shapes, does not synchronize with the host, and may be repeated: what it writes
    besides its result is the same each time. Results are copies, [...] as the function returns them. What it reads by
    reference, such as weights, keeps its storage; later values are seen.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.inputs: tuple[Tensor, ...] = ()
        self.output: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.graph is None:
            self._capture(inputs)
        assert self.graph is not None
        assert self.output is not None
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.output.clone()

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(each.clone() for each in inputs)
        device = inputs[0].device
        with torch.cuda.device(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self.function(*self.inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.output = self.function(*self.inputs)
        self.graph = graph
