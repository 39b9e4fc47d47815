"""Checks of the kernels that set flags and wait for them, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from blockscale.distributed.overlap.arena import (
    ANY,
    COUNTED_DIGESTS,
    COUNTED_FLAGS,
    HEADER,
    MEETINGS,
    NUMBER,
    digest_at,
    wrapped,
)
from blockscale.distributed.overlap.signals import INTERPRETED, OTHER_CALL, TIMED_OUT, Failure, Fault, Flags
from blockscale.distributed.overlap.sums import sum_parts
from blockscale.distributed.overlap.transport import add_parts

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DIGEST = 0x7FFFFFFF
# a limit that passes soon, and one that must not: polls of the interpreter, seconds of a GPU
SHORT, LONG = (3, 1e9) if INTERPRETED else (0.02, 60)


def headers(ranks: int) -> list[Tensor]:
    return [torch.zeros(HEADER // 4, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]


def flags(of: list[Tensor], rank: int, limit: float = SHORT) -> tuple[Flags, Fault]:
    fault = Fault.on(DEVICE)
    return Flags(of, rank, fault, limit), fault


def failure(fault: Fault) -> Failure | None:
    """What the host knows once the GPU is idle."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return fault.failure()


def passes(written: int, wanted: int) -> bool:
    """Whether a wait for one call passes after a signal of another."""
    memory = headers(2)
    (first, _), (second, fault) = flags(memory, 0), flags(memory, 1)
    memory[1][digest_at(wanted, 0)] = DIGEST
    first.signal([1], written, DIGEST)
    second.wait(0, wanted, DIGEST)
    return failure(fault) is None


def waits_until_a_signal() -> bool:
    """A wait ends with a signal, and well before its limit."""
    memory = headers(2)
    second, fault = flags(memory, 1, LONG)
    if DEVICE.type == "cuda":
        first, beside = flags(memory, 0)[0], torch.cuda.Stream()
        first.signal([0], 1, 0)  # compiles
        torch.cuda._sleep(1)  # loads: a kernel that is loaded waits for those that run
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            start.record()
            second.wait(0, 5, 9)
            end.record()
        torch.cuda._sleep(500_000_000)  # cycles, 0.25 s
        first.signal([1], 5, 9)
        return failure(fault) is None and 100 < start.elapsed_time(end) < 30_000
    memory[1][digest_at(5, 0)] = 9

    def late() -> None:
        time.sleep(0.3)
        memory[1][0] = 5  # one thread interprets at a time

    begin = time.monotonic()
    thread = threading.Thread(target=late)
    thread.start()
    second.wait(0, 5, 9)
    thread.join()
    return failure(fault) is None and 0.25 < time.monotonic() - begin < 30


def counted() -> dict[str, bool]:
    """Whether calls of graphs, whose number is counted on the device, wait for those of the same number."""
    found: dict[str, bool] = {}
    memory = headers(3)
    for each in memory:
        each.fill_(wrapped(2**31 - 1))  # as a new arena does; the first number wraps around
    number = wrapped(2**31)
    (second, fault), (third, _) = flags(memory, 1), flags(memory, 2)
    for source in (0, 2):  # as the other ranks' meetings do
        memory[1][MEETINGS + source] = number
    second.meet()
    found["a meeting"] = failure(fault) is None and int(memory[1][NUMBER]) == number
    places = [(rank, at) for rank in (0, 2) for at in (memory[rank] == number).nonzero().flatten().tolist()]
    found["told to others"] = places == [(0, MEETINGS + 1), (2, MEETINGS + 1)]
    memory[2][NUMBER] = number
    third.signal([0, 1], None, DIGEST)
    told = [int(memory[rank][COUNTED_FLAGS + 2]) for rank in (0, 1)]
    digests = [int(memory[rank][COUNTED_DIGESTS + 2]) for rank in (0, 1)]
    found["a counted flag"] = told == [number] * 2 and digests == [DIGEST] * 2
    second.wait(2, None, DIGEST)
    found["a counted wait"] = failure(fault) is None
    other, other_fault = flags(memory, 1)
    other.wait(2, None, DIGEST - 1)
    found["another counted call"] = failure(other_fault) == Failure(OTHER_CALL, 2, 2**31)
    other, other_fault = flags(memory, 1)
    other.wait(0, None, DIGEST)
    found["a counted timeout"] = failure(other_fault) == Failure(TIMED_OUT, 0, 2**31)
    for source in (0, 2):  # a later meeting passes, an earlier one does not
        memory[1][MEETINGS + source] = wrapped(2**31 + 1 + source)
    second.meet()
    found["a later meeting"] = failure(fault) is None
    memory[1][MEETINGS] = number
    second.meet()
    found["a meeting without a rank"] = failure(fault) == Failure(TIMED_OUT, 0, 2**31 + 2)
    memory[0].zero_()
    second.meet()
    found["no meeting after it"] = not memory[0].any()
    return found


