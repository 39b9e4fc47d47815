"""Styles for tensor and sequence parallel layers, FSDP2 around them, and checkpoints, as one rank sees them.

Models are compared with one process that has everything; see tests/distributed/test_tensor_parallel.py.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import blockscale as bs
from blockscale.distributed import ColwiseParallel, RowwiseParallel, SwiGLUParallel, count_underflows
from blockscale.errors import BlockscaleError
from support.tokens_sharded import Wire, relative

Case = tuple[str, Callable[[], Any]]
BATCH, DIM, HIDDEN = 2, 64, 128
THOROUGH = "ALL_TESTS" in os.environ


class Block(nn.Module):
    """A norm, and two layers or a SwiGLU, [B, S, DIM] -> [B, S, DIM]."""

    def __init__(self, recipe: str, *, bias: bool, gated: bool, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        if gated:
            self.mlp = bs.nn.SwiGLU(DIM, hidden, bias, recipe=recipe, name="mlp")
        else:
            self.up, self.down = nn.Linear(DIM, hidden, bias), nn.Linear(hidden, DIM, bias)
        bs.quantize_(self, recipe, lambda module, name: True, seed=3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (self.mlp(h) if hasattr(self, "mlp") else self.down(torch.relu(self.up(h))))


def build(recipe: str, *, bias: bool = True, gated: bool = False, hidden: int = HIDDEN) -> Block:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Block(recipe, bias=bias, gated=gated, hidden=hidden)


def parallel(model: Block, mesh: DeviceMesh, wgrad: Any = "owner", dim: int = 1) -> Block:
    options = {"sequence_dim": dim, "wgrad": wgrad}
    plan: dict[str, Any] = {"norm": SequenceParallel(sequence_dim=dim, use_local_output=True)}
    if hasattr(model, "mlp"):
        plan["mlp"] = SwiGLUParallel(**options)
    else:
        plan |= {"up": ColwiseParallel(**options), "down": RowwiseParallel(**options)}
    parallelize_module(model, mesh, plan)
    return model


def batch(seed: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Input and gradient of the whole sequence."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, tokens, DIM, generator=rng), torch.randn(BATCH, tokens, DIM, generator=rng)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def packed(name: str, tensor: Tensor) -> Tensor:
    """A parameter in the shape of the model that is not cut."""
    return tensor.flatten(0, 1) if "gate_up" in name and tensor.shape[0] == 2 else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: packed(name, whole(param.grad)) for name, param in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: packed(name, whole(param.detach())) for name, param in model.named_parameters()}


def distances(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    return {name: 0.0 if torch.equal(got[name], want[name]) else relative(got[name], want[name]) for name in want}


def tokens_of(mesh: DeviceMesh) -> int:
    return 128 * mesh.size()


def trained(recipe: str, mesh: DeviceMesh, *, wgrad: Any = "owner", dim: int = 1, **options: Any) -> Any:
    """Two steps of SGD; the second sees what the first did to the weights."""
    one, model = build(recipe, **options), parallel(build(recipe, **options), mesh, wgrad, dim)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    found: dict[str, Any] = {"gradients": {}, "y": 0.0}
    for step in range(2):
        x, grad = (each if dim == 1 else each.transpose(0, 1).contiguous() for each in batch(step, tokens_of(mesh)))
        with Wire() as wire, count_underflows() as underflows:
            y = model(x.chunk(ranks, dim)[rank])
            y.backward(grad.chunk(ranks, dim)[rank])
        want = one(x)
        want.backward(grad)
        off = distances(gradients(model), gradients(one))
        found["gradients"] = {name: max(off[name], found["gradients"].get(name, 0.0)) for name in off}
        found["y"] = max(found["y"], relative(y.detach(), want.detach().chunk(ranks, dim)[rank]))
        found |= {"calls": wire.calls, "cast": underflows.values}
        for each in (model, one):
            bs.advance_(each)
            with torch.no_grad():
                for param in each.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
    found["weights"] = max(distances(weights(model), weights(one)).values())
    return found


def fully_sharded(recipe: str, *, gated: bool, compiled: bool) -> Any:
    """FSDP2 around the styles, on a mesh of two by two: each half of the data is cut along the sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    one, model = build(recipe, gated=gated), parallel(build(recipe, gated=gated), tp)
    if compiled:
        # AOTAutograd doubles the time, and the functions are compiled with it
        model.compile(backend="aot_eager" if THOROUGH else "eager", fullgraph=True)
    fully_shard(model, mesh=dp)
    x, grad = batch(dp.get_local_rank(), tokens_of(tp))
    y = model(x.chunk(2, 1)[tp.get_local_rank()])
    y.backward(grad.chunk(2, 1)[tp.get_local_rank()])
    for half in range(2):
        x, grad = batch(half, tokens_of(tp))
        one(x).backward(grad / 2)
    return {"gradients": max(distances(gradients(model), gradients(one)).values())} | checkpoints(model, recipe, gated)


