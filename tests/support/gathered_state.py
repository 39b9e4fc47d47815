"""Weights that are gathered as codes, between steps: checkpoints, evaluations, writes, refusals; see `gathered`."""

from __future__ import annotations

import copy
import gc
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import blockscale as bs
from blockscale.distributed import gather_low_
from blockscale.distributed.tensors import ShardedWeight
from blockscale.errors import BlockscaleError, StaleWeightError
from support.fully_sharded import HIDDEN, adamw, batch, build, difference, gradients, sgd, shard, train
from support.gathered_training import whole_state


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


def dropped() -> dict[str, int]:
    """Tensors that a trained model leaves behind after one collection, its casts and its shards among them."""

    def left() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    found: dict[str, int] = {}
    gc.freeze()  # what there was before is not looked at
    for _ in range(2):  # torch keeps some tensors from the first time on
        before = left()
        model, optimizer = attached()
        train(model, 1)
        optimizer.step()
        during = left() - before
        del model, optimizer
        found = {"during": during, "after": left() - before}
    gc.unfreeze()
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
