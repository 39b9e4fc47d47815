"""A linear layer by hand: the three products of training in DeepSeek-V3's FP8 recipe, from two casts of each tensor.

Each tensor is read once: `quantize_both` gives the operand for the product that contracts its last axis and the one
that contracts tokens. The errors printed at the end are those of the format, about 29 dB, not of the arithmetic.

    python examples/three_products.py
"""

import torch

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db


def main() -> dict[str, float]:
    """Signal to noise of the three products against fp64, in dB."""
    torch.manual_seed(0)
    tokens, n, k = 300, 256, 384
    x, w, dy = torch.randn(tokens, k), torch.randn(n, k), torch.randn(tokens, n)

    x_row, x_col = bs.quantize_both(x, "fp8_1x128", "fp8_1x128")
    dy_row, dy_col = bs.quantize_both(dy, "fp8_1x128", "fp8_1x128")
    w_row, w_col = bs.quantize_both(w, "fp8_128x128", "fp8_128x128")  # the same codes, stored both ways

    y = bs.scaled_mm(x_row, w_row)  # fprop contracts K
    dx = bs.scaled_mm(dy_row, w_col.mT)  # dgrad contracts N
    dw = bs.scaled_mm(dy_col.mT, x_col.mT, torch.float32)  # wgrad contracts tokens

    exact = {"fprop": (y, x.double() @ w.double().mT), "dgrad": (dx, dy.double() @ w.double())}
    exact["wgrad"] = (dw, dy.double().mT @ x.double())
    figures = {name: sqnr_db(want, got).item() for name, (got, want) in exact.items()}
    for name, figure in figures.items():
        print(f"{name}: {figure:.1f} dB")
    print(bs.explain("gemm", x_row, w_row))
    return figures


if __name__ == "__main__":
    main()
