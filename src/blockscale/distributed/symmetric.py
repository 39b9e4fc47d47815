"""Rows through symmetric memory: every rank writes its own buffer, and reads its rows from all others'.

Barriers run on the device, in the order of the stream. Buffers are made at their first use, which is collective, as
all sizes are known to all ranks.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

_SMALLEST = 1 << 16


def symmetric_buffer(size: int, device: torch.device) -> Tensor:
    """Bytes for a rendezvous, an allocation of their own.

    `symm_mem.empty` of newer torch takes them from a pool, where they may lie behind others, at an offset that is not
    the same on all ranks and that `get_buffer` does not add.
    """
    return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


class SymmetricLink:
    """A buffer of each rank of a group that all of them read. It grows when a call needs more."""

    _LINKS: ClassVar[dict[tuple[str, torch.device], SymmetricLink]] = {}

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.buffer: Tensor | None = None
        self.handle: Any = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> SymmetricLink:
        """The link of a group on a device, which all layers share: their calls follow one another on a stream."""
        key = (group.group_name, device)
        found = cls._LINKS.get(key)
        if found is None:
            found = cls._LINKS[key] = SymmetricLink(group, device)
        return found

    def gather(self, values: Tensor) -> Tensor:
        """[n] of each rank -> [ranks, n]."""
        mine = self._own(values.numel() * values.element_size())
        mine.copy_(values.contiguous().view(torch.uint8))
        self.handle.barrier()
        parts = [self._peer(rank, 0, mine.numel()) for rank in range(self.ranks)]
        found = torch.stack(parts).view(values.dtype)
        self.handle.barrier()
        return found

    def swap(self, rows: Tensor) -> Tensor:
        """Rows [ranks * n, N] by destination -> rows [ranks * n, N] by source."""
        raw = rows.contiguous().view(torch.uint8).flatten()
        self._own(raw.numel()).copy_(raw)
        self.handle.barrier()
        each = raw.numel() // self.ranks
        found = torch.cat([self._peer(rank, self.rank * each, each) for rank in range(self.ranks)])
        self.handle.barrier()
        return found.view(rows.dtype).view(rows.shape)

    def _own(self, size: int) -> Tensor:
        """The first bytes of this rank's buffer."""
        if self.buffer is None or self.buffer.numel() < size:
            torch.cuda.synchronize(self.device)  # peers may still read the old one
            self.buffer = symmetric_buffer(max(_SMALLEST, 1 << (size - 1).bit_length()), self.device)
            self.handle = symm_mem.rendezvous(self.buffer, self.group)
        return self.buffer[:size]

    def _peer(self, rank: int, first: int, size: int) -> Tensor:
        """Bytes of a rank's buffer."""
        return self.handle.get_buffer(rank, (size,), torch.uint8, first)
