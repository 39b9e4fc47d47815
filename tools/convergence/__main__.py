"""`python -m convergence`: train the missing runs in parallel, then report. Usage: `make convergence`.

make convergence ARGS="--device cuda --workers 12"
make convergence ARGS="--recipes mxfp8 nvfp4 --seeds 8"
make convergence ARGS="--report --machine h200"

Rows are appended to benchmarks/results/convergence-<device>.jsonl as runs end. Stored runs are not repeated, so the
same command resumes an interrupted one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from blockscale import __version__
from blockscale.bench.store import where

from .arms import ARMS, BASELINE, HONEST, NULL
from .data import standard_library
from .gates import measure
from .model import SIZES
from .picture import draw
from .report import Report
from .trainer import fit, train

ROOT = Path(__file__).parents[2]
# seeds of an arm with a fault: its gap is large, or another gate has to find it
FAULT_SEEDS = 1
PROBLEMS = {"run": train, "regression": fit}


def main() -> int:
    """Run and report; exit status 1 if a verdict fails."""
    options = _options()
    path = ROOT / f"benchmarks/results/convergence-{options.machine}.jsonl"
    if not options.report:
        _run(options, path)
    stored = _read(path)
    # the table has only rows of the size and text of the last one
    kind = (stored[-1]["size"], stored[-1]["data"]) if stored else None
    report = Report.of([row for row in stored if (row["size"], row["data"]) == kind])
    report.show(Console() if sys.stdout.isatty() else Console(width=170))
    report.write(ROOT / "docs/convergence.md", options.machine)
    picture = ROOT / f"docs/images/convergence-{options.machine}.svg"
    try:
        draw(report, picture)
        print(f"{picture.relative_to(ROOT)} written")
    except ImportError as error:
        print(f"no picture: {error}")
    print("No verdict is against us." if report.is_good else "NOT GOOD: see above.")
    return 0 if report.is_good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make convergence", description="Paired training runs against bf16.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of each recipe")
    parser.add_argument("--recipes", nargs="*", choices=list(ARMS), default=list(ARMS), help="recipes and faults")
    parser.add_argument("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--size", choices=list(SIZES), help="full on a GPU, small on a CPU")
    parser.add_argument("--workers", type=int, help="processes; 12 on a GPU, one per core on a CPU")
    parser.add_argument("--commit", help="commit to record if the source is no git checkout")
    parser.add_argument("--machine", help="machine in the name of the results; by default the GPU's, or cpu")
    parser.add_argument("--report", action="store_true", help="run nothing, report stored rows")
    options = parser.parse_args()
    is_cpu = torch.device(options.device).type == "cpu"
    options.machine = options.machine or _slug(options.device)
    options.size = options.size or ("small" if is_cpu else "full")
    options.workers = options.workers or (len(os.sched_getaffinity(0)) if is_cpu else 12)
    return options


def _tasks(options: argparse.Namespace, path: Path) -> Iterator[tuple[Callable[..., dict[str, Any]], Any]]:
    """(function, its arguments) of each missing row, all arms of a seed together. The longest tasks start first, so
    that none of them runs alone at the end."""
    data, size = standard_library().hash, options.size
    done = {
        (row["kind"], row["arm"], row["seed"]) for row in _read(path) if row["size"] == size and row["data"] == data
    }
    named = [name for name in ARMS if name in (BASELINE, NULL, *options.recipes)]
    for name in named:
        if name != BASELINE and ("gates", name, None) not in done:
            yield measure, (name, size, options.device)
    for seed in range(options.seeds):
        arms = [name for name in named if name in HONEST or seed < FAULT_SEEDS]
        for name in sorted(arms, key=lambda name: ARMS[name].bits):
            for kind in options.problems:
                if (kind, name, seed) not in done:
                    yield PROBLEMS[kind], (name, seed, size, options.device)


def _run(options: argparse.Namespace, path: Path) -> None:
    facts = dataclasses.asdict(where(torch.device(options.device), __version__, options.commit))
    facts["command"] = " ".join(["make convergence", *sys.argv[1:]])
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    os.environ["OMP_NUM_THREADS"] = "1"  # processes already keep every core busy
    # spawned: a forked process cannot use the GPU
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool, Progress(*columns) as progress:
        waiting: list[Future[dict[str, Any]]] = []
        for function, arguments in _tasks(options, path):
            waiting.append(pool.submit(function, *arguments))
        bar = progress.add_task("", total=len(waiting))
        for future in as_completed(waiting):
            row = future.result()
            with path.open("a") as file:
                file.write(json.dumps(row | {"where": facts}) + "\n")
            said = f"seed {row['seed']}: {row['final']:.4f}" if "final" in row else "gates"
            progress.update(bar, advance=1, description=f"{row['arm']} {said}")
            if not progress.console.is_terminal:
                print(f"{row['arm']:>15} {said}  ({row['seconds']:.0f} s)", flush=True)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _slug(device: str) -> str:
    """cpu, or the GPU's short name as in other result files."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device).split()[-1].lower()


if __name__ == "__main__":
    sys.exit(main())
