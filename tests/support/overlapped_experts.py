"""Cases of experts that take the tokens of all ranks beside their products (`overlapped.py`)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import blockscale as bs
from blockscale.autograd.recipe import get_recipe
from blockscale.distributed import (
    AllToAll,
    Dispatcher,
    ExpertTensorParallel,
    count_underflows,
    expert_parallel_,
    grouped_swiglu_parallel,
)
from blockscale.distributed.collectives import Tokens, ranks_of
from blockscale.distributed.divided_experts import LowCall
from blockscale.distributed.expert_all_gather import all_gather_experts
from blockscale.distributed.overlap import all_gather_grouped_mm, grouped_mm_reduce_scatter
from blockscale.distributed.overlap.choice import link_for
from blockscale.distributed.overlap.expert_sharing import ExpertSharing
from blockscale.distributed.overlap.link import Link
from blockscale.nn import MoE
from support import cut_experts as cut
from support.cut_experts import TOP_K, Sizes
from support.overlapped_link import device
from support.rank_program import Case
from support.tokens_sharded import Wire, relative, world


def compare(found: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, Any]:
    """Values that differ by name, and how far results are off."""
    assert found.keys() == plain.keys()
    differ = {name: int((found[name] != plain[name]).sum()) for name in found}
    return {"differ": differ, "off": {name: relative(found[name].float(), plain[name].float()) for name in found}}


class Moved:
    """What links have moved.  gathers: of each, columns and bytes of a value of its pieces; sums: their number."""

    def __init__(self) -> None:
        self.gathers: list[list[tuple[int, int]]] = []
        self.sums = 0


@contextmanager
def moved() -> Iterator[Moved]:
    """Count what the links of this rank move."""
    found, gather, add = Moved(), Link.gather, Link.sum

    def gathered(self: Link, pieces: Any, *args: Any) -> Any:
        found.gathers.append([(piece.shape[1], piece.itemsize) for piece in pieces])
        return gather(self, pieces, *args)

    def summed(self: Link, *args: Any) -> Any:
        found.sums += 1
        return add(self, *args)

    with patch.object(Link, "gather", gathered), patch.object(Link, "sum", summed):
        yield found


def experts(name: str, sizes: Sizes, *, payload: Any = "bf16", bias: bool = False, hot: bool = False) -> Any:
    """Experts that are cut along their hidden units, overlapped and not."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = cut.own_tokens(cut.cut(cut.data(sizes, torch.bfloat16, bias=bias, hot=hot), rank, ranks), sizes)
    mine = pytree.tree_map_only(Tensor, lambda each: each.to(device()), mine)
    options: dict[str, Any] = {"recipe": name, "token_dim": sizes.token_dim, "payload": payload, "group": world()}
    plain, layer = (functools.partial(grouped_swiglu_parallel, overlap=overlap, **options) for overlap in ("off", "on"))
    with count_underflows() as lost:
        want = cut.run(mine, plain)
    cut.run(mine, layer)  # buffers grow by collectives
    with Wire() as wire, moved() as link, count_underflows() as underflows:
        found = cut.run(mine, layer)
    counts = [(int(each.lost), each.values) for each in (lost, underflows)]
    bytes_of = {"rows": link.gathers, "sums": link.sums, "underflows": counts}
    return compare(found, want) | {"calls": wire.calls} | bytes_of


