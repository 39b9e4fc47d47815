"""Overlapped products among ranks: beside their product, by a collective, the product alone, and torch's fused ones.

    torchrun --nproc-per-node 8 -m benchmarks.overlap_ranks                          # a GPU for each rank
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 \\
    torchrun --nproc-per-node 2 -m benchmarks.overlap_ranks --one-gpu                # ranks take turns on one GPU
    torchrun --nproc-per-node 2 -m benchmarks.overlap_ranks --device cpu --tokens 64 --columns 256 --features 256

Every contender is checked first, three times with other rows beside a late rank, against products of the rows of all
ranks, which each rank makes from their seeds.
Contenders take turns; a time is that of the slowest rank, from a barrier to the end of several calls. Ranks that share
a GPU wait for each other's slices of time, so their times compare contenders and say nothing about links; they have no
collective, which NCCL refuses there, and none of torch's operations, which stand still there (seen with torch 2.11:
the hosts of both ranks in the launch of a product). Those (`torch.ops.symm_mem.fused_all_gather_matmul` and
`fused_matmul_reduce_scatter`) take bf16 alone: they have no 1x128 scales.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # pyright: ignore[reportUnusedImport]  # defines torch.ops.symm_mem
from torch import Tensor

from blockscale import __version__
from blockscale.autograd.operands import Casts
from blockscale.autograd.recipe import get_recipe
from blockscale.bench.store import where
from blockscale.distributed.overlap import all_gather_mm, check, mm_reduce_scatter
from blockscale.gemm import scaled_mm

OURS, COLLECTIVE, ONE, FUSED = "overlapped", "by a collective", "product alone", "torch, fused"
Call = Callable[[], Tensor]
# largest distance of a sum from that of parts in the order of ranks, over its largest value: roundings to bf16
ROUNDING = 2.0**-8


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="*", choices=("all_gather_mm", "mm_reduce_scatter"), default=None)
    parser.add_argument("--tokens", type=int, default=4096, help="of all ranks")
    parser.add_argument(
        "--columns", type=int, help="out features of all ranks; default: Flux's 49152, or 12288 of a sum"
    )
    parser.add_argument(
        "--features", type=int, help="in features of all ranks; default: Flux's 12288, or 49152 of a sum"
    )
    parser.add_argument("--payload", nargs="*", default=["bf16", "fp8_blockwise_pow2"])
    parser.add_argument("--one-gpu", action="store_true", help="all ranks use the first GPU, and gloo")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.02, help="of the calls of a contender in a round")
    parser.add_argument("--out", type=Path, help="file that a line of JSON for each case is appended to")
    return parser.parse_args(words, argparse.Namespace(words=" ".join(words)))


def random(shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """bf16 normal values, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).bfloat16()


def operand(payload: str, values: Tensor, kind: str) -> Any:
    """Rows ("input") or a weight as products of a recipe take them: an operand, or the values."""
    row, _ = getattr(Casts(get_recipe(payload)), kind)(values, save=False)
    return values if row is None else row


def travelling(a: Any) -> Any:
    """Rows as `overlap` takes them: an operand with plain scales, or values."""
    return a if isinstance(a, Tensor) else a.with_layout("plain")


def multiply(a: Any, weight: Any) -> Tensor:
    """The product of rows with a weight, bf16."""
    if not isinstance(a, Tensor):
        return scaled_mm(a, weight)
    return torch.nn.functional.linear(a, weight)


