"""One line converts a model: a tiny transformer learns to count, as it is and with its products in FP8.

The report lists the converted layers, and the others with the reason. Parameters, optimizer and checkpoints do not
change.

    python examples/convert_a_model.py
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import blockscale as bs

VOCABULARY, WIDTH, BLOCKS, STEPS = 64, 128, 2, 20


class Block(nn.Module):
    """Attention and a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.o_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        y = self.norm2(x)
        return x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Transformer(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def train(model: nn.Module) -> float:
    """The last loss; a sequence goes on from its first token, in steps of 1 to 4."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for step in range(STEPS):
        first, pace = torch.randint(VOCABULARY, (8, 1), generator=random), torch.randint(1, 5, (8, 1), generator=random)
        tokens = (first + pace * torch.arange(17)) % VOCABULARY
        bs.set_step_(model, step)  # for recipes that change at a step
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bs.advance_(model)  # new random numbers for stochastic rounding
    return loss.item()


def main() -> dict[str, float]:
    """How many layers were converted, and how far both losses fell."""
    torch.manual_seed(0)
    model = Transformer()
    plain = copy.deepcopy(model)
    report = bs.quantize_(model, "fp8_blockwise")
    print(report)
    start = torch.tensor(float(VOCABULARY)).log().item()
    falls = {"plain": start - train(plain), "fp8_blockwise": start - train(model)}
    for name, fall in falls.items():
        print(f"{name}: loss {start:.3f} -> {start - fall:.3f} in {STEPS} steps")
    bs.unquantize_(model)
    plain.load_state_dict(model.state_dict())  # the same names and tensors
    return {"converted": float(len(report.converted))} | falls


if __name__ == "__main__":
    main()
