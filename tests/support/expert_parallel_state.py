"""Errors, overflow and checkpoints of experts on several ranks: more work for one rank of
tests/distributed/test_expert_parallel.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import blockscale as bs
from blockscale.distributed import AllToAll, FixedCapacity, expert_parallel_
from blockscale.distributed.dispatch import Payload
from blockscale.errors import BlockscaleError, CapacityError
from blockscale.nn import MoE
from blockscale.nn.adapters import AdaptedExperts
from support.expert_parallel import DIM, HIDDEN, build, make_call, mesh_of, off, rows_of, worst


def overflow(ranks: int) -> dict[str, Any]:
    """One row too many from the first rank to the last: an error on all ranks, and none with one row more."""
    experts = torch.full((12,), ranks - 1) if dist.get_rank() == 0 else torch.arange(3) % ranks
    routing = bs.sort_by_expert(experts[:, None], ranks)
    x, found = torch.ones(experts.shape[0], DIM).bfloat16(), dict[str, Any]()
    for rows in (11, 12):
        moe = build("mxfp8", ranks, 1)
        expert_parallel_(moe, mesh_of(ranks), FixedCapacity(rows))
        said: list[Any] = [None] * ranks
        try:
            y = moe.experts(x, routing)
            mine = f"{int(y.isfinite().all())}"
        except CapacityError as error:
            mine = str(error)
        dist.all_gather_object(said, mine)
        found[f"{rows} rows"] = said
    return found


def refusals(ranks: int) -> dict[str, Any]:
    """Errors by what was wrong, of this rank; the test compares all ranks'."""
    mesh, rank = mesh_of(ranks), dist.get_rank()
    found: dict[str, Any] = {}

    def attempt(name: str, call: Callable[[], Any], kind: type[Exception] = BlockscaleError) -> None:
        start = time.time()
        try:
            call()
            found[name] = "no error"
        except kind as error:
            found[name] = str(error) if time.time() - start < 20 else f"after {time.time() - start} s"

    low = AllToAll(payload="low")
    for recipe in ("fp8_blockwise", "nvfp4", "mxfp4", "mxfp6", "mxfp8_wgrad_bf16", "bf16"):
        attempt(f"low {recipe}", lambda recipe=recipe: expert_parallel_(build(recipe, 4, 2), mesh, low))
    late = bs.get_recipe("mxfp8").replace(since=10)
    attempt("low since", lambda: expert_parallel_(build(late, 4, 2), mesh, low))
    attempt("payload", lambda: AllToAll(payload="fp8"))  # pyright: ignore[reportArgumentType]
    attempt("rows", lambda: FixedCapacity(0))
    attempt("linear", lambda: expert_parallel_(torch.nn.Linear(2, 2), mesh))  # pyright: ignore[reportArgumentType]
    attempt("mesh", lambda: expert_parallel_(build("mxfp8", 4, 2), init_device_mesh("cpu", (1, ranks))))
    attempt("ranks", lambda: expert_parallel_(build("mxfp8", 4 + rank, 2), mesh))
    attempt("dispatchers", lambda: expert_parallel_(build("mxfp8", 4, 2), mesh, FixedCapacity(4 + rank)))
    moe = expert_parallel_(build("mxfp8", 4, 2, weight_dtype := torch.float32), mesh)
    attempt("twice", lambda: expert_parallel_(moe, mesh))
    x = torch.ones(3, DIM)
    attempt("dtypes", lambda: moe(x.bfloat16() if rank else x))
    routing = bs.sort_by_expert(torch.zeros(3, 1 + (rank > 0), dtype=torch.int64), 4)
    attempt("slots", lambda: moe.experts(x, routing))
    attempt("rows alone", lambda: moe.experts(x, routing.offs))
    attempt("experts", lambda: moe.experts(x, bs.sort_by_expert(torch.zeros(3, 1, dtype=torch.int64), 5)))

    def one_evaluates() -> None:
        with torch.set_grad_enabled(rank > 0):
            moe(x)

    attempt("one evaluates", one_evaluates)
    fixed = expert_parallel_(build("mxfp8", 4, 2, weight_dtype), mesh, FixedCapacity(6))
    attempt("dtypes fixed", lambda: fixed(x.bfloat16() if rank else x))
    y = moe(x).sum()
    with torch.no_grad():
        moe.experts.down.weight.mul_(2)
    attempt("changed", y.backward, RuntimeError)
    coded = expert_parallel_(build("mxfp8", 4, 2, weight_dtype), mesh, low)
    y = coded(x.clone().requires_grad_()).sum()
    with torch.no_grad():
        coded.experts.gate_up.weight.mul_(2)
    attempt("changed low", y.backward, RuntimeError)
    setattr(moe.experts.down.weight, "main_grad", torch.zeros(4, DIM, HIDDEN))  # noqa: B010
    attempt("main_grad", lambda: moe(x))
    delattr(moe.experts.down.weight, "main_grad")
    attempt("attach", lambda: bs.refresh_weights_(expert_parallel_(build(step_cast(), 4, 2), mesh)))
    attempt("activation", lambda: expert_parallel_(adapted(GptOssExperts, "mxfp8"), mesh, low))
    attempt("unconverted", lambda: expert_parallel_(Experts(4), mesh))  # pyright: ignore[reportArgumentType]
    low_moe = expert_parallel_(build("mxfp8", 4, 2), mesh, low)
    low_moe.experts.down.register_forward_hook(lambda *args: None)
    attempt("hooks", lambda: low_moe(x.bfloat16()))
    return found


def step_cast() -> bs.Recipe:
    return bs.get_recipe("mxfp8").replace(weight_cast="step")


