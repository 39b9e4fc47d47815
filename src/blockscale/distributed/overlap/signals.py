"""Flags on GPUs: a kernel that sets them at other ranks, one that waits for a flag in bounded time, and a meeting.

All run in the order of a stream. A wait that fails neither traps nor hangs: it writes a
fault word, which the host reads without a sync, and goes on. From then on all waits of this rank end at once, its sums
are NaN, and it sets no flags, so that no other rank takes what it makes for rows.
"""

# Type checkers do not know Triton: a constexpr stands for its value.
# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from ...launch import launch, refuse
from .arena import COUNTED_DIGESTS, COUNTED_FLAGS, MEETINGS, NUMBER, digest_at, wrapped

TIMED_OUT, OTHER_CALL = 1, 2


@triton.jit(do_not_specialize=["first", "ranks", "flag_at", "digest_at", "call", "digest"])
def _signal_kernel(
    headers_ptr, header_ptr, fault_ptr, first, ranks, flag_at, digest_at, call, digest,
    COUNTED: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Digest, then flag, int32 each, into the headers of ranks first, first + 1, ...: one for each CTA. A release for
    the whole system: what the stream has written before is there when the flag is. Nothing after a fault.

    headers_ptr: int64 addresses of all ranks' headers.  header_ptr: this rank's.  COUNTED: the number of the call is
    the one there.
    """
    if COUNTED:
        call = tl.load(header_ptr + NUMBER)
    header = tl.load(headers_ptr + (first + tl.program_id(0)) % ranks).to(tl.pointer_type(tl.int32))
    if tl.load(fault_ptr) == 0:
        tl.store(header + digest_at, digest)
        tl.debug_barrier()
        tl.atomic_xchg(header + flag_at, call, sem="release", scope="sys")


@triton.jit
def _is_behind(flag, call):
    """Whether a flag has not reached a call. Numbers wrap around at 2^31."""
    return ((flag.to(tl.int64) - call.to(tl.int64)) & 0xFFFFFFFF) >= 0x80000000


@triton.jit
def _tell(fault_ptr, told_ptr, poison_ptr, call, source, kind):
    """Store the first failure of a rank."""
    code = (call.to(tl.int64) << 32) | (source.to(tl.int64) << 8) | kind.to(tl.int64)
    tl.store(poison_ptr, float("nan"))  # before other waits see the fault
    before = tl.atomic_cas(fault_ptr, tl.full((), 0, tl.int64), code)
    if before == 0:
        tl.store(told_ptr, code)


@triton.jit(do_not_specialize=["source", "flag_at", "digest_at", "call", "digest", "limit"])
def _wait_kernel(
    header_ptr, fault_ptr, told_ptr, poison_ptr, source, flag_at, digest_at, call, digest, limit,
    COUNTED: tl.constexpr, NUMBER: tl.constexpr,
    TIMED_OUT: tl.constexpr, OTHER_CALL: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Wait until this rank's flag of `source` has reached a call, and compare digests; a negative one is not compared.

    The first failure of a rank is stored as call << 32 | source << 8 | kind, int64, in the fault word and for the host.
    limit: ns of the GPU's clock; without CLOCK, which the interpreter lacks, the number of polls.
    """
    if COUNTED:
        call = tl.load(header_ptr + NUMBER)
    failed = tl.load(fault_ptr, volatile=True)
    flag = tl.atomic_add(header_ptr + flag_at, 0, sem="acquire", scope="sys")
    behind = _is_behind(flag, call)
    waited = tl.full((), 0, tl.int64)
    start = waited
    if CLOCK:
        start = globaltimer()
    while behind & (failed == 0) & (waited < limit):
        flag = tl.atomic_add(header_ptr + flag_at, 0, sem="acquire", scope="sys")
        behind = _is_behind(flag, call)
        failed = tl.load(fault_ptr, volatile=True)
        if CLOCK:
            waited = globaltimer() - start
        else:
            waited += 1
    found = tl.load(header_ptr + digest_at, volatile=True)
    kind = tl.where(behind, TIMED_OUT, tl.where((digest >= 0) & (found != digest), OTHER_CALL, 0))
    if (kind != 0) & (failed == 0):
        _tell(fault_ptr, told_ptr, poison_ptr, call, source, kind)


@triton.jit(do_not_specialize=["rank", "ranks", "limit"])
def _meet_kernel(
    headers_ptr, header_ptr, fault_ptr, told_ptr, poison_ptr, rank, ranks, limit,
    MEETINGS: tl.constexpr, NUMBER: tl.constexpr, MOST: tl.constexpr, TIMED_OUT: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Count a call, tell it to all ranks, and wait until all have counted theirs: one CTA.  MOST: at least `ranks`."""
    at = tl.arange(0, MOST)
    others = (at < ranks) & (at != rank)
    number = tl.load(header_ptr + NUMBER) + 1
    failed = tl.load(fault_ptr, volatile=True)
    headers = tl.load(headers_ptr + at, mask=others & (failed == 0), other=0).to(tl.pointer_type(tl.int32))
    tl.store(header_ptr + NUMBER, number)
    tl.debug_barrier()
    tl.atomic_xchg(headers + MEETINGS + rank, number, mask=others & (failed == 0), sem="release", scope="sys")
    flags = tl.atomic_add(header_ptr + MEETINGS + at, 0, mask=others, sem="acquire", scope="sys")
    behind = others & _is_behind(flags, number)
    waited = tl.full((), 0, tl.int64)
    start = waited
    if CLOCK:
        start = globaltimer()
    while (tl.max(behind.to(tl.int32), 0) != 0) & (failed == 0) & (waited < limit):
        flags = tl.atomic_add(header_ptr + MEETINGS + at, 0, mask=others, sem="acquire", scope="sys")
        behind = others & _is_behind(flags, number)
        failed = tl.load(fault_ptr, volatile=True)
        if CLOCK:
            waited = globaltimer() - start
        else:
            waited += 1
    if (tl.max(behind.to(tl.int32), 0) != 0) & (failed == 0):
        first = tl.min(tl.where(behind, at, MOST), 0)
        _tell(fault_ptr, told_ptr, poison_ptr, number, first, tl.full((), TIMED_OUT, tl.int32))


INTERPRETED = not isinstance(_wait_kernel, triton.runtime.JITFunction)


class Failure(NamedTuple):
    """A wait that failed.  kind: TIMED_OUT or OTHER_CALL.  source: the rank that it waited for."""

    kind: int
    source: int
    call: int


class Fault(NamedTuple):
    """The first failed wait of a rank, int64 [1], or 0.  word: where kernels run.  told: pinned, for the host.  poison:
    fp32, -0.0 or NaN after a failure, where kernels run."""

    word: Tensor
    told: Tensor
    poison: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Fault:
        with torch.inference_mode(False):
            told = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
            return cls(torch.zeros(1, dtype=torch.int64, device=device), told, torch.tensor(-0.0, device=device))

    def failure(self) -> Failure | None:
        """What the host knows; no sync."""
        code = int(self.told)
        return Failure(code & 0xFF, code >> 8 & 0xFFFFFF, code >> 32 & 0xFFFFFFFF) if code else None


class Flags:
    """Flags of an arena.  headers: int32, of all ranks.  limit: seconds of a wait; polls in the interpreter."""

    def __init__(self, headers: Sequence[Tensor], rank: int, fault: Fault, limit: float) -> None:
        self._headers, self._rank, self._fault = headers, rank, fault
        self._limit = int(limit if INTERPRETED else limit * 1e9)
        with torch.inference_mode(False):
            addresses = [each.data_ptr() for each in headers]
            self._addresses = torch.tensor(addresses, dtype=torch.int64, device=headers[rank].device)

    def signal(self, ranks: Sequence[int], call: int | None, digest: int) -> None:
        """Set this rank's flags at ranks that follow one another, behind the work on the current stream.  call: its
        number, or None for that of the last meeting."""
        refuse("a flag, which holds the number of the call")
        rest = ranks[0], len(self._headers), *_places(self._rank, call), digest
        tensors = self._addresses, self._headers[self._rank], self._fault.word
        launch(_signal_kernel, (len(ranks),), tensors, (*rest, call is None, NUMBER), num_warps=1)

    def wait(self, source: int, call: int | None, digest: int) -> None:
        """Let the current stream wait for a rank's flag.  call: as for `signal`."""
        refuse("a wait for a flag, which holds the number of the call")
        rest = source, *_places(source, call), digest, self._limit, call is None, NUMBER
        tensors = self._headers[self._rank], *self._fault
        launch(_wait_kernel, (1,), tensors, (*rest, TIMED_OUT, OTHER_CALL, not INTERPRETED), num_warps=1)

    def meet(self) -> None:
        """Count a call, and let the current stream wait until all ranks have counted it."""
        refuse("a meeting of ranks")
        ranks = len(self._headers)
        rest = self._rank, ranks, self._limit, MEETINGS, NUMBER, triton.next_power_of_2(ranks), TIMED_OUT
        tensors = self._addresses, self._headers[self._rank], *self._fault
        launch(_meet_kernel, (1,), tensors, (*rest, not INTERPRETED), num_warps=1)


def _places(rank: int, call: int | None) -> tuple[int, int, int]:
    """Index of a rank's flag and digest in headers, and the number of the call, 0 if the GPU counts."""
    if call is None:
        return COUNTED_FLAGS + rank, COUNTED_DIGESTS + rank, 0
    return rank, digest_at(call, rank), wrapped(call)
