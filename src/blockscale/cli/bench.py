"""`blockscale bench`: check and time casts, GEMMs, layers and host overhead; `bench_overlap.py` has other options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import check_name
from . import arguments, bench_overlap
from .bench_rows import FILE_WIDTH, show_wrong, timed
from .options import parse_words

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..bench.harness import Case
    from ..bench.store import Row

Suite = Literal["casts", "gemm", "linear", "mlp", "moe", "dispatch"]
# suites whose rows have TFLOP/s and SQNR
PRODUCTS = ("gemm", "linear", "mlp", "moe")


def main(words: list[str]) -> int:
    """Parse the options, which are others for overlap, and run it."""
    if words[:1] == ["overlap"]:
        return parse_words(bench_overlap.run, "bench overlap", words[1:])
    return parse_words(run, "bench", words)


def run(
    suite: Suite = "casts",
    /,
    json: Path | None = None,
    quick: bool = False,
    only: str = "",
    device: str | None = None,
    peers: tuple[str, ...] = (),
    commit: str | None = None,
) -> int:
    """Check every case against the reference, then time it beside a copy and other implementations. Exit status 1 if a
    kernel is wrong; a wrong kernel is not timed.

    Args:
        suite: casts: bandwidth of every cast. gemm: speed and accuracy of GEMMs. linear, mlp: forward and backward of
            layers. moe: grouped GEMMs, experts and MoE layers. dispatch: host time per call. overlap, which has
            options of its own (blockscale bench overlap --help): products beside their communication.
        json: Store the rows in this file, replacing rows of the same case and GPU.
        quick: Five rounds instead of eleven.
        only: Only cases whose name or group contains this text, or one of several separated by |
        device: Device to run on, such as cpu or cuda:0; the first GPU if there is one.
        peers: Baselines to time beside, by their names in the table, separated by commas or spaces, such as bf16 or
            'torchao compiled'; none: no baseline. All by default.
        commit: Commit to record if the source is not a git checkout.
    """
    arguments.check_device(device)
    arguments.check_writable(json, "--json")
    console = arguments.wide_console(FILE_WIDTH)
    with console.status("importing torch ..."):
        from ..bench.store import read
        from ..hardware import default_device, named_device

    where = default_device() if device is None else named_device(device)
    if json is not None:
        read(json)  # raises for a file of another kind before anything is timed
    every = _beside(_cases(console, suite, where), peers)
    texts = [text for text in only.split("|") if text] or [""]
    cases = [case for case in every if any(text in case.name or text in case.group for text in texts)]
    if not cases:
        fix = f"use a part of one, such as --only {every[0].name!r}"
        arguments.refuse(f"--only {only!r}", "it runs the cases whose name contains it", fix)
    rows: list[Row] = []
    for row in timed(console, cases, suite, where, _slice_seconds(suite, where), json=json, quick=quick, commit=commit):
        rows.append(row)
    console.print(_table(rows))
    _show_notes(console, rows)
    return show_wrong(console, rows)


def _cases(console: Console, suite: Suite, device: torch.device) -> list[Case]:
    from ..bench import rooflines
    from ..bench.suites import casts, fused, gemm, layers, moe
    from ..hardware import capability

    if device.type != "cuda":
        console.print("no GPU: this times the reference on a CPU with tiny tensors; the times are no measure of speed")
    if suite == "dispatch":
        return list(casts.dispatch_cases(device))
    if suite == "casts":
        extent = casts.extent(device)
        return [*casts.cases(extent), *fused.cases(extent)]
    here = capability(device)
    with console.status("measuring the ceilings of this machine ..."):
        if suite == "gemm":
            return list(gemm.cases(here, rooflines.measure_ceilings(device)))
        roofs = rooflines.find_roofs(device)
        if suite == "moe":
            return list(moe.cases(here, rooflines.measure_ceilings(device), roofs))
    cases = layers.linear_cases if suite == "linear" else layers.mlp_cases
    return list(cases(here, roofs))


def _beside(cases: list[Case], names: Sequence[str]) -> list[Case]:
    """The cases with the named peers only, or with all without names; raises for unknown ones."""
    from ..bench.harness import with_peers

    known = dict.fromkeys(name for case in cases for name in case.peers)
    for name in names:
        check_name(name, (*known, "none"), "peer")
    return [with_peers(case, names) for case in cases] if names else cases


def _slice_seconds(suite: Suite, device: torch.device) -> float:
    """Seconds of a slice. GEMMs run at the power limit, and the clock follows with a delay: longer slices. Layers are
    launched call by call, and the first call finds the device idle."""
    shortest = 0.004
    longer = {"gemm": 0.008, "linear": 0.02, "mlp": 0.04, "moe": 0.02}
    return longer.get(suite, shortest) if device.type == "cuda" else shortest


def _table(rows: Sequence[Row]) -> Table:
    from ..bench.store import shown_peers

    peers = shown_peers(rows)
    suite = rows[0].suite
    title = "µs per call" if suite == "dispatch" else "µs per call; peers: their time relative to ours"
    middle = ("TFLOP/s", "% bound", "dB") if suite in PRODUCTS else ("GB/s", "% copy")
    figures = ("µs", "±%", *middle, *peers)
    table = arguments.table(title, ("case", *figures, "backend"), figures, padding=0)
    for row in rows:
        table.add_row(*_cells(row, peers))
    return table


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    from ..bench.store import number

    products = row.suite in PRODUCTS
    if row.us is None or row.spread_us is None:
        return [row.case, "[red]WRONG[/]", *["-"] * (3 + products + len(peers)), row.backend]
    half_spread = 50 * (row.spread_us[1] - row.spread_us[0]) / row.us
    casts = [number(row.gb_s, 0), number(row.percent_of_copy, 0)]
    middle = [number(row.tflop_s), number(row.percent_of_bound, 0), number(row.sqnr_db)] if products else casts
    cells = [_peer_cell(row, name) for name in peers]
    return [row.case, f"{row.us:.1f}", f"{half_spread:.1f}", *middle, *cells, f"{row.backend}/{row.method}"]


def _peer_cell(row: Row, name: str) -> str:
    from ..bench.store import beside, number

    return number(row.peers.get(name, {}).get("us")) if row.suite == "dispatch" else beside(row, name)


def _show_notes(console: Console, rows: Sequence[Row]) -> None:
    """Print each note once with its cases, then SM clocks, and cases where another backend was faster."""
    from ..bench.store import best_other, misplaced

    notes: dict[str, list[str]] = {}
    for row in rows:
        for name, cell in row.peers.items():
            if "note" in cell:
                notes.setdefault(f"{name}: {cell['note']}", []).append(row.case)
    for note, about in notes.items():
        console.print(f"[dim]{note} ({about[0]}{f' and {len(about) - 1} more' if len(about) > 1 else ''})[/]")
    clocks = [row.sm_clock_mhz for row in rows if row.sm_clock_mhz is not None]
    if clocks:
        console.print(f"[dim]SM clock: {min(clocks):.0f} to {max(clocks):.0f} MHz[/]")
    elif any(row.method not in (None, "cpu") for row in rows):
        console.print("[dim]no SM clock and no power: torch reads them through pip install nvidia-ml-py[/]")
    for row in rows:
        other = best_other(row)
        if other is not None and misplaced(row):
            console.print(f"[yellow]SLOWER[/] {row.case}: {other[0]} takes {other[1]:.2f}x the time of {row.backend}")
