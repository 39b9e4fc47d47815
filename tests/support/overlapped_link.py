"""Cases of the link that moves rows beside products (`overlapped.py`): right values, removed waits, errors, leaks."""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from blockscale.distributed import column_parallel
from blockscale.distributed.collectives import ranks_of
from blockscale.distributed.failures import timeout_of
from blockscale.distributed.overlap import link as link_module
from blockscale.distributed.overlap.link import Gathering, Link, Summation
from blockscale.errors import BlockscaleError
from support.rank_program import Case
from support.tokens_sharded import world


def said_by(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Errors of calls as text."""
    found: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "no error"
        except BlockscaleError as error:
            found[name] = str(error)
    return found


def device() -> torch.device:
    """Device of this process: the CPU, or the one GPU that all ranks share."""
    return torch.device("cuda", 0) if os.environ.get("OVERLAP_ON") == "cuda" else torch.device("cpu")


def new_link() -> Link:
    """A link of its own of all ranks."""
    assert dist.group.WORLD is not None
    return Link(dist.group.WORLD, device())


def pause(seconds: float) -> None:
    """Delay what this thread does next, or what the current stream of the GPU does."""
    if device().type == "cuda":
        torch.cuda._sleep(int(seconds * 1.9e9))  # cycles
    else:
        time.sleep(seconds)


def settle() -> None:
    """Wait for the GPU."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def rows_of(call: int, rank: int, to: int = 0) -> Tensor:
    """Random rows, whose number and length depend on the call alone. On a GPU there are more, to take time."""
    return _rows(call % 50, rank, to)


@functools.cache
def _rows(call: int, rank: int, to: int) -> Tensor:
    rng = torch.Generator().manual_seed(call * 100 + rank * 10 + to)
    rows = (1 + call * 7 % 50) * (64 if device().type == "cuda" else 1)
    return torch.randn(rows, 3 + call % 5, generator=rng).bfloat16().to(device())


def gathered(link: Link, call: int) -> Tensor:
    """Values that are wrong after a gather. The host does not wait for the GPU."""
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    gathering = link.gather([rows_of(call, link.rank), rows_of(call, link.rank).float()])
    for source in gathering.arrivals():
        (span,) = gathering.spans(source)
        for whole in gathering.whole:
            wrong += (whole[span] != rows_of(call, source)).sum()
    return wrong


def summed(link: Link, call: int) -> Tensor:
    """Values that are wrong after a sum."""
    rows, columns = rows_of(call, 0).shape
    total = link.sum((rows, columns), torch.bfloat16)
    for owner in total.destinations():
        total.push(owner, rows_of(call, link.rank, owner))
    want = functools.reduce(torch.add, (rows_of(call, source, link.rank).float() for source in range(link.ranks)))
    return (total.finish() != want.bfloat16()).sum()


def jittered(method: str, kind: Any, pauses: torch.Generator) -> Any:
    """A fifth of the calls of a method come up to 5 ms late."""
    real = getattr(kind, method)

    def delayed(self: Any, *args: Any) -> Any:
        if torch.rand((), generator=pauses) < 0.2:
            pause(float(torch.rand((), generator=pauses)) * 5e-3)
        return real(self, *args)

    return patch.object(kind, method, delayed)


def many_calls(calls: int) -> dict[str, int]:
    """Calls of random sizes with random pauses, whose numbers pass 2^31."""
    link = new_link()
    link.gathers = link.sums = 2**31 - calls // 2
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    with ExitStack() as stack:
        late = ("gather", Link), ("_pull", Gathering), ("_store", Summation), ("finish", Summation)
        for seed, (method, kind) in enumerate(late):  # one of them in another thread
            rng = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
            stack.enter_context(jittered(method, kind, rng))
        for call in range(calls):
            wrong += gathered(link, call) + summed(link, call)
        settle()
    link.check()
    return {"wrong": int(wrong), "calls": link.gathers - 2**31}


def broken_off() -> dict[str, int]:
    """Gathers whose rows are not taken, and sums that are not finished, between whole ones."""
    link, rng = new_link(), torch.Generator().manual_seed(0)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    for call in range(80):
        what = float(torch.rand((), generator=rng))
        if what < 0.2:
            gathering = link.gather([rows_of(call, link.rank)])
            next(gathering.arrivals())
            del gathering
        elif what < 0.5:
            total = link.sum((rows_of(call, 0).shape[0], 3 + call % 5), torch.bfloat16)
            for owner in total.destinations()[: 1 if what < 0.3 else None]:
                total.push(owner, rows_of(call, link.rank, owner))
            del total
        else:
            wrong += gathered(link, call) + summed(link, call)
    settle()
    link.check()
    dist.barrier()  # a gather that was not taken is still read
    return {"wrong": int(wrong), "sums": link.sums - link.gathers}


def two_streams() -> int:
    """Wrong values of calls on two streams in turn, without a sync between them."""
    streams, link = (torch.cuda.Stream(), torch.cuda.Stream()), new_link()
    wrong = [torch.zeros((), dtype=torch.int64, device=device()) for _ in streams]
    torch.cuda.synchronize()
    rows = [rows_of(call, rank, to) for call in range(50) for rank in range(link.ranks) for to in range(link.ranks)]
    torch.cuda.synchronize()
    assert rows
    for call in range(200):
        turn = call * 7 % 5 % 2
        with torch.cuda.stream(streams[turn]):
            wrong[turn] += gathered(link, call) + summed(link, call)
    torch.cuda.synchronize()
    link.check()
    return sum(map(int, wrong))


def late(method: str, kind: Any, seconds: float = 0.3, *, of_all: bool = False) -> Any:
    """The first rank, or each of them, is late at one place of a call."""
    real = getattr(kind, method)

    def delayed(self: Any, *args: Any) -> Any:
        if of_all or dist.get_rank() == 0:
            pause(seconds)
        return real(self, *args)

    return patch.object(kind, method, delayed)


# number of calls in a row, in the environment
CALLS = "OVERLAP_CALLS"
# seconds, of the group that loses a rank
TIMEOUT = 20.0
Check = Callable[[Link, int], Tensor]
# what is taken out of which calls, and what makes the first rank so late that values must be wrong without it
WITHOUT: dict[str, Callable[[], tuple[Check, Any, Any]]] = {
    "the wait of a product for its rows": lambda: (
        gathered,
        patch.object(Gathering, "_wait", lambda self, rank: None),
        late("_pull", Gathering),
    ),
    "the wait for rows to be staged": lambda: (
        gathered,
        patch.object(Gathering, "_wait_staged", lambda self, rank: None),
        late("gather", Link),
    ),
    "a second slot of rows": lambda: (
        gathered,
        patch.object(link_module, "slot_of", lambda call: 0),
        late("_pull", Gathering),
    ),
    "the wait for a part": lambda: (
        summed,
        patch.object(Summation, "_wait_arrived", lambda self, rank: None),
        late("_store", Summation),
    ),
    "a second slot of parts": lambda: (
        summed,
        patch.object(link_module, "slot_of", lambda call: 0),
        late("finish", Summation),
    ),
}


def without(name: str) -> dict[str, int]:
    """Wrong values of four calls with everything in place, and without one part of it, beside the same late rank."""
    found: dict[str, int] = {}
    for label in ("with", "without"):
        check, removed, adversary = WITHOUT[name]()
        link = new_link()
        for kind in ("gather", "sum"):  # growing is collective, and would end a rank's lead
            link.arena(kind, 1 << 20, 1).data[link.rank].fill_(0xFF)
        settle()
        dist.barrier()
        for call in range(1, 5):  # values come from the host
            for rank, to in itertools.product(range(link.ranks), repeat=2):
                rows_of(call, rank, to)
        with adversary, removed if label == "without" else nullcontext():
            found_wrong = [check(link, call) for call in range(1, 5)]
            settle()
            dist.barrier()  # copies without a wait
        wrong = torch.tensor(sum(map(int, found_wrong)))
        dist.all_reduce(wrong)
        found[label] = int(wrong)
    return found


def replayed() -> dict[str, list[int]]:
    """Wrong values around replays while copies from before still run, and the same without a slot of graphs: of gathers
    whose rows are pulled late, of graphs beside late parts of a sum that was broken off, and of all other calls."""
    from blockscale.distributed.overlap.cuda import CudaTransport  # imports Triton

    enter, found = CudaTransport.enter, dict[str, list[int]]()
    for label in ("with", "without"):
        link, graph = new_link(), torch.cuda.CUDAGraph()
        for call, rank, to in itertools.product((1, 2, 3, 4, 5, 40), range(link.ranks), range(link.ranks)):
            rows_of(call, rank, to)  # values come from the host
        wrong_rows, wrong_parts, wrong = (torch.zeros((), dtype=torch.int64, device=device()) for _ in range(3))
        pause(1e-6)  # loads
        for kind in ("gather", "sum"):  # graphs keep the memory that they were captured with when it grows
            link.arena(kind, 1 << 20, 1)
        wrong += gathered(link, 40) + summed(link, 40)
        shared = patch.object(CudaTransport, "enter", lambda self, arena: (enter(self, arena)[0], None))
        with shared if label == "without" else nullcontext():
            # the owner of a part reads it long after it came
            with torch.cuda.graph(graph), late("finish", Summation, 0.5, of_all=True):
                inside = gathered(link, 40) + summed(link, 40)
            for call in range(1, 5):
                settle()
                dist.barrier()
                with late("_pull", Gathering, 0.2, of_all=True):
                    gathering = link.gather([rows_of(call, link.rank)])
                graph.replay()
                wrong += inside
                for source in gathering.arrivals():
                    (span,) = gathering.spans(source)
                    wrong_rows += (gathering.whole[0][span] != rows_of(call, source)).sum()
                settle()
                dist.barrier()
                rows, columns = rows_of(call, 0).shape
                total = link.sum((rows, columns), torch.bfloat16)
                with late("_store", Summation, 0.2, of_all=True):
                    for owner in total.destinations():
                        total.push(owner, rows_of(call, link.rank, owner))
                graph.replay()
                wrong_parts += inside
                for _ in range(1 + call % 2):  # so that a sum that is broken off has either slot
                    wrong += summed(link, call + 1)
            settle()
            dist.barrier()
        link.check()
        of_ranks = torch.stack([wrong_rows, wrong_parts, wrong]).cpu()
        dist.all_reduce(of_ranks)
        found[label] = of_ranks.tolist()
    return found


def failing_copy() -> dict[str, Any]:
    """The error of a copy on the side stream is raised at once, and the next sum is right."""
    link, start = new_link(), time.monotonic()
    total, said = link.sum((2, 3), torch.float32), "no error"
    try:
        for owner in total.destinations():
            total.push(owner, torch.zeros(2, 3 if owner == link.rank else 4, device=device()))
        total.finish()
    except RuntimeError as error:
        said = str(error)
    return {"said": said, "seconds": time.monotonic() - start, "wrong": int(summed(link, 1))}


def kept_sums() -> bool:
    """Sums in fp32 are memory of their own: they stay as they are while later sums reuse the arena."""
    link, found = new_link(), list[Tensor]()
    for call in range(5):
        total = link.sum((4, 4), torch.float32)
        for owner in total.destinations():
            total.push(owner, torch.full((4, 4), float(call + 1), device=device()))
        found.append(total.finish())
    return all(bool((each == link.ranks * (call + 1)).all()) for call, each in enumerate(found))


def freed() -> dict[str, int]:
    """Threads and links that are left when a group has ended."""
    before = threading.active_count(), len(Link._LINKS)
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        x, weight = (torch.ones(rows, 64, device=device()) for rows in (32, 64))
        column_parallel(x, weight, group=group, recipe="mxfp8", overlap="on")
        settle()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    gc.collect()
    for _ in range(100):  # threads end by themselves
        if threading.active_count() <= before[0]:
            break
        time.sleep(0.02)
    return {"threads": threading.active_count() - before[0], "links": len(Link._LINKS) - before[1]}


def other_memory() -> str:
    """The error of all ranks if the last one does not see the others' files, as in another container."""
    link, real = Link(dist.group.WORLD), os.path.exists  # pyright: ignore[reportArgumentType]
    seen: list[str] = []

    def only_the_first(path: str) -> bool:
        seen.append(path)
        return real(path) and len(seen) == 1

    apart = patch.object(os.path, "exists", only_the_first)
    with apart if link.rank == link.ranks - 1 else nullcontext():
        return said_by({"found": lambda: link.arena("gather", 1 << 14, 1)})["found"]


def no_memory() -> str:
    """The error of all ranks if the last one gets no shared memory."""
    link = Link(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    full = patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with full if link.rank == link.ranks - 1 else nullcontext():
        try:
            link.arena("gather", 1 << 14, 1)
        except BlockscaleError as error:
            return str(error)
    return "no error"


def timeout() -> float:
    """Seconds of a group that has another timeout than its store."""
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=7))
    return timeout_of(group)


