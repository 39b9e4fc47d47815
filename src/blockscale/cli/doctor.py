"""`blockscale doctor`: versions, device, the backend of each operation, and a self-check."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
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


def _show(console: object, report: DoctorReport) -> None:
    from rich.console import Console

    assert isinstance(console, Console)
    console.print(_facts("versions", report.versions))
    console.print(_facts("device", report.device))
    if report.settings or report.unknown_settings:
        unknown = dict.fromkeys(report.unknown_settings, "[red]not a setting of this library: a typo?[/]")
        console.print(_facts("settings", report.settings | unknown))
    for table in _matrices(report):
        console.print(table)
    console.print(_reasons(report))
    failed = [check for check in report.checks if not check.passed]
    for check in failed:
        console.print(f"[red]FAIL[/] {check.name}: {check.detail}")
    verdict = f"[red]{len(failed)} failed[/]" if failed else "[green]all passed[/]"
    console.print(f"self-check: {len(report.checks)} checks, {verdict}, {report.seconds:.1f} s")


def _facts(title: str, facts: dict[str, str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def _matrices(report: DoctorReport) -> list[Table]:
    """Tables of operation x format -> backend with the number of the reason; each fits 80 columns."""
    operations = list(dict.fromkeys(choice.operation for choice in report.choices))
    swiglu = [name for name in operations if name.startswith("swiglu")]
    routing = [name for name in operations if name.endswith("_rows") or name.startswith("combine")]
    norms = [name for name in operations if name.startswith("rmsnorm")]
    permuted = [name for name in operations if name.startswith("permute") and name not in routing]
    products = [name for name in operations if name.startswith("gemm") or name.endswith("grouped")]
    casts = [name for name in operations if name not in swiglu + norms + permuted + products + routing]
    return [
        _matrix(report, "backends of the casts (numbers: reasons)", casts),
        _matrix(report, "GEMMs", products),
        _matrix(report, "casts fused with SwiGLU", swiglu),
        _matrix(report, "casts fused with RMSNorm", norms),
        _matrix(report, "casts fused with a permutation", permuted),
        _matrix(report, "permute and combine of tokens", routing),
    ]


def _matrix(report: DoctorReport, title: str, operations: list[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    numbers = _numbered(report)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
    table.add_column("format", no_wrap=True)
    for operation in operations:
        table.add_column(operation, no_wrap=True)
    cells = {(choice.format, choice.operation): choice for choice in report.choices}
    for name in dict.fromkeys(choice.format for choice in report.choices):
        row = [cells.get((name, operation)) for operation in operations]
        if any(row):
            table.add_row(name, *(f"{c.backend}{_superscript(numbers[c.reason])}" if c else "-" for c in row))
    return table


def _reasons(report: DoctorReport) -> Table:
    from rich.table import Table

    table = Table(title="reasons", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for reason, number in _numbered(report).items():
        table.add_row(f"[dim]{number}[/]", reason)
    return table


def _superscript(number: int) -> str:
    """A number in superscript, one column per digit."""
    return "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(number))


def _numbered(report: DoctorReport) -> dict[str, int]:
    reasons = dict.fromkeys(choice.reason for choice in report.choices)
    return {reason: number for number, reason in enumerate(reasons, start=1)}
