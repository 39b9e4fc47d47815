"""Agreement of ranks on a call before its collectives: unequal shapes are an error on all ranks, never wrong numbers.

Gloo copies what fits of unequal messages and reports no error in that call; NCCL's result is undefined. So ranks
compare their calls through the store of the group, which needs no collective and no device. On the CPU every call is
compared. On a GPU only calls that this rank makes for the first time are, so that no later one waits;
BLOCKSCALE_CHECK_RANKS=1 compares all. A rank that makes no call is named when the timeout of the group has passed.
Compiled code is not compared.
"""

from __future__ import annotations

import itertools
import time
import weakref

import torch
import torch.distributed as dist

from .. import env
from ..errors import ShardingError, refuse
from .collectives import Ranks
from .failures import error_of_waiting, first_failure, timeout_of

CHECK = "BLOCKSCALE_CHECK_RANKS"
_seen: set[tuple[str, tuple[object, ...]]] = set()
# number of compared calls of each group, the same on all of its ranks
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


def check_same_call(ranks: Ranks, device: torch.device, *call: object) -> None:
    """Raise on all ranks unless they make the same call.  call: what its collectives depend on, as text or numbers."""
    if torch.compiler.is_compiling() or ranks.size == 1:
        return
    if device.type != "cpu" and (ranks.name, call) in _seen and not env.flag(CHECK):
        return
    _compare(ranks, " ".join(map(str, call)))
    if device.type != "cpu":
        _seen.add((ranks.name, call))


def _compare(ranks: Ranks, mine: str) -> None:
    group = dist.distributed_c10d._resolve_process_group(ranks.name)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType]
    if dist.get_backend(group) == "fake":  # made-up ranks tell nothing
        return
    store, number = group.get_group_store(), next(_calls.setdefault(group, itertools.count()))
    keys = [f"blockscale/call/{number}/{rank}" for rank in range(ranks.size)]
    store.set(keys[ranks.rank], mine)
    _wait(group, keys, mine)
    calls = [each.decode() for each in store.multi_get(keys)]
    if number > 1:  # read by all, since they have made the call after it
        store.delete_key(f"blockscale/call/{number - 2}/{ranks.rank}")
    if len({*calls}) > 1:
        each = "; ".join(f"rank {dist.get_global_rank(group, rank)}: {call}" for rank, call in enumerate(calls))
        refuse(
            f"ranks that make different calls: {each}",
            rule="the ranks of a group pass equal shapes, dtypes and options, or one would read what was not sent",
            fix="pass equal shapes on all ranks: pad tokens to the longest, and divide weights evenly",
            error=ShardingError,
        )


def _wait(group: dist.ProcessGroup, keys: list[str], mine: str) -> None:
    """Wait until all ranks have told their call, one has told an error, or the timeout has passed."""
    store, start, pause = group.get_group_store(), time.monotonic(), 1e-4
    longest = timeout_of(group)
    while not store.check(keys):
        failed = first_failure(group)
        if failed is not None or time.monotonic() - start > longest:
            silent = [dist.get_global_rank(group, rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise error_of_waiting(failed, silent, mine)
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
