"""Experts that are cut along their hidden units, as one rank of tests/distributed/test_tensor_parallel.py sees them.

They are compared with one process that has all tokens and whole experts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import blockscale as bs
from blockscale.autograd import grouped_swiglu_mlp
from blockscale.autograd.recipe import Recipe, get_recipe
from blockscale.distributed import (
    AllToAll,
    Dispatcher,
    ExpertTensorParallel,
    FixedCapacity,
    count_underflows,
    expert_parallel_,
    grouped_swiglu_parallel,
)
from blockscale.distributed.compiling import COMPILES_EXPERTS
from blockscale.errors import BlockscaleError
from blockscale.nn import GroupedExperts, MoE
from support.ranks import calls_not_compared, compiles
from support.tokens_sharded import Wire, relative, world

Case = tuple[str, Callable[[], Any]]
EXPERTS, TOP_K = 5, 2
THOROUGH = "ALL_TESTS" in os.environ


class Sizes(NamedTuple):
    """lead: leading axes of the whole x, of which token_dim is sharded.  hidden: of all ranks."""

    lead: tuple[int, ...]
    dim: int
    hidden: int
    token_dim: int = 0


class Data(NamedTuple):
    """Everything of one call, whole.  experts: [T, k]."""

    x: Tensor
    grad: Tensor
    gates: Tensor
    experts: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def data(sizes: Sizes, dtype: torch.dtype, *, bias: bool = False, hot: bool = False) -> Data:
    """hot: most tokens go to the last expert, and some slots to none."""
    rng = torch.Generator().manual_seed(3)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng) * scale).to(dtype)

    x, grad = random(*sizes.lead, sizes.dim), random(*sizes.lead, sizes.dim)
    scores = torch.randn(x[..., 0].numel(), EXPERTS, generator=rng)
    scores[:, -1] += 4 * hot
    values, experts = scores.topk(TOP_K)
    if hot:
        experts[::3, 1] = EXPERTS
    gate_up = random(EXPERTS, 2 * sizes.hidden, sizes.dim, scale=0.1)
    down = random(EXPERTS, sizes.dim, sizes.hidden, scale=0.1)
    biases = (random(EXPERTS, 2 * sizes.hidden), random(EXPERTS, sizes.dim)) if bias else (None, None)
    return Data(x, grad, values.softmax(-1), experts, gate_up, down, *biases)


def cut(d: Data, rank: int, ranks: int) -> Data:
    """The experts of one rank, with all tokens."""

    def packed(t: Tensor | None) -> Any:
        return None if t is None else t.unflatten(1, (2, -1)).chunk(ranks, 2)[rank].flatten(1, 2)

    return d._replace(
        gate_up=packed(d.gate_up), down=d.down.chunk(ranks, 2)[rank].contiguous(), gate_up_bias=packed(d.gate_up_bias)
    )


def own_tokens(d: Data, sizes: Sizes) -> Data:
    """This rank's tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def part(t: Tensor, dim: int = sizes.token_dim) -> Tensor:
        return t.chunk(ranks, dim)[rank].contiguous()

    slots = [part(each.view(*sizes.lead, TOP_K)).flatten(0, -2) for each in (d.gates, d.experts)]
    return d._replace(x=part(d.x), grad=part(d.grad), gates=slots[0], experts=slots[1])


WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias")
NAMES = ("x", "gates", *WEIGHTS)


