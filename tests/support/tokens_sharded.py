"""Layers that are cut, with sharded tokens between them, as one rank of tests/distributed/test_tensor_parallel.py sees
them. They are compared with one process that has everything.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.autograd import get_recipe, linear
from blockscale.autograd.recipe import Operand, Product, Recipe
from blockscale.distributed import column_parallel, count_underflows, gather_activation, row_parallel
from blockscale.distributed.collectives import Tokens, gather_operand, ranks_of
from blockscale.errors import BlockscaleError
from blockscale.formats import BlockScaled, CastSpec, Stochastic
from support.helpers import same_operand

Case = tuple[str, Callable[[], Any]]
POW2 = Operand("fp8_1x128", "pow2")
WEIGHT = Operand("fp8_128x128", "pow2")
FP8_POW2 = Recipe("fp8_pow2", Product(POW2, WEIGHT), Product(POW2, WEIGHT), Product(POW2, POW2))


class Wire(TorchDispatchMode):
    """Collectives in order, and the bytes that this rank contributes to each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            given = [each for each in pytree.tree_leaves(args[0]) if isinstance(each, Tensor)]
            if "gather" in name:
                assert all(each.dtype == torch.uint8 for each in given)
            self.calls.append(name)
            self.bytes[name] += sum(each.numel() * each.element_size() for each in given)
        assert func.namespace != "c10d", func  # nothing else communicates
        return func(*args, **(kwargs or {}))


class Sizes(NamedTuple):
    """Two layers [.., dim] -> [.., hidden] -> [.., dim].  lead: leading axes of the whole x.  dim_tokens: the sharded
    one."""

    lead: tuple[int, ...]
    dim: int
    hidden: int
    dim_tokens: int = 0


class Data(NamedTuple):
    """Everything of two layers and their gradient, whole."""

    x: Tensor
    grad: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


def data(sizes: Sizes, dtype: torch.dtype, *, bias: bool = False, spread: bool = False, seed: int = 0) -> Data:
    rng = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng) * scale).to(dtype)

    x, grad = random(*sizes.lead, sizes.dim), random(*sizes.lead, sizes.dim)
    if spread:  # every row by another power of two, 2^-20 to 2^20
        for each in (x, grad):
            each *= torch.exp2(torch.randint(-20, 21, (*sizes.lead, 1), generator=rng).float()).to(dtype)
    up, down = random(sizes.hidden, sizes.dim, scale=0.1), random(sizes.dim, sizes.hidden, scale=0.1)
    biases = (random(sizes.hidden), random(sizes.dim)) if bias else (None, None)
    return Data(x, grad, up, down, *biases)


Layer = Callable[..., Tensor]


def two_layers(d: Data, up: Layer, down: Layer) -> dict[str, Tensor]:
    """Results and gradients of down(relu(up(x)))."""
    leaves = [None if each is None else each.clone().requires_grad_() for each in (d.x, *d[2:])]
    x, w1, w2, b1, b2 = leaves
    assert x is not None
    h = up(x, w1, b1)
    h.retain_grad()
    y = down(torch.relu(h), w2, b2)
    y.backward(d.grad)
    found = {"h": h, "y": y, "dh": h.grad, "x": x.grad, "up": w1.grad, "down": w2.grad}  # pyright: ignore[reportOptionalMemberAccess]
    if b1 is not None and b2 is not None:
        found |= {"up bias": b1.grad, "down bias": b2.grad}
    return {name: each.detach() for name, each in found.items() if each is not None}


def streams(recipe: Recipe) -> tuple[Stochastic | None, Stochastic | None]:
    """Random streams of both layers."""
    if not recipe.stochastic:
        return None, None
    return Stochastic(bs.rng_state(5), "up"), Stochastic(bs.rng_state(5), "down")


def in_one_process(d: Data, recipe: Recipe) -> dict[str, Tensor]:
    first, second = streams(recipe)
    return two_layers(
        d,
        lambda x, w, b: linear(x, w, b, recipe, rounding=first),
        lambda x, w, b: linear(x, w, b, recipe, rounding=second),
    )


