"""Cases of the link that moves rows beside products (`overlapped.py`): right values, removed waits, errors, leaks."""

from __future__ import annotations

import errno
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
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


def rows_of(call: int, rank: int, to: int = 0) -> Tensor:
    """Random rows, whose number and length depend on the call alone."""
    rng = torch.Generator().manual_seed(call * 100 + rank * 10 + to)
    return torch.randn(1 + call * 7 % 50, 3 + call % 5, generator=rng).bfloat16()


def gathered(link: Link, call: int) -> int:
    """Values that are wrong after a gather."""
    wrong = 0
    gathering = link.gather([rows_of(call, link.rank), rows_of(call, link.rank).float()])
    for source in gathering.arrivals():
        (span,) = gathering.spans(source)
        wrong += sum(int((whole[span] != rows_of(call, source)).sum()) for whole in gathering.whole)
    return wrong


def summed(link: Link, call: int) -> int:
    """Values that are wrong after a sum."""
    rows, columns = rows_of(call, 0).shape
    total = link.sum((rows, columns), torch.bfloat16)
    for owner in total.destinations():
        total.push(owner, rows_of(call, link.rank, owner))
    want = functools.reduce(torch.add, (rows_of(call, source, link.rank).float() for source in range(link.ranks)))
    return int((total.finish() != want.bfloat16()).sum())


def many_calls() -> dict[str, int]:
    """Calls of random sizes with random pauses, whose numbers pass 2^31."""
    link = Link(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    link.gathers = link.sums = 2**31 - 100
    pauses = torch.Generator().manual_seed(dist.get_rank())
    wrong = 0
    for call in range(200):
        if torch.rand((), generator=pauses) < 0.2:
            time.sleep(float(torch.rand((), generator=pauses)) * 5e-3)
        wrong += gathered(link, call) + summed(link, call)
    return {"wrong": wrong, "calls": link.gathers - 2**31}


def late(method: str, kind: Any, seconds: float = 0.3) -> Any:
    """The first rank is late at one place of a call."""
    real = getattr(kind, method)

    def delayed(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(seconds)
        return real(self, *args)

    return patch.object(kind, method, delayed)


Check = Callable[[Link, int], int]
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
        link = Link(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        for kind in ("gather", "sum"):  # growing is collective, and would end a rank's lead
            link.arena(kind, 1 << 15, 1)
        with adversary, removed if label == "without" else nullcontext():
            wrong = torch.tensor(sum(check(link, call) for call in range(1, 5)))
            dist.barrier()  # copies without a wait
        dist.all_reduce(wrong)
        found[label] = int(wrong)
    return found


def failing_copy() -> dict[str, Any]:
    """The error of a copy on the side stream is raised at once, and the next sum is right."""
    link, start = Link(dist.group.WORLD), time.monotonic()  # pyright: ignore[reportArgumentType]
    total, said = link.sum((2, 3), torch.float32), "no error"
    for owner in total.destinations():
        total.push(owner, torch.zeros(2, 3 if owner == link.rank else 4))
    try:
        total.finish()
    except RuntimeError as error:
        said = str(error)
    return {"said": said, "seconds": time.monotonic() - start, "wrong": summed(link, 1)}


def kept_sums() -> bool:
    """Sums in fp32 are memory of their own: they stay as they are while later sums reuse the arena."""
    link, found = Link(dist.group.WORLD), list[Tensor]()  # pyright: ignore[reportArgumentType]
    for call in range(5):
        total = link.sum((4, 4), torch.float32)
        for owner in total.destinations():
            total.push(owner, torch.full((4, 4), float(call + 1)))
        found.append(total.finish())
    return all(bool((each == link.ranks * (call + 1)).all()) for call, each in enumerate(found))


def freed() -> dict[str, int]:
    """Threads and links that are left when a group has ended."""
    before = threading.active_count(), len(Link._LINKS)
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        column_parallel(torch.ones(32, 64), torch.ones(64, 64), group=group, recipe="mxfp8", overlap="on")
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
    return Link.of(ranks) is Link.of(ranks)


def cases(ranks: int) -> Iterator[Case]:
    yield "many calls", many_calls
    if ranks == 2:
        yield "failing copy", failing_copy
        yield "no memory", no_memory
        yield "other memory", other_memory
        yield "kept sums", kept_sums
        yield "freed", freed
        yield "daemons", daemons
        yield "timeout", timeout
        yield "shared link", shared_link
        for name in WITHOUT:
            yield f"without {name}", functools.partial(without, name)
