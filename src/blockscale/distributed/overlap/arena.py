"""Memory of the ranks of a group that all of them map, with flags: rows move without a collective.

A flag is an int32 that lives with the rank that waits for it and that one other rank writes. It holds the number of the
call, which only grows and is never reset, so that no call needs a barrier. Every wait is bounded, and a wait that
fails names the rank that it waited for.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ...errors import ShardingError, refuse
from ..failures import error_of_waiting, first_failure

_FLAG_BYTES = 4096
_IN_MEMORY = Path("/dev/shm")
_LONGEST_PAUSE = 1e-3
_BETWEEN_QUESTIONS = 0.1


class SharedArena:
    """Arena of CPU ranks on one host: a file in memory for each rank, `size` bytes and flags, mapped by all.

    Making one is collective. The files are unlinked once all ranks have mapped them, so none is left behind.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.rank, self.ranks, self.size = group, dist.get_rank(group), group.size(), size
        path, why_not = _reserve(_FLAG_BYTES + size)
        try:
            files = self._agree(path, why_not)
            maps = [torch.from_file(each, shared=True, size=_FLAG_BYTES + size, dtype=torch.uint8) for each in files]
            dist.barrier(group)
        finally:
            os.unlink(path)
        self.flags = [each[:_FLAG_BYTES].view(torch.int32) for each in maps]
        self.data = [each[_FLAG_BYTES:] for each in maps]
        self.timeout: float = group.get_group_store().timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]

    def _agree(self, path: str, why_not: str) -> list[str]:
        """Path of every rank's file. Raises on all ranks if they cannot map each other's."""
        mine = socket.gethostname(), path, why_not
        found = [mine] * self.ranks
        dist.all_gather_object(found, mine, self.group)
        hosts = sorted({host for host, _, _ in found})
        if len(hosts) > 1:
            refuse(
                f"ranks on {len(hosts)} hosts: {', '.join(hosts)}",
                rule="overlap needs ranks that map each other's memory",
                fix='pass a group of one host, or overlap="off"',
                error=ShardingError,
            )
        lacking = [f"rank {rank}: {why}" for rank, (_, _, why) in enumerate(found) if why]
        if lacking:
            refuse(
                f"no {self.size:,} bytes of shared memory on {'; '.join(lacking)}",
                rule="overlap keeps two slots of the gathered or summed rows in memory that all ranks map",
                fix=f'make {_IN_MEMORY} larger (docker run --shm-size), or pass overlap="off"',
                error=ShardingError,
            )
        return [path for _, path, _ in found]

    def signal(self, rank: int, flag: int, call: int) -> None:
        """Set a flag of a rank to the number of a call, after everything that was written before."""
        self.flags[rank][flag] = (call + 2**31) % 2**32 - 2**31

    def wait(self, flag: int, call: int, source: int) -> None:
        """Wait until a flag of this rank has reached the number of a call; RankError after the group's timeout.

        source: the rank that writes it.
        """
        start, pause, asked = time.monotonic(), 1e-5, 0.0
        while self.is_behind(flag, call):
            waited = time.monotonic() - start
            failed = None
            if waited - asked > _BETWEEN_QUESTIONS:
                asked, failed = waited, first_failure(self.group)
            if failed is not None or waited > self.timeout:
                raise error_of_waiting(failed, [dist.get_global_rank(self.group, source)], f"overlapped call {call}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def is_behind(self, flag: int, call: int) -> bool:
        """Whether a flag of this rank has not reached the number of a call. Numbers wrap around at 2^31."""
        return (int(self.flags[self.rank][flag]) - call) % 2**32 >= 2**31


def _reserve(size: int) -> tuple[str, str]:
    """A new file in memory: its path, and why it could not get this size, or "". Without the reservation, writing to a
    full file system would kill the process."""
    folder = _IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    handle, path = tempfile.mkstemp(prefix="blockscale-", dir=folder)
    try:
        reserve = getattr(os, "posix_fallocate", None)  # not on macOS
        os.truncate(handle, size) if reserve is None else reserve(handle, 0, size)
    except OSError as error:
        return path, error.strerror or str(error)
    finally:
        os.close(handle)
    return path, ""
