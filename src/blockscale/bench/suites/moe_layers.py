"""Layers of experts: one grouped linear, whole experts, and a mixture with its router, timed in turns with bf16.

`one grouped linear` is the published benchmark of torchao's MXFP8 experts: rows (16640, 5120), weights (E, 8192, 5120),
by every recipe; forward and backward with weights cast in every forward or shared by the microbatches of a step, and a
forward alone with weights cast before. `experts` are SwiGLU experts with rows already grouped; `mixture` is a whole
layer: router, top-k, experts and weighted combine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ...autograd.recipe import Recipe
from ...hardware import Capability
from ...roofline import Use, linear_cost, swiglu_cost
from .. import expert_layers, shapes
from ..expert_layers import (
    judge_experts,
    judge_forward,
    judge_linear,
    judge_mixture,
    plain_experts,
    plain_linear,
    plain_mixture,
    torchao_linear,
)
from ..harness import Args, Case, Verdict
from ..layer_peers import BF16, BF16_DB, NEAR_DB, PER_STEP, TORCHAO, peers, trained
from ..layers import Batch, Variant, infer, infer_again, make_batch, our_variant, plain_variant, step, take
from ..loads import Load, sizes
from ..peers import Peer
from ..rooflines import Roofs
from ..shapes import Mixture
from ..timing import host_syncs
from . import linear, mlp
from .layers import FP8, MXFP8, RECIPES, backends, checker, memory_variants, roof_details, variants_of

ROWS = 16640
MICROBATCHES = linear.MICROBATCHES
GROUPS = ("one grouped linear", "experts", "mixture")
ALL_PEERS = frozenset({"bf16", "casts", "torchao"})


@dataclass(frozen=True)
class Unit:
    """SwiGLU experts and the total number of their rows."""

    experts: int
    features: int
    hidden: int
    rows: int


UNITS: Mapping[str, Unit] = {
    "DeepSeek-V3 671B shard": Unit(32, 7168, 2048, 32768),
    "DeepSeek 16B": Unit(64, 2048, 1408, 32768),
}
MIXTURE, TOKENS = "DeepSeek 16B", 4096


@dataclass(frozen=True)
class LayersExtent:
    """Layers and recipes to run, and peers to compare with.

    rows, layer, counts: rows, (K, N) and numbers of experts of the grouped linear.  loads: of the experts of a unit.
    mixtures: layers with a router.  tokens: of a mixture.
    """

    device: Capability
    recipes: tuple[str, ...]
    rows: int
    layer: tuple[int, int]
    counts: tuple[int, ...]
    units: Mapping[str, Unit]
    loads: tuple[Load, ...]
    mixtures: Mapping[str, Mixture]
    tokens: int
    peers: frozenset[str]


def cpu_extent(device: Capability, peers: frozenset[str]) -> LayersExtent:
    """Extent for a CPU."""
    units, mixtures = {"tiny": Unit(4, 128, 128, 160)}, {"tiny": Mixture(4, 2, 128, 128)}
    return LayersExtent(
        device, (FP8, MXFP8), 128, (128, 256), (4,), units, ("balanced", "zipf"), mixtures, 64, peers - {"torchao"}
    )


def gpu_extent(device: Capability, peers: frozenset[str], *, quick: bool = False) -> LayersExtent:
    """Extent for a GPU; quick: fewer layers."""
    n, k = shapes.EXPERT
    counts = (4, 64) if quick else shapes.EXPERT_COUNTS
    loads: tuple[Load, ...] = ("balanced",) if quick else ("balanced", "zipf")
    recipes, mixtures = (FP8,) if quick else tuple(RECIPES), {MIXTURE: shapes.MIXTURES[MIXTURE]}
    return LayersExtent(device, recipes, ROWS, (k, n), counts, UNITS, loads, mixtures, TOKENS, peers)


def cases(extent: LayersExtent, roofs: Roofs | None) -> Iterator[Case]:
    """All rows, in the order of the tables. Recipes that a GPU serves only by the reference are left out, since a call
    would take seconds. Recipes other than FP8's run only the first unit, balanced."""
    recipes = {name: RECIPES[name] for name in extent.recipes if _is_served(RECIPES[name], extent)}
    for name, recipe in recipes.items():
        for experts in extent.counts:
            yield linear_case(name, recipe, experts, extent, roofs)
            yield linear_case(name, recipe, experts, extent, roofs, microbatches=MICROBATCHES)
            yield forward_case(name, recipe, experts, extent, roofs)
    for name, recipe in recipes.items():
        for model, unit in list(extent.units.items())[: None if name == FP8 else 1]:
            for load in extent.loads if name == FP8 else extent.loads[:1]:
                yield experts_case(name, recipe, model, unit, load, extent, roofs)
    for name, recipe in recipes.items():
        for model, mixture in extent.mixtures.items():
            yield mixture_case(name, recipe, model, mixture, extent, roofs)


