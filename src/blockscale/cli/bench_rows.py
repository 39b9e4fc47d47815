"""Rows of benches as they are measured: a progress bar, storing, and the exit status."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ..bench.harness import Case
    from ..bench.store import Row

# console width for files and pipes, which have no terminal width
FILE_WIDTH = 200


def timed(
    console: Console,
    cases: Sequence[Case],
    suite: str,
    device: torch.device,
    seconds: float,
    *,
    json: Path | None,
    quick: bool,
    commit: str | None,
) -> Iterator[Row]:
    """Yield the rows as they are measured, with a progress bar that names the current case.

    seconds: of a slice.  json: file that each row is stored in at once, so that an interrupted run keeps its rows.
    """
    from .. import __version__
    from ..bench.harness import Budget, run_cases
    from ..bench.store import where, write

    budget = Budget(5 if quick or device.type != "cuda" else 11, seconds)
    names = iter([*(case.name for case in cases[1:]), ""])
    with arguments.progress(console, len(cases), cases[0].name) as advance:
        for row in run_cases(cases, suite, device, where(device, __version__, commit), budget):
            if json is not None:
                write(json, [row])
            yield row
            advance(next(names))


def show_wrong(console: Console, rows: Sequence[Row]) -> int:
    """Print the rows with wrong results; the exit status, 1 if there are any."""
    wrong = [row for row in rows if row.fault]
    for row in wrong:
        console.print(f"[red]WRONG[/] {row.case}: {row.problem or f'{row.fault} differ from the reference'}")
    return 1 if wrong else 0
