"""`World`: the ranks of a run, what they agree on, and sums over them. A process without torchrun is a world of one.

`join` makes the process group of a run, whose timeout bounds every wait for another rank. On CUDA it has gloo for what
the host reads, so that agreeing never waits for the device.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from .. import env
from ..errors import OptionError, RankError, message, refuse
from .failures import naming_failures

T = TypeVar("T")
# numbers the process groups of this process: each has its own keys in the store, which lives as long as the launcher
_joined = itertools.count()


@dataclass(frozen=True)
class World:
    """The ranks of a run.  rank: of this process.  size: number of ranks."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """This rank's rows of a batch that all ranks have: an equal share, in order."""
        return rows if self.size == 1 else rows.chunk(self.size)[self.rank]

    def sum_(self, *values: Tensor) -> None:
        """Sum tensors of one dtype over ranks, in place, in one all-reduce."""
        if self.size == 1 or not values:
            return
        total = values[0] if len(values) == 1 else torch.cat([each.flatten() for each in values])
        dist.all_reduce(total)
        if len(values) > 1:
            for each, found in zip(values, total.split([each.numel() for each in values]), strict=True):
                each.copy_(found.view_as(each))

    def gather(self, value: T) -> list[T]:
        """Values of all ranks, on the host."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all ranks. Its error is raised on all of them."""
        if self.size == 1:
            return make()
        found: list[Any] = [None]
        if self.is_first:
            found[0] = _outcome(make)
        dist.broadcast_object_list(found, src=0)
        return _value([found[0]])[0]

    def together(self, make: Callable[[], T]) -> list[T]:
        """What each rank makes, on all ranks. The error of the first rank that has one is raised on all of them."""
        return [make()] if self.size == 1 else _value(self.gather(_outcome(make)))


_Outcome = tuple[Any, Exception | None]


def _outcome(make: Callable[[], Any]) -> _Outcome:
    try:
        return make(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return None, RuntimeError(f"{type(error).__name__}: {error}")
        return None, error


def _value(outcomes: Sequence[_Outcome]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


ALONE = World()


def ranks_of_environment() -> int:
    """Number of ranks that torchrun started, or another launcher that sets its variables; 1 without."""
    return int(env.of_others("WORLD_SIZE") or 1)


@contextmanager
def join(device: str, timeout: float) -> Generator[World]:
    """Context with the process group of the ranks that torchrun started; a world of one without torchrun.

    device: type of the ranks' devices, of which each gets that of its LOCAL_RANK.  timeout: seconds that a rank waits
    for others in a collective. A process group that exists already is used as it is. An error of another rank ends this
    one too, with an error that names that rank.
    """
    bound = timedelta(seconds=timeout)
    if dist.is_initialized():
        yield from _run(World(dist.get_rank(), dist.get_world_size()))
        return
    if ranks_of_environment() == 1:
        yield ALONE
        return
    if device == "cuda":
        torch.cuda.set_device(int(env.of_others("LOCAL_RANK") or 0))
    try:
        store, rank, size = _rendezvous(bound)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        # the launcher's store outlives ranks that it restarts
        restart = env.of_others("TORCHELASTIC_RESTART_COUNT")
        keys = dist.distributed_c10d.PrefixStore(f"blockscale/{restart}/{next(_joined)}", store)
        dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=bound)
    except (dist.DistError, RuntimeError) as error:
        what = f"{ranks_of_environment()} ranks that did not meet: {str(error).partition(chr(10))[0]}"
        rule = f"every rank joins the others within {timeout:g} s"
        fix = "start all ranks with torchrun, and read the first error of each"
        raise RankError(message(what, rule=rule, fix=fix)) from error
    try:
        yield from _run(World(rank, size))
    finally:
        dist.destroy_process_group()


def _run(world: World) -> Generator[World]:
    with naming_failures():
        yield world


@functools.cache
def _rendezvous(timeout: timedelta) -> tuple[dist.distributed_c10d.Store, int, int]:
    """The store that the launcher's variables name, and this process's rank among the ranks."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not env.of_others(name):
            rule, fix = "ranks find each other by the variables that torchrun sets", "start all ranks with torchrun"
            refuse(f"WORLD_SIZE={ranks_of_environment()} without {name}", rule, fix, error=OptionError)
    return next(rendezvous("env://", timeout=timeout))


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of a group that a device mesh made: such groups do not have that of the whole."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # pyright: ignore[reportPrivateUsage]
