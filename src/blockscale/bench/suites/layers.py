"""Linear layers and SwiGLU MLPs: forward and backward, over the layers of real models, in turns with bf16 and torchao.

A row is ours in eager mode with the weight cast in every forward; peers cast the weight twice or once a step, or are
compiled. A row of 8 microbatches is a whole step: one cast of the weight, then 8 forwards and backwards with gradients
accumulated in `.grad`; its time is of one microbatch. A peer accumulates in the epilogue of wgrad into an fp32
`main_grad`. Launches are part of the time; host time of a very small layer is a separate row.

Our MLP is one module with gate and up in one weight and the activation fused into the casts. bf16 and torchao are three
layers with `silu(gate) * up` between them; compiled, that part is one kernel in the forward and one in the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module, functional

from ...autograd.recipe import PRODUCTS, Recipe
from ...hardware import Capability
from ...nn import SwiGLU
from ...registry import Request, select
from ...roofline import BF16, CostOf, Use, linear_cost, swiglu_cost
from .. import layers, shapes
from ..accuracy import HIDDEN, judge_linear, judge_swiglu
from ..gemms import ROWS
from ..harness import Case, Peer
from ..layers import (
    FP8,
    LINEAR_GATES,
    MICROBATCHES,
    RECIPES,
    SWIGLU_GATES,
    Build,
    Judge,
    Ours,
    normal_linear,
    our_linear,
    plain_variant,
    step,
    variants_of,
)
from ..rooflines import Layer, Roofs

MODELS = ("DeepSeek-V3 671B", "DeepSeek 16B", "Llama3 8B", "Llama3 70B", "Qwen3", "Qwen3 32B")
TOKENS = (4096, 16384)
TINY: Layer = (128, 256)
# layers of recipes other than FP8's
LARGE: frozenset[Layer] = frozenset({(7168, 18432), (18432, 7168), (4096, 14336)})
HOST_TOKENS, HOST_LAYER = 16, (256, 256)
LINEAR_GROUPS = ("layers", "8 microbatches", "host time")
Unit = tuple[int, int]  # (features, hidden)
UNITS: Mapping[str, Unit] = {name: unit for name in MODELS for unit in shapes.mlps(shapes.MODELS[name])}
MLP_GROUPS = ("SwiGLU MLP", "SwiGLU MLP, 8 microbatches")


class Setup(NamedTuple):
    """Device, and its ceilings if it has tensor cores."""

    device: Capability
    roofs: Roofs | None


@dataclass(frozen=True)
class Kind:
    """A kind of layer: ours, SQNR of a result, and what that compares.  gated: a SwiGLU MLP, else a linear layer."""

    ours: Ours
    judge: Judge
    how: str
    gated: bool = False


def label_of(microbatches: int) -> str:
    """Text before the sizes in the name of a case."""
    return f"{microbatches} microbatches " if microbatches > 1 else ""


def layer_case(
    name: str,
    group: str,
    recipe: str,
    kind: Kind,
    sizes: tuple[int, int, int],
    plain: Callable[[torch.device], Module],
    setup: Setup,
    *,
    experts: int | None = None,
    tokens: int | None = None,
    microbatches: int = 1,
    twice: bool = False,
    compiling: bool = True,
    forward: bool = False,
) -> Case:
    """Case of a layer by a recipe, forward and backward.

    sizes: rows, K and N of a linear layer, or rows, features and hidden units of an MLP.  plain: the bf16 layer.
    experts: their number; rows are those of all of them.  tokens: if a token has several rows.  microbatches: of a
    step; several share the casts of weights, and times are of one.  forward: a forward alone, with weights cast before.
    """
    (rows, k, n), device = sizes, setup.device
    tokens, features, count = tokens or rows, (k, k) if kind.gated else (k, n), experts or 1
    gates = (SWIGLU_GATES if kind.gated else LINEAR_GATES)[recipe]
    use = Use(microbatches=microbatches, weight_cast="step") if microbatches > 1 else Use(training=not forward)
    if forward:
        main = layers.our_variant(kind.ours, RECIPES[recipe], "step")
        check = layers.checker(main, kind.judge, gates[:1], {}, kind.how, layers.infer_again)
        beside: dict[str, Peer | str] = {}
        beside[layers.BF16] = layers.trained(plain_variant(), kind.judge, layers.BF16_DB, forward=True)
    else:
        main, others = variants_of(kind.ours, RECIPES[recipe], microbatches, twice=twice)
        kept = {"blockscale": main, **others, "bf16": plain_variant()}
        check = layers.checker(main, kind.judge, gates, kept, kind.how)
        beside = layers.peers(others, kind.judge, min(gates), microbatches)
        if experts is None:
            beside |= layers.slow_peers(main, (k, n), kind.judge, min(gates), microbatches, compiling=compiling)
    cost = functools.partial(swiglu_cost if kind.gated else linear_cost, experts=count)
    details = roof_details(cost, sizes, RECIPES[recipe], setup.roofs, use)
    # rows and their gradients, weights and their gradients; in an MLP also gate, up and silu(gate) * up, both ways
    moved = 4 * (rows * (k + n) + count * n * k)
    if kind.gated:
        moved = 2 * (4 * rows * k + 6 * count * k * n + 6 * rows * n)
    return Case(
        name=name,
        group=group,
        format=recipe,
        axis="",
        shape=(tokens, k, n) if kind.gated else (tokens, n, k),
        make=lambda device: (layers.make_batch(plain(device), tokens, features, device),),
        another=lambda batch: (batch.another(),),
        # the check of a forward casts the weights, and they do not change afterwards
        run=functools.partial(layers.infer, main) if forward else functools.partial(layers.step, main, microbatches),
        backend=lambda _: backends(recipe, device, rows, 2 * n if kind.gated else n, k, experts),
        check=check,
        bytes=2 * rows * (k + n) + count * n * k if forward else moved,
        peers=beside,
        flops=(1 if forward else 3) * 2 * rows * n * k * (3 if kind.gated else 1),
        bound_us=details.pop("bound_us", None),
        captured=False,
        parts=microbatches,
        details=details,
    )


def roof_details(
    cost: CostOf, sizes: tuple[int, int, int], recipe: Recipe, roofs: Roofs | None, use: Use
) -> dict[str, float]:
    """Lower bounds of a layer (M, K, N) by the recipe and in bf16, by both ceilings, and the main ceilings."""
    if roofs is None:
        return {}
    found: dict[str, float] = {}
    for prefix, roof in (("", roofs.main), ("nominal_", roofs.nominal)):
        if roof is not None:
            for name, formats in (("bound_us", recipe.formats()), ("bf16_bound_us", BF16)):
                found[prefix + name] = round(cost(*sizes, formats, roof, use).seconds * 1e6, 3)
    main = roofs.main
    found |= {"ceiling_gb_s": round(main.bandwidth / 1e9, 1)}
    return found | {f"ceiling_{units}_tflop_s": round(main.rate(units) / 1e12, 1) for units in main.units}


def backends(recipe: str, device: Capability, m: int, n: int, k: int, experts: int | None = None) -> str:
    """Backends of fprop, dgrad and wgrad of a layer K -> N.  experts: their number, if grouped."""
    found: dict[str, None] = {}
    for name, size in zip(PRODUCTS, ((m, n, k), (m, k, n), (n, k, m)), strict=True):
        product = getattr(RECIPES[recipe], name)
        if product is not None:
            op, shape = "gemm", size
            if experts is not None:
                op, shape = "k_grouped" if name == "wgrad" else "m_grouped", (*size, experts)
            request = Request(op, device, (product.a.format, product.b.format), shape, torch.bfloat16)
            found[select(request).backend] = None
    return ", ".join(found)


# ---- linear layers ---------------------------------------------------------------------------------------------------


def linear_cases(device: Capability, roofs: Roofs | None) -> Iterator[Case]:
    """All rows, in the order of the tables. Feed-forward layers also run by torchao, compiled and in microbatches;
    microbatches and recipes other than FP8's have only the fewest tokens."""
    models, tokens, others = {name: shapes.MODELS[name] for name in MODELS}, TOKENS, LARGE
    wide = {layer for each in models.values() for k, n in shapes.mlps(each) for layer in ((k, n), (n, k))}
    if device.device != "cuda":
        models, wide, tokens, others = {"tiny": (TINY,)}, {TINY}, (128,), frozenset({TINY})
    setup, on_gpu = Setup(device, roofs), device.device == "cuda"
    chosen = [
        (recipe, model, layer)
        for recipe in RECIPES
        for model in models
        for layer in models[model]
        if recipe == FP8 or layer in others
    ]
    for recipe, model, layer in chosen:
        for count in tokens if recipe == FP8 else tokens[:1]:
            yield linear_case(recipe, model, layer, count, setup, compiling=on_gpu and layer in wide)
    for recipe, model, layer in chosen:
        if layer in wide:
            yield linear_case(recipe, model, layer, tokens[0], setup, microbatches=MICROBATCHES, compiling=on_gpu)
    yield host_case(FP8, device)


