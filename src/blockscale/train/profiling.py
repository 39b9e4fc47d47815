"""Where a step's time goes: a trace for Perfetto, and the share that our casts take.

A profiler makes calls slower, so what it measures is shares, never speed. Casts are known by their operators and, where
a graph is replayed and there are no operators, by the names of their kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..library import NAMESPACE

_CAST = "quantize"
# of casts/_kernels.py and its neighbours
_KERNELS = ("cast_kernel", "amax_kernel", "colsum_kernel", "_rstd_kernel", "_dequantize_kernel")


def traced(work: Callable[[], None], path: Path | None = None) -> float | None:
    """Run it under the profiler; the share of time in casts, None where nothing was timed. path: write a trace."""
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
    events: list[Any] = list(found.events() or ())
    return _kernel_share(events) if on_gpu else _operator_share(events)


def _operator_share(events: list[Any]) -> float | None:
    """On a CPU: operators of casts, with all that they call, over everything at the top."""
    spans = [(each.time_range.start, each.time_range.end) for each in events]
    if not spans:
        return None
    total = max(end for _, end in spans) - min(start for start, _ in spans)
    casts = sum(each.cpu_time_total for each in events if _is_cast(each.name) and not _in_cast(each))
    return casts / total if total else None


def _kernel_share(events: list[Any]) -> float | None:
    """On a GPU: kernels of casts over all kernels."""
    kernels = [each for each in events if "cuda" in str(each.device_type).lower() and each.device_time_total > 0]
    total = sum(each.device_time_total for each in kernels)
    casts = sum(each.device_time_total for each in kernels if each.name.startswith(_KERNELS))
    return casts / total if total else None


def _is_cast(name: str) -> bool:
    return name.startswith(f"{NAMESPACE}::") and _CAST in name


def _in_cast(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if _is_cast(parent.name):
            return True
        parent = parent.cpu_parent
    return False
