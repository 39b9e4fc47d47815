"""Linear layers: forward and backward, over the layers of real models, timed in turns with bf16 and torchao.

A row is ours in eager mode with the weight cast in every forward; peers cast the weight twice or once a step, or are
compiled. A row of 8 microbatches is a whole step: one cast of the weight, then 8 forwards and backwards with gradients
accumulated in `.grad`; its time is of one microbatch. A peer accumulates in the epilogue of wgrad into an fp32
`main_grad`. Launches are part of the time; host time of a very small layer is a separate row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ...autograd.recipe import Recipe
from ...hardware import Capability, capability
from ...roofline import linear_cost
from .. import shapes
from ..harness import Args, Case
from ..layer_peers import ALL_PEERS, COMPILING, peers
from ..layers import Batch, Results, make_batch, normal_linear, our_linear, plain_variant, step
from ..peers import Peer
from ..products import ROWS, spread, sqnr_db
from ..rooflines import Roofs
from .layers import (
    FP8,
    MXFP8,
    MXFP8_NATIVE,
    NVFP4,
    RECIPES,
    backends,
    checker,
    memory_variants,
    roof_details,
    variants_of,
)

Layer = tuple[int, int]  # (K, N)
# SQNR gates in dB of output, dX and dW on normal values, against the unquantized layer
GATES: Mapping[str, tuple[float, float, float]] = {
    FP8: (28.2, 28.2, 28.2),
    MXFP8: (28.0, 28.0, 28.0),
    MXFP8_NATIVE: (28.0, 28.0, 28.0),
    NVFP4: (16.2, 14.1, 14.6),
}
MODELS = ("DeepSeek-V3 671B", "DeepSeek 16B", "Llama3 8B", "Llama3 70B", "Qwen3", "Qwen3 32B")
TOKENS = (4096, 16384)
MICROBATCHES = 8
HOST_TOKENS, HOST_LAYER = 16, (256, 256)
GROUPS = ("layers", "8 microbatches", "host time")


@dataclass(frozen=True)
class Extent:
    """Layers to run and peers to compare with.

    models: layers of each model.  wide: feed-forward layers, which also run by torchao, compiled and in microbatches.
    tokens: of a forward; microbatches and recipes other than FP8's use only the first.  others: layers of those
    recipes.
    """

    device: Capability
    models: Mapping[str, tuple[Layer, ...]]
    wide: frozenset[Layer]
    tokens: tuple[int, ...]
    others: frozenset[Layer]
    peers: frozenset[str]


def extent(device: torch.device, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a device; quick: fewer layers."""
    if device.type == "cuda":
        return gpu_extent(capability(device), quick=quick, peers=peers)
    layer = (128, 256)
    some = frozenset({layer})
    return Extent(capability(device), {"tiny": (layer,)}, some, (128,), some, peers - COMPILING)


