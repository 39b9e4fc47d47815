"""Errors of ranks by name: which rank failed, at what, and which ones gave no word.

A rank that fails tells the others through the store of the process group, which needs no collective. A rank whose
collective fails (a peer closed its connection, or the timeout of the group passed) reads what the others told, and
raises an error with it. So one rank's error ends all ranks, within the timeout of the group and `GRACE`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ..errors import BlockscaleError, RankError, message

# seconds in which ranks that failed alike tell each other; a rank that says nothing in that time is named as silent
GRACE = 2.0
_KEY = "blockscale/failed"
_LONGEST = 400  # characters of another rank's error
# words of errors of collectives that torch raises as RuntimeError
_OF_COLLECTIVES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


@contextmanager
def naming_failures(group: dist.ProcessGroup | None = None) -> Generator[None]:
    """Context around the work of a rank. An error inside ends all ranks of the group that communicate with this one.

    This rank's own error is raised as it is, after the others were told. A collective that fails because of another
    rank raises `RankError`, which names the ranks that failed before, with their errors, and those that gave no word: a
    rank that was killed, or that hangs.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> with naming_failures():
    ...     pass
    >>> dist.destroy_process_group()
    """
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    try:
        yield
    except BaseException as error:
        if chosen.size() == 1 or isinstance(error, RankError):
            raise
        is_own = not is_of_collective(error)
        told = _tell(chosen, error, is_own=is_own)
        if is_own:
            raise
        raise _named(chosen, error, told) from error


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


def _tell(group: dist.ProcessGroup, error: BaseException, *, is_own: bool) -> dict[int, tuple[bool, str]]:
    """Tell the others this rank's error; returns what they told, by rank: whether it was their own, and its text."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST]
    found: dict[int, tuple[bool, str]] = {}
    with suppress(Exception):  # the store may be gone with the rank that had it
        store, rank = group.get_group_store(), group.rank()
        store.set(f"{_KEY}/{rank}", json.dumps((is_own, text)))
        until = time.monotonic() + (0.0 if is_own else GRACE)
        others = [each for each in range(group.size()) if each != rank]
        while others and not any(own for own, _ in found.values()):
            for each in [each for each in others if store.check([f"{_KEY}/{each}"])]:
                found[each] = tuple(json.loads(store.get(f"{_KEY}/{each}")))
                others.remove(each)
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
    return found


def _named(group: dist.ProcessGroup, error: BaseException, told: dict[int, tuple[bool, str]]) -> RankError:
    """Error of a rank whose collective failed because of others."""
    ranks = {rank: dist.get_global_rank(group, rank) for rank in range(group.size())}
    said = {
        is_own: [f"rank {ranks[rank]} failed: {text}" for rank, (own, text) in sorted(told.items()) if own == is_own]
        for is_own in (True, False)
    }
    silent = [str(ranks[rank]) for rank in ranks if rank != group.rank() and rank not in told]
    what = "; ".join(said[True] or said[False])
    if silent and not said[True]:
        what = f"no word from rank {', '.join(silent)}, which was killed, hangs or makes other calls"
    first = str(error).partition("\n")[0][:_LONGEST]
    rule = f"a collective needs all ranks, and on rank {ranks[group.rank()]} it failed: {first}"
    fix = "read the first error of each rank; a rank that was killed has none"
    return RankError(message(what, rule=rule, fix=fix))
