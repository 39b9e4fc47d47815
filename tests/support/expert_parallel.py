"""The work of one rank in tests/distributed/test_expert_parallel.py: experts of several ranks against one process.

One process has the tokens of all ranks, rank after rank. In a module of its own because a spawned process imports it
by name.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import blockscale as bs
from blockscale.distributed import AllToAll, Dispatcher, expert_parallel_
from blockscale.nn import MoE
from support.gathered import Wire

Case = tuple[str, Callable[[], Any]]
DIM, HIDDEN = 160, 96
# tokens of each rank: none on one of them, and tails of blocks
TOKENS = {2: (41, 24), 4: (41, 0, 24, 7)}


class Call(NamedTuple):
    """One call of the layer's experts, with the tokens of all ranks.  x, dy: [T, DIM].  experts: [T, k].  gate_weights:
    [T, k]."""

    x: Tensor
    dy: Tensor
    experts: Tensor
    gate_weights: Tensor


def tokens_of(ranks: int, load: str) -> tuple[int, ...]:
    if load == "no tokens":
        return (0,) * ranks
    return (0,) * (ranks - 1) + (33,) if load == "one source" else TOKENS[ranks]


def make_call(ranks: int, experts: int, top_k: int, load: str, dtype: torch.dtype) -> Call:
    """load: random, or one hot expert, or experts of the first rank alone, or tokens on one rank or none."""
    rng = torch.Generator().manual_seed(5)
    total = sum(tokens_of(ranks, load))
    scores = torch.rand(total, experts, generator=rng)
    if load == "hot":
        scores[:, experts - 1] += 2
    elif load == "first rank":
        scores[:, : max(top_k, -(-experts // ranks))] += 2
    chosen = scores.topk(top_k).indices
    x, dy = (torch.randn(total, DIM, generator=rng).to(dtype) for _ in range(2))
    return Call(x, dy, chosen, torch.rand(total, top_k, generator=rng))


def build(
    recipe: str | bs.Recipe, experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> MoE:
    """The same layer on every rank."""
    torch.manual_seed(0)
    return MoE(
        dim=DIM, hidden=HIDDEN, experts=experts, top_k=top_k, dtype=dtype, recipe=recipe, name="layers.0.mlp", **options
    )


def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))


def run_experts(moe: MoE, call: Call, rows: slice) -> dict[str, Tensor]:
    """Results and gradients of the experts of a layer for some of the tokens."""
    x = call.x[rows].clone().requires_grad_()
    gate_weights = call.gate_weights[rows].clone().requires_grad_()
    routing = bs.sort_by_expert(call.experts[rows], moe.router.out_features)
    y = moe.experts(x, routing, gate_weights)
    y.backward(call.dy[rows])
    found = {"y": y.detach(), "dx": x.grad, "gates": gate_weights.grad}
    return found | {name: each.grad for name, each in moe.experts.named_parameters()}  # pyright: ignore[reportReturnType]


def bits(x: Tensor) -> Tensor:
    """The bits of values, so that zeros of both signs differ."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def off(got: Tensor, want: Tensor) -> float:
    """0 for equal bits, else the relative distance, or the smallest number that is not 0."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    if torch.equal(bits(got), bits(want)):
        return 0.0
    return max(float((got - want).double().norm() / want.double().norm().clamp_min(1e-30)), 1e-30)


def worst(value: float) -> float:
    """The largest of all ranks' values."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return float(total)