def part_of(d: Data, sizes: Sizes) -> Data:
    """This rank's part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def part(t: Tensor | None, dim: int) -> Any:
        return None if t is None else t.chunk(ranks, dim)[rank].contiguous()

    tokens = sizes.dim_tokens
    return Data(
        part(d.x, tokens), part(d.grad, tokens), part(d.up, 0), part(d.down, 1), part(d.up_bias, 0), d.down_bias
    )


def on_ranks(part: Data, recipe: Recipe, sizes: Sizes, wgrad: Any = "owner") -> dict[str, Tensor]:
    first, second = streams(recipe)
    dim, options = sizes.dim_tokens, {"group": world(), "recipe": recipe, "wgrad": wgrad}
    return two_layers(
        part,
        lambda x, w, b: column_parallel(x, w, b, gather_dim=dim, rounding=first, **options),
        lambda x, w, b: row_parallel(x, w, b, scatter_dim=dim, rounding=second, **options),
    )


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).double().norm() / want.double().norm())


def partial_sums(d: Data, want: dict[str, Tensor], recipe: Recipe) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What each rank adds to y and to the gradient of x, computed by one process, and the same of all magnitudes."""
    ranks, a = dist.get_world_size(), torch.relu(want["h"])
    first, second = streams(recipe)

    def product(a: Tensor, weight: Tensor) -> Tensor:
        return linear(a, weight, None, recipe, rounding=second)

    def dgrad(grad: Tensor, weight: Tensor, column: int) -> Tensor:
        x = d.x.clone().requires_grad_()
        rounding = first and replace(first, origin=(0, column, d.up.shape[0]))
        linear(x, weight, None, recipe, rounding=rounding).backward(grad)
        assert x.grad is not None
        return x.grad

    found: dict[str, list[tuple[Tensor, Tensor]]] = {"y": [], "x": []}
    for rank in range(ranks):
        hidden, columns = a.chunk(ranks, -1)[rank], d.down.chunk(ranks, 1)[rank]
        found["y"].append((product(hidden, columns), product(hidden.abs(), columns.abs())))
        grad, rows = want["dh"].chunk(ranks, -1)[rank], d.up.chunk(ranks, 0)[rank]
        at = rank * rows.shape[0]
        found["x"].append((dgrad(grad, rows, at), dgrad(grad.abs(), rows.abs(), at)))
    return found


