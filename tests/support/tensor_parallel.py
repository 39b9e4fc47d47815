"""One rank of tests/autograd/test_tensor_parallel.py: layers of ours under torch's own styles of tensor parallelism.

In a module of its own because a spawned process imports it by name. Every case returns what was found; numbers are
compared here with one process that has the whole layer, collectives with those of torch's own layer.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import blockscale as bs
from blockscale.autograd import RECIPES, linear
from blockscale.errors import BlockscaleError
from blockscale.formats import Stochastic
from blockscale.nn import SwiGLU
from support.ranks import compiles
from support.tensor_parallel_refusals import refusals

RANKS, BATCH, TOKENS, DIM, HIDDEN = 2, 2, 32, 256, 512
THOROUGH = "ALL_TESTS" in os.environ
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# nvfp4 has one scale for a whole tensor, which a shard does not know: refused
LOW = [name for name in RECIPES if name not in ("bf16", "nvfp4")]
Case = tuple[str, Callable[[], Any]]
Plan = dict[str, Any]


class Block(nn.Module):
    """A norm and an MLP of two layers, [B, S, DIM] -> [B, S, DIM]."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias), nn.Linear(HIDDEN, DIM, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def everything(module: nn.Module, name: str) -> bool:
    return True


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block(dtype: torch.dtype, recipe: str | None, *, bias: bool = True) -> Block:
    """The same weights on every rank and for every recipe; None: torch's own layers."""
    torch.manual_seed(0)
    made = Block(bias).to(dtype)
    if recipe is not None:
        bs.quantize_(made, recipe, everything)
    return made


# what torch offers for layers like these, by what a reader would call it
PLANS: dict[str, Callable[[], Plan]] = {
    "colwise and rowwise": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence parallel": lambda: {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
    "DTensors between the layers": lambda: {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=False),
    },
    "whole activations between the layers": lambda: {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    },
    "output sharded along features": lambda: {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(-1)),
    },
    "prepared inputs and outputs": lambda: {
        "": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        ),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    },
    "prepared output": lambda: {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(use_local_output=False),
        "": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
    },
}


def step(model: nn.Module, x: Tensor) -> Tensor:
    """One forward and backward; the result."""
    y = model(x)
    local = y.to_local() if isinstance(y, DTensor) else y
    local.float().square().sum().backward()
    return local