def gpu_extent(device: Capability, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a GPU; can be computed without one."""
    models = {name: shapes.MODELS[name] for name in (MODELS[:2] if quick else MODELS)}
    both = {layer for layers in models.values() for k, n in shapes.mlps(layers) for layer in ((k, n), (n, k))}
    large = frozenset({(7168, 18432), (18432, 7168)})
    if quick:
        models = {name: tuple(layer for layer in layers if layer in both) for name, layers in models.items()}
    others = frozenset[Layer]() if quick else large | {(4096, 14336)}
    return Extent(device, models, frozenset(both), TOKENS[:1] if quick else TOKENS, others, peers)


def cases(extent: Extent, roofs: Roofs | None) -> Iterator[Case]:
    """All rows, in the order of the tables."""
    for name, recipe in RECIPES.items():
        for model, layer in _layers(extent, name):
            for tokens in extent.tokens if name == FP8 else extent.tokens[:1]:
                yield case(name, recipe, model, layer, tokens, extent, roofs)
    for name, recipe in RECIPES.items():
        for model, layer in _layers(extent, name):
            if layer in extent.wide:
                yield case(name, recipe, model, layer, extent.tokens[0], extent, roofs, microbatches=MICROBATCHES)
    yield host_case(FP8, RECIPES[FP8], extent)


def _layers(extent: Extent, recipe: str) -> Iterator[tuple[str, Layer]]:
    for model, layers in extent.models.items():
        for layer in layers:
            if recipe == FP8 or layer in extent.others:
                yield model, layer


def case(
    name: str,
    recipe: Recipe,
    model: str,
    layer: Layer,
    tokens: int,
    extent: Extent,
    roofs: Roofs | None,
    *,
    microbatches: int = 1,
) -> Case:
    """Case of one layer by one recipe.  microbatches: of a step; several share the weight's cast."""
    k, n = layer
    main, others, use, label = variants_of(our_linear, recipe, microbatches, twice=True)
    beside = peers(
        main,
        others,
        layer,
        extent.peers,
        judge,
        min(GATES[name]),
        microbatches=microbatches,
        compiling=layer in extent.wide,
    )
    details = roof_details(linear_cost, (tokens, k, n), recipe, roofs, use)
    check = checker(main, judge, GATES[name], memory_variants(main, others), _HOW)
    products = ((tokens, n, k), (tokens, k, n), (n, k, tokens))
    return Case(
        name=f"{name} {label}M={tokens} {model} {k}->{n}",
        group=GROUPS[microbatches > 1],
        format=name,
        axis="",
        shape=(tokens, n, k),
        make=lambda device: (make_batch(normal_linear(k, n, device), tokens, layer, device),),
        another=_another,
        run=functools.partial(step, main, microbatches),
        backend=lambda _: backends(recipe, extent.device, products),
        check=check,
        # inputs, weight and gradient read once, output and gradients written once
        bytes=2 * 2 * (tokens * k + tokens * n + n * k),
        peers=beside,
        flops=3 * 2 * tokens * n * k,
        bound_us=details.pop("bound_us", None),
        captured=False,
        parts=microbatches,
        details=details,
    )


_HOW = f"{ROWS} rows of y, dX and dW against the exact layer, all values in two runs"


def host_case(name: str, recipe: Recipe, extent: Extent) -> Case:
    """Case of host time of a forward and backward, ours and torch's."""
    (k, n), tokens = HOST_LAYER, HOST_TOKENS
    plain, (main, others, _, _) = plain_variant(), variants_of(our_linear, recipe, 1, twice=True)
    # sixteen tokens are too few for an SQNR gate
    check = checker(main, judge, (0.0, 0.0, 0.0), {}, _HOW)
    beside: dict[str, Peer | str] = {"nn.Linear": Peer(functools.partial(step, plain, 1), compared=False)}
    for variant_name, variant in others.items():
        beside[variant_name] = Peer(functools.partial(step, variant, 1), compared=False)
    return Case(
        name=f"{name} host time M={tokens} {k}->{n}",
        group=GROUPS[2],
        format=name,
        axis="",
        shape=(tokens, n, k),
        make=lambda device: (make_batch(normal_linear(k, n, device), tokens, HOST_LAYER, device),),
        another=_another,
        run=functools.partial(step, main, 1),
        backend=lambda _: backends(recipe, extent.device, ((tokens, n, k), (tokens, k, n), (n, k, tokens))),
        check=check,
        peers=beside,
        host=extent.device.device == "cuda",
    )


def judge(batch: Batch, results: Results) -> tuple[float, float, float]:
    """SQNR of output, dX and dW against the layer in fp64, on some rows of each."""
    plain = batch.built.plain
    assert isinstance(plain, nn.Linear)
    with torch.no_grad():
        x, weight = batch.x, plain.weight.double()
        some, features = (spread(tensor.shape[0], ROWS, tensor.device) for tensor in (x, weight))
        y, dx = x[some].double() @ weight.mT, batch.dy[some].double() @ weight
        dw = batch.dy[:, features].double().mT @ x.double()
        (found,) = results.dw
        return sqnr_db(y, results.y[some]), sqnr_db(dx, results.dx[some]), sqnr_db(dw, found[features])


def _another(batch: Batch) -> Args:
    return (batch.another(),)