def rows_of(rank: int, ranks: int, load: str) -> slice:
    sizes = tokens_of(ranks, load)
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def against_one_process(
    ranks: int,
    dispatcher: Dispatcher | None = None,
    *,
    recipe: str | bs.Recipe = "fp8_blockwise",
    experts: int = 6,
    top_k: int = 2,
    load: str = "random",
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> dict[str, float]:
    """The largest difference of any rank, by name."""
    call, rank = make_call(ranks, experts, top_k, load, dtype), dist.get_rank()
    one, moe = (build(recipe, experts, top_k, dtype, **options) for _ in range(2))
    rows = rows_of(rank, ranks, load)
    expert_parallel_(moe, mesh_of(ranks), dispatcher)
    want, wire = run_experts(one, call, slice(None)), Wire()
    with wire:
        got = run_experts(moe, call, rows)
    found = {"y": off(got["y"], want["y"][rows]), "dx": off(got["dx"], want["dx"][rows])}
    found["gates"] = off(got["gates"], want["gates"][rows])
    for name, grad in want.items():
        if name not in found:
            sharded = got[name]
            assert isinstance(sharded, DTensor), name
            chunk = -(-experts // ranks)
            found[name] = off(sharded.to_local(), grad[rank * chunk : (rank + 1) * chunk])
    assert set(wire.calls) <= {"all_to_all_single", "all_gather_into_tensor", "wait_tensor"}, wire.calls
    return {name: worst(value) for name, value in found.items()}


def whole_layer(ranks: int, dispatcher: Dispatcher | None, recipe: str) -> dict[str, float]:
    """Router, shared expert, biases and load. Gradients of router and shared expert are those of this rank's tokens."""
    one, own, moe = (build(recipe, 6, 2, shared=64, bias=True, balance=True) for _ in range(3))
    expert_parallel_(moe, mesh_of(ranks), dispatcher)
    call, rows = make_call(ranks, 6, 2, "random", torch.bfloat16), rows_of(dist.get_rank(), ranks, "random")
    ys: list[Tensor] = []
    for layer, part in ((one, slice(None)), (own, rows), (moe, rows)):
        y = layer(call.x[part][None])
        y.backward(call.dy[part][None])
        ys.append(y.detach()[0])
    found = {"y": off(ys[2], ys[0][rows])}
    assert moe.load is not None
    assert own.load is not None
    found["load"] = float((moe.load - own.load).abs().max())
    whole, alone = ({name: each.grad for name, each in layer.named_parameters()} for layer in (one, own))
    for name, param in moe.named_parameters():
        if isinstance(param.grad, DTensor):
            found[name] = off(param.grad.full_tensor(), whole[name])  # pyright: ignore[reportArgumentType]
        else:
            found[name] = off(param.grad, alone[name])  # pyright: ignore[reportArgumentType]
    moe.eval()
    with torch.no_grad():
        found["eval"] = off(moe(call.x[rows]), one(call.x)[rows])
    return {name: worst(value) for name, value in found.items()}


def cases(ranks: int) -> Iterator[Case]:
    here = functools.partial(against_one_process, ranks)
    for recipe in ("fp8_blockwise", "mxfp8", "nvfp4", "mxfp4", "mxfp8_wgrad_bf16", "bf16"):
        yield f"16 bits {recipe}", functools.partial(here, recipe=recipe, bias=recipe == "mxfp8")
    for load in ("hot", "first rank", "one source", "no tokens"):
        yield f"16 bits {load}", functools.partial(here, load=load, recipe="fp8_blockwise_pow2")
    for experts, top_k in ((5, 1), (3, 3), (9, 8), (1, 1)):
        yield f"16 bits k={top_k} of {experts}", functools.partial(here, experts=experts, top_k=top_k)
    yield "16 bits float32", functools.partial(here, dtype=torch.float32)
    yield "layer 16 bits", functools.partial(whole_layer, ranks, AllToAll(), "fp8_blockwise")


def run(rank: int, ranks: int, folder: str, names: tuple[str, ...]) -> None:
    """All cases on one rank; writes {case: what it found, or the error}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    results: dict[str, Any] = {}
    for label, test in cases(ranks):
        if names and not any(name in label for name in names):
            continue
        start = time.time()
        try:
            results[label] = test()
        except Exception:
            results[label] = traceback.format_exc(limit=-6)
        if rank == 0 and "SHOW" in os.environ:
            print(label, round(time.time() - start, 1), results[label], flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (int(sys.argv[1]), folder, tuple(sys.argv[2:])), nprocs=int(sys.argv[1]))
