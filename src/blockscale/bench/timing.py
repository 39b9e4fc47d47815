"""Time of a call, and clock and power of the GPU meanwhile.

On a GPU a slice is a CUDA graph of many calls that cycle through input sets, replayed between two events, so that host
time is excluded and inputs come from memory, not from L2. Variants are timed in turns, round by round, so that clock
drift affects all of them equally. Calls that cannot be captured are launched between events.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

Call = Callable[[], object]
MOST_CALLS = 200
HOST_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over rounds and its quartiles; method: graph, events, host or cpu."""

    us: float
    low: float
    high: float
    method: str
    rounds: int

    def per_part(self, parts: int) -> Timing:
        """Timing of one of `parts` equal parts of a call.

        >>> Timing(80.0, 72.0, 88.0, "events", 5).per_part(8)
        Timing(us=10.0, low=9.0, high=11.0, method='events', rounds=5)
        """
        return replace(self, us=self.us / parts, low=self.low / parts, high=self.high / parts)


@dataclass(frozen=True)
class Slice:
    """Calls that are timed together. `start` launches them; its result waits for them and returns µs per call."""

    start: Callable[[], Callable[[], float]]
    method: str


def summarise(samples: Sequence[float], method: str) -> Timing:
    """Median and quartiles of one figure per round.

    >>> summarise([1.0, 2.0, 3.0, 4.0, 100.0], "cpu")
    Timing(us=3.0, low=2.0, high=4.0, method='cpu', rounds=5)
    """
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], method, 1)
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(middle, low, high, method, len(samples))


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """Number of input sets to cycle through so that none stays in L2."""
    if device.type != "cuda":
        return 1
    return sets_for(bytes_per_set, torch.cuda.get_device_properties(device).L2_cache_size)


def sets_for(bytes_per_set: int, cache: int) -> int:
    """Sets of four times the cache in all, at least three; one that is sixteen times as large evicts itself.

    >>> [sets_for(mb << 20, 50 << 20) for mb in (1, 56, 256, 1024)]
    [200, 4, 3, 1]
    """
    return 1 if bytes_per_set >= 16 * cache else max(3, math.ceil(4 * cache / max(1, bytes_per_set)))


def measure(
    slices: Mapping[str, Slice], *, rounds: int, sample: Callable[[], None] = lambda: None
) -> dict[str, Timing]:
    """Time all slices in turns. `sample` is called once a round, while the device is busy; round 0 is not counted.

    Every round has its own order, since a slice after one that takes little power runs at a higher clock.
    """
    found: dict[str, list[float]] = {name: [] for name in slices}
    order, shuffle = list(slices), random.Random(0).shuffle
    for number in range(rounds + 1):
        shuffle(order)
        waiting = {name: slices[name].start() for name in order}
        if number:
            sample()
        for name, wait in waiting.items():
            us = wait()
            if number:
                found[name].append(us)
    return {name: summarise(samples, slices[name].method) for name, samples in found.items()}


def prepare(
    calls: Sequence[Call], device: torch.device, *, seconds: float, host: bool = False, captured: bool = True
) -> Slice:
    """A slice of about that many seconds that cycles through `calls`, one per input set.

    host: time the host's share of a call, without waiting for the device.  captured: False to include launches: calls
    are launched one by one, between events.
    """
    for call in (*calls, *calls):  # compiles, autotunes, fills caches
        call()
    count = HOST_CALLS if host else _calls_in(seconds, calls, device)
    if host or device.type != "cuda":
        return _host_slice(calls, count, device)
    graph = _graph_slice(calls, count) if captured else None
    return graph or _events_slice(lambda: _cycle(calls, count), count, "events")


def _cycle(calls: Sequence[Call], count: int) -> None:
    """Run `count` calls. Outputs stay alive for one turn through the sets: a kernel that writes to the same memory each
    time would hit L2."""
    alive: deque[object] = deque(maxlen=len(calls))
    for index in range(count):
        alive.append(calls[index % len(calls)]())


def _calls_in(seconds: float, calls: Sequence[Call], device: torch.device) -> int:
    """Number of calls that fill a slice, in whole turns through the sets."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    _cycle(calls, len(calls))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    turn = max(time.perf_counter() - started, 1e-7)
    return len(calls) * max(1, min(math.ceil(seconds / turn), MOST_CALLS // len(calls)))


def _graph_slice(calls: Sequence[Call], count: int) -> Slice | None:
    """Slice of a CUDA graph; None if the calls cannot be captured. Calls that synchronize are detected before a capture
    is tried, since a failed one breaks the default generator and the current stream."""
    if _waits_for_device(calls):
        return None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # thread_local: CUDA calls of other threads, such as compilation, do not break the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            _cycle(calls, count)
    except RuntimeError:
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return None

    def replay() -> None:
        graph.replay()
        _ = calls  # keeps the inputs alive that the graph reads

    return _events_slice(replay, count, "graph")


def _waits_for_device(calls: Sequence[Call]) -> bool:
    try:
        with _sync_debug_mode("error"):
            _cycle(calls, len(calls))
    except RuntimeError:
        return True
    return False


def host_syncs(call: Call) -> int:
    """Number of host synchronizations in a call that torch detects."""
    with _sync_debug_mode("warn") as seen:
        call()
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


@contextlib.contextmanager
def _sync_debug_mode(mode: str) -> Generator[list[warnings.WarningMessage]]:
    """Context where a synchronization raises or warns; yields the warnings."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")  # also torch's warning that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _events_slice(run: Callable[[], None], count: int, method: str) -> Slice:
    def start() -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()

        def wait() -> float:
            end.synchronize()
            return begin.elapsed_time(end) * 1e3 / count

        return wait

    return Slice(start, method)


def _host_slice(calls: Sequence[Call], count: int, device: torch.device) -> Slice:
    """Slice of host time until the last call has returned; on a CPU that is all of it."""

    def start() -> Callable[[], float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        _cycle(calls, count)
        us = (time.perf_counter() - started) * 1e6 / count
        return lambda: us

    return Slice(start, "host" if device.type == "cuda" else "cpu")


# ---- clock and power -------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """SM clock in MHz, power in watts."""

    sm_clock_mhz: float
    power_w: float


@dataclass
class Telemetry:
    """Collects readings until `take`; none without a source."""

    source: Callable[[], Reading | None] = lambda: None
    readings: list[Reading] = field(default_factory=list[Reading])

    def sample(self) -> None:
        """Read once."""
        if (found := self.source()) is not None:
            self.readings.append(found)

    def take(self) -> Reading | None:
        """Medians of the readings since the last call; None if there are none."""
        taken, self.readings = self.readings, []
        return Reading(*(round(statistics.median(each), 1) for each in zip(*taken, strict=True))) if taken else None


def watch(device: torch.device) -> Telemetry:
    """Telemetry of a device through torch's bindings of NVML; without them (nvidia-ml-py) it has no readings."""

    def read() -> Reading:
        return Reading(torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1e3)

    try:
        read()
    except Exception:  # no GPU, no bindings, no permission, no such query: each raises something else
        return Telemetry()
    return Telemetry(read)