def _is_served(recipe: Recipe, extent: LayersExtent) -> bool:
    k, n = extent.layer
    return extent.device.device != "cuda" or "reference" not in _backends(recipe, extent, extent.rows, k, n, 4)


def _backends(recipe: Recipe, extent: LayersExtent, rows: int, k: int, n: int, experts: int) -> str:
    return backends(recipe, extent.device, ((rows, n, k), (rows, k, n), (n, k, rows)), experts)


# ---- one grouped linear ----------------------------------------------------------------------------------------------


def linear_case(
    name: str, recipe: Recipe, experts: int, extent: LayersExtent, roofs: Roofs | None, *, microbatches: int = 1
) -> Case:
    """Case of forward and backward of one grouped linear.  microbatches: of a step; several share the cast."""
    (k, n), rows = extent.layer, extent.rows
    main, others, use, label = variants_of(expert_layers.our_linear, recipe, microbatches)
    gates = linear.GATES[name]
    beside = peers(
        main, others, (k, n), extent.peers - {"torchao"}, judge_linear, min(gates), microbatches=microbatches
    )
    if "torchao" in extent.peers and name == FP8 and microbatches == 1:
        beside |= _torchao_peers(min(gates))
    details = roof_details(functools.partial(linear_cost, experts=experts), (rows, k, n), recipe, roofs, use)
    return Case(
        name=f"{name} {label}M={rows} E={experts} {k}->{n}",
        group=GROUPS[0],
        format=name,
        axis="",
        shape=(rows, n, k),
        make=lambda device: _linear_batch(extent, experts, device),
        another=_another,
        run=functools.partial(step, main, microbatches),
        backend=lambda _: _backends(recipe, extent, rows, k, n, experts),
        check=checker(main, judge_linear, gates, memory_variants(main, others), _HOW),
        bytes=2 * 2 * (rows * k + rows * n + experts * n * k),
        peers=beside,
        flops=3 * 2 * rows * n * k,
        bound_us=details.pop("bound_us", None),
        captured=False,
        parts=microbatches,
        details=details,
    )


_HOW = f"y, dX and dW against the exact layer, {expert_layers.ROWS} rows of some experts, all values in two runs"


def _torchao_peers(gate: float) -> dict[str, Peer | str]:
    """torchao's blockwise (emulated without DeepGEMM) and rowwise grouped linear."""
    blockwise, rowwise = (Variant(torchao_linear(kind)) for kind in ("blockwise", "rowwise"))
    return {
        TORCHAO: trained(blockwise, judge_linear, gate - NEAR_DB, "blockwise FP8"),
        f"{TORCHAO} rowwise": trained(rowwise, judge_linear, None, "rowwise FP8"),
    }


def forward_case(name: str, recipe: Recipe, experts: int, extent: LayersExtent, roofs: Roofs | None) -> Case:
    """Case of a forward alone, with weights cast before."""
    (k, n), rows = extent.layer, extent.rows
    main, plain = our_variant(expert_layers.our_linear, recipe, "step"), plain_variant()
    beside: dict[str, Peer | str] = {}
    if "bf16" in extent.peers:

        def accuracy(batch: Batch) -> float:
            return min(judge_forward(batch, infer_again(plain, batch)))

        beside[BF16] = Peer(functools.partial(infer, plain), gate_db=BF16_DB, accuracy=accuracy)
    use = Use(training=False)
    details = roof_details(functools.partial(linear_cost, experts=experts), (rows, k, n), recipe, roofs, use)
    return Case(
        name=f"{name} forward M={rows} E={experts} {k}->{n}",
        group=GROUPS[0],
        format=name,
        axis="",
        shape=(rows, n, k),
        make=lambda device: _linear_batch(extent, experts, device),
        another=_another,
        # the check casts the weights, and they do not change afterwards
        run=functools.partial(infer, main),
        backend=lambda _: _backends(recipe, extent, rows, k, n, experts),
        check=checker(main, judge_forward, linear.GATES[name][:1], {}, _FORWARD_HOW, infer_again),
        bytes=2 * (rows * k + rows * n) + experts * n * k,
        peers=beside,
        flops=2 * rows * n * k,
        bound_us=details.pop("bound_us", None),
        captured=False,
        details=details,
    )


_FORWARD_HOW = f"y against the exact layer, {expert_layers.ROWS} rows of some experts, all values in two runs"


def _linear_batch(extent: LayersExtent, experts: int, device: torch.device) -> Args:
    (k, n), rows = extent.layer, extent.rows
    return (make_batch(plain_linear(sizes(rows, experts), k, n, device), rows, (k, n), device),)


