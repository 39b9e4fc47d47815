"""The program that times overlapped products among ranks: a dry run on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from benchmarks import overlap_ranks
from support.ranks import start_ranks

SMALL = "--tokens 64 --columns 256 --features 256 --rounds 2 --seconds 1e-4 --device cpu"


def one_rank(rank: int, folder: str) -> None:
    """A right run, and one in which the last rank's sums are wrong."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    cpu, real = torch.device("cpu"), overlap_ranks.mm_reduce_scatter
    status = overlap_ranks.run(overlap_ranks.parse([*SMALL.split(), "--out", f"{folder}/rows.jsonl"]), cpu)

    def wrong(*args: Any, overlap: Any, **options: Any) -> torch.Tensor:
        found = real(*args, overlap=overlap, **options)
        if overlap == "on" and rank == 1:
            found[3, 5] += 10
        return found

    with patch.object(overlap_ranks, "mm_reduce_scatter", wrong):
        words = [*SMALL.split(), "--op", "mm_reduce_scatter", "--payload", "bf16", "--out", f"{folder}/wrong.jsonl"]
        statuses = status, overlap_ranks.run(overlap_ranks.parse(words), cpu)
    Path(folder, f"{rank}.json").write_text(json.dumps(statuses))
    dist.destroy_process_group()


@pytest.mark.slow
def test_contenders_are_checked_and_timed(tmp_path: Path):
    start_ranks(one_rank, (str(tmp_path),), 2)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[0, 1]] * 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["op"], row["payload"]) for row in rows] == [
        (op, payload) for op in ("all_gather_mm", "mm_reduce_scatter") for payload in ("bf16", "fp8_blockwise_pow2")
    ]
    for row in rows:
        assert row["us"].keys() == {"overlapped", "by a collective", "product alone"}
        # torch has no such operation on CPUs
        assert row["wrong"].keys() == ({"torch, fused"} if row["payload"] == "bf16" else set())
    assert rows[0]["where"]["command"].startswith("torchrun --nproc-per-node 2 -m benchmarks.overlap_ranks --tokens 64")
    (wrong,) = map(json.loads, (tmp_path / "wrong.jsonl").read_text().splitlines())
    assert "of the largest value" in wrong["wrong"]["overlapped"]
    assert "overlapped" not in wrong["us"]
