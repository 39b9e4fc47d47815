"""One rank of tests/distributed/test_page.py: the code blocks of docs/distributed.md and README.md, and what their
tables say in numbers.

In a module of its own because a spawned process imports it by name.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.autograd import RECIPES
from blockscale.distributed import (
    AllToAll,
    FixedCapacity,
    column_parallel,
    expert_parallel_,
    gather_low_,
    weight_gather,
)
from blockscale.errors import BlockscaleError
from blockscale.formats import Stochastic
from blockscale.nn import MoE, SwiGLU
from support import (
    cut_experts,
    expert_parallel,
    expert_parallel_state,
    fully_sharded,
    gathered_state,
    gathered_training,
    sequence_parallel,
    tokens_sharded,
)
from support.markdown import parse

RANKS = 2
TOKENS, DIM, HIDDEN = 256, 64, 256


class Sent(NamedTuple):
    """A collective.  name: of the operator.  dtypes: of what this rank gives.  bytes: of it."""

    name: str
    dtypes: tuple[str, ...]
    bytes: int


class Wire(TorchDispatchMode):
    """What this rank gives to each collective, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if "c10d" in func.namespace and "wait" not in name and "wrap" not in name:
            given = args[1] if "_base_" in name and "all_to" not in name else args[0]
            given = [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]
            dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in given})
            self.sent.append(Sent(name, tuple(dtypes), sum(each.numel() * each.element_size() for each in given)))
        return func(*args, **(kwargs or {}))


def on_cpu(block: str) -> str:
    """A block of a page for this machine: eight GPUs are two CPU ranks."""
    return block.replace('"cuda", (8,)', f'"cpu", ({RANKS},)')


def execute(block: str, **given: Any) -> dict[str, Any]:
    names = {"bs": bs, "torch": torch, **given}
    exec(compile(on_cpu(block), "page", "exec"), names)
    return names


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- code blocks: each runs on a small model, beside one process or plain FSDP2 --------------------------------------


class Layers(nn.Module):
    """A model with `layers`, called one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def same_as_plain_fsdp(model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """One step of both: whether gradients have the same bits, and dtypes in which the model's weights travel."""
    x = random(32, DIM, seed=dist.get_rank())
    plain(x).square().mean().backward()
    with Wire() as wire:
        model(x).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    dtypes = sorted({dtype for each in wire.sent if "allgather" in each.name for dtype in each.dtypes})
    return {"same": all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs), "gathered": dtypes}


def linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(DIM, 96, bias=False), nn.Linear(96, DIM, bias=False)]


def block_of_fsdp(block: str) -> dict[str, Any]:
    model, plain = Layers(*linears()), Layers(*linears())
    execute(block, model=model, fully_shard=fully_shard)
    bs.quantize_(plain, "fp8_blockwise")
    for each in (*plain.layers, plain):
        fully_shard(each)
    return same_as_plain_fsdp(model, plain)


def block_of_readme(block: str) -> dict[str, Any]:
    model, plain = nn.Sequential(*linears()), nn.Sequential(*linears())
    for each in (model, plain):
        bs.quantize_(each, "fp8_blockwise")
    lines = [line for line in block.splitlines() if line and "import" not in line]
    execute(block, model=model)
    fully_shard(plain)
    return same_as_plain_fsdp(model, plain) | {"lines": len(lines)}