def linear_case(
    recipe: str, model: str, layer: Layer, tokens: int, setup: Setup, *, microbatches: int = 1, compiling: bool = True
) -> Case:
    """Case of one layer by one recipe.  microbatches, compiling: see `layer_case` and `layers.slow_peers`."""
    k, n = layer
    return layer_case(
        f"{recipe} {label_of(microbatches)}M={tokens} {model} {k}->{n}", LINEAR_GROUPS[microbatches > 1], recipe,
        LINEAR, (tokens, k, n), lambda device: normal_linear(k, n, device), setup, microbatches=microbatches,
        twice=True, compiling=compiling,
    )  # fmt: skip


def host_case(recipe: str, device: Capability) -> Case:
    """Case of host time of a forward and backward, ours and torch's. Sixteen tokens are too few for an SQNR gate."""
    (k, n), tokens = HOST_LAYER, HOST_TOKENS
    main, others = variants_of(our_linear, RECIPES[recipe], 1, twice=True)
    beside = {"nn.Linear": plain_variant(), **others}
    return replace(
        linear_case(recipe, "", HOST_LAYER, tokens, Setup(device, None)),
        name=f"{recipe} host time M={tokens} {k}->{n}",
        group=LINEAR_GROUPS[2],
        run=functools.partial(step, main, 1),
        check=layers.checker(main, judge_linear, (0.0, 0.0, 0.0), {}, LINEAR.how),
        bytes=None,
        flops=None,
        peers={name: Peer(functools.partial(step, each, 1), compared=False) for name, each in beside.items()},
        captured=True,
        host=device.device == "cuda",
    )


