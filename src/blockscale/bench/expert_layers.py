"""Timed layers of experts: bf16 as written in torch, ours with the same parameters, torchao's; and their SQNR against
the exact layer.

A layer here includes the group sizes, so that it is called with rows alone, as `layers.py` expects. Accuracy is
computed on some experts, each as a whole; for a mixture with router on all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from ..autograd.recipe import Recipe
from ..autograd.routing import combine, permute, route
from ..formats.stochastic import rng_state
from ..nn import GroupedExperts, GroupedLinear, MoE
from ..nn.moe import Router
from .gemms import spread, sqnr_db
from .grouped import ends_of, pick_groups
from .layers import Batch, Build, Results, normal
from .peers import torchao
from .shapes import Mixture

# experts and rows of each for the accuracy of a grouped linear, and experts for that of SwiGLU units
LINEARS, ROWS, UNITS = 8, 32, 4
# row multiple of a group that torchao's grouped GEMMs need, by kind
_PADDED = {"blockwise": 128, "rowwise": 16}


# ---- in bf16 ---------------------------------------------------------------------------------------------------------


class PlainLinear(nn.Module):
    """Grouped linear in bf16: rows of expert e times weight[e].mT, by torch's grouped GEMM."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = Parameter(weight)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return functional.grouped_mm(x, self.weight.mT, offs=offs)


class PlainExperts(nn.Module):
    """SwiGLU experts in bf16, down(silu(gate(x)) * up(x)) each, gate and up in one GEMM."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = PlainLinear(gate_up), PlainLinear(down)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        gate, up = self.gate_up(x, offs).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up, offs)


class PlainMixture(nn.Module):
    """bf16 experts with a router; permute and combine are ours."""

    def __init__(self, router: Router, experts: PlainExperts, top_k: int) -> None:
        super().__init__()
        self.router, self.experts, self.top_k = router, experts, top_k

    def forward(self, x: Tensor) -> Tensor:
        routing, weights = route(self.router(x), self.top_k, normalize=True)
        return combine(self.experts(permute(x, routing), routing.offs), routing, weights)


class InGroups(nn.Module):
    """A layer of experts with fixed group sizes, called with rows alone."""

    offs: Tensor

    def __init__(self, layer: nn.Module, sizes: tuple[int, ...], offs: Tensor) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes
        self.register_buffer("offs", offs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.offs)


def plain_linear(sizes: tuple[int, ...], k: int, n: int, device: torch.device) -> InGroups:
    """A grouped layer in bf16 with normal weights."""
    return InGroups(PlainLinear(_weights(len(sizes), n, k, device)), sizes, ends_of(sizes, device))


def plain_experts(sizes: tuple[int, ...], features: int, hidden: int, device: torch.device) -> InGroups:
    """Experts in bf16 with normal weights."""
    return InGroups(_units(len(sizes), features, hidden, device), sizes, ends_of(sizes, device))


def plain_mixture(mixture: Mixture, device: torch.device) -> PlainMixture:
    """A router and experts in bf16 with normal weights."""
    router = Router(mixture.features, mixture.experts, "meta")
    router.weight = Parameter(_weights(1, mixture.experts, mixture.features, device)[0])
    return PlainMixture(router, _units(mixture.experts, mixture.features, mixture.hidden, device), mixture.top_k)


def _units(experts: int, features: int, hidden: int, device: torch.device) -> PlainExperts:
    return PlainExperts(_weights(experts, 2 * hidden, features, device), _weights(experts, features, hidden, device))


def _weights(experts: int, n: int, k: int, device: torch.device) -> Tensor:
    return normal((experts, n, k), device).mul_(k**-0.5)


# ---- ours ------------------------------------------------------------------------------------------------------------


def our_linear(recipe: Recipe) -> Build:
    """Our grouped layer with the parameters of the plain one."""

    def build(plain: Any) -> nn.Module:
        weight = plain.layer.weight
        experts, n, k = weight.shape
        state = rng_state(0, device=weight.device)  # for recipes with stochastic rounding
        layer = GroupedLinear(experts, k, n, False, "meta", recipe=recipe, name="bench.grouped", rng=state)
        layer.weight = weight
        return InGroups(layer, plain.sizes, plain.offs)

    return build


def our_experts(recipe: Recipe) -> Build:
    """Our experts with the parameters of the plain ones."""

    def build(plain: Any) -> nn.Module:
        layer = _share(GroupedExperts(**_sizes(plain.layer, recipe)), plain.layer)
        return InGroups(layer, plain.sizes, plain.offs)

    return build


def our_mixture(recipe: Recipe) -> Build:
    """Our mixture with the parameters of the plain one."""

    def build(plain: Any) -> nn.Module:
        moe = MoE(**_sizes(plain.experts, recipe), top_k=plain.top_k)
        moe.router.weight = plain.router.weight
        _share(moe.experts, plain.experts)
        return moe

    return build


def _sizes(plain: PlainExperts, recipe: Recipe) -> dict[str, Any]:
    weight = plain.down.weight
    experts, dim, hidden = weight.shape
    state = rng_state(0, device=weight.device)
    sizes = {"experts": experts, "dim": dim, "hidden": hidden}
    return {**sizes, "device": "meta", "recipe": recipe, "name": "bench", "rng": state}


def _share(ours: GroupedExperts, plain: PlainExperts) -> GroupedExperts:
    ours.gate_up.weight, ours.down.weight = plain.gate_up.weight, plain.down.weight
    return ours


# ---- torchao ---------------------------------------------------------------------------------------------------------


class _Torchao(nn.Module):
    """A grouped linear by one of torchao's GEMMs that cast their inputs; unaligned groups are padded."""

    def __init__(self, weight: Parameter, product: Callable[..., Tensor], *, pads: bool) -> None:
        super().__init__()
        self.weight, self.product, self.pads = weight, product, pads

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.product(x, self.weight.mT, offs, pad_token_groups_for_grouped_mm=self.pads)


