"""A rank that raises, dies, hangs or makes another call ends in an error on all ranks within the timeout, by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from support.failing_ranks import LAYERS
from support.forked_ranks import results

TESTS = Path(__file__).parents[1]
DIFFER = "ranks that make different calls: rank 0: .*; rank 1: "
SAID = {
    "tokens": rf"{DIFFER}column_parallel \(256, 64\)",
    "columns": rf"{DIFFER}column_parallel \(128, 64\) \(256, 64\)",
    "rows": rf"{DIFFER}row_parallel \(512, 128\)",
    "outputs": rf"{DIFFER}row_parallel \(256, 128\) \(65, 128\)",
    "calls": f"{DIFFER}column_parallel",
    "recipes": f"{DIFFER}column_parallel .* mxfp8 ",
    "gradients": f"{DIFFER}column_parallel .* True False False",
    "swiglu": rf"{DIFFER}swiglu_parallel \(256, 64\)",
    "activation": rf"{DIFFER}gather_activation \(256, 64\)",
    "cut experts": rf"{DIFFER}experts cut along their hidden units \(5, 64\)",
    "layers": f"{DIFFER}experts of several ranks 2",
}
OWN, SILENT = "rank 1 failed: ValueError: of rank 1 alone", "no word from rank 1"


@pytest.mark.slow
def test_two_ranks(tmp_path: Path):
    """One test, since each would import torch and fork ranks of its own; see support/failing_ranks.py."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "support.failing_ranks", str(tmp_path)]
    subprocess.run(program, env=environment, check=True, timeout=300)
    found = results(tmp_path)
    first, second = found["unequal"][0], found["unequal"][1]
    assert first["value"].keys() == {*SAID, "shards"}
    for name, pattern in SAID.items():
        assert re.search(f"ShardingError: {pattern}", first["value"][name]), (name, first["value"][name])
    # shards of whole blocks exchange nothing: the other rank waits in FSDP's gather
    assert f"RankError: {SILENT}" in first["value"]["shards"]
    assert "while rank 0 waits in maxima of weights" in first["value"]["shards"]
    assert second["error"] == "RankError"
    for what in ("raise", "kill", "hang"):
        for layer in LAYERS:
            ranks = found[f"{what} {layer}"]
            assert ranks[0]["error"] == "RankError"
            assert (OWN if what == "raise" else SILENT) in ranks[0]["said"], ranks[0]["said"]
            assert ranks[0]["seconds"] < 30
            # a rank that hung and wakes up ends too
            assert {rank: each["error"] for rank, each in ranks.items() if rank} == {
                "raise": {1: "ValueError"},
                "kill": {},
                "hang": {1: "RankError"},
            }[what]