class Tokenwise(nn.Module):
    """What the block of tensor parallelism names: a norm, a gated MLP, and an output projection whose input a rank has
    for its features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(DIM), SwiGLU(DIM, HIDDEN, name="mlp")
        self.wo = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        x = x + self.wo(heads)
        return x + self.mlp(self.norm(x))


def block_of_tensor_parallel(block: str) -> dict[str, Any]:
    """Tokens [B, S, DIM] are sharded along S. One process has all of them."""
    mesh, models = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Layers(Tokenwise()))
    model, one = models
    bs.quantize_(one, "fp8_blockwise")
    named = {"parallelize_module": parallelize_module, "SequenceParallel": SequenceParallel}
    execute(block, model=model, mesh=mesh, **named)
    x, heads, grad = (random(1, TOKENS, size, seed=size) for size in (DIM, HIDDEN, DIM))
    rank = dist.get_rank()
    want = one.layers[0](x, heads)
    want.backward(grad)
    got = model.layers[0](x.chunk(RANKS, 1)[rank], heads.chunk(RANKS, -1)[rank])
    got.backward(grad.chunk(RANKS, 1)[rank])
    grads = [{name: whole(each.grad) for name, each in model.named_parameters()} for model in models]
    off = {name: gap(each.flatten(), grads[1][name].flatten()) for name, each in grads[0].items()}
    cut = sorted(name for name, each in model.named_parameters() if each.to_local().numel() < each.numel())
    return {"y": gap(got.detach(), want.detach().chunk(RANKS, 1)[rank]), "off": off, "cut": cut}


def block_of_experts(block: str) -> dict[str, Any]:
    """Every rank has other tokens. One process has all of them."""
    from types import SimpleNamespace

    def layers() -> list[MoE]:
        torch.manual_seed(0)
        return [MoE(dim=DIM, hidden=DIM, experts=5, top_k=2, recipe="mxfp8", name="moe")]

    (one,), model = layers(), SimpleNamespace(layers=[SimpleNamespace(moe=each) for each in layers()])
    names = execute(block, model=model, init_device_mesh=init_device_mesh)
    x, rank, moe = random(RANKS * 24, DIM, seed=1), dist.get_rank(), model.layers[0].moe
    same = torch.equal(moe(x.chunk(RANKS)[rank]), one(x).chunk(RANKS)[rank])
    local = moe.experts.down.weight.to_local().shape[0]
    return {"same": same, "experts": local, "payload": moe.experts.dispatcher.payload, "mesh": names["ep"].ndim}


def block_of_cut_experts(block: str) -> dict[str, Any]:
    """Tokens [B, S, DIM] are sharded along S. One process has all of them."""

    def model() -> Layers:
        torch.manual_seed(0)
        layer = nn.Module()
        layer.moe = MoE(dim=DIM, hidden=HIDDEN, experts=5, top_k=2, recipe="mxfp8", name="moe")
        return Layers(layer)

    mesh, (cut, one), x = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)), (model(), model()), None
    x, rank = random(1, 48, DIM, seed=1), dist.get_rank()
    execute(block, model=cut, mesh=mesh, parallelize_module=parallelize_module, style=bs.distributed)
    y = cut.layers[0].moe(x.chunk(RANKS, 1)[rank])
    weight = cut.layers[0].moe.experts.gate_up.weight
    off = gap(y.detach(), one.layers[0].moe(x).detach().chunk(RANKS, 1)[rank])
    return {"y": off, "weight": list(weight.shape), "own": list(weight.to_local().shape)}


def block_of_faults(block: str) -> dict[str, Any]:
    """A model that trains without a fault, in the context."""
    steps: list[int] = []
    execute(block, train_my_model=lambda: steps.append(1))
    mesh = init_device_mesh("cpu", (RANKS,)).get_group()
    return {"steps": len(steps), "minutes": mesh._get_backend(torch.device("cpu")).options._timeout.seconds / 60}


def gap(got: Tensor, want: Tensor) -> float:
    """0 for the same bits, else the relative distance."""
    return 0.0 if torch.equal(got, want) else float((got - want).double().norm() / want.double().norm())


BLOCKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "README": block_of_readme,
    "FSDP2 that gathers codes": block_of_fsdp,
    "Tensor and sequence parallel": block_of_tensor_parallel,
    "Experts cut along their hidden units": block_of_cut_experts,
    "Expert parallel": block_of_experts,
    "Faults": block_of_faults,
}


def code_blocks(page: str, readme: str) -> dict[str, Any]:
    """What each block did, by its section; a block without a function here is named."""
    blocks = parse(page).blocks + [("README", each) for _, each in parse(readme).blocks if "fully_shard" in each]
    found: dict[str, Any] = {}
    for section, block in blocks:
        if section not in BLOCKS or section in found:
            found[f"{section}: {block}"] = "this block runs in no test: give it a function in BLOCKS, page_of_ranks.py"
        else:
            found[section] = BLOCKS[section](block)
    return found


# ---- numbers of tables -----------------------------------------------------------------------------------------------


def gathered_recipes() -> dict[str, list[str]]:
    """Format of the weight of each recipe that gathers codes, or the reason why not."""
    found: dict[str, list[str]] = {}
    for name in RECIPES:
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        bs.quantize_(model, name, lambda module, name: True)
        report = gather_low_(model)
        found[name] = [*report.formats.values()] or [f"not: {each}" for each in report.others.values()]
    return found


def shared_casts(weight_cast: str) -> dict[str, int]:
    """Two microbatches of one optimizer step: exchanges of maxima, and casts of shards by a weight and gather."""
    model = fully_sharded.build(weight_cast)
    weights = len(gather_low_(model).formats)
    fully_sharded.shard(model)
    optimizer = fully_sharded.sgd(model)
    if weight_cast == "step":
        bs.attach(optimizer, model)
    (exchange,) = {id(each): each for each in gathered_training.exchanges(model)}.values()
    fully_sharded.train(model, 1)
    optimizer.step()
    casts, kept, before = [0], weight_gather.cast_rows, exchange.count

    def counted(*args: Any, **named: Any) -> Any:
        casts[0] += 1
        return kept(*args, **named)

    weight_gather.cast_rows = counted
    try:
        with Wire() as wire:
            fully_sharded.train(model, 2)
    finally:
        weight_gather.cast_rows = kept
    gathers = sum("allgather" in each.name for each in wire.sent)
    return {"casts": casts[0], "weights": weights, "exchanges": exchange.count - before, "gathers": gathers}


def whole_blocks() -> dict[str, int]:
    """Bytes of maxima that shards of 128 rows exchange, by recipe."""
    return {
        name: int(gathered_training.wire(name, 256)["exchanged"] * 256 * 256)
        for name in ("fp8_blockwise", "mxfp8_128x128", "nvfp4")
    }


def saved_of_x(wgrad: str) -> list[list[int]]:
    """Shapes of the codes that a column-parallel layer keeps of x [64 of 128 tokens, 192] for its backward."""
    kept: list[list[int]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.element_size() == 1:
            kept.append(list(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x, weight = random(64, 192, seed=0).requires_grad_(), random(96, 192, seed=1).requires_grad_()
        column_parallel(x, weight, group=tokens_sharded.world(), recipe="mxfp8", wgrad=wgrad).sum()
    return kept


def tensor_parallel(wgrad: str) -> dict[str, Any]:
    """Two layers in fp32; y and dx within the order of sums, weight gradients, and shares of the wire."""
    sizes = tokens_sharded.Sizes((TOKENS,), 128, 256)
    layers = functools.partial(tokens_sharded.layers, bs.get_recipe("mxfp8"), sizes, wgrad=wgrad)
    found = layers(torch.float32)
    keys = ("share", "summed", "y off", "x off", "up", "down", "h", "dh")
    return {key: found[key] for key in keys} | {"saved": saved_of_x(wgrad)}


def spread() -> dict[str, Any]:
    """Rows spread by 2^-20 to 2^20 in every block: share of lost values, and how far weight gradients move."""
    sizes = tokens_sharded.Sizes((TOKENS,), 128, 256)
    found = tokens_sharded.layers(bs.get_recipe("mxfp8"), sizes, torch.float32, wgrad="requantized", spread=True)
    return {"lost": found["counted"][0] / found["counted"][1], "off": max(found["up"], found["down"])}


def exchanged_rows(payload: str, experts: int, dtype: torch.dtype) -> dict[str, Any]:
    """A mixture with biases: what one call gives to each collective, forward and backward, and its tokens."""
    torch.manual_seed(0)
    moe = MoE(dim=256, hidden=96, experts=experts, top_k=2, bias=True, dtype=dtype, recipe="mxfp8")
    expert_parallel_(moe, expert_parallel.mesh_of(RANKS), AllToAll(payload))
    x = random(48, 256, seed=dist.get_rank(), dtype=dtype).requires_grad_()
    syncs, kept = [0], Tensor.tolist

    def tolist(self: Tensor) -> Any:
        syncs[0] += 1
        return kept(self)

    Tensor.tolist = tolist
    try:
        with Wire() as wire:
            y = moe(x)
            forward, in_forward = len(wire.sent), syncs[0]
            y.sum().backward()
    finally:
        Tensor.tolist = kept
    sent = [[*each] for each in wire.sent]
    return {"sent": sent, "forward": forward, "syncs": [in_forward, syncs[0] - in_forward]}


CUT = cut_experts.Sizes((RANKS * 48,), 256, 256)


def exchanged_tokens(payload: str) -> dict[str, Any]:
    """Experts that are cut: what one call with 48 tokens of a rank gives to each collective, forward and backward."""
    with Wire() as wire:
        found = cut_experts.experts(bs.get_recipe("mxfp8"), CUT, payload=payload)
    return {"sent": [[*each] for each in wire.sent], "off": found["weights off"], "bits": found["bits"]}


def column_sums(experts: int) -> int:
    """Bytes of the bias gradient of `down` that a rank gives, with codes: the one message in fp64."""
    sent = exchanged_rows("low", experts, torch.bfloat16)["sent"]
    return sum(size for _, dtypes, size in sent if dtypes == ("float64",))


def replicated() -> dict[str, Any]:
    """Dtypes and bytes of the gradients that DDP sums, beside bytes of the parameters."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Sequential(*linears()).to(dtype)
        bs.quantize_(model, "fp8_blockwise")
        ddp = DistributedDataParallel(model)
        with Wire() as wire:
            ddp(random(32, DIM, seed=0, dtype=dtype)).sum().backward()
        sums = [each for each in wire.sent if "allreduce" in each.name]
        size = sum(each.numel() * each.element_size() for each in model.parameters())
        found[str(dtype)] = [
            sorted({dtype for each in sums for dtype in each.dtypes}),
            sum(each.bytes for each in sums) / size,
        ]
    return found