def partial() -> dict[str, Any]:
    """Results and gradients that differ where some gradients are needed, under autocast, and with main_grad."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes, recipe = Sizes((32 * ranks,), 96, 64 * ranks), get_recipe("mxfp8").replace(saves="source")
    found: dict[str, Any] = {}
    for label, names in (
        ("x", ("x",)),
        ("gates", ("gates",)),
        ("weights", ("gate_up", "down")),
        ("biases", ("gate_up_bias", "down_bias")),
        ("autocast", cut.NAMES),
        ("main_grad", cut.NAMES),
    ):
        dtype = torch.float32 if label == "autocast" else torch.bfloat16
        mine = cut.own_tokens(cut.cut(cut.data(sizes, dtype, bias=True), rank, ranks), sizes)
        results: list[dict[str, Tensor]] = []
        for overlap in ("off", "on"):
            leaves: dict[str, Any] = {name: getattr(mine, name).clone() for name in cut.NAMES}
            for name in names:
                leaves[name].requires_grad_()
            for name in cut.WEIGHTS[:2] if label == "main_grad" else ():
                leaves[name].main_grad = torch.zeros(leaves[name].shape)
            x, gates, *weights = leaves.values()
            routing, options = bs.sort_by_expert(mine.experts, cut.EXPERTS), {"group": world(), "overlap": overlap}
            with torch.autocast("cpu", enabled=label == "autocast"):
                y = grouped_swiglu_parallel(x, *weights[:2], routing, gates, *weights[2:], recipe=recipe, **options)
            y.backward(mine.grad.to(y.dtype))
            grads = {name: getattr(leaves[name], "main_grad", leaves[name].grad) for name in names}
            results.append({"y": y.detach(), **grads})
        found[label] = [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]
    return found


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh that divides experts, and cuts them if it has two dimensions."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp")[: len(shape)])


def divided(mesh: DeviceMesh, dispatcher: Dispatcher, *, bias: bool = False) -> Any:
    """Experts that are divided along a mesh, overlapped and by their dispatcher: gradients of weights have the same
    bits, since an expert has the same rows."""
    ranks = dist.get_world_size()
    sizes, experts = Sizes((24 * ranks,), 96, 64), 4
    rng = torch.Generator().manual_seed(3)
    shape: dict[str, Any] = {"dim": sizes.dim, "hidden": sizes.hidden, "experts": experts, "top_k": TOP_K}
    whole = MoE(**shape, bias=bias, dtype=torch.bfloat16, recipe="mxfp8")
    with torch.no_grad():
        for each in whole.parameters():
            each.copy_(torch.randn(each.shape, generator=rng) * 0.1)
    x, grad = (torch.randn(*sizes.lead, sizes.dim, generator=rng).bfloat16() for _ in range(2))
    values, ids = torch.randn(x.shape[0], experts, generator=rng).topk(TOP_K)
    mine = [each.chunk(ranks)[dist.get_rank()] for each in (x, grad, values.softmax(-1), ids)]
    results: dict[str, dict[str, Tensor]] = {}
    for overlap in ("off", "on"):
        moe = expert_parallel_(copy.deepcopy(whole), mesh, dispatcher, overlap=overlap)  # pyright: ignore[reportArgumentType]
        leaf, gates = (each.clone().requires_grad_() for each in (mine[0], mine[2]))
        with moved() as link:
            y = moe.experts(leaf, bs.sort_by_expert(mine[3], experts), gates)
            y.backward(mine[1])
        assert leaf.grad is not None
        assert gates.grad is not None
        results[overlap] = {"y": y.detach(), "x": leaf.grad, "gates": gates.grad}
        for name, each in moe.experts.named_parameters():
            own: Any = each.grad
            results[overlap][name] = own.to_local()
        assert (len(link.gathers), link.sums) == ((2, 2) if overlap == "on" else (0, 0))
    return compare(results["on"], results["off"])


def trained(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Losses of four steps of a mixture with router and shared expert, overlapped and not, and how far its weights have
    moved and are apart.  mesh: divides the experts; None: they are only cut."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    shape: dict[str, Any] = {"dim": 64, "hidden": 64 * ranks, "experts": 4, "top_k": 2, "shared": 32 * ranks}
    whole = MoE(**shape, recipe="mxfp8")
    rng = torch.Generator().manual_seed(6)
    x, target = (torch.randn(32 * ranks, 64, generator=rng).chunk(ranks)[rank] for _ in range(2))
    losses, weights = dict[str, list[float]](), list[Tensor]()
    for overlap in ("off", "on"):
        model = copy.deepcopy(whole)
        options: dict[str, Any] = {"sequence_dim": 0, "overlap": overlap}
        if mesh is None:
            ExpertTensorParallel(**options)._apply(model, init_device_mesh("cpu", (ranks,)))
        else:
            expert_parallel_(model, mesh, **options)
        optimizer, losses[overlap] = torch.optim.SGD(model.experts.parameters(), lr=0.5), []
        before = own_weights(model)
        with moved() as link:
            for step in range(4):
                inputs = x + step / 4
                loss = (inputs + model(inputs) - target).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[overlap].append(loss.item())
        # experts, and the shared one that is cut with them: x and dy, y; no gradient of x is needed
        calls = 0 if overlap == "off" else 2 if mesh is None or mesh.ndim == 2 else 1
        assert (len(link.gathers), link.sums) == (8 * calls, 4 * calls), (link.gathers, link.sums)
        weights += [before, own_weights(model)]
    start, plain, _, found = weights
    return losses | {"moved": relative(plain, start), "apart": relative(found, plain)}


def trained_mixture(ep: int) -> dict[str, Any]:
    """Losses of four steps of experts that are divided among `ep` groups of ranks and cut within each, overlapped and
    not, and how far their weights have moved and are apart. Tensors are plain: gloo lacks collectives that DTensors of
    a GPU need."""
    rank, ranks, rng = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(7)
    tp, experts, hidden = ranks // ep, 4, 64 * ranks
    x, target = (torch.randn(32 * ranks, 64, generator=rng).to(device()) for _ in range(2))
    gates, ids = torch.randn(32 * ranks, experts, generator=rng).softmax(-1).to(device()).topk(2)
    mine, hidden_units = slice(rank // tp * experts // ep, (rank // tp + 1) * experts // ep), hidden // tp
    up = (torch.randn(experts, 2, hidden, 64, generator=rng) * 0.1).to(device())
    down = (torch.randn(experts, 64, hidden, generator=rng) * 0.1).to(device())
    units = slice(rank % tp * hidden_units, (rank % tp + 1) * hidden_units)
    before = up[mine, :, units].flatten(1, 2), down[mine, :, units].contiguous()
    own = [each.chunk(ranks)[rank].contiguous() for each in (x, target, gates, ids)]
    losses, moved_to = dict[str, list[float]](), list[Tensor]()
    group = ranks_of(world())
    for overlap in ("off", "on"):
        weights = [each.clone().requires_grad_() for each in before]
        optimizer, losses[overlap] = torch.optim.SGD(weights, lr=1.0), []
        for step in range(4):
            inputs = own[0] + step / 4
            link = link_for(overlap, inputs, group)
            sharing = ExpertSharing(group, Tokens(1, 32), range(experts)[mine], link)
            call = LowCall((weights[0], weights[1]), (None, None), get_recipe("mxfp8"), (None, None))
            routing = bs.sort_by_expert(own[3], experts)
            y = all_gather_experts(inputs, routing, own[2], call, sharing, low=True)
            loss = (inputs + y - own[1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[overlap].append(loss.item())
        moved_to.append(torch.cat([each.detach().flatten() for each in weights]))
    start, (plain, found) = torch.cat([each.flatten() for each in before]), moved_to
    return losses | {"moved": relative(plain, start), "apart": relative(found, plain)}


def own_weights(model: MoE) -> Tensor:
    """Weights of this rank's experts."""
    parts: list[Any] = [each.detach() for each in model.experts.parameters()]
    return torch.cat([each.to_local().flatten() for each in parts]).clone()