def collectives(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Collectives of one forward and backward by name."""
    with CommDebugMode() as comm:
        step(model, x)
    return {str(op): count for op, count in comm.get_comm_counts().items() if count}


def local_input(name: str, x: Tensor, rank: int) -> Tensor:
    """x as a rank has it before the first style acts."""
    return x.chunk(RANKS, 1)[rank] if name in ("sequence parallel", "prepared inputs and outputs") else x


def styles(mesh: DeviceMesh) -> Iterator[Case]:
    """Every style, recipe and dtype: torch's own collectives, and local products summed in the dtype."""
    rank = mesh.get_local_rank()

    @functools.cache
    def of_torch(plan: str, dtype: torch.dtype) -> dict[str, int]:
        x = local_input(plan, random(BATCH, TOKENS, DIM, seed=1, dtype=dtype), rank)
        return collectives(parallelize_module(block(dtype, None), mesh, PLANS[plan]()), x)

    @functools.cache
    def alone(recipe: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Gradients of the same block in one process."""
        model = block(dtype, recipe)
        step(model, random(BATCH, TOKENS, DIM, seed=1, dtype=dtype))
        return {key: each.grad.float() for key, each in model.named_parameters()}

    def case(plan: str, recipe: str, dtype: torch.dtype) -> dict[str, Any]:
        x = local_input(plan, random(BATCH, TOKENS, DIM, seed=1, dtype=dtype), rank)
        model = parallelize_module(block(dtype, recipe), mesh, PLANS[plan]())
        found = collectives(model, x)
        # a plan whose output is whole on every rank adds up the loss on each of them
        errors = {
            key: relative(whole(each.grad).float(), alone(recipe, dtype)[key]) for key, each in model.named_parameters()
        }
        return {"torch": of_torch(plan, dtype), "ours": found, "error": max(errors.values())}

    for plan in PLANS:
        for recipe in LOW:
            for dtype in DTYPES:
                # all plans with one recipe and dtype, one plan with all of them, unless everything is asked for
                if THOROUGH or plan == next(iter(PLANS)) or (recipe == "fp8_blockwise" and dtype == torch.bfloat16):
                    yield f"style {plan}; {recipe}; {dtype}", lambda a=(plan, recipe, dtype): case(*a)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def numbers(mesh: DeviceMesh) -> Iterator[Case]:
    """One layer, bit by bit: what needs no sum over ranks has the bits of the whole layer, sums are of local bits."""
    rank = mesh.get_local_rank()

    def layer_of(recipe: str, dtype: torch.dtype, outputs: int = HIDDEN) -> nn.Linear:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(DIM, outputs).to(dtype))
        bs.quantize_(model, recipe, everything, seed=5)
        return model[0]

    def alone(layer: nn.Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
        return {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}

    def pieces(layer: Any, x: Tensor, dy: Tensor, axis: int) -> list[dict[str, Tensor]]:
        """What each rank computes by itself."""
        made: list[dict[str, Tensor]] = []
        for each in range(RANKS):
            w = layer.weight.detach().chunk(RANKS, axis)[each].clone().requires_grad_()
            b = layer.bias.detach() if axis else layer.bias.detach().chunk(RANKS)[each]
            b = (b.clone() if each == 0 or not axis else torch.zeros_like(b)).requires_grad_()
            part = (x.chunk(RANKS, -1)[each] if axis else x).clone().requires_grad_()
            mine = dy if axis else dy.chunk(RANKS, -1)[each]
            origin = None if axis else (0, each * w.shape[0], layer.weight.shape[0])
            rounding = Stochastic(layer.rng, layer.name, origin) if layer.recipe.stochastic else None
            y = linear(part, w, b, layer.recipe, rounding=rounding)
            y.backward(mine)
            made.append({"y": y.detach(), "x": part.grad, "weight": w.grad, "bias": b.grad})
        return made

    def case(style: str, recipe: str, dtype: torch.dtype) -> dict[str, bool]:
        axis = 0 if style == "colwise" else 1
        x, dy = random(BATCH, TOKENS, DIM, seed=7, dtype=dtype), random(BATCH, TOKENS, HIDDEN, seed=8, dtype=dtype)
        want, each = alone(layer_of(recipe, dtype), x, dy), pieces(layer_of(recipe, dtype), x, dy, axis)
        cut = ColwiseParallel() if axis == 0 else RowwiseParallel(input_layouts=Replicate())
        layer = parallelize_module(layer_of(recipe, dtype), mesh, cut)
        got = alone(layer, x, dy.chunk(RANKS, -1)[rank] if axis == 0 else dy)
        weight, bias = got["weight"], got["bias"]
        same = {
            "weight": torch.equal(weight.to_local(), want["weight"].chunk(RANKS, axis)[rank]),
            "bias": torch.equal(bias.to_local(), want["bias"].chunk(RANKS)[rank] if axis == 0 else want["bias"]),
        }
        if axis == 0:
            same["y"] = torch.equal(got["y"], want["y"].chunk(RANKS, -1)[rank])
            same["x"] = torch.equal(got["x"], each[0]["x"] + each[1]["x"])
        else:
            same["y"] = torch.equal(got["y"], each[0]["y"] + each[1]["y"])
            same["x"] = torch.equal(got["x"], want["x"])
        return same

    def tokens(recipe: str, dtype: torch.dtype) -> dict[str, bool]:
        """A whole weight and sharded tokens: gradients of the weight are sums over ranks."""
        x, dy = random(TOKENS, DIM, seed=7, dtype=dtype), random(TOKENS, HIDDEN, seed=8, dtype=dtype)
        want, layer = alone(layer_of(recipe, dtype), x, dy), distribute_module(layer_of(recipe, dtype), mesh)
        sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        y = layer(sharded)
        y.backward(distribute_tensor(dy, mesh, [Shard(0)]))
        total, bias = torch.zeros_like(want["weight"]), torch.zeros_like(want["bias"])
        source = layer_of(recipe, dtype)
        for each in range(RANKS):  # sums over the tokens of a rank, rounded, then added
            w = source.weight.detach().clone().requires_grad_()
            origin = (each * TOKENS // RANKS, 0, HIDDEN)
            rounding = Stochastic(source.rng, source.name, origin) if source.recipe.stochastic else None
            b = source.bias.detach().clone().requires_grad_()
            made = linear(x.chunk(RANKS)[each], w, b, source.recipe, rounding=rounding)
            made.backward(dy.chunk(RANKS)[each])
            total += w.grad
            bias += b.grad
        return {
            "bias": torch.equal(layer.bias.grad.full_tensor(), bias),
            "y": torch.equal(y.to_local(), want["y"].chunk(RANKS)[rank]),
            "x": torch.equal(sharded.grad.to_local(), want["x"].chunk(RANKS)[rank]),
            "weight": torch.equal(layer.weight.grad.full_tensor(), total),
        }

    def uneven() -> dict[str, bool]:
        """127 rows are 64 and 63: blocks of 32 stay whole."""
        dtype = torch.bfloat16
        x, dy = random(TOKENS, DIM, seed=7, dtype=dtype), random(TOKENS, 127, seed=8, dtype=dtype)
        want = alone(layer_of("mxfp8", dtype, 127), x, dy)
        layer = parallelize_module(layer_of("mxfp8", dtype, 127), mesh, ColwiseParallel(use_local_output=False))
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
        return {
            "shape": y.shape == (TOKENS, 127),
            "y": torch.equal(y.full_tensor(), want["y"]),
            "weight": torch.equal(layer.weight.grad.full_tensor(), want["weight"]),
        }

    def shared() -> dict[str, bool]:
        """An activation of a DTensor that two column-parallel layers take."""
        dtype = torch.bfloat16
        x, dy = random(TOKENS, DIM, seed=7, dtype=dtype), random(TOKENS, HIDDEN, seed=8, dtype=dtype)
        want = alone(layer_of("fp8_blockwise", dtype), x, dy)
        layer = distribute_module(layer_of("fp8_blockwise", dtype), mesh, colwise)
        sent = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
        made = bs.autograd.activation(sent, "fp8_blockwise")
        results = [layer(made) for _ in range(2)]
        for y in results:
            y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
        twice = 2 * want["weight"].chunk(RANKS)[rank]
        with torch.no_grad():
            sent.add_(1)
        try:
            layer(made)
            stale = "taken"
        except BlockscaleError as error:
            stale = str(error)
        return {
            "a change of the source is seen": "has changed since it was cast" in stale,
            "y": all(torch.equal(y.to_local(), want["y"].chunk(RANKS, 1)[rank]) for y in results),
            "weight": torch.equal(layer.weight.grad.to_local(), twice),
            "x": relative(sent.grad.full_tensor().float(), 2 * want["x"].float()) < 1e-2,
        }

    for style in ("colwise", "rowwise"):
        for recipe in LOW:
            for dtype in DTYPES if THOROUGH or recipe in ("fp8_blockwise", "mxfp4") else DTYPES[:1]:
                yield f"numbers {style}; {recipe}; {dtype}", lambda a=(style, recipe, dtype): case(*a)
    for recipe in LOW:
        yield f"numbers sharded tokens; {recipe}", lambda recipe=recipe: tokens(recipe, torch.bfloat16)
    yield "numbers uneven shards", uneven
    yield "numbers shared activation", shared

    def advanced() -> dict[str, bool]:
        """Draws of a sharded layer move on as those of the whole one."""
        dtype = torch.bfloat16
        x, dy = random(TOKENS, DIM, seed=7, dtype=dtype), random(TOKENS, HIDDEN, seed=8, dtype=dtype)
        layer = parallelize_module(layer_of("mxfp4", dtype), mesh, ColwiseParallel())
        mine, reference = dy.chunk(RANKS, 1)[rank], layer_of("mxfp4", dtype)
        first = alone(layer, x, mine)["weight"].to_local().clone()
        layer.zero_grad()
        for each in (layer, reference):
            bs.advance_(each)
        second = alone(layer, x, mine)["weight"].to_local()
        want = alone(reference, x, dy)["weight"].chunk(RANKS)[rank]
        return {"moved": not torch.equal(first, second), "whole's": torch.equal(second, want)}

    yield "numbers next draws", advanced

    def ticks() -> dict[str, bool]:
        """Every state moves on once: cloned ones, one shared with a layer outside of the plan, and on resuming."""
        found: dict[str, bool] = {}
        for clone in (False, True):
            model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
            bs.quantize_(model, "mxfp4", everything)
            if clone:
                model._apply(torch.clone)
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
            bs.advance_(model)
            found[f"once, clone={clone}"] = [int(whole(each.rng)[1]) for each in model] == [1, 1, 1]
            bs.advance_(model, 7)
            found[f"set, clone={clone}"] = [int(whole(each.rng)[1]) for each in model] == [7, 7, 7]
        return found

    def from_meta() -> dict[str, bool]:
        """Sharded on the meta device, filled later: the seed is there again."""
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM))
        bs.quantize_(model, "mxfp4", everything, seed=11)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model.to_empty(device="cpu")
        return {"seed": [whole(each.rng).tolist() for each in model] == [[11, 0]] * 2}

    def strided() -> dict[str, bool]:
        """Tokens of a sequence that was sharded and then flattened."""
        x = random(BATCH, TOKENS, DIM, seed=7, dtype=torch.bfloat16)
        layer = distribute_module(layer_of("mxfp8", torch.bfloat16), mesh)
        try:
            tokens = distribute_tensor(x, mesh, [Shard(1)]).flatten(0, 1)
        except RuntimeError:  # torch 2.11 cannot
            return {}
        y = layer(tokens)
        want = layer_of("mxfp8", torch.bfloat16)(x).view(BATCH, RANKS, -1, HIDDEN)[:, rank].flatten(0, 1)
        return {"y": torch.equal(y.to_local(), want)}

    def no_gradient() -> dict[str, bool]:
        """Without a gradient nothing is drawn, wherever tokens are sharded."""
        layer = distribute_module(layer_of("mxfp4", torch.bfloat16), mesh)
        x = random(BATCH, TOKENS, DIM, seed=7, dtype=torch.bfloat16)
        with torch.no_grad():
            y = layer(distribute_tensor(x, mesh, [Shard(1)]))
            want = layer_of("mxfp4", torch.bfloat16)(x)
        return {"y": torch.equal(y.to_local(), want.chunk(RANKS, 1)[rank])}

    def one_rank() -> dict[str, bool]:
        """A tensor parallel degree of 1 shards nothing: every layer and recipe takes it."""
        single = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))["tp"]
        mlp = SwiGLU(DIM, HIDDEN, recipe="mxfp8")
        plain, x = copy.deepcopy(mlp), torch.randn(8, DIM)
        parallelize_module(mlp, single, {"gate_up": ColwiseParallel(), "down": RowwiseParallel()})
        low = layer_of("nvfp4", torch.bfloat16)
        parallelize_module(low, single, RowwiseParallel())
        sent = random(8, DIM, seed=7, dtype=torch.bfloat16)
        same = torch.equal(low(sent), layer_of("nvfp4", torch.bfloat16)(sent))
        return {"swiglu": relative(mlp(x), plain(x)) < 1e-6, "nvfp4": same}

    for test in (ticks, from_meta, strided, no_gradient, one_rank):
        yield f"numbers {test.__name__}", test


def colwise(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """A partition function of `distribute_module`: every parameter is sharded along its rows."""
    for key, each in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])))


def compiled(mesh: DeviceMesh) -> Iterator[Case]:
    """Whole graphs, with torch's own collectives in them and the numbers of eager layers."""

    def count(model: nn.Module, x: Tensor) -> dict[str, int]:
        calls: Counter[str] = Counter()
        if not compiles():
            step(model, x)
            return {}

        def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            for node in graph.graph.nodes:
                target = getattr(node.target, "name", None)
                name = target() if callable(target) else ""
                if name.startswith("_c10d_functional::") and "wait_tensor" not in name:
                    calls[name] += 1
            return make_boxed_func(graph)

        torch._dynamo.reset()
        step(torch.compile(model, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True), x)
        return dict(calls)

    def case(plan: str, recipe: str) -> dict[str, Any]:
        dtype, rank = torch.bfloat16, mesh.get_local_rank()
        x = local_input(plan, random(BATCH, TOKENS, DIM, seed=1, dtype=dtype), rank)
        found: list[dict[str, int]] = []
        for name in (None, recipe):
            model = parallelize_module(block(dtype, name), mesh, PLANS[plan]())
            found.append(count(model, x))
        eager = parallelize_module(block(dtype, recipe), mesh, PLANS[plan]())
        step(eager, x)
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        same = all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs)
        return {"torch": found[0], "ours": found[1], "same": same}

    for plan in ("colwise and rowwise", "sequence parallel"):
        # LOW[0] is fp8_blockwise; mxfp4 has other kinds of operands
        for recipe in LOW if THOROUGH else LOW[:1] if plan == "colwise and rowwise" else ("mxfp4",):
            yield f"compiled {plan}; {recipe}", lambda a=(plan, recipe): case(*a)


def fully_sharded(mesh: DeviceMesh) -> Iterator[Case]:
    """FSDP2 around tensor parallel layers, converted before or after both: the bits of tensor parallelism alone."""
    both = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    plan, dtype = "colwise and rowwise", torch.bfloat16

    def gradients(recipe: str, *, fsdp: bool, after: bool) -> dict[str, Tensor]:
        model = parallelize_module(block(dtype, None if after else recipe), both["tp"], PLANS[plan]())
        if fsdp:
            fully_shard(model, mesh=both["dp"])
        if after:
            bs.quantize_(model, recipe, everything)
        step(model, random(BATCH, TOKENS, DIM, seed=1, dtype=dtype))
        return {key: whole(each.grad) for key, each in model.named_parameters()}

    def case(recipe: str, after: bool) -> dict[str, bool]:
        want, got = gradients(recipe, fsdp=False, after=False), gradients(recipe, fsdp=True, after=after)
        return {key: torch.equal(got[key], want[key]) for key in want}

    for recipe in LOW if THOROUGH else ("fp8_blockwise", "mxfp4"):
        for after in (False, True):
            yield f"numbers under FSDP2; {recipe}; converted after={after}", lambda a=(recipe, after): case(*a)


def swiglus(mesh: DeviceMesh) -> Iterator[Case]:
    """What a SwiGLU offers: whole gates and ups, a row-parallel second layer."""

    def rowwise_down() -> dict[str, bool]:
        torch.manual_seed(0)
        mlp = SwiGLU(256, 512, recipe="mxfp8")
        whole, x = copy.deepcopy(mlp), torch.randn(8, 256)
        parallelize_module(mlp, mesh, {"down": RowwiseParallel(input_layouts=Replicate())})
        with CommDebugMode() as comm:
            y = mlp(x)
        return {"close": relative(y, whole(x)) < 1e-6, "one all-reduce": comm.get_total_counts() == 1}

    yield "swiglu rowwise down", rowwise_down


def run(rank: int, folder: str) -> None:
    """All cases on one rank; writes {case: what was found, or the error}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    results: dict[str, Any] = {}
    # it sums in an order that does not depend on the number of rows
    with bs.use_backend(gemm="reference", m_grouped="reference", k_grouped="reference"):
        for kind in (styles, numbers, compiled, refusals, swiglus, fully_sharded):
            for label, test in kind(mesh):
                try:
                    results[label] = test()
                except Exception:  # every rank goes on, so that no collective waits for a rank that stopped
                    results[label] = traceback.format_exc(limit=-4)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
