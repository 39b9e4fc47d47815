"""What differs between devices: the memory that ranks share, the side stream, and when the host learns of errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import SLOTS, SharedArena
from .side import CopyThread

# slots from the first capture of a CUDA graph on
BETWEEN_GRAPHS, IN_GRAPHS = range(SLOTS)


class Arena(Protocol):
    """Memory of all ranks of a group with flags.  size: bytes of a rank.  data: uint8 [size] of each rank."""

    size: int
    data: list[Tensor]

    def signal(self, ranks: Sequence[int], call: int, digest: int) -> None:
        """Set this rank's flag at others to the number of a call, with its digest, after everything written before.
        ranks: follow one another, the first one after the last."""
        ...

    def wait(self, source: int, call: int, digest: int) -> None:
        """Let what follows wait until a rank's flag has reached a call. A wait is bounded; it fails if the rank makes
        another call, which `ANY` as digest allows."""
        ...


class Side(Protocol):
    """A stream beside that of products."""

    def run(self, copy: Callable[[], None], uses: Sequence[Tensor] = ()) -> Any:
        """Start a copy after those before it and after the work before this call.  uses: tensors of it that may be
        freed before it ends."""
        ...

    def join(self, copy: Any) -> None:
        """Let what follows wait for a copy."""
        ...


class Transport(Protocol):
    """Arenas, the side stream and the sums of a link."""

    side: Side

    def arena(self, group: dist.ProcessGroup, size: int, call: int) -> Arena:
        """A new arena, made by all ranks.  call: the first one that uses it."""
        ...

    def begin(self, group: dist.ProcessGroup) -> None:
        """Start a call: raise as `check` does, and order the call after those before it."""
        ...

    def is_capturing(self) -> bool:
        """Whether calls are captured in a CUDA graph."""
        ...

    def enter(self, arena: Arena) -> tuple[Arena, int | None]:
        """The arena as a call uses it that begins, and the call's slot; None before the first capture of a CUDA graph,
        when slots alternate. A call of a graph has its number from the GPU."""
        ...

    def sum_parts(self, parts: Tensor, own: Tensor, rank: int) -> Tensor:
        """Sum over ranks [rows, N] of parts [ranks, rows, N] in the order of ranks, in fp32, rounded once; NaN after a
        wait that failed and that the host has not seen.  own: in place of this rank's part. The sum is memory of its
        own: parts are written again two calls later."""
        ...

    def check(self, group: dist.ProcessGroup) -> None:
        """Raise the error of a wait that has failed and that the host has not seen."""
        ...

    def machine(self, group: dist.ProcessGroup) -> str | None:
        """Short name of the machine that all ranks have, None if they differ or the model has none. Collective."""
        ...


class HostTransport:
    """CPU ranks of one host, whose waits raise where they are."""

    def __init__(self) -> None:
        self.side: Side = CopyThread()

    def arena(self, group: dist.ProcessGroup, size: int, call: int) -> Arena:
        return SharedArena(group, size, call)

    def begin(self, group: dist.ProcessGroup) -> None:
        """Calls of a host thread are in order."""

    def is_capturing(self) -> bool:
        return False

    def enter(self, arena: Arena) -> tuple[Arena, int | None]:
        return arena, None

    def sum_parts(self, parts: Tensor, own: Tensor, rank: int) -> Tensor:
        return add_parts(parts, own, rank)

    def check(self, group: dist.ProcessGroup) -> None:
        """Errors have been raised."""

    def machine(self, group: dist.ProcessGroup) -> str | None:
        """The model has no CPUs."""
        return None


def add_parts(parts: Tensor, own: Tensor, rank: int) -> Tensor:
    """`Transport.sum_parts`, a part after the other."""
    total: Tensor | None = None
    for source, part in enumerate(parts):
        part = own if source == rank else part
        total = part.to(torch.float32, copy=True) if total is None else total.add_(part)
    assert total is not None
    return total.to(parts.dtype)


def transport_of(device: torch.device) -> Transport:
    """A new transport for tensors on a device."""
    if device.type == "cpu":
        return HostTransport()
    from .cuda import CudaTransport  # imports Triton

    return CudaTransport(device)
