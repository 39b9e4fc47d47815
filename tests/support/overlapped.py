"""One rank of tests/distributed/test_overlap.py: layers whose rows travel beside products.

In a module of its own because a spawned process imports it by name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.autograd import get_recipe, linear
from blockscale.autograd.recipe import Recipe
from blockscale.distributed import (
    column_parallel,
    gather_activation,
    parallel_plans,
    row_parallel,
    swiglu_parallel,
)
from blockscale.distributed.overlap import (
    all_gather_mm,
    check,
    mm_reduce_scatter,
)
from blockscale.errors import BlockscaleError
from support import overlapped_choice, overlapped_experts, overlapped_guards, overlapped_link
from support.helpers import same_operand
from support.overlapped_link import device, said_by
from support.rank_program import Case, main, run_cases
from support.tokens_sharded import FP8_POW2, Data, Sizes, Wire, data, part_of, relative, two_layers, world


def sizes(sequences: int = 1) -> Sizes:
    """The smallest that give every rank a whole block of tokens of a sequence, and of hidden units."""
    ranks = dist.get_world_size()
    lead = (128 * ranks,) if sequences == 1 else (sequences, 128 * ranks)
    return Sizes(lead, 128, 128 * ranks, len(lead) - 1)


def own_part(data_of_all: Data, all_sizes: Sizes) -> Data:
    """This rank's part, on its device."""
    part = part_of(data_of_all, all_sizes)
    return Data(*(None if each is None else each.to(device()) for each in part))  # pyright: ignore[reportArgumentType]


class ViaHost(TorchDispatchMode):
    """Collectives of CUDA tensors through the host: gloo lacks some of them, and NCCL refuses ranks on one GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        if func._schema.name.endswith("wait_tensor"):
            return args[0]
        moved = pytree.tree_map_only(Tensor, lambda each: each.cpu(), args)
        found = func(*moved, **(kwargs or {}))
        ended = pytree.tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, found)
        return pytree.tree_map_only(Tensor, lambda each: each.to(device()), ended)


def on_ranks(part: Data, recipe: Recipe, wgrad: Any, overlap: Any) -> dict[str, Tensor]:
    """Tokens of a rank lie along the axis before the last: in as many runs as there are sequences."""
    options: dict[str, Any] = {"group": world(), "recipe": recipe, "wgrad": wgrad, "overlap": overlap}
    axis = part.x.dim() - 2
    return two_layers(
        part,
        lambda x, w, b: column_parallel(x, w, b, gather_dim=axis, **options),
        lambda x, w, b: row_parallel(x, w, b, scatter_dim=axis, **options),
    )


def layers(
    recipe: Recipe,
    wgrad: str = "owner",
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    sequences: int = 1,
) -> Any:
    """Two layers, overlapped and not: values that differ by name, and the collectives of the overlapped ones."""
    part = own_part(data(sizes(sequences), dtype, bias=bias), sizes(sequences))
    plain = on_ranks(part, recipe, wgrad, "off")
    on_ranks(part, recipe, wgrad, "on")  # buffers grow by collectives
    with Wire() as wire:
        found = on_ranks(part, recipe, wgrad, "on")
    assert found.keys() == plain.keys()
    differ = {name: int((found[name] != plain[name]).sum()) for name in found}
    off = {name: float((found[name] - plain[name]).abs().max() / plain[name].abs().max()) for name in ("x", "y")}
    y = sum_in_order(torch.relu(plain["h"]), part.down, part.down_bias, recipe)
    return {"differ": differ, "off": off, "y of parts": bool(torch.equal(found["y"], y)), "calls": wire.calls}


def sum_in_order(h: Tensor, down: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """y of this rank: parts of all ranks in y's dtype, added in the order of ranks in fp32 and rounded once."""
    with torch.no_grad():
        mine = linear(h, down, None, recipe)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine.cpu())
    own = [part.to(mine.device).chunk(len(parts), h.dim() - 2)[dist.get_rank()].float() for part in parts]
    y = functools.reduce(torch.add, own).to(mine.dtype)
    return y if bias is None else y + bias