def layers(
    recipe: Recipe,
    sizes: Sizes,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: bool = False,
    wgrad: str = "owner",
    spread: bool = False,
) -> dict[str, Any]:
    """Both layers against one process: what has its bits, and how far sums over ranks are off."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    d = data(sizes, dtype, bias=bias, spread=spread)
    want, part = in_one_process(d, recipe), part_of(d, sizes)
    with Wire() as wire, count_underflows() as underflows:
        got = on_ranks(part, recipe, sizes, wgrad)
    cut = {"h": -1, "dh": -1, "up": 0, "down": 1, "up bias": 0}
    found: dict[str, Any] = {}
    for name, dim in cut.items():
        if name in want:
            mine = want[name].chunk(ranks, dim)[rank]
            found[name] = 0.0 if torch.equal(got[name], mine) else relative(got[name], mine)
    if bias:
        found["down bias"] = relative(got["down bias"].float(), want["down bias"].float())
    found |= sums(d, want, got, recipe, sizes)
    if wgrad == "requantized":
        found |= requantized(d, want, got, recipe)
    per_token = d.x.numel() / ranks * 2 * 2  # x and dy in bf16
    found["counted"] = [int(underflows.lost), underflows.values]
    found["calls"] = wire.calls
    found["share"] = wire.bytes["all_gather_into_tensor_coalesced"] / per_token
    found["summed"] = wire.bytes["reduce_scatter_tensor"] / (d.x.numel() * 2 * dtype.itemsize)
    return found


def sums(d: Data, want: dict[str, Tensor], got: dict[str, Tensor], recipe: Recipe, sizes: Sizes) -> dict[str, Any]:
    """Results that are sums over ranks: how far they are from one process, and whether within the bound."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for name, pieces in partial_sums(d, want, recipe).items():
        parts, magnitudes = (
            [each[of].detach().chunk(ranks, sizes.dim_tokens)[rank] for each in pieces] for of in (0, 1)
        )
        bias = d.down_bias.detach().float() if name == "y" and d.down_bias is not None else torch.zeros(())
        eps, mine = torch.finfo(d.x.dtype).eps, want[name].chunk(ranks, sizes.dim_tokens)[rank]
        # one rounding of each part, of each sum, of the sum with the bias and of the whole
        step = eps * ((2 + ranks) * sum(each.float().abs() for each in parts) + 2 * bias.abs())
        # and within a product another order of a few fp32 additions
        step += 64 * torch.finfo(torch.float32).eps * sum(each.float() for each in magnitudes)
        found[f"{name} in bound"] = bool(((got[name].float() - mine.float()).abs() <= step).all())
        found[f"{name} off"] = relative(got[name].float(), mine.float())
        if ranks == 2:
            total = parts[0] + parts[1]
            total = total if not bias.dim() else total + bias.to(total.dtype)
            found[f"{name} is the sum"] = torch.equal(got[name], total)
    return found


