"""Training with FSDP2 that gathers codes, to the bit, and its bytes on the wire; see `gathered`.

It is compared with one process and with FSDP2 that gathers weights. Blocks of 128 straddle nearly every shard of these
weights.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.distributed import gather_low_
from blockscale.distributed.tensors import ShardedWeight
from blockscale.distributed.weight_gather import AmaxExchange
from support.fully_sharded import (
    HIDDEN,
    THOROUGH,
    Block,
    adamw,
    batch,
    build,
    difference,
    gradients,
    in_one_process,
    loss,
    sgd,
    shard,
    train,
)
from support.ranks import compiles

RANKS = 2


class Wire(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank contributes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            given = args[1] if "base" in name else args[0]
            self.calls[name] += 1
            self.bytes[name] += sum(
                each.numel() * each.element_size() for each in pytree.tree_leaves(given) if isinstance(each, Tensor)
            )
        return func(*args, **(kwargs or {}))


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
    return {key.replace("_checkpoint_wrapped_module.", ""): value for key, value in whole.items()}


def exchanges(model: nn.Module) -> Iterator[AmaxExchange]:
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        if isinstance(local, ShardedWeight):
            yield local.how.exchange


def root_alone(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, **options)


def second_dimension(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 3 else None


def against_one_process(
    weight_cast: str,
    *,
    gated: bool | str = False,
    reshard: bool = True,
    microbatches: int = 1,
    recompute: bool = False,
    name: str = "fp8_blockwise",
    hidden: int = HIDDEN,
    optimize: Callable[[nn.Module], Optimizer] = sgd,
    wrap: Callable[..., nn.Module] = shard,
    compiled: bool = False,
    mesh: DeviceMesh | None = None,
    steps: int = 3,
) -> dict[str, Any]:
    """Each step sees what the one before did to the weights."""
    wanted, weights = in_one_process(optimize, steps, microbatches, gated, name, hidden)
    model = build(weight_cast, gated=gated, name=name, hidden=hidden)
    report = gather_low_(model)
    if recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    frames, blocks = CompileCounterWithBackend("aot_eager"), list(model)[: None if THOROUGH else 1]
    if compiled and compiles():
        for block in blocks:
            block.compile(backend=frames)
    wrap(model, reshard_after_forward=reshard, mesh=mesh)
    (exchange,) = {id(each): each for each in exchanges(model)}.values()
    optimizer, found = optimize(model), dict[str, Any](grads=0.0, formats=len(report.formats))
    if weight_cast == "step":
        bs.attach(optimizer, model)
    for step, want in enumerate(wanted):
        before = exchange.count
        # under a dispatch mode torch runs compiled code eagerly
        with nullcontext() if compiled else Wire() as wire:
            train(model, microbatches, step)
        found["exchanges"] = exchange.count - before
        if wire is not None:
            found["bytes"] = wire.bytes["_allgather_base_"]
        found["grads"] = max(found["grads"], difference(gradients(model), want))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = difference(whole_state(model), weights)
    if compiled and compiles():
        assert frames.frame_count >= len(blocks), "nothing was compiled"
    return found


def against_plain_fsdp(
    *,
    gated: bool | str = False,
    name: str = "fp8_blockwise",
    hidden: int = HIDDEN,
    mesh_shape: tuple[int, ...] | None = None,
    backend: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """FSDP2 that gathers the weights themselves, on the same ranks: collectives add in the same order.  backend: that
    compiles the first block of both."""
    names = ("replicate", "shard")[-len(mesh_shape or (0,)) :]
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),), mesh_dim_names=names)
    models = [build(gated=gated, name=name, hidden=hidden) for _ in range(2)]
    formats = gather_low_(models[1]).formats
    optimizers = []
    for model in models:
        if backend and compiles():
            model[0].compile(backend=backend)
        shard(model, mesh=mesh, **options)
        optimizers.append(adamw(model))
    found = {"grads": 0.0, "formats": len(formats)}
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            train(model, 1, step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found["grads"] = max(found["grads"], difference(gradients(models[1]), gradients(models[0])))
        for optimizer in optimizers:
            optimizer.step()
    found["weights"] = difference(whole_state(models[1]), whole_state(models[0]))
    return found


def without_exchange(**options: Any) -> dict[str, Any]:
    """The control: every rank keeps the maxima of its own rows."""
    kept, dist.all_reduce = dist.all_reduce, lambda *args, **kwargs: None
    try:
        return against_one_process("forward", **options)
    finally:
        dist.all_reduce = kept


def mixed(weight_cast: str, dtype: torch.dtype) -> dict[str, Any]:
    """fp32 shards that are gathered in 16 bits: codes are those of the rounded weight."""
    model = build(weight_cast)
    low = copy.deepcopy(model).to(dtype)
    gather_low_(model)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    train(model, 1)
    totals: list[dict[str, Tensor]] = []
    for rank in range(RANKS):
        low.zero_grad()
        loss(low, batch(rank, 0).to(dtype)).backward()
        totals.append({name: grad.float() for name, grad in gradients(low).items()})
    want = {name: (grad + totals[1][name]) / RANKS for name, grad in totals[0].items()}
    return {"grads": difference(gradients(model), want)}


def stepped_on_one_rank() -> dict[str, float]:
    """An optimizer of something else steps on one rank alone, between forward and backward: ranks still exchange
    together."""
    worst = 0.0
    for weight_cast in ("forward", "step"):
        wanted, _ = in_one_process(sgd, 3, 1, False)
        model = build(weight_cast)
        gather_low_(model)
        shard(model)
        optimizer, probe = sgd(model), nn.Linear(4, 4)
        if weight_cast == "step":
            bs.attach(optimizer, model)
        other = sgd(probe)
        for step, want in enumerate(wanted):
            y = loss(model, batch(dist.get_rank(), 0, step))
            if dist.get_rank() == 0:
                probe(torch.ones(4)).sum().backward()
                other.step()
            y.backward()
            worst = max(worst, difference(gradients(model), want))
            optimizer.step()
            optimizer.zero_grad()
    return {"grads": worst}


def sharded_one_by_one() -> dict[str, float]:
    """Layers that are sharded and called after others have exchanged."""
    worst = 0.0
    for name in ("nvfp4", "fp8_blockwise"):
        models = [build(name=name, hidden=104) for _ in range(2)]
        gather_low_(models[1])
        ys = []
        for model in models:
            x = batch(0, 0)
            for block in model:
                fully_shard(block)
                x = block(x)
            ys.append(x)
        worst = max(worst, float((ys[0] - ys[1]).abs().max()))
    return {"worst": worst}


def wire(name: str, size: int) -> dict[str, float]:
    """Bytes that one weight contributes to an all-gather, as a share of those in bf16."""
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    bs.quantize_(model, name, lambda module, name: True)
    gather_low_(model)
    fully_shard(model)
    with torch.no_grad(), Wire() as counted:
        model(torch.randn(4, size))
    elements = size * size / dist.get_world_size()
    return {
        "share": counted.bytes["_allgather_base_"] / (2 * elements),
        "calls": counted.calls["_allgather_base_"],
        "exchanged": counted.bytes["allreduce_"] / (2 * elements),
    }
