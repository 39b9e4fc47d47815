"""Transport of CUDA ranks: arenas in symmetric memory, a CUDA stream for copies, faults that the host reads late.

Nothing here lets the host wait for the GPU but the growth of an arena.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from ... import env
from ...errors import ShardingError, refuse
from ...roofline.ceilings import machine_of
from ..failures import error_of_waiting, first_failure, timeout_of
from ..symmetric import symmetric_buffer
from .arena import HEADER, exchanged, refuse_other_call, wrapped
from .signals import TIMED_OUT, Fault, Flags
from .sums import sum_parts
from .transport import BETWEEN_GRAPHS, IN_GRAPHS, Arena, Side

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class CudaArena:
    """Arena of CUDA ranks: a symmetric buffer of each, flags first. Making one is collective.

    No rank uses an older arena once this one is there: each has waited for its GPU before it meets the others.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, call: int, device: torch.device, fault: Fault) -> None:
        self.size, rank, ranks = size, group.rank(), group.size()
        torch.cuda.synchronize(device)
        with torch.inference_mode(False), torch.cuda.device(device):  # later calls write it in any mode
            self._own = symmetric_buffer(HEADER + size, device)
            self._own[:HEADER].view(torch.int32).fill_(wrapped(call - 1))
            torch.cuda.synchronize(device)  # before others write there
            self._handle: Any = _rendezvous(self._own, group)
            assert self._handle.buffer_ptrs[rank] == self._own.data_ptr(), "no offset, which peers could not know"
            headers = [self._handle.get_buffer(each, (HEADER // 4,), torch.int32, 0) for each in range(ranks)]
            self.data: list[Tensor] = [
                self._handle.get_buffer(each, (size,), torch.uint8, HEADER) for each in range(ranks)
            ]
        self._flags = Flags(headers, rank, fault, timeout_of(group))

    def meet(self) -> None:
        """Let the current stream wait until those of all ranks have come here."""
        self._flags.meet()

    def counted(self) -> CountedArena:
        """This arena for calls of a CUDA graph."""
        return CountedArena(self.size, self.data, self._flags)

    def signal(self, ranks: Sequence[int], call: int, digest: int) -> None:
        """Set this rank's flag at others, behind the work on the current stream."""
        self._flags.signal(ranks, call, digest)

    def wait(self, source: int, call: int, digest: int) -> None:
        """Let the current stream wait for a rank's flag, at most for the group's timeout. A failed wait is raised by
        `CudaTransport.check`."""
        self._flags.wait(source, call, digest)


class CountedArena:
    """An arena for calls of a CUDA graph, whose number is that of the last meeting."""

    def __init__(self, size: int, data: list[Tensor], flags: Flags) -> None:
        self.size, self.data, self._flags = size, data, flags

    def signal(self, ranks: Sequence[int], call: int, digest: int) -> None:
        """As `CudaArena.signal`."""
        self._flags.signal(ranks, None, digest)

    def wait(self, source: int, call: int, digest: int) -> None:
        """As `CudaArena.wait`."""
        self._flags.wait(source, None, digest)


class CudaSide:
    """Side stream of a CUDA rank. Its priority is high: a wait and a copy start while a product fills the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    def run(self, copy: Callable[[], None], uses: Sequence[Tensor] = ()) -> torch.cuda.Event:
        """Enqueue a copy behind those before it and behind the work on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            copy()
        for each in uses:
            each.record_stream(self._stream)
        done = torch.cuda.Event()
        done.record(self._stream)
        return done

    def join(self, copy: torch.cuda.Event) -> None:
        """Let the current stream wait for a copy."""
        torch.cuda.current_stream(self._device).wait_event(copy)


class CudaTransport:
    """Arenas and side stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda_side = CudaSide(device)
        self.side: Side = self._cuda_side
        self._fault = Fault.on(device)
        # of the last call, by whether it is part of a CUDA graph
        self._streams: dict[bool, torch.cuda.Stream] = {}
        # graphs copy through them: they stay when larger ones take their place
        self._captured: list[CudaArena] = []

    def arena(self, group: dist.ProcessGroup, size: int, call: int) -> Arena:
        if self.is_capturing():
            refuse(
                f"a captured CUDA graph with the first overlapped call of {size:,} bytes",
                rule="memory that ranks share is made by all of them together, which no graph repeats",
                fix="run the layer with these shapes, forward and backward, before the capture",
                error=ShardingError,
            )
        _check_gpus(_gpus(group, self._device))  # and that all are there: torch would wait for the store's timeout
        return CudaArena(group, size, call, self._device, self._fault)

    def machine(self, group: dist.ProcessGroup) -> str | None:
        names = {each.name for each in _gpus(group, self._device)}
        return machine_of(names.pop()) if len(names) == 1 else None

    def begin(self, group: dist.ProcessGroup) -> None:
        """Raise a failed wait; order this call after one on another stream."""
        self.check(group)
        current, capturing = torch.cuda.current_stream(self._device), self.is_capturing()
        last = self._streams.get(capturing)
        if last is not None and last != current and capturing == _is_capturing(last):
            current.wait_stream(last)
        self._streams[capturing] = current

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def enter(self, arena: Arena) -> tuple[Arena, int | None]:
        """The arena and the slot of a call that begins. From the first capture on all ranks meet before a call, and
        graphs have a slot of their own, where no copies of other calls still run when a graph is replayed."""
        assert isinstance(arena, CudaArena)
        capturing = self.is_capturing()
        if capturing and arena not in self._captured:
            self._captured.append(arena)
        if not self._captured:
            return arena, None
        arena.meet()
        return (arena.counted(), IN_GRAPHS) if capturing else (arena, BETWEEN_GRAPHS)

    def sum_parts(self, parts: Tensor, own: Tensor, rank: int) -> Tensor:
        return sum_parts(parts, own, rank, self._fault.poison)

    def check(self, group: dist.ProcessGroup) -> None:
        """Raise the first failed wait that the GPU has told. It stays: rows after it are not those of the ranks."""
        failure = self._fault.failure()
        if failure is None:
            return
        if failure.kind == TIMED_OUT:
            source = [dist.get_global_rank(group, failure.source)]
            raise error_of_waiting(first_failure(group), source, f"overlapped call {failure.call}")
        refuse_other_call(group.rank(), failure.source, failure.call)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class _Gpu(NamedTuple):
    """Where a rank runs.  shares: whether its process allows symmetric memory of ranks on one GPU."""

    host: str
    uuid: str
    name: str
    shares: bool


def _gpus(group: dist.ProcessGroup, device: torch.device) -> list[_Gpu]:
    """GPUs of all ranks. Collective."""
    of = torch.cuda.get_device_properties(device)
    mine = _Gpu(socket.gethostname(), str(of.uuid), of.name, env.of_others(OVERLAPPING) == "1")
    return exchanged(group, mine)


def _check_gpus(found: Sequence[_Gpu]) -> None:
    """Raise on all ranks unless they are on one host, each with a GPU of its own."""
    hosts = sorted({each.host for each in found})
    fix = 'pass a group of the GPUs of one host, or overlap="off"'
    if len(hosts) > 1:
        rule = "overlap moves rows through memory that all GPUs of a group map"
        refuse(f"ranks on {len(hosts)} hosts: {', '.join(hosts)}", rule, fix, error=ShardingError)
    if len({each.uuid for each in found}) < len(found) and not all(each.shares for each in found):
        rule = f"every rank has a GPU of its own, unless {OVERLAPPING}=1 on all ranks, for tests"
        refuse("ranks that share a GPU", rule, fix, error=ShardingError)


def _rendezvous(own: Tensor, group: dist.ProcessGroup) -> Any:
    """Symmetric memory of all ranks."""
    try:
        return symm_mem.rendezvous(own, group)
    except dist.DistError:  # another rank is gone
        raise
    except RuntimeError as error:
        what = f"no symmetric memory of {own.numel():,} bytes: {str(error).partition(chr(10))[0]}"
        rule = "overlap moves rows through memory that all GPUs of a group map"
        refuse(what, rule, 'pass a group of GPUs with peer access, or overlap="off"', error=ShardingError)
