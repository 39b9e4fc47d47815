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
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.distributed import AllToAll, Dispatcher, FixedCapacity, expert_parallel_
from blockscale.errors import BlockscaleError, CapacityError
from blockscale.nn import MoE

Case = tuple[str, Callable[[], Any]]
DIM, HIDDEN = 160, 96
# tokens of each rank: none on one of them, and tails of blocks
TOKENS = {2: (41, 24), 4: (41, 0, 24, 7)}


class Wire(TorchDispatchMode):
    """Names of collectives, and the bytes that this rank gives to each `all_to_all_single`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            name = func._schema.name.partition("::")[2]
            if "wait" not in name and "wrap" not in name:
                self.names.add(name)
            if name == "all_to_all_single":
                self.bytes.append(args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


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
    """load: random; one hot expert; experts of the first rank alone; tokens on one rank or none; gate weights that are
    "even", or "spread" down to 2^-20."""
    rng = torch.Generator().manual_seed(5)
    total = sum(tokens_of(ranks, load))
    scores = torch.randn(total, experts, generator=rng)
    if load == "hot":
        scores[:, experts - 1] += 6
    elif load == "first rank":
        scores[:, : max(top_k, -(-experts // ranks))] += 20
    values, chosen = scores.topk(top_k)
    gate_weights = values.softmax(-1)
    if load == "even":
        gate_weights = torch.full_like(gate_weights, 1 / top_k)
    elif load == "spread":
        gate_weights *= torch.exp2(-torch.randint(0, 21, gate_weights.shape, generator=rng).float())
    x, dy = (torch.randn(total, DIM, generator=rng).to(dtype) for _ in range(2))
    return Call(x, dy, chosen, gate_weights)


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


def requantized_down(moe: MoE, call: Call) -> Tensor:
    """The gradient of `down.weight` in one process, with dy's columns made from dgrad's rows. By public casts alone."""
    recipe, first, second = moe.experts.down.recipe, moe.experts.gate_up, moe.experts.down
    forms = {role: recipe.operand(role) for role in bs.formats.stochastic.ROLES}

    def quantized(x: Tensor, role: str, **options: Any) -> bs.BlockScaled:
        form = forms[role]
        assert form is not None
        return bs.quantize(x, form.format, scale_rule=form.scale_rule, **options)

    routing = bs.sort_by_expert(call.experts, moe.router.out_features)
    tokens, rows = routing.permutation
    x_row, weight = quantized(call.x[tokens], "fprop_x"), quantized(first.weight.detach(), "fprop_w")
    gate_up = bs.scaled_grouped_mm(x_row, weight, routing.offs, call.x.dtype, bias=first.bias)
    form = forms["wgrad_x"]
    assert form is not None
    spec = bs.CastSpec(form.format, form.scale_rule)
    hidden = bs.swiglu_quantize(gate_up, spec, axis=-2, offs=routing.offs)
    factors = torch.empty(tokens.shape[0]).scatter_(0, rows.flatten().long(), call.gate_weights.flatten())
    dy = (call.dy[tokens].float() * factors[:, None]).to(call.dy.dtype)
    decoded = bs.dequantize(quantized(dy, "dgrad_dy"), torch.float32)
    dy_col = quantized(decoded, "wgrad_dy", axis=-2, offs=routing.offs)
    assert second.weight.dtype == torch.float32
    return bs.scaled_grouped_mm(dy_col.operand, hidden.operand, routing.offs, torch.float32)


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
    weights: torch.dtype = torch.bfloat16,
    **options: Any,
) -> dict[str, float]:
    """The largest difference of any rank, by name.  dtype: of tokens.  weights: dtype of parameters."""
    call, rank = make_call(ranks, experts, top_k, load, dtype), dist.get_rank()
    one, moe = (build(recipe, experts, top_k, weights, **options) for _ in range(2))
    rows = rows_of(rank, ranks, load)
    expert_parallel_(moe, mesh_of(ranks), dispatcher)
    want, wire = run_experts(one, call, slice(None)), Wire()
    with wire:
        got = run_experts(moe, call, rows)
    found = {"y": off(got["y"], want["y"][rows]), "dx": off(got["dx"], want["dx"][rows])}
    found["gates"] = off(got["gates"], want["gates"][rows])
    if dispatcher is not None and dispatcher.payload == "low":
        want["requantized"], got["requantized"] = requantized_down(one, call), got["down.weight"]
    for name, grad in want.items():
        if name not in found:
            sharded = got[name]
            assert isinstance(sharded, DTensor), name
            chunk = -(-experts // ranks)
            found[name] = off(sharded.to_local(), grad[rank * chunk : (rank + 1) * chunk])
    assert wire.names == {"all_to_all_single", "all_gather_into_tensor"}, wire.names
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


def wire_bytes(ranks: int, recipe: str) -> dict[str, float]:
    """Bytes of the four exchanges of a call, of those in bf16, of all ranks together."""
    found: list[Tensor] = []
    for payload in ("bf16", "low"):
        torch.manual_seed(0)
        moe = MoE(dim=256, hidden=HIDDEN, experts=6, top_k=2, dtype=torch.bfloat16, recipe=recipe)
        expert_parallel_(moe, mesh_of(ranks), AllToAll(payload=payload))
        x = torch.randn(64, 256).bfloat16().requires_grad_()
        with Wire() as wire:
            moe(x).sum().backward()
        total = torch.tensor(wire.bytes, dtype=torch.float64)
        dist.all_reduce(total)
        found.append(total)
    share = (found[1] / found[0]).tolist()
    return dict(zip(("dispatch", "combine", "gradient of combine", "gradient of dispatch"), share, strict=True))


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


def rows_of_no_expert(ranks: int, dispatcher: Dispatcher) -> dict[str, float]:
    """Slots that no expert serves give zeros, and no gradient."""
    call = make_call(ranks, 6, 2, "random", torch.bfloat16)
    experts = torch.where(torch.arange(call.x.shape[0])[:, None] % 3 == 1, 6, call.experts)
    call, rows = call._replace(experts=experts), rows_of(dist.get_rank(), ranks, "random")
    one, moe = (build("mxfp8", 6, 2) for _ in range(2))
    expert_parallel_(moe, mesh_of(ranks), dispatcher)
    want, got = run_experts(one, call, slice(None)), run_experts(moe, call, rows)
    return {name: worst(off(got[name], want[name][rows])) for name in ("y", "dx", "gates")}


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
    setattr(moe.experts.down.weight, "main_grad", torch.zeros(4, DIM, HIDDEN))  # noqa: B010
    attempt("main_grad", lambda: moe(x))
    delattr(moe.experts.down.weight, "main_grad")
    attempt("attach", lambda: bs.refresh_weights_(expert_parallel_(build(step_cast(), 4, 2), mesh)))
    low_moe = expert_parallel_(build("mxfp8", 4, 2), mesh, low)
    low_moe.experts.down.register_forward_hook(lambda *args: None)
    attempt("hooks", lambda: low_moe(x.bfloat16()))
    return found


def step_cast() -> bs.Recipe:
    return bs.get_recipe("mxfp8").replace(weight_cast="step")


def weight_casts(ranks: int, dispatcher: Dispatcher) -> dict[str, float]:
    """Weights cast once in each pass: the same numbers."""
    return against_one_process(ranks, dispatcher, recipe=bs.get_recipe("mxfp8").replace(weight_cast="twice"))


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


def cases(ranks: int, folder: str) -> Iterator[Case]:
    here = functools.partial(against_one_process, ranks)
    for recipe in ("fp8_blockwise", "mxfp8", "nvfp4", "mxfp4", "mxfp8_wgrad_bf16", "bf16"):
        yield f"16 bits {recipe}", functools.partial(here, recipe=recipe, bias=recipe == "mxfp8")
    for load in ("hot", "first rank", "one source", "no tokens"):
        yield f"16 bits {load}", functools.partial(here, load=load, recipe="fp8_blockwise_pow2")
    for experts, top_k in ((5, 1), (3, 3), (9, 8), (1, 1)):
        yield f"16 bits k={top_k} of {experts}", functools.partial(here, experts=experts, top_k=top_k)
    yield "16 bits float32", functools.partial(here, dtype=torch.float32, weights=torch.float32)
    # weight gradients in fp32, so that a difference is not rounded to 0 or to a bf16's last bit
    low = functools.partial(here, AllToAll(payload="low"), weights=torch.float32)
    for recipe in ("fp8_blockwise_pow2", "mxfp8", "mxfp8_128x128"):
        yield f"low {recipe}", functools.partial(low, recipe=recipe, bias=recipe == "mxfp8")
    for load in ("hot", "first rank", "one source", "no tokens", "even", "spread"):
        yield f"low {load}", functools.partial(low, load=load, recipe="fp8_blockwise_pow2")
    for experts, top_k in ((5, 1), (3, 3), (9, 8)):
        yield f"low k={top_k} of {experts}", functools.partial(low, experts=experts, top_k=top_k, recipe="mxfp8")
    yield "low float32", functools.partial(low, dtype=torch.float32, recipe="fp8_blockwise_pow2")
    for recipe in ("fp8_blockwise_pow2", "mxfp8"):
        yield f"wire {recipe}", functools.partial(wire_bytes, ranks, recipe)
    for load, experts, top_k in (("random", 6, 2), ("hot", 5, 1), ("no tokens", 6, 2), ("one source", 3, 3)):
        for payload in ("bf16", "low"):
            rows = 41 * min(top_k, -(-experts // ranks))
            case = functools.partial(here, FixedCapacity(rows, payload), experts=experts, top_k=top_k, load=load)
            label = f"{'16 bits' if payload == 'bf16' else 'low'} fixed {load}"
            yield label, functools.partial(case, recipe="mxfp8", weights=torch.float32, bias=load == "random")
    for dispatcher in (AllToAll(), AllToAll("low"), FixedCapacity(82)):
        label = dispatcher.describe()
        yield f"no expert {label}", functools.partial(rows_of_no_expert, ranks, dispatcher)
    yield "16 bits twice", functools.partial(weight_casts, ranks, AllToAll())
    if ranks == 2:
        yield "refusals", functools.partial(refusals, ranks)
    yield "checkpoints", functools.partial(checkpoints, ranks, folder)
    yield "overflow", functools.partial(overflow, ranks)
    yield "layer 16 bits fixed", functools.partial(whole_layer, ranks, FixedCapacity(82), "mxfp8")
    yield "layer 16 bits", functools.partial(whole_layer, ranks, AllToAll(), "fp8_blockwise")


def run(rank: int, ranks: int, folder: str, names: tuple[str, ...]) -> None:
    """All cases on one rank; writes {case: what it found, or the error}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    # a rank that fails alone must not keep the others for longer
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    results: dict[str, Any] = {}
    for label, test in cases(ranks, folder):
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
