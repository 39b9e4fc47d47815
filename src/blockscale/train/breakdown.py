"""Profiled shares of a step's time: GEMMs ("products"), casts, attention, everything else; and traces for Perfetto.

The profiler's GPU kernels are classified by name. On a CPU, where shares would show the cost of exact emulation, there
is only the trace. A profiler slows small calls down, so these are shares, never speeds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..bench.kernel_kinds import KINDS, LAUNCHED_BY, kernel_kind
from ..library import NAMESPACE

_NAMESPACES = re.compile(r"\bvoid |\b(?:at|c10|cuda|native|detail|cutlass|std)::|\(anonymous namespace\)::")
_LONGEST, _LETTERS = 16, 72  # number of kernels reported by name, and characters of a name


@dataclass(frozen=True)
class Breakdown:
    """Shares of profiled time.

    shares: by kind, sum 1; empty without a GPU.  longest: shares of the GPU kernels that took most time, by the
    start of their names.  kernel_ms: time of all GPU kernels, which the profiler does not slow down. The rest of a step
    is time in which the GPU waits for the host.
    """

    shares: dict[str, float]
    longest: dict[str, float]
    kernel_ms: float | None = None


def breakdown(work: Callable[[], None], path: Path | None = None) -> Breakdown:
    """Profile `work` and classify its time.  path: file for a trace, if wanted."""
    kernels = _kernels(_recorded(work, path))
    total = sum(kernels.values())
    if not total:
        return Breakdown({}, {})
    kinds, longest = dict.fromkeys(KINDS, 0.0), Counter[str]()
    for name, time in kernels.items():
        kinds[kernel_kind(name)] += time / total
        longest[short_name(name)] += time
    return Breakdown(kinds, {name: time / total for name, time in longest.most_common(_LONGEST)}, total / 1e3)


def _recorded(work: Callable[[], None], path: Path | None) -> list[Any]:
    """Profiler events of `work`."""
    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, acc_events=True) as found:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}")
        found.export_chrome_trace(str(fresh))
        fresh.rename(path)
    return list(found.events() or ())


def _kernels(events: list[Any]) -> Counter[str]:
    """Microseconds of every GPU kernel by name. Our kernels also carry the operator that launched them, since all casts
    are one kernel. User annotations are ranges over kernels and are not counted."""
    times: Counter[str] = Counter()
    for each in events:
        on_gpu = "cuda" in str(each.device_type).lower() and not getattr(each, "is_user_annotation", False)
        if on_gpu and each.device_time_total > 0:
            times[each.name] += each.device_time_total
    for each in events:
        for kernel in getattr(each, "kernels", ()) if each.name.startswith(f"{NAMESPACE}::") else ():
            if times[kernel.name] >= kernel.duration:
                times[kernel.name] -= kernel.duration
                times[f"{kernel.name}{LAUNCHED_BY}{each.name.partition('::')[2]}"] += kernel.duration
    return +times


def short_name(name: str) -> str:
    """The distinctive part of a kernel name: torch's templates share their first hundred characters.

    >>> short_name("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(int)")
    'vectorized_elementwise_kernel<8, CUDAFunctor_add<BFloat16>>(int)'
    """
    return _NAMESPACES.sub("", name)[:_LETTERS]
