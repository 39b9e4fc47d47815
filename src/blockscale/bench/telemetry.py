"""Clock and power of the GPU during timing: through NVML if torch has its bindings, else from a child nvidia-smi."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

import torch

QUERY = "clocks.sm,power.draw,temperature.gpu"


@dataclass(frozen=True)
class Reading:
    """SM clock in MHz, power in watts, temperature in °C."""

    sm_clock_mhz: float
    power_w: float
    celsius: float


@dataclass
class Telemetry:
    """Collects readings until `take`; none without a source."""

    source: Callable[[], Reading | None] | None = None
    readings: list[Reading] = field(default_factory=list[Reading])

    def sample(self) -> None:
        """Read once."""
        found = self.source() if self.source else None
        if found is not None:
            self.readings.append(found)

    def take(self) -> Reading | None:
        """Medians of the readings since the last call; None if there are none."""
        taken, self.readings = self.readings, []
        if not taken:
            return None
        columns = zip(*((r.sm_clock_mhz, r.power_w, r.celsius) for r in taken), strict=True)
        clock, power, celsius = (round(statistics.median(column), 1) for column in columns)
        return Reading(clock, power, celsius)


@contextlib.contextmanager
def watch(device: torch.device) -> Generator[Telemetry]:
    """Context with the telemetry of a device."""
    if device.type != "cuda":
        yield Telemetry()
        return
    try:
        _read_nvml(device)
    except Exception:  # no bindings, no permission, no such query: each raises something else
        with _child(device) as source:
            yield Telemetry(source)
        return
    yield Telemetry(lambda: _read_nvml(device))


def _read_nvml(device: torch.device) -> Reading:
    watts = torch.cuda.power_draw(device) / 1e3
    return Reading(torch.cuda.clock_rate(device), watts, torch.cuda.temperature(device))


def parse(line: str) -> Reading | None:
    """One line of nvidia-smi's CSV.

    >>> parse("1980, 412.53, 55")
    Reading(sm_clock_mhz=1980.0, power_w=412.53, celsius=55.0)
    >>> parse("[N/A], 1, 2") is None
    True
    """
    try:
        clock, power, celsius = (float(word) for word in line.split(","))
    except ValueError:
        return None
    return Reading(clock, power, celsius)


@contextlib.contextmanager
def _child(device: torch.device) -> Generator[Callable[[], Reading | None] | None]:
    """Context with a running nvidia-smi (every 50 ms) that yields a reader of its latest line."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = ["-i", f"GPU-{uuid}"] if uuid else []
    command = ["nvidia-smi", *which, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "50"]
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield None
        return
    latest: list[Reading] = []
    assert child.stdout is not None
    reader = threading.Thread(target=_follow, args=(child.stdout, latest), daemon=True)
    reader.start()
    try:
        yield lambda: latest[-1] if latest and child.poll() is None else None
    finally:
        child.terminate()
        child.wait()
        reader.join(timeout=1)


def _follow(lines: Iterable[str], latest: list[Reading]) -> None:
    for line in lines:
        found = parse(line)
        if found is not None:
            latest[:] = [found]
