"""Models that conversion meets: a small transformer with experts or without, and what tests ask of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

DIM, VOCABULARY = 64, 96


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.output = nn.Linear(DIM, DIM)  # in a block, so no head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.output(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, router: str) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP() for _ in range(24))
        self.router_name = router
        self.add_module(router, nn.Linear(DIM, 24, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        weights = getattr(self, self.router_name)(x).softmax(-1)
        return sum(weights[..., i : i + 1] * self.experts[i](x) for i in range(2))  # pyright: ignore[reportReturnType]


class Block(nn.Module):
    def __init__(self, router: str | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.mlp = MLP() if router is None else Experts(router)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 2, router: str | None = None, head: str = "lm_head", tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block(router) for _ in range(blocks))
        self.norm = nn.RMSNorm(DIM)
        self.head_name = head
        self.add_module(head, nn.Linear(DIM, VOCABULARY, bias=False))
        if tied:
            getattr(self, head).weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return getattr(self, self.head_name)(self.norm(x))


TOKENS = torch.arange(32).view(2, 16) % VOCABULARY


def made(seed: int = 0, **named) -> Model:
    torch.manual_seed(seed)
    return Model(**named)


def small() -> nn.Module:
    """Little enough to be compiled in a second."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), MLP())


def everything(module: nn.Module, name: str) -> bool:
    return True


def names(layers) -> set[str]:
    return {layer.name for layer in layers}


def loss_of(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(TOKENS).flatten(0, 1).float(), TOKENS.flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
