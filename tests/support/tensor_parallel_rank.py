"""The work of one rank in tests/distributed/test_tensor_parallel.py.

In a module of its own because a spawned process imports it by name.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import blockscale as bs
from support import cut_experts, sequence_parallel, tokens_sharded


def run(rank: int, ranks: int, folder: str, only: tuple[str, ...] = ()) -> None:
    """All cases on one rank; writes {case: what was found, or the error}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    results: dict[str, Any] = {}
    # it sums in an order that does not depend on the number of rows
    with bs.use_backend(gemm="reference", m_grouped="reference", k_grouped="reference"):
        for label, case in (*tokens_sharded.cases(ranks), *cut_experts.cases(ranks), *sequence_parallel.cases(ranks)):
            if only and not any(each in label for each in only):
                continue
            start = time.process_time()
            try:
                results[label] = case()
            except Exception:  # every rank goes on, so that no collective waits for a rank that stopped
                results[label] = traceback.format_exc(limit=-6)
            if rank == 0 and "SHOW" in os.environ:
                print(label, round(time.process_time() - start, 1), flush=True)
    print(f"rank {rank}: {time.process_time():.1f} CPU seconds")
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