# ---- experts and mixtures --------------------------------------------------------------------------------------------


def experts_case(
    name: str, recipe: Recipe, model: str, unit: Unit, load: Load, extent: LayersExtent, roofs: Roofs | None
) -> Case:
    """Case of SwiGLU experts by one recipe, with weights cast in every forward."""
    features, hidden, rows = unit.features, unit.hidden, unit.rows
    groups = sizes(rows, unit.experts, load)

    def make(device: torch.device) -> Args:
        return (make_batch(plain_experts(groups, features, hidden, device), rows, (features, features), device),)

    main = our_variant(expert_layers.our_experts, recipe)
    others = {PER_STEP: our_variant(expert_layers.our_experts, recipe, "step")}
    check = checker(main, judge_experts, mlp.GATES[name], memory_variants(main, others), _EXPERTS_HOW)
    beside = peers(main, others, (features, hidden), extent.peers - {"torchao"}, judge_experts, min(mlp.GATES[name]))
    title = f"{name} experts M={rows} {model} E={unit.experts} {load} {features}x{hidden}"
    return _unit_case(title, GROUPS[1], name, unit, extent, roofs, main, make, check, beside)


_EXPERTS_HOW = f"y, dX and every dW of {expert_layers.UNITS} experts against the exact ones, all values in two runs"


def mixture_case(
    name: str, recipe: Recipe, model: str, mixture: Mixture, extent: LayersExtent, roofs: Roofs | None
) -> Case:
    """Case of a mixture by one recipe, with its router; the bound is that of the experts alone."""
    tokens, features = extent.tokens, mixture.features
    unit = Unit(mixture.experts, features, mixture.hidden, tokens * mixture.top_k)

    def make(device: torch.device) -> Args:
        return (make_batch(plain_mixture(mixture, device), tokens, (features, features), device),)

    main = our_variant(expert_layers.our_mixture, recipe)
    others = {PER_STEP: our_variant(expert_layers.our_mixture, recipe, "step")}
    inner = checker(main, judge_mixture, mlp.GATES[name], memory_variants(main, others), _MIXTURE_HOW)
    beside = peers(
        main, others, (features, unit.hidden), extent.peers - {"torchao"}, judge_mixture, min(mlp.GATES[name])
    )
    title = f"{name} mixture M={tokens} {model} E={unit.experts} top-{mixture.top_k} {features}x{unit.hidden}"
    check = _with_syncs(main, inner)
    return _unit_case(title, GROUPS[2], name, unit, extent, roofs, main, make, check, beside, tokens=tokens)


_MIXTURE_HOW = "y, dX and every dW against the exact mixture, all values in two runs"


def _unit_case(
    title: str,
    group: str,
    name: str,
    unit: Unit,
    extent: LayersExtent,
    roofs: Roofs | None,
    main: Variant,
    make: Callable[[torch.device], Args],
    check: Callable[[Case, Args], Verdict],
    beside: Mapping[str, Peer | str],
    *,
    tokens: int | None = None,
) -> Case:
    features, hidden, rows = unit.features, unit.hidden, unit.rows
    cost = functools.partial(swiglu_cost, experts=unit.experts)
    details = roof_details(cost, (rows, features, hidden), RECIPES[name], roofs, Use())
    weights = unit.experts * features * hidden
    return Case(
        name=title,
        group=group,
        format=name,
        axis="",
        shape=(rows if tokens is None else tokens, features, hidden),
        make=make,
        another=_another,
        run=functools.partial(step, main, 1),
        backend=lambda _: _backends(RECIPES[name], extent, rows, features, 2 * hidden, unit.experts),
        check=check,
        # as for an MLP: rows and their gradients, weights and their gradients, and tensors between the GEMMs
        bytes=2 * (4 * rows * features + 6 * weights + 6 * rows * hidden),
        peers=beside,
        flops=3 * 2 * rows * 3 * features * hidden,
        bound_us=details.pop("bound_us", None),
        captured=False,
        details=details,
    )


def _with_syncs(main: Variant, check: Callable[[Case, Args], Verdict]) -> Callable[[Case, Args], Verdict]:
    """The check, with the number of host synchronizations of a warmed-up forward and backward."""

    def both(case: Case, args: Args) -> Verdict:
        verdict, batch = check(case, args), args[0]
        if verdict.problem or not batch.x.is_cuda:
            return verdict
        counted = {"host_syncs": float(host_syncs(lambda: take(main, batch)))}
        return Verdict(verdict.wrong_bytes, verdict.how, "", verdict.sqnr_db, {**verdict.details, **counted})

    return both


def _another(batch: Batch) -> Args:
    return (batch.another(),)
