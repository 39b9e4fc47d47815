"""Device properties for the kernel registry and `doctor`.

`Capability` is the small hashable part that decides which kernels can run; `describe` is the long form for people.
Nothing here initializes CUDA unless it is given a CUDA device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .errors import DeviceError, refuse


@dataclass(frozen=True)
class Capability:
    """Device type and, for CUDA, the compute capability as 10 * major + minor: what kernels are selected by."""

    device: str
    sm: int = 0

    def __str__(self) -> str:
        return f"{self.device} sm_{self.sm}" if self.sm else self.device


CPU = Capability("cpu")
# SMs of an H200, and of every H100 SXM
DEFAULT_SM_COUNT = 132
_META = torch.device("meta")


class _Facts(NamedTuple):
    """Facts that kernels are selected and planned by, read once for each device."""

    capability: Capability
    sm_count: int = DEFAULT_SM_COUNT
    name: str = ""


_KNOWN: dict[torch.device, _Facts] = {}


def _facts(device: torch.device) -> _Facts:
    known = _KNOWN.get(device)
    if known is not None:
        return known
    if device.type != "cuda":
        return _KNOWN.setdefault(device, _Facts(CPU if device.type == "cpu" else Capability(device.type)))
    # torch types the index as int, but it is None for "cuda": the current device, which may change
    if device == torch.device("cuda"):
        return _facts(torch.device("cuda", torch.cuda.current_device()))
    found = torch.cuda.get_device_properties(device)
    sm = Capability("cuda", 10 * found.major + found.minor)
    return _KNOWN.setdefault(device, _Facts(sm, found.multi_processor_count, found.name))


def capability(device: torch.device | str) -> Capability:
    """The capability of a device.

    >>> capability("cpu")
    Capability(device='cpu', sm=0)
    """
    return _facts(torch.device(device) if isinstance(device, str) else device).capability


def sm_count(device: torch.device) -> int:
    """Number of SMs of a GPU; for a CPU the number of an H200.

    >>> sm_count(torch.device("cpu"))
    132
    """
    return _facts(device).sm_count


def gpu_name(device: torch.device) -> str:
    """The driver's name of a GPU; empty for other devices.

    >>> gpu_name(torch.device("cpu"))
    ''
    """
    return _facts(device).name


@contextlib.contextmanager
def compiling_for(where: Capability, count: int = DEFAULT_SM_COUNT, name: str = "") -> Generator[None]:
    """Context in which meta tensors stand for tensors on such a GPU with `count` SMs and that name.

    Launching a kernel that can be precompiled (`Kernel.precompile_key`) with them compiles it without a GPU.

    >>> with compiling_for(Capability("cuda", 90)):
    ...     capability("meta")
    Capability(device='cuda', sm=90)
    """
    before = _facts(_META)
    _KNOWN[_META] = _Facts(where, count, name)
    try:
        yield
    finally:
        _KNOWN[_META] = before


_NO_CHANGE = contextlib.nullcontext()


def current_cuda_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context that makes a CUDA device current: Triton launches on the current device. Cheap if it is current."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NO_CHANGE
    return torch.cuda.device(device)


def for_products(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands for torch's matmul: 16-bit CPU tensors in fp32. The caller rounds the product once.

    Many CPUs have no 16-bit instructions, and torch's products then take two hundred times as long as in fp32.

    >>> [each.dtype for each in for_products(torch.zeros(2, dtype=torch.bfloat16))]
    [torch.float32]
    """
    return tuple(each.float() if each.is_cpu and each.dtype.itemsize == 2 else each for each in tensors)


def named_device(name: torch.device | str) -> torch.device:
    """A device by name; raises if this machine does not have it."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        device = torch.device("meta")
    count = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count):
        return device
    here = f"cpu, or cuda:0 to cuda:{count - 1}" if count > 1 else "cpu, cuda or cuda:0"
    here = here if count else "cpu, since torch sees no GPU here"
    refuse(f"device {str(name)!r}", rule=f"a device is {here}", fix="leave it out, or pass cpu", error=DeviceError)


def default_device() -> torch.device:
    """Default device of examples and self-checks: the first GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def cuda_driver() -> int | None:
    """Newest CUDA major version whose machine code the driver loads; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # torch does not expose it; a process that uses a GPU has loaded it
        version = ctypes.c_int()
        return version.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


def capture_id(stream: int) -> int | None:
    """Number of the CUDA graph capture of a stream, unique in this process; None if the driver does not tell."""
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    nothing = (ctypes.c_void_p(),) * 3  # graph, dependencies and their count
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), *nothing)
    return number.value if not failed and status.value == 1 else None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(device: torch.device | str | None = None) -> dict[str, str]:
    """Properties of a device as text: name, architecture, SMs, memory."""
    device = default_device() if device is None else torch.device(device)
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return {"device": str(device), "name": _cpu_name(), "threads": f"{threads} of {os.cpu_count()} cores"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": properties.name,
        "architecture": str(capability(device)),
        "multiprocessors": str(properties.multi_processor_count),  # stored in runs; codespell:ignore multiprocessors
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "L2 cache": f"{properties.L2_cache_size / 2**20:.0f} MiB",
    }
