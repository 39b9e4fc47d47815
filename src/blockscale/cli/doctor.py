"""`blockscale doctor`: versions, device, the backend of each operation, and a self-check."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..diagnostics import DoctorReport

MAX_PROCESSES = 8  # each opens a CUDA context, which is serialized


def run(device: str | None = None, json: bool = False, workers: int | None = None) -> int:
    """Show versions, device, which backend serves each operation in each format and why, and run a self-check against
    the reference. Exit status 1 if a check fails.

    Args:
        device: Device to check, such as cpu or cuda:0; the first GPU if there is one.
        json: Print machine-readable JSON instead of tables.
        workers: Parallel processes for checks that compile kernels; by default one on a CPU, up to eight on a GPU.
    """
    from rich.console import Console

    arguments.check_device(device)
    processes = arguments.worker_count(workers)
    console = Console(stderr=json)
    with console.status("importing torch ..."):
        from ..diagnostics.doctor import check_count, doctor
        from ..hardware import default_device, named_device

        where = default_device() if device is None else named_device(device)
    if workers is None:
        processes = min(processes, MAX_PROCESSES) if where.type == "cuda" else 1
    with arguments.progress(console, check_count(), "checking every backend") as advance:
        report = doctor(where, workers=processes, on_check=lambda look: advance(f"{look}: done"))
    if json:
        print(json_module.dumps(report.to_dict(), indent=2))
    else:
        _show(console, report)
    return 0 if report.ok else 1


def _show(console: Console, report: DoctorReport) -> None:
    unknown = dict.fromkeys(report.unknown_settings, "[red]not a setting of this library: a typo?[/]")
    facts = {"versions": report.versions, "device": report.device, "settings": report.settings | unknown}
    reasons = dict.fromkeys(choice.reason for choice in report.choices)
    numbers = {reason: number for number, reason in enumerate(reasons, start=1)}
    for title, rows in facts.items():
        if rows:
            console.print(_pairs(title, rows))
    for table in _matrices(report, numbers):
        console.print(table)
    console.print(_pairs("reasons", {f"[dim]{number}[/]": reason for reason, number in numbers.items()}))
    failed = [check for check in report.checks if not check.passed]
    for check in failed:
        console.print(f"[red]FAIL[/] {check.name}: {check.detail}")
    verdict = f"[red]{len(failed)} failed[/]" if failed else "[green]all passed[/]"
    console.print(f"self-check: {len(report.checks)} checks, {verdict}, {report.seconds:.1f} s")


def _pairs(title: str, rows: dict[str, str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, text in rows.items():
        table.add_row(name, text)
    return table


# titles, and a pattern of the operations below them; each table fits 80 columns
TABLES = {
    "backends of the casts (numbers: reasons)": "cast|dequantize",
    "GEMMs": "gemm|.*grouped",
    "casts fused with SwiGLU": "swiglu",
    "casts fused with RMSNorm": "rmsnorm",
    "casts fused with a permutation": "permute(?!_rows)",
    "permute and combine of tokens": "combine|.*_rows",
    "codes of a weight": "transpose",
}


def _matrices(report: DoctorReport, numbers: dict[str, int]) -> Iterator[Table]:
    """Tables of operation x format -> backend with the number of the reason in superscript."""
    cells = {(choice.format, choice.operation): choice for choice in report.choices}
    every, formats = (dict.fromkeys(keys) for keys in zip(*((op, name) for name, op in cells), strict=True))
    for title, pattern in TABLES.items():
        operations = [name for name in every if re.match(pattern, name)]
        table = arguments.table(title, ("format", *operations), padding=0)
        for name in formats:
            row = [cells.get((name, operation)) for operation in operations]
            if any(row):
                table.add_row(name, *(f"{c.backend}{_superscript(numbers[c.reason])}" if c else "-" for c in row))
        yield table


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
