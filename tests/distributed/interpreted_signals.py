"""Signals and waits of GPUs in Triton's interpreter: alone, and below a link of two CPU processes.

    TRITON_INTERPRET=1 python tests/distributed/interpreted_signals.py

Prints `checks calls wrong failed`: checks that hold, calls of the link between random pauses, values of them that are
wrong, and checks that fail.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

assert os.environ.get("TRITON_INTERPRET") == "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.multiprocessing import start_processes  # noqa: E402

from blockscale.distributed.overlap import cuda  # noqa: E402
from blockscale.distributed.overlap import link as link_module  # noqa: E402
from blockscale.distributed.overlap.arena import HEADER  # noqa: E402
from blockscale.distributed.overlap.link import Link  # noqa: E402
from blockscale.errors import RankError  # noqa: E402
from support.overlapped_link import gathered, rows_of, summed  # noqa: E402
from support.signal_checks import checks  # noqa: E402

CALLS = 40


class Inline:
    """A side stream that the main one runs: one thread interprets.  is_late: calls outside graphs copy when they are
    joined, or at `end`."""

    def __init__(self, device: torch.device) -> None:
        self.is_late, self._late = False, list[Callable[[], None]]()

    def run(self, copy: Callable[[], None], uses: Sequence[Tensor] = ()) -> None:
        if self.is_late and not capturing:
            self._late.append(copy)
        else:
            copy()

    def join(self, copy: None) -> None:
        if not capturing:  # a graph waits for copies of its own alone
            self.end()

    def end(self) -> None:
        while self._late:
            self._late.pop(0)()


class Files:
    """Symmetric memory of CPU processes: files that all of them map."""

    def __init__(self, folder: str, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks, self.count = folder, rank, ranks, 0
        self.sizes: list[int] = []

    def _map(self, rank: int, size: int) -> Tensor:
        return torch.from_file(f"{self.folder}/{self.count}-{rank}", shared=True, size=size, dtype=torch.uint8)

    def empty(self, size: int, device: torch.device) -> Tensor:
        self.count += 1
        self.sizes.append(size)
        Path(self.folder, f"{self.count}-{self.rank}").write_bytes(b"\xff" * size)
        return self._map(self.rank, size)

    def rendezvous(self, own: Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        dist.barrier(group)
        maps = [self._map(rank, own.numel()) for rank in range(self.ranks)]

        def get_buffer(rank: int, sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
            found = maps[rank].view(dtype)
            return found[offset : offset + math.prod(sizes)].view(sizes)

        # `own` is mapped twice
        return SimpleNamespace(get_buffer=get_buffer, buffer_ptrs=[own.data_ptr()] * self.ranks)


capturing = False  # calls count as on a GPU in a graph, and run at once


@contextmanager
def on_the_cpu(memory: Files, limit: float) -> Generator[None]:
    """Context in which a CUDA transport has CPU tensors."""
    with ExitStack() as stack:
        for where, name, instead in (
            (cuda, "symm_mem", memory),
            (cuda, "symmetric_buffer", memory.empty),
            (cuda, "CudaSide", Inline),
            (cuda, "timeout_of", lambda group: limit),
            (torch.cuda, "synchronize", lambda device: None),
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "current_stream", lambda device: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: capturing),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=memory.rank, name="")),
            (link_module, "transport_of", cuda.CudaTransport),
        ):
            stack.enter_context(patch.object(where, name, instead))
        yield


def beside_late_work(link: Link) -> list[int]:
    """Wrong values of a gather whose rows are copied after a replay, of a graph in which parts of a sum that was broken
    off come last, and of all other calls."""
    side: Any = link.side
    wrong_rows, wrong_parts, wrong = (torch.zeros((), dtype=torch.int64) for _ in range(3))
    wrong += gathered(link, 40) + summed(link, 40)  # makes arenas
    before, send = copy.copy(link), cuda.CountedArena.signal

    def replay(call: Callable[[Link, int], Tensor]) -> Tensor:
        """A graph of one call, captured before all other calls, which see nothing of it."""
        global capturing
        capturing = True
        found = call(copy.copy(before), 40)
        capturing = False
        return found

    def send_late(self: cuda.CountedArena, *args: Any) -> None:
        """Copies that are late come before the flag of a part."""
        side.end()
        send(self, *args)

    wrong += replay(gathered) + replay(summed)
    for call in range(4):
        side.is_late = True
        gathering = link.gather([rows_of(call, link.rank)])
        wrong += replay(gathered)
        for source in gathering.arrivals():
            (span,) = gathering.spans(source)
            wrong_rows += (gathering.whole[0][span] != rows_of(call, source)).sum()
        rows, columns = rows_of(call, 0).shape
        total = link.sum((rows, columns), torch.bfloat16)
        for owner in total.destinations():
            total.push(owner, rows_of(call, link.rank, owner))
        with patch.object(cuda.CountedArena, "signal", send_late):
            wrong_parts += replay(summed)
        side.is_late = False
        wrong += summed(link, call + 1)
    link.check()
    return [int(each) for each in (wrong_rows, wrong_parts, wrong)]


ENTER = cuda.CudaTransport.enter


def enter_with_alternating_slots(self: cuda.CudaTransport, arena: Any) -> Any:
    """Calls of graphs and other calls share both slots."""
    return ENTER(self, arena)[0], None


def run(rank: int, folder: str) -> None:
    """A rank of the link; both are late at times, and the second one makes a call less."""
    global capturing
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    pauses, wrong, said, memory = torch.Generator().manual_seed(rank), 0, "", Files(folder, rank, 2)
    with on_the_cpu(memory, 1e7):
        link = Link(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        link.gathers = link.sums = 2**31 - CALLS // 2
        for call in range(CALLS):
            if torch.rand((), generator=pauses) < 0.3:
                time.sleep(float(torch.rand((), generator=pauses)) * 0.03)
            if call == CALLS // 2:  # arenas grow
                link.arena("gather", 1 << 17, link.gathers + 1)
            capturing = call > CALLS // 4 and call % 3 == 0
            wrong += gathered(link, call) + summed(link, call)
        capturing = False
        kept = link._transport._captured
        assert [each.size for each in kept] == [1 << 16, 1 << 16, 1 << 18], "graphs copy through arenas that grew"
        link.check()
    assert memory.sizes == [HEADER + (1 << 16)] * 2 + [HEADER + (1 << 18)]
    with on_the_cpu(memory, 1e7):
        apart = beside_late_work(Link(dist.group.WORLD))  # pyright: ignore[reportArgumentType]
        with patch.object(cuda.CudaTransport, "enter", enter_with_alternating_slots):
            shared = beside_late_work(Link(dist.group.WORLD))  # pyright: ignore[reportArgumentType]
    with on_the_cpu(memory, 100):
        link = Link(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        link.arena("gather", 1, 1)
        if rank == 0:
            list(link.gather([torch.ones(1, 1)]).arrivals())
            for act in (link.check, lambda: link.sum((1, 1), torch.float32)):
                try:
                    act()
                except RankError as error:
                    said += str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps([2 * CALLS, int(wrong), said, apart, shared]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    torch.set_num_threads(1)
    found = checks()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run, (folder,), 2, start_method="fork")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    lost = "no word from rank 1, which was killed, hangs or makes other calls, while rank 0 waits in overlapped call 1"
    found["a rank that makes no call"] = ranks[0][2].count(lost) == 2 and not ranks[1][2]
    found["graphs beside late work"] = all(each[3] == [0, 0, 0] for each in ranks)
    for part, name in enumerate(("rows", "parts")):
        found[f"a slot of graphs beside late {name}"] = all(each[4][part] > 0 for each in ranks)
    failed = [name for name, holds in found.items() if not holds]
    print(sum(found.values()), sum(each[0] for each in ranks), sum(each[1] for each in ranks), *failed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