def sums() -> dict[str, bool]:
    """Whether sums on a GPU have the bits of those on the host, and are NaN after a failure."""
    found: dict[str, bool] = {}
    _, fault = flags(headers(2), 0)
    for ranks, shape, dtype in (
        (2, (3, 5), torch.bfloat16),
        (3, (33, 64), torch.float16),
        (8, (7, 200), torch.float32),
    ):
        parts = torch.randn(ranks, *shape, generator=torch.Generator().manual_seed(ranks)).to(dtype)
        parts[:, 0, 0], parts[1, 1, 1], parts[-1, 2, 2] = -0.0, float("inf"), float("nan")
        own = torch.randn(shape).to(dtype)
        want = add_parts(parts, own, ranks - 2)
        parts[ranks - 2] = 1e4  # is not read
        got = sum_parts(parts.to(DEVICE), own.to(DEVICE), ranks - 2, fault.poison).cpu()
        found[f"a sum of {ranks}"] = torch.equal(bits_of(got), bits_of(want))
        fault.poison.fill_(float("nan"))
        found[f"a poisoned sum of {ranks}"] = bool(
            sum_parts(parts.to(DEVICE), got.to(DEVICE), 0, fault.poison).isnan().all()
        )
        fault.poison.fill_(-0.0)
    return found


def bits_of(values: Tensor) -> Tensor:
    """Values as integers; all NaN are one."""
    return values.float().nan_to_num(nan=12345.0, posinf=float("inf"), neginf=float("-inf")).view(torch.int32)


def checks() -> dict[str, bool]:
    """Whether each property holds."""
    found = {
        "the same": passes(5, 5),
        "an earlier one": not passes(4, 5),
        "a later one": passes(6, 5),
        "2^31 after 2^31 - 1": not passes(2**31 - 1, 2**31),
        "2^31": passes(2**31, 2**31),
        "2^31 + 3 for 2^31": passes(2**31 + 3, 2**31),
        "2^31 + 3 for 2^31 - 1": passes(2**31 + 3, 2**31 - 1),
        "2^32 - 1 for 2^32": not passes(2**32 - 1, 2**32),
        "2^32 for 2^32 - 1": passes(2**32, 2**32 - 1),
        "until a signal": waits_until_a_signal(),
    }
    # several ranks at once, around the end; each flag and digest where its waiter looks, and nowhere else
    memory = headers(4)
    flags(memory, 2)[0].signal([3, 0, 1], 7, 11)
    for rank, each in enumerate(memory):
        want = torch.zeros_like(each)
        if rank != 2:
            want[2], want[digest_at(7, 2)] = 7, 11
        found[f"written at {rank}"] = torch.equal(each, want)
    # a digest of another call
    memory = headers(2)
    flags(memory, 0)[0].signal([1], 3, 10)
    second, fault = flags(memory, 1)
    second.wait(0, 3, 11)
    found["another call"] = failure(fault) == Failure(OTHER_CALL, 0, 3) and int(fault.word) == int(fault.told)
    second, other = flags(memory, 1)
    second.wait(0, 3, ANY)
    found["any call"] = failure(other) is None
    found["no poison"] = bool(other.poison == 0) and bool(other.poison.signbit())
    found["poison"] = bool(fault.poison.isnan())
    # the first failure stays, later waits end at once, and no flag is set any more
    begin = time.monotonic()
    closed = Flags(memory, 1, fault, LONG)
    closed.wait(0, 9, 0)
    closed.signal([0], 3, 10)
    found["the first failure"] = failure(fault) == Failure(OTHER_CALL, 0, 3)
    found["at once"] = time.monotonic() - begin < 30
    found["no flags after it"] = not memory[0].any()
    memory = headers(300)
    memory[299][257] = wrapped(2**31 + 4)
    begin = time.monotonic()
    second, fault = flags(memory, 299)
    second.wait(257, 2**31 + 5, 0)
    found["a timeout"] = failure(fault) == Failure(TIMED_OUT, 257, 2**31 + 5)
    found["in time"] = INTERPRETED or 0.015 < time.monotonic() - begin < 1
    return found | counted() | sums()