def dispatchers() -> dict[str, float]:
    """The largest difference of any result between dispatchers."""
    found: dict[str, float] = {}
    for payload in ("bf16", "low"):
        for dispatcher in (AllToAll(payload), FixedCapacity(123, payload)):
            case = functools.partial(expert_parallel.against_one_process, RANKS, dispatcher, recipe="mxfp8")
            found[dispatcher.describe()] = case(weights=torch.float32)
    return found


def against_one_process(load: str, payload: str) -> dict[str, float]:
    return expert_parallel.against_one_process(
        RANKS, AllToAll(payload), recipe="fp8_blockwise_pow2", load=load, weights=torch.float32
    )


def written_whole_blocks() -> dict[str, Any]:
    """Shards of whole blocks that are written by something else than an optimizer: cast again, not refused."""
    model, one = (nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(2))
    one.load_state_dict(model.state_dict())
    dist.broadcast(one[0].weight.detach(), 0)
    model.load_state_dict(one.state_dict())
    for each in (model, one):
        bs.quantize_(each, "fp8_blockwise", lambda module, name: True)
    gather_low_(model)
    fully_shard(model[0])
    fully_shard(model)
    x = random(4, 256, seed=0)
    with torch.no_grad():
        model(x)
        for each in (model, one):
            each[0].weight.data.mul_(3)
        return {"same": torch.equal(model(x), one(x))}


