"""The program of a rank that runs cases one after the other: joins a gloo group, writes what each case found."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Case = tuple[str, Callable[[], Any]]


def run_cases(
    rank: int,
    ranks: int,
    folder: str,
    only: tuple[str, ...],
    cases: Callable[[], Iterable[Case]],
    timeout: timedelta | None = None,
) -> None:
    """Write {case: what it found, or its error} to `rank.json`. A case that fails does not stop the others, for which
    the other ranks would wait.  only: parts of names of cases; all of them without one.  SHOW=1 prints them with
    their CPU seconds."""
    faulthandler.enable()  # a crash in a library tells where its threads are
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    results: dict[str, Any] = {}
    for label, case in cases():
        if only and not any(each in label for each in only):
            continue
        start = time.process_time()
        try:
            results[label] = case()
        except Exception:
            results[label] = traceback.format_exc(limit=-6)
        if "SHOW" in os.environ and (rank == 0 or "Traceback" in str(results[label])):
            print(rank, label, round(time.process_time() - start, 1), results[label], flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(run: Callable[..., None]) -> None:
    """python -m support.PROGRAM RANKS [PART OF A CASE'S NAME ...]"""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (int(sys.argv[1]), folder, tuple(sys.argv[2:])), nprocs=int(sys.argv[1]))
