"""Ranks of a test: processes of one function, forked from a server that has imported what all of them need.

Importing torch, FSDP2, DTensor and what compiles takes several seconds; the server of a test worker does it once. It is
started by the first test that needs ranks and has no threads, so that its forks copy no lock. Ranks have the
environment of that time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.multiprocessing import start_processes

# modules alone that start no thread
_IMPORTED = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "blockscale.distributed",
)


def compiles() -> bool:
    """Whether this rank compiles what others run eagerly beside it: the last one, since each takes seconds for it;
    with --all every rank. For layers of blockscale.distributed see `calls_not_compared`."""
    return "ALL_TESTS" in os.environ or dist.get_rank() == dist.get_world_size() - 1


@contextmanager
def calls_not_compared() -> Iterator[None]:
    """Eager calls of layers of blockscale.distributed do not wait for the other ranks' calls, since compiled code does
    not tell them: a rank that compiles and one that does not can make the same call."""
    from blockscale.distributed import agreement

    with mock.patch.object(agreement, "_compare", return_value=None):
        yield


def start_ranks(run: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Call run(rank, *args) in a process for each rank; the error of the first that fails is raised."""
    multiprocessing.set_forkserver_preload([*_IMPORTED])
    start_processes(run, args, ranks, start_method="forkserver")
