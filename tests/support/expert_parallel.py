"""The work of one rank in tests/distributed/test_expert_parallel.py: experts of several ranks against one process.

One process has the tokens of all ranks, rank after rank. In a module of its own because a spawned process imports it
by name.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.distributed import AllToAll, DeepEP, Dispatcher, FixedCapacity, expert_parallel_
from blockscale.distributed.dispatch import Payload
from blockscale.errors import DtypeError, MissingPackageError, ShardingError
from blockscale.nn import MoE
from support.deep_ep_stand_in import Buffer, install
from support.rank_program import Case, main, run_cases

THOROUGH = "ALL_TESTS" in os.environ
DIM, HIDDEN = 160, 96
# tokens of each rank: none on one of them, and tails of blocks
# what the stand-in for deep_ep calls
DIRECT = ("alltoall_base_",)
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


def device() -> str:
    """Device of this process: the CPU, or the one GPU that all ranks share."""
    return os.environ.get("EXPERTS_ON", "cpu")


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
    return Call(*(each.to(device()) for each in (x, dy, chosen, gate_weights)))


def build(
    recipe: str | bs.Recipe, experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> MoE:
    """The same layer on every rank."""
    torch.manual_seed(0)
    options |= {"dtype": dtype, "recipe": recipe, "name": "layers.0.mlp"}
    return MoE(dim=DIM, hidden=HIDDEN, experts=experts, top_k=top_k, **options).to(device())


@functools.cache
def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh(device(), (ranks,), mesh_dim_names=("ep",))


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
    factors = torch.empty(tokens.shape[0], device=device()).scatter_(
        0, rows.flatten().long(), call.gate_weights.flatten()
    )
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
    assert wire.names <= {"all_to_all_single", "all_gather_into_tensor", *DIRECT}, wire.names
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


def rows_of_no_expert(ranks: int, dispatcher: Dispatcher) -> dict[str, float]:
    """Slots that no expert serves give zeros, and no gradient."""
    call = make_call(ranks, 6, 2, "random", torch.bfloat16)
    experts = torch.where(torch.arange(call.x.shape[0])[:, None] % 3 == 1, 6, call.experts)
    call, rows = call._replace(experts=experts), rows_of(dist.get_rank(), ranks, "random")
    one, moe = (build("mxfp8", 6, 2) for _ in range(2))
    expert_parallel_(moe, mesh_of(ranks), dispatcher)
    want, got = run_experts(one, call, slice(None)), run_experts(moe, call, rows)
    return {name: worst(off(got[name], want[name][rows])) for name in ("y", "dx", "gates")}


def deep_ep(ranks: int, payload: Payload) -> dict[str, float]:
    """The adapter over a stand-in for the package; without one it is refused."""
    assert "deep_ep" not in sys.modules, "the stand-in tests nothing beside the package"
    with pytest.raises(MissingPackageError, match="install deep_ep"):
        DeepEP(None)
    install()
    buffer = Buffer(mesh_of(ranks).get_group())
    here = functools.partial(against_one_process, ranks, DeepEP(buffer, payload), recipe="mxfp8", weights=torch.float32)
    found = here(experts=2 * ranks)
    assert buffer.calls == ["layout", "dispatch", "combine", "dispatch again", "combine"], buffer.calls
    with pytest.raises(ShardingError, match=f"5 experts on {ranks} ranks"):
        here(experts=5)
    with pytest.raises(DtypeError, match="tokens in float32"):
        here(experts=2 * ranks, dtype=torch.float32)
    del sys.modules["deep_ep"]
    return found


def cases(ranks: int, folder: str) -> Iterator[Case]:
    """On four ranks those that have something of their own: ranks without tokens, and ranks without experts."""
    from support.expert_parallel_state import (
        Experts,
        GptOssExperts,
        checkpoints,
        of_transformers,
        overflow,
        refusals,
        with_fsdp,
    )

    def first(two: int, four: int) -> int | None:
        """How many of a kind are run in every test run."""
        return None if THOROUGH else two if ranks == 2 else four

    here = functools.partial(against_one_process, ranks)
    if device() == "cuda":
        for load in ("random", "hot", "one source", "no tokens"):
            for payload in ("bf16", "low"):
                label = f"{'16 bits' if payload == 'bf16' else 'low'} symmetric {load}"
                case = functools.partial(here, FixedCapacity(82, payload), load=load, weights=torch.float32)
                # with codes a bias takes sums over ranks, by a collective that gloo does not have for CUDA
                bias = load == "random" and payload == "bf16"
                yield label, functools.partial(case, recipe="fp8_blockwise_pow2", bias=bias)
        return
    for recipe in ("fp8_blockwise", "mxfp8", "nvfp4", "mxfp8_wgrad_bf16", "bf16", "mxfp4")[: first(5, 2)]:
        yield f"16 bits {recipe}", functools.partial(here, recipe=recipe, bias=recipe == "mxfp8")
    for load in ("one source", "hot", "first rank", "no tokens")[: first(2, 1)]:
        yield f"16 bits {load}", functools.partial(here, load=load, recipe="fp8_blockwise_pow2")
    for experts, top_k in ((3, 3), (5, 1), (9, 8), (1, 1))[: first(3, 2)]:
        yield f"16 bits k={top_k} of {experts}", functools.partial(here, experts=experts, top_k=top_k)
    # weight gradients in fp32, so that a difference is not rounded to 0 or to a bf16's last bit
    low = functools.partial(here, AllToAll(payload="low"), weights=torch.float32)
    for recipe in ("mxfp8", "fp8_blockwise_pow2", "mxfp8_128x128")[: first(2, 1)]:
        yield f"low {recipe}", functools.partial(low, recipe=recipe, bias=recipe == "mxfp8")
    for load in ("hot", "even", "spread", "first rank", "one source", "no tokens")[: first(3, 1)]:
        yield f"low {load}", functools.partial(low, load=load, recipe="fp8_blockwise_pow2")
    for experts, top_k in ((3, 3), (9, 8), (5, 1))[: first(2, 1)]:
        yield f"low k={top_k} of {experts}", functools.partial(low, experts=experts, top_k=top_k, recipe="mxfp8")
    loads = (("random", 6, 2), ("no tokens", 6, 2), ("hot", 5, 1), ("one source", 3, 3))
    for load, experts, top_k in loads[: first(3, 1)]:
        for payload in ("bf16", "low"):
            rows = 41 * min(top_k, -(-experts // ranks))
            case = functools.partial(here, FixedCapacity(rows, payload), experts=experts, top_k=top_k, load=load)
            label = f"{'16 bits' if payload == 'bf16' else 'low'} fixed {load}"
            yield label, functools.partial(case, recipe="mxfp8", weights=torch.float32, bias=load == "random")
    yield "overflow", functools.partial(overflow, ranks)
    yield "checkpoints", functools.partial(checkpoints, ranks, folder)
    yield "wire fp8_blockwise_pow2", functools.partial(wire_bytes, ranks, "fp8_blockwise_pow2")
    if ranks == 4:
        for payload in ("bf16", "low"):
            yield f"fsdp {payload}", functools.partial(with_fsdp, ranks, payload)
    if ranks == 4 and not THOROUGH:
        return
    kinds: tuple[tuple[type[Experts], Payload], ...] = ((Experts, "bf16"), (Experts, "low"), (GptOssExperts, "bf16"))
    for kind, payload in kinds:
        label = f"transformers {kind.__name__} {payload}"
        yield label, functools.partial(of_transformers, ranks, kind, payload, "fp8_blockwise_pow2")
    yield "wire mxfp8", functools.partial(wire_bytes, ranks, "mxfp8")
    yield "16 bits float32", functools.partial(here, dtype=torch.float32, weights=torch.float32)
    if THOROUGH:
        yield "low float32", functools.partial(low, dtype=torch.float32, recipe="fp8_blockwise_pow2")
    yield "16 bits twice", functools.partial(here, recipe=bs.get_recipe("mxfp8").replace(weight_cast="twice"))
    for dispatcher in (AllToAll("low"), FixedCapacity(82), AllToAll())[: first(2, 0)]:
        yield f"no expert {dispatcher.describe()}", functools.partial(rows_of_no_expert, ranks, dispatcher)
    for payload in ("bf16", "low"):
        label = f"{'16 bits' if payload == 'bf16' else 'low'} DeepEP"
        yield label, functools.partial(deep_ep, ranks, payload)
    yield "layer 16 bits", functools.partial(whole_layer, ranks, AllToAll(), "fp8_blockwise")
    if THOROUGH:
        yield "layer 16 bits fixed", functools.partial(whole_layer, ranks, FixedCapacity(82), "mxfp8")
    if ranks == 2:
        yield "refusals", functools.partial(refusals, ranks)


def run(rank: int, ranks: int, folder: str, names: tuple[str, ...]) -> None:
    """All cases on one rank."""
    if device() == "cuda":
        torch.cuda.set_device(0)
    # a rank that fails alone must not keep the others for longer
    run_cases(rank, ranks, folder, names, lambda: cases(ranks, folder), timedelta(seconds=60))


if __name__ == "__main__":
    main(run)
