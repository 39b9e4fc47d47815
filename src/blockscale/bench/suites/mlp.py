"""SwiGLU MLPs: forward and backward of down(silu(gate(x)) * up(x)), beside bf16 and torchao in the same turns.

Ours is one module with gate and up in one weight and the activation fused into the casts. bf16 and torchao are three
layers with `silu(gate) * up` in between, as models are written; compiled, that part is one kernel each way.
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
from ...roofline import Use, swiglu_cost
from .. import shapes
from ..harness import Args, Case
from ..layer_peers import ALL_PEERS, PER_STEP, peers
from ..layers import Batch, Build, Results, Way, make_batch, normal_linear, our_way, step
from ..products import sqnr_db
from ..rooflines import Roofs
from .layers import FP8, MXFP8, MXFP8_NATIVE, NVFP4, RECIPES, backends, checker, memory_ways, roof_details

Unit = tuple[int, int]  # (features, hidden)
# of output, dX and the worst dW on normal values, against the unquantised MLP: below those of one layer, to whose noise
# the next one adds its own
GATES: Mapping[str, tuple[float, float, float]] = {
    FP8: (23.6, 23.3, 23.2),
    MXFP8: (23.4, 23.1, 22.9),
    MXFP8_NATIVE: (23.4, 23.1, 22.9),
    NVFP4: (11.6, 9.8, 9.9),
}
UNITS: Mapping[str, Unit] = {
    "DeepSeek-V3 671B": (7168, 18432),
    "DeepSeek 16B": (2048, 10944),
    "Llama3 8B": (4096, 14336),
}
TOKENS = 4096
GROUP = "SwiGLU MLP"


@dataclass(frozen=True)
class Extent:
    """Which MLPs to run, with how many tokens, by which recipes, and whom to compare with."""

    device: Capability
    units: Mapping[str, Unit]
    tokens: int
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
    """What fits the device and the patience."""
    if device.type != "cuda":
        return Extent(capability(device), {"tiny": (128, 256)}, 128, (FP8,), peers - {"compile"})
    units = dict(list(UNITS.items())[:1]) if quick else UNITS
    return Extent(capability(device), units, TOKENS, (FP8,) if quick else tuple(RECIPES), peers)


def cases(extent: Extent, roofs: Roofs | None) -> Iterator[Case]:
    """FP8 over all MLPs, other recipes over the first."""
    for name in extent.recipes:
        for model, unit in list(extent.units.items())[: None if name == FP8 else 1]:
            yield case(name, RECIPES[name], model, unit, extent, roofs)


def case(name: str, recipe: Recipe, model: str, unit: Unit, extent: Extent, roofs: Roofs | None) -> Case:
    """One MLP by one recipe, with weights cast in every forward."""
    (features, hidden), tokens = unit, extent.tokens
    main = our_way(ours, recipe)
    others: dict[str, Way] = {PER_STEP: our_way(ours, recipe, "step")}
    details = roof_details(swiglu_cost, (tokens, features, hidden), recipe, roofs, Use())
    up = ((tokens, 2 * hidden, features), (tokens, features, 2 * hidden), (2 * hidden, features, tokens))
    return Case(
        name=f"{name} MLP M={tokens} {model} {shapes.text(unit)}",
        group=GROUP,
        format=name,
        axis="",
        shape=(tokens, features, hidden),
        make=lambda device: (make_batch(plain_unit(unit, device), tokens, (features, features), device),),
        another=_another,
        run=functools.partial(step, main, 1),
        backend=lambda _: backends(recipe, extent.device, up),
        check=checker(main, judge, GATES[name], memory_ways(main, others), _HOW),
        # input and gradient, weights and theirs, and gates, ups and their product each way
        bytes=2 * (4 * tokens * features + 6 * features * hidden + 6 * tokens * hidden),
        peers=peers(main, others, unit, extent.peers, judge, min(GATES[name])),
        flops=3 * 2 * tokens * 3 * features * hidden,
        bound_us=details.pop("bound_us", None),
        captured=False,
        details=details,
    )


_HOW = "y, dX and every dW against the exact MLP, all values in two runs"


def plain_unit(unit: Unit, device: torch.device) -> GatedUnit:
    """The MLP in bf16 with normal weights."""
    features, hidden = unit
    return GatedUnit(
        normal_linear(features, hidden, device),
        normal_linear(features, hidden, device),
        normal_linear(hidden, features, device),
    )


def ours(recipe: Recipe) -> Build:
    """Our MLP with the values of the plain one: gates first, then ups, in one weight."""

    def build(plain: nn.Module) -> nn.Module:
        gate, up, down = plain.children()
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        return SwiGLU.from_linears(gate, up, down, recipe, name="bench.mlp")

    return build


def judge(batch: Batch, results: Results) -> tuple[float, float, float]:
    """SQNR of output, dX and the worst dW against the MLP in fp64.

    Gradients of gate, up and down lie one after the other in either form.
    """
    plain = batch.forms.plain
    weights = [weight.detach().double().requires_grad_() for weight in plain.parameters()]
    x = batch.x.detach().double().requires_grad_()
    gate, up, down = weights
    y = functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)
    dx, *dws = torch.autograd.grad(y, (x, *weights), batch.dy.double())
    found = torch.cat([tensor.flatten() for tensor in results.dw]).split([dw.numel() for dw in dws])
    worst = min(sqnr_db(dw.flatten(), mine) for dw, mine in zip(dws, found, strict=True))
    return sqnr_db(y.detach(), results.y), sqnr_db(dx, results.dx), worst


def _another(batch: Batch) -> Args:
    return (batch.another(),)
