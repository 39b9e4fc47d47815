"""Who else trains the same layer: bf16, our other ways with the weight, torchao's blockwise and rowwise FP8, compiled.

All take the parameters of the layer in bf16. A peer that cannot be had, or does not take the shape, is a note.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .layers import Batch, Build, Results, Way, plain_way, step, take
from .peers import NOT_COMPILED, Peer, torchao

BF16, TORCHAO, COMPILED = "bf16", "torchao", "compiled"
TORCHAO_COMPILED = f"{TORCHAO} {COMPILED}"
# those that are compiled; without `compile` no rowwise either
COMPILING = frozenset({"compile", TORCHAO_COMPILED})
ALL_PEERS = COMPILING | {BF16, "casts", TORCHAO, "rowwise"}
PER_STEP, TWICE = "cast per step", "cast twice"
MAIN_GRAD = "fp32 main_grad"
# a product in bf16 has 56 dB, and an MLP is several roundings
BF16_DB = 45.0
# the same formats as ours, with scales rounded otherwise
NEAR_DB = 0.2
_BLOCK = 128

Judge = Callable[[Batch, Results], tuple[float, ...]]


def compiled(way: Way, *, fullgraph: bool = False) -> Way:
    """The same through torch.compile for one shape."""
    compile = functools.partial(torch.compile, fullgraph=fullgraph, dynamic=False)
    return replace(way, compile=compile)  # pyright: ignore[reportArgumentType]


def trained(way: Way, judge: Judge, gate: float | None, note: str = "", *, microbatches: int = 1) -> Peer:
    """Another way with the same layer.  gate: what it must reach, None if that is its own matter."""

    def accuracy(batch: Batch) -> float:
        return min(judge(batch, take(way, batch)))

    return Peer(functools.partial(step, way, microbatches), note=note, gate_db=gate, accuracy=accuracy)


def peers(
    main: Way,
    others: Mapping[str, Way],
    sizes: Iterable[int],
    names: frozenset[str],
    judge: Judge,
    gate_db: float,
    *,
    microbatches: int = 1,
    compiling: bool = True,
) -> dict[str, Peer | str]:
    """The named peers of a layer that we train by `main`, and by `others` with the weight cast at other times.

    sizes: of its weights.  gate_db: what ours must reach.  compiling: whether those take part that are compiled, or
    tune for every shape as torchao does.
    """

    def peer(way: Way, gate: float | None, note: str = "") -> Peer:
        return trained(way, judge, gate, note, microbatches=microbatches)

    found: dict[str, Peer | str] = {}
    if BF16 in names:
        found[BF16] = peer(plain_way(), BF16_DB)
    if BF16 in names and "compile" in names:
        found[f"{BF16} {COMPILED}"] = peer(compiled(plain_way()), BF16_DB) if compiling else NOT_COMPILED
    if "casts" in names:
        found |= {name: peer(way, gate_db) for name, way in others.items()}
    if "compile" in names:
        found[COMPILED] = peer(compiled(main, fullgraph=True), gate_db) if compiling else NOT_COMPILED
    blockwise = Way(each(_blockwise))
    for name, way in ((TORCHAO, blockwise), (TORCHAO_COMPILED, compiled(blockwise))):
        if name in names and not all(size % _BLOCK == 0 for size in sizes):
            found[name] = f"not run: takes features in multiples of {_BLOCK} only"
        elif name in names:
            found[name] = peer(way, gate_db - NEAR_DB, "Float8BlockwiseLinear") if compiling else NOT_COMPILED
    if "rowwise" in names and "compile" in names:
        rowwise = peer(compiled(Way(each(_rowwise))), None, "torchao.float8, recipe rowwise")
        found[f"rowwise {COMPILED}"] = rowwise if compiling else NOT_COMPILED
    return found


# torchao


def each(convert: Callable[[nn.Linear], nn.Module]) -> Build:
    """A conversion of linear layers for modules that are one, or are made of some in their order."""

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
