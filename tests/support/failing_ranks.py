"""The program of tests/distributed/test_failures.py: calls that differ between two ranks, and ranks that fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockscale as bs
from blockscale.distributed import (
    column_parallel,
    expert_parallel_,
    gather_activation,
    gather_low_,
    grouped_swiglu_parallel,
    row_parallel,
    swiglu_parallel,
)
from blockscale.distributed.collectives import ranks_of
from blockscale.distributed.overlap.link import Link
from blockscale.distributed.world import join
from blockscale.errors import BlockscaleError
from blockscale.nn import MoE
from support.forked_ranks import Launcher

TIMEOUT = 3.0
# gather and sum: of rows that travel beside products, without a collective
LAYERS = ("rows", "experts", "reduce", "gather", "sum")


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def experts(count: int) -> MoE:
    torch.manual_seed(0)
    moe = MoE(dim=32, hidden=32, experts=count, top_k=1, recipe="mxfp8")
    return expert_parallel_(moe, init_device_mesh("cpu", (2,)))


def sharded(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(64, rows, bias=False))
    bs.quantize_(model, "fp8_blockwise", lambda module, name: True)
    gather_low_(model)
    return fully_shard(model)


def unequal(rank: int, folder: Path) -> dict[str, str]:
    """Calls of two ranks that differ. Sizes that both ranks have used before are among them."""
    found: dict[str, str] = {}
    with join("cpu", TIMEOUT):
        group, tokens = dist.group.WORLD, 128 * (1 + rank)
        assert group is not None
        few, many = experts(2), experts(4)
        for size in (128, 256):
            column_parallel(ones(size, 64), ones(128, 64), group=group)
        cases: dict[str, Callable[[], Any]] = {
            "tokens": lambda: column_parallel(ones(tokens, 64), ones(128, 64), group=group),
            "columns": lambda: column_parallel(ones(128, 64), ones(tokens, 64), group=group),
            "rows": lambda: row_parallel(ones(2 * tokens, 128), ones(64, 128), group=group),
            "outputs": lambda: row_parallel(ones(256, 128), ones(64 + rank, 128), group=group),
            "calls": lambda: (
                column_parallel(ones(128, 128), ones(128, 128), group=group)
                if rank
                else row_parallel(ones(256, 128), ones(128, 128), group=group)
            ),
            "recipes": lambda: column_parallel(
                ones(128, 64), ones(128, 64), group=group, recipe="mxfp8" if rank else "fp8_blockwise"
            ),
            "gradients": lambda: column_parallel(ones(128, 64).requires_grad_(rank > 0), ones(128, 64), group=group),
            "swiglu": lambda: swiglu_parallel(ones(tokens, 64), ones(256, 64), ones(64, 128), group=group),
            "activation": lambda: gather_activation(ones(tokens, 64), group=group),
            "cut experts": lambda: grouped_swiglu_parallel(
                ones(4 + rank, 64),
                ones(2, 64, 64),
                ones(2, 64, 32),
                bs.sort_by_expert(torch.zeros(4 + rank, 1, dtype=torch.int64), 2),
                ones(4 + rank, 1),
                recipe="mxfp8",
                group=group,
            ),
            "layers": lambda: (few if rank else many)(ones(4, 32)),
            "shards": lambda: sharded(192 + 64 * rank)(ones(128, 64)),
        }
        for name, call in cases.items():
            try:
                call()
                found[name] = "no error"
            except BlockscaleError as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def failing(what: str, layer: str) -> Callable[[int, Path], Any]:
    """The second rank raises, is killed or hangs between two calls of a layer."""

    def scenario(rank: int, folder: Path) -> None:
        with join("cpu", TIMEOUT):
            group = dist.group.WORLD
            assert group is not None
            moe = experts(2)
            # rows that a rank sent before it failed are still read: the call after that has an error
            for call in range(3):
                if rank and call == 1 and what == "raise":
                    raise ValueError("of rank 1 alone")
                if rank and call == 1 and what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank and call == 1 and what == "hang":
                    time.sleep(TIMEOUT + 6)
                if layer == "rows":
                    row_parallel(ones(256, 128), ones(64, 128), group=group)
                elif layer == "experts":
                    moe(ones(4, 32))
                elif layer == "gather":
                    list(Link.of(ranks_of(group)).gather([ones(4, 4)]).arrivals())
                elif layer == "sum":
                    total = Link.of(ranks_of(group)).sum((4, 4), torch.float32)
                    for owner in total.destinations():
                        total.push(owner, ones(4, 4))
                    total.finish()
                else:
                    dist.all_reduce(ones(4))

    return scenario


def main(folder: Path) -> None:
    launcher = Launcher(folder)
    waiting = [
        launcher.start(f"{what} {layer}", failing(what, layer), 2)
        for what in ("raise", "kill", "hang")
        for layer in LAYERS
    ]
    launcher.run("unequal", unequal)
    for each in waiting:
        launcher.wait(each)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
