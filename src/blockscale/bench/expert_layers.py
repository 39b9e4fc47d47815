"""Timed layers of experts: bf16 as written in torch, ours with the same parameters, torchao's.

A layer here includes the group sizes, so that it is called with rows alone, as `layers.py` expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from ..autograd.recipe import Recipe
from ..autograd.routing import combine, permute, route
from ..formats.stochastic import rng_state
from ..nn import GroupedExperts, GroupedLinear, MoE
from ..nn.moe import Router
from .grouped import ends_of
from .layers import Build, normal
from .peers import torchao
from .shapes import Mixture

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
