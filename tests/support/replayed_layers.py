"""Print how a forward and a backward of each layer start kernels on a stand-in for sm_90: through Triton, or replayed.

The CPU stands for an H200, as in `host_files.py`: tensors say that they are on a GPU, a launch does nothing, and the
checks of index values, which the host makes on the CPU alone, are left out. A process of its own, since it replaces
parts of torch and Triton.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

import blockscale as bs
import blockscale.nn
from blockscale import hardware
from blockscale.hardware import Capability
from blockscale.launch import recording

STARTED = {"through Triton": 0, "replayed": 0}


class Driver:
    """Driver without a GPU."""

    def get_current_stream(self, device: int) -> int:
        return 0


class Kernel:
    """A compiled kernel whose launch does nothing."""

    function, packed_metadata = 0, ()

    def run(self, *arguments: object) -> None:
        STARTED["replayed"] += 1


def start(self: Any, *args: Any, **named: Any) -> Kernel:
    STARTED["through Triton"] += 1
    return Kernel()


def stand_in() -> None:
    """Replace what asks for a GPU."""
    hardware._KNOWN[torch.device("cpu")] = hardware._Facts(Capability("cuda", 90), 132, "NVIDIA H200")
    triton.runtime.driver.set_active(Driver())
    JITFunction.run = start
    torch.Tensor.is_cuda = True
    torch.Tensor.get_device = lambda self: 0
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    for name, module in list(sys.modules.items()):
        for check in ("check_group_ends", "check_indices"):
            if name.startswith("blockscale.") and hasattr(module, check):
                setattr(module, check, lambda *args, **named: None)


def layers() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    like: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16, "recipe": "fp8_blockwise"}
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    linear = blockscale.nn.Linear(128, 128, False, **like)
    mlp = blockscale.nn.SwiGLU(128, 128, **like)
    experts = blockscale.nn.GroupedExperts(experts=4, dim=128, hidden=128, **like)
    routing = bs.sort_by_expert(torch.randint(0, 4, (64, 2)), 4)
    gate_weights = torch.rand(64, 2, requires_grad=True)
    yield "linear", lambda: linear(x)
    yield "MLP", lambda: mlp(x)
    yield "experts of sorted rows", lambda: experts(x, torch.tensor([16, 32, 48, 64], dtype=torch.int32))
    yield "experts of tokens", lambda: experts(x, routing)
    yield "experts with gate weights", lambda: experts(x, routing, gate_weights)


def replays_of(call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Result of a call, and the numbers of kernels that started through Triton and of recordings that were replayed."""
    replayed: list[int] = []
    real, before = recording.Recording.replay, STARTED["through Triton"]

    def counted(self: Any, inputs: Any) -> Any:
        replayed.append(len(self.launches))
        return real(self, inputs)

    recording.Recording.replay = counted
    result = call()
    recording.Recording.replay = real
    return result, [STARTED["through Triton"] - before, len(replayed)]


def main() -> None:
    stand_in()
    found: dict[str, list[list[int]]] = {}
    for name, layer in layers():
        for _ in range(6):  # the first calls compile and record
            y = layer()
            y.backward(torch.ones_like(y))
        y, forward = replays_of(layer)
        grad = torch.ones_like(y)
        found[name] = [forward, replays_of(lambda y=y, grad=grad: y.backward(grad))[1]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
