"""Peers of a trained layer: bf16, ours with other weight casts, torchao's blockwise and rowwise FP8, each compiled too.

All take the parameters of the bf16 layer. A peer that is not installed or does not support the shape becomes a note.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .layers import Batch, Build, Results, Variant, plain_variant, step, take
from .peers import NOT_COMPILED, Peer, torchao

BF16, TORCHAO, COMPILED = "bf16", "torchao", "compiled"
TORCHAO_COMPILED = f"{TORCHAO} {COMPILED}"
# names of compiled peers; rowwise needs `compile` too
COMPILING = frozenset({"compile", TORCHAO_COMPILED})
ALL_PEERS = COMPILING | {BF16, "casts", TORCHAO, "rowwise"}
PER_STEP, TWICE = "cast per step", "cast twice"
MAIN_GRAD = "fp32 main_grad"
# a bf16 GEMM has 56 dB, and an MLP rounds several times
BF16_DB = 45.0
# tolerance for the same formats as ours with another rounding of scales
NEAR_DB = 0.2
_BLOCK = 128

Judge = Callable[[Batch, Results], tuple[float, ...]]


def compiled(variant: Variant, *, fullgraph: bool = False) -> Variant:
    """A variant through torch.compile, for one shape."""
    compile = functools.partial(torch.compile, fullgraph=fullgraph, dynamic=False)
    return replace(variant, compile=compile)  # pyright: ignore[reportArgumentType]


def trained(variant: Variant, judge: Judge, gate: float | None, note: str = "", *, microbatches: int = 1) -> Peer:
    """Another variant of the same layer as a peer.  gate: SQNR in dB that it must reach; None: not checked."""

    def accuracy(batch: Batch) -> float:
        return min(judge(batch, take(variant, batch)))

    return Peer(functools.partial(step, variant, microbatches), note=note, gate_db=gate, accuracy=accuracy)


def peers(
    main: Variant,
    others: Mapping[str, Variant],
    sizes: Iterable[int],
    names: frozenset[str],
    judge: Judge,
    gate_db: float,
    *,
    microbatches: int = 1,
    compiling: bool = True,
) -> dict[str, Peer | str]:
    """The named peers of a layer.  main: our variant.  others: ours with the weight cast at other times.

    sizes: features of its weights.  gate_db: SQNR that ours must reach.  compiling: whether to include peers that are
    compiled, or that autotune for every shape as torchao does.
    """

    def peer(variant: Variant, gate: float | None, note: str = "") -> Peer:
        return trained(variant, judge, gate, note, microbatches=microbatches)

    found: dict[str, Peer | str] = {}
    if BF16 in names:
        found[BF16] = peer(plain_variant(), BF16_DB)
    if BF16 in names and "compile" in names:
        found[f"{BF16} {COMPILED}"] = peer(compiled(plain_variant()), BF16_DB) if compiling else NOT_COMPILED
    if "casts" in names:
        found |= {name: peer(variant, gate_db) for name, variant in others.items()}
    if "compile" in names:
        found[COMPILED] = peer(compiled(main, fullgraph=True), gate_db) if compiling else NOT_COMPILED
    blockwise = Variant(each(_blockwise))
    for name, variant in ((TORCHAO, blockwise), (TORCHAO_COMPILED, compiled(blockwise))):
        if name in names and not all(size % _BLOCK == 0 for size in sizes):
            found[name] = f"not run: takes features in multiples of {_BLOCK} only"
        elif name in names:
            found[name] = peer(variant, gate_db - NEAR_DB, "Float8BlockwiseLinear") if compiling else NOT_COMPILED
    if "rowwise" in names and "compile" in names:
        rowwise = peer(compiled(Variant(each(_rowwise))), None, "torchao.float8, recipe rowwise")
        found[f"rowwise {COMPILED}"] = rowwise if compiling else NOT_COMPILED
    return found


# torchao


def each(convert: Callable[[nn.Linear], nn.Module]) -> Build:
    """Conversion of a module from a conversion of linear layers: the module is one, or its children are."""

    def build(plain: nn.Module) -> nn.Module:
        if isinstance(plain, nn.Linear):
            return convert(plain)
        children: list[Any] = list(plain.children())
        return type(plain)(*map(convert, children))

    return build


def _blockwise(layer: nn.Linear) -> nn.Module:
    return torchao("blockwise_fp8_training.linear").Float8BlockwiseLinear.from_float(layer)


def _rowwise(layer: nn.Linear) -> nn.Module:
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    return float8.convert_to_float8_training(layer, config=config)