class Experts(torch.nn.Module):
    """As Mixtral, Qwen3-MoE and DeepSeek-V3 keep them in Transformers 5."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(experts, 2 * HIDDEN, DIM) / 8)
        self.down_proj = torch.nn.Parameter(torch.randn(experts, DIM, HIDDEN) / 8)
        self.act_fn = torch.nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError("the converted module is compared with itself")


class GptOssExperts(Experts):
    """As gpt-oss keeps them: transposed, with biases, gates and ups alternating, clamped."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.gate_up_proj = torch.nn.Parameter(torch.randn(experts, DIM, 2 * HIDDEN) / 8)
        self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(experts, 2 * HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.randn(experts, HIDDEN, DIM) / 8)
        self.down_proj_bias = torch.nn.Parameter(torch.randn(experts, DIM))
        self.alpha, self.limit = 1.702, 7.0


def adapted(kind: type[Experts], recipe: str) -> AdaptedExperts:
    torch.manual_seed(0)
    found = AdaptedExperts.convert(kind(5))
    found.apply_recipe(recipe, name="layers.0.mlp.experts")
    return found


def of_transformers(ranks: int, kind: type[Experts], payload: Payload, recipe: str) -> dict[str, float]:
    """Converted experts of Transformers, five of them, against one process."""
    call, rows = make_call(ranks, 5, 2, "random", torch.bfloat16), rows_of(dist.get_rank(), ranks, "random")
    one, divided = (adapted(kind, recipe) for _ in range(2))
    expert_parallel_(divided, mesh_of(ranks), AllToAll(payload))
    grads: list[dict[str, Tensor]] = []
    for module, part in ((one, slice(None)), (divided, rows)):
        x, gate_weights = (each[part].clone().requires_grad_() for each in (call.x, call.gate_weights))
        y = module(x, call.experts[part], gate_weights)
        y.backward(call.dy[part])
        found = {"y": y.detach(), "dx": x.grad, "gates": gate_weights.grad}
        grads.append(found | {name: each.grad for name, each in module.named_parameters()})  # pyright: ignore[reportArgumentType]
    off_by: dict[str, float] = {}
    for name, got in grads[1].items():
        want = grads[0][name]
        off_by[name] = off(got.full_tensor(), want) if isinstance(got, DTensor) else off(got, want[rows])
    return {name: worst(value) for name, value in off_by.items()}


def with_fsdp(ranks: int, payload: Payload) -> dict[str, float]:
    """Two replicas of the experts, whose shards FSDP2 shards again: gradients are averages over the replicas."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "ep"))
    one, moe = (build("fp8_blockwise_pow2", 4, 2, torch.float32, shared=64) for _ in range(2))
    expert_parallel_(moe, mesh["ep"], AllToAll(payload))
    for module in (moe.experts, moe):
        fully_shard(module, mesh=mesh["dp"])
    replica, rank = mesh.get_coordinate()  # pyright: ignore[reportGeneralTypeIssues]
    x = torch.randn(2, ranks // 2, 8, DIM, generator=torch.Generator().manual_seed(0))
    wanted = [one(each.flatten(0, 1)) for each in x]
    for each in wanted:
        each.square().sum().backward()
    y = moe(x[replica, rank])
    y.square().sum().backward()
    found = {"y": off(y.detach(), wanted[replica].detach().view(-1, 8, DIM)[rank])}
    for name, param in moe.experts.named_parameters():
        grad = param.grad.full_tensor()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        found[name] = off(grad, one.experts.get_parameter(name).grad / 2)  # pyright: ignore[reportOptionalOperand]
    return {name: worst(value) for name, value in found.items()}


def trained(moe: MoE, steps: int) -> None:
    """Steps on the same tokens on every number of ranks: each rank has those whose number it divides."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if parallel(moe) else (0, 1)
    optimizer = torch.optim.AdamW(moe.experts.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(step))
        moe(x.chunk(ranks)[rank]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel(moe: MoE) -> bool:
    return isinstance(moe.experts.down.weight, DTensor)


def checkpoints(ranks: int, folder: str) -> dict[str, Any]:
    """Parameters of trained experts, saved by all ranks: loaded by half of them, by one of them, and into an ordinary
    layer; and a whole state dict loaded by all."""
    one, moe = (build("fp8_blockwise", 5, 2, torch.float32) for _ in range(2))
    expert_parallel_(moe, mesh_of(ranks))
    trained(moe, 2)
    trained(one, 2)
    whole = {name: each.full_tensor() for name, each in moe.experts.state_dict().items()}
    # the loss's sum over tokens, not its mean: gradients of experts are sums over all ranks
    found: dict[str, Any] = {"trained": max(off(whole[name], each) for name, each in one.experts.state_dict().items())}
    path = f"{folder}/checkpoint"
    dcp.save({"model": moe.state_dict()}, checkpoint_id=path)
    plain = build("fp8_blockwise", 5, 2, torch.float32)
    state = {name: torch.zeros_like(each) for name, each in plain.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=path)
    found["plain"] = max(off(state[f"experts.{name}"], each) for name, each in whole.items())
    for parts in (ranks // 2, ranks):  # ranks in groups of this size
        mesh = init_device_mesh("cpu", (ranks // parts, parts), mesh_dim_names=("dp", "ep"))["ep"]
        other = expert_parallel_(build("fp8_blockwise", 5, 2, torch.float32), mesh)
        with torch.no_grad():
            for param in other.experts.parameters():
                param.zero_()
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=path)
        other.load_state_dict(loaded["model"])
        found[f"groups of {parts}"] = max(
            off(other.experts.get_parameter(name).full_tensor(), each)  # pyright: ignore[reportAttributeAccessIssue]
            for name, each in whole.items()
        )
    files = b"".join(file.read_bytes() for file in Path(path).rglob("*") if file.is_file())
    found["names us"] = b"blockscale" in files
    return found