def run(d: Data, call: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Results and gradients of one call."""
    leaves = [None if (t := getattr(d, name)) is None else t.clone().requires_grad_() for name in NAMES]
    x, gates, *weights = leaves
    y = call(x, *weights[:2], bs.sort_by_expert(d.experts, EXPERTS), gates, *weights[2:])
    y.backward(d.grad)
    found = {"y": y, **{name: each.grad for name, each in zip(NAMES, leaves, strict=True) if each is not None}}
    return {name: each.detach() for name, each in found.items() if each is not None}


def in_one_process(d: Data, recipe: Recipe) -> dict[str, Tensor]:
    def call(x: Tensor, up: Tensor, down: Tensor, routing: bs.Routing, gates: Tensor, *biases: Any) -> Tensor:
        y = grouped_swiglu_mlp(x.flatten(0, -2), up, down, routing, *biases, recipe, gate_weights=gates)
        return y.view(*x.shape[:-1], -1)

    return run(d, call)


def experts(
    recipe: Recipe,
    sizes: Sizes,
    dtype: torch.dtype = torch.bfloat16,
    *,
    payload: Any = "bf16",
    compiled: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """One call on all ranks against one process: what has its bits, and how far sums over ranks are off."""
    rank, ranks, d = dist.get_rank(), dist.get_world_size(), data(sizes, dtype, **options)
    want = in_one_process(d, recipe)
    made = functools.partial(
        grouped_swiglu_parallel, group=world(), recipe=recipe, token_dim=sizes.token_dim, payload=payload
    )
    mine = own_tokens(cut(d, rank, ranks), sizes)
    with Wire() as wire, count_underflows() as underflows:
        got = run(mine, made)
    if compiled:
        traced = run(mine, torch.compile(made, fullgraph=True, backend="aot_eager"))
        return {"same": all(torch.equal(got[name], each) for name, each in traced.items())}
    found: dict[str, Any] = {"calls": wire.calls, "counted": underflows.values}
    exact = want if payload == "bf16" else in_one_process(d._replace(x=coded(d.x, recipe)), recipe)
    wanted, near = (
        cut(d._replace(**{name: each[name] for name in each if name in WEIGHTS}), rank, ranks) for each in (exact, want)
    )
    found["bits"] = {name: torch.equal(got[name], getattr(wanted, name)) for name in WEIGHTS if name in got}
    found["weights off"] = max(relative(got[name].float(), getattr(near, name).float()) for name in WEIGHTS[:2])
    found |= sums(d, want, got, recipe, sizes, ranks)
    tokens = d.x[..., 0].numel() // ranks
    found["gathered"] = wire.bytes["all_gather_into_tensor_coalesced"] - tokens * TOP_K * 8
    found["gathered"] /= 2 * tokens * sizes.dim * dtype.itemsize
    summed = 2 * ranks * tokens * sizes.dim * dtype.itemsize + ranks * tokens * TOP_K * 4
    found["summed"] = wire.bytes["reduce_scatter_tensor"] / summed
    return found


def sums(
    d: Data, want: dict[str, Tensor], got: dict[str, Tensor], recipe: Recipe, sizes: Sizes, cuts: int
) -> dict[str, Any]:
    """y and the gradients of x and of the gate weights: sums over ranks of what one process computes of each part.
    cuts: number of ranks that share an expert."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts: list[dict[str, Tensor]] = []
    for each in range(cuts):
        part = cut(d, each, cuts)
        parts.append(in_one_process(part if each == 0 else part._replace(down_bias=None), recipe))
    shapes = {"y": sizes.lead, "x": sizes.lead, "gates": (*sizes.lead,)}
    found: dict[str, Any] = {}
    for name, lead in shapes.items():
        pieces = [each[name].view(*lead, -1).chunk(ranks, sizes.token_dim)[rank] for each in parts]
        mine = want[name].view(*lead, -1).chunk(ranks, sizes.token_dim)[rank].float()
        result = got[name].view_as(pieces[0])
        eps = torch.finfo(d.x.dtype).eps
        # every slot's row is rounded, the sum over slots, every sum over ranks, and the same of one process
        spread = sum(piece.float().abs() for piece in pieces)
        bound = eps * (2 + cuts + TOP_K) * (spread + spread.mean(-1, keepdim=True))
        found[f"{name} in bound"] = bool(((result.float() - mine).abs() <= bound).all())
        found[f"{name} off"] = relative(result.float(), mine)
        if cuts == 2:
            found[f"{name} is the sum"] = torch.equal(result, pieces[0] + pieces[1])
    return found


def on_mesh(
    recipe: Recipe,
    sizes: Sizes,
    dispatcher: Dispatcher,
    dtype: torch.dtype,
    *,
    compiled: bool = False,
    cuts: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Experts that are divided along one dimension of a mesh and cut along the other, against one process."""
    ranks, d = dist.get_world_size(), data(sizes, dtype, **options)
    mesh = init_device_mesh("cpu", (ranks // cuts, cuts), mesh_dim_names=("ep", "tp"))
    shape = {"dim": sizes.dim, "hidden": sizes.hidden, "experts": EXPERTS, "top_k": TOP_K}
    moe = MoE(**shape, bias=d.down_bias is not None, dtype=dtype, recipe=recipe)
    layer, names = moe.experts, ("gate_up.weight", "down.weight", "gate_up.bias", "down.bias")
    with torch.no_grad():
        for name, each in zip(names, d[4:], strict=True):
            if each is not None:
                layer.get_parameter(name).copy_(each)
    expert_parallel_(moe, mesh, dispatcher)
    mine, results = own_tokens(d, sizes), list[dict[str, Tensor]]()
    calls: list[tuple[Callable[..., Tensor], Any]] = [(layer, nullcontext())]
    if compiled:
        calls.append((compile_layer(layer, dispatcher) if compiles() else layer, calls_not_compared()))
    for function, compared in calls:
        layer.zero_grad()
        x, gates = (each.clone().requires_grad_() for each in (mine.x, mine.gates))
        with compared:
            y = function(x, bs.sort_by_expert(mine.experts, EXPERTS), gates)
            y.backward(mine.grad)
        results.append({"y": y.detach(), "x": x.grad, "gates": gates.grad})  # pyright: ignore[reportArgumentType]
        for key, name in zip(WEIGHTS, names, strict=True):
            if getattr(d, key) is not None:
                grad: Any = layer.get_parameter(name).grad
                results[-1][key] = grad.full_tensor().view(getattr(d, key).shape)
    got = results[0]
    if compiled:
        return {"same": all(torch.equal(got[name], each) for name, each in results[1].items())}
    want = in_one_process(d, recipe)
    exact = want if dispatcher.payload == "bf16" else in_one_process(d._replace(x=coded(d.x, recipe)), recipe)
    # columns of dy are cast from the codes of rows too: for down.weight see tests/distributed/test_expert_parallel.py
    same = [name for name in WEIGHTS if name in got and (name != "down" or dispatcher.payload == "bf16")]
    found: dict[str, Any] = {"bits": {name: torch.equal(got[name], exact[name]) for name in same}}
    found["weights off"] = max(relative(got[name].float(), want[name].float()) for name in WEIGHTS[:2])
    return found | sums(d, want, got, recipe, sizes, cuts)


def compile_layer(layer: GroupedExperts, dispatcher: Dispatcher) -> Callable[..., Tensor]:
    """AllToAll breaks the graph where the host reads the numbers of rows; nothing else does."""
    whole = isinstance(dispatcher, FixedCapacity) and COMPILES_EXPERTS
    return torch.compile(layer, backend="aot_eager" if THOROUGH else "eager", fullgraph=whole)


def coded(x: Tensor, recipe: Recipe) -> Tensor:
    """The values of x's row operand: tokens that travel as codes are cast to columns from them."""
    operand = recipe.operand("fprop_x")
    assert operand is not None
    codes = bs.quantize(x.flatten(0, -2), operand.format, scale_rule=operand.scale_rule)
    return bs.dequantize(codes, x.dtype).view(x.shape)


def layer_refusals() -> dict[str, str]:
    """Errors by what causes them; every rank raises before it communicates."""
    ranks, found = dist.get_world_size(), dict[str, str]()
    mesh = init_device_mesh("cpu", (ranks,))

    def attempt(label: str, act: Callable[[], Any]) -> None:
        try:
            act()
            found[label] = "no error"
        except BlockscaleError as error:
            found[label] = str(error)

    def call(label: str, layer: GroupedExperts, *args: Any) -> None:
        with Wire() as wire:
            attempt(label, lambda: layer(*args))
        assert not wire.calls, label

    def cut_layer(recipe: Any, hidden: int, **options: Any) -> GroupedExperts:
        layer = GroupedExperts(experts=3, dim=64, hidden=hidden, recipe=recipe, name="a")
        ExpertTensorParallel(**options)._apply(layer, mesh)
        return layer

    plain = GroupedExperts(experts=3, dim=64, hidden=64, recipe="mxfp8")
    attempt("hidden", lambda: cut_layer("fp8_blockwise", 64 * ranks))
    attempt("stochastic", lambda: cut_layer("mxfp4", 32 * ranks))
    attempt("low", lambda: cut_layer("fp8_blockwise", 128 * ranks, payload="low"))
    attempt("payload", lambda: cut_layer("mxfp8", 32 * ranks, payload="fp8"))
    attempt("linear", lambda: ExpertTensorParallel()._apply(bs.nn.Linear(64, 64), mesh))
    attempt("mesh", lambda: ExpertTensorParallel()._apply(plain, init_device_mesh("cpu", (1, ranks))))
    layer, x, gates = cut_layer("mxfp8", 32 * ranks), torch.randn(4, 64), torch.ones(4, 1)
    routing = bs.sort_by_expert(torch.zeros(4, 1, dtype=torch.int64), 3)
    call("no gates", layer, x, routing)
    call("tokens", layer, x[:3], routing, gates)
    call("ends", layer, x, routing.offs, gates)
    attempt("twice", lambda: ExpertTensorParallel()._apply(layer, mesh))
    low = cut_layer("mxfp8", 32 * ranks, payload="low")
    low.down.register_forward_hook(lambda *args: None)
    call("hooks", low, x, routing, gates)
    owned = cut_layer("mxfp8", 32 * ranks)
    owned.down.weight.main_grad = torch.zeros_like(owned.down.weight)
    attempt("main_grad", lambda: owned(x, routing, gates))
    step = get_recipe("mxfp8").replace(weight_cast="step")
    attempt("step", lambda: bs.refresh_weights_(cut_layer(step, 32 * ranks)))
    return found


def cases(ranks: int) -> Iterator[Case]:
    fp8, mx, pow2 = map(get_recipe, ("fp8_blockwise", "mxfp8", "fp8_blockwise_pow2"))
    fp32 = torch.float32
    flat, batch = Sizes((24 * ranks,), 96, 64 * ranks), Sizes((2, 12 * ranks), 96, 64 * ranks, 1)
    blocks = Sizes((20 * ranks,), 128, 128 * ranks)
    here = functools.partial
    mesh = here(on_mesh, mx, Sizes((11 * ranks,), 96, 64))
    if ranks == 2 or THOROUGH:
        yield "experts low mx second axis", here(experts, mx, batch, payload="low")
    if ranks > 2:
        yield "mesh bias", here(mesh, AllToAll(), torch.bfloat16, bias=True)
        yield "mesh low fixed fp32", here(mesh, FixedCapacity(44, "low"), fp32)
        if THOROUGH:
            yield "mesh low bias fp32", here(mesh, AllToAll("low"), fp32, bias=True, hot=True)
            for dispatcher in (FixedCapacity(44), AllToAll(), AllToAll("low")):
                yield f"compiled mesh {dispatcher}", here(mesh, dispatcher, fp32, compiled=True)
        return
    yield "experts fp8 fp32", here(experts, fp8, blocks, fp32, hot=True)
    yield "experts mx second axis bias", here(experts, mx, batch, bias=True)
    yield "experts wgrad unquantized", here(experts, get_recipe("mxfp8_wgrad_bf16"), flat)
    yield "experts low bias fp8 fp32", here(experts, pow2, blocks, fp32, payload="low", bias=True)
    if THOROUGH:
        yield "experts low hot fp32", here(experts, mx, flat, fp32, payload="low", hot=True)
        yield "experts mx", here(experts, mx, flat)
        yield "compiled experts", here(experts, mx, batch, compiled=True, bias=True)
        yield "compiled experts low", here(experts, mx, flat, compiled=True, payload="low")
    # experts that are only cut, and experts that are only divided
    yield "compiled cut", here(mesh, FixedCapacity(44, "low"), fp32, compiled=True, cuts=2)
    yield "compiled divided", here(mesh, AllToAll("low"), fp32, compiled=True, cuts=1)
    yield "expert refusals", layer_refusals