def torchao_linear(kind: str) -> Build:
    """torchao's grouped layer, `blockwise` or `rowwise`."""
    file = {"blockwise": "blockwise_fp8.grouped_mm", "rowwise": "fp8_grouped_mm"}[kind]

    def build(plain: Any) -> nn.Module:
        product = getattr(torchao(f"moe_training.{file}"), f"_to_fp8_{kind}_then_scaled_grouped_mm")
        pads = any(size % _PADDED[kind] for size in plain.sizes)
        return InGroups(_Torchao(plain.layer.weight, product, pads=pads), plain.sizes, plain.offs)

    return build


# ---- accuracy --------------------------------------------------------------------------------------------------------


def judge_linear(batch: Batch, results: Results) -> tuple[float, ...]:
    """SQNR of output, dX and dW against the layer in fp64, on some rows of some experts; of the output alone after a
    forward."""
    plain: Any = batch.built.plain

    def of(group: int, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        weight, x, dy = plain.layer.weight[group].double(), batch.x[start:end], batch.dy[start:end]
        rows, features = (spread(count, ROWS, x.device) for count in (end - start, weight.shape[0]))
        y = (x[rows].double() @ weight.mT, results.y[start + rows])
        if not results.dw:
            return [y]
        dx = (dy[rows].double() @ weight, results.dx[start + rows])
        return [y, dx, (dy[:, features].double().mT @ x.double(), results.dw[0][group, features])]

    with torch.no_grad():
        return _decibels([of(*span) for span in _spans(plain, LINEARS)])


def judge_experts(batch: Batch, results: Results) -> tuple[float, float, float]:
    """SQNR of output, dX and the worse weight gradient against the experts in fp64, some of them as a whole."""
    plain: Any = batch.built.plain
    weights = list(plain.layer.parameters())

    def of(group: int, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        leaves = [_leaf(each) for each in (batch.x[start:end], weights[0][group], weights[1][group])]
        y = _exact_unit(*leaves)
        exact = y.detach(), *torch.autograd.grad(y, leaves, batch.dy[start:end].double())
        found = results.y[start:end], results.dx[start:end], *(dw[group] for dw in results.dw)
        return list(zip(exact, found, strict=True))

    y_db, dx_db, *dw_db = _decibels([of(*span) for span in _spans(plain, UNITS)])
    return y_db, dx_db, min(dw_db)


def judge_mixture(batch: Batch, results: Results) -> tuple[float, float, float]:
    """SQNR of output, dX and the worst weight gradient against the mixture in fp64, with the router's choice."""
    plain = batch.built.plain
    assert isinstance(plain, PlainMixture)
    with torch.no_grad():
        chosen = torch.topk(plain.router(batch.x), plain.top_k, dim=-1).indices
    x, router, gate_up, down = (_leaf(each) for each in (batch.x, *plain.parameters()))
    weights = functional.linear(x, router).softmax(-1).gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        rows = _exact_unit(x[tokens], gate_up[expert], down[expert])
        y = y.index_add(0, tokens, weights[tokens, slots, None] * rows)
    dx, *dws = torch.autograd.grad(y, (x, router, gate_up, down), batch.dy.double())
    worst = min(sqnr_db(dw, mine) for dw, mine in zip(dws, results.dw, strict=True))
    return sqnr_db(y.detach(), results.y), sqnr_db(dx, results.dx), worst


def _exact_unit(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def _spans(plain: InGroups, most: int) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of some experts that have rows."""
    ends = list(itertools.accumulate(plain.sizes))
    return [(group, ends[group] - plain.sizes[group], ends[group]) for group in pick_groups(plain.sizes, most)]


def _decibels(pairs: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> tuple[float, ...]:
    """SQNR of each output over all experts.  pairs: (exact, found) of each output, expert by expert."""
    return tuple(
        sqnr_db(*(torch.cat([pair[side].flatten() for pair in output]) for side in (0, 1)))
        for output in zip(*pairs, strict=True)
    )
