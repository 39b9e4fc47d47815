"""The work of one rank in tests/distributed/test_gather_low.py: FSDP2 that gathers codes, to the bit.

It is compared with one process and with FSDP2 that gathers weights. Blocks of 128 straddle nearly every shard of these
weights. In a module of its own because a spawned process imports it by name.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
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
from blockscale.errors import BlockscaleError, StaleWeightError
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

Case = tuple[str, Callable[[], Any]]
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


def root_alone(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, **options)


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
) -> dict[str, Any]:
    """Three steps; each sees what the one before did to the weights."""
    wanted, weights = in_one_process(optimize, 3, microbatches, gated, name, hidden)
    model = build(weight_cast, gated=gated, name=name, hidden=hidden)
    report = gather_low_(model)
    if recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if compiled:
        for block in model:
            block.compile(backend="aot_eager")
    wrap(model, reshard_after_forward=reshard, mesh=mesh)
    (exchange,) = {id(each): each for each in exchanges(model)}.values()
    optimizer, found = optimize(model), dict[str, Any](grads=0.0, formats=len(report.formats))
    if weight_cast == "step":
        bs.attach(optimizer, model)
    for step, want in enumerate(wanted):
        before = exchange.count
        with Wire() as wire:
            train(model, microbatches, step)
        found |= {"exchanges": exchange.count - before, "bytes": wire.bytes["_allgather_base_"]}
        found["grads"] = max(found["grads"], difference(gradients(model), want))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = difference(whole_state(model), weights)
    return found


def second_dimension(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 3 else None


def against_plain_fsdp(
    *,
    gated: bool | str = False,
    name: str = "fp8_blockwise",
    hidden: int = HIDDEN,
    mesh_shape: tuple[int, ...] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """FSDP2 that gathers the weights themselves, on the same ranks: collectives add in the same order."""
    names = ("replicate", "shard")[-len(mesh_shape or (0,)) :]
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),), mesh_dim_names=names)
    models = [build(gated=gated, name=name, hidden=hidden) for _ in range(2)]
    formats = gather_low_(models[1]).formats
    optimizers = []
    for model in models:
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


def exchanges(model: nn.Module) -> Iterator[AmaxExchange]:
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        if isinstance(local, ShardedWeight):
            yield local.how.exchange


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


def checkpoints(name: str, hidden: int) -> dict[str, Any]:
    """A checkpoint of two ranks is loaded by two ranks, and into an unquantized model; files name no class of ours."""
    model = build("step", name=name, hidden=hidden)
    gather_low_(model)
    shard(model)
    optimizer = adamw(model)
    bs.attach(optimizer, model)
    train(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    plain = build(name=name, hidden=hidden)
    bs.unquantize_(plain)
    loaded = {"model": plain.state_dict()}
    dcp.load(loaded, checkpoint_id=folder[0])
    found: dict[str, Any] = {"unquantized": difference(loaded["model"], whole_state(model))}

    with torch.device("meta"):
        other = build("step", name=name, hidden=hidden)
    gather_low_(other)
    shard(other)
    other.to_empty(device="cpu")
    for param in other.parameters():
        torch.nn.init.constant_(param, float("nan"))
    other_optimizer = adamw(other)
    bs.attach(other_optimizer, other)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    loaded = {"model": state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    for each in (model, other):
        train(each, 1, step=1)
    found["resumed"] = difference(gradients(other), gradients(model))
    optimizer.step()
    other_optimizer.step()
    found["resumed weights"] = difference(whole_state(other), whole_state(model))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        found["whole"] = difference(whole, whole_state_of(model))
        found["types"] = sorted({type(each).__name__ for each in whole.values()})
    else:
        whole_state_of(model)
    files = b"".join(path.read_bytes() for path in Path(folder[0]).rglob("*") if path.is_file())
    file = Path(folder[0], f"shard{dist.get_rank()}.pt")
    torch.save(model.state_dict(), file)
    files += file.read_bytes()
    found["names us"] = [word for word in ("ShardedWeight", "GatheredWeight", "blockscale") if word.encode() in files]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


def whole_state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in whole_state(model).items()}


def evaluated(weight_cast: str) -> dict[str, Any]:
    """Evaluations between steps, under no_grad and inference_mode, and writes to weights that no optimizer makes."""
    model, one = build(weight_cast), build("forward")
    gather_low_(model)
    shard(model)
    optimizer = sgd(model)
    if weight_cast == "step":
        bs.attach(optimizer, model)
    worst = 0.0
    for step in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                worst = max(worst, float((model(batch(0, 0, step)) - one(batch(0, 0, step))).abs().max()))
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
                mine.mul_(1.5 + step)
                theirs.mul_(1.5 + step)
        if weight_cast == "step":
            bs.refresh_weights_(model)
        train(model, 1, step)
        model.zero_grad()
        state = {name: value * 3 for name, value in one.state_dict().items()}
        one.load_state_dict(state)
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    return {"worst": worst}


def attached(hidden: int = HIDDEN) -> tuple[nn.Module, Optimizer]:
    """A sharded model whose casts a step shares, after one step."""
    model = build("step", hidden=hidden)
    gather_low_(model)
    shard(model)
    optimizer = sgd(model)
    bs.attach(optimizer, model)
    train(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


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


def written_elsewhere() -> dict[str, Any]:
    """Writes to the shard through other tensors than the parameter."""
    found: dict[str, Any] = {}
    writes: dict[str, Callable[[Any], Any]] = {
        "state dict": lambda param: param.detach().to_local().mul_(3),
        "data": lambda param: param.data.mul_(3),
        "foreach": lambda param: torch._foreach_mul_([param.detach()], 3),
        "out=": lambda param: torch.mul(param.to_local(), 3, out=param.detach().to_local()),
    }
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, _ = attached()
    dcp.save({"model": {name: 3 * value for name, value in model.state_dict().items()}}, checkpoint_id=folder[0])
    for label in (*writes, "loaded in place"):
        model, _ = attached()
        with torch.no_grad():
            model(batch(0, 0))
            if label in writes:
                for param in model.parameters():
                    writes[label](param)
            else:
                dcp.load({"model": model.state_dict()}, checkpoint_id=folder[0])
            try:
                model(batch(0, 0))
                found[label] = "no error"
            except StaleWeightError as error:
                found[label] = "written after" if "was written after" in str(error) else str(error)
            bs.refresh_weights_(model)
            one = build()
            one.load_state_dict(whole_state(model))
            found[label] += f" {float((model(batch(0, 0)) - one(batch(0, 0))).abs().max())}"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


def cached_state() -> dict[str, float]:
    """A state dict taken before the first forward follows the weights."""
    model = build(hidden=101)
    gather_low_(model)
    shard(model)
    state = model.state_dict()
    optimizer = sgd(model)
    train(model, 1)
    optimizer.step()
    return {"weights": difference({name: each.full_tensor() for name, each in state.items()}, whole_state(model))}


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


def refusals() -> dict[str, str]:
    """Errors, by what causes them."""
    found: dict[str, str] = {}

    def attempt(label: str, act: Callable[[], Any]) -> None:
        try:
            act()
            found[label] = "no error"
        except BlockscaleError as error:
            found[label] = str(error)

    uneven = build(name="nvfp4", hidden=101)
    gather_low_(uneven)
    shard(uneven)
    attempt("uneven nvfp4", lambda: uneven(batch(0, 0)))

    part = build()
    gather_low_(part)
    shard(part)
    part(batch(0, 0))
    with torch.no_grad():
        for param in part.parameters():
            param.mul_(2)
    attempt("written", lambda: part[0](batch(0, 0)))

    changed = build()
    gather_low_(changed)
    shard(changed)
    changed(batch(0, 0))
    for module in changed.modules():
        if isinstance(module, bs.nn.Linear):
            module.recipe_now = bs.get_recipe("mxfp8_128x128")
    attempt("changed recipe", lambda: changed(batch(0, 0)))

    converted = build()
    gather_low_(converted)
    shard(converted)
    converted(batch(0, 0))
    converted.bfloat16()
    attempt("changed dtype", lambda: converted(batch(0, 0).bfloat16()))

    models = [build() for _ in range(2)]
    for model in models:
        gather_low_(model)
        shard(model)
    models[1].load_state_dict(models[0].state_dict(), assign=True)
    attempt("assigned", lambda: models[1](batch(0, 0)))

    plain = build()
    gather_low_(plain)
    shard(plain)
    plain(batch(0, 0))
    bs.unquantize_(plain)
    attempt("unquantized", lambda: plain(batch(0, 0)))

    whole = build()
    gather_low_(whole)
    shard(whole)
    whole[0].unshard()
    weight = whole[0].mlp[0].weight
    with torch.no_grad():
        attempt("gathered weight", lambda: weight.mul_(2))
        found["views"] = str(
            [tuple(each.shape) for each in (weight.view(-1), weight.T, weight.as_strided((2, 2), (1, 1)))]
        )

    os.environ["BLOCKSCALE_CHECK_WEIGHTS"] = "1"
    try:
        model, _ = attached()
        with torch.no_grad():
            model(batch(0, 0))
            for param in model.parameters():  # as another library would: by address
                local = param.to_local()
                (local.tensor if isinstance(local, ShardedWeight) else local).mul_(3)
            attempt("checked", lambda: model(batch(0, 0)))
    finally:
        del os.environ["BLOCKSCALE_CHECK_WEIGHTS"]
    return found


def reports() -> dict[str, Any]:
    """Reasons against gathering codes."""
    found: dict[str, Any] = {}
    for name in ("mxfp8", "mxfp8_wgrad_bf16", "fp8_blockwise_dgrad_bf16", "bf16"):
        model = nn.Sequential(nn.Linear(64, 64))
        bs.quantize_(model, name, lambda module, name: True)
        found[name] = gather_low_(model).others
    warm = nn.Sequential(nn.Linear(64, 64))
    bs.quantize_(warm, bs.get_recipe("fp8_blockwise").replace(since=10), lambda module, name: True)
    found["since"] = gather_low_(warm).others
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tied[1].weight = tied[0].weight
    bs.quantize_(tied, "fp8_blockwise", lambda module, name: True)
    found["tied"] = gather_low_(tied).others
    late = build()
    shard(late)
    found["late"] = sorted(set(gather_low_(late).others.values()))
    twice = build()
    gather_low_(twice)
    found["twice"] = sorted(set(gather_low_(twice).others.values()))
    copied = copy.deepcopy(twice)
    found["copy"] = sorted({type(param).__name__ for param in copied.parameters()})
    found["copy gathers"] = len(gather_low_(copied).formats)
    buffer = io.BytesIO()
    torch.save(twice, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    found["pickled"] = sorted({type(param).__name__ for param in loaded.parameters()})
    found["pickled y"] = float((loaded(batch(0, 0)) - build()(batch(0, 0))).detach().abs().max())
    found["alone"] = float((twice(batch(0, 0)) - build()(batch(0, 0))).abs().max())
    return found


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


def bits(**options: Any) -> Case:
    label = " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items())
    return label, functools.partial(against_one_process, **options)


def cases_of_four() -> Iterator[Case]:
    for hidden in (96, 256, 101, 3) if THOROUGH else (96, 3):
        yield f"four hidden={hidden}", functools.partial(against_plain_fsdp, hidden=hidden)
    for hidden in (96, 104) if THOROUGH else (104,):
        yield f"four nvfp4 hidden={hidden}", functools.partial(against_plain_fsdp, name="nvfp4", hidden=hidden)
    for gated in (True, "experts"):
        if THOROUGH:
            yield f"four gated={gated}", functools.partial(against_plain_fsdp, gated=gated)
        yield f"hybrid gated={gated}", functools.partial(against_plain_fsdp, gated=gated, mesh_shape=(2, 2))
    for name in ("fp8_blockwise", "mxfp8_128x128"):
        along = functools.partial(against_plain_fsdp, gated="experts", shard_placement_fn=second_dimension, name=name)
        yield f"experts along rows {name}", along


def cases(ranks: int) -> Iterator[Case]:
    """hidden=96: 48 rows a rank.  256: whole blocks.  104: 52 rows, and codes padded to 16 bytes.  101: shards differ
    in size."""
    if ranks == 4:
        yield from cases_of_four()
        return
    usual = {("forward", 256), ("forward", 101), ("twice", 96), ("step", 104)}
    for weight_cast in ("forward", "twice", "step"):
        for hidden in (96, 256, 104, 101):
            if THOROUGH or (weight_cast, hidden) in usual:
                yield bits(weight_cast=weight_cast, hidden=hidden)
    for name in ("mxfp8_128x128", "nvfp4"):
        for hidden in (96, 256, 104, 101):
            if hidden == (101 if name == "mxfp8_128x128" else 104) or (THOROUGH and (hidden, name) != (101, "nvfp4")):
                yield bits(weight_cast="forward", name=name, hidden=hidden)
        yield bits(weight_cast="step", name=name, microbatches=2)
    for weight_cast in ("forward", "step"):
        yield bits(weight_cast=weight_cast, reshard=False, microbatches=2)
        yield bits(weight_cast=weight_cast, gated=True, microbatches=2, recompute=True)
        if THOROUGH or weight_cast == "step":
            yield bits(weight_cast=weight_cast, gated="experts", microbatches=2)
            yield bits(weight_cast=weight_cast, optimize=adamw)
        if THOROUGH or weight_cast == "forward":
            yield bits(weight_cast=weight_cast, wrap=root_alone)
            yield bits(weight_cast=weight_cast, compiled=True)
    for hidden in (96, 101):
        yield f"control hidden={hidden}", functools.partial(without_exchange, hidden=hidden)
    for dtype in (torch.bfloat16, torch.float16):
        for weight_cast in ("forward", "step") if THOROUGH or dtype == torch.bfloat16 else ("forward",):
            yield f"mixed {weight_cast} {dtype}", functools.partial(mixed, weight_cast, dtype)
    for name, hidden in (("fp8_blockwise", 101), ("mxfp8_128x128", 96), ("nvfp4", 104)):
        yield f"checkpoints {name}", functools.partial(checkpoints, name, hidden)
    for weight_cast in ("forward", "step"):
        yield f"evaluated {weight_cast}", functools.partial(evaluated, weight_cast)
    for options in ({}, {"name": "nvfp4"}, {"gated": "experts"}):
        label = f"one shard {options}"
        yield label, functools.partial(against_plain_fsdp, mesh_shape=(2, 1), **options)
    yield "stepped on one rank", stepped_on_one_rank
    yield "written elsewhere", written_elsewhere
    yield "cached state", cached_state
    yield "sharded one by one", sharded_one_by_one
    yield "refusals", refusals
    yield "reports", reports
    for name in ("fp8_blockwise", "mxfp8_128x128", "nvfp4"):
        for size in (512, 320):
            yield f"wire {name} {size}", functools.partial(wire, name, size)


def run(rank: int, ranks: int, folder: str, names: tuple[str, ...]) -> None:
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