LINEAR = Kind(our_linear, judge_linear, f"{ROWS} rows of y, dX and dW against the exact layer, all values in two runs")


# ---- MLPs ------------------------------------------------------------------------------------------------------------


def mlp_cases(device: Capability, roofs: Roofs | None) -> Iterator[Case]:
    """All cases: FP8 over all MLPs; other recipes over the first, with the fewest tokens."""
    units, tokens, recipes = UNITS, TOKENS, list(RECIPES)
    if device.device != "cuda":
        units, tokens, recipes = {"tiny": (128, 256)}, (128,), [FP8]
    setup = Setup(device, roofs)
    for recipe in recipes:
        for model, unit in list(units.items())[: None if recipe == FP8 else 1]:
            for count in tokens if recipe == FP8 else tokens[:1]:
                yield mlp_case(recipe, model, unit, count, setup)
            yield mlp_case(recipe, model, unit, tokens[0], setup, microbatches=MICROBATCHES)


def mlp_case(recipe: str, model: str, unit: Unit, tokens: int, setup: Setup, *, microbatches: int = 1) -> Case:
    """Case of one MLP by one recipe.  microbatches: of a step; several share the casts of weights."""
    name = f"{recipe} MLP {label_of(microbatches)}M={tokens} {model} {shapes.text(unit)}"
    plain = functools.partial(plain_unit, unit)
    return layer_case(
        name, MLP_GROUPS[microbatches > 1], recipe, SWIGLU, (tokens, *unit), plain, setup, microbatches=microbatches,
        compiling=setup.device.device == "cuda",
    )  # fmt: skip


class GatedUnit(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        """[M, features] -> [M, features]."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def plain_unit(unit: Unit, device: torch.device) -> GatedUnit:
    """bf16 MLP with normal weights."""
    features, hidden = unit
    return GatedUnit(
        normal_linear(features, hidden, device),
        normal_linear(features, hidden, device),
        normal_linear(hidden, features, device),
    )


def our_mlp(recipe: Recipe) -> Build:
    """Our MLP with the values of the plain one: gate, then up, in one weight."""

    def build(plain: nn.Module) -> nn.Module:
        gate, up, down = plain.children()
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        return SwiGLU.from_linears(gate, up, down, recipe, name="bench.mlp")

    return build


SWIGLU = Kind(
    our_mlp,
    judge_swiglu,
    f"{HIDDEN} rows of y and dX and {HIDDEN} hidden features of every dW against the exact MLP, all values in two runs",
    gated=True,
)
