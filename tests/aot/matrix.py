"""Compile every variant of every kernel for every architecture, and fail if one spills. Usage: `make aot`.

make aot ARGS="--only 'nvfp4 .*stochastic' --arch 90"

Needs no GPU. One process per core. Prints a row per kernel, the worst first, and the exceptions of `cases.py`.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aot.cases import ARCHES, CASES, MAY_SPILL, Budget, Case, Cast, known_spill, problems, reports, variants
from aot.compiled import CAN_COMPILE, Report

Result = tuple[str, int, list[tuple[Report, list[str]]], str]


@functools.cache
def matrix(*, product: bool) -> dict[str, Case]:
    """`CASES` and all casts, without budgets; accesses of whole tiles must be wide."""
    rest = [Case(v.name, v, Budget(wide=is_wide(v)), ARCHES) for v in variants(product=product)]
    named = [replace(case, budget=replace(case.budget, registers=255, per_value=0.0), arches=ARCHES) for case in CASES]
    return {case.name: case for case in (*named, *(case for case in rest if case.name not in {c.name for c in named}))}


def is_wide(variant: Cast) -> bool:
    """Whether accesses must be wide. Not for ragged and strided sources, whose rows are unaligned; not for the blocked
    layout, which stores scale bytes one by one; not for stochastic rounding, with few values per thread."""
    return variant.source == "whole" and not variant.layout and not variant.stochastic


def compile_one(name: str, arch: int, product: bool) -> Result:
    """Compile one case in a worker process, which finds it by name: calls cannot be pickled."""
    case = matrix(product=product)[name]
    try:
        # the PTX is not sent back
        results = [
            (replace(found, ptx=""), problems(case.name, found, case.budget)) for found in reports(case.call, arch)
        ]
        return case.name, arch, results, ""
    except Exception as error:
        return case.name, arch, [], f"{type(error).__name__}: {str(error).strip()[-300:]}"


def main() -> int:
    """Compile, print the table, return 1 on failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern that variants must match")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHES, choices=ARCHES)
    parser.add_argument("--product", action="store_true", help="all combinations of options: many hours")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    assert CAN_COMPILE, "needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"
    console = Console(width=None if os.isatty(1) else 140)
    work = [
        (name, arch)
        for name in matrix(product=options.product)
        for arch in options.arch
        if re.search(options.only, name)
    ]
    console.print(
        f"triton {triton.__version__}, torch {torch.__version__}: {len(work)} variants, {options.jobs} at a time"
    )
    start = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(compile_one, name, arch, options.product) for name, arch in work]
        done = track(as_completed(tasks), "compiling", total=len(tasks), console=console, disable=not os.isatty(1))
        results: list[Result] = []
        for task in done:
            results.append(task.result())
            if not os.isatty(1):  # a truncated log still has the results
                name, arch, every, error = results[-1]
                figures = " | ".join(f"{r.kernel} {r.registers} registers, {r.spilled} spilled" for r, _ in every)
                print(f"{len(results)}/{len(tasks)} sm_{arch} {name}: {figures or error}", flush=True)
    failures = show(console, results)
    console.print(f"{len(results)} variants in {time.monotonic() - start:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


def show(console: Console, results: list[Result]) -> list[str]:
    """Print the table; return the failures."""
    table = Table("variant", "sm", "kernel", *("warps", "registers", "spilled", "shared", "per value"), "loads, stores")
    failures = [f"sm_{arch} {name}: {error}" for name, arch, _, error in results if error]
    rows = [(name, arch, found, wrong) for name, arch, every, _ in results for found, wrong in every]
    for name, arch, found, wrong in sorted(rows, key=lambda row: (-row[2].spilled, row[0], row[1], row[2].kernel)):
        failures += [f"sm_{arch} {name}, {found.kernel}: {problem}" for problem in wrong]
        style = "red" if wrong else "yellow" if found.spilled else ""
        figures = (found.warps, found.registers, found.spilled, found.shared)
        moved = f"{found.loads} {found.stores}".replace("{", "").replace("}", ";")
        table.add_row(name, str(arch), found.kernel, *map(str, figures), f"{found.per_value:.1f}", moved, style=style)
    console.print(table)
    for known in MAY_SPILL:
        most = max((found.spilled for name, arch, found, _ in rows if known_spill(name, arch) is known), default=0)
        if most:
            text = f"known: {known.pattern} spills up to {most} of {known.spilled} bytes allowed: {known.reason}"
            console.print(text, markup=False)
    for failure in failures:
        console.print(f"FAIL {failure}", markup=False)
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
