"""Blackwell GEMM in the interpreter against the exact product; a program: the interpreter is chosen at import.

    TRITON_INTERPRET=1 python tests/gemm/interpreted_blackwell.py

Same output and bounds as `interpreted.py`. `tests/support/interpreter.py` supplies `tl.dot_scaled`. Triton's own:
TMA loads with zeros outside an operand, unpacking of scale tiles, rasterisation, the epilogue.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from interpreted import main, operands, poisoned  # before blockscale: it poisons outputs

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

import blockscale as bs
from blockscale.formats import BlockScaled
from blockscale.gemm import _blackwell
from blockscale.registry import kernel, kernels
from support import interpreter

# tails in every direction, an odd K, one value, several tiles each way with a tail, whole tiles
SIZES = ((33, 70, 150), (5, 66, 257), (1, 1, 1), (140, 300, 330), (128, 256, 512))
# FP4 beside FP8: K in multiples of 128
MIXED = ((33, 70, 128), (140, 130, 384))
ENTRY = next(entry for entry in kernels("gemm") if entry.launch is _blackwell.scaled_mm_sm100)


@kernel(
    "gemm",
    "interpreted",
    devices=("cpu",),
    formats=ENTRY.formats,
    layouts=ENTRY.layouts,
    reject=ENTRY.reject,
    forced_only=True,
)
def scaled_mm(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Wide tiles; narrow ones for fp32, as on sm_120."""
    tile = _blackwell.tile_for_sm100(a, b, out.dtype, 1)
    assert (tile.bn == 128) == (out.dtype == torch.float32)
    _blackwell.launch_gemm(a, b, out, bias, accumulate=accumulate, tile=tile)


def unaligned(q: BlockScaled) -> BlockScaled:
    """The operand with rows of codes that are not aligned to 16 bytes."""
    codes = q.data.view(torch.uint8).clone(memory_format=torch.contiguous_format)
    assert codes.stride(0) % 16
    return replace(q, data=codes.view(q.data.dtype))


def cases() -> Iterator[tuple[str, BlockScaled, BlockScaled]]:
    for pair in sorted(ENTRY.formats):
        for size in MIXED if "mxfp4" in pair and pair[0] != pair[1] else SIZES:
            yield f"{pair} {size}", *operands(pair, *size)
    for name in ("mxfp8_e4m3", "mxfp8_e4m3_128x128", "mxfp4", "nvfp4", "nvfp4_16x16"):
        yield f"{name} blocked", *operands((name, name), 140, 130, 330, scale_layout="blocked")
        yield f"{name} unaligned", *map(unaligned, operands((name, name), 33, 70, 150))
    for name in ("mxfp4", "nvfp4"):
        yield f"{name} rotated", *operands((name, name), 33, 70, 150, hadamard=True)
    for name in ("mxfp8_e5m2", "mxfp4"):
        yield f"{name} with a NaN", *poisoned(name)
        x, w = (bs.quantize(torch.randn(150, size), name, axis=-2).mT for size in (33, 70))
        yield f"{name} transposed", x, w


if __name__ == "__main__":
    interpreter.install()
    raise SystemExit(main(cases(), "interpreted"))
