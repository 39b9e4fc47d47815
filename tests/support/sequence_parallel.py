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
from contextlib import nullcontext
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
from blockscale.distributed import (
    AllToAll,
    ColwiseParallel,
    Dispatcher,
    ExpertTensorParallel,
    FixedCapacity,
    RowwiseParallel,
    SwiGLUParallel,
    count_underflows,
    expert_parallel_,
)
from blockscale.errors import BlockscaleError
from support.ranks import calls_not_compared, compiles
from support.tokens_sharded import Wire, relative

Case = tuple[str, Callable[[], Any]]
BATCH, DIM, HIDDEN = 2, 64, 128
THOROUGH = "ALL_TESTS" in os.environ


class Block(nn.Module):
    """A norm, and two layers, a SwiGLU or a mixture of experts, [B, S, DIM] -> [B, S, DIM]."""

    def __init__(self, recipe: str, *, bias: bool, gated: bool, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        if experts:
            sizes = {"dim": DIM, "hidden": hidden, "experts": experts, "top_k": 2, "shared": hidden}
            self.mlp = bs.nn.MoE(**sizes, bias=bias, balance=True, recipe=recipe, name="mlp")
            return
        if gated:
            self.mlp = bs.nn.SwiGLU(DIM, hidden, bias, recipe=recipe, name="mlp")
        else:
            self.up, self.down = nn.Linear(DIM, hidden, bias), nn.Linear(hidden, DIM, bias)
        bs.quantize_(self, recipe, lambda module, name: True, seed=3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (self.mlp(h) if hasattr(self, "mlp") else self.down(torch.relu(self.up(h))))


def build(recipe: str, *, bias: bool = True, gated: bool = False, hidden: int = HIDDEN, experts: int = 0) -> Block:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Block(recipe, bias=bias, gated=gated, hidden=hidden, experts=experts)


def parallel(model: Block, mesh: DeviceMesh, wgrad: Any = "owner", dim: int = 1) -> Block:
    options = {"sequence_dim": dim, "wgrad": wgrad}
    plan: dict[str, Any] = {"norm": SequenceParallel(sequence_dim=dim, use_local_output=True)}
    if isinstance(getattr(model, "mlp", None), bs.nn.MoE):
        plan["mlp"] = ExpertTensorParallel(sequence_dim=dim, payload="bf16" if wgrad == "owner" else "low")
    elif hasattr(model, "mlp"):
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
    return tensor if "gate_up" not in name else tensor.reshape(packed_shape(name, tensor))


def packed_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Shape of gates and ups [2H, ...] or [E, 2H, ...] in one axis."""
    lead, last = (1 if "experts" in name else 0), (1 if "weight" in name else 0)
    shape = tuple(tensor.shape)
    return (*shape[:lead], -1, *shape[len(shape) - last :])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: packed(name, whole(param.grad)) for name, param in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: packed(name, whole(param.detach())) for name, param in model.named_parameters()}


def distances(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    return {name: 0.0 if torch.equal(got[name], want[name]) else relative(got[name], want[name]) for name in want}


def tokens_of(mesh: DeviceMesh) -> int:
    return 128 * mesh.size()


def trained(
    recipe: str, mesh: DeviceMesh, *, wgrad: Any = "owner", dim: int = 1, steps: int = 2, **options: Any
) -> Any:
    """Steps of SGD; the second sees what the first did to the weights."""
    one, model = build(recipe, **options), parallel(build(recipe, **options), mesh, wgrad, dim)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    found: dict[str, Any] = {"gradients": {}, "y": 0.0}
    for step in range(steps):
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
    if (load := getattr(getattr(model, "mlp", None), "load", None)) is not None:
        dist.all_reduce(load, group=mesh.get_group())
        found["load"] = torch.equal(load, one.mlp.load)
    found["weights"] = max(distances(weights(model), weights(one)).values())
    return found


def data_parallel(kind: str, recipe: str, *, compiled: bool, **options: Any) -> Any:
    """Data parallel around the styles, on a mesh of two by two: each half of the data is cut along the sequence.
    kind: "fsdp" shards parameters over both halves; "dp" replicates them, as FSDP2 does on a mesh of two dimensions.
    Two ranks have all data, and FSDP2 has one shard."""
    parts = dist.get_world_size() // 2
    shape = (parts, 1, 2) if kind == "dp" else (1, parts, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards", "tp"))
    tp, part = mesh["tp"], mesh["replicas" if kind == "dp" else "shards"].get_local_rank()
    one, model = build(recipe, **options), parallel(build(recipe, **options), tp)
    if compiled and compiles():
        # AOTAutograd doubles the time, and the functions are compiled with it
        model.compile(backend="aot_eager" if THOROUGH else "eager", fullgraph=True)
    fully_shard(model, mesh=mesh["replicas", "shards"] if kind == "dp" else mesh["shards"])
    x, grad = batch(part, tokens_of(tp))
    with calls_not_compared() if compiled else nullcontext():
        y = model(x.chunk(2, 1)[tp.get_local_rank()])
        y.backward(grad.chunk(2, 1)[tp.get_local_rank()])
    for each in range(parts):
        x, grad = batch(each, tokens_of(tp))
        one(x).backward(grad / parts)
    found = {"gradients": max(distances(gradients(model), gradients(one)).values())}
    return found | checkpoints(model, recipe, **options)


def in_cut_shape(name: str, tensor: Tensor) -> Tensor:
    """A parameter of a model that is not cut, with gates and ups along an axis of their own."""
    return tensor.unflatten(1 if "experts" in name else 0, (2, -1)) if "gate_up" in name else tensor


def checkpoints(model: nn.Module, recipe: str, **options: Any) -> dict[str, Any]:
    """Files of a cut model are read by one that is not, and a whole state dict fills a cut model."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
    one = build(recipe, **options)
    state = {name: in_cut_shape(name, each) for name, each in one.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=folder[0])  # into views of the parameters
    found = {"loaded": max(distances(weights(one), weights(model)).values())}
    full = StateDictOptions(full_state_dict=True)
    state = {name: in_cut_shape(name, each) for name, each in build(recipe, **options).state_dict().items()}
    set_model_state_dict(model, state, options=full)
    found["filled"] = max(distances(weights(model), weights(build(recipe, **options))).values())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


def on_expert_ranks(mesh: DeviceMesh, dispatcher: Dispatcher, recipe: str, *, compiled: bool = False) -> dict[str, Any]:
    """A mixture of experts divided among ranks of a mesh whose last dimension is tensor parallel. On a mesh of two
    dimensions experts are also cut, and x is cut along the sequence; on one dimension ranks have whole experts."""
    tp, both = mesh["tp"], mesh.ndim == 2
    first, parts = (mesh.get_local_rank(0), mesh.size(0)) if both else (0, 1)
    options: dict[str, Any] = {"hidden": 128, "experts": 3}
    one, model = build(recipe, **options), build(recipe, **options)
    # rows of experts lie rank after rank: tokens of a rank are the first axis where each has whole experts
    dim = 1 if both else 0
    expert_parallel_(model.mlp, mesh, dispatcher, sequence_dim=dim)
    plan: dict[str, Any] = {"norm": SequenceParallel(sequence_dim=dim, use_local_output=True)}
    if not both:  # the layer flattens tokens
        plan["mlp.router"] = SequenceParallel(sequence_dim=0, use_local_output=True)
        plan["mlp.shared"] = SwiGLUParallel(sequence_dim=0)
    parallelize_module(model, tp, plan)
    if compiled:
        model.compile(backend="aot_eager" if THOROUGH else "eager", fullgraph=isinstance(dispatcher, FixedCapacity))
    found: dict[str, Any] = {"y": 0.0}
    for each in range(parts):
        x, grad = batch(each, tokens_of(tp))
        want = one(x)
        want.backward(grad)
        if each == first:
            y = model(x.chunk(tp.size(), dim)[tp.get_local_rank()])
            y.backward(grad.chunk(tp.size(), dim)[tp.get_local_rank()])
            found["y"] = relative(y.detach(), want.detach().chunk(tp.size(), dim)[tp.get_local_rank()])
    got = gradients(model)
    if both:  # experts have the gradients of all tokens, the rest those of this half
        for name in sorted(got):
            if "experts" not in name:
                got[name] = got[name].clone()
                dist.all_reduce(got[name], group=mesh.get_group(0))
    return found | {"gradients": max(distances(got, gradients(one)).values())}


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
        for kind, compiled, options in (
            ("fsdp", False, {}),
            ("fsdp", False, {"experts": 3}),
            ("dp", False, {"gated": True}),
            ("fsdp", False, {"gated": True}),
            ("fsdp", True, {}),
            ("fsdp", True, {"gated": True}),
            ("fsdp", True, {"experts": 3}),
            ("dp", True, {"experts": 3}),
            ("dp", True, {"gated": True}),
        )[: None if THOROUGH else 4]:
            label = f"{kind} x tp {options} compiled={compiled}"
            yield label, functools.partial(data_parallel, kind, "mxfp8", compiled=compiled, **options)
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        yield "ep x tp low", functools.partial(on_expert_ranks, both, AllToAll("low"), "mxfp8", compiled=THOROUGH)
        if THOROUGH:
            yield "ep x tp fixed", functools.partial(on_expert_ranks, both, FixedCapacity(1024), "mxfp8", compiled=True)
        return
    yield "fsdp x tp {} compiled=True", functools.partial(data_parallel, "fsdp", "mxfp8", compiled=True)
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
    if THOROUGH:
        yield "moe fp8", functools.partial(trained, "fp8_blockwise", mesh, hidden=256, experts=3, steps=1)
    yield (
        "moe low",
        functools.partial(trained, "mxfp8", mesh, wgrad="requantized", experts=3, steps=2 if THOROUGH else 1),
    )
    named = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    for dispatcher in (AllToAll("low"), AllToAll())[: None if THOROUGH else 1]:
        label = f"ep on tp {dispatcher.payload}"
        yield label, functools.partial(on_expert_ranks, named, dispatcher, "mxfp8", compiled=THOROUGH)
    yield "style refusals", functools.partial(refusals, mesh)
    yield "changed", functools.partial(changed, mesh)
    yield "copied", functools.partial(copied, mesh)