def gather_calls(
    payload: str, m: int, n: int, k: int, seed: int, device: torch.device
) -> tuple[dict[str, Call], Tensor]:
    """Contenders of `all_gather_mm` on this rank, and the right result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = [random((m // ranks, k), 1000 * seed + each, device) for each in range(ranks)]
    values = random((n // ranks, k), 1000 * seed + 999, device)
    mine, weight = travelling(operand(payload, rows[rank], "input")), operand(payload, values, "weight")
    whole = operand(payload, torch.cat(rows), "input")

    def ours(overlap: Any) -> Tensor:
        (found,), _ = all_gather_mm(mine, weight, group=dist.group.WORLD, overlap=overlap)  # pyright: ignore[reportArgumentType]
        return found

    def fused() -> Tensor:
        _, (found,) = torch.ops.symm_mem.fused_all_gather_matmul(rows[rank], [values.mT], 0, _name())
        return found

    calls = {OURS: lambda: ours("on"), COLLECTIVE: lambda: ours("off"), ONE: lambda: multiply(whole, weight)}
    return calls | ({FUSED: fused} if payload == "bf16" else {}), multiply(whole, weight)


def sum_calls(payload: str, m: int, n: int, k: int, seed: int, device: torch.device) -> tuple[dict[str, Call], Tensor]:
    """Contenders of `mm_reduce_scatter` on this rank, and the sum of the parts in the order of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, values = (
        [random((size, k // ranks), 1000 * seed + shift + each, device) for each in range(ranks)]
        for size, shift in ((m, 0), (n, ranks))
    )
    both = [(operand(payload, x, "input"), operand(payload, w, "weight")) for x, w in zip(rows, values, strict=True)]
    parts = [multiply(*each).chunk(ranks)[rank].float() for each in both]
    mine, weight = travelling(both[rank][0]), both[rank][1]

    def ours(overlap: Any) -> Tensor:
        return mm_reduce_scatter(mine, weight, group=dist.group.WORLD, overlap=overlap)  # pyright: ignore[reportArgumentType]

    def fused() -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(rows[rank], values[rank].mT, "sum", 0, _name())

    calls = {OURS: lambda: ours("on"), COLLECTIVE: lambda: ours("off"), ONE: lambda: multiply(*both[rank])}
    return calls | ({FUSED: fused} if payload == "bf16" else {}), functools.reduce(torch.add, parts).bfloat16()


def _name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def faults(calls: Mapping[str, Call], right: Tensor, late: int) -> dict[str, str]:
    """What is wrong on some rank with contenders that send: "" or a text. torch's may sum in another order.  late: rank
    that is."""
    found: dict[str, str] = {}
    for name in [name for name in calls if name != ONE]:
        try:
            if dist.get_rank() == late:
                pause(right.device)
            got = calls[name]()
            off = float((got.float() - right.float()).abs().max() / right.float().abs().max())
            found[name] = "" if off <= ROUNDING * dist.get_world_size() else f"off by {off:.1e} of the largest value"
        except Exception as error:  # another contender may run
            found[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    everywhere = together(found)
    return {name: next((each[name] for each in everywhere if each[name]), "") for name in found}


@functools.cache
def _host_group() -> Any:
    """Ranks agree through the host, whatever device they have."""
    return dist.new_group(backend="gloo")


def together(value: Any) -> list[Any]:
    """Values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, _host_group())
    return found


def microseconds(call: Call, count: int, device: torch.device) -> float:
    """Microseconds of a call on the slowest rank."""
    synchronize(device)
    dist.barrier(_host_group())
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return max(together((time.perf_counter() - start) * 1e6 / count))


def pause(device: torch.device) -> None:
    """Be about 50 ms late."""
    if device.type == "cuda":
        torch.cuda._sleep(100_000_000)  # pyright: ignore[reportPrivateUsage]  # cycles
    else:
        time.sleep(0.05)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(calls: Mapping[str, Call], options: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Quartiles of microseconds for each contender, in turns."""
    counts = {
        name: max(1, round(options.seconds * 1e6 / microseconds(call, 3, device))) for name, call in calls.items()
    }
    counts = together(counts)[0]
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.rounds):
        names = [*calls][turn % len(calls) :] + [*calls][: turn % len(calls)]
        for name in names:
            found[name].append(microseconds(calls[name], counts[name], device))
    return {name: statistics.quantiles(each, n=4, method="inclusive") for name, each in found.items()}


def case(op: str, payload: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The row of a case; a contender that is wrong has no time."""
    sizes = (49152, 12288) if op == "all_gather_mm" else (12288, 49152)
    n, k = (given or usual for given, usual in zip((options.columns, options.features), sizes, strict=True))
    make = gather_calls if op == "all_gather_mm" else sum_calls
    wrong, calls = dict[str, str](), dict[str, Call]()
    for seed in range(3):
        calls, right = make(payload, options.tokens, n, k, seed, device)
        if options.one_gpu:
            calls = {name: call for name, call in calls.items() if name not in (COLLECTIVE, FUSED)}
        wrong |= {name: text for name, text in faults(calls, right, seed % dist.get_world_size()).items() if text}
    command = f"torchrun --nproc-per-node {dist.get_world_size()} -m benchmarks.overlap_ranks {options.words}"
    us = measure({name: call for name, call in calls.items() if name not in wrong}, options, device)
    check(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    return {
        "op": op, "payload": payload, "m": options.tokens, "n": n, "k": k, "ranks": dist.get_world_size(),
        "one_gpu": options.one_gpu, "us": us, "wrong": wrong,
        "where": asdict(where(device, __version__)) | {"command": command},
    }  # fmt: skip


def main(words: Sequence[str]) -> int:
    """One rank of torchrun."""
    options = parse(words)
    local = 0 if options.one_gpu else int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.one_gpu or device.type == "cpu" else "cpu:gloo,cuda:nccl")
    failed = run(options, device)
    dist.destroy_process_group()
    return failed


def run(options: argparse.Namespace, device: torch.device) -> int:
    """Print and store the rows on the first rank; 1 if ours is wrong."""
    failed = False
    for op in options.op or ("all_gather_mm", "mm_reduce_scatter"):
        for payload in options.payload:
            row = case(op, payload, options, device)
            failed |= OURS in row["wrong"]
            if dist.get_rank() == 0:
                times = ", ".join(
                    f"{name} {us[1]:,.1f} ({us[0]:,.1f} to {us[2]:,.1f})" for name, us in row["us"].items()
                )
                print(
                    f"{op} {payload} {row['m']} x {row['n']} x {row['k']}, {row['ranks']} ranks, µs: {times}",
                    flush=True,
                )
                for name, text in row["wrong"].items():
                    print(f"  {name}: {text}", flush=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
