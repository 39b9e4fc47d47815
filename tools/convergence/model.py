"""A byte-level GPT in plain torch whose inner linears are what is tested, and a two-layer regression for quick tests.

Tensors between layers are fp32. What enters and leaves a tested layer is rounded to bf16, forward and backward, as in
any bf16 training, so that arms differ in their products and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# (in, out, name) -> layer without bias
MakeLinear = Callable[[int, int, str], nn.Module]


@dataclass(frozen=True)
class Size:
    """A model and how long it is trained. evaluated: bytes of each validation."""

    name: str
    layers: int
    width: int
    context: int
    sequences: int
    steps: int
    evaluated: int
    heads: int = 4
    rate: float = 3e-3


# what a GPU does in minutes, what two cores do in ten minutes for all arms, and what a test can wait for
SIZES = {
    size.name: size
    for size in (
        Size("full", layers=4, width=96, context=128, sequences=16, steps=600, evaluated=32768),
        Size("small", layers=2, width=64, context=32, sequences=4, steps=120, evaluated=4096),
        Size("tiny", layers=1, width=64, context=32, sequences=4, steps=36, evaluated=2048, heads=2),
    )
}


class Edge(nn.Module):
    """A layer between two roundings to bf16. Values are those of bf16 on a CPU too, but held in fp32 there: not every
    CPU multiplies bf16 in less than minutes."""

    def __init__(self, layer: nn.Module, *, rounds: bool) -> None:
        super().__init__()
        self.layer = layer
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        """fp32 to fp32."""
        if not self.rounds:
            return self.layer(x)
        x = x.bfloat16()
        return self.layer(x if x.is_cuda else x.float()).bfloat16().float()


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm, added to the stream."""

    def __init__(self, size: Size, linear: MakeLinear, name: str) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = linear(width, 3 * width, f"{name}.qkv")
        self.out = linear(width, width, f"{name}.out")
        self.up = linear(width, 4 * width, f"{name}.up")
        self.down = linear(4 * width, width, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Bytes [B, T] to logits [B, T, 256]. Embedding, norms and head stay in fp32."""

    def __init__(self, size: Size, linear: MakeLinear) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size, linear, f"blocks.{place}") for place in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = self.embedding(text) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, text: Tensor) -> Tensor:
        """Mean nats per byte of pieces [B, T + 1]."""
        return functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Regression(nn.Module):
    """Least squares with two layers: a student of a teacher of its own shape, whose answers are noisy.

    The noise is the loss that nobody can get below, so relative gaps mean something.
    """

    WIDTH, HIDDEN, NOISE = 64, 128, 0.3

    def __init__(self, linear: MakeLinear) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            linear(self.WIDTH, self.HIDDEN, "layers.0"), nn.GELU(), linear(self.HIDDEN, self.WIDTH, "layers.2")
        )

    def loss(self, seed: int) -> Tensor:
        """Mean squared error on 256 fresh pairs: a function of the seed, made on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(256, self.WIDTH, generator=generator)
        noise = self.NOISE * torch.randn(256, self.WIDTH, generator=generator)
        teacher = torch.Generator().manual_seed(0)
        first = torch.randn(self.WIDTH, self.HIDDEN, generator=teacher) / self.WIDTH**0.5
        second = torch.randn(self.HIDDEN, self.WIDTH, generator=teacher) / self.HIDDEN**0.5
        device = next(self.parameters()).device
        return functional.mse_loss(self.layers(x.to(device)), (functional.gelu(x @ first) @ second + noise).to(device))
