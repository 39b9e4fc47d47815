"""SwiGLU MLPs: forward and backward of down(silu(gate(x)) * up(x)), timed in turns with bf16 and torchao.

Ours is one module with gate and up in one weight and the activation fused into the casts. bf16 and torchao are three
layers with `silu(gate) * up` between them; compiled, that part is one kernel in the forward and one in the backward. A
row of 8 microbatches is a whole step, as in `linear.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...autograd.recipe import Recipe
from ...hardware import Capability, capability
from ...nn import SwiGLU
from ...roofline import swiglu_cost
from .. import shapes
from ..harness import Args, Case
from ..layer_peers import ALL_PEERS, COMPILING, peers
from ..layers import Batch, Build, Results, make_batch, normal_linear, step
from ..products import ROWS, spread, sqnr_db
from ..rooflines import Roofs
from . import linear
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

Unit = tuple[int, int]  # (features, hidden)
# SQNR gates in dB of output, dX and the worst dW on normal values, against the unquantized MLP; lower than those of one
# layer, since noise of several layers adds up
GATES: Mapping[str, tuple[float, float, float]] = {
    FP8: (23.6, 23.3, 23.2),
    MXFP8: (23.4, 23.1, 22.9),
    MXFP8_NATIVE: (23.4, 23.1, 22.9),
    NVFP4: (11.6, 9.8, 9.9),
}
UNITS: Mapping[str, Unit] = {name: unit for name in linear.MODELS for unit in shapes.mlps(shapes.MODELS[name])}
TOKENS, MICROBATCHES = linear.TOKENS, linear.MICROBATCHES
GROUPS = ("SwiGLU MLP", "SwiGLU MLP, 8 microbatches")


@dataclass(frozen=True)
class Extent:
    """MLPs, tokens and recipes to run, and peers to compare with.

    tokens: of a forward; microbatches and recipes other than FP8's use only the first.
    """

    device: Capability
    units: Mapping[str, Unit]
    tokens: tuple[int, ...]
    recipes: tuple[str, ...]
    peers: frozenset[str]


class GatedUnit(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        """[M, features] -> [M, features]."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def extent(device: torch.device, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a device; quick: fewer MLPs."""
    if device.type != "cuda":
        return Extent(capability(device), {"tiny": (128, 256)}, (128,), (FP8,), peers - COMPILING)
    return gpu_extent(capability(device), quick=quick, peers=peers)


def gpu_extent(device: Capability, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a GPU; can be computed without one."""
    if quick:
        return Extent(device, dict(list(UNITS.items())[:1]), TOKENS[:1], (FP8,), peers)
    return Extent(device, UNITS, TOKENS, tuple(RECIPES), peers)


def cases(extent: Extent, roofs: Roofs | None) -> Iterator[Case]:
    """All cases: FP8 over all MLPs, other recipes over the first."""
    for name in extent.recipes:
        for model, unit in list(extent.units.items())[: None if name == FP8 else 1]:
            for tokens in extent.tokens if name == FP8 else extent.tokens[:1]:
                yield case(name, RECIPES[name], model, unit, tokens, extent, roofs)
            yield case(name, RECIPES[name], model, unit, extent.tokens[0], extent, roofs, microbatches=MICROBATCHES)


def case(
    name: str,
    recipe: Recipe,
    model: str,
    unit: Unit,
    tokens: int,
    extent: Extent,
    roofs: Roofs | None,
    *,
    microbatches: int = 1,
) -> Case:
    """Case of one MLP by one recipe.  microbatches: of a step; several share the casts of weights."""
    features, hidden = unit
    main, others, use, label = variants_of(ours, recipe, microbatches)
    details = roof_details(swiglu_cost, (tokens, features, hidden), recipe, roofs, use)
    up = ((tokens, 2 * hidden, features), (tokens, features, 2 * hidden), (2 * hidden, features, tokens))
    return Case(
        name=f"{name} MLP {label}M={tokens} {model} {shapes.text(unit)}",
        group=GROUPS[microbatches > 1],
        format=name,
        axis="",
        shape=(tokens, features, hidden),
        make=lambda device: (make_batch(plain_unit(unit, device), tokens, (features, features), device),),
        another=_another,
        run=functools.partial(step, main, microbatches),
        backend=lambda _: backends(recipe, extent.device, up),
        check=checker(main, judge, GATES[name], memory_variants(main, others), _HOW),
        # input and its gradient, weights and their gradients, and gate, up and silu(gate) * up in both directions
        bytes=2 * (4 * tokens * features + 6 * features * hidden + 6 * tokens * hidden),
        peers=peers(main, others, unit, extent.peers, judge, min(GATES[name]), microbatches=microbatches),
        flops=3 * 2 * tokens * 3 * features * hidden,
        bound_us=details.pop("bound_us", None),
        captured=False,
        parts=microbatches,
        details=details,
    )


_HOW = f"{ROWS} rows of y and dX and {ROWS} hidden features of every dW against the exact MLP, all values in two runs"


def plain_unit(unit: Unit, device: torch.device) -> GatedUnit:
    """bf16 MLP with normal weights."""
    features, hidden = unit
    return GatedUnit(
        normal_linear(features, hidden, device),
        normal_linear(features, hidden, device),
        normal_linear(hidden, features, device),
    )


def ours(recipe: Recipe) -> Build:
    """Our MLP with the values of the plain one: gate, then up, in one weight."""

    def build(plain: nn.Module) -> nn.Module:
        gate, up, down = plain.children()
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        return SwiGLU.from_linears(gate, up, down, recipe, name="bench.mlp")

    return build


def judge(batch: Batch, results: Results) -> tuple[float, float, float]:
    """SQNR of output, dX and the worst dW against the MLP in fp64, on some rows of output and dX and some hidden
    features of each dW.

    Gradients of gate, up and down are concatenated in this order in both variants.
    """
    gate, up, down = (weight.detach().double() for weight in batch.built.plain.parameters())
    rows, some = (spread(size, ROWS, gate.device) for size in (batch.x.shape[0], gate.shape[0]))
    y, dx, _ = _exact(batch.x[rows], batch.dy[rows], (gate, up, down))
    _, _, dws = _exact(batch.x, batch.dy, (gate[some], up[some], down[:, some]))
    flat = torch.cat([tensor.flatten() for tensor in results.dw]).split([gate.numel()] * 3)
    mine = (flat[0].view_as(gate)[some], flat[1].view_as(up)[some], flat[2].view_as(down)[:, some])
    worst = min(sqnr_db(dw, found) for dw, found in zip(dws, mine, strict=True))
    return sqnr_db(y, results.y[rows]), sqnr_db(dx, results.dx[rows]), worst


def _exact(x: Tensor, dy: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """y, dX and the dWs of an MLP in fp64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *weights)]
    rows, gate, up, down = leaves
    y = functional.linear(functional.silu(functional.linear(rows, gate)) * functional.linear(rows, up), down)
    dx, *dws = torch.autograd.grad(y, leaves, dy.double())
    return y.detach(), dx, tuple(dws)


def _another(batch: Batch) -> Args:
    return (batch.another(),)
