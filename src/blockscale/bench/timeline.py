"""Timelines of an overlapped call and of the serial one: what each CUDA stream does, over microseconds.

Events come from one profiled call. The host launches it behind a kernel that keeps the GPU busy, so a gap between
kernels of a stream is a wait for another stream, not for a launch. The profiler slows small kernels: these are pictures
of an order, and stored rows have the times.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from .harness import Case, Peer
from .kernel_kinds import kernel_kind
from .overlaps import SERIAL

WAIT = "wait"
# kinds of events and their colours
COLOURS = {
    "product": "#2f81f7",
    "copy to the device": "#d9772b",
    "copy to the host": "#e8b88f",
    "placement, sums": "#2da44e",
    WAIT: "#e3e5e8",
}
# categories of a trace: what a GPU runs, and operators of the host
GPU, HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)
# calls before the profiled one, and cycles (10 ms) that the host has to launch it
WARM_UP, _CYCLES = 3, 20_000_000
# name of the kernel that keeps the GPU busy, and microseconds of a gap that is no wait
_BUSY, _SHORT = "spin_kernel", 2.0
# panels: inches of a lane, and of a title
_LANE, _TITLE = 0.3, 0.55


class Event(NamedTuple):
    """A kernel, copy or wait.  lane: stream it is on.  start, us: microseconds."""

    lane: str
    name: str
    start: float
    us: float

    @property
    def kind(self) -> str:
        """Kind by the name; copies inside of the GPU place rows.

        >>> Event("stream 7", "Memcpy HtoD (Pinned -> Device)", 0.0, 10.0).kind
        'copy to the device'
        >>> [Event("stream 7", name, 0.0, 1.0).kind for name in ("scaled_mm_kernel", "Memcpy DtoD (Device -> Device)")]
        ['product', 'placement, sums']
        """
        if self.name == WAIT:
            return WAIT
        if self.name.startswith("Memcpy") and "HtoD" in self.name:
            return "copy to the device"
        if self.name.startswith("Memcpy") and "DtoH" in self.name:
            return "copy to the host"
        return "product" if kernel_kind(self.name) == "products" else "placement, sums"


def record(call: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Profile one call, after others that warm up; returns the Chrome trace."""
    for _ in range(WARM_UP):
        call()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as found:
        if on_gpu:
            torch.cuda._sleep(_CYCLES)
        kept = call()
        if on_gpu:
            torch.cuda.synchronize(device)
    del kept
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def events_of(trace: Mapping[str, Any], categories: Collection[str] = GPU) -> list[Event]:
    """Events of a Chrome trace by their start, with the waits between them.

    Time 0 is the end of the kernel that keeps the GPU busy, or the start of the first event. Waits are gaps of streams
    with a product, which begin at 0.
    """
    found: list[Event] = []
    for each in trace["traceEvents"]:
        if each.get("ph") == "X" and each.get("cat") in categories:
            stream = each.get("args", {}).get("stream")
            lane = f"thread {each['tid']}" if stream is None else f"stream {stream}"
            found.append(Event(lane, each["name"], float(each["ts"]), float(each["dur"])))
    begin = max((each.start + each.us for each in found if _BUSY in each.name), default=None)
    found = sorted((each for each in found if _BUSY not in each.name), key=lambda each: each.start)
    if begin is None:
        begin = found[0].start if found else 0.0
    found = [each._replace(start=each.start - begin) for each in found]
    return sorted([*found, *_waits(found)], key=lambda each: each.start)


def _waits(events: Sequence[Event]) -> list[Event]:
    """Gaps of the streams with a product."""
    ends = dict.fromkeys((each.lane for each in events if each.kind == "product"), 0.0)
    waits: list[Event] = []
    for each in events:
        if each.lane in ends:
            end = ends[each.lane]
            if each.start - end > _SHORT:
                waits.append(Event(each.lane, WAIT, end, each.start - end))
            ends[each.lane] = max(end, each.start + each.us)
    return waits


def timelines(case: Case, device: torch.device) -> dict[str, list[Event]]:
    """Events of one overlapped call of a case and of one serial call, by title."""
    args, serial = case.make(device), case.peers[SERIAL]
    assert isinstance(serial, Peer)
    calls = {"overlapped": case.run, SERIAL: serial.run}
    return {
        f"{case.name}: {name}": events_of(record(functools.partial(run, *args), device)) for name, run in calls.items()
    }


def draw(panels: Mapping[str, Sequence[Event]], path: Path) -> None:
    """Draw a panel for each timeline, with a lane for each stream, those of products first. The same events give the
    same file."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = {title: _lanes(events) for title, events in panels.items()}
    heights = [_TITLE + _LANE * max(1, len(each)) for each in lanes.values()]
    with matplotlib.rc_context({"svg.hashsalt": "blockscale", "font.size": 9}):
        figure = Figure(figsize=(10, sum(heights) + 0.8), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False, sharex=True, height_ratios=heights)
        for axes, (title, events) in zip(grid.flat, panels.items(), strict=True):
            places = {lane: place for place, lane in enumerate(lanes[title])}
            for kind, colour in COLOURS.items():
                for lane, place in places.items():
                    spans = [(each.start, each.us) for each in events if each.kind == kind and each.lane == lane]
                    axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.4)
            last = max((each.start + each.us for each in events), default=0.0)
            axes.set_title(f"{title}, {last:,.0f} µs", loc="left", fontsize=9)
            axes.set_yticks([*places.values()], [*places])
            axes.set_ylim(len(places) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
        grid.flat[-1].set_xlabel("µs; one call under the profiler")
        used = {each.kind for events in panels.values() for each in events}
        handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(COLOURS), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _lanes(events: Sequence[Event]) -> list[str]:
    """Lanes with a product first, then by their first event."""
    with_products = [each.lane for each in events if each.kind == "product"]
    return [*dict.fromkeys([*with_products, *(each.lane for each in events)])]