def operands(format: str | None) -> dict[str, Any]:
    """Both operations on experts that are divided among ranks, overlapped and not, beside products of all tokens by all
    experts.  format: of operands; None: bf16 tensors."""
    rank, ranks, rng = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0)
    tokens, experts = 12 * ranks, 3 * ranks
    x, up, down = (
        torch.randn(*shape, generator=rng).bfloat16() for shape in ((tokens, 96), (experts, 64, 96), (experts, 32, 64))
    )
    gates, ids = torch.rand(tokens, experts, generator=rng).topk(2)
    bias = torch.randn(experts, 64, generator=rng).bfloat16()

    def cast(values: Tensor) -> Any:
        return values if format is None else bs.quantize(values, format, scale_layout="plain")

    def product(a: Tensor, weight: Tensor, routing: bs.Routing, bias: Tensor | None = None) -> Tensor:
        if format is not None:
            return bs.scaled_grouped_mm(cast(a), cast(weight), routing.offs, bias=bias)
        y = torch.nn.functional.grouped_mm(a, weight.mT, offs=routing.offs)
        return y if bias is None else y + bias.index_select(0, ids.flatten().sort(stable=True).values)

    whole = bs.sort_by_expert(ids, experts)
    h = product(bs.permute(x, whole), up, whole, bias)
    y = bs.combine(product(h, down, whole), whole, gates)
    mine = range(rank * 3, rank * 3 + 3)
    first, end = (int(whole.offs[at]) if at >= 0 else 0 for at in (mine.start - 1, mine.stop - 1))
    own = [each.chunk(ranks)[rank] for each in (x, gates, ids)]
    found: dict[str, Any] = {}
    for overlap in ("off", "on"):
        options: dict[str, Any] = {"group": world(), "overlap": overlap}
        weights = cast(up[mine.start : mine.stop]), cast(up[mine.start : mine.stop])
        (got, other), gathered = all_gather_grouped_mm(
            cast(own[0]),
            *weights,
            routing=bs.sort_by_expert(own[2], experts),
            gate_weights=own[1],
            experts=mine,
            biases=[bias[mine.start : mine.stop], None],
            **options,
        )
        share = cast(down[mine.start : mine.stop])
        results = grouped_mm_reduce_scatter(cast(got), share, gathered, **options)
        found[overlap] = [
            torch.equal(got[: end - first], h[first:end]),
            not got[end - first :].any() and not other[end - first :].any(),
            torch.equal(gathered.gate_weights, gates),
            relative(results.float(), y.chunk(ranks)[rank].float()) < 2**-7,
        ]
        found[f"sum {overlap}"] = results.float().tolist()
    found["sums"] = found.pop("sum on") == found.pop("sum off")
    return found