def mlp(name: str, wgrad: str) -> Any:
    """A SwiGLU of cut hidden units, overlapped and not: values that differ by name."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(64 * ranks, 128, generator=rng).bfloat16().chunk(ranks)[rank] for _ in range(2))
    gate_up = (torch.randn(2, 64 * ranks, 128, generator=rng) * 0.1).bfloat16().chunk(ranks, 1)[rank].reshape(-1, 128)
    down = (torch.randn(128, 64 * ranks, generator=rng) * 0.1).bfloat16().chunk(ranks, 1)[rank].contiguous()
    x, grad, gate_up, down = (each.to(device()) for each in (x, grad, gate_up, down))
    results: list[list[Tensor]] = []
    for overlap in ("off", "on"):
        leaves = [each.clone().requires_grad_() for each in (x, gate_up, down)]
        y = swiglu_parallel(*leaves, group=world(), recipe=name, wgrad=wgrad, overlap=overlap)  # pyright: ignore[reportArgumentType]
        y.backward(grad)
        results.append([y.detach(), *(each.grad for each in leaves)])  # pyright: ignore[reportArgumentType]
    return dict(
        zip(("y", "x", "gate_up", "down"), (int((a != b).sum()) for a, b in zip(*results, strict=True)), strict=True)
    )


def shared(recipe: str, wgrad: Any) -> Any:
    """Three layers of one activation, overlapped and not: results and gradients that differ, and collectives."""
    part, found = own_part(data(sizes(), torch.bfloat16), sizes()), list[list[Tensor]]()
    for overlap in ("off", "on", "on"):
        x = part.x.clone().requires_grad_()
        weights = [(part.up * scale).requires_grad_() for scale in (1.0, 0.5, 3.0)]
        options: dict[str, Any] = {"group": world(), "recipe": recipe}
        with Wire() if len(found) == 2 else nullcontext() as wire:  # buffers grow by collectives
            given = gather_activation(x, wgrad=wgrad, overlap=overlap, **options)
            # tokens that arrive are waited for by the next gather, whichever layer takes them
            other = column_parallel(part.x, part.up, overlap=overlap, **options)
            ys = [column_parallel(given, weight, **options) for weight in weights]
            torch.autograd.backward(ys, [y.detach() for y in ys])
        leaves = [each.grad for each in (x, *weights) if each.grad is not None]
        found.append([other, *(y.detach() for y in ys), *leaves])
    assert wire is not None
    differ = [int((a != b).sum()) for a, b in zip(found[0], found[2], strict=True)]
    return {"differ": differ, "calls": wire.calls}


def trained(recipe: str) -> Any:
    """Losses of four steps of a residual MLP of two layers, overlapped and not."""
    part = own_part(data(sizes(), torch.bfloat16), sizes())
    losses: dict[str, list[float]] = {}
    for overlap in ("off", "on"):
        up, down = part.up.clone().requires_grad_(), part.down.clone().requires_grad_()
        optimizer, losses[overlap] = torch.optim.SGD([up, down], lr=0.01), []
        for step in range(4):
            x = part.x + step
            options: dict[str, Any] = {"group": world(), "recipe": recipe, "overlap": overlap}
            h = torch.relu(column_parallel(x, up, **options))
            loss = (x + row_parallel(h, down, **options) - part.grad).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[overlap].append(loss.item())
    return losses


def operands(format: str | None) -> dict[str, Any]:
    """`all_gather_mm` of two weights and `mm_reduce_scatter`, overlapped and not, beside products of the whole rows.
    format: of operands; None: bf16 tensors."""
    rank, ranks, rng = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0)
    x, q, k = (torch.randn(rows, 160, generator=rng).bfloat16().to(device()) for rows in (24 * ranks, 48, 80))
    bias = torch.randn(48, generator=rng).bfloat16().to(device())

    def cast(values: Tensor) -> Any:
        return values if format is None else bs.quantize(values, format, scale_layout="plain")

    whole, weights, biases = cast(x), (cast(q), cast(k)), [bias, None]
    times: Any = torch.nn.functional.linear if format is None else bs.scaled_mm
    want = [times(whole, w, bias=b) for w, b in zip(weights, biases, strict=True)]
    found: dict[str, Any] = {}
    mine = torch.randn(24 * ranks, 160, generator=torch.Generator().manual_seed(1 + rank)).bfloat16()
    parts = cast(mine.to(device()))
    for overlap in ("off", "on"):
        options: dict[str, Any] = {"group": world(), "overlap": overlap}
        results, rows = all_gather_mm(cast(x.chunk(ranks)[rank]), *weights, biases=biases, **options)
        found[overlap] = [torch.equal(a, b) for a, b in zip(results, want, strict=True)]
        if format is None:
            found[overlap].append(torch.equal(rows, x))
        else:
            same_operand(rows, whole)
        found[f"sum {overlap}"] = mm_reduce_scatter(parts, weights[0], **options).float().tolist()
    found["sums"] = found.pop("sum on") == found.pop("sum off")
    weight = torch.ones(8, 160, requires_grad=True, device=device())
    found["grad"] = mm_reduce_scatter(x[: 2 * ranks].float(), weight, group=world()).requires_grad
    return found


def captured() -> dict[str, Any]:
    """Whether replays of two calls in a CUDA graph, forward and backward, have the bits of eager calls, which run in
    between; and the error of a graph whose calls are larger than those before it."""
    part, graph, found = own_part(data(sizes(), torch.bfloat16), sizes()), torch.cuda.CUDAGraph(), list[bool]()
    options: dict[str, Any] = {"group": world(), "recipe": "mxfp8", "wgrad": "requantized", "overlap": "on"}
    x, weight = part.x.clone().requires_grad_(), part.up.clone().requires_grad_()

    def step() -> list[Tensor]:
        results: list[Tensor] = []
        for scale in (1.0, 0.5):
            y = column_parallel(x * scale, weight, **options)
            results += [y.detach(), *torch.autograd.grad(y, (x, weight), y.detach())]
        return results

    with bs.use_backend(gemm="auto"):  # the reference waits for the GPU
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            results = step()
        for replay in range(5):
            with torch.no_grad():
                x.copy_(part.x * (replay + 1))
            graph.replay()
            if replay == 3:  # the graph keeps the memory that it was captured with
                column_parallel(torch.cat([part.x] * 64), weight, **options)
                graph.replay()
            kept = [each.clone() for each in results]
            found += [torch.equal(a, b) for a, b in zip(kept, step(), strict=True)]
        check(world())
        larger = torch.cat([part.x] * 512)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            said = said_by({"": lambda: column_parallel(larger, weight, **options)})[""]
    return {"equal": found, "larger": said}


def by_the_fastest_kernels(recipe: str) -> dict[str, float]:
    """Relative distances between overlapped layers and others by the kernels of this GPU. Some sum along K in an order
    that depends on the number of rows, so bits may differ."""
    part = own_part(data(sizes(), torch.bfloat16), sizes())
    with bs.use_backend(gemm="auto"):
        plain, found = (on_ranks(part, get_recipe(recipe), "owner", overlap) for overlap in ("off", "on"))
    return {name: relative(found[name].float(), plain[name].float()) for name in plain}


def evaluated() -> bool:
    """Layers without gradients, in inference mode, which tensors of a side thread must not leave."""
    part = own_part(data(sizes(), torch.bfloat16), sizes())
    found: list[Tensor] = []
    with torch.inference_mode():
        for overlap in ("off", "on"):
            options: dict[str, Any] = {"group": world(), "recipe": "mxfp8", "overlap": overlap}
            found.append(column_parallel(part.x, part.up, **options))
    return torch.equal(*found)


def skipped_step() -> bool:
    """A backward that raises between the start and the end of a sum does not stop the next one."""
    part = own_part(data(sizes(), torch.bfloat16), sizes())
    options: dict[str, Any] = {"group": world(), "recipe": "mxfp8"}

    def gradient(overlap: str) -> Tensor:
        x = part.x.clone().requires_grad_()
        column_parallel(x, part.up.clone().requires_grad_(), **options, overlap=overlap).sum().backward()
        assert x.grad is not None
        return x.grad

    with patch.object(parallel_plans, "wgrad", side_effect=MemoryError), suppress(MemoryError):
        gradient("on")
        return False
    return torch.equal(gradient("on"), gradient("off"))


def other_order() -> str:
    """Backward passes of equal sizes that the last rank calls in another order."""
    options: dict[str, Any] = {"group": world(), "recipe": "mxfp8", "overlap": "on", "wgrad": "requantized"}
    weight = torch.randn(64, 64, requires_grad=True, device=device())
    xs = (torch.randn(32, 64, requires_grad=True, device=device()) for _ in range(2))
    losses = [column_parallel(x, weight, **options).sum() for x in xs]
    try:
        for loss in losses[:: -1 if dist.get_rank() == dist.get_world_size() - 1 else 1]:
            loss.backward()
        check(world())
    except BlockscaleError as error:
        return str(error)
    return "no error"


def cases(ranks: int) -> Iterator[Case]:
    on_gpu = device().type == "cuda"
    if ranks == 2:
        yield "evaluated first", evaluated  # arenas are made in inference mode
    yield "layers fp8_blockwise", functools.partial(layers, get_recipe("fp8_blockwise"))
    yield "layers mxfp8 bias", functools.partial(layers, get_recipe("mxfp8"), bias=True)
    yield "layers pow2 requantized", functools.partial(layers, FP8_POW2, "requantized")
    yield "layers of sequences", functools.partial(layers, FP8_POW2, "requantized", sequences=3)
    if on_gpu:
        for recipe in ("fp8_blockwise", "mxfp8"):
            yield f"fastest {recipe}", functools.partial(by_the_fastest_kernels, recipe)
    if ranks == 2:
        if not on_gpu:  # products by torch, whose bits may depend on the number of rows
            yield "layers bf16", functools.partial(layers, get_recipe("bf16"))
            unquantized = get_recipe("mxfp8").replace(dgrad=None)
            yield "layers dgrad unquantized", functools.partial(layers, unquantized, dtype=torch.float32)
            yield "operands None", functools.partial(operands, None)
        yield "mlp mxfp8", functools.partial(mlp, "mxfp8", "owner")
        yield "mlp mxfp8 requantized", functools.partial(mlp, "mxfp8", "requantized")
        for recipe, wgrad in (("mxfp8", "owner"), ("mxfp8", "requantized"), ("bf16", "owner"))[: 2 if on_gpu else 3]:
            yield f"shared {recipe} {wgrad}", functools.partial(shared, recipe, wgrad)
        yield "trained", functools.partial(trained, "fp8_blockwise")
        for name in ("fp8_1x128", "mxfp8_e4m3"):
            yield f"operands {name}", functools.partial(operands, name)
        yield "evaluated", evaluated
        yield "skipped step", skipped_step


def last_case(ranks: int) -> Iterator[Case]:
    """After it calls of the group are no longer the same."""
    if ranks == 2 and device().type == "cuda":
        yield "captured", captured
    if ranks == 2:
        yield "other order", other_order


def run(rank: int, ranks: int, folder: str, only: tuple[str, ...] = ()) -> None:
    """All cases on one rank."""
    parts = (
        cases,
        overlapped_choice.cases,
        overlapped_experts.cases,
        overlapped_guards.cases,
        overlapped_link.cases,
        last_case,
    )
    found = functools.partial(run_cases, rank, ranks, folder, only)
    with ExitStack() as stack:
        # it sums in an order that does not depend on the number of rows
        stack.enter_context(bs.use_backend(gemm="reference", m_grouped="reference", k_grouped="reference"))
        timeout = None
        if device().type == "cuda":
            torch.cuda.set_device(0)
            stack.enter_context(ViaHost())
            timeout = timedelta(seconds=60)  # a rank that fails alone must not keep the others for longer
        found(lambda: (case for part in parts for case in part(ranks)), timeout)


if __name__ == "__main__":
    main(run)
