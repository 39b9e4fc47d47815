"""Memory of the ranks of a group that all of them map, with flags: rows move without a collective.

A flag is an int32 that lives with the rank that waits for it and that one other rank writes. It holds the number of the
call, which only grows and is never reset, so that no call needs a barrier. Beside it lies a digest of the call's sizes:
ranks that make different calls raise. Every wait is bounded, and a wait that fails names the rank that it waited for.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import tempfile
import time
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ShardingError, refuse
from ..failures import error_of_waiting, first_failure, timeout_of

SLOTS = 2
ANY = -1  # in place of a digest: any call passes
# bytes before the data, int32 values: flags of all ranks, digests of both slots; of calls in CUDA graphs flags, digests
# and meetings of all ranks, and their number on this one; a token
_MOST_RANKS = 1024
COUNTED_FLAGS, COUNTED_DIGESTS, MEETINGS, NUMBER = ((1 + SLOTS + part) * _MOST_RANKS for part in range(4))
HEADER = 4 * NUMBER + 4096
_IN_MEMORY = Path("/dev/shm")
_LONGEST_PAUSE = 1e-3
_BETWEEN_QUESTIONS = 0.1


class _File(NamedTuple):
    """A rank's file.  token: that it has written there.  why_not: what is wrong with it, or ""."""

    host: str
    path: str
    token: int
    why_not: str


class SharedArena:
    """Arena of CPU ranks on one host: a file in memory for each rank, `size` bytes and flags, mapped by all.

    Making one is collective. Files are unlinked once all ranks have mapped them.  call: the first one that uses it.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, call: int) -> None:
        self._group = weakref.ref(group)
        self.rank, self.ranks, self.size = dist.get_rank(group), group.size(), size
        mine = _reserve(HEADER + size)
        try:
            with torch.inference_mode(False):  # later calls write it in any mode
                own = self._map(mine.path)
                if own is not None:
                    own[:HEADER].view(torch.int32)[: self.ranks] = wrapped(call - 1)
                    own[:HEADER].view(torch.int32)[-1] = mine.token
                files = self._exchange(group, mine)
                maps = [self._map(each.path) for each in files]
                tokens = [None if each is None else int(each[:HEADER].view(torch.int32)[-1]) for each in maps]
            foreign = [rank for rank, each in enumerate(files) if tokens[rank] != each.token]
            why_not = f"the memory of ranks {foreign} is not that of this one" if foreign else ""
            self._exchange(group, mine._replace(why_not=why_not))
        finally:
            os.unlink(mine.path)
        found = [each for each in maps if each is not None]
        # read and written past torch: a wait asks any number of times, which modes such as checkpointing would count
        self.flags = [(ctypes.c_int32 * (HEADER // 4)).from_address(each.data_ptr()) for each in found]
        with torch.inference_mode(False):
            self.data = [each[HEADER:] for each in found]

    def _map(self, path: str) -> Tensor | None:
        """Bytes of a file; None if it is not there at its full size, as in another container."""
        size = HEADER + self.size
        if not os.path.exists(path) or os.path.getsize(path) < size:
            return None
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def _exchange(self, group: dist.ProcessGroup, mine: _File) -> list[_File]:
        """Every rank's file. Raises on all ranks if one of them has no memory that the others map."""
        found = exchanged(group, mine)
        hosts = sorted({each.host for each in found})
        lacking = [f"rank {rank}: {each.why_not}" for rank, each in enumerate(found) if each.why_not]
        if len(hosts) == 1 and not lacking:
            return found
        what = f"ranks on {len(hosts)} hosts: {', '.join(hosts)}" if len(hosts) > 1 else "; ".join(lacking)
        refuse(
            f"no {self.size:,} bytes of memory that all ranks map: {what}",
            rule="overlap moves rows through memory that all ranks of a group map",
            fix=f'pass a group of one host, make {_IN_MEMORY} larger (docker run --shm-size) or pass overlap="off"',
            error=ShardingError,
        )

    def signal(self, ranks: Sequence[int], call: int, digest: int) -> None:
        """Set this rank's flag at others to the number of a call, with its digest, after everything written before."""
        for rank in ranks:
            self.flags[rank][digest_at(call, self.rank)] = digest
            self.flags[rank][self.rank] = wrapped(call)

    def wait(self, source: int, call: int, digest: int) -> None:
        """Wait until the flag of a rank has reached a call; RankError after the group's timeout, ShardingError if the
        rank makes another call."""
        start, pause, asked = time.monotonic(), 1e-5, 0.0
        while self.is_behind(source, call):
            waited = time.monotonic() - start
            if waited - asked > _BETWEEN_QUESTIONS:
                asked = waited
                self._ask(source, call, waited)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if digest not in (ANY, self.flags[self.rank][digest_at(call, source)]):
            refuse_other_call(self.rank, source, call)

    def is_behind(self, source: int, call: int) -> bool:
        """Whether the flag of a rank has not reached the number of a call. Numbers wrap around at 2^31."""
        return (self.flags[self.rank][source] - call) % 2**32 >= 2**31

    def _ask(self, source: int, call: int, waited: float) -> None:
        """Raise if a rank has failed, the group's timeout has passed, or the store is gone with its rank."""
        group = self._group()
        assert group is not None, "a call has its group"
        where, waits_in = [dist.get_global_rank(group, source)], f"overlapped call {call}"
        try:
            failed = first_failure(group)
        except (dist.DistError, RuntimeError) as error:
            raise error_of_waiting(
                "the store of the group is gone with the rank that had it", where, waits_in
            ) from error
        if failed is not None or waited > timeout_of(group):
            raise error_of_waiting(failed, where, waits_in)


