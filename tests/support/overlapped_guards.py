"""Cases of overlapped experts (`overlapped.py`): what they refuse and notice, and the order of their events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import blockscale as bs
from blockscale.autograd.recipe import get_recipe
from blockscale.distributed import ExpertTensorParallel, expert_all_gather, expert_parallel_, grouped_swiglu_parallel
from blockscale.distributed.overlap import all_gather_grouped_mm
from blockscale.distributed.overlap.link import Gathering, Summation
from blockscale.nn import GroupedExperts, MoE
from support import cut_experts as cut
from support.cut_experts import Sizes
from support.overlapped_experts import mesh_of
from support.overlapped_link import device, late, said_by
from support.rank_program import Case
from support.tokens_sharded import world


def one_layer(style: Any, dim: int = 64) -> GroupedExperts:
    """Experts that are cut along their hidden units, overlapped."""
    made = GroupedExperts(experts=4, dim=dim, hidden=128 * dist.get_world_size(), recipe="fp8_blockwise_pow2")
    return style._apply(made, init_device_mesh("cpu", (dist.get_world_size(),)))


def called(layer: GroupedExperts, x: Tensor) -> Tensor:
    """The result of a layer for x [.., dim], whose tokens all go to the same two experts."""
    tokens = x[..., 0].numel()
    routing = bs.sort_by_expert(torch.tensor([[0, 2]]).expand(tokens, 2), 4)
    return layer(x, routing, torch.full((tokens, 2), 0.5, requires_grad=True))


def guarded() -> dict[str, Any]:
    """What layers do when their result, their weight or their recipe changes after the forward."""
    found: dict[str, Any] = {}
    for shape in ((8, 64), (2, 4, 64)):
        layer = one_layer(ExpertTensorParallel(sequence_dim=1, overlap="on"))
        x = torch.randn(shape).bfloat16().requires_grad_()
        y = called(layer.bfloat16(), x)
        y += 1
        y.sum().backward()
        found[f"in place {len(shape)}"] = x.grad is not None and x.grad.shape == shape and not y._is_view()
        y = called(layer, x.detach())
        y += 1
        y.sum().backward()
    for needs_grad in (True, False):
        y = called(layer, torch.randn(8, 64).bfloat16().requires_grad_(needs_grad))
        with torch.no_grad():
            layer.down.weight.mul_(2)
        try:
            y.sum().backward()
            found[f"changed {needs_grad}"] = "no error"
        except RuntimeError as error:
            found[f"changed {needs_grad}"] = str(error)
    low = one_layer(ExpertTensorParallel(payload="low", overlap="on")).bfloat16()
    for each in (low.gate_up, low.down):
        each.apply_recipe("fp8_blockwise")
    options: dict[str, Any] = {"group": world(), "overlap": "on"}
    weights, gates = (torch.randn(4, 128, 64), torch.randn(4, 64, 64)), torch.ones(8, 1)
    routing = bs.sort_by_expert(torch.zeros(8, 1, dtype=torch.int64), 4)
    pair = bs.quantize_both(torch.randn(4, 64, 64), "mxfp8_e4m3", "mxfp8_e4m3")
    return found | said_by(
        {
            "recipe": lambda: called(low, torch.randn(8, 64).bfloat16()),
            "operands": lambda: grouped_swiglu_parallel(
                torch.randn(8, 64), *weights, routing, gates, recipe="mxfp8", weight_operands=(pair, None), **options
            ),
        }
    )


def events() -> list[str]:
    """Arrivals, products and the ends of sums of one call and its backward, in order."""
    ranks, told = dist.get_world_size(), list[str]()
    sizes = Sizes((32 * ranks,), 96, 64 * ranks)
    mine = cut.own_tokens(cut.cut(cut.data(sizes, torch.bfloat16), dist.get_rank(), ranks), sizes)
    layer = functools.partial(grouped_swiglu_parallel, recipe="mxfp8", overlap="on", token_dim=0, group=world())
    places = (
        ("arrived", Gathering, "_wait"),
        ("product", expert_all_gather, "multiply_rows"),
        ("wgrad", expert_all_gather, "wgrad"),
        ("sent", Summation, "push"),
        ("summed", Summation, "finish"),
    )

    def telling(name: str, call: Callable[..., Any]) -> Any:
        def tell(*args: Any, **options: Any) -> Any:
            told.append(name)
            return call(*args, **options)

        return tell

    with ExitStack() as stack:
        for name, kind, method in places:
            stack.enter_context(patch.object(kind, method, telling(name, getattr(kind, method))))
        cut.run(mine, layer)
    return told


def main_grads() -> dict[str, bool]:
    """Whether main_grad is left alone by `torch.autograd.grad` of x, whose weights are inputs of the call, too."""
    ranks, found = dist.get_world_size(), dict[str, bool]()
    sizes = Sizes((32 * ranks,), 96, 64 * ranks)
    mine = cut.own_tokens(cut.cut(cut.data(sizes, torch.bfloat16), dist.get_rank(), ranks), sizes)
    routing = bs.sort_by_expert(mine.experts, cut.EXPERTS)
    for overlap in ("off", "on"):
        x, *weights = (each.clone().requires_grad_() for each in (mine.x, mine.gate_up, mine.down))
        for each in weights:
            each.main_grad = torch.zeros(each.shape)  # pyright: ignore[reportAttributeAccessIssue]
        y = grouped_swiglu_parallel(
            x, *weights, routing, mine.gates, recipe="mxfp8", overlap=overlap, token_dim=0, group=world()
        )
        torch.autograd.grad(y.float().sum(), x)
        found[overlap] = not any(each.main_grad.any() for each in weights)  # pyright: ignore[reportAttributeAccessIssue]
    return found


def refused() -> dict[str, str]:
    """Messages of calls that do not overlap, or do not fit."""
    ranks, mesh = dist.get_world_size(), mesh_of(dist.get_world_size())
    x, gates = torch.randn(4, 64), torch.ones(4, 1)
    routing = bs.sort_by_expert(torch.zeros(4, 1, dtype=torch.int64), 2 * ranks)

    def layer(recipe: Any = "mxfp8") -> MoE:
        shape: dict[str, Any] = {"dim": 64, "hidden": 32, "experts": 2 * ranks, "top_k": 1}
        return expert_parallel_(MoE(**shape, recipe=recipe), mesh, overlap="on")

    hooked = layer()
    hooked.experts.down.register_forward_hook(lambda *args: None)
    odd = MoE(dim=64, hidden=32, experts=2 * ranks + 1, top_k=1, recipe="mxfp8")
    options: dict[str, Any] = {"gate_weights": gates, "group": world()}
    w = torch.randn(2 * ranks, 32, 64)
    calls: dict[str, Callable[[], Any]] = {
        "one product": lambda: layer(get_recipe("mxfp8").replace(dgrad=None)).experts(x, routing, gates),
        "tensor scale": lambda: layer(get_recipe("mxfp8").replace(fprop=get_recipe("nvfp4").fprop)).experts(
            x, routing, gates
        ),
        "no gates": lambda: layer().experts(x, routing),
        "hooks": lambda: hooked.experts(x, routing, gates),
        "odd": lambda: expert_parallel_(odd, mesh, overlap="on"),
        "name": lambda: expert_parallel_(odd, mesh, overlap="yes"),  # pyright: ignore[reportArgumentType]
        "style": lambda: ExpertTensorParallel(overlap="yes"),  # pyright: ignore[reportArgumentType]
        "rows": lambda: all_gather_grouped_mm(x[:3], w, routing=routing, **options),
        "experts": lambda: all_gather_grouped_mm(x, w, routing=routing, experts=range(2 * ranks + 1), **options),
        "weight": lambda: all_gather_grouped_mm(x, w[:1], routing=routing, **options),
        "mixed": lambda: all_gather_grouped_mm(bs.quantize(x, "mxfp8_e4m3"), w, routing=routing, **options),
        "none": lambda: all_gather_grouped_mm(x, routing=routing, **options),
        "list": lambda: all_gather_grouped_mm(x, w, routing=routing, experts=[0, 1], **options),  # pyright: ignore[reportArgumentType]
        "bias": lambda: all_gather_grouped_mm(x, w, routing=routing, biases=[torch.ones(2 * ranks, 31)], **options),
        "matrix": lambda: all_gather_grouped_mm(
            bs.quantize(x, "mxfp8_e4m3", scale_layout="plain"),
            bs.quantize(w[0], "mxfp8_e4m3", scale_layout="plain"),
            routing=routing,
            **options,
        ),
    }
    mine = x if dist.get_rank() else x[:3]
    other = bs.sort_by_expert(torch.zeros(len(mine), 1, dtype=torch.int64), 2 * ranks)
    calls["uneven"] = lambda: layer().experts(mine, other, gates[: len(mine)])
    on = "on" if dist.get_rank() else "off"
    weights = torch.randn(2 * ranks, 64, 64), torch.randn(2 * ranks, 64, 32)
    calls["on one rank"] = lambda: grouped_swiglu_parallel(
        x, *weights, routing, gates, group=world(), recipe="mxfp8", overlap=on
    )
    calls["after it"] = lambda: layer().experts(x, routing, gates)
    return said_by(calls)


def without_a_wait() -> dict[str, int]:
    """Values of layer 0 that are wrong beside a late rank, with the wait for its tokens and without it."""
    found: dict[str, int] = {}
    for label in ("with", "without"):
        wrong = 0
        for call in range(4):
            rng = torch.Generator().manual_seed(call)
            x = torch.randn(8 * dist.get_world_size(), 64, generator=rng).bfloat16()
            mine = x.chunk(dist.get_world_size())[dist.get_rank()]
            routing = bs.sort_by_expert(torch.zeros(8, 1, dtype=torch.int64), 1)
            options: dict[str, Any] = {"routing": routing, "gate_weights": torch.ones(8, 1), "group": world()}
            weight = torch.eye(64).bfloat16()[None]
            removed = patch.object(Gathering, "_wait", lambda self, rank: None)
            with late("_pull", Gathering), removed if label == "without" else nullcontext():
                (h,), _ = all_gather_grouped_mm(mine, weight, overlap="on", **options)
            wrong += int((h != x).sum())
        total = torch.tensor(wrong)
        dist.barrier()  # copies without a wait
        dist.all_reduce(total)
        found[label] = int(total)
    return found


def cases(ranks: int) -> Iterator[Case]:
    """Of two CPU ranks."""
    if ranks == 2 and device().type == "cpu":
        yield "guarded", guarded
        yield "events", events
        yield "main_grad", main_grads
        yield "refused experts", refused
        yield "without the wait for tokens", without_a_wait