def cases(ranks: int) -> Iterator[Case]:
    here = functools.partial
    flat, batch = Sizes((64 * ranks,), 128, 128 * ranks), Sizes((2, 32 * ranks), 96, 64 * ranks, 1)
    if device().type == "cuda":
        yield "experts fp8_blockwise", here(experts, "fp8_blockwise", flat, bias=True, hot=True)
        yield "experts mxfp8 low", here(experts, "mxfp8", batch, payload="low", bias=True)
        yield "trained mixture", lambda: trained_mixture(2)
        return
    if ranks == 4:
        yield "mesh", lambda: divided(mesh_of(2, 2), AllToAll(), bias=True)
        yield "trained mesh", lambda: trained(mesh_of(2, 2))
        yield "experts mxfp8", here(experts, "mxfp8", batch, hot=True)
        return
    yield "experts fp8_blockwise", here(experts, "fp8_blockwise", flat, bias=True, hot=True)
    yield "experts mxfp8 low", here(experts, "mxfp8", batch, payload="low", bias=True)
    yield "experts bf16", here(experts, "bf16", batch, bias=True, hot=True)
    yield "partial", partial
    yield "divided", lambda: divided(mesh_of(2), AllToAll())
    yield "divided low", lambda: divided(mesh_of(2), AllToAll("low"))
    yield "trained experts", lambda: trained(None)
    for format in ("fp8_1x128", "mxfp8_e4m3", None):
        yield f"expert operands {format}", here(operands, format)
