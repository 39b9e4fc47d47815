"""FSDP2 that gathers codes of weights that tensor or expert parallelism shards too, beside FSDP2 that gathers weights;
see `gathered`. On four ranks: two by two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import blockscale as bs
from blockscale.distributed import AllToAll, expert_parallel_, gather_low_
from blockscale.distributed.gathered import CodedWeight
from support import sequence_parallel
from support.fully_sharded import THOROUGH, adamw
from support.gathered_experts import RoutedBlock, packed_experts
from support.gathered_training import Wire

DIM, HIDDEN, EXPERTS = 64, 256, 5
Make = Callable[[bs.Recipe, DeviceMesh], nn.Module]


def tokens_cut(recipe: bs.Recipe, mesh: DeviceMesh, *, gated: bool) -> nn.Module:
    """Our styles: shards of 128 hidden units, which FSDP2 splits. Gates and ups are [2, H, K]."""
    model = sequence_parallel.build(recipe, gated=gated, hidden=HIDDEN)  # pyright: ignore[reportArgumentType]
    return sequence_parallel.parallel(model, mesh)


def features_cut(recipe: bs.Recipe, mesh: DeviceMesh) -> nn.Module:
    """torch's styles."""
    model = sequence_parallel.build(recipe, hidden=HIDDEN)  # pyright: ignore[reportArgumentType]
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def experts_cut(recipe: bs.Recipe, mesh: DeviceMesh, *, payload: Any) -> nn.Module:
    """Experts of this rank, three or two; FSDP2 splits three into shards of different sizes."""
    torch.manual_seed(0)
    moe = bs.nn.MoE(dim=DIM, hidden=96, experts=EXPERTS, top_k=2, bias=True, recipe=recipe)
    return expert_parallel_(moe, mesh, AllToAll(payload))


def adapted_experts_cut(recipe: bs.Recipe, mesh: DeviceMesh) -> nn.Module:
    """Transformers' experts."""
    model = packed_experts(recipe, EXPERTS, 96)
    for block in model:
        assert isinstance(block, RoutedBlock)
        expert_parallel_(block.experts, mesh, AllToAll())
    return model


def own(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    return getattr(local, "tensor", local)


def beside_plain(make: Make, name: str = "fp8_blockwise", weight_cast: str = "forward") -> dict[str, Any]:
    """Bits of two steps: results, gradients and weights.  decoded: weights of which a layer took the values.  bytes:
    gathered with codes, of those without."""
    mesh, recipe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "inner")), bs.get_recipe(name)
    plain = recipe.replace(weight_cast="forward")
    models = [make(each, mesh["inner"]) for each in (plain, recipe.replace(weight_cast=weight_cast))]
    report = gather_low_(models[1])
    for model in models:
        fully_shard(model, mesh=mesh["dp"])
    optimizers = [adamw(model) for model in models]
    if weight_cast == "step":
        bs.attach(optimizers[1], models[1])
    sizes, same, decoded = [0, 0], True, list[Any]()
    CodedWeight.decoded, values = lambda self: decoded.append(self.shape) or values(self), CodedWeight.decoded
    for step in range(2):
        rng = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        if make is features_cut:  # ranks of one group have the same tokens
            rng.manual_seed(10 * step + mesh["dp"].get_local_rank())
        x = torch.randn(2, 128, DIM, generator=rng)
        ys: list[Tensor] = []
        for at, model in enumerate(models):
            with Wire() as wire:
                ys.append(model(x if isinstance(model, sequence_parallel.Block) else x.flatten(0, 1)))
                ys[-1].square().mean().backward()
            sizes[at] += wire.bytes["_allgather_base_"]
        same &= torch.equal(ys[0], ys[1])
        pairs = list(zip(*(model.parameters() for model in models), strict=True))
        same &= all(torch.equal(own(one.grad), own(other.grad)) for one, other in pairs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same &= all(torch.equal(own(one), own(other)) for one, other in pairs)
    CodedWeight.decoded = values
    found = {"same": same, "formats": sorted(report.formats), "others": report.others, "decoded": len(decoded)}
    return found | {"fewer bytes": 0 < sizes[1] < sizes[0] * 0.6}


def parallel_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for gated, weight_cast in ((False, "forward"), (True, "step"))[0 if THOROUGH else 1 :]:
        make = functools.partial(tokens_cut, gated=gated)
        case = functools.partial(beside_plain, make, weight_cast=weight_cast)
        yield f"over tensor parallel gated={gated}", case
    yield "over torch's tensor parallel", functools.partial(beside_plain, features_cut)
    for payload, weight_cast in (("bf16", "forward"), ("low", "step"))[0 if THOROUGH else 1 :]:
        make = functools.partial(experts_cut, payload=payload)
        case = functools.partial(beside_plain, make, "fp8_blockwise_pow2", weight_cast)
        yield f"beside expert parallel {payload}", case
    if THOROUGH:
        yield "beside expert parallel adapted", functools.partial(beside_plain, adapted_experts_cut)
