"""A byte-level GPT in plain torch with the linear layers under test, and a two-layer regression for quick tests.

Tensors between layers are fp32. Inputs and outputs of a tested layer are rounded to bf16, forward and backward, as in
any bf16 training, so that arms differ in their GEMMs only.
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
    """Size of a model and length of its training.  evaluated: bytes of each validation."""

    name: str
    layers: int
    width: int
    context: int
    sequences: int
    steps: int
    evaluated: int
    heads: int = 4
    rate: float = 3e-3


# full: minutes on a GPU; small: all arms in ten minutes on two cores; tiny: for tests
SIZES = {
    size.name: size
    for size in (
        Size("full", layers=4, width=96, context=128, sequences=16, steps=600, evaluated=32768),
        Size("small", layers=2, width=64, context=32, sequences=4, steps=120, evaluated=4096),
        Size("tiny", layers=1, width=64, context=32, sequences=4, steps=36, evaluated=2048, heads=2),
    )
}


class Edge(nn.Module):
    """A layer between two roundings to bf16. On a CPU the bf16 values are held in fp32: bf16 GEMMs take minutes on some
    CPUs."""

    def __init__(self, layer: nn.Module, *, rounds: bool) -> None:
        super().__init__()
        self.layer = layer
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        """fp32 [..., in] to fp32 [..., out]."""
        if not self.rounds:
            return self.layer(x)
        x = x.bfloat16()
        return self.layer(x if x.is_cuda else x.float()).bfloat16().float()


class Block(nn.Module):
    """Pre-norm block: attention, then an MLP, each added to the residual stream."""

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
        """[B, T, D] -> [B, T, D]."""
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
        """Mean nats per byte of sequences [B, T + 1]."""
        return functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Regression(nn.Module):
    """Least squares with two layers: a student fits a teacher of the same shape with noisy outputs.

    The noise is the lowest possible loss, so relative gaps are meaningful.
    """

    WIDTH, HIDDEN, NOISE = 64, 128, 0.3

    def __init__(self, linear: MakeLinear) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            linear(self.WIDTH, self.HIDDEN, "layers.0"), nn.GELU(), linear(self.HIDDEN, self.WIDTH, "layers.2")
        )

    def loss(self, seed: int) -> Tensor:
        """Mean squared error on 256 new pairs: a function of the seed, generated on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(256, self.WIDTH, generator=generator)
        noise = self.NOISE * torch.randn(256, self.WIDTH, generator=generator)
        teacher = torch.Generator().manual_seed(0)
        first = torch.randn(self.WIDTH, self.HIDDEN, generator=teacher) / self.WIDTH**0.5
        second = torch.randn(self.HIDDEN, self.WIDTH, generator=teacher) / self.HIDDEN**0.5
        device = next(self.parameters()).device
        return functional.mse_loss(self.layers(x.to(device)), (functional.gelu(x @ first) @ second + noise).to(device))
