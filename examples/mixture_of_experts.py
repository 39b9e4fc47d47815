"""A layer with experts learns the same task in high precision and by a recipe, router and balance included.

Each cluster of inputs has its own linear map, so that experts specialise; weights are cast once per optimizer step.

    python examples/mixture_of_experts.py
"""

import torch

import blockscale as bs
from blockscale.nn import MoE

DIM, HIDDEN, EXPERTS, CLUSTERS, STEPS = 64, 64, 8, 4, 60


def batch(generator: torch.Generator, centres: torch.Tensor, maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs around the centres of clusters, and their images under the clusters' maps."""
    cluster = torch.randint(CLUSTERS, (256,), generator=generator)
    x = centres[cluster] + torch.randn(256, DIM, generator=generator)
    return x, torch.einsum("tk,tnk->tn", x, maps[cluster])


def train(recipe: str) -> tuple[float, float]:
    """Factor by which the loss fell, and the final share of tokens of the busiest expert."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(CLUSTERS, DIM, generator=generator)
    maps = torch.randn(CLUSTERS, DIM, DIM, generator=generator) / DIM**0.5
    chosen = bs.get_recipe(recipe).replace(weight_cast="step")
    moe = MoE(
        dim=DIM, hidden=HIDDEN, experts=EXPERTS, top_k=2, shared=HIDDEN, scoring="sigmoid", balance=True, recipe=chosen
    )
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.01)
    bs.attach(optimizer, moe)
    losses, busiest = [], 0.0
    for _ in range(STEPS):
        x, target = batch(generator, centres, maps)
        loss = (moe(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert moe.load is not None
        busiest = float(moe.load.max() / moe.load.sum())
        moe.update_balance_(0.02)
        losses.append(loss.item())
    return losses[0] / losses[-1], busiest


def main() -> dict[str, float]:
    """How far losses fall in both precisions."""
    figures: dict[str, float] = {}
    for recipe in ("bf16", "fp8_blockwise"):
        figures[recipe], busiest = train(recipe)
        print(
            f"{recipe}: the loss fell {figures[recipe]:.1f} times; the busiest of {EXPERTS} had {busiest:.0%} of rows"
        )
    return figures


if __name__ == "__main__":
    main()