def requantized(d: Data, want: dict[str, Tensor], got: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
    """Weight gradients against those that one process computes from the codes of rows, and the values lost in both."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    specs = [operand.spec("wgrad_x", None) for operand in map(recipe.operand, ("fprop_x", "wgrad_x")) if operand]

    def columns(x: Tensor) -> BlockScaled:
        return bs.quantize(x.flatten(0, -2), specs[1], axis=-2).operand

    def from_rows(x: Tensor) -> tuple[BlockScaled, int]:
        row = bs.quantize(x.flatten(0, -2), specs[0])
        values = bs.dequantize(row, torch.float32)
        col = bs.quantize(values, specs[1], axis=-2)
        return col.operand, int(((values != 0) & (bs.dequantize(col, torch.float32) == 0)).sum())

    (x, lost_x), (dy, lost_dy) = from_rows(d.x), from_rows(d.grad)
    up = bs.scaled_mm(columns(want["dh"]), x, d.x.dtype).chunk(ranks, 0)[rank]
    down = bs.scaled_mm(dy, columns(torch.relu(want["h"])), d.x.dtype).chunk(ranks, 1)[rank]
    same = torch.equal(got["up"], up) and torch.equal(got["down"], down)
    return {"from rows": same, "lost": lost_x + lost_dy}


def gathered(format: str, lead: tuple[int, ...], dim: int, features: int) -> dict[str, bool]:
    """Bytes of gathered rows and columns: those of casting the whole."""
    ranks = ranks_of(world())
    x = torch.randn(*lead, features, generator=torch.Generator().manual_seed(7)).bfloat16()
    piece = x.chunk(ranks.size, dim)[ranks.rank]
    outer = math.prod(lead[:dim])
    tokens, plain = Tokens(outer, math.prod(lead) // outer // ranks.size), CastSpec(format, scale_layout="plain")
    mine, found = bs.quantize_both(piece.flatten(0, -2), plain, plain), dict[str, bool]()
    for layout in bs.formats.FORMATS[format].layouts:
        spec = CastSpec(format, scale_layout=layout)
        wanted = bs.quantize_both(x.flatten(0, -2), spec, spec)
        for along, q, want in zip((False, True), mine, wanted, strict=True):
            got = gather_operand(q.operand, tokens, ranks, along=along).wait(layout)
            same_operand(got, want.operand)
            found[f"{'columns' if along else 'rows'} {layout}"] = True
    return found


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def accumulated(sizes: Sizes) -> dict[str, Any]:
    """Two microbatches: into weight.grad, and into main_grad."""
    recipe, rank, ranks = get_recipe("mxfp8"), dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for kind in ("grad", torch.float32, torch.bfloat16):
        grads: list[Tensor] = []
        for sharded in (False, True):
            d = data(sizes, torch.bfloat16)
            d = part_of(d, sizes) if sharded else d
            up, down = (each.clone().requires_grad_() for each in (d.up, d.down))
            for each in (up, down) if isinstance(kind, torch.dtype) else ():
                each.main_grad = torch.zeros_like(each, dtype=kind)  # pyright: ignore[reportAttributeAccessIssue]
            for scale in (1.0, 0.3):
                if sharded:
                    h = column_parallel(d.x * scale, up, group=world(), recipe=recipe)
                    y = row_parallel(torch.relu(h), down, group=world(), recipe=recipe)
                else:
                    y = linear(torch.relu(linear(d.x * scale, up, recipe=recipe)), down, recipe=recipe)
                y.backward(d.grad)
            assert kind == "grad" or (up.grad is None and down.grad is None)
            grads += [each.grad if kind == "grad" else each.main_grad for each in (up, down)]  # pyright: ignore
        up, down, mine_up, mine_down = grads
        same = torch.equal(mine_up, up.chunk(ranks, 0)[rank]) and torch.equal(mine_down, down.chunk(ranks, 1)[rank])
        found[str(kind)] = same
    return found


def frozen(sizes: Sizes, wgrad: Any) -> dict[str, Any]:
    """Gradients of weights alone, and of inputs alone: distance from one process, and collectives."""
    d, recipe, rank, ranks = data(sizes, torch.bfloat16), get_recipe("mxfp8"), dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for layer, weight, tokens, features in ((column_parallel, d.up, 0, 0), (row_parallel, d.down, -1, 1)):
        x = torch.randn(*sizes.lead, weight.shape[1], generator=torch.Generator().manual_seed(4)).bfloat16()
        grad = torch.ones(*sizes.lead, weight.shape[0]).bfloat16()
        whole = [each.clone().requires_grad_() for each in (x, weight)]
        linear(*whole, recipe=recipe).backward(grad)
        for at, name in enumerate(("x", "weight")):
            mine = [each.chunk(ranks, dim)[rank].clone() for each, dim in ((x, tokens), (weight, features))]
            mine[at].requires_grad_()
            with Wire() as wire:
                y = layer(*mine, group=world(), recipe=recipe, wgrad=wgrad)
                y.backward(grad.chunk(ranks, -1 - tokens)[rank])
            got, want = mine[at].grad, whole[at].grad
            assert got is not None
            assert want is not None
            off = relative(got.float(), want.chunk(ranks, (tokens, features)[at])[rank].float())
            found[f"{layer.__name__} {name}"] = [off, wire.calls]
    return found


def compiled(sizes: Sizes) -> dict[str, bool]:
    """A whole graph of both layers, forward and backward, against eager."""
    d = part_of(data(sizes, torch.bfloat16, bias=True), sizes)
    options: dict[str, Any] = {"group": world(), "recipe": "mxfp8"}

    def call(x: Tensor, up: Tensor, down: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        h = column_parallel(x, up, up_bias, gather_dim=sizes.dim_tokens, **options)
        return row_parallel(
            torch.relu(h), down, down_bias, scatter_dim=sizes.dim_tokens, wgrad="requantized", **options
        )

    results: list[list[Tensor]] = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = [each.clone().requires_grad_() for each in (d.x, *d[2:]) if each is not None]
        y = function(*leaves)
        y.backward(d.grad)
        results.append([y.detach(), *(each.grad for each in leaves if each.grad is not None)])
    eager, traced = results
    return {"same": len(eager) == 6 and all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))}


def shared_input(recipe: Recipe, sizes: Sizes, dtype: torch.dtype, wgrad: Any = "owner") -> dict[str, Any]:
    """Three layers with one gather, against three that gather for themselves."""
    part = part_of(data(sizes, dtype), sizes)
    options: dict[str, Any] = {"group": world(), "recipe": recipe, "gather_dim": sizes.dim_tokens, "wgrad": wgrad}
    found, results = dict[str, Any](), list[list[Tensor]]()
    for shares in (False, True):
        x = part.x.clone().requires_grad_()
        weights = [(part.up * scale).requires_grad_() for scale in (1.0, 0.5, 3.0)]
        with Wire() as wire:
            given = gather_activation(x, **options) if shares else x
            ys = [column_parallel(given, weight, **options) for weight in weights]
            torch.autograd.backward(ys, [y.detach() for y in ys])
        found["calls"], found["bytes"] = (
            wire.calls,
            wire.bytes["all_gather_into_tensor_coalesced"] / found.get("bytes", 1),
        )
        results.append([*(y.detach() for y in ys), *(each.grad for each in (*weights, x) if each.grad is not None)])
    found["same"] = [torch.equal(a, b) for a, b in zip(results[0][:-1], results[1][:-1], strict=True)]
    found["x off"] = relative(results[1][-1].float(), results[0][-1].float())
    return found


def evaluated(sizes: Sizes) -> dict[str, Any]:
    """Without a backward: tokens need no whole blocks, and nothing but rows is gathered."""
    d = data(sizes, torch.bfloat16)
    part = part_of(d, sizes)
    with torch.no_grad(), Wire() as wire:
        h = column_parallel(part.x, part.up, group=world(), recipe="mxfp8")
    want = linear(d.x, d.up, recipe="mxfp8").chunk(dist.get_world_size(), -1)[dist.get_rank()]
    return {"h": torch.equal(h, want), "calls": wire.calls}


def refusals() -> dict[str, str]:
    """Errors by what causes them; every rank raises before it communicates."""
    ranks, found = dist.get_world_size(), dict[str, str]()
    x, weight = torch.randn(128, 256), torch.randn(128, 256, requires_grad=True)

    def attempt(label: str, act: Callable[[], Any]) -> None:
        try:
            with Wire() as wire:
                act()
            found[label] = "no error"
        except BlockscaleError as error:
            found[label] = str(error) if not wire.calls else "raised after a collective"

    column = functools.partial(column_parallel, group=world())
    row = functools.partial(row_parallel, group=world())
    attempt("tokens fp8", lambda: column(x[:64], weight))
    attempt("tokens mx", lambda: column(x[:48], weight, recipe="mxfp8"))
    attempt("tokens row", lambda: row(torch.randn(48 * ranks, 256), weight, recipe="mxfp8"))
    attempt("runs", lambda: column(torch.randn(4, 32, 256), weight, gather_dim=1))
    attempt("uneven", lambda: row(torch.randn(128 * ranks + 1, 256), weight))
    attempt("rows of the weight", lambda: column(x, torch.randn(64, 256, requires_grad=True)))
    attempt("columns of the weight", lambda: row(torch.randn(128 * ranks, 64), torch.randn(128, 64)))
    attempt("nvfp4", lambda: column(x, weight, recipe="nvfp4", rounding=Stochastic(bs.rng_state(0), "a")))
    for recipe in ("fp8_blockwise", "mxfp6", "mxfp8_wgrad_bf16"):
        attempt(f"requantized {recipe}", lambda recipe=recipe: column(x, weight, recipe=recipe, wgrad="requantized"))
        attempt(
            f"requantized row {recipe}",
            lambda recipe=recipe: row(torch.randn(128 * ranks, 256), weight, recipe=recipe, wgrad="requantized"),
        )
    attempt(
        "source", lambda: column(x, weight, recipe=get_recipe("mxfp8").replace(saves="source"), wgrad="requantized")
    )
    attempt(
        "scattered runs",
        lambda: row(
            torch.randn(2, 128 * ranks, 256),
            weight,
            recipe="mxfp4",
            scatter_dim=1,
            rounding=Stochastic(bs.rng_state(0), "a"),
        ),
    )
    attempt("no stream", lambda: column(x, weight, recipe="mxfp4"))
    attempt("wgrad", lambda: column(x, weight, wgrad="anywhere"))
    attempt("gather_dim", lambda: column(x, weight, gather_dim=1))
    shared = gather_activation(x[:32], "mxfp8", group=world())
    with torch.no_grad():
        late = gather_activation(x[:32], "mxfp8", group=world())
    attempt("shared, late gradients", lambda: column(late, weight, recipe="mxfp8"))
    attempt("shared, whole layer", lambda: linear(shared, weight, recipe="mxfp8"))
    attempt("shared, recipe", lambda: column(shared, weight))
    attempt("mesh", lambda: column_parallel(x, weight, group=init_device_mesh("cpu", (1, ranks))))
    attempt("group", lambda: column_parallel(x, weight, group=None))  # pyright: ignore[reportArgumentType]
    return found


def cases(ranks: int) -> Iterator[Case]:
    """On four ranks one or two cases of each kind."""
    fp8, mx = get_recipe("fp8_blockwise"), get_recipe("mxfp8")
    small, blocks = Sizes((32 * ranks,), 96, 32 * ranks), Sizes((128 * ranks,), 256, 128 * ranks)
    first, second = Sizes((32 * ranks, 2), 96, 64 * ranks), Sizes((2, 32 * ranks), 96, 64 * ranks, 1)
    few = ranks > 2
    for format in ("fp8_1x128", "mxfp8_e4m3", "mxfp4"):
        for lead, dim in (((256 * ranks,), 0), ((128 * ranks, 2), 0), ((2, 128 * ranks), 1)):
            if not few or dim:
                yield f"gathered {format} {lead} {dim}", functools.partial(gathered, format, lead, dim, 72)
    bf16, fp32 = torch.bfloat16, torch.float32
    numbers = {
        "fp8": (fp8, blocks, bf16),
        "mx second axis": (mx, second, bf16),
        "fp8 fp32": (fp8, blocks, fp32),
        "mx": (mx, first, bf16),
        "mxfp4": (get_recipe("mxfp4"), small, fp32),
        "source": (mx.replace(saves="source", weight_cast="twice"), small, bf16),
        "wgrad unquantized": (get_recipe("mxfp8_wgrad_bf16"), second, bf16),
        "dgrad unquantized": (get_recipe("mxfp8_dgrad_bf16"), small, bf16),
        "fprop unquantized": (get_recipe("mxfp8_fprop_bf16"), small, bf16),
        "all unquantized": (get_recipe("bf16"), small, fp32),
    }
    for name in list(numbers)[: 2 if few else None]:
        yield f"layers {name}", functools.partial(layers, *numbers[name])
    for name, recipe, sizes in (("mx", mx, second), ("fp8", FP8_POW2, blocks))[: 1 if few else None]:
        for spread in (False, True):
            yield (
                f"requantized {name} spread={spread}",
                functools.partial(layers, recipe, sizes, fp32, wgrad="requantized", spread=spread),
            )
    yield "refusals", refusals
    if not few:
        yield "layers bias", functools.partial(layers, mx, first, bf16, bias=True)
        yield "accumulated", functools.partial(accumulated, small)
        for wgrad in ("owner", "requantized"):
            yield f"frozen {wgrad}", functools.partial(frozen, small, wgrad)
        for name, recipe, options in (
            ("owner", mx, {}),
            ("requantized", mx, {"wgrad": "requantized"}),
            ("unquantized wgrad", get_recipe("mxfp8_wgrad_bf16"), {}),
        ):
            yield f"shared {name}", functools.partial(shared_input, recipe, second, fp32, **options)
        yield "evaluated", functools.partial(evaluated, Sizes((7 * ranks,), 96, 32 * ranks))
        yield "compiled", functools.partial(compiled, second)