def resharded_to_a_number() -> str:
    """The error of `reshard_after_forward=2` with four ranks, of which three are made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = nn.Sequential(*linears())
    bs.quantize_(model, "fp8_blockwise")
    gather_low_(model)
    fully_shard(model, reshard_after_forward=2)
    try:
        model(random(4, DIM, seed=0)).sum().backward()
    except AssertionError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "no error"


def accepted_recipes(wgrad: str) -> list[str]:
    """Recipes that a column-parallel layer takes."""
    found: list[str] = []
    for name in RECIPES:
        rounding = Stochastic(bs.rng_state(0), "a") if bs.get_recipe(name).stochastic else None
        x, weight = torch.randn(128, 256), torch.randn(128, 256, requires_grad=True)
        try:
            column_parallel(x, weight, group=tokens_sharded.world(), recipe=name, wgrad=wgrad, rounding=rounding)
            found.append(name)
        except BlockscaleError:
            pass
    return found


def accepted_tokens(recipe: str, wgrad: str) -> list[int]:
    """Tokens of a rank that a column-parallel layer takes."""
    found: list[int] = []
    for tokens in (1, 32, 48, 64, 128, 160, 256):
        x, weight = torch.randn(tokens, 256), torch.randn(128, 256, requires_grad=True)
        try:
            column_parallel(x, weight, group=tokens_sharded.world(), recipe=recipe, wgrad=wgrad)
            found.append(tokens)
        except BlockscaleError:
            pass
    return found


def refusals() -> dict[str, Any]:
    """What raises, by the names of the rank tests; no text means no error."""
    mesh = init_device_mesh("cpu", (RANKS,))
    overflow = expert_parallel_state.overflow(RANKS)["11 rows"]
    return {
        "fsdp": gathered_state.refusals() | gathered_state.written_elsewhere(),
        "tp": tokens_sharded.refusals() | sequence_parallel.refusals(mesh),
        "ep": expert_parallel_state.refusals(RANKS)
        | {f"overflow on rank {i}": each for i, each in enumerate(overflow)},
        "cut": cut_experts.layer_refusals(),
    }


CASES: dict[str, Callable[[], Any]] = {
    "recipes": gathered_recipes,
    **{
        f"wire {name}": functools.partial(gathered_training.wire, name, 512)
        for name in ("fp8_blockwise", "mxfp8_128x128", "nvfp4")
    },
    **{f"casts {each}": functools.partial(shared_casts, each) for each in ("forward", "twice", "step")},
    "whole blocks": whole_blocks,
    **{f"tp {each}": functools.partial(tensor_parallel, each) for each in ("owner", "requantized")},
    "tp spread": spread,
    **{f"ep {payload}": functools.partial(exchanged_rows, payload, 6, torch.bfloat16) for payload in ("bf16", "low")},
    **{f"cut {payload}": functools.partial(exchanged_tokens, payload) for payload in ("bf16", "low")},
    "ep fp32": functools.partial(exchanged_rows, "bf16", 6, torch.float32),
    "ep 5": functools.partial(exchanged_rows, "low", 5, torch.bfloat16),
    "dispatchers": dispatchers,
    **{f"ep {load}": functools.partial(against_one_process, load, "low") for load in ("even", "random", "spread")},
    "ddp": replicated,
    "whole blocks written": written_whole_blocks,
    **{f"tp recipes {each}": functools.partial(accepted_recipes, each) for each in ("owner", "requantized")},
    "tp tokens fp8": functools.partial(accepted_tokens, "fp8_blockwise", "owner"),
    "tp tokens mx": functools.partial(accepted_tokens, "mxfp8", "owner"),
    "tp tokens requantized": functools.partial(accepted_tokens, "mxfp8", "requantized"),
    "refusals": refusals,
}


def run(rank: int, folder: str, page: str, readme: str) -> None:
    """All cases on one rank; writes {case: what was found, or the error}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    cases = CASES | {"blocks": functools.partial(code_blocks, page, readme)}
    results: dict[str, Any] = {}
    for label, case in cases.items():
        try:
            results[label] = case()
        except Exception:
            results[label] = traceback.format_exc(limit=-6)
    dist.destroy_process_group()
    results["resharded to a number"] = resharded_to_a_number()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