def checkpoints(model: nn.Module, recipe: str, gated: bool) -> dict[str, Any]:
    """Files of a cut model are read by one that is not, and a whole state dict fills a cut model."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
    one = build(recipe, gated=gated)
    state = {name: each.unflatten(0, (2, -1)) if "gate_up" in name else each for name, each in one.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=folder[0])  # into views of the parameters
    found = {"loaded": max(distances(weights(one), weights(model)).values())}
    full = StateDictOptions(full_state_dict=True)
    state = build(recipe, gated=gated).state_dict()
    state = {name: each.unflatten(0, (2, -1)) if "gate_up" in name else each for name, each in state.items()}
    set_model_state_dict(model, state, options=full)
    found["filled"] = max(distances(weights(model), weights(build(recipe, gated=gated))).values())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    found: dict[str, str] = {}

    def attempt(label: str, act: Callable[[], Any]) -> None:
        try:
            act()
            found[label] = "no error"
        except BlockscaleError as error:
            found[label] = str(error)

    def cut(module: nn.Module, style: Any) -> nn.Module:
        return parallelize_module(module, mesh, style)

    swiglu = functools.partial(bs.nn.SwiGLU, DIM, 128 * mesh.size(), name="a")
    attempt("plain", lambda: cut(nn.Linear(64, 128), ColwiseParallel()))
    attempt("packed", lambda: cut(swiglu(recipe="mxfp8").gate_up, ColwiseParallel()))
    attempt("nvfp4", lambda: cut(bs.nn.Linear(64, 128, recipe="nvfp4", name="a"), ColwiseParallel()))
    attempt("blocks", lambda: cut(bs.nn.Linear(64, 96, recipe="fp8_blockwise"), ColwiseParallel()))
    attempt("hidden", lambda: cut(bs.nn.SwiGLU(DIM, 64 * mesh.size(), recipe="fp8_blockwise"), SwiGLUParallel()))
    attempt("stochastic", lambda: cut(swiglu(recipe="mxfp4"), SwiGLUParallel()))
    attempt("twice", lambda: cut(cut(bs.nn.Linear(64, 128, recipe="mxfp8"), ColwiseParallel()), ColwiseParallel()))
    layer = cut(bs.nn.Linear(64, 128, recipe="mxfp8"), ColwiseParallel())
    attempt("activation", lambda: layer(bs.autograd.activation(torch.randn(2, 32, 64), "mxfp8")))
    layer.weight.main_grad = torch.zeros(64, 64)  # pyright: ignore
    attempt("main_grad", lambda: layer(torch.randn(2, 32, 64)))
    step = bs.get_recipe("mxfp8").replace(weight_cast="step")
    model = cut(nn.Sequential(bs.nn.Linear(64, 128, recipe=step)), {"0": ColwiseParallel()})
    attempt("step", lambda: bs.attach(torch.optim.SGD(model.parameters(), 0.1), model))
    attempt("unquantize", lambda: bs.unquantize_(parallel(build("mxfp8"), mesh)))
    return found


def changed(mesh: DeviceMesh) -> dict[str, str]:
    """A weight that changes between forward and backward."""
    model = parallel(build("mxfp8"), mesh)
    y = model(torch.randn(BATCH, 32, DIM))
    with torch.no_grad():
        model.up.weight.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": "nothing"}


def copied(mesh: DeviceMesh) -> dict[str, float]:
    """A deep copy computes the same."""
    model = parallel(build("mxfp8", gated=True), mesh)
    x = torch.randn(BATCH, 32, DIM, generator=torch.Generator().manual_seed(mesh.get_rank()))
    return {"off": float((copy.deepcopy(model)(x) - model(x)).detach().abs().max())}


def cases(ranks: int) -> Iterator[Case]:
    if ranks == 4:
        for gated, compiled in ((False, True), (True, False), (True, True))[: None if THOROUGH else 2]:
            label = f"fsdp x tp gated={gated} compiled={compiled}"
            yield label, functools.partial(fully_sharded, "mxfp8", gated=gated, compiled=compiled)
        return
    mesh = init_device_mesh("cpu", (ranks,))
    for label, recipe, options in (
        ("fp8", "fp8_blockwise", {"hidden": 256}),
        ("mx", "mxfp8", {"bias": False}),
        ("mxfp4", "mxfp4", {"dim": 0}),
        ("gated fp8", "fp8_blockwise", {"hidden": 256, "gated": True}),
        ("gated mx", "mxfp8", {"gated": True}),
        ("gated wgrad unquantized", "mxfp8_wgrad_bf16", {"gated": True, "bias": False}),
        ("gated requantized", "mxfp8", {"gated": True, "wgrad": "requantized"}),
    ):
        yield f"trained {label}", functools.partial(trained, recipe, mesh, **options)
    yield "style refusals", functools.partial(refusals, mesh)
    yield "changed", functools.partial(changed, mesh)
    yield "copied", functools.partial(copied, mesh)
