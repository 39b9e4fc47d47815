"""FP4 gradients the NVFP4 way: a Hadamard rotation against outliers and stochastic rounding against bias.

Both operands of a product are rotated, so the rotation cancels; random numbers come from a counter, so the same seed
and tick give the same bytes on any machine, and the average over ticks approaches the unrounded value.

    python examples/fp4_gradients.py
"""

import torch

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db


def main() -> dict[str, float]:
    """SQNR of one stochastic cast and of the mean of many, in dB."""
    torch.manual_seed(0)
    dy, x = torch.randn(256, 64), torch.randn(256, 96)
    exact = dy.double().mT @ x.double()
    state = bs.rng_state(seed=1234)
    spec = bs.CastSpec(
        "nvfp4",
        scale_rule="up",  # nothing clips, so the rounding is unbiased
        rounding=bs.Stochastic(state, name="layers.0.mlp.down_proj"),
        hadamard=True,
        role="wgrad_dy",
    )
    x_col = bs.quantize(x, "nvfp4", axis=-2, hadamard=True).mT
    total, ticks = torch.zeros(64, 96), 64
    figures: dict[str, float] = {}
    for tick in range(ticks):
        state[1] = tick  # new tick, new random numbers; the seed stays
        product = bs.scaled_mm(bs.quantize(dy, spec, axis=-2).mT, x_col, torch.float32)
        total += product
        if tick == 0:
            figures["one tick"] = sqnr_db(exact, product).item()
    rotated_x = bs.dequantize(x_col.mT, torch.float32).double()
    figures["mean of 64 ticks, x as cast"] = sqnr_db(dy.double().mT @ rotated_x, total / ticks).item()
    for name, figure in figures.items():
        print(f"{name}: {figure:.1f} dB")
    return figures


if __name__ == "__main__":
    main()
