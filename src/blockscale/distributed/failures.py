"""Errors of ranks by name: which rank failed, at what, and which ones gave no word.

A rank that fails tells the others through the store of the process group, which needs no collective. A rank whose
collective fails (a peer closed its connection, or the timeout of the group passed) reads what the others told, and
raises an error with it. So one rank's error ends all ranks, within the timeout of the group and `GRACE`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from ..errors import BlockscaleError, RankError, message

# seconds in which ranks that failed alike tell each other; a rank that says nothing in that time is named as silent
GRACE = 2.0
_KEY = "blockscale/failed"
_LONGEST = 400  # characters of another rank's error
# words of errors of collectives that torch raises as RuntimeError
_OF_COLLECTIVES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


@contextmanager
def naming_failures() -> Generator[None]:
    """Context around the work of a rank: an error of one rank ends all ranks that wait for it, by name.

    This rank's own error is raised as it is, after the others were told. A collective that fails because of another
    rank raises `RankError`, which names the ranks that failed before, with their errors, and those that gave no word: a
    rank that was killed, or that hangs. End the process after it: peers of a process that goes on wait for the timeout.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with naming_failures():
    ...     pass
    >>> dist.destroy_process_group()
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        _store().delete_key(f"{_KEY}/{rank}")  # of work before this
    try:
        yield
    except BaseException as error:
        is_own = not is_of_collective(error)
        told = _tell(rank, size, error, is_own=is_own) if size > 1 else {}
        if is_own or isinstance(error, RankError) or size == 1:
            raise
        raise _named(rank, size, error, told) from error


def is_of_collective(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is that of a collective and not of this rank's own work."""
    while error is not None:
        if isinstance(error, dist.DistError | RankError):
            return True
        is_torchs = isinstance(error, RuntimeError) and not isinstance(error, BlockscaleError)
        if is_torchs and any(word in str(error) for word in _OF_COLLECTIVES):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_failure(group: dist.ProcessGroup) -> str | None:
    """The error of the first rank of a group that told one of its own, as text."""
    told = ((rank, _told(rank)) for rank in dist.get_process_group_ranks(group))
    return next((f"rank {rank} failed: {each[1]}" for rank, each in told if each is not None and each[0]), None)


def error_of_waiting(failed: str | None, silent: Sequence[int], waits_in: str) -> RankError:
    """Error of a rank that waits for others in vain.  failed: what another rank told.  silent: ranks that told nothing.
    waits_in: the call of this rank."""
    ranks = ", ".join(map(str, silent))
    what = failed or f"no word from rank {ranks}, which was killed, hangs or makes other calls"
    rule = "all ranks of a group make the same calls, each within the timeout of the group"
    fix = "read the first error of each rank; a rank that was killed has none"
    return RankError(message(f"{what}, while rank {dist.get_rank()} waits in {waits_in}", rule=rule, fix=fix))


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective of a group gives up; those of its store if its backend does not tell."""
    try:
        backend = group._get_backend(torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda"))  # pyright: ignore[reportPrivateUsage]
        return backend.options._timeout.total_seconds()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):
        return group.get_group_store().timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]


def _store() -> dist.distributed_c10d.Store:
    """The store of all ranks: errors in a part of them are told to all."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def _told(rank: int) -> tuple[bool, str] | None:
    """What a rank told: whether the error was its own, and its text."""
    key = f"{_KEY}/{rank}"
    return tuple(json.loads(_store().get(key))) if _store().check([key]) else None


def _tell(rank: int, size: int, error: BaseException, *, is_own: bool) -> dict[int, tuple[bool, str]]:
    """Tell the others this rank's error; returns what they told, by rank."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST]
    found: dict[int, tuple[bool, str]] = {}
    with suppress(Exception):  # the store may be gone with the rank that had it
        _store().set(f"{_KEY}/{rank}", json.dumps((is_own, text)))
        until = time.monotonic() + (0.0 if is_own else GRACE)
        while len(found) < size - 1 and not any(own for own, _ in found.values()):
            for other in {*range(size)} - {rank, *found}:
                if (told := _told(other)) is not None:
                    found[other] = told
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
    return found


def _named(rank: int, size: int, error: BaseException, told: dict[int, tuple[bool, str]]) -> RankError:
    """Error of a rank whose collective failed because of others."""
    own = [f"rank {other} failed: {text}" for other, (is_own, text) in sorted(told.items()) if is_own]
    silent = [str(other) for other in range(size) if other != rank and other not in told]
    what = "; ".join(own or [f"rank {other} failed: {text}" for other, (_, text) in sorted(told.items())])
    if silent and not own:
        what = f"no word from rank {', '.join(silent)}, which was killed, hangs or makes other calls"
    first = str(error).partition("\n")[0][:_LONGEST]
    rule = f"a collective needs all ranks, and on rank {rank} it failed: {first}"
    fix = "read the first error of each rank; a rank that was killed has none"
    return RankError(message(what, rule=rule, fix=fix))