def daemons() -> list[bool]:
    """Whether side threads end with their process."""
    return sorted({each.daemon for each in threading.enumerate() if each.name == "blockscale-copies"})


def shared_link() -> bool:
    """Layers of a group share one link."""
    ranks = ranks_of(world())
    return Link.of(ranks, device()) is Link.of(ranks, device())


def lose_a_rank(rank: int, folder: str) -> None:
    """The second of two ranks is killed between two calls; the first one writes what it then finds."""
    if device().type == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    link = new_link()
    for kind in ("gather", "sum"):  # growing meets the other rank
        link.arena(kind, 1 << 20, 1)
    wrong = int(sum(gathered(link, call) + summed(link, call) for call in range(3)))
    for source in range(2):  # values come from the host, and kernels are loaded, with syncs
        rows_of(3, source)
    total = link.sum((4, 4), torch.float32)
    for owner in total.destinations():
        total.push(owner, torch.ones(4, 4, device=device()))
    wrong += int((total.finish() != 2).sum())
    settle()
    dist.barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    start, sums = time.monotonic(), list[Tensor]()

    def lost() -> None:
        gathered(link, 3)
        total = link.sum((4, 4), torch.float32)  # the host does not know yet
        for owner in total.destinations():
            total.push(owner, torch.ones(4, 4, device=device()))
        sums.append(total.finish())
        settle()
        link.check()

    said, seconds = said_by({"lost": lost}), time.monotonic() - start
    said |= said_by({"more memory": lambda: new_link().arena("gather", 1, 1)})
    is_nan = [bool(each.isnan().all()) for each in sums]
    if device().type == "cuda":  # a wait that failed closes the link
        said |= said_by({"sum": lambda: link.sum((1, 1), torch.float32), "gather": lambda: gathered(link, 4)})
    Path(folder, "0.json").write_text(json.dumps({"wrong": wrong, "said": said, "seconds": seconds, "is_nan": is_nan}))
    os._exit(0)  # its group has a rank less


def cases(ranks: int) -> Iterator[Case]:
    on_gpu = device().type == "cuda"
    # four processes take turns on a GPU, and a call needs all of them
    calls = (1000 if ranks == 2 else 400) if on_gpu else 200
    yield "many calls", functools.partial(many_calls, int(os.environ.get(CALLS, calls)))
    yield "broken off", broken_off
    if on_gpu:
        yield "two streams", two_streams
        if ranks == 2:
            yield "replayed", replayed
    if ranks == 2:
        yield "failing copy", failing_copy
        yield "kept sums", kept_sums
        yield "freed", freed
        yield "shared link", shared_link
        if not on_gpu:
            yield "no memory", no_memory
            yield "other memory", other_memory
            yield "daemons", daemons
            yield "timeout", timeout
        for name in WITHOUT:
            yield f"without {name}", functools.partial(without, name)
