"""The work of one rank in tests/autograd/test_fsdp.py: FSDP2 and DDP against one process that has both ranks' batches.

In a module of its own because a spawned process imports it by name. Every case returns what it counted; the comparisons
with one process are made here, since both sides are.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.diagnostics import sample
from blockscale.errors import OptionError
from blockscale.nn import MoE, SwiGLU

RANKS, DIM, HIDDEN, BLOCKS, TOKENS = 2, 64, 96, 2, 24
EXPERTS = 3  # on two ranks, and on four, some have more than others
THOROUGH = "ALL_TESTS" in os.environ
Case = tuple[str, Callable[[], Any]]


class Calls(TorchDispatchMode):
    """Counts casts of weights: operators of ours whose source has a weight's shape."""

    SHAPES = frozenset({(2 * HIDDEN, DIM), (DIM, HIDDEN), (HIDDEN, DIM)})
    SHAPES |= {(EXPERTS, *shape) for shape in SHAPES}

    def __init__(self) -> None:
        super().__init__()
        self.weights: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("blockscale::quantize", "blockscale::quantize_both") and tuple(args[0].shape) in self.SHAPES:
            self.weights[name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A residual MLP of two layers with biases, a SwiGLU, or a mixture of experts."""

    def __init__(self, recipe: bs.Recipe, gated: bool | str, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        if gated == "experts":
            self.mlp: nn.Module = MoE(dim=DIM, hidden=hidden, experts=EXPERTS, top_k=2, bias=True, recipe=recipe)
        elif gated:
            self.mlp = SwiGLU(DIM, hidden, recipe=recipe)
        else:
            self.mlp = nn.Sequential(nn.Linear(DIM, hidden), nn.ReLU(), nn.Linear(hidden, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def build(
    weight_cast: str = "forward", *, gated: bool | str = False, name: str = "fp8_blockwise", hidden: int = HIDDEN
) -> nn.Module:
    """The same model on every rank and for every case."""
    torch.manual_seed(0)
    recipe = bs.get_recipe(name).replace(weight_cast=weight_cast)
    model = nn.Sequential(*(Block(recipe, gated, hidden) for _ in range(BLOCKS)))
    assert len(bs.quantize_(model, recipe, lambda module, name: True).converted) == 2 * BLOCKS
    return model


def batch(rank: int, microbatch: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(TOKENS, DIM, generator=generator)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the names of the model alone."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        found[name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")] = grad
    return found


def alone(model: nn.Module, microbatches: int, step: int = 0) -> None:
    """One process: gradients summed over microbatches on each rank, then averaged over ranks, as collectives do. Each
    rank computes its own part of this for both."""
    model.zero_grad()
    for each in range(microbatches):
        loss(model, batch(dist.get_rank(), each, step)).backward()
    for param in model.parameters():
        assert param.grad is not None
        totals = [torch.empty_like(param.grad) for _ in range(RANKS)]
        dist.all_gather(totals, param.grad.contiguous())
        param.grad = (totals[0] + totals[1]) / RANKS


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@functools.cache
def in_one_process(
    optimize: Callable[[nn.Module], Optimizer],
    steps: int,
    microbatches: int,
    gated: bool | str,
    name: str = "fp8_blockwise",
    hidden: int = HIDDEN,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients of every step and the weights after the last: what many cases are compared with, made once."""
    model = build("forward", gated=gated, name=name, hidden=hidden)
    optimizer, found = optimize(model), list[dict[str, Tensor]]()
    for step in range(steps):
        alone(model, microbatches, step)
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.state_dict())


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """0 for the same bits, else the largest relative error of a tensor."""
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    worst = 0.0
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, (name, got[name].dtype)
        if not torch.equal(got[name], tensor):
            worst = max(worst, float((got[name] - tensor).double().norm() / tensor.double().norm()))
    return worst


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, microbatches: int, step: int = 0) -> None:
    rank = dist.get_rank()
    for each in range(microbatches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(each == microbatches - 1)
        loss(model, batch(rank, each, step)).backward()


def against_one_process(
    weight_cast: str, *, gated: bool | str, reshard: bool, microbatches: int, recompute: bool, name: str
) -> dict[str, Any]:
    """Two steps of SGD; the second sees what the first did to the weights."""
    wanted, weights = in_one_process(sgd, 2, microbatches, gated, name)
    model = build(weight_cast, gated=gated, name=name)
    if recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    shard(model, reshard_after_forward=reshard)
    optimizer, found = sgd(model), dict[str, Any](grads=0.0)
    for step, want in enumerate(wanted):
        with Calls() as calls:
            train(model, microbatches, step)
        found["grads"] = max(found["grads"], difference(gradients(model), want))
        found["casts"] = dict(calls.weights)
        optimizer.step()
        optimizer.zero_grad()
    whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
    plain = {key.replace("_checkpoint_wrapped_module.", ""): value for key, value in whole.items()}
    found["weights"] = difference(plain, weights)
    return found


def sharded() -> Iterator[Case]:
    def case(weight_cast: str, reshard: bool, microbatches: int, **options: Any) -> Case:
        options = {"gated": False, "recompute": False, "name": "fp8_blockwise"} | options
        words = [weight_cast, f"reshard={reshard:d}", f"m={microbatches}", *map(str, options.values())]
        call = functools.partial(against_one_process, reshard=reshard, microbatches=microbatches, **options)
        return " ".join(words), functools.partial(call, weight_cast)

    for weight_cast in ("forward", "twice"):
        for reshard in (True, False):
            for recompute in (False, True):
                # of four settings any three in all ways, with half of the cases
                odd = (weight_cast == "twice") ^ reshard ^ recompute
                for microbatches in (1, 2):
                    if THOROUGH or (microbatches == 2) == odd:
                        yield case(weight_cast, reshard, microbatches, recompute=recompute)
                for gated in (True, "experts"):
                    if THOROUGH or (gated == "experts") == odd:
                        yield case(weight_cast, reshard, 2, gated=gated, recompute=recompute)
    for recompute in (False, True):
        yield case("step", True, 2, recompute=recompute)
        yield case("step", False, 1, gated=True, recompute=recompute)
    for name in ("mxfp8", "mxfp8_wgrad_bf16"):
        yield case("twice", True, 2, name=name)
        yield case("twice", True, 2, name=name, gated="experts")


def control() -> dict[str, Any]:
    """What a comparison finds where one microbatch was forgotten, and where a weight was one step old."""
    one, other = build(), build()
    alone(one, 2)
    alone(other, 1)
    forgotten = difference(gradients(one), gradients(other))
    alone(other, 2)
    torch.optim.SGD(one.parameters(), lr=0.5).step()
    alone(one, 2)
    return {"forgotten": forgotten, "stale": difference(gradients(one), gradients(other))}


def mixed(weight_cast: str) -> dict[str, Any]:
    """Parameters gathered in bf16, gradients reduced in fp32; one process casts its parameters to bf16 itself."""
    model = build(weight_cast)
    low = copy.deepcopy(model).bfloat16()
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    train(model, 1)
    totals: list[dict[str, Tensor]] = []
    for rank in range(RANKS):
        low.zero_grad()
        loss(low, batch(rank, 0).bfloat16()).backward()
        totals.append({name: grad.float() for name, grad in gradients(low).items()})
    want = {name: (grad + totals[1][name]) / RANKS for name, grad in totals[0].items()}
    return {"grads": difference(gradients(model), want)}


def refused(how: str) -> str:
    """The error of sharing casts of weights whose whole is not here."""
    model = build("step")
    if how == "before":
        bs.refresh_weights_(model)
    if how == "root alone":
        fully_shard(model)
    elif how == "first version":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        shard(model)
    if how in ("gathered", "root alone"):
        with torch.no_grad():
            model(batch(0, 0))  # leaves the root's own weights whole
    try:
        if how == "attached":
            bs.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
        else:
            bs.refresh_weights_(model)
    except OptionError as error:
        return str(error)
    return "no error"


def opened_before(reshard: bool) -> dict[str, Any]:
    """Sharing that began before the weights were cut ends with it, however often the same tensors are gathered into."""
    wanted, _ = in_one_process(sgd, 3, 1, gated=False)
    model = build("step")
    bs.refresh_weights_(model)
    shard(model, reshard_after_forward=reshard)
    optimizer, worst = sgd(model), 0.0
    for step, want in enumerate(wanted):
        with torch.no_grad():  # as an evaluation does; the root stays whole after it
            model(batch(dist.get_rank(), 0, step))
        train(model, 1, step)
        worst = max(worst, difference(gradients(model), want))
        optimizer.step()
        optimizer.zero_grad()
    return {"grads": worst}


def replicated(weight_cast: str, microbatches: int, gated: bool | str) -> dict[str, Any]:
    """DDP; with "step" the casts are shared by all microbatches, as in one process."""
    wanted, weights = in_one_process(adamw, 2, microbatches, gated)
    model = build(weight_cast, gated=gated)
    parallel = DistributedDataParallel(model)
    optimizer, found = adamw(model), dict[str, Any](grads=0.0)
    if weight_cast == "step":
        bs.attach(optimizer, parallel)
    for step, want in enumerate(wanted):
        with Calls() as calls:
            for each in range(microbatches):
                parallel.require_backward_grad_sync = each == microbatches - 1
                loss(parallel, batch(dist.get_rank(), each, step)).backward()
        found["grads"] = max(found["grads"], difference(gradients(parallel), want))
        found["casts"] = dict(calls.weights)
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = difference(dict(model.state_dict()), weights)
    return found


def measured(how: str, gated: bool | str) -> dict[str, Any]:
    """A sample beside training: figures are those of this rank's rows in one process, and gradients stay."""
    x, plain = batch(dist.get_rank(), 0), build(gated=gated)
    want = sample(plain, lambda: loss(plain, x)).read()
    model = build("twice", gated=gated)
    model = shard(model) if how == "sharded" else DistributedDataParallel(model, gradient_as_bucket_view=True)
    for _ in range(3):  # buckets have their final form, and gradients lie in them
        model.zero_grad()
        loss(model, batch(dist.get_rank(), 1)).backward()
    before = {name: each.clone() for name, each in gradients(model).items()}
    found = sample(model, lambda: loss(model, x)).read()
    same = [
        (each.fprop, each.dgrad, each.wgrad, each.damage, each.operands, each.experts) for each in found.layers
    ] == [(each.fprop, each.dgrad, each.wgrad, each.damage, each.operands, each.experts) for each in want.layers]
    finite = all(0 < each.gradient < float("inf") for each in found.layers)
    return {"same": same, "finite": finite, "layers": len(found.layers), "left": difference(gradients(model), before)}


def others() -> Iterator[Case]:
    yield "control", control
    for how, gated in (("sharded", "experts"), ("replicated", False)):
        yield f"measured {how} {gated}", functools.partial(measured, how, gated)
    for weight_cast in ("forward", "twice"):
        yield f"mixed {weight_cast}", functools.partial(mixed, weight_cast)
    for how in ("refreshed", "attached", "gathered", "root alone", "before", "first version"):
        yield f"refused {how}", functools.partial(refused, how)
    for reshard in (True, False):
        yield f"opened before reshard={reshard:d}", functools.partial(opened_before, reshard)
    for weight_cast in ("forward", "twice", "step"):
        for gated in (False, True, "experts"):
            for microbatches in (1, 2) if THOROUGH or not gated else (2,):
                label = f"ddp {weight_cast} gated={gated} m={microbatches}"
                yield label, functools.partial(replicated, weight_cast, microbatches, gated)


def run(rank: int, folder: str) -> None:
    """All cases on one rank; writes {case: what it found, or the error}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    init_device_mesh("cpu", (RANKS,))
    results: dict[str, Any] = {}
    for kind in (sharded, others):
        for label, test in kind():
            try:
                results[label] = test()
            except Exception:
                results[label] = traceback.format_exc(limit=-4)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