_Facts = TypeVar("_Facts")


def exchanged(group: dist.ProcessGroup, mine: _Facts) -> list[_Facts]:
    """What all ranks pass, by rank; RankError if one is gone. Collective."""
    found = [mine] * group.size()
    try:
        dist.all_gather_object(found, mine, group)
    except (dist.DistError, RuntimeError) as error:
        others = [dist.get_global_rank(group, rank) for rank in range(group.size()) if rank != group.rank()]
        raise error_of_waiting(first_failure(group), others, "an overlapped call with more memory") from error
    return found


def refuse_other_call(rank: int, source: int, call: int) -> NoReturn:
    """Raise the error of ranks whose digests of a call differ."""
    refuse(
        f"ranks {rank} and {source} of a group with different layers or sizes in overlapped call {call}",
        rule="the ranks of a group make the same calls in the same order, backward passes included",
        fix="call backward in the same order on all ranks, and pad tokens to the longest",
        error=ShardingError,
    )


def digest_at(call: int, source: int) -> int:
    """Index of a rank's digest of a call among the int32 values of a header."""
    return (1 + call % SLOTS) * _MOST_RANKS + source


def digest_of(facts: Sequence[object]) -> int:
    """A number for what all ranks of a call have alike."""
    return zlib.crc32(repr(facts).encode()) & 0x7FFFFFFF


def wrapped(call: int) -> int:
    """A number of a call as an int32."""
    return (call + 2**31) % 2**32 - 2**31


def _reserve(size: int) -> _File:
    """A new file in memory. Without the reservation, writing to a full file system would kill the process."""
    folder = _IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    handle, path = tempfile.mkstemp(prefix="blockscale-", dir=folder)
    why_not = ""
    try:
        reserve = getattr(os, "posix_fallocate", None)  # not on macOS
        os.truncate(handle, size) if reserve is None else reserve(handle, 0, size)
    except OSError as error:
        why_not = error.strerror or str(error)
    finally:
        os.close(handle)
    return _File(socket.gethostname(), path, secrets.randbelow(2**31), why_not)
