"""Experts of a mixture-of-experts layer: grouped products over groups of any size, an empty one included.

Group ends stay on the device. Callers never pad: the cast that contracts tokens starts every group at a block of its
own, and `scaled_grouped_mm` takes the original ends.

    python examples/grouped_experts.py
"""

import torch

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db


def main() -> dict[str, float]:
    """Signal to noise of forward and weight gradient against fp64, in dB."""
    torch.manual_seed(0)
    sizes = torch.tensor([70, 0, 1, 129])  # tokens per expert, chosen by a router
    offs = sizes.cumsum(0).to(torch.int32)
    tokens, n, k = int(offs[-1]), 96, 256
    x, w, dy = torch.randn(tokens, k), torch.randn(len(sizes), n, k), torch.randn(tokens, n)

    y = bs.scaled_grouped_mm(bs.quantize(x, "mxfp8_e4m3"), bs.quantize(w, "mxfp8_e4m3"), offs)
    x_col = bs.quantize(x, "mxfp8_e4m3", axis=-2, offs=offs)
    dy_col = bs.quantize(dy, "mxfp8_e4m3", axis=-2, offs=offs)
    dw = bs.scaled_grouped_mm(dy_col.mT, x_col.mT, offs, torch.float32)

    expert = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    y_exact = torch.einsum("tk,tnk->tn", x.double(), w.double()[expert])
    parts = zip(dy.double().split(sizes.tolist()), x.double().split(sizes.tolist()), strict=True)
    dw_exact = torch.stack([a.mT @ b for a, b in parts])
    figures = {"forward": sqnr_db(y_exact, y).item(), "weight gradient": sqnr_db(dw_exact, dw).item()}
    for name, figure in figures.items():
        print(f"{name}: {figure:.1f} dB")
    print(f"gradient of the expert without tokens: {dw[1].abs().max().item()}")
    return figures


if __name__ == "__main__":
    main()
